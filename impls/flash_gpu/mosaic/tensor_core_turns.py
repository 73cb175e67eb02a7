"""Ping-pong scheduling: one warpgroup uses the tensor cores while the other computes exponentials.

Two warpgroups that start together also wait for the tensor cores together, and then for the exponential units. With
turns, the products of one are issued while the other computes its softmax (Shah et al. 2024, arXiv:2407.08608, section
3.1). A turn consists of two products: weights times values of one step (PV), and queries times keys of the next step
(QK). They lie between the exponentials of the two steps.

    warpgroup 0:  QK_0 | softmax 0 | PV_0 QK_1 | softmax 1 | PV_1
    warpgroup 1:         QK_0      | softmax 0 | PV_0 QK_1 | softmax 1 | PV_1

Each warpgroup has a barrier. To take a turn, a warpgroup waits at its own barrier; to give a turn, it arrives at the
other's. A warpgroup gives each turn before it takes the next, so a barrier never has two pending arrivals. A second
arrival would undo the first, since a barrier's phase is one bit.

Invariant: both warpgroups take equally many turns. With n steps these are n + 1 turns, and without a step none. The
invariant holds because both warpgroups visit all steps of the program. Under a causal mask the rows of one warpgroup
may see fewer blocks; it then visits the others as completely hidden blocks. The last turn that warpgroup 1 gives is
taken by no step: warpgroup 0 waits for it when the program ends. In return, warpgroup 1 gives a turn before the first
step. So the scheme works for one tile and for several tiles with different numbers of steps.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


@dataclasses.dataclass(frozen=True)
class TensorCoreTurns:
    """The turns of one warpgroup.

    Attributes:
      mine: index of this warpgroup, 0 or 1.
      barriers: one barrier for each warpgroup; None if the warpgroups do not take turns.
    """

    mine: Any
    barriers: Any | None

    def begin(self) -> None:
        """Give the first turn to warpgroup 0, before the first step."""
        if self.barriers is not None:
            pl.when(self.mine == 1)(self.give)

    def take(self) -> None:
        """Wait until the other warpgroup has issued its products."""
        if self.barriers is not None:
            plgpu.barrier_wait(self.barriers.at[self.mine])

    def give(self) -> None:
        """Signal that the products of this turn are issued."""
        if self.barriers is not None:
            plgpu.barrier_arrive(self.barriers.at[1 - self.mine])

    def end(self) -> None:
        """Take the last turn, so that every barrier is back in its first state."""
        if self.barriers is not None:
            pl.when(self.mine == 0)(self.take)
