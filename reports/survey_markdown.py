"""Format the results of a survey as Markdown tables: verdicts, versions, precision, and what was not judged."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from urllib.parse import quote

from reports.conformity import CONFORMS, DOES_NOT_CONFORM, IN_PART, KNOWN_FAILURES, NOT_JUDGED
from reports.matrix_rows import FEATURE_KINDS
from reports.survey_page import PREFIX
from reports.survey_results import CALL_CHECKS, Cell, FunctionResult, RowResult
from reports.text_format import DASH, escape_inline, format_code, format_number, format_row

_DTYPES = FEATURE_KINDS["dtype"]
_SPECIFIC = ("mask", "operands", "shape", "storage", "quantised cache")
_UNREMARKABLE = ("full", "dense", "offset")  # masks that stand for no mask, or for any
_NARROW_PHASES = ("prefill", "decode")
_SPEEDS = ("full forward", "full forward+backward", "causal forward", "causal forward+backward")


def format_facts(rows: Sequence[RowResult]) -> str:
    """Format when, where and with which versions the rows were judged."""
    judged = [row for row in rows if row.functions]
    days = sorted({row.started[:10] for row in judged})
    facts = {
        "judged": " to ".join(dict.fromkeys((days[0], days[-1]))) if days else "never",
        "machine": "; ".join(sorted({row.environment.get("machine", "") for row in judged} - {""})),
        "JAX": ", ".join(sorted({row.environment.get("jax", "") for row in judged} - {""})),
        "libraries": str(len({row.library for row in judged})),
        "versions": str(len(judged)),
        "functions": str(len({one.function for row in judged for one in row.functions})),
        "results": f"{sum(_count_results(one) for row in judged for one in row.functions):,}",
    }
    return _format_table(tuple(facts), [tuple(map(escape_inline, facts.values()))])


def _count_results(function: FunctionResult) -> int:
    """Count the judged results of a function: each has one dtype, or is of a check of calls."""
    cells = [function.cells.get(f"{name} {d}", Cell()) for d in _DTYPES for name in (d, *CALL_CHECKS)]
    return sum(cell.passed + cell.failed + cell.known for cell in cells)


def format_newest(rows: Sequence[RowResult], raising: Collection[str] = ()) -> str:
    """Format the verdict on each function in the newest version that was judged.

    Args:
      raising: the findings whose calls only raise, as they do not give wrong results.
    """
    return _format_table(
        ("library", "function", "level", "verdict", "findings"),
        [
            (
                _name_version(row),
                _name_function(one),
                escape_inline(row.level),
                _name_verdict(one, raising),
                _link_findings(one, raising),
            )
            for row in find_newest(rows)
            for one in row.functions
        ],
    )


def format_versions(rows: Sequence[RowResult], raising: Collection[str] = ()) -> str:
    """Format the verdicts on functions in all versions, for libraries judged in several; equal ones share a line."""
    lines: dict[tuple[str, str, str, str], list[str]] = {}
    for library in dict.fromkeys(row.library for row in rows):
        judged = [row for row in rows if row.library == library and row.functions]
        names = dict.fromkeys(one.function for row in judged for one in row.functions)
        for name in names if len(judged) > 1 else ():
            for row in judged:
                for one in row.functions:
                    if one.function == name:
                        verdict, findings = _name_verdict(one, raising), _link_findings(one, raising)
                        key = (_name_function(one), escape_inline(row.level), verdict, findings)
                        lines.setdefault(key, []).append(f"{row.version} (JAX {row.environment.get('jax', '')})")
    return _format_table(
        ("function", "versions", "level", "verdict", "findings"),
        [(key[0], escape_inline(", ".join(versions)), *key[1:]) for key, versions in lines.items()],
    )


def format_precision(rows: Sequence[RowResult]) -> str:
    """Format the median and the largest ratio of passing results, by dtype, for the newest versions."""
    lines = []
    for row in find_newest(rows):
        for one in row.functions:
            found = [one.precision.get(dtype) for dtype in _DTYPES]
            cells = [f"{format_number(p.median)}, {format_number(p.worst)}" if p else DASH for p in found]
            if any(found):
                lines.append((_name_version(row), _name_function(one), *cells))
    return _format_table(("library", "function", *_DTYPES), lines)


def format_speed(rows: Sequence[RowResult]) -> str:
    """Format how fast the functions are beside `block_flash`, for the newest versions that were timed."""
    lines = [
        (
            _name_version(row),
            _name_function(one),
            *(format_number(one.speed[key]) if key in one.speed else DASH for key in _SPEEDS),
        )
        for row in find_newest(rows)
        for one in row.functions
        if one.speed
    ]
    return _format_table(("library", "function", *_SPEEDS), lines)


def format_unjudged(rows: Sequence[RowResult]) -> str:
    """Format the versions and functions that were not judged, with the reason."""
    lines = [
        (
            f"{escape_inline(row.package)} {escape_inline(row.version)}",
            escape_inline(row.state),
            escape_inline(row.reason),
        )
        for row in rows
        if not row.functions
    ]
    for row in rows:
        for one in row.functions:
            if one.conformity == NOT_JUDGED:
                reasons = dict.fromkeys(cell.reason for cell in one.cells.values() if cell.reason)
                lines.append((_name_function(one), "not judged", escape_inline(next(iter(reasons), one.text))))
    return _format_table(("what", "state", "reason"), list(dict.fromkeys(lines)))


def find_newest(rows: Iterable[RowResult]) -> list[RowResult]:
    """Return the newest judged version of each library, which is the first of its rows."""
    newest: dict[str, RowResult] = {}
    for row in rows:
        if row.functions:
            newest.setdefault(row.library, row)
    return list(newest.values())


def describe_scope(function: FunctionResult, finding: str) -> str:
    """Describe where a finding was seen: the dtype and the features that all its failures share; empty if none."""
    shared = frozenset(function.finding_features.get(finding, ()))
    words = [dtype for dtype in _DTYPES if dtype in shared]
    special = [one for kind in _SPECIFIC for one in FEATURE_KINDS[kind] if one in shared and one not in _UNREMARKABLE]
    return ", ".join([*words, *(special or (phase for phase in _NARROW_PHASES if phase in shared))])


def _name_version(row: RowResult) -> str:
    return f"{escape_inline(row.package)} {escape_inline(row.version)}"


def _name_function(function: FunctionResult) -> str:
    platform = "" if function.platform == "cpu" else f" ({escape_inline(function.platform)})"
    return f"{format_code(function.function.removeprefix(PREFIX))}{platform}"


def _name_verdict(function: FunctionResult, raising: Collection[str]) -> str:
    if function.conformity == DOES_NOT_CONFORM:
        return "**wrong**, not explained"
    if function.conformity == KNOWN_FAILURES:
        named = [name for name in function.findings if name]
        kinds = {
            "**wrong**": [name for name in named if name not in raising],
            "**raises**": [name for name in named if name in raising],
        }
        parts = [f"{kind}{' in f16' * _are_in_f16(function, names)}" for kind, names in kinds.items() if names]
        return ", ".join(parts) or "conforms but for differences by design"
    if function.conformity == CONFORMS:
        return "conforms as declared" if function.declared else "conforms"
    return IN_PART if function.conformity == IN_PART else "not judged"


def _are_in_f16(function: FunctionResult, findings: Iterable[str]) -> bool:
    """Return whether all failures of some findings of a function are in f16."""
    return all("f16" in function.finding_features.get(name, ()) for name in findings)


def _link_findings(function: FunctionResult, raising: Collection[str]) -> str:
    links = []
    for name in filter(None, function.findings):
        scope = ", ".join(filter(None, ("raises" * (name in raising), describe_scope(function, name))))
        links.append(
            f"[{escape_inline(name)}](upstream/{quote(name)}.md)" + (f" ({escape_inline(scope)})" * bool(scope))
        )
    return ", ".join(links) or DASH


def _format_table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(format_row(*line) for line in (header, ["---"] * len(header), *lines))
