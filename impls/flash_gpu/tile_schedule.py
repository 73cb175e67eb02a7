"""Static plan and arrays of a call, and the list of tiles that each program visits. All kernels use them."""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Array, Float, Float32, Int, UInt32

from cases.masks import EMPTY, FULL, PARTIAL, Dense, Lengths, Mask, iter_leaves
from impls.flash_gpu.block_sizes import Axis, BlockSizes, Kernel, Tiles
from impls.flash_gpu.packed_visits import KeyRanges
from impls.jax_compat import Interpret
from impls.pallas_gpu.triton_tiles import round_up_to_tile


class Operands(NamedTuple):
    """Operands of the call, in the shapes of docs/contract.md, section 1. Packed sequences are one batch row."""

    q: Float[Array, "B T N H"]
    k: Float[Array, "B S K H"]
    v: Float[Array, "B S K V"]
    bias: Float[Array, "#B #N #T #S"] | None
    sinks: Float[Array, " N"] | None
    segment_ids: tuple[Int[Array, "B T"], Int[Array, "B S"]] | None
    ranges: KeyRanges | None = None  # keys that each query sees; only for packed sequences
    dropout_key: UInt32[Array, " 2"] | None = None


class Outputs(NamedTuple):
    """Results of the forward pass: the output and the residuals that callers may request."""

    out: Float[Array, "B T N V"]
    logsumexp: Float32[Array, "B N T"]
    max_logits: Float32[Array, "B N T"]


class QueryRows(NamedTuple):
    """Values per query that the backward pass needs beyond the operands."""

    d_out: Float[Array, "B T N V"]  # in q's dtype
    shift: Float32[Array, "B N T"]  # `logsumexp`, 0 for rows that attend to nothing
    row_sums: Float32[Array, "B N T"]  # `<out, d_out>` minus the cotangent of `logsumexp`


BlockKind = Literal["full", "partial"]
BLOCK_KINDS: tuple[BlockKind, BlockKind] = ("full", "partial")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlashGpuPlan:
    """Static part of one attention problem. Equal plans share one compiled function, so it is compared by value.

    `packed` says that the only batch row is a pack of sequences. Key ranges (`impls.flash_gpu.packed_visits`) then
    replace the mask. `mosaic` names the kernels that run on Mosaic GPU; the others run on Triton. `dead_keys_are_zero`
    says that keys and values which no query attends to were set to zero.
    """

    mask: Mask
    num_q_heads: int
    num_kv_heads: int
    q_length: int
    kv_length: int
    head_dim: int
    v_head_dim: int
    scale: float
    soft_cap: float | None
    segmented: bool
    exact: bool
    sizes: BlockSizes
    interpret: Interpret
    packed: bool = False
    mosaic: frozenset[Kernel] = frozenset()
    dead_keys_are_zero: bool = False
    dropout_rate: float | None = None  # None if no weight is dropped

    @property
    def name(self) -> str:
        """Name of the public call in messages."""
        return "flash_gpu_packed" if self.packed else "flash_gpu"

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.num_q_heads // self.num_kv_heads

    def unit(self, *, biased: bool) -> float:
        """Return the unit of the logits in the kernels: a logit is `unit` times the stored value.

        The unit is the scale if it is positive and only the mask follows it. Then the largest product is the largest
        logit, and the exponential applies the scale. Otherwise the unit is 1.
        """
        return self.scale if self.soft_cap is None and not biased and self.scale > 0 else 1.0

    @property
    def has_dead_keys(self) -> bool:
        """Whether there may be keys that no query attends to, which may be NaN. Segments and packing may cause any."""
        if self.dead_keys_are_zero:
            return False
        return self.segmented or self.packed or has_dead_keys(self.mask, self.q_length, self.kv_length)

    @property
    def head_tile(self) -> int:
        """Columns of a tile of q or k."""
        return round_up_to_tile(self.head_dim)

    @property
    def v_head_tile(self) -> int:
        """Columns of a tile of v or of the output."""
        return round_up_to_tile(self.v_head_dim)

    def build_visits(self, tiles: Tiles, axis: Axis) -> Visits:
        """List the blocks that each program of a kernel visits. A program owns one block along `axis`."""
        return _build_visits(self, tiles.block_q, tiles.block_kv, axis)

    def active(self, tiles: Tiles) -> np.ndarray:
        """Find the blocks that a program visits, since the mask hides them only in part or not at all.

        Returns:
          booleans `[b, n, q blocks, kv blocks]`; `b` and `n` are 1 or the full size.
        """
        kinds = _classify_blocks(self.mask, self.q_length, self.kv_length, tiles.block_q, tiles.block_kv)
        return np.asarray(kinds != EMPTY)

    @functools.cached_property
    def mask_arrays(self) -> dict[str, np.ndarray]:
        """Arrays of the mask's leaves that are not formulas, by name (`name_leaf`).

        Lengths are int32 `[B]`. Boolean masks `[b, n, T, S]` are int8, the dtype that tiles can load.
        """
        arrays: dict[str, np.ndarray] = {}
        for place, leaf in enumerate(iter_leaves(self.mask)):
            if isinstance(leaf, Lengths):
                arrays[name_leaf(place)] = np.asarray(leaf.lengths, np.int32)
            elif isinstance(leaf, Dense):
                arrays[name_leaf(place)] = leaf.array.astype(np.int8)
        return arrays


def name_leaf(place: int) -> str:
    """Name the array of the mask's leaf at this index of `cases.masks.iter_leaves`."""
    return f"mask_{place}"


@dataclasses.dataclass(frozen=True, eq=False)
class Visits:
    """Blocks that each program visits."""

    # `[b, n, programs, 4]` int32: first and count of the full blocks, then of the partial ones. "First" is a block, or
    # the start of the program's part of the list.
    table: np.ndarray
    # For each kind that some program visits, the blocks of all programs one after another. None if the blocks of every
    # program are contiguous, as under most masks. Then the kernel counts up from the first block, and its loads of the
    # next tile do not wait for an index.
    lists: dict[BlockKind, np.ndarray | None]


@functools.lru_cache(maxsize=256)
def _build_visits(plan: FlashGpuPlan, block_q: int, block_kv: int, axis: Axis) -> Visits:
    kinds = _classify_blocks(plan.mask, plan.q_length, plan.kv_length, block_q, block_kv)
    if plan.segmented:
        kinds = np.where(kinds == EMPTY, EMPTY, PARTIAL)
    if axis == "kv":
        # The last block needs no mask here: padding rows of k and v give rows of dk and dv that are not stored, and
        # padding rows of q and dout are zero.
        kinds = kinds.swapaxes(-1, -2)
    elif plan.kv_length % block_kv:
        kinds = kinds.copy()
        kinds[..., -1] = np.minimum(kinds[..., -1], PARTIAL)
    columns: list[np.ndarray] = []
    lists: dict[BlockKind, np.ndarray | None] = {}
    for name in BLOCK_KINDS:
        chosen = kinds == (FULL if name == "full" else PARTIAL)
        first, count, blocks = _list_blocks(chosen)
        columns += [first, count]
        if chosen.any():
            lists[name] = blocks
    return Visits(np.stack(columns, axis=-1), lists)


@functools.lru_cache(maxsize=256)
def _classify_blocks(mask: Mask, q_length: int, kv_length: int, block_q: int, block_kv: int) -> np.ndarray:
    return mask.blocks(q_length, kv_length, block_q, block_kv)


@functools.lru_cache(maxsize=256)
def has_dead_keys(mask: Mask, q_length: int, kv_length: int) -> bool:
    """Return whether some head of some batch row has a key that no query attends to. Works in strips of queries."""
    j = np.arange(kv_length)[None, :]
    seen = np.zeros((1, 1, kv_length), bool)
    # Backwards, since under causal masks the last query sees every key.
    for stop in range(q_length, 0, -_STRIP_LENGTH):
        i = np.arange(max(0, stop - _STRIP_LENGTH), stop)[:, None]
        strip = np.asarray(mask.allowed(i, j), bool).any(axis=-2)
        seen = seen | np.broadcast_to(strip, (*((1, 1) if strip.ndim == 1 else strip.shape[:2]), kv_length))
        if seen.all():
            return False
    return True


_STRIP_LENGTH = 128  # queries at a time, so that memory is not T * S


def _list_blocks(chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """List the chosen blocks of booleans `[b, n, programs, blocks]`: first, count and list, None if contiguous."""
    count = chosen.sum(axis=-1, dtype=np.int32)
    first = chosen.argmax(axis=-1).astype(np.int32)
    block = np.arange(chosen.shape[-1])
    if (chosen == ((block >= first[..., None]) & (block < (first + count)[..., None]))).all():
        return first, count, None
    starts = np.cumsum(count.ravel(), dtype=np.int32) - count.ravel()
    return starts.reshape(count.shape), count, np.nonzero(chosen)[-1].astype(np.int32)
