"""Implement `python -m tests.bank --profiles`: measure and save the error profile of each planted bug.

An error profile is how wrong each result is on a fixed set of cases. A diagnosis compares a failing kernel with error
profiles.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from cases.error_profile_cases import ERROR_PROFILE_CASES
from conformance import interrupts
from conformance.commands.progress_display import RunProgress
from conformance.judging.remote_call import WorkerMismatch
from conformance.judging.task_pools import ExecutorFailed
from conformance.mutation.planted_bug import PlantedBug
from conformance.sensitivity import error_profiles
from conformance.sensitivity.error_profiles import FILE, SCHEMA, ErrorProfile, KnownBug, Sizes
from conformance.session.failures import CannotJudge
from tests.bank import confusions
from tests.bank.parallel_examination import BugKilledProcess, measure_parallel, open_bank_pool


def measure_profiles(bank: str, bugs: Mapping[str, PlantedBug], arguments: argparse.Namespace) -> int:
    """Continue the measurement; return 0 if every bug that can be measured here has its error profile, else 1."""
    given = {"--new": arguments.new, "--save": arguments.save, "--report": arguments.report}
    if wrong := [name for name, value in given.items() if value]:
        raise CannotJudge(f"--profiles saves each result at once, by itself: give it without {wrong[0]}")
    if unknown := [name for name in arguments.bug if name not in bugs]:
        raise CannotJudge(f"the bank has no bug {unknown[0]!r}")
    found = {each.name: each for each in error_profiles.load_profiles() if each.name in bugs}
    asked = arguments.bug or order_kinds_first(bugs, [name for name in bugs if name not in found])
    asked = [name for name in asked if bugs[name].unmeasurable() is None]
    console = Console(stderr=True)
    with RunProgress(len(asked), console) as progress:

        def on_bug(each: KnownBug) -> None:
            found[each.name] = each
            with interrupts.delay_signals():
                save_profiles(found.values())
            progress.advance([])

        try:
            with open_bank_pool(arguments) as pool:
                measure_parallel(bank, asked, pool, on_bug)
        except (BugKilledProcess, ExecutorFailed, WorkerMismatch) as error:
            raise CannotJudge(str(error)) from error
        except KeyboardInterrupt:
            interrupts.stop_raising()  # the results so far are saved already
    left = [name for name in bugs if name not in found and bugs[name].unmeasurable() is None]
    blind = sum(not each.profile.wrong for each in found.values())
    text = f"{len(found)} of {len(bugs)} planted bugs have error profiles; {blind} are right on all of its cases"
    Console(soft_wrap=True).print(text, highlight=False)
    _print_confusions(list(found.values()))
    if left:
        Console(soft_wrap=True).print(f"{len(left)} more are not measured yet: run this again", highlight=False)
    return 1 if left else 0


def _print_confusions(bank: list[KnownBug]) -> None:
    """Print which bugs a diagnosis would name for each bug if that bug were unknown."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("family")
    for name in ("bugs", "first", "named", "like none", "alone"):
        table.add_column(name, justify="right")
    table.add_column("else first named")
    for row in confusions.measure_confusions(bank):
        counts = row.bugs, row.first, row.named, row.none, row.alone
        table.add_row(row.family, *map(str, counts), ", ".join(row.others))
    Console(soft_wrap=True).print(table)


def order_kinds_first(bugs: Mapping[str, PlantedBug], names: list[str]) -> list[str]:
    """Sort one bug of each kind before all others: a diagnosis names kinds, so each kind should be measured early."""
    first = {bugs[name].kind: name for name in reversed(names)}
    ahead = set(first.values())
    return sorted(names, key=lambda name: name not in ahead)


def save_profiles(known_bugs: Iterable[KnownBug], path: Path = FILE) -> None:
    """Write error profiles as JSON, one bug per line, sorted by name.

    A row maps the text of a case's results to the indices of the cases with exactly these results. In that text a right
    result is written as its name, and a wrong result as `name:size`. This keeps rows short, since in most cases of a
    bug all results are right.
    """
    rows = [
        [bug.name, bug.family, bug.kind, bug.reference, _pack_profile(bug.profile)]
        for bug in sorted(known_bugs, key=lambda bug: bug.name)
    ]
    cases = ",\n".join(f"  {json.dumps(profile_case.case.id)}" for profile_case in ERROR_PROFILE_CASES)
    lines = ",\n".join(f"  {json.dumps(row, separators=(',', ':'))}" for row in rows)
    text = f'{{\n "schema": {json.dumps(SCHEMA)},\n "cases": [\n{cases}\n ],\n "bugs": [\n{lines}\n ]\n}}\n'
    path.write_text(text, encoding="utf-8")


def _pack_profile(profile: ErrorProfile) -> dict[str, list[int]]:
    """Convert an error profile for its row in the file: group the indices of cases by the text of their results."""
    numbers = {profile_case.case.id: number for number, profile_case in enumerate(ERROR_PROFILE_CASES)}
    packed: dict[str, list[int]] = {}
    for case, sizes in profile.sizes.items():
        packed.setdefault(" ".join(_format_sizes(sizes)), []).append(numbers[case])
    return packed


def _format_sizes(sizes: Sizes) -> Iterator[str]:
    """Yield each result of a case as text: `name` if it is right, `name:size` if it is wrong."""
    for name, size in sizes.items():
        yield name if size is None else f"{name}:{size:.4g}"
