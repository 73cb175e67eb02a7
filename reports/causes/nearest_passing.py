"""Find the cases that confirm a cause: a case that fails with a level, and the same case without it, which passes.

`root_causes` uses them for `Finding.smallest`, `Finding.without` and `Finding.passes`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from reports.causes.case_levels import (
    FIELD_GROUPS,
    Level,
    find_levels,
    find_oddities,
    parse_fields,
    rank_plainness,
)
from reports.records import Record

_MAX_NEEDED = 4
"""The most levels that a failing case is said to need.

A case that passes after any change is close to a limit, and its levels say nothing.
"""


@dataclasses.dataclass(frozen=True)
class NearestPassing:
    """The plainest case that fails with some levels, and the passing cases nearest to it."""

    smallest: Record  # the record of the failing case
    # For each level, the id of a passing case without the level that is otherwise the same. An entry is empty if there
    # is no such case.
    without: tuple[str, ...] = ()
    passes: str = ""  # the id of a passing case that has all the levels and is otherwise plain; empty if there is none


def find_nearest_passing(
    levels: Sequence[Level], failing: Sequence[Record], passing: Iterable[Record]
) -> NearestPassing:
    """Find the plainest failing case for which passing cases without each of the levels are known.

    If there is none, take the plainest failing case with such a passing case for some of the levels. If there is none
    either, or a plain case with all the levels passes, take the plainest failing case.
    """
    ranked = sorted(failing, key=lambda record: (rank_plainness(record.case), record.key))
    right = [record.case for record in passing]
    partly: NearestPassing | None = None
    for record in ranked if levels else ():
        if parse_fields(record.case) is None:
            continue
        without = tuple(_find_same_without(record.case, level, right) for level in levels)
        if all(without):
            return NearestPassing(record, without)
        if any(without) and partly is None:
            partly = NearestPassing(record, without)
    passes = _find_plain_passing(levels, right)
    return partly if partly is not None and not passes else NearestPassing(ranked[0], passes=passes)


def _find_same_without(case: str, level: Level, right: Iterable[str]) -> str:
    """Find a passing case that lacks the level and differs only in the level's fields; empty if there is none."""
    wanted = _drop_fields(parse_fields(case) or {}, level.fields)
    for other in right:
        if level not in find_levels(other) and _drop_fields(parse_fields(other) or {}, level.fields) == wanted:
            return other
    return ""


def _drop_fields(fields: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    return {name: value for name, value in fields.items() if name not in names}


def _find_plain_passing(levels: Sequence[Level], right: Iterable[str]) -> str:
    """Find a passing case that has all the levels and is otherwise plain. Returns an empty string if there is none."""
    wanted, deciding = set(levels), {name for level in levels for name in level.fields}
    found = [case for case in right if wanted <= find_levels(case) and find_oddities(case) <= deciding]
    return min(found, key=rank_plainness, default="") if levels else ""


def find_needed_levels(failing: str, passing: Iterable[str]) -> tuple[tuple[Level, ...], tuple[str, ...]]:
    """Find levels without any one of which a failing case passes, from cases that differ in one group of fields.

    Returns:
      The levels, and for each the id of a passing case without it. Both are empty if no passing case differs from
      `failing` in one group of fields only, or if so many do that any change makes the case pass.
    """
    fields = parse_fields(failing) or {}
    by_group: dict[tuple[str, ...], list[str]] = {}
    for case in passing:
        other = parse_fields(case) or {}
        differ = {name for name in fields.keys() | other.keys() if fields.get(name) != other.get(name)}
        group = next((group for group in FIELD_GROUPS if differ and differ <= set(group)), None)
        if group is not None:
            by_group.setdefault(group, []).append(case)
    levels, without = [], []
    for group, cases in by_group.items():
        lost = [find_levels(failing) - find_levels(case) for case in cases]
        named = [level for level in frozenset.intersection(*lost) or lost[0] if set(level.fields) <= set(group)]
        if named:
            levels.append(min(named))
            without.append(min(cases, key=rank_plainness))
    return (tuple(levels), tuple(without)) if len(levels) <= _MAX_NEEDED else ((), ())
