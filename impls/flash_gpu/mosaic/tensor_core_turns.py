"""Turns at the tensor cores: one warpgroup multiplies while the other takes exponentials.

Two warpgroups that start at once also wait for the tensor cores at once, and then for the units of exponentials. With
turns the products of one are issued while the other weighs its last ones (Shah et al. 2024, arXiv:2407.08608, section
3.1). A turn is (6) of one step and (1) of the next: what comes between the exponentials of two steps.

    warpgroup 0:  QK_0 | weigh 0 | PV_0 QK_1 | weigh 1 | PV_1
    warpgroup 1:         QK_0    | weigh 0   | PV_0 QK_1 | weigh 1 | PV_1

There is a barrier for each warpgroup. To take a turn is to wait at one's own, to give it is to arrive at the other's.
A warpgroup takes a turn and gives it before it takes the next, so a barrier never has two arrivals that nobody waited
for: as a barrier's phase is one bit, the second would undo the first.

What must hold: both warpgroups take equally many turns. With n steps that is n + 1, and none without a step. They do,
since the steps are those of a program, and both go over all of them: where the rows of one end before those of the
other, under a causal mask, its last blocks are hidden whole. The turn that nobody takes is the last one that warpgroup
1 gives. Warpgroup 0 waits for it when the program ends, and warpgroup 1 gives one before the first. So there is no
difference between one tile and several, each with a number of steps of its own.
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
      mine: which of the two it is.
      barriers: one for each, or None: then it multiplies whenever it can.
    """

    mine: Any
    barriers: Any | None

    def begin(self) -> None:
        """Before the first: somebody must have the first turn."""
        if self.barriers is not None:
            pl.when(self.mine == 1)(self.give)

    def take(self) -> None:
        """Wait until the other has issued its products."""
        if self.barriers is not None:
            plgpu.barrier_wait(self.barriers.at[self.mine])

    def give(self) -> None:
        """The products of this turn are issued."""
        if self.barriers is not None:
            plgpu.barrier_arrive(self.barriers.at[1 - self.mine])

    def end(self) -> None:
        """After the last: every barrier is in its first state again."""
        if self.barriers is not None:
            pl.when(self.mine == 0)(self.take)
