"""The operands of a case, drawn from its seed with the same bits everywhere.

Values are scaled so that everything that the case names matters: logits reach the soft cap, sinks carry about as much
weight as the keys, a custom scale does not flatten the softmax. The scaling uses the distribution's definition. It
never uses matrix products of the drawn values, whose last bit differs between machines.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from cases import distributions, front_ends, logit_terms, mask_spec, moba_mask, quantization
from cases.case import Case
from cases.counter_rng import draw_normal
from cases.masks import Mask, segment_labels
from cases.operand_registry import OPERANDS, PLACED
from cases.score_functions import CAPPING, Score
from cases.storage_forms.form_registry import FORMS
from cases.storage_forms.storage_layout import Storage

DTYPES: dict[str, np.dtype] = {
    "f32": np.dtype(np.float32),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f16": np.dtype(np.float16),
}

# Standard deviation of the logits before bias and soft cap, except where `_keys` shapes them itself.
_LOGIT_SPREAD = {"small": 0.3, "large": 4.0, "ties": 2.0, "dominant": 0.5}
# A tanh bends visibly from about half its cap on.
_SPREAD_PER_CAP = 0.6
# Queries that leave no choice in doubt are mostly found in the first or second draw; a few distributions take more.
_ATTEMPTS = 8
# Beyond the largest float16, 65504.
_HUGE_LOGIT = 6.6e4


@dataclasses.dataclass(frozen=True)
class Problem:
    """Operands of one attention call (docs/contract.md, section 1) as NumPy arrays; `scale=None` means `1 / sqrt(H)`.

    With `kv_scales`, those of k and of v, k and v are numbers as a cache stores them (`cases.quantization`). With
    `storage` all of it lies elsewhere (`cases.storage_forms.storage_layout`): keys that share a place are one, and a sequence may
    have fewer than `T` queries. With `tied` there are no values beside the keys: v is the first `V` coordinates of k,
    whatever v was given, and the gradient of k is that of both.
    """

    q: np.ndarray  # [B, T, N, H]
    k: np.ndarray  # [B, S, K, H]
    v: np.ndarray  # [B, S, K, V]
    mask: Mask
    segment_ids: tuple[np.ndarray, np.ndarray] | None = None  # [B, T], [B, S]
    soft_cap: float | None = None
    sinks: np.ndarray | None = None  # [N]
    bias: np.ndarray | None = None  # broadcastable to [B, N, T, S]
    scale: float | None = None
    kv_scales: tuple[np.ndarray, np.ndarray] | None = None  # [B or 1, S or 1, K] or []
    alibi_slopes: np.ndarray | None = None  # [N]
    score_mod: Score | None = None
    storage: Storage | None = None
    tied: bool = False

    def __post_init__(self) -> None:
        if self.storage is not None and self.storage.shares:
            for name in ("k", "v"):
                object.__setattr__(self, name, self.storage.settle(getattr(self, name)))
            if self.kv_scales is not None and not self.has_whole_scales:
                object.__setattr__(self, "kv_scales", tuple(map(self.storage.settle, self.kv_scales)))
        if self.score_mod is not None:  # it goes by where the last query stands
            moved = self.score_mod.between(self.q.shape[1], self.k.shape[1])
            object.__setattr__(self, "score_mod", moved)
        if self.tied:
            object.__setattr__(self, "v", self.k[..., : self.v.shape[-1]])

    @property
    def has_whole_scales(self) -> bool:
        """Whether all keys have one scale and all values one, which the call gets as numbers."""
        return self.kv_scales is not None and all(x.ndim == 0 for x in self.kv_scales)

    @functools.cached_property
    def keys(self) -> np.ndarray:
        """The keys that k stands for, in float64."""
        return _dequantize(self.k, None if self.kv_scales is None else self.kv_scales[0])

    @functools.cached_property
    def values(self) -> np.ndarray:
        """The values that v stands for, in float64."""
        return _dequantize(self.v, None if self.kv_scales is None else self.kv_scales[1])

    @property
    def effective_scale(self) -> float:
        """The factor that multiplies `<q, k>`."""
        return 1 / math.sqrt(self.q.shape[-1]) if self.scale is None else self.scale

    @functools.cached_property
    def alibi(self) -> np.ndarray | None:
        """What ALiBi adds to scaled logits, `-slope_n |i + S - T - j|`, `[N, T, S]` in float64; none without slopes."""
        if self.alibi_slopes is None:
            return None
        q_length, kv_length = self.q.shape[1], self.k.shape[1]
        distance = np.abs(np.arange(q_length)[:, None] + (kv_length - q_length) - np.arange(kv_length))
        return -self.alibi_slopes.astype(np.float64)[:, None, None] * distance

    @functools.cached_property
    def score(self) -> np.ndarray | None:
        """What a score by formula adds to scaled logits, `[B, N, T, S]` in float64; none if it adds nothing."""
        return None if self.score_mod is None or self.score_mod.caps else self._dense_score(self.score_mod)

    @functools.cached_property
    def soft_caps(self) -> float | np.ndarray | None:
        """The soft cap, `[B, N, T, S]` in float64 where it is a formula; none without one.

        Raises:
          ValueError: if there are two.
        """
        if self.score_mod is None or not self.score_mod.caps:
            return self.soft_cap
        if self.soft_cap is not None:
            raise ValueError(f"score_mod is a soft cap, and the problem has another, {self.soft_cap}")
        return self._dense_score(self.score_mod)

    def _dense_score(self, score: Score) -> np.ndarray:
        return score.dense(self.q.shape[0], self.q.shape[2], self.q.shape[1], self.k.shape[1])

    @property
    def is_positional(self) -> bool:
        """Whether an operand goes by where queries and keys stand: some of them alone are another problem."""
        return any(getattr(self, name) is not None for name in PLACED)

    @functools.cached_property
    def resolved_mask(self) -> Mask:
        """The mask, with the choices that q and k make where queries choose their keys (`cases.moba_mask.resolve_choices`)."""
        return moba_mask.resolve_choices(self.mask, self.q, self.k if self.kv_scales is None else self.keys)

    @functools.cached_property
    def allowed(self) -> np.ndarray:
        """Mask and segment ids together, booleans `[b, n, T, S]` with `b` and `n` 1 where nothing differs."""
        allowed = self.resolved_mask.dense(self.q.shape[1], self.k.shape[1])
        if self.segment_ids is not None:
            q_ids, kv_ids = self.segment_ids
            allowed = allowed & (q_ids[:, None, :, None] == kv_ids[:, None, None, :])
        if self.storage is not None:
            allowed = allowed & self.storage.present[:, None, :, None]
        return allowed

    @functools.cached_property
    def empty_rows(self) -> np.ndarray:
        """Queries that may attend to nothing, booleans `[B, N, T]`."""
        shape = (self.q.shape[0], self.q.shape[2], self.q.shape[1])
        return np.broadcast_to(np.logical_not(np.any(self.allowed, axis=-1)), shape)

    @functools.cached_property
    def dead_keys(self) -> np.ndarray:
        """Keys that no query may attend to, of whatever sequence, booleans `[B, S, K]`."""
        seen = self._reduce_to_kv_heads(self.allowed)
        return np.logical_not(seen if self.storage is None else self.storage.spread_over_shared(seen))

    @functools.cached_property
    def unread_keys(self) -> np.ndarray:
        """Dead keys that take no part in any query's choice of keys either, booleans `[B, S, K]`."""
        return self.dead_keys & ~self._reduce_to_kv_heads(self.choosing)

    @functools.cached_property
    def choosing(self) -> np.ndarray:
        """Whether key `j` takes part in the choice of query `i`, booleans `[1, 1, T, S]`."""
        chosen = [choice.choosing for choice in moba_mask.list_choices(self.resolved_mask)]
        none = np.zeros((1, 1, self.q.shape[1], self.k.shape[1]), bool)
        return functools.reduce(np.logical_or, chosen, none)

    @functools.cached_property
    def decided(self) -> np.ndarray:
        """Queries whose choice of keys no rounding can change, booleans `[B, N, T]`."""
        every = np.ones((self.q.shape[0], self.q.shape[2], self.q.shape[1]), bool)
        return functools.reduce(np.logical_and, (c.decided for c in moba_mask.list_choices(self.resolved_mask)), every)

    def _reduce_to_kv_heads(self, pairs: np.ndarray) -> np.ndarray:
        """Keys of some pair of `pairs [b, n, T, S]`, `[B, S, K]`."""
        batch, kv_length, num_kv_heads, _ = self.k.shape
        seen = np.broadcast_to(np.any(pairs, axis=2), (batch, self.q.shape[2], kv_length))
        return np.moveaxis(np.any(seen.reshape(batch, num_kv_heads, -1, kv_length), axis=2), 1, 2)

    def without(self, *operands: str) -> Problem:
        """The same problem without these optional operands."""
        changed: dict[str, Any] = dict.fromkeys(operands)
        return dataclasses.replace(self, **changed)

    def along(self, letter: str, change: Callable[[np.ndarray, int], np.ndarray]) -> Problem:
        """The problem with `change(array, axis)` in place of each array that differs along the axis `letter`.

        Of the operands alone (`cases.operand_registry`): the mask stays as it is.
        """
        changed = {o.name: o.along(getattr(self, o.name), letter, change) for o in OPERANDS}
        return dataclasses.replace(self, **changed)


@dataclasses.dataclass(frozen=True)
class Cotangent:
    """Cotangents of the outputs: `out [B, T, N, V]` in the operands' dtype, `logsumexp [B, N, T]` in f32 or none."""

    name: str
    out: np.ndarray
    logsumexp: np.ndarray | None = None


def _dequantize(stored: np.ndarray, scales: np.ndarray | None) -> np.ndarray:
    return stored.astype(np.float64) if scales is None else quantization.dequantize(stored, scales)


def draw_problem(case: Case) -> Problem:
    """The operands of `case`.

    Where queries choose their keys (`cases.moba_mask`), a case in which rounding could change a choice has more than one
    answer. So queries are drawn anew, a few times at most, until there is no such choice.
    """
    for attempt in range(_ATTEMPTS):
        problem = _draw_without_sinks(case, attempt)
        if problem.decided.all():
            break
    return dataclasses.replace(problem, sinks=_draw_sinks(case, problem.allowed)) if case.sinks else problem


def _draw_without_sinks(case: Case, attempt: int) -> Problem:
    """The operands without sinks; `attempt` chooses among queries."""
    dtype = DTYPES[case.dtype]
    if case.steps:
        operands = front_ends.apply_front_end(case.steps, draw_raw_projections(case, attempt))
    else:
        operands = _draw_queries_keys_values(case, attempt)
    q, k, v = (x.astype(dtype) for x in operands)
    mask = mask_spec.build_mask(case.mask, case.batch, case.num_q_heads, case.q_length, case.kv_length, case.seed)
    spread = _compute_logit_spread(case)
    scales = None
    if case.kv_cache is not None:
        (k, k_scales), (v, v_scales) = (quantization.quantize(x, case.kv_cache) for x in (k, v))
        scales = k_scales, v_scales
    return Problem(
        q=q,
        k=k,
        v=v,
        mask=mask,
        kv_scales=scales,
        segment_ids=segment_labels.draw_segment_ids(case, moba_mask.resolve_choices(mask, q, k)),
        soft_cap=case.soft_cap,
        bias=logit_terms.draw_bias(case, spread, dtype),
        scale=case.scale,
        alibi_slopes=logit_terms.draw_alibi_slopes(case, spread),
        score_mod=logit_terms.build_case_score(case, spread),
        storage=_draw_storage(case),
        tied=_has_tied_values(case),
    )


def _has_tied_values(case: Case) -> bool:
    return (spec := case.stored) is not None and FORMS[spec.form].is_tied


def _draw_storage(case: Case) -> Storage | None:
    """Draw where stored operands lie; None if all lie where the dense problem has them."""
    draw_layout = None if (spec := case.stored) is None else FORMS[spec.form].draw_layout
    return None if spec is None or draw_layout is None else draw_layout(case, spec)


def build_hollow_problem(case: Case) -> Problem:
    """The problem of a case whose operands are stored, with zeros that take no memory for all values but integers."""

    def zeros(*shape: int, dtype: Any = DTYPES[case.dtype]) -> np.ndarray:
        return np.broadcast_to(np.zeros((), dtype), shape)

    tokens = (case.batch, case.kv_length, case.num_kv_heads)
    held = DTYPES[case.dtype] if case.kv_cache is None else quantization.get_stored_dtype(case.kv_cache)
    whole = case.kv_cache in quantization.WHOLE_CACHES
    scales = np.ones((), np.float32) if whole else zeros(*tokens, dtype=np.float32)
    return Problem(
        q=zeros(case.batch, case.q_length, case.num_q_heads, case.head_dim),
        k=zeros(*tokens, case.head_dim, dtype=held),
        v=zeros(*tokens, case.v_head_dim, dtype=held),
        kv_scales=None if case.kv_cache is None else (scales, scales),
        mask=mask_spec.build_mask(case.mask, case.batch, case.num_q_heads, case.q_length, case.kv_length, case.seed),
        soft_cap=case.soft_cap,
        sinks=np.zeros(case.num_q_heads, np.float32) if case.sinks else None,
        scale=case.scale,
        storage=_draw_storage(case),
        tied=_has_tied_values(case),
    )


def draw_raw_projections(case: Case, attempt: int = 0) -> front_ends.Raw:
    """The raw projections from which the front end of `case` makes the operands."""
    dtype = DTYPES[case.dtype]
    q, k, v = (x.astype(dtype) for x in _draw_queries_keys_values(case, attempt))
    weights = {}
    if "rms" in case.steps:
        weights = {
            name: (1 + 0.25 * draw_normal(case.seed, name, (case.head_dim,))).astype(np.float32)
            for name in ("q_norm", "k_norm")
        }
    return front_ends.Raw(q, k, None if "shared" in case.steps else v, **weights)


def draw_cotangent(case: Case) -> Cotangent:
    """Random cotangents of `out` and `logsumexp`."""
    out = draw_normal(case.seed, "do", (case.batch, case.q_length, case.num_q_heads, case.v_head_dim))
    lse = draw_normal(case.seed, "dlse", (case.batch, case.num_q_heads, case.q_length))
    return Cotangent("random", out.astype(DTYPES[case.dtype]), lse.astype(np.float32))


def _compute_logit_spread(case: Case) -> float:
    spread = _LOGIT_SPREAD.get(case.distribution, 1.0)
    if case.soft_cap is None:
        return spread
    return case.soft_cap if case.distribution == "knee" else max(spread, _SPREAD_PER_CAP * case.soft_cap)


def _draw_queries_keys_values(case: Case, attempt: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q `[B, T, N, H]`, k `[B, S, K, H]`, v `[B, S, K, V]` in float64."""
    q = draw_normal(case.seed, f"q{attempt or ''}", (case.batch, case.q_length, case.num_q_heads, case.head_dim))
    k = draw_normal(case.seed, "k", (case.batch, case.kv_length, case.num_kv_heads, case.head_dim))
    v = draw_normal(case.seed, "v", (case.batch, case.kv_length, case.num_kv_heads, case.v_head_dim))
    scale = 1 / math.sqrt(case.head_dim) if case.scale is None else case.scale
    # The logits' spread is scale * sqrt(H) * magnitude(q) * magnitude(k); q and k share it evenly.
    magnitude = math.sqrt(_compute_logit_spread(case) / (scale * math.sqrt(case.head_dim)))
    q, k = q * magnitude, k * magnitude
    if case.distribution == "heavy":
        q, k, v = (distributions.make_heavy_tailed(case, name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    elif case.distribution == "dominant":
        k = distributions.add_dominant_keys(case, q, k, scale)
    elif case.distribution == "cancel":
        odd = k[:, 1::2].shape[1]
        k[:, 1::2] = k[:, 0::2][:, :odd]
        v[:, 1::2] = -v[:, 0::2][:, :odd] * (1 - 2**-6)
    elif case.distribution == "ties":
        # Three keys, again and again; one of them is zero, as padding often is.
        k[:, 2:3] = 0.0
        k = k[:, np.arange(case.kv_length) % min(3, case.kv_length)]
    elif case.distribution == "levels":
        q, k = distributions.lift_logits(case, q, k, scale)
    elif case.distribution == "huge":
        # One coordinate, the same in every key, lifts all logits of a query without touching their differences, and
        # lowers those of the next.
        k[..., 0], size = _compute_huge_coordinates(scale)
        q[..., 0] = np.where(np.arange(case.q_length) % 2, -size, size)[:, None]
    return q, k, v


def _compute_huge_coordinates(scale: float) -> tuple[float, float]:
    """First coordinate of k and q that lifts the logits to just above `_HUGE_LOGIT`, in bf16's 8 significant bits."""
    k = 2.0**11
    mantissa, exponent = math.frexp(_HUGE_LOGIT / (scale * k))
    return k, math.ldexp(math.ceil(mantissa * 256), exponent - 8)


def _draw_sinks(case: Case, allowed: np.ndarray) -> np.ndarray:
    """Sinks near the typical logsumexp of the keys alone, so that they take a visible part of the weight."""
    rows = max(1, int(allowed.any(axis=-1).sum()))
    keys = math.log(max(1.0, int(allowed.sum()) / rows))
    spread = _compute_logit_spread(case)
    typical = keys + spread**2 / 2 if spread < math.sqrt(2 * keys) else spread * math.sqrt(2 * keys)
    if case.score == CAPPING:
        typical = min(typical, max(2.0, spread))  # about where it bends
    if case.soft_cap is not None:
        # A cap below log(keys) leaves many keys of like weight; a higher one, the few largest.
        many = case.soft_cap < keys
        typical = keys + case.soft_cap / 2 if many else case.soft_cap * math.tanh(typical / case.soft_cap)
    if case.distribution == "huge":
        scale = 1 / math.sqrt(case.head_dim) if case.scale is None else case.scale
        typical += scale * math.prod(_compute_huge_coordinates(scale))
    rounded = round(typical * 16) / 16
    return (rounded + draw_normal(case.seed, "sinks", (case.num_q_heads,))).astype(np.float32)
