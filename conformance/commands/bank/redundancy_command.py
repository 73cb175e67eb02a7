"""Implement `sensitivity --twice`: measure which planted bugs a second, independent case detects."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping, Sequence

from rich.console import Console

from conformance import interrupts
from conformance.commands.progress_display import RunProgress
from conformance.sensitivity import detection_table, redundancy
from conformance.sensitivity.bank import PlantedBug
from conformance.session.failures import CannotJudge


def measure_redundancy(bugs: Mapping[str, PlantedBug], arguments: argparse.Namespace) -> int:
    """Continue the measurement and print its state; return 0 if two cases detect every measured bug, 1 if not."""
    given = {"--new": arguments.new, "--save": arguments.save, "--report": arguments.report, "--jobs": arguments.jobs}
    if wrong := [name for name, value in given.items() if value]:
        raise CannotJudge(f"--twice saves its results by itself and runs in one process: give it without {wrong[0]}")
    last = detection_table.load_table()
    level = arguments.level or "quick"
    if last is None or last["level"] != level:
        raise CannotJudge(f"--twice begins with what one case saw at {level}: run sensitivity --save there first")
    if unknown := [name for name in arguments.bug if name not in bugs]:
        raise CannotJudge(f"the bank has no bug {unknown[0]!r}")
    kills = {e.bug: e.kills for e in detection_table.parse_examinations(last, bugs) if e.kills}
    found = {each.bug: each for each in redundancy.load_sightings(level) if each.bug in kills}
    free = (redundancy.find_known_sightings(name, seen) for name, seen in kills.items() if name not in found)
    found |= {each.bug: each for each in free if each.whole}
    redundancy.save_sightings(list(found.values()), level)
    asked = arguments.bug or [name for name in kills if name not in found]
    asked = [name for name in asked if name in kills and bugs[name].unmeasurable() is None]
    asked.sort(key=lambda name: len(kills[name]))  # bugs that few checks detect come first
    with RunProgress(len(asked), Console(stderr=True)) as progress:
        try:
            for name in asked:
                found[name] = redundancy.find_second_sighting(bugs[name], level, kills[name], arguments.seconds)
                with interrupts.delay_signals():
                    redundancy.save_sightings(list(found.values()), level)
                progress.advance([])
        except KeyboardInterrupt:
            interrupts.stop_raising()  # the results so far are saved already
    _print_results(list(found.values()), kills)
    return 0 if all(len(each.seen) > 1 for each in found.values()) else 1


def _print_results(found: Sequence[redundancy.BugSightings], kills: Collection[str]) -> None:
    console = Console(soft_wrap=True)
    two = [each for each in found if len(each.seen) > 1]
    console.print(f"{len(two)} of {len(found)} planted bugs are seen by two independent cases", highlight=False)
    for each in sorted(found, key=lambda each: (each.whole, each.bug)):
        if len(each.seen) == 1:
            (only,) = each.seen
            asked = "no case is left to try" if each.whole else "time ran out"
            text = f"one case ({asked}): {each.bug}, by {only.check} {only.observable} on {only.case}"
            console.print(text, style="red" if each.whole else "yellow", highlight=False)
    if left := len(kills) - len(found):
        console.print(f"{left} more are not measured yet: run this again", highlight=False)
