"""Records as the page holds them: once, compactly, for its script to draw any table of them; a few for readers without.

Rows refer to lists of names by number. What did not pass comes first and whole; of what passed, what is closest to its
limit, as far as there is room.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from conformance.records import EXPECTED_FAIL, PASS, RED, UNJUDGED, VERDICTS, Record
from reports import summary, wording
from reports.columns import CHECK_KINDS, FEATURE_KINDS, grouped
from reports.matrices import NO_FEATURE, features_in_order
from reports.summary import Contender, Counts

MOST_RECORDS = 20_000
"""Records that a page holds; the others are in the JSON lines, and a command is told that finds them there."""
MOST_CASES = 3_000
"""Cases that have an address on the page."""
FEW = 3
"""Records of each cell that are there without the script."""
_LONGEST, _SHORTEST = 400, 80  # characters of a reason
_ALL_REASONS = 800_000  # characters of all of them together
_OF_RUNS = (
    'foreach inputs as $x (""; if ($x.schema|startswith("attention-conformance/run/")) then ($x.id//$x.started) '
    "else . end; select(IN(%s))|$x|%s)"
)
"""A program of `jq -n` that asks the records of some runs: the first line of a run says which the others are of."""


@dataclasses.dataclass(frozen=True)
class CellRecords:
    """The records behind a cell of a matrix: its address, the worst of them, and the command that finds all."""

    anchor: str
    column: str
    counts: Counts
    worst: tuple[Record, ...]
    command: str


@dataclasses.dataclass(frozen=True)
class CaseLine:
    """A case: its id, and how its records stand."""

    case: str
    counts: Counts


def anchors(records: Sequence[Record]) -> dict[tuple[Contender, str, str], str]:
    """The address of each cell, by contender, kind of matrix (`feature` or `check`) and column."""
    contenders = list(summary.by_contender(records))
    found = {}
    for kind, columns in _columns(records).items():
        for i, contender in enumerate(contenders):
            for j, column in enumerate(columns):
                found[contender, kind, column] = f"records-{i}-{kind}-{j}"
    return found


@dataclasses.dataclass(frozen=True)
class Files:
    """Where records lie, as a shell reads it: those of some contenders, by their label, and those of all others.

    `runs` are what tells the runs of a contender from others in its files (`conformance.runs.Run.mark`).
    """

    every: str
    of: Mapping[str, str] = dataclasses.field(default_factory=dict)
    runs: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)

    def __getitem__(self, contender: Contender) -> str:
        """Where those of a contender lie."""
        return self.of.get(contender.label) or self.every


def cells(records: Sequence[Record], files: Files) -> dict[Contender, dict[str, list[CellRecords]]]:
    """Behind each cell, by contender and kind of matrix."""
    there = anchors(records)
    found: dict[Contender, dict[str, list[CellRecords]]] = {}
    for contender, group in summary.by_contender(records).items():
        ranked = sorted(group, key=_first)
        for kind, columns in _columns(records).items():
            members = _by_column(ranked, kind)
            found.setdefault(contender, {})[kind] = [
                CellRecords(
                    there[contender, kind, column],
                    column,
                    summary.count(members[column]),
                    tuple(members[column][:FEW]),
                    command(contender, kind, column, files),
                )
                for column in columns
                if column in members
            ]
    return found


def command(contender: Contender, kind: str, column: str, files: Files) -> str:
    """A command that prints the records of a cell from the JSON lines, one a line (by `jq`).

    A record does not say of which run it is, but the lines before it do.
    """
    wanted = [f".implementation=={_text(contender.implementation)}", f".platform=={_text(contender.platform)}"]
    if kind == "check":
        wanted.append(f".check=={_text(column)}")
    elif column == NO_FEATURE:
        wanted.append("(.features|length)==0")
    else:
        wanted.append(f"(.features|index({_text(column)}))")
    wanted.insert(0, '(.schema|startswith("attention-conformance/record/"))')
    asked = f"select({' and '.join(wanted)})"
    if runs := files.runs.get(contender.label):
        return f"jq -cn {_quoted(_OF_RUNS % (','.join(map(_text, runs)), asked))} {files[contender]}"
    return f"jq -c {_quoted(asked)} {files[contender]}"


def case_lines(records: Iterable[Record]) -> tuple[list[CaseLine], int]:
    """Cases in the order of their ids, those with something red first if there are too many, and how many are left."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(record.case, []).append(record)
    lines = [CaseLine(case, summary.count(group)) for case, group in groups.items()]
    lines.sort(key=lambda line: (not line.counts.red, line.case))
    shown = sorted(lines[:MOST_CASES], key=lambda line: line.case)
    return shown, len(lines) - len(shown)


def data(records: Sequence[Record], findings: Sequence[Sequence[Record]], files: Files) -> Markup:
    """The records as a JSON text that can stand in a page; `findings` are the records of each."""
    of_finding = {record.key: number for number, group in enumerate(findings, 1) for record in group}
    contenders = list(summary.by_contender(records))
    columns = _columns(records)
    names = {
        "contenders": _Numbered(contenders),
        "checks": _Numbered(columns["check"]),
        "observables": _Numbered(),
        "features": _Numbered(columns["feature"]),
        "cases": _Numbered(),
        "texts": _Numbered([""]),
    }
    shown = sorted(records, key=_first)[:MOST_RECORDS]
    reasons = len({record.reason for record in shown})
    longest = max(_SHORTEST, min(_LONGEST, _ALL_REASONS // max(1, reasons)))
    rows = [_row(record, names, of_finding.get(record.key, 0), longest) for record in shown]
    page = {
        "file": files.every,
        "total": len(records),
        "verdicts": [[verdict, wording.GLYPHS[verdict]] for verdict in VERDICTS],
        "red": [VERDICTS.index(verdict) for verdict in sorted(RED)],
        "contenders": [
            [c.label, c.implementation, c.platform, files[c], ",".join(map(_text, files.runs.get(c.label, ())))]
            for c in contenders
        ],
        "of_runs": _OF_RUNS,
        "cases": [[case, [names["features"].of(x) for x in features]] for case, features in names["cases"].values],
        **{name: names[name].values for name in ("checks", "observables", "features", "texts")},
        "rows": rows,
    }
    text = json.dumps(page, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    # No text of a record may end the element that it stands in.
    return Markup(text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"))


class _Numbered:
    """Values by number, in the order in which they came."""

    def __init__(self, values: Iterable[Any] = ()) -> None:
        self.values: list[Any] = []
        self._numbers: dict[Any, int] = {}
        for value in values:
            self.of(value)

    def of(self, value: Any) -> int:
        """Its number."""
        if value not in self._numbers:
            self._numbers[value] = len(self.values)
            self.values.append(value)
        return self._numbers[value]


def _row(record: Record, names: Mapping[str, _Numbered], finding: int, longest: int) -> list[Any]:
    """Contender, check, observable, verdict, case, share, and where they are: finding, texts, command."""
    metric = summary.decisive(record)
    texts = names["texts"]
    told = [] if record.verdict == PASS else [wording.judged_text(record), wording.worst_text(record)]
    told += [wording.pattern_text(record), wording.shorten(record.reason, longest=longest)]
    told = [text for text in told if text]
    row = [
        names["contenders"].of(summary.contender_of(record)),
        names["checks"].of(record.check),
        names["observables"].of(record.observable),
        VERDICTS.index(record.verdict),
        names["cases"].of((record.case, record.features or (NO_FEATURE,))),
        _share(metric.share if metric else None),
        finding,
        [texts.of(text) for text in told],
        1 if record.reproduce == _usual(record) else texts.of(record.reproduce) if record.reproduce else 0,
    ]
    while row and row[-1] in (0, []):
        row.pop()
    return row


def _usual(record: Record) -> str:
    return f"python -m conformance run --impl={record.implementation} --case={record.case} --check={record.check}"


def _share(share: float | None) -> float | str | None:
    if share is None:
        return None
    if not math.isfinite(share):
        return "nan" if math.isnan(share) else "inf"
    # Enough digits to say on which side of the limit it is.
    short = float(f"{share:.4g}")
    return share if short == 1 else short


def _first(record: Record) -> tuple[int, float, tuple[str, ...]]:
    """What did not pass first, red before the rest; then what is closest to its limit."""
    rank = 0 if record.verdict in RED else 1 if record.verdict == EXPECTED_FAIL else 3
    rank = 2 if rank == 3 and record.verdict == UNJUDGED else 4 if record.verdict == PASS else rank
    metric = summary.decisive(record)
    return rank, -summary.severity(metric.share if metric else None), record.key


def _columns(records: Sequence[Record]) -> dict[str, tuple[str, ...]]:
    """The columns of both matrices, in their fixed order."""
    features = grouped(features_in_order(records), FEATURE_KINDS)
    checks = grouped((record.check for record in records), CHECK_KINDS)
    return {
        "feature": tuple(name for _, names in features for name in names),
        "check": tuple(name for _, names in checks for name in names),
    }


def _by_column(records: Iterable[Record], kind: str) -> dict[str, list[Record]]:
    found: dict[str, list[Record]] = {}
    for record in records:
        columns = [record.check] if kind == "check" else dict.fromkeys(record.features or (NO_FEATURE,))
        for column in columns:
            found.setdefault(column, []).append(record)
    return found


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
