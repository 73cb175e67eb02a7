"""Sizes of a Mosaic GPU kernel: warpgroups, tiles, and shared memory."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from impls.flash_gpu.block_sizes import Axis, Kernel, Ring, Tiles
from impls.flash_gpu.tile_schedule import FlashGpuPlan
from impls.pallas_gpu.mosaic_tiles import LANES, ROWS, round_up

COMPUTE_WARPGROUPS = 2
"""Warpgroups that compute; one more fetches tiles."""
OWNED_ROWS = COMPUTE_WARPGROUPS * ROWS
"""Queries or keys that a program owns, `ROWS` for each computing warpgroup."""
MAX_UNSPLIT_DEPTH = 128
"""Largest head depth at which one warpgroup has registers for both dk and dv of its keys in f32."""
BARRIER_BYTES = 1024
"""Bytes reserved for barriers, of 8 bytes each, beyond the named buffers."""
REDUCTION_BYTES = 2048
"""Bytes that Mosaic GPU reserves in kernels with reductions (`plgpu.CompilerParams.reduction_scratch_bytes`)."""
_ALIGNMENT = 1024  # bytes; each buffer starts at a multiple, as swizzled tiles require


@dataclasses.dataclass(frozen=True)
class KernelShape:
    """Sizes of a kernel's tiles.

    Attributes:
      axis: `"q"` or `"kv"`, the axis of which a program owns rows.
      owned: rows that a program owns, `OWNED_ROWS`, or `ROWS` if both computing warpgroups work on the same rows.
      visited: rows of the other axis per tile.
      slots: tiles of each operand in flight.
      v_slots: tiles of values in flight.
      head_dim: padded depth of q and k.
      v_head_dim: padded depth of v.
      ping_pong: whether the computing warpgroups multiply in turns (`impls.flash_gpu.mosaic.tensor_core_turns`).
      persistent: whether there is one program per multiprocessor (`impls.flash_gpu.mosaic.tile_order`).
      early_copies: whether keys and values are released separately.
      q_slots: tiles of queries in flight for each computing warpgroup. The queries of the next tile arrive during this
        one if there are two.
    """

    axis: Axis
    owned: int
    visited: int
    slots: int
    v_slots: int
    head_dim: int
    v_head_dim: int
    ping_pong: bool = False
    persistent: bool = False
    early_copies: bool = False
    q_slots: int = 1

    @classmethod
    def of(cls, kernel: Kernel, ring: Ring, head_dim: int, v_head_dim: int) -> KernelShape:
        """Build the shape of a kernel for these head depths."""
        axis: Axis = "kv" if kernel == "dkv" else "q"
        depths = round_up(head_dim, LANES), round_up(v_head_dim, LANES)
        return cls(
            axis=axis,
            owned=ROWS if kernel == "dkv" and max(depths) > MAX_UNSPLIT_DEPTH else OWNED_ROWS,
            visited=ring.block,
            slots=ring.num_stages,
            v_slots=ring.num_v_stages or ring.num_stages,
            head_dim=depths[0],
            v_head_dim=depths[1],
            ping_pong=ring.ping_pong,
            persistent=ring.persistent,
            early_copies=ring.early_copies,
            q_slots=ring.num_q_stages,
        )

    @property
    def tiles(self) -> Tiles:
        """Tile sizes in the form that the schedule takes."""
        if self.axis == "q":
            return Tiles(block_q=self.owned, block_kv=self.visited)
        return Tiles(block_q=self.visited, block_kv=self.owned)


def build_shape(plan: FlashGpuPlan, kernel: Kernel) -> KernelShape:
    """Build the shape of a kernel for the plan."""
    return KernelShape.of(kernel, plan.sizes.ring(kernel), plan.head_dim, plan.v_head_dim)


def count_shared_bytes(scratch: dict[str, Any], *, reduces: bool) -> int:
    """Count the bytes of shared memory of a program with these buffers and barriers, and with reductions or without."""
    buffers = (x for x in scratch.values() if not isinstance(x, plgpu.Barrier))
    sizes = (math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in buffers)
    return sum(round_up(size, _ALIGNMENT) for size in sizes) + BARRIER_BYTES + (REDUCTION_BYTES if reduces else 0)
