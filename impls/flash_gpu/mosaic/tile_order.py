"""In which order tiles are begun, and which of them a program computes if there is one for each multiprocessor.

A GPU begins programs in their order, each as soon as there is room. A long one that begins last leaves all other
multiprocessors idle, so where tiles differ in length the longest are first. That takes tiles of several heads side by
side, and no more heads than whose rows stay in the cache: programs that run at once read the same rows, those of a few
heads (the order of FlashAttention-3's causal scheduler, Shah et al. 2024, arXiv:2407.08608).
"""

from __future__ import annotations

import dataclasses
import heapq
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

MAX_CACHED_BYTES = 32 << 20
"""Bytes of rows that programs may go over at once: of the 50 MB that Hopper's cache has, less what they own."""


@dataclasses.dataclass(frozen=True)
class TileOrder:
    """Numbers of tiles, in the order in which they are begun.

    Attributes:
      batch: rows.
      heads: of which each has its tiles.
      blocks: tiles of a head of a batch row.
      together: heads of batch rows whose tiles are begun side by side, a divisor of all of them.
      descending: whether the last block is the first to begin.
    """

    batch: int
    heads: int
    blocks: int
    together: int
    descending: bool

    @classmethod
    def of(cls, steps: np.ndarray, batch: int, heads: int, head_bytes: int) -> TileOrder:
        """The order of tiles that take so many steps, `[batch or 1, blocks]`, and read so many bytes a head."""
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
        """How many there are."""
        return self.batch * self.heads * self.blocks

    def at(self, tile: Any) -> tuple[Any, Any, Any]:
        """Batch row, head and block of a tile, all int32."""
        together, blocks = jnp.int32(self.together), jnp.int32(self.blocks)
        rest = lax.div(tile, together)
        row = lax.div(rest, blocks) * together + lax.rem(tile, together)
        block = lax.rem(rest, blocks)
        if self.descending:
            block = blocks - 1 - block
        return lax.div(row, jnp.int32(self.heads)), lax.rem(row, jnp.int32(self.heads)), block

    def steps(self, steps: np.ndarray) -> np.ndarray:
        """Those of each tile, in order, `[tiles]`."""
        rows = np.broadcast_to(steps[:, None, :], (self.batch, self.heads, self.blocks)).reshape(-1, self.blocks)
        rows = rows[:, ::-1] if self.descending else rows
        return rows.reshape(-1, self.together, self.blocks).swapaxes(1, 2).ravel()


TILE_OVERHEAD_STEPS = 1
"""Steps that the queries and the results of a tile are taken to cost: more than nothing, and measured nowhere."""


def deal_tiles(steps: np.ndarray, programs: int) -> np.ndarray:
    """Which tiles each program computes, `[programs, 1 + most]` int32: how many, and their numbers.

    Each tile goes to the program that is the first to be free, as a GPU would deal out programs whose time is that of
    their steps, and of `AROUND` more for what is done once a tile.
    """
    free = [(0, program) for program in range(programs)]
    hands: list[list[int]] = [[] for _ in range(programs)]
    for tile, count in enumerate(steps.tolist()):
        time, program = free[0]
        hands[program].append(tile)
        heapq.heapreplace(free, (time + count + TILE_OVERHEAD_STEPS, program))
    table = np.zeros((programs, 1 + max(map(len, hands))), np.int32)
    for program, hand in enumerate(hands):
        table[program, : 1 + len(hand)] = (len(hand), *hand)
    return table
