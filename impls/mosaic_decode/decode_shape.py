"""Sizes of the Mosaic GPU decode kernel: tile, ring and shared memory; and the calls that it supports."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from impls.jax_compat import Interpret, get_device_kind
from impls.pallas_gpu.mosaic_tiles import LANES, ROWS, SHARED_MEMORY, find_compiler_limit, find_device_limit

TILE_KEYS = 64
"""Keys per tile."""
MAX_DEPTH = 256
"""Largest head depth of keys and of values: beyond it, the output in f32 leaves a thread too few registers."""
MIN_PAGE_ROWS = 8
"""Page sizes are multiples of this: the swizzled layout of shared memory has groups of 8 rows."""
MAX_SLOTS = 6
"""Most tiles in flight. It is reasoned, not measured: two programs of depth 64 then have 192 KiB in flight."""
QUANTIZED_DTYPES = ("int8", "float8_e4m3fn")
"""Dtypes of stored keys and values whose numbers bf16 and f16 hold exactly."""
_PROGRAMS_PER_MULTIPROCESSOR = 2
# CUDA reserves 1 KiB of shared memory for each block (CUDA C++ programming guide, "Compute capabilities").
_SHARED_MEMORY_OF_TWO = (SHARED_MEMORY + 1024) // 2 - 1024
_BARRIER_BYTES = 1024
_ALIGNMENT = 1024  # bytes; each buffer starts at a multiple


@dataclasses.dataclass(frozen=True)
class DecodeShape:
    """Static part of a launch. It also has what `impls.flash_gpu.mosaic.mosaic_tiles` needs to know of a call.

    Attributes:
      head_dim: depth of queries and keys.
      v_head_dim: depth of values.
      rows: rows of queries per tile that are copied in and out, a multiple of 8; the others are zeros.
      columns: programs per share, one for each set of query heads that is computed together.
      columns_per_head: columns of one key/value head.
      page_size: rows of a page.
      dtype: dtype of queries, in which tiles are multiplied.
      stored_dtype: dtype of keys and values, either `dtype` or one of `QUANTIZED_DTYPES`.
      scale: factor of `<q, k>`.
      soft_cap: bound of the logits; None without a soft cap.
      interpret: whether and how the kernel is interpreted.
    """

    head_dim: int
    v_head_dim: int
    rows: int
    columns: int
    columns_per_head: int
    page_size: int
    dtype: Any
    stored_dtype: Any
    scale: float
    soft_cap: float | None
    interpret: Interpret

    def unit(self, *, biased: bool) -> float:
        """Return the unit of the logits in the kernel, as `impls.flash_gpu.tile_schedule.FlashGpuPlan.unit` does."""
        return self.scale if self.soft_cap is None and not biased and self.scale > 0 else 1.0

    @property
    def copies(self) -> int:
        """Number of copies per tile of k: one for each page that the tile spans."""
        return max(1, TILE_KEYS // self.page_size)

    @property
    def rows_per_copy(self) -> int:
        """Rows of a page that one copy reads."""
        return min(TILE_KEYS, self.page_size)

    @property
    def slots(self) -> int:
        """Tiles of k and v in flight."""
        return count_slots(self.head_dim, self.v_head_dim, self.stored_dtype)[0]

    @property
    def is_quantized(self) -> bool:
        """Return whether keys and values are converted before they are multiplied."""
        return is_quantized(self.stored_dtype)


def is_quantized(stored_dtype: Any) -> bool:
    """Return whether keys and values of this dtype are converted before they are multiplied."""
    return str(jnp.dtype(stored_dtype)) in QUANTIZED_DTYPES


def count_slots(head_dim: int, v_head_dim: int, stored_dtype: Any) -> tuple[int, int]:
    """Count the slots of a program's ring, and the programs that fit a multiprocessor together.

    There are two programs if each of them has two slots: while one begins or ends, the other one reads.
    """
    pair = TILE_KEYS * (head_dim + v_head_dim)  # elements of a tile of k and one of v
    slot = pair * jnp.dtype(stored_dtype).itemsize
    # The queries, and the tiles that stored keys and values are converted to.
    others = ROWS * head_dim * 2 + (pair * 2 if is_quantized(stored_dtype) else 0) + _BARRIER_BYTES
    # The results take the memory of the ring in the end: the output, and two numbers for each row.
    results = ROWS * v_head_dim * 4 + 2 * _ALIGNMENT
    slots = (_SHARED_MEMORY_OF_TWO - others) // slot
    if slots >= 2 and results <= _SHARED_MEMORY_OF_TWO - others:
        return min(slots, MAX_SLOTS), _PROGRAMS_PER_MULTIPROCESSOR
    return min((SHARED_MEMORY - others) // slot, MAX_SLOTS), 1


def find_decode_limit(
    interpret: Interpret, dtype: Any, head_dim: int, v_head_dim: int, page_size: int, rows: int
) -> str | None:
    """Return what the kernel does not support about a call, or None if it supports the call.

    Args:
      interpret: whether the kernel is interpreted; then it needs no Hopper GPU.
      dtype: dtype of q.
      head_dim: depth of queries and keys.
      v_head_dim: depth of values.
      page_size: rows of a page.
      rows: query tokens times query heads of a tile.
    """
    if not interpret and (reason := find_device_limit(get_device_kind("gpu")) or find_compiler_limit()) is not None:
        return reason
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"q in {dtype}: it multiplies bfloat16 and float16"
    if rows > ROWS:
        return f"{rows} rows of queries per tile (block_q times the heads of a group), at most {ROWS}"
    return find_shape_limit(head_dim, v_head_dim, page_size)


def find_shape_limit(head_dim: int, v_head_dim: int, page_size: int) -> str | None:
    """Return what the kernel does not support about these sizes, or None if it supports them."""
    for name, depth in (("head_dim", head_dim), ("v_head_dim", v_head_dim)):
        if depth % LANES or depth > MAX_DEPTH:
            return f"{name} {depth}: it takes multiples of {LANES} up to {MAX_DEPTH}"
    if page_size % MIN_PAGE_ROWS or (TILE_KEYS % page_size and page_size % TILE_KEYS):
        return f"page_size {page_size}: it takes 8, 16, 32 and multiples of {TILE_KEYS}"
    return None
