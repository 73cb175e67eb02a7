"""Suggest entries for the table of expected failures in `pyproject.toml` from the failures of a run.

The entries match all failures and as few passes as the table's patterns allow.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence

from cases.case_id import matches_query
from reports.records import ERROR, FAIL, JUDGED, Record

_FAILED = frozenset({FAIL, ERROR})
_WORD, _SHAPE_PLACE = re.compile("[a-z]+"), 2  # the phase, the dtype and the shape come first in an id
_MAX_COMPONENTS = 3  # the largest number of components of a case id that a suggested pattern names
_MAX_OBSERVABLES = 12  # the most observables that an entry of one cause names one by one


@dataclasses.dataclass(frozen=True)
class SuggestedEntry:
    """A suggested entry of the table of expected failures; `some` tells whether its query `case` matches passes too."""

    implementation: str
    case: str
    check: tuple[str, ...]
    observable: tuple[str, ...]
    some: bool
    failures: int
    passes: int
    example: str
    title: str = ""


def suggest_entries_by_cause(
    records: Sequence[Record], causes: Iterable[tuple[str, str, Sequence[Record]]]
) -> list[SuggestedEntry]:
    """Suggest one entry for each cause of failures; its pattern may match more than `suggest_entries` would.

    Args:
      causes: for each cause its title, a query that its cases should match, and the red records that it explains.
    """
    entries = []
    for title, query, explained in causes:
        failed = [record for record in explained if record.verdict in _FAILED and record.case != "*"]
        if failed:
            entry = _build_entry(
                records,
                failed[0].implementation,
                frozenset(record.case for record in failed),
                tuple(dict.fromkeys(record.check for record in failed)),
                _shorten_observables(tuple(dict.fromkeys(record.observable for record in failed))),
                query,
            )
            entries.append(dataclasses.replace(entry, title=title))
    return entries


def _shorten_observables(observables: Sequence[str]) -> tuple[str, ...]:
    """Return patterns of observables: if there are many, one pattern for all that are parts of the same result."""
    if len(observables) <= _MAX_OBSERVABLES:
        return tuple(map(_escape_pattern, observables))
    parts = Counter(result for result, dot, _ in (name.partition(".") for name in observables) if dot)
    found = []
    for name in observables:
        result, dot, _ = name.partition(".")
        found.append(f"{_escape_pattern(result)}.*" if dot and parts[result] > 1 else _escape_pattern(name))
    return tuple(dict.fromkeys(found))


def _escape_pattern(name: str) -> str:
    return name.replace("[", "[[]")


def suggest_entries(records: Sequence[Record]) -> list[SuggestedEntry]:
    """Suggest entries that match all failures; checks and results that fail in the same cases share an entry."""
    failed = [record for record in records if record.verdict in _FAILED and record.case != "*"]
    by_result: dict[tuple[str, str, str], set[str]] = {}
    for record in failed:
        by_result.setdefault((record.implementation, record.check, record.observable), set()).add(record.case)
    by_cases: dict[tuple[str, frozenset[str], str], list[str]] = {}
    for (implementation, check, observable), cases in sorted(by_result.items()):
        by_cases.setdefault((implementation, frozenset(cases), check), []).append(observable)
    joined: dict[tuple[str, frozenset[str], tuple[str, ...]], list[str]] = {}
    for (implementation, failing, check), observables in by_cases.items():
        joined.setdefault((implementation, failing, tuple(observables)), []).append(check)
    return [
        _build_entry(records, implementation, failing, tuple(checks), tuple(map(_escape_pattern, observables)))
        for (implementation, failing, observables), checks in joined.items()
    ]


def _build_entry(
    records: Sequence[Record],
    implementation: str,
    failing: frozenset[str],
    check: Sequence[str],
    observable: Sequence[str],
    query: str = "",
) -> SuggestedEntry:
    """Build the entry for a set of failing cases, given checks and observables; `query`, if any, matches all cases."""
    matching = [
        record
        for record in records
        if record.implementation == implementation
        and record.check in check
        and any(fnmatch.fnmatchcase(record.observable, pattern) for pattern in observable)
    ]
    held = {record.case for record in matching if record.verdict in JUDGED and record.verdict not in _FAILED}
    is_enough = bool(query) and all(matches_query(query, one) for one in failing)
    case = query if is_enough else find_pattern(failing, held)
    failures = sum(record.verdict in _FAILED and matches_query(case, record.case) for record in matching)
    passes = sum(
        record.case in held and record.verdict not in _FAILED and matches_query(case, record.case)
        for record in matching
    )
    return SuggestedEntry(
        implementation, case, tuple(check), tuple(observable), passes > 0, failures, passes, example=min(failing)
    )


def find_pattern(failing: frozenset[str], held: set[str]) -> str:
    """Find a query that matches all of `failing` and as few of `held` as possible; prefer the shortest query."""
    if len(failing) == 1 and held:
        (only,) = failing
        query = _find_best_query(failing, held)
        return query if not _count_matches(query, held) else only
    return _find_best_query(failing, held)


def _find_best_query(failing: frozenset[str], held: set[str]) -> str:
    """Return the candidate query that matches the fewest of `held`; among several, the shortest."""
    candidates = list(_iter_candidates(failing))
    return min(candidates, key=lambda query: (_count_matches(query, held), len(query), query))


def _count_matches(query: str, cases: Iterable[str]) -> int:
    """Count the cases that a query matches."""
    return sum(matches_query(query, case) for case in cases)


def _iter_candidates(failing: frozenset[str]) -> Iterable[str]:
    """Yield queries that match every failing case: parts that their ids share, in order, with wildcards between."""
    split = [case.split("/") for case in sorted(failing)]
    parts = []
    for place, part in enumerate(split[0]):
        if all(part in other for other in split[1:]):
            parts.append(part)
        elif place == _SHAPE_PLACE:
            pieces = part.split(".")[1:-1]
            parts += [f"*.{piece}.*" for piece in pieces if all(piece in other[2].split(".") for other in split[1:])]
        elif (
            place > _SHAPE_PLACE and (word := _WORD.match(part)) is not None
        ):  # `softcap2` and `softcap30` are matched by how they begin
            parts += [f"{word[0]}*"] * all(any(x.startswith(word[0]) for x in other) for other in split[1:])
    yield "*"
    for count in range(1, _MAX_COMPONENTS + 1):
        for chosen in itertools.combinations(parts, count):
            for query in ("*/" + "/*/".join(chosen), "*/" + "/".join(chosen), "/".join(chosen), "/*/".join(chosen)):
                if all(matches_query(query, case) for case in failing):
                    yield query


def format_toml(entry: SuggestedEntry) -> str:
    """Format the entry as TOML for `pyproject.toml`. The reason and the link stay empty for the user to fill in."""
    held = f", and {entry.passes:,} that do not" if entry.passes else ""
    broad = "# It matches every case: `expect --all` prints narrower entries."
    lines = [
        "",
        *([f"# {entry.title}"] if entry.title else []),
        *([broad] if entry.title and entry.case == "*" and entry.passes else []),
        f"# {entry.failures:,} that fail{held}; for example {entry.example}",
        "[[tool.attention_conformance.expected_failures]]",
        f"implementation = {json.dumps(entry.implementation)}",
        *([f"case = {json.dumps(entry.case)}"] if entry.case != "*" else []),
        f"check = {json.dumps(list(entry.check))}",
        f"observable = {json.dumps(list(entry.observable))}",
        *(["some = true"] if entry.some else []),
        'reason = ""  # why it fails: an entry without a reason is refused',
        'link = ""',
    ]
    return "\n".join(lines) + "\n"
