"""Order in which tiles start, and assignment of tiles to the programs of a persistent kernel.

A GPU starts programs in order, each as soon as there is room. A long tile that starts last leaves all other
multiprocessors idle. So if tiles differ in length, the longest start first. This interleaves tiles of several heads,
but only of as many heads as fit the cache: concurrent programs then read the same rows. It is the order of
FlashAttention-3's causal scheduler (Shah et al. 2024, arXiv:2407.08608).
"""

from __future__ import annotations

import dataclasses
import heapq
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from impls.jax_compat import Scalar

MAX_CACHED_BYTES = 32 << 20
"""Bytes of rows that concurrent programs may visit: Hopper's cache of 50 MB, less the rows that the programs own."""


@dataclasses.dataclass(frozen=True)
class TileOrder:
    """Numbering of tiles in the order in which they start.

    Attributes:
      batch: number of batch rows.
      heads: number of heads.
      blocks: tiles per head of a batch row.
      together: number of (batch row, head) pairs whose tiles are interleaved, a divisor of `batch * heads`.
      descending: whether the last block starts first.
    """

    batch: int
    heads: int
    blocks: int
    together: int
    descending: bool

    @classmethod
    def of(cls, steps: np.ndarray, batch: int, heads: int, head_bytes: int) -> TileOrder:
        """Build the order from the `steps` of each tile, `[batch or 1, blocks]`, and the bytes read for each head."""
        blocks, totals = steps.shape[1], steps.sum(axis=0)
        if (steps == steps[0, 0]).all():
            return cls(batch, heads, blocks, 1, False)
        half = blocks // 2
        descending = bool(totals[:half].sum() < totals[blocks - half :].sum())
        fitting = max(1, MAX_CACHED_BYTES // head_bytes)
        together = max(n for n in range(1, min(fitting, batch * heads) + 1) if batch * heads % n == 0)
        return cls(batch, heads, blocks, together, descending)

    @property
    def tiles(self) -> int:
        """Number of tiles."""
        return self.batch * self.heads * self.blocks

    def at(self, tile: Scalar) -> tuple[Any, Any, Any]:
        """Compute batch row, head and block of a tile, all int32."""
        together, blocks = jnp.int32(self.together), jnp.int32(self.blocks)
        rest = lax.div(tile, together)
        row = lax.div(rest, blocks) * together + lax.rem(tile, together)
        block = lax.rem(rest, blocks)
        if self.descending:
            block = blocks - 1 - block
        return lax.div(row, jnp.int32(self.heads)), lax.rem(row, jnp.int32(self.heads)), block

    def steps(self, steps: np.ndarray) -> np.ndarray:
        """Arrange the steps of `[batch or 1, blocks]` by tile, `[tiles]`."""
        rows = np.broadcast_to(steps[:, None, :], (self.batch, self.heads, self.blocks)).reshape(-1, self.blocks)
        rows = rows[:, ::-1] if self.descending else rows
        return rows.reshape(-1, self.together, self.blocks).swapaxes(1, 2).ravel()


TILE_OVERHEAD_STEPS = 1
"""Assumed cost, in steps, of loading a tile's queries and storing its results. It is a guess, not measured."""


def deal_tiles(steps: np.ndarray, programs: int) -> np.ndarray:
    """Assign tiles to programs, `[programs, 1 + most]` int32: the count, then the tile numbers.

    Each tile goes to the program that is free first, as a GPU would assign them. A tile takes the time of its steps
    plus `TILE_OVERHEAD_STEPS`.
    """
    free = [(0, program) for program in range(programs)]
    tiles_of_program: list[list[int]] = [[] for _ in range(programs)]
    for tile, count in enumerate(steps.tolist()):
        time, program = free[0]
        tiles_of_program[program].append(tile)
        heapq.heapreplace(free, (time + count + TILE_OVERHEAD_STEPS, program))
    table = np.zeros((programs, 1 + max(map(len, tiles_of_program))), np.int32)
    for program, hand in enumerate(tiles_of_program):
        table[program, : 1 + len(hand)] = (len(hand), *hand)
    return table
