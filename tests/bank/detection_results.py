"""Convert examinations of planted bugs to the detection table and back, and save the table."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from conformance.sensitivity.detection_table import FILE, SCHEMA
from reports.records import FAIL
from tests.bank.examination import Detection, Examination, compute_check_powers


def build_table(
    examined: Sequence[Examination],
    resolutions: Sequence[Any],
    *,
    level: str,
    environment: Mapping[str, str],
) -> dict[str, Any]:
    """Build the detection table as plain data, for a file and for reports.

    Args:
      examined: the result of examining each planted bug.
      resolutions: the smallest visible errors, as dataclasses (`tests.bank.resolution.Resolution`).
      level: the level of the grid of cases: `"smoke"`, `"quick"`, ...
      environment: versions of the software that the table was measured with, by name.
    """
    return {
        "schema": SCHEMA,
        "level": level,
        "environment": {name: environment[name] for name in ("jax", "python", "backend") if name in environment},
        "bugs": [_serialize_examination(e) for e in sorted(examined, key=lambda e: e.bug)],
        "checks": [
            {"check": one.check, "kills": one.detected, "alone": one.alone, "seconds": round(one.seconds, 1)}
            for one in compute_check_powers(examined)
        ],
        "resolution": [dataclasses.asdict(resolution) for resolution in resolutions],
    }


def merge_tables(table: Mapping[str, Any], last: Mapping[str, Any] | None) -> dict[str, Any]:
    """Complete a new table with the last one: add the seconds of each check, and take over the smallest errors.

    Args:
      table: the new table. Its rows contain bugs that were measured again, and bugs whose last results are still valid.
      last: the table that was saved before, if any.
    """
    cost = {row["check"]: row["seconds"] for row in (last or {}).get("checks", ())}
    checks = [row | {"seconds": round(row["seconds"] + cost.get(row["check"], 0.0), 1)} for row in table["checks"]]
    return {**table, "checks": checks, "resolution": (last or {}).get("resolution", [])}


def parse_examinations(table: Mapping[str, Any] | None, names: Collection[str]) -> list[Examination]:
    """Parse the rows of the named bugs from a table; names that are not in the table are ignored.

    A table does not contain the time of each bug, so `seconds` is empty.
    """
    return [
        Examination(
            bug=row["bug"],
            family=row["family"],
            kind=row["kind"],
            reference=row["reference"],
            shows=(),
            detections={check: _parse_detection(*detection) for check, detection in row["kills"].items()},
            judged=row["judged"],
            planned=row["planned"],
            seconds={},
        )
        for row in (table or {}).get("bugs", ())
        if row["bug"] in names
    ]


def _parse_detection(observable: str, ratio: float | str | None, case: str) -> Detection:
    """Build a `Detection`, the first failure by which a check saw a bug, from its entry in the table."""
    return Detection(observable, case, FAIL, float(ratio) if ratio is not None else None)


def _serialize_examination(examined: Examination) -> dict[str, Any]:
    """Build the table's row for one planted bug."""
    return {
        "bug": examined.bug,
        "family": examined.family,
        "kind": examined.kind,
        "reference": examined.reference,
        "judged": examined.judged,
        "planned": examined.planned,
        "kills": {
            check: [detection.observable, _round_ratio(detection.ratio), detection.case]
            for check, detection in examined.detections.items()
        },
    }


def _round_ratio(ratio: float | None) -> float | str | None:
    """Round a ratio to three digits; infinity and NaN become text, since JSON has no numbers for them."""
    if ratio is None:
        return None
    short = float(f"{ratio:.3g}")
    return short if short not in (float("inf"), float("-inf")) and short == short else str(short)


def save_table(table: Mapping[str, Any], path: Path = FILE) -> None:
    """Write the table as JSON with one bug per line, so that a change can be read in a diff."""
    lines = []
    for name, value in table.items():
        if isinstance(value, list):
            rows = ",\n".join(f"  {json.dumps(row, allow_nan=False)}" for row in value)
            lines.append(f" {json.dumps(name)}: [\n{rows}\n ]")
        else:
            lines.append(f" {json.dumps(name)}: {json.dumps(value, allow_nan=False)}")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
