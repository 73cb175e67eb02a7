"""What the gate can catch: planted bugs by family and by check, survivors, and the smallest visible error."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class BugFamily:
    """Planted bugs about one thing."""

    name: str
    bugs: int
    seen: int


@dataclasses.dataclass(frozen=True)
class CheckPower:
    """A check: how many bugs it sees, which no other does, and what judging them cost."""

    check: str
    kills: int
    alone: tuple[str, ...]
    seconds: float

    @property
    def rate(self) -> float | None:
        """Bugs seen a second."""
        return self.kills / self.seconds if self.seconds else None


@dataclasses.dataclass(frozen=True)
class Detection:
    """The section of a report."""

    level: str
    environment: Mapping[str, str]
    bugs: Sequence[Mapping[str, Any]]
    survivors: Sequence[Mapping[str, Any]]
    families: Sequence[BugFamily]
    checks: Sequence[CheckPower]
    idle: Sequence[str]
    dtypes: Sequence[str]
    resolution: Mapping[tuple[str, str], Mapping[str, Mapping[str, Any]]]


def build_detection(table: Mapping[str, Any] | None) -> Detection | None:
    """The section from measured figures, none if there are none."""
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
