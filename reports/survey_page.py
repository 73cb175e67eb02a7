"""Render the results of a survey as one HTML page: functions of published libraries against features and dtypes."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from reports import output_files
from reports.conformity import CONFORMS, DOES_NOT_CONFORM, IN_PART, KNOWN_FAILURES
from reports.matrix_rows import FEATURE_KINDS
from reports.survey_results import CALL_CHECKS, Cell, FunctionResult, RowResult
from reports.template_environment import create_environment

DTYPES = FEATURE_KINDS["dtype"]
PREFIX = "library:"
_KINDS = ("phase", "heads", "mask", "operands", "shape", "storage", "quantised cache")
_SPECIFIC = frozenset(
    name for kind in ("mask", "operands", "shape", "storage", "quantised cache") for name in FEATURE_KINDS[kind]
)
_ALWAYS = frozenset({"full"})  # a mask that a finding about no mask has too

NEW, WRONG, RAISES, KNOWN, PASSES, HIDDEN, REFUSES, UNJUDGED, ABSENT = (
    "new",
    "wrong",
    "raises",
    "known",
    "pass",
    "hidden",
    "refuses",
    "unjudged",
    "absent",
)
STATES: Mapping[str, tuple[str, str]] = {
    PASSES: ("✓", "conforms"),
    KNOWN: ("○", "conforms but for known failures without a finding"),
    WRONG: ("✗", "wrong results, a finding says how"),
    RAISES: ("↯", "raises, a finding says where"),
    NEW: ("!", "wrong, and not known before"),
    HIDDEN: ("·", "fails for another reason in every case"),
    REFUSES: ("\N{EN DASH}", "not supported"),
    UNJUDGED: ("?", "not judged"),
}
"""The mark of each state of a cell, and what it means."""


@dataclasses.dataclass(frozen=True)
class Mark:
    """The mark of one dtype in a cell of the page."""

    dtype: str
    state: str
    glyph: str
    title: str


@dataclasses.dataclass(frozen=True)
class Line:
    """One function of one version, as the page shows it."""

    row: RowResult
    function: FunctionResult
    name: str
    state: str
    is_newest: bool
    marks: Mapping[str, tuple[Mark, ...]]
    command: str


def find_state(function: FunctionResult, feature: str, cell: Cell, raising: Collection[str] = ()) -> str:
    """Tell how a function does on a feature in a dtype.

    A finding whose failures share masks, operands or the like counts for these alone: a failure without them would be
    another finding's. Any other finding counts wherever it was seen.
    """
    if cell.failed:
        return NEW
    mine = [name for name in cell.findings if _concerns(function, name, feature)]
    if any(mine):
        return _classify_findings(mine, raising)
    if cell.passed:
        return KNOWN if mine else PASSES
    if cell.known:
        return KNOWN if mine else HIDDEN
    if cell.declined:
        return REFUSES
    return UNJUDGED if cell.unjudged else ABSENT


def _classify_findings(findings: Iterable[str], raising: Collection[str]) -> str:
    """Return `RAISES` if all findings that have a name only raise, else `WRONG`."""
    return RAISES if all(name in raising for name in findings if name) else WRONG


def _concerns(function: FunctionResult, finding: str, feature: str) -> bool:
    shared = frozenset(function.finding_features.get(finding, ()))
    special = (shared & _SPECIFIC) - _ALWAYS
    return feature in special if special and feature not in CALL_CHECKS else True


def list_features(rows: Sequence[RowResult]) -> list[tuple[str, tuple[str, ...]]]:
    """List the features for which there is a judged record, by kind, in the order of the matrices of other pages."""
    there = {
        key.rpartition(" ")[0]
        for row in rows
        for function in row.functions
        for key, cell in function.cells.items()
        if cell.passed or cell.failed or cell.known
    }
    columns = [*((kind, FEATURE_KINDS[kind]) for kind in _KINDS), ("calls", CALL_CHECKS)]
    found = [(kind, tuple(name for name in names if name in there)) for kind, names in columns]
    return [(kind, names) for kind, names in found if names]


def build_lines(rows: Sequence[RowResult], features: Sequence[str], raising: Collection[str] = ()) -> list[Line]:
    """Build the lines of the table: all functions of all versions that were judged."""
    newest: dict[str, str] = {}
    for row in rows:  # the newest version of a library comes first
        if row.functions:
            newest.setdefault(row.library, row.version)
    return [
        _build_line(row, function, features, raising, is_newest=newest[row.library] == row.version)
        for row in rows
        for function in row.functions
    ]


def _build_line(
    row: RowResult, function: FunctionResult, features: Sequence[str], raising: Collection[str], *, is_newest: bool
) -> Line:
    marks = {feature: tuple(_build_mark(function, feature, dtype, raising) for dtype in DTYPES) for feature in features}
    name = function.function.removeprefix(PREFIX)
    known = _classify_findings(function.findings, raising) if any(function.findings) else KNOWN
    state = {CONFORMS: PASSES, KNOWN_FAILURES: known, DOES_NOT_CONFORM: NEW, IN_PART: IN_PART}
    return Line(
        row=row,
        function=function,
        name=name,
        state=state.get(function.conformity, UNJUDGED),
        is_newest=is_newest,
        marks=marks,
        command=f"python -m conformance survey --library={name}=={row.version} --level={row.level}",
    )


def _build_mark(function: FunctionResult, feature: str, dtype: str, raising: Collection[str]) -> Mark:
    cell = function.cells.get(f"{feature} {dtype}", Cell())
    state = find_state(function, feature, cell, raising)
    glyph, meaning = STATES.get(state, ("", "no case"))
    words = [f"{feature}, {dtype}: {meaning}{' as declared' if state == PASSES and function.declared else ''}"]
    named = [name for name in cell.findings if name and _concerns(function, name, feature)]
    words += [f"finding {', '.join(named)}"] if named else []
    counts = {"passed": cell.passed, "failed": cell.failed, "known": cell.known, "declined": cell.declined}
    words += [", ".join(f"{count} {word}" for word, count in counts.items() if count)]
    words += [cell.reason] if cell.reason and state in (REFUSES, UNJUDGED) else []
    words += [f"Repeat: --case={cell.example}"] if cell.example and state in (WRONG, RAISES, NEW) else []
    return Mark(dtype, state, glyph, ". ".join(filter(None, words)))


def render_survey_page(rows: Sequence[RowResult], findings: Mapping[str, str], raising: Collection[str] = ()) -> str:
    """Render the page. The same results always give the same text.

    Args:
      rows: the results.
      findings: the titles of the findings, by their names.
      raising: the names of the findings whose calls only raise.
    """
    kinds = list_features(rows)
    features = [name for _, names in kinds for name in names]
    lines = build_lines(rows, features, raising)
    environments = [row.environment for row in rows if row.functions]
    return (
        create_environment()
        .get_template("survey.html.j2")
        .render(
            rows=rows,
            kinds=kinds,
            features=features,
            lines=lines,
            states=STATES,
            in_part=IN_PART,
            dtypes=DTYPES,
            findings=findings,
            libraries=sorted({row.library for row in rows if row.functions}, key=str.lower),
            days=sorted({row.started[:10] for row in rows if row.started}),
            machines=sorted({found.get("machine", "") for found in environments} - {""}),
            jax=sorted({found["jax"] for found in environments if "jax" in found}),
            levels=sorted({row.level for row in rows if row.functions}),
            unjudged=[row for row in rows if not row.functions],
            used={name for line in lines for name in line.function.findings if name},
        )
    )


def save_survey_page(
    path: Path, rows: Sequence[RowResult], findings: Mapping[str, str], raising: Collection[str] = ()
) -> None:
    """Render the page and write it to `path`. Raises `OSError` if it cannot be written."""
    output_files.write_text(path, render_survey_page(rows, findings, raising))
