"""Plan a call of block flash attention before it is traced: sizes, blocks, and the pairs of blocks to compute."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import numpy as np

from cases.masks import EMPTY, FULL, And, Lengths, Mask, Or, iter_leaves


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlashSizes:
    """Sizes, block sizes, scale and soft cap: the part of a plan that dense and packed calls share."""

    num_q_heads: int
    num_kv_heads: int
    q_length: int
    kv_length: int
    block_q: int
    block_kv: int
    scale: float
    soft_cap: float | None

    def __post_init__(self) -> None:
        """Reject block sizes that are not positive."""
        for name, block in (("block_q", self.block_q), ("block_kv", self.block_kv)):
            if block <= 0:
                raise ValueError(f"{name} must be positive, got {block}")

    @property
    def num_q_blocks(self) -> int:
        """Number of blocks along the query axis; the last block may be padded."""
        return -(-self.q_length // self.block_q)

    @property
    def num_kv_blocks(self) -> int:
        """Number of blocks along the key axis; the last block may be padded."""
        return -(-self.kv_length // self.block_kv)

    @property
    def padded(self) -> bool:
        """Whether the last block of either axis is padded."""
        return bool(self.q_length % self.block_q or self.kv_length % self.block_kv)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockFlashPlan(FlashSizes):
    """Static part of one call, compared by value: equal plans share one compiled function."""

    mask: Mask
    masked_at_run_time: bool  # whether segment ids or a traced selection of keys mask in addition to `mask`
    score_mod: Any = None  # the operand score_mod without the arrays that it captures (`impls.captured_arrays`)
    dropout_rate: float | None = None  # None if no weight is dropped

    @functools.cached_property
    def schedule(self) -> Schedule:
        """The pairs of blocks to compute, with their masks."""
        return _build_schedule(self)


class PairIndices(NamedTuple):
    """Indices of pairs of blocks, `[P]` each, or of one pair inside the scan.

    `q` and `kv` are the indices of the blocks, and `stored` the index of the pair's mask in `Schedule.stored`. Indices
    are unsigned: for signed indices JAX adds code that wraps negative values around.
    """

    q: Any
    kv: Any
    stored: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """Active pairs of blocks: those with at least one allowed pair of positions in any batch row and head."""

    pairs: PairIndices  # q block, kv block and index in `stored` of each pair
    # Booleans `[X, b, n, block_q, block_kv]` of the pairs, None if the mask is a formula. Fully allowed pairs share one
    # entry.
    stored: np.ndarray | None
    masked: bool  # False if every pair is computed without a mask


def _build_schedule(plan: BlockFlashPlan) -> Schedule:
    blocks = plan.mask.blocks(plan.q_length, plan.kv_length, plan.block_q, plan.block_kv)  # [b, n, q blocks, kv blocks]
    full = (blocks == FULL).all(axis=(0, 1))
    active = np.argwhere((blocks != EMPTY).any(axis=(0, 1)))
    masked = plan.masked_at_run_time or plan.padded or not full[active[:, 0], active[:, 1]].all()
    place = np.zeros(len(active), np.uint32)
    stored = None
    if masked and not is_formula(plan.mask):
        partial = ~full[active[:, 0], active[:, 1]]
        place[partial] = 1 + np.arange(partial.sum())
        stored = np.ones((1 + partial.sum(), *blocks.shape[:2], plan.block_q, plan.block_kv), bool)
        for entry, (q_block, kv_block) in zip(stored[1:], active[partial], strict=True):
            i = np.arange(q_block * plan.block_q, min((q_block + 1) * plan.block_q, plan.q_length))[:, None]
            j = np.arange(kv_block * plan.block_kv, min((kv_block + 1) * plan.block_kv, plan.kv_length))[None, :]
            entry[:, :, : i.size, : j.size] = plan.mask.allowed(i, j)
    q_blocks, kv_blocks = active.T.astype(np.uint32)
    return Schedule(PairIndices(q_blocks, kv_blocks, place), stored, masked)


def is_formula(mask: Mask) -> bool:
    """Return whether `evaluate_mask` can compute `mask`, so that no block of it is stored."""
    return all(leaf.is_computed or isinstance(leaf, Lengths) for leaf in iter_leaves(mask))


def evaluate_mask(mask: Mask, i: Any, j: Any) -> Any:
    """Evaluate `mask` at `i [1, 1, block_q, 1]` and `j [1, 1, 1, block_kv]`: booleans `[b, 1, block_q, block_kv]`."""
    if isinstance(mask, And):
        return evaluate_mask(mask.left, i, j) & evaluate_mask(mask.right, i, j)
    if isinstance(mask, Or):
        return evaluate_mask(mask.left, i, j) | evaluate_mask(mask.right, i, j)
    if isinstance(mask, Lengths):
        return (i >= 0) & (j < np.asarray(mask.lengths, np.int32).reshape(-1, 1, 1, 1))
    return mask.allowed(i, j)
