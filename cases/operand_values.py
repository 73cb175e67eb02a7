"""Draw the operands of a case (a `Problem`) and its cotangents from the case's seed, with the same bits everywhere.

Values are scaled so that everything in the case matters: logits reach the soft cap, sinks get about as much weight as
the keys, a custom scale does not flatten the softmax. The scaling follows from the distribution's definition. It never
uses matrix products of the drawn values, whose last bit differs between machines.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np

from cases import distributions, front_ends, mask_spec, quantization
from cases.case import Case
from cases.case_fields import CallOperands
from cases.counter_rng import draw_normal, draw_words
from cases.operand import LogitOperand
from cases.operand_registry import LOGIT_OPERANDS, OPERANDS, OPTIONAL, POSITIONAL
from cases.optional_operands.score_table_operand import draw_score_table
from cases.storage_forms.form_registry import FORMS
from cases.storage_forms.storage_layout import Storage

DTYPES: dict[str, np.dtype] = {
    "f32": np.dtype(np.float32),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f16": np.dtype(np.float16),
}

# Standard deviation of the logits before bias and soft cap; 1 for other distributions. Some distributions change the
# logits further.
_LOGIT_SPREAD = {"small": 0.3, "large": 4.0, "ties": 2.0, "dominant": 0.5}
# With a soft cap, the logits' standard deviation is at least this share of the cap: tanh bends from about half the cap.
_SPREAD_PER_CAP = 0.6
# The first or second draw mostly leaves no choice in doubt; a few distributions take more.
_ATTEMPTS = 8
_NEGATIVE_ZEROS = 29  # one in so many normal numbers of a cache is -0.0, whose sign a call that writes pages must keep


@dataclasses.dataclass(frozen=True)
class Problem(CallOperands):
    """The operands of one attention call, and how the optional operands among them change its logits."""

    @functools.cached_property
    def head_factors(self) -> dict[str, np.ndarray]:
        """The factors of `<q, k>` other than the scale, float64 `[N]` each, by name of the operand."""
        return {operand.name: operand.factor(self) for operand in self._iter_given() if operand.factor}

    @functools.cached_property
    def logit_terms(self) -> tuple[tuple[LogitOperand, np.ndarray], ...]:
        """The terms added to scaled logits: pairs of an operand and float64 values broadcastable to `[B, N, T, S]`."""
        found = ((operand, operand.term(self)) for operand in self._iter_given() if operand.term)
        return tuple((operand, term) for operand, term in found if term is not None)

    @functools.cached_property
    def soft_caps(self) -> float | np.ndarray | None:
        """The soft cap, a number or float64 `[B, N, T, S]`; None without one. Raises `ValueError` if there are two."""
        found = ((operand.name, operand.cap(self)) for operand in self._iter_given() if operand.cap)
        caps = {name: cap for name, cap in found if cap is not None}
        if len(caps) > 1:
            raise ValueError(f"a problem has one soft cap, this one has {' and '.join(caps)}")
        cap: float | np.ndarray | None = next(iter(caps.values()), None)
        return cap

    def _iter_given(self) -> Iterator[LogitOperand]:
        """Iterate over the optional operands that the problem has."""
        return (operand for operand in LOGIT_OPERANDS if getattr(self, operand.name) is not None)

    @property
    def is_positional(self) -> bool:
        """Whether an operand depends on positions, so that the results change if only some queries or keys are kept."""
        return any(getattr(self, name) is not None for name in POSITIONAL)

    def without(self, *operands: str) -> Problem:
        """Return the same problem without these optional operands."""
        changed: dict[str, Any] = dict.fromkeys(operands)
        return dataclasses.replace(self, **changed)

    def map_along(self, letter: str, change: Callable[[np.ndarray, int], np.ndarray]) -> Problem:
        """Replace each operand that varies along the axis `letter` by `change(array, axis)`; the mask stays."""
        changed = {o.name: o.map_along(getattr(self, o.name), letter, change) for o in OPERANDS}
        return dataclasses.replace(self, **changed)


@dataclasses.dataclass(frozen=True)
class Cotangent:
    """Cotangents of the outputs: `out [B, T, N, V]` in the operands' dtype, `logsumexp [B, N, T]` in f32 or None."""

    name: str
    out: np.ndarray
    logsumexp: np.ndarray | None = None


def draw_problem(case: Case) -> Problem:
    """Draw the operands of `case`.

    If queries choose their keys (`cases.moba_mask`) and rounding could change a choice, the case has more than one
    right result. Queries are therefore drawn again, a few times at most, until no rounding can change a choice.
    """
    for attempt in range(_ATTEMPTS):
        problem = _draw_required(case, attempt)
        if problem.decided.all():
            break
    return _draw_optional(case, problem)


def _draw_optional(case: Case, problem: Problem) -> Problem:
    """Draw the optional operands that the case has and the problem lacks."""
    spread = _compute_logit_spread(case)
    for operand in OPTIONAL:
        value = getattr(case, operand.field)
        if value != operand.absent and getattr(problem, operand.name) is None:
            drawn = value if operand.draw is None else operand.draw(case, problem, spread)
            problem = dataclasses.replace(problem, **{operand.name: drawn})
    return dataclasses.replace(problem, score_table=draw_score_table(case, problem))


def _draw_required(case: Case, attempt: int) -> Problem:
    """Draw q, k, v and the mask, with scales if k and v are quantised; each `attempt` gives other queries."""
    dtype = DTYPES[case.dtype]
    if case.steps:
        operands = front_ends.apply_front_end(case.steps, draw_raw_projections(case, attempt))
    else:
        operands = _draw_queries_keys_values(case, attempt)
    q, k, v = (x.astype(dtype) for x in operands)
    cache = None
    if case.kv_cache is None and case.distribution == "normal" and _is_cache(case):
        k.flat[::_NEGATIVE_ZEROS] = v.flat[::_NEGATIVE_ZEROS] = -0.0
    if case.kv_cache is not None:
        cache = quantization.quantize_cache(k, v, case.kv_cache, None if case.stored is None else case.stored.size)
        k, v = cache.k, cache.v
        if _has_tied_values(case):  # values are stored in keys, and share their scales
            cache = dataclasses.replace(cache, kv_scales=(cache.kv_scales[0],) * 2)
        if case.kv_cache in quantization.UNIT_CACHES:  # logits stay as they are with fitting scales
            given = quantization.quantize(operands[1].astype(dtype), case.kv_cache.replace("unit", "given"))[1]
            q = (q * dtype.type(2.0 ** round(math.log2(given)))).astype(dtype)
    q_scale, q_descale = None, None
    if case.q_fp8 and case.kv_cache in quantization.SEQUENCE_CACHES:
        q, q_descale = quantization.quantize_queries_by_sequence(q, case.num_kv_heads)
    elif case.q_fp8:
        q, q_scale = quantization.quantize_queries(q)
    return Problem(
        q=q,
        k=k,
        v=v,
        q_scale=q_scale,
        q_descale=q_descale,
        mask=mask_spec.build_mask(case.mask, case.batch, case.num_q_heads, case.q_length, case.kv_length, case.seed),
        kv_scales=None if cache is None else cache.kv_scales,
        kv_global_scales=None if cache is None else cache.kv_global_scales,
        kv_zeros=None if cache is None else cache.kv_zeros,
        computes_scales=case.kv_cache in quantization.COMPUTED_CACHES,
        dropout_rate=case.dropout_rate,
        dropout_key=None if case.dropout_rate is None else draw_dropout_key(case),
        storage=_draw_storage(case),
        tied=_has_tied_values(case),
    )


def draw_dropout_key(case: Case, number: int = 0) -> np.ndarray:
    """Draw the words of a JAX key, uint32 `[2]`; each `number` gives another key."""
    return draw_words(case.seed, f"dropout_key{number or ''}", 2)


def _has_tied_values(case: Case) -> bool:
    """Return whether the values are coordinates of the keys."""
    return (spec := case.stored) is not None and FORMS[spec.form].is_tied


def _is_cache(case: Case) -> bool:
    """Return whether the keys and values are stored in a cache."""
    return (spec := case.stored) is not None and FORMS[spec.form].is_cache


def _draw_storage(case: Case) -> Storage | None:
    """Draw where stored operands lie in memory; None if they lie as in the dense problem."""
    draw_layout = None if (spec := case.stored) is None else FORMS[spec.form].draw_layout
    return None if spec is None or draw_layout is None else draw_layout(case, spec)


def build_hollow_problem(case: Case) -> Problem:
    """Build the problem of a case without drawing queries, keys and values: they are zeros that take no memory."""

    def make_zeros(*shape: int, dtype: Any = DTYPES[case.dtype]) -> np.ndarray:
        return np.broadcast_to(np.zeros((), dtype), shape)

    tokens = (case.batch, case.kv_length, case.num_kv_heads)
    depths = (case.head_dim, case.v_head_dim)
    held = DTYPES[case.dtype] if case.kv_cache is None else quantization.get_stored_dtype(case.kv_cache)
    whole = quantization.has_whole_scales(case.kv_cache)
    by_sequence = (case.batch, case.num_kv_heads)
    is_by_sequence = case.kv_cache in quantization.SEQUENCE_CACHES
    shape = by_sequence if is_by_sequence else tokens
    scales: tuple[np.ndarray, np.ndarray] = (
        (np.ones((), np.float32),) * 2 if whole else (make_zeros(*shape, dtype=np.float32),) * 2
    )
    if case.kv_cache in quantization.BLOCK_CACHES:
        size, dtype = quantization.get_block_size(case.kv_cache), quantization.get_scale_dtype(case.kv_cache)
        k_scales, v_scales = (make_zeros(*tokens, depth // size, dtype=dtype) for depth in depths)
        scales = k_scales, v_scales
    if case.kv_cache in quantization.CHANNEL_CACHES:
        scales = make_zeros(*tokens, case.head_dim, dtype=np.float32), scales[1]
    problem = Problem(
        q=make_zeros(case.batch, case.q_length, case.num_q_heads, case.head_dim),
        k=make_zeros(*tokens, case.head_dim, dtype=held),
        v=make_zeros(*tokens, case.v_head_dim, dtype=held),
        kv_scales=None if case.kv_cache is None else scales,
        kv_zeros=scales if case.kv_cache in quantization.CHANNEL_CACHES else None,
        kv_global_scales=(1.0, 1.0) if case.kv_cache == "kvnvfp4-block" else None,
        q_scale=1.0 if case.q_fp8 and not is_by_sequence else None,
        q_descale=make_zeros(*by_sequence, dtype=np.float32) if case.q_fp8 and is_by_sequence else None,
        mask=mask_spec.build_mask(case.mask, case.batch, case.num_q_heads, case.q_length, case.kv_length, case.seed),
        storage=_draw_storage(case),
        tied=_has_tied_values(case),
    )
    return _draw_optional(case, problem)


def draw_raw_projections(case: Case, attempt: int = 0) -> front_ends.Raw:
    """Draw the raw projections from which the front end of `case` makes the operands."""
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
    """Draw random cotangents of `out` and `logsumexp`."""
    out = draw_normal(case.seed, "do", (case.batch, case.q_length, case.num_q_heads, case.v_head_dim))
    if case.distribution in ("aligned", "opposed"):
        out = distributions.make_cotangent_positive(case, out)
    lse = draw_normal(case.seed, "dlse", (case.batch, case.num_q_heads, case.q_length))
    return Cotangent("random", out.astype(DTYPES[case.dtype]), lse.astype(np.float32))


def _compute_logit_spread(case: Case) -> float:
    """Compute the standard deviation of the logits before bias and soft cap."""
    spread = _LOGIT_SPREAD.get(case.distribution, 1.0)
    if case.soft_cap is None:
        return spread
    return case.soft_cap if case.distribution == "knee" else max(spread, _SPREAD_PER_CAP * case.soft_cap)


def _draw_queries_keys_values(case: Case, attempt: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw q `[B, T, N, H]`, k `[B, S, K, H]` and v `[B, S, K, V]` in float64."""
    q = draw_normal(case.seed, f"q{attempt or ''}", (case.batch, case.q_length, case.num_q_heads, case.head_dim))
    k = draw_normal(case.seed, "k", (case.batch, case.kv_length, case.num_kv_heads, case.head_dim))
    v = draw_normal(case.seed, "v", (case.batch, case.kv_length, case.num_kv_heads, case.v_head_dim))
    scale = 1 / math.sqrt(case.head_dim) if case.scale is None else case.scale
    # The standard deviation of the logits is scale * sqrt(H) * magnitude(q) * magnitude(k); q and k get equal parts.
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
        # Three keys repeat; one of them is zero, as padding often is.
        k[:, 2:3] = 0.0
        k = k[:, np.arange(case.kv_length) % min(3, case.kv_length)]
    elif case.distribution == "levels":
        q, k = distributions.lift_logits(case, q, k, scale)
    elif case.distribution == "low":
        q, k = distributions.lower_logits(case, q, k, scale)
    elif case.distribution == "apart":
        q, k = distributions.move_logits_apart(case, q, k, scale)
    elif case.distribution == "aligned":
        k, v = distributions.align_values(case, k, v)
    elif case.distribution == "opposed":
        q, k, v = distributions.oppose_values(case, q, k, v)
        if _has_tied_values(case):
            q, k = distributions.write_values_into_keys(q, k, v)
    elif case.distribution == "rising":
        q, k = distributions.raise_logits(case, q, k, scale)
    elif case.distribution == "huge":
        # One coordinate is the same in every key. It lifts all logits of a query without changing their differences,
        # and lowers all logits of the next query.
        k[..., 0], size = distributions.compute_huge_coordinates(scale)
        q[..., 0] = np.where(np.arange(case.q_length) % 2, -size, size)[:, None]
    return q, k, v
