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
from reports import conformity, text_format
from reports.conformity import Contender, Counts
from reports.matrices import NO_FEATURE, list_features
from reports.matrix_columns import CHECK_KINDS, FEATURE_KINDS, group_columns

MAX_RECORDS = 20_000
"""Records that a page holds; the others are in the JSON lines, and a command is told that finds them there."""
MAX_CASES = 3_000
"""Cases that have an address on the page."""
SHOWN_PER_CELL = 3
"""Records of each cell that are there without the script."""
_MAX_REASON, _MIN_REASON = 400, 80  # characters of a reason
_MAX_ALL_REASONS = 800_000  # characters of all of them together
_JQ_OF_RUNS = (
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
class CaseCounts:
    """A case: its id, and how its records stand."""

    case: str
    counts: Counts


def build_anchors(records: Sequence[Record]) -> dict[tuple[Contender, str, str], str]:
    """The address of each cell, by contender, kind of matrix (`feature` or `check`) and column."""
    contenders = list(conformity.group_by_contender(records))
    found = {}
    for kind, columns in _list_columns(records).items():
        for i, contender in enumerate(contenders):
            for j, column in enumerate(columns):
                found[contender, kind, column] = f"records-{i}-{kind}-{j}"
    return found


@dataclasses.dataclass(frozen=True)
class RecordFiles:
    """Where records lie, as a shell reads it: those of some contenders, by their label, and those of all others.

    `runs` are what tells the runs of a contender from others in its files (`conformance.runs.Run.mark`).
    """

    every: str
    of: Mapping[str, str] = dataclasses.field(default_factory=dict)
    runs: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)

    def __getitem__(self, contender: Contender) -> str:
        """Where those of a contender lie."""
        return self.of.get(contender.label) or self.every


def build_cell_records(records: Sequence[Record], files: RecordFiles) -> dict[Contender, dict[str, list[CellRecords]]]:
    """Behind each cell, by contender and kind of matrix."""
    there = build_anchors(records)
    found: dict[Contender, dict[str, list[CellRecords]]] = {}
    for contender, group in conformity.group_by_contender(records).items():
        ranked = sorted(group, key=_rank_for_table)
        for kind, columns in _list_columns(records).items():
            members = _group_by_column(ranked, kind)
            found.setdefault(contender, {})[kind] = [
                CellRecords(
                    there[contender, kind, column],
                    column,
                    conformity.count_verdicts(members[column]),
                    tuple(members[column][:SHOWN_PER_CELL]),
                    build_query_command(contender, kind, column, files),
                )
                for column in columns
                if column in members
            ]
    return found


def build_query_command(contender: Contender, kind: str, column: str, files: RecordFiles) -> str:
    """A command that prints the records of a cell from the JSON lines, one a line (by `jq`).

    A record does not say of which run it is, but the lines before it do.
    """
    wanted = [
        f".implementation=={_quote_json(contender.implementation)}",
        f".platform=={_quote_json(contender.platform)}",
    ]
    if kind == "check":
        wanted.append(f".check=={_quote_json(column)}")
    elif column == NO_FEATURE:
        wanted.append("(.features|length)==0")
    else:
        wanted.append(f"(.features|index({_quote_json(column)}))")
    wanted.insert(0, '(.schema|startswith("attention-conformance/record/"))')
    asked = f"select({' and '.join(wanted)})"
    if runs := files.runs.get(contender.label):
        return f"jq -cn {_quote_shell(_JQ_OF_RUNS % (','.join(map(_quote_json, runs)), asked))} {files[contender]}"
    return f"jq -c {_quote_shell(asked)} {files[contender]}"


def list_cases(records: Iterable[Record]) -> tuple[list[CaseCounts], int]:
    """Cases in the order of their ids, those with something red first if there are too many, and how many are left."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(record.case, []).append(record)
    lines = [CaseCounts(case, conformity.count_verdicts(group)) for case, group in groups.items()]
    lines.sort(key=lambda line: (not line.counts.red, line.case))
    shown = sorted(lines[:MAX_CASES], key=lambda line: line.case)
    return shown, len(lines) - len(shown)


def serialize_records(records: Sequence[Record], findings: Sequence[Sequence[Record]], files: RecordFiles) -> Markup:
    """The records as a JSON text that can stand in a page; `findings` are the records of each."""
    of_finding = {record.key: number for number, group in enumerate(findings, 1) for record in group}
    contenders = list(conformity.group_by_contender(records))
    columns = _list_columns(records)
    names = {
        "contenders": _NumberedValues(contenders),
        "checks": _NumberedValues(columns["check"]),
        "observables": _NumberedValues(),
        "features": _NumberedValues(columns["feature"]),
        "cases": _NumberedValues(),
        "texts": _NumberedValues([""]),
    }
    shown = sorted(records, key=_rank_for_table)[:MAX_RECORDS]
    reasons = len({record.reason for record in shown})
    longest = max(_MIN_REASON, min(_MAX_REASON, _MAX_ALL_REASONS // max(1, reasons)))
    rows = [_serialize_row(record, names, of_finding.get(record.key, 0), longest) for record in shown]
    page = {
        "file": files.every,
        "total": len(records),
        "verdicts": [[verdict, text_format.GLYPHS[verdict]] for verdict in VERDICTS],
        "red": [VERDICTS.index(verdict) for verdict in sorted(RED)],
        "contenders": [
            [c.label, c.implementation, c.platform, files[c], ",".join(map(_quote_json, files.runs.get(c.label, ())))]
            for c in contenders
        ],
        "of_runs": _JQ_OF_RUNS,
        "cases": [[case, [names["features"].of(x) for x in features]] for case, features in names["cases"].values],
        **{name: names[name].values for name in ("checks", "observables", "features", "texts")},
        "rows": rows,
    }
    text = json.dumps(page, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    # No text of a record may end the element that it stands in.
    return Markup(text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"))


class _NumberedValues:
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


def _serialize_row(record: Record, names: Mapping[str, _NumberedValues], finding: int, longest: int) -> list[Any]:
    """Contender, check, observable, verdict, case, share, and where they are: finding, texts, command."""
    metric = conformity.find_decisive_metric(record)
    texts = names["texts"]
    told = [] if record.verdict == PASS else [text_format.format_judged(record), text_format.worst_text(record)]
    told += [text_format.pattern_text(record), text_format.shorten(record.reason, longest=longest)]
    told = [text for text in told if text]
    row = [
        names["contenders"].of(conformity.get_contender(record)),
        names["checks"].of(record.check),
        names["observables"].of(record.observable),
        VERDICTS.index(record.verdict),
        names["cases"].of((record.case, record.features or (NO_FEATURE,))),
        _round_share(metric.share if metric else None),
        finding,
        [texts.of(text) for text in told],
        1
        if record.reproduce == _build_usual_command(record)
        else texts.of(record.reproduce)
        if record.reproduce
        else 0,
    ]
    while row and row[-1] in (0, []):
        row.pop()
    return row


def _build_usual_command(record: Record) -> str:
    return f"python -m conformance run --impl={record.implementation} --case={record.case} --check={record.check}"


def _round_share(share: float | None) -> float | str | None:
    if share is None:
        return None
    if not math.isfinite(share):
        return "nan" if math.isnan(share) else "inf"
    # Enough digits to say on which side of the limit it is.
    short = float(f"{share:.4g}")
    return share if short == 1 else short


def _rank_for_table(record: Record) -> tuple[int, float, tuple[str, ...]]:
    """What did not pass first, red before the rest; then what is closest to its limit."""
    rank = 0 if record.verdict in RED else 1 if record.verdict == EXPECTED_FAIL else 3
    rank = 2 if rank == 3 and record.verdict == UNJUDGED else 4 if record.verdict == PASS else rank
    metric = conformity.find_decisive_metric(record)
    return rank, -conformity.rank_share(metric.share if metric else None), record.key


def _list_columns(records: Sequence[Record]) -> dict[str, tuple[str, ...]]:
    """The columns of both matrices, in their fixed order."""
    features = group_columns(list_features(records), FEATURE_KINDS)
    checks = group_columns((record.check for record in records), CHECK_KINDS)
    return {
        "feature": tuple(name for _, names in features for name in names),
        "check": tuple(name for _, names in checks for name in names),
    }


def _group_by_column(records: Iterable[Record], kind: str) -> dict[str, list[Record]]:
    found: dict[str, list[Record]] = {}
    for record in records:
        columns = [record.check] if kind == "check" else dict.fromkeys(record.features or (NO_FEATURE,))
        for column in columns:
            found.setdefault(column, []).append(record)
    return found


def _quote_json(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)


def _quote_shell(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
