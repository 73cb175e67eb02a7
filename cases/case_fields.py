"""Define the plain values that operands read: the fields of a case, and the operands of its call.

A new optional operand adds a field to each. `cases.case.Case` and `cases.operand_values.Problem` add what follows from
the registries of operands, masks and storage forms.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np

from cases import counter_rng, moba_mask, quantization
from cases.masks import Mask
from cases.score_functions import Score, TableScore
from cases.storage_forms.mask_sides import find_kv_lengths
from cases.storage_forms.storage_layout import Storage

PHASES = ("train", "prefill", "decode")
DTYPES = ("f32", "bf16", "f16")
# Those of the last line make single roundings stand out, for the check `ensemble`.
DISTRIBUTIONS = (
    *("normal", "small", "large", "heavy", "dominant", "cancel", "ties", "knee", "huge", "levels", "low", "apart"),
    *("aligned", "opposed", "rising"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaseFields:
    """The fields of a case. Sizes are named as in the contract; `mask` is a mask spec (`cases.mask_spec`)."""

    phase: str = "train"
    dtype: str = "f32"
    batch: int = 1
    q_length: int = 128
    kv_length: int = 128
    num_q_heads: int = 2
    num_kv_heads: int = 2
    head_dim: int = 64
    v_head_dim: int = 64
    mask: str = "full"
    segments: str | None = None
    soft_cap: float | None = None
    sinks: bool | str = False
    bias: str | None = None
    scale: float | None = None
    kv_cache: str | None = None
    q_fp8: bool = False
    alibi: bool = False
    score: str | None = None
    logit_scale: bool = False
    dropout_rate: float | None = None
    storage: str | None = None
    front_end: str | None = None
    distribution: str = "normal"
    seed: int = 0

    @property
    def shape(self) -> str:
        """The shape, a component of the id."""
        return (
            f"B{self.batch}.T{self.q_length}.S{self.kv_length}.N{self.num_q_heads}.K{self.num_kv_heads}"
            f".H{self.head_dim}.V{self.v_head_dim}"
        )


@dataclasses.dataclass(frozen=True)
class CallOperands:
    """The operands of one attention call as NumPy arrays (docs/contract.md, section 1).

    If `scale` is None, the scale is `1 / sqrt(H)`. With `kv_scales`, k and v hold quantised numbers, and the keys and
    values are these numbers times the scales (`cases.quantization`). `storage` says where the operands lie in memory
    (`cases.storage_forms.storage_layout`): keys that share a place in memory are one key, and a sequence may have fewer
    than `T` queries. If `tied`, the values are the first `V` coordinates of k, whatever v was given, and the gradient
    of k includes that of the values. The terms of the operands `terms_after_cap` are added after the soft cap, which
    does not limit them; all other terms are added before it. The scale multiplies the `scaled_terms` too.

    With `dropout_rate`, an implementation drops weights at random (docs/contract.md, section 2). Which it drops is not
    known before it is called: `kept_pairs` is None until then. A call that takes a mask in place of a key gets
    `dropout_mask`, or if that is None `drawn_dropout_mask`.
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
    kv_scales: tuple[np.ndarray, np.ndarray] | None = None  # [B or 1, S or 1, K], [B, K], [] or [B, S, K, blocks]
    kv_global_scales: tuple[float, float] | None = None  # these multiply all keys and all values too
    kv_zeros: tuple[np.ndarray, np.ndarray] | None = None  # of the shapes of `kv_scales`; added to scaled numbers
    q_scale: float | None = None  # a call gets the float8_e4m3fn numbers `q / q_scale`, which are exact
    q_descale: np.ndarray | None = None  # [B, K], in place of `q_scale`: one for each sequence and key/value head
    computes_scales: bool = False  # whether a call computes `kv_scales` of new tokens itself, with errors of rounding
    alibi_slopes: np.ndarray | None = None  # [N]
    score_mod: Score | None = None
    score_table: np.ndarray | None = None  # [L, N], which `score_mod` captures if it is a `TableScore`
    logit_scale: np.ndarray | None = None  # [N]
    dropout_rate: float | None = None
    dropout_key: np.ndarray | None = None  # uint32 [2]
    dropout_mask: np.ndarray | None = None  # booleans [B or 1, N or 1, T, S], true where a weight is kept
    kept_pairs: np.ndarray | None = None  # booleans [B, N, T, S]
    storage: Storage | None = None
    tied: bool = False
    terms_after_cap: tuple[str, ...] = ()
    scaled_terms: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.storage is not None and self.storage.shares:
            for name in ("k", "v"):
                object.__setattr__(self, name, self.storage.settle(getattr(self, name)))
            if self.kv_scales is not None and self.kv_scales[0].ndim > 2:  # scales of tokens lie where their keys lie
                object.__setattr__(self, "kv_scales", tuple(map(self.storage.settle, self.kv_scales)))
            if self.kv_zeros is not None:
                object.__setattr__(self, "kv_zeros", tuple(map(self.storage.settle, self.kv_zeros)))
        if self.score_mod is not None:  # a score depends on the position of the last query
            # Functions of places get the positions of stored queries in their sequences.
            lengths = (self.q.shape[1], self.k.shape[1]) if self.storage is None else (0, 0)
            moved = self.score_mod.align_to(*lengths)
            object.__setattr__(self, "score_mod", moved)
        if not isinstance(self.score_mod, TableScore):
            object.__setattr__(self, "score_table", None)
        if self.tied:
            object.__setattr__(self, "v", self.k[..., : self.v.shape[-1]])

    @functools.cached_property
    def places(self) -> np.ndarray:
        """The place of each query for functions of places, `[B or 1, T]`: an index, or for stored ones a position."""
        q_length = self.q.shape[1]
        if self.storage is None:
            return np.arange(q_length)[None]
        ends = find_kv_lengths(self.mask, self.q.shape[0], self.k.shape[1])
        return np.array(ends)[:, None] - q_length + np.arange(q_length)

    @property
    def has_whole_scales(self) -> bool:
        """Whether all keys share one scale and all values another, so that the call gets the scales as numbers."""
        return self.kv_scales is not None and all(x.ndim == 0 for x in self.kv_scales)

    @property
    def drawn_dropout_mask(self) -> np.ndarray:
        """The mask that rate and key give, booleans `[B, N, T, S]`, true where a weight is kept."""
        assert self.dropout_rate is not None
        assert self.dropout_key is not None
        seed = int(self.dropout_key[0]) << 32 | int(self.dropout_key[1])
        shape = (self.q.shape[0], self.q.shape[2], self.q.shape[1], self.k.shape[1])
        return counter_rng.draw_uniform(seed, "dropout_mask", shape) >= self.dropout_rate

    @functools.cached_property
    def keys(self) -> np.ndarray:
        """The keys, dequantised, in float64."""
        return self._dequantize(self.k, 0)

    @functools.cached_property
    def values(self) -> np.ndarray:
        """The values, dequantised, in float64."""
        return self._dequantize(self.v, 1)

    def _dequantize(self, stored: np.ndarray, side: int) -> np.ndarray:
        """Return stored numbers times their scales, if they have any, in float64; `side` is 1 for values."""
        if self.kv_scales is None:
            return stored.astype(np.float64)
        factor = 1.0 if self.kv_global_scales is None else self.kv_global_scales[side]
        zeros = None if self.kv_zeros is None else self.kv_zeros[side]
        return quantization.dequantize(stored, self.kv_scales[side], factor, zeros)

    @functools.cached_property
    def sizes_with_zeros(self) -> tuple[np.ndarray, np.ndarray] | None:
        """The magnitudes of scaled keys plus those of their zero points, and of values likewise; None without these."""
        if self.kv_scales is None or self.kv_zeros is None:
            return None
        k, v = (
            np.abs(quantization.dequantize(x, scales)) + np.abs(quantization.spread_scales(zeros, x.shape[-1]))
            for x, scales, zeros in zip((self.k, self.v), self.kv_scales, self.kv_zeros, strict=True)
        )
        return k, v

    @property
    def effective_scale(self) -> float:
        """The fixed factor of `<q, k>`."""
        return 1 / math.sqrt(self.q.shape[-1]) if self.scale is None else self.scale

    @functools.cached_property
    def resolved_mask(self) -> Mask:
        """The mask after all choices that depend on q and k have been made (`cases.moba_mask.resolve_choices`)."""
        return moba_mask.resolve_choices(self.mask, self.q, self.k if self.kv_scales is None else self.keys)

    @functools.cached_property
    def allowed(self) -> np.ndarray:
        """The pairs that may attend, by mask and segment ids: booleans `[B or 1, N or 1, T, S]`."""
        allowed = self.resolved_mask.dense(self.q.shape[1], self.k.shape[1])
        if self.segment_ids is not None:
            allowed = allowed & _find_equal_segments(self.segment_ids)
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
        """Keys that no query of any sequence may attend to, booleans `[B, S, K]`."""
        seen = self._reduce_to_kv_heads(self.allowed)
        return np.logical_not(seen if self.storage is None else self.storage.spread_over_shared(seen))

    @functools.cached_property
    def unread_keys(self) -> np.ndarray:
        """Dead keys that do not influence which keys a MoBA mask chooses either, booleans `[B, S, K]`."""
        return self.dead_keys & ~self._reduce_to_kv_heads(self.choosing)

    @functools.cached_property
    def choosing(self) -> np.ndarray:
        """Whether key `j` influences which keys a MoBA mask chooses for query `i`, booleans `[1, 1, T, S]`."""
        chosen = [choice.choosing for choice in moba_mask.list_choices(self.resolved_mask)]
        none = np.zeros((1, 1, self.q.shape[1], self.k.shape[1]), bool)
        return functools.reduce(np.logical_or, chosen, none)

    @functools.cached_property
    def decided(self) -> np.ndarray:
        """Queries for which no rounding can change which keys a MoBA mask chooses, booleans `[B, N, T]`."""
        every = np.ones((self.q.shape[0], self.q.shape[2], self.q.shape[1]), bool)
        return functools.reduce(np.logical_and, (c.decided for c in moba_mask.list_choices(self.resolved_mask)), every)

    def _reduce_to_kv_heads(self, pairs: np.ndarray) -> np.ndarray:
        """Return which keys occur in `pairs [b, n, T, S]` for some query and head that reads them, `[B, S, K]`."""
        batch, kv_length, num_kv_heads, _ = self.k.shape
        seen = np.broadcast_to(np.any(pairs, axis=2), (batch, self.q.shape[2], kv_length))
        return np.moveaxis(np.any(seen.reshape(batch, num_kv_heads, -1, kv_length), axis=2), 1, 2)


def _find_equal_segments(segment_ids: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """Return whether each query and key have the same segment id, booleans `[B, 1, T, S]`."""
    q_ids, kv_ids = segment_ids
    found: np.ndarray = q_ids[:, None, :, None] == kv_ids[:, None, None, :]
    return found
