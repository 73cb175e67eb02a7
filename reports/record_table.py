"""Serialize the records of a run as compact JSON in the HTML page, from which the page's script draws its tables.

Rows refer to shared lists of names by index. Records that did not pass come first. Passes follow, the closest to their
limits first. Records beyond `MAX_RECORDS` are left out.
"""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from markupsafe import Markup

from reports import text_format
from reports.glossary import name_row
from reports.matrices import rank_for_table
from reports.metrics import find_decisive_metric
from reports.page_model import Page
from reports.record_groups import NO_FEATURE, get_implementation
from reports.record_query import SELECT_RUNS
from reports.records import PASS, RED, VERDICTS, Record

MAX_RECORDS = 20_000
"""The most records in a page. A command on the page prints the others from the file of JSON lines."""
_MAX_REASON, _MIN_REASON = 400, 80  # bounds of the number of characters to which a reason is cut
_MAX_ALL_REASONS = 800_000  # the intended number of characters of all reasons together


class _NumberedValues:
    """A list of distinct values that finds the index of each value; indices follow the order of first appearance."""

    def __init__(self, values: Iterable[Any] = ()) -> None:
        self.values: list[Any] = []
        self._numbers: dict[Any, int] = {}
        for value in values:
            self.get_number(value)

    def get_number(self, value: Any) -> int:
        """Return the index of a value. A new value is appended to the list."""
        if value not in self._numbers:
            self._numbers[value] = len(self.values)
            self.values.append(value)
        return self._numbers[value]


def serialize_records(page: Page) -> Markup:
    """Serialize the records of a page as JSON text that is safe inside an HTML element."""
    records = page.summary.groups.records
    numbers = {record.key: panel.text.number for panel in page.findings for record in panel.text.finding.records}
    implementations, files = page.features.implementations, page.files
    names = {
        "implementations": _NumberedValues(implementations),
        "checks": _NumberedValues(page.checks.rows),
        "observables": _NumberedValues(),
        "features": _NumberedValues(page.features.rows),
        "cases": _NumberedValues(),
        "texts": _NumberedValues([""]),
    }
    shown = heapq.nsmallest(MAX_RECORDS, records, key=rank_for_table)
    reasons = len({record.reason for record in shown})
    longest = max(_MIN_REASON, min(_MAX_REASON, _MAX_ALL_REASONS // max(1, reasons)))
    rows = [_serialize_row(record, names, numbers.get(record.key, 0), longest) for record in shown]
    features = names["features"]
    data = {
        "file": files.default,
        "total": len(records),
        "verdicts": [[verdict, text_format.GLYPHS[verdict]] for verdict in VERDICTS],
        "red": [VERDICTS.index(verdict) for verdict in sorted(RED)],
        "implementations": [
            [one.label, one.name, one.platform, files.get_files(one), files.format_runs(one)] for one in implementations
        ],
        "of_runs": SELECT_RUNS,
        "cases": [[case, [features.get_number(x) for x in found]] for case, found in names["cases"].values],
        **{name: names[name].values for name in ("checks", "observables", "features", "texts")},
        "check_names": [name_row(check) for check in names["checks"].values],
        "rows": rows,
    }
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    # With `<` escaped, no text of a record can end the HTML element that holds this JSON.
    return Markup(text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"))


def _serialize_row(record: Record, names: Mapping[str, _NumberedValues], finding: int, longest: int) -> list[Any]:
    """Serialize one record as a list.

    The items are the indices of its implementation, check, observable, verdict and case; its error figure as a share of
    the limit; the number of its finding; the indices of its texts; and the index of its command. Trailing zeros and
    empty lists are left out.
    """
    metric = find_decisive_metric(record)
    texts = names["texts"]
    lines = [] if record.verdict == PASS else [text_format.format_judged(record), text_format.format_worst(record)]
    lines += [text_format.format_pattern(record), text_format.shorten_text(record.reason, longest=longest)]
    usual = f"python -m conformance run --impl={record.implementation} --case={record.case} --check={record.check}"
    row = [
        names["implementations"].get_number(get_implementation(record)),
        names["checks"].get_number(record.check),
        names["observables"].get_number(record.observable),
        VERDICTS.index(record.verdict),
        names["cases"].get_number((record.case, record.features or (NO_FEATURE,))),
        _round_share(metric.share if metric else None),
        finding,
        [texts.get_number(line) for line in lines if line],
        1 if record.reproduce == usual else texts.get_number(record.reproduce) if record.reproduce else 0,
    ]
    while row and row[-1] in (0, []):
        row.pop()
    return row


def _round_share(share: float | None) -> float | str | None:
    """Round a share of a limit to four digits, but not to 1, so that it stays on its side of the limit."""
    if share is None:
        return None
    if not math.isfinite(share):
        return "nan" if math.isnan(share) else "inf"
    rounded = float(f"{share:.4g}")
    return share if rounded == 1 else rounded
