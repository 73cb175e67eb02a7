"""Sizes of a Mosaic GPU kernel: warpgroups, tiles, and shared memory."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from impls.flash_gpu.block_sizes import Axis, Kernel, Ring, Tiles
from impls.flash_gpu.tile_schedule import FlashGpuPlan

ROWS = 64
"""Rows of the matrix product that one warpgroup computes."""
COMPUTE_WARPGROUPS = 2
"""Warpgroups that compute; one more fetches tiles."""
OWNED_ROWS = COMPUTE_WARPGROUPS * ROWS
"""Queries or keys that a program owns."""
LANES = 64
"""Head depths are padded to a multiple of this: the widest swizzle, 128 bytes, in two-byte elements."""
SHARED_MEMORY = 227 * 1024
"""Bytes of shared memory per thread block on Hopper (CUDA C++ programming guide, "Compute capabilities")."""
RESERVED_BYTES = 4096
"""Bytes reserved for barriers and reductions, beyond the named buffers."""
_ALIGNMENT = 1024  # bytes; each buffer starts at a multiple, as swizzled tiles require


@dataclasses.dataclass(frozen=True)
class KernelShape:
    """Sizes of a kernel's tiles.

    Attributes:
      axis: `"q"` or `"kv"`, the axis of which a program owns `OWNED_ROWS` rows.
      visited: rows of the other axis per tile.
      slots: tiles of each operand in flight.
      head_dim: padded depth of q and k.
      v_head_dim: padded depth of v.
      ping_pong: whether the computing warpgroups multiply in turns (`impls.flash_gpu.mosaic.tensor_core_turns`).
      persistent: whether there is one program per multiprocessor (`impls.flash_gpu.mosaic.tile_order`).
    """

    axis: Axis
    visited: int
    slots: int
    head_dim: int
    v_head_dim: int
    ping_pong: bool = False
    persistent: bool = False

    @classmethod
    def of(cls, kernel: Kernel, ring: Ring, head_dim: int, v_head_dim: int) -> KernelShape:
        """Build the shape of a kernel for these head depths."""
        axis: Axis = "kv" if kernel == "dkv" else "q"
        depths = round_up(head_dim, LANES), round_up(v_head_dim, LANES)
        return cls(axis, ring.block, ring.num_stages, *depths, ring.ping_pong, ring.persistent)

    @property
    def tiles(self) -> Tiles:
        """Tile sizes in the form that the schedule takes."""
        if self.axis == "q":
            return Tiles(block_q=OWNED_ROWS, block_kv=self.visited)
        return Tiles(block_q=self.visited, block_kv=OWNED_ROWS)


def build_shape(plan: FlashGpuPlan, kernel: Kernel) -> KernelShape:
    """Build the shape of a kernel for the plan."""
    return KernelShape.of(kernel, plan.sizes.ring(kernel), plan.head_dim, plan.v_head_dim)


def count_shared_bytes(scratch: dict[str, Any]) -> int:
    """Count the bytes of shared memory of a program with these buffers and barriers."""
    buffers = (x for x in scratch.values() if not isinstance(x, plgpu.Barrier))
    sizes = (math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in buffers)
    return sum(round_up(size, _ALIGNMENT) for size in sizes) + RESERVED_BYTES


def allocate_tile(dtype: Any, *sizes: int) -> Any:
    """Allocate tiles in shared memory, in the layout that TMA writes and `wgmma` reads."""
    return plgpu.SMEM(sizes, dtype, transforms=(plgpu.TilingTransform((8, LANES)), plgpu.SwizzleTransform(128)))


def round_up(size: int, multiple: int) -> int:
    """Round `size` up to a multiple."""
    return -(-size // multiple) * multiple
