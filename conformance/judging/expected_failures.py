"""Entries of expected failures for what fails now: the narrowest that the table's patterns can say."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterable, Sequence

from cases.case import matches_query
from conformance.records import ERROR, FAIL, JUDGED, Record

_FAILED = frozenset({FAIL, ERROR})
_MAX_PARTS = 3  # of an id that a pattern names, beside the phase and the dtype


@dataclasses.dataclass(frozen=True)
class SuggestedEntry:
    """What an entry of the table matches, and what it matches beside failures."""

    implementation: str
    case: str
    check: tuple[str, ...]
    observable: tuple[str, ...]
    some: bool
    failures: int
    passes: int
    example: str


def suggest_entries(found: Sequence[Record]) -> list[SuggestedEntry]:
    """An entry for each set of cases in which the same checks and results fail; together they match every failure."""
    failed = [record for record in found if record.verdict in _FAILED and record.case != "*"]
    by_result: dict[tuple[str, str, str], set[str]] = {}
    for record in failed:
        by_result.setdefault((record.implementation, record.check, record.observable), set()).add(record.case)
    alike: dict[tuple[str, frozenset[str], str], list[str]] = {}
    for (implementation, check, observable), cases in sorted(by_result.items()):
        alike.setdefault((implementation, frozenset(cases), check), []).append(observable)
    joined: dict[tuple[str, frozenset[str], tuple[str, ...]], list[str]] = {}
    for (implementation, failing, check), observables in alike.items():
        joined.setdefault((implementation, failing, tuple(observables)), []).append(check)
    return [
        _build_entry(found, implementation, failing, tuple(checks), observables)
        for (implementation, failing, observables), checks in joined.items()
    ]


def _build_entry(
    found: Sequence[Record],
    implementation: str,
    failing: frozenset[str],
    check: Sequence[str],
    observable: Sequence[str],
) -> SuggestedEntry:
    theirs = [
        record
        for record in found
        if record.implementation == implementation and record.check in check and record.observable in observable
    ]
    held = {record.case for record in theirs if record.verdict in JUDGED and record.verdict not in _FAILED}
    case = find_pattern(failing, held)
    failures = sum(record.verdict in _FAILED and matches_query(case, record.case) for record in theirs)
    passes = sum(
        record.case in held and record.verdict not in _FAILED and matches_query(case, record.case) for record in theirs
    )
    return SuggestedEntry(
        implementation, case, tuple(check), tuple(observable), passes > 0, failures, passes, example=min(failing)
    )


def find_pattern(failing: frozenset[str], held: set[str]) -> str:
    """The query of cases that matches all of `failing`, and as few of `held` as one query can.

    Among those that match equally few the shortest is taken: it says most plainly what the cases have in common.
    """
    if len(failing) == 1 and held:
        (only,) = failing
        others = _find_best_query(failing, held)
        return others if not _count_matches(others, held) else only
    return _find_best_query(failing, held)


def _find_best_query(failing: frozenset[str], held: set[str]) -> str:
    found = list(_iter_candidates(failing))
    return min(found, key=lambda query: (_count_matches(query, held), len(query), query))


def _count_matches(query: str, cases: Iterable[str]) -> int:
    return sum(matches_query(query, case) for case in cases)


def _iter_candidates(failing: frozenset[str]) -> Iterable[str]:
    """Queries that match every failing case: parts that all of them have, in their order, with anything between."""
    split = [case.split("/") for case in sorted(failing)]
    common = [part for part in split[0] if all(part in other for other in split[1:])]
    pieces = [piece for piece in split[0][2].split(".") if all(piece in other[2].split(".") for other in split[1:])]
    named = [*common, *(f"*.{piece}.*" for piece in pieces[1:-1])]
    yield "*"
    for count in range(1, _MAX_PARTS + 1):
        for chosen in itertools.combinations(named, count):
            for query in ("*/" + "/*/".join(chosen), "*/" + "/".join(chosen), "/".join(chosen), "/*/".join(chosen)):
                if all(matches_query(query, case) for case in failing):
                    yield query


def format_toml(entry: SuggestedEntry) -> str:
    """The entry as it stands in `pyproject.toml`, the reason left to fill in."""
    held = f", and {entry.passes:,} that do not" if entry.passes else ""
    lines = [
        "",
        f"# {entry.failures:,} that fail{held}; for example {entry.example}",
        "[[tool.attention_conformance.expected_failures]]",
        f"implementation = {json.dumps(entry.implementation)}",
        *([f"case = {json.dumps(entry.case)}"] if entry.case != "*" else []),
        f"check = {json.dumps(list(entry.check))}",
        f"observable = {json.dumps([name.replace('[', '[[]') for name in entry.observable])}",
        *(["some = true"] if entry.some else []),
        'reason = ""  # why it fails: an entry without a reason is refused',
        'link = ""',
    ]
    return "\n".join(lines) + "\n"
