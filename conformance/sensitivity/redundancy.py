"""Find out for each planted bug whether a second, independent case sees the bug too.

A case *sees* a bug if a check on this case fails. A bug that only one case sees may be seen by luck, because of the
case's values or seed. Two cases are independent if they share no compiled program, so that they differ in more than
values. `python -m conformance sensitivity --twice` writes the results to `redundancy.json`, one bug per line, and
continues where the last measurement stopped.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cases.case import parse_case_id
from conformance.records import RED
from conformance.sensitivity.bank import PlantedBug
from conformance.sensitivity.examination import Kill, create_single_look_runner, order_jobs_for_bug, select_seen_jobs

SCHEMA = "attention-conformance/redundancy/1"
FILE = Path(__file__).with_name("redundancy.json")


@dataclasses.dataclass(frozen=True)
class Sighting:
    """A failure by which a bug was seen: the name of the check, the wrong observable, and the id of the case."""

    check: str
    observable: str
    case: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class BugSightings:
    """Result of the search for two independent cases that see a planted bug.

    Attributes:
      bug: name of the planted bug.
      seen: one sighting, or two sightings on independent cases.
      whole: whether the search is finished: a second case was found, or all cases were judged. It is False if the time
        ran out.
    """

    bug: str
    seen: tuple[Sighting, ...]
    whole: bool


def find_known_sightings(bug: str, kills: Mapping[str, Kill]) -> BugSightings:
    """Look for two independent cases among the kills that are already known, without judging anything.

    Args:
      bug: name of the planted bug.
      kills: by name of each check that saw the bug, its first red record; not empty.
    """
    sightings = [Sighting(check, kill.observable, kill.case) for check, kill in kills.items()]
    others = (other for other in sightings if _get_program(other.case) != _get_program(sightings[0].case))
    second = next(others, None)
    return BugSightings(
        bug=bug, seen=(sightings[0],) if second is None else (sightings[0], second), whole=second is not None
    )


def find_second_sighting(bug: PlantedBug, level: str, kills: Mapping[str, Kill], seconds: float) -> BugSightings:
    """Look for a second, independent case that sees a planted bug.

    First, the checks that saw the bug run on cases that share no program with the first sighting. Cases with the bug's
    trigger come first, and small cases come before large ones. Then all other checks run on these cases.

    Args:
      bug: a planted bug that was seen.
      level: the level of the grid of cases: `"smoke"`, `"quick"`, ...
      kills: by name of each check that saw the bug, its first red record.
      seconds: processor time in seconds after which no further case is begun.
    """
    known = find_known_sightings(bug.name, kills)
    if known.whole:
        return known
    first = known.seen[0]
    runner = create_single_look_runner()
    jobs = [job for job in order_jobs_for_bug(bug, level) if job.case.program != _get_program(first.case)]
    jobs_of_other_checks = (
        dataclasses.replace(job, checks=tuple(check for check in job.checks if check.name not in kills)) for job in jobs
    )
    start = time.process_time()
    for job in itertools.chain(select_seen_jobs(jobs, kills), (job for job in jobs_of_other_checks if job.checks)):
        if time.process_time() - start > seconds:
            return known
        for record in runner.stream(job):
            if record.verdict in RED:
                second = Sighting(record.check, record.observable, record.case)
                return BugSightings(bug=bug.name, seen=(first, second), whole=True)
    return dataclasses.replace(known, whole=True)


def _get_program(case_id: str) -> str:
    """Return the key of a case's compiled programs; cases with equal keys share programs."""
    return parse_case_id(case_id).program


def save_sightings(sightings: Sequence[BugSightings], level: str, path: Path = FILE) -> None:
    """Write the results of all bugs as JSON, one bug per line."""
    rows = [
        [each.bug, [dataclasses.astuple(sighting) for sighting in each.seen], each.whole]
        for each in sorted(sightings, key=lambda each: each.bug)
    ]
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    head = f' "schema": {json.dumps(SCHEMA)},\n "level": {json.dumps(level)},\n'
    path.write_text(f'{{\n{head} "bugs": [\n{lines}\n ]\n}}\n', encoding="utf-8")


def load_sightings(level: str, path: Path = FILE) -> list[BugSightings]:
    """Load the results for a level of the grid; empty if there is no file, or if it was measured at another level.

    Raises:
      ValueError: if the file has another schema.
    """
    if not path.is_file():
        return []
    table: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if table.get("schema") != SCHEMA:
        raise ValueError(f"{path} has schema {table.get('schema')!r}, must be {SCHEMA!r}")
    if table["level"] != level:
        return []
    return [
        BugSightings(bug=bug, seen=tuple(Sighting(*s) for s in seen), whole=whole) for bug, seen, whole in table["bugs"]
    ]
