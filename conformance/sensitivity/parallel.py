"""Examining planted bugs in several processes. A bug travels by its name alone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from conformance.judging import workers
from conformance.sensitivity.bank import PlantedBug, load_bank
from conformance.sensitivity.examination import Examination, examine
from conformance.sensitivity.signatures import Known, known


class KernelDied(Exception):  # noqa: N818 -- a statement, as the message is
    """A planted bug took its process down twice."""


def examine_parallel(
    bank: str, names: Sequence[str], level: str, processes: int, on_bug: Callable[[Examination], None]
) -> None:
    """Examine planted bugs in worker processes. Ctrl-C stops the workers at once.

    Args:
      bank: where they are, `module:attribute`.
      names: which of them.
      level: of the grid.
      processes: how many workers.
      on_bug: hears of each bug as it is done.

    Raises:
      KernelDied: for a bug that kills the process that examines it.
    """
    workers.work_through(
        names,
        processes,
        functools.partial(_examine, bank, level),
        heard=lambda name, found: on_bug(found),
        parts=lambda name: (name,),
        lost=_refuse,
    )


def measure_parallel(bank: str, names: Sequence[str], processes: int, on_bug: Callable[[Known], None]) -> None:
    """Measure the signatures of planted bugs in worker processes; otherwise as `examine_parallel`."""
    workers.work_through(
        names,
        processes,
        functools.partial(_measure, bank),
        heard=lambda name, found: on_bug(found),
        parts=lambda name: (name,),
        lost=_refuse,
    )


def _refuse(name: str) -> None:
    raise KernelDied(f"planted bug {name} kills the process that judges it: it cannot be measured")


def _examine(bank: str, level: str, name: str) -> Examination:
    return examine(_named(bank, name), level)


def _measure(bank: str, name: str) -> Known:
    return known(_named(bank, name))


def _named(bank: str, name: str) -> PlantedBug:
    (bug,) = (bug for bug in load_bank(bank) if bug.name == name)
    return bug
