"""Examine planted bugs and measure their error profiles in several processes.

Each worker gets the name of a bug and loads the bug from its bank. A bug itself contains functions, which as a rule
cannot be sent to another process.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence

from conformance.judging.task_pools import LocalPool, TaskPool
from conformance.mutation.planted_bug import PlantedBug
from conformance.sensitivity.error_profiles import KnownBug, build_profile, iter_profile_jobs
from conformance.session.failures import CannotJudge
from conformance.session.remote_pools import open_cluster
from tests.bank.examination import Examination, create_single_look_runner, examine
from tests.bank.planted_bug import load_bank


class BugKilledProcess(Exception):
    """A planted bug killed the process that examined it, twice in a row."""


@contextlib.contextmanager
def open_bank_pool(arguments: argparse.Namespace) -> Iterator[TaskPool]:
    """Open the pool that `--cluster` or `--jobs` names, and close it after the block. Raises `CannotJudge`."""
    if arguments.cluster is None:
        yield LocalPool(arguments.jobs or os.cpu_count() or 1)
        return
    if arguments.jobs is not None:
        raise CannotJudge("--cluster and --jobs contradict each other: the cluster has its own number of workers")
    remote = open_cluster(arguments.cluster)
    try:
        yield remote.pool
    finally:
        remote.close()


def examine_parallel(
    bank: str, names: Sequence[str], level: str, pool: TaskPool, on_bug: Callable[[Examination], None]
) -> None:
    """Examine planted bugs in the processes of a pool. Ctrl-C ends this at once.

    Args:
      bank: the bank that contains the bugs, as `module:attribute`.
      names: names of the bugs to examine.
      level: the level of the grid of cases: `"smoke"`, `"quick"`, ...
      pool: the processes.
      on_bug: called with the result of each bug as soon as it is known.

    Raises:
      BugKilledProcess: if a bug kills the process that examines it.
    """
    pool.run_tasks(
        names,
        functools.partial(_examine, bank, level),
        on_result=lambda name, found: on_bug(found),
        split=lambda name: (name,),
        on_lost=_raise_killed,
    )


def measure_parallel(bank: str, names: Sequence[str], pool: TaskPool, on_bug: Callable[[KnownBug], None]) -> None:
    """Measure the error profiles of planted bugs; arguments and errors as in `examine_parallel`."""
    pool.run_tasks(
        names,
        functools.partial(_measure, bank),
        on_result=lambda name, found: on_bug(found),
        split=lambda name: (name,),
        on_lost=_raise_killed,
    )


def _raise_killed(name: str) -> None:
    """Raise `BugKilledProcess` for the named bug."""
    raise BugKilledProcess(f"planted bug {name} kills the process that judges it: it cannot be measured")


def _examine(bank: str, level: str, name: str) -> Examination:
    """Examine one planted bug in a worker process."""
    return examine(_load_bug(bank, name), level)


def _measure(bank: str, name: str) -> KnownBug:
    """Measure the error profile of one planted bug in a worker process."""
    return measure_known_bug(_load_bug(bank, name))


def _load_bug(bank: str, name: str) -> PlantedBug:
    """Load one bug of a bank by its name."""
    (bug,) = (bug for bug in load_bank(bank) if bug.name == name)
    return bug


def measure_known_bug(bug: PlantedBug) -> KnownBug:
    """Judge a planted bug on the error profile cases, and return it with its error profile."""
    runner = create_single_look_runner()
    measured = build_profile(record for job in iter_profile_jobs(bug.build()) for record in runner.stream(job))
    return KnownBug(name=bug.name, family=bug.family, kind=bug.kind, reference=bug.reference, profile=measured)
