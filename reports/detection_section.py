"""Build the report section on the errors that the checks detect.

A table that `tests.bank` measured with planted bugs (small mistakes in correct kernels) goes in. The section
shows the detected bugs by family and by check, and the smallest error that is detected.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class BugFamily:
    """A family of planted bugs: how many bugs it has, and how many of them some check detects (`seen`)."""

    name: str
    bugs: int
    seen: int


@dataclasses.dataclass(frozen=True)
class CheckPower:
    """The number of planted bugs that one check detects, and the time that the check took."""

    check: str
    kills: int
    alone: tuple[str, ...]  # the bugs that only this check detects
    seconds: float  # the time that the check took in all measurements, those of bugs that were removed later included


@dataclasses.dataclass(frozen=True)
class Detection:
    """The contents of the section: which planted bugs are detected, and how small the smallest detected errors are."""

    level: str  # the level (such as `quick`) with whose cases the bugs were judged
    environment: Mapping[str, str]
    bugs: Sequence[Mapping[str, Any]]
    survivors: Sequence[Mapping[str, Any]]
    families: Sequence[BugFamily]  # how many bugs of each family there are, and how many are detected
    checks: Sequence[CheckPower]  # how many bugs each check detects, and at what cost
    idle: Sequence[str]  # checks that detect only bugs that other checks detect too
    dtypes: Sequence[str]  # the dtypes that `resolution` has, as columns of a table
    # The smallest detected error, by `(perturbation, observable)` and then by dtype.
    resolution: Mapping[tuple[str, str], Mapping[str, Mapping[str, Any]]]


def build_detection(table: Mapping[str, Any] | None) -> Detection | None:
    """Build the section from a table that `tests.bank` measured; return None without a table."""
    if not table:
        return None
    bugs = table["bugs"]
    checks = [CheckPower(row["check"], row["kills"], tuple(row["alone"]), row["seconds"]) for row in table["checks"]]
    families = dict.fromkeys(bug["family"] for bug in bugs)
    resolution: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
    for row in table["resolution"]:
        resolution.setdefault((row["perturbation"], row["observable"]), {})[row["dtype"]] = row
    return Detection(
        level=table["level"],
        environment=table["environment"],
        bugs=bugs,
        survivors=[bug for bug in bugs if not bug["kills"]],
        families=[_count_family(name, bugs) for name in families],
        checks=checks,
        idle=[power.check for power in checks if not power.alone],
        dtypes=tuple(dict.fromkeys(row["dtype"] for row in table["resolution"])),
        resolution=resolution,
    )


def _count_family(name: str, bugs: Sequence[Mapping[str, Any]]) -> BugFamily:
    members = [bug for bug in bugs if bug["family"] == name]
    return BugFamily(name, len(members), sum(bool(bug["kills"]) for bug in members))
