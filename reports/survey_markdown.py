"""Format the results of a survey as Markdown: a table of functions for each library, and how precise they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from reports.conformity import CONFORMS, DOES_NOT_CONFORM, KNOWN_FAILURES
from reports.markdown_text import escape_inline, format_row
from reports.matrix_rows import FEATURE_KINDS
from reports.survey_page import PREFIX, WRONG, find_state
from reports.survey_results import FunctionResult, RowResult
from reports.text_format import DASH, format_number

_VERDICTS = {
    CONFORMS: "conforms",
    KNOWN_FAILURES: "conforms but for differences by design",
    DOES_NOT_CONFORM: "**wrong**, without a finding",
}
_DTYPES = FEATURE_KINDS["dtype"]
_HEADER = ("function", "version", "verdict", "wrong for", "findings", "precision", "speed")


def format_survey(rows: Sequence[RowResult], findings: Mapping[str, str]) -> str:
    """Format all rows, a section for each library.

    Args:
      rows: the results.
      findings: the title of each finding, by its name, which is that of its page in the same folder as the text's.
    """
    libraries = dict.fromkeys(row.library for row in rows)
    blocks = [_format_facts(rows)]
    for library in libraries:
        own = [row for row in rows if row.library == library]
        blocks += [f"## {escape_inline(library)}", _format_library(own, findings)]
    return "\n\n".join(filter(None, blocks))


def _format_facts(rows: Sequence[RowResult]) -> str:
    """Format when, where and with which versions the rows were judged."""
    judged = [row for row in rows if row.functions]
    days = sorted({row.started[:10] for row in judged})
    facts = {
        "judged": " to ".join(dict.fromkeys((days[0], days[-1]))) if days else "never",
        "machine": "; ".join(sorted({row.environment.get("machine", "") for row in judged} - {""})),
        "JAX": ", ".join(sorted({row.environment.get("jax", "") for row in judged} - {""})),
        "level": ", ".join(sorted({row.level for row in judged})),
        "functions": str(len({one.function for row in judged for one in row.functions})),
        "libraries": str(len({row.library for row in judged})),
    }
    lines = [format_row(*facts), format_row(*["---"] * len(facts)), format_row(*map(escape_inline, facts.values()))]
    return "\n".join(lines)


def _format_library(rows: Iterable[RowResult], findings: Mapping[str, str]) -> str:
    lines = [format_row(*_HEADER), format_row(*["---"] * len(_HEADER))]
    notes = []
    for row in rows:
        lines += [format_row(*_format_function(row, function, findings)) for function in row.functions]
        if not row.functions:
            notes.append(f"{escape_inline(row.package)} {row.version} was not judged: {escape_inline(row.reason)}.")
    table = "\n".join(lines) if len(lines) > 2 else ""
    return "\n\n".join(filter(None, (table, *notes)))


def _format_function(row: RowResult, function: FunctionResult, findings: Mapping[str, str]) -> tuple[str, ...]:
    named = [name for name in function.findings if name]
    links = [f"[{escape_inline(findings[name])}](upstream/{name}.md)" for name in named if name in findings]
    verdict = _VERDICTS.get(function.conformity, "not judged")
    if function.conformity == KNOWN_FAILURES and named:
        verdict = "**wrong**"
    elif function.conformity == CONFORMS and function.declared:
        verdict = "conforms as declared"
    return (
        f"`{function.function.removeprefix(PREFIX)}`",
        escape_inline(row.version),
        verdict,
        ", ".join(list_wrong_features(function)) or DASH,
        "; ".join(links) or DASH,
        _format_precision(function),
        ", ".join(f"{what} {format_number(speed)}" for what, speed in function.speed.items()) or DASH,
    )


def list_wrong_features(function: FunctionResult) -> list[str]:
    """List the features that findings are about, each with the dtypes in which it is wrong."""
    wrong: dict[str, list[str]] = {}
    for key, cell in function.cells.items():
        feature, _, dtype = key.rpartition(" ")
        if find_state(function, feature, cell) == WRONG:
            wrong.setdefault(feature, []).append(dtype)
    return [
        f"{feature} ({', '.join(name for name in _DTYPES if name in dtypes)})" if len(dtypes) < len(_DTYPES) else feature
        for feature, dtypes in wrong.items()
    ]


def _format_precision(function: FunctionResult) -> str:
    """Format the median and the worst ratio of passing results to their bounds, by dtype."""
    found = function.precision
    parts = [f"{d} {format_number(found[d].median)} to {format_number(found[d].worst)}" for d in _DTYPES if d in found]
    return "; ".join(parts) or DASH
