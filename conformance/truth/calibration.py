"""Tabulate the largest error ratios that correct implementations reached; the limits of judgements follow from them.

    python -m conformance run --impl=block_flash --level=standard --seed=0 --seed=1 --seed=2 --json=block_flash.jsonl

writes the records of one implementation. `tabulate` builds one table from the records of several implementations.
`write_calibration` stores the table as `calibration.json`, from which `conformance.truth.tolerances` computes the
limits. None of this needs JAX.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cases.case_id import parse_case_id
from cases.operand_registry import FURTHER_RESULTS, OBSERVABLES
from conformance.truth.tolerances import CALIBRATION, CALIBRATION_SCHEMA, DTYPES
from reports import output_files
from reports.records import ERROR, FAIL, PASS, UNEXPECTED_PASS, Record

# Checks that compare results with the oracle element by element. Other checks compare results with each other, or have
# limits of their own.
_ORACLE_CHECKS = frozenset(
    (
        "forward",
        "residuals",
        "gradients",
        "gradients_lse",
        "gradients_part",
        "primal",
        "poison",
        "transforms",
        "sharding",
    )
)
QUANTILES = (0.5, 0.9, 0.99, 0.999)
_SIGNIFICANT_DIGITS = 3


def tabulate(records: Iterable[Record], *, level: str = "", jax: str = "") -> dict[str, Any]:
    """Build the calibration: one row for each dtype and observable, and how the ratios were measured.

    Only judgements against the oracle count, and only those that passed. A row has

    - the number of judgements, and quantiles of their largest ratios;
    - the largest ratio, with the implementation and the case that reached it;
    - the largest root mean square, or None if no root mean square was judged.

    Args:
      records: records of implementations that are known to be correct.
      level: the set of cases that was judged (`quick`, `standard`, `deep`); it is stored as provenance.
      jax: version of JAX; it is stored as provenance.

    Raises:
      ValueError: if a judgement failed, or if an observable was never judged. A failure means that the implementation
        is wrong, that it declares the wrong arithmetic, or that the bound lacks a term. None of these justifies another
        limit.
    """
    found = list(records)
    for record in found:
        if record.verdict in (FAIL, ERROR, UNEXPECTED_PASS):
            raise ValueError(
                f"{record.implementation} is not correct: {record.verdict} of {record.check}/{record.observable} "
                f"on {record.case}; calibrate with records that have no failure"
            )
    judged: dict[tuple[str, str], list[Record]] = {}
    for record in found:
        if record.verdict == PASS and record.ratio is not None and (observable := _find_observable(record)):
            judged.setdefault((record.dtype, observable), []).append(record)
    needed = [(d, o) for d in DTYPES for o in OBSERVABLES if o not in FURTHER_RESULTS]
    if missing := [f"{d}.{o}" for d, o in needed if (d, o) not in judged]:
        raise ValueError(f"no record judges {', '.join(missing)}: add records of implementations that return these")
    counted = [record for group in judged.values() for record in group]
    provenance = {
        "implementations": sorted({record.implementation for record in counted}),
        "platforms": sorted({record.platform for record in counted}),
        "level": level,
        "seeds": sorted({parse_case_id(case).seed for case in {record.case for record in counted}}),
        "jax": jax,
        "judgements": len(counted),
    }
    rows = [_build_row(d, o, judged[d, o]) for d in DTYPES for o in OBSERVABLES if (d, o) in judged]
    return {
        "schema": CALIBRATION_SCHEMA,
        "provenance": {"name": _format_source(provenance), **provenance},
        "rows": rows,
    }


def merge_calibrations(table: Mapping[str, Any], last: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two calibrations: take the larger of each maximum, and the quantiles of the one with more judgements.

    So merging never narrows a limit, since an error that a correct implementation once reached may occur again. A limit
    becomes narrower only if all implementations are measured anew. A result that only `table` has keeps its row.
    """
    rows = {(row["dtype"], row["observable"]): row for row in last["rows"]}
    merged = [
        _merge_rows(row, old) if (old := rows.get((row["dtype"], row["observable"]))) else row for row in table["rows"]
    ]
    here, before = table["provenance"], last["provenance"]
    provenance: dict[str, Any] = {
        "name": f"{before['name']}, and {here['name']}",
        **{
            field: " and ".join(dict.fromkeys(filter(None, (before[field], here[field])))) for field in ("level", "jax")
        },
        "judgements": before["judgements"] + here["judgements"],
    }
    for field in ("implementations", "platforms", "seeds"):
        provenance[field] = sorted({*before[field], *here[field]})
    return {"schema": CALIBRATION_SCHEMA, "provenance": provenance, "rows": merged}


def _merge_rows(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two rows of the same dtype and observable."""
    reached = max(one, other, key=lambda row: row["max_ratio"])
    judged = max(one, other, key=lambda row: row["judged"])
    rms = [row["max_rms"] for row in (one, other) if row["max_rms"] is not None]
    return {
        **reached,
        "judged": one["judged"] + other["judged"],
        "quantiles": judged["quantiles"],
        "max_rms": max(rms) if rms else None,
    }


def write_calibration(calibration: Mapping[str, Any], path: Path = CALIBRATION) -> None:
    """Write a calibration as JSON, one line for each row."""
    rows = ",\n".join(f"  {json.dumps(row, allow_nan=False)}" for row in calibration["rows"])
    output_files.write_text(
        path,
        f'{{\n "schema": {json.dumps(calibration["schema"])},\n'
        f' "provenance": {json.dumps(calibration["provenance"])},\n "rows": [\n{rows}\n ]\n}}\n',
    )


def _find_observable(record: Record) -> str:
    """Return the observable whose limit judged the record; empty if it was not compared with the oracle."""
    if record.check not in _ORACLE_CHECKS:
        return ""
    name = record.observable.partition(".")[0].removesuffix("_with_residuals")
    return name if name in OBSERVABLES else ""


def _build_row(dtype: str, observable: str, group: Sequence[Record]) -> dict[str, Any]:
    """Build the row of one dtype and observable from its records."""
    ratios = sorted(record.ratio for record in group if record.ratio is not None)
    largest = max(group, key=lambda record: record.ratio or 0.0)
    rms = [record.rms for record in group if record.rms is not None and record.rms_limit is not None]
    return {
        "dtype": dtype,
        "observable": observable,
        "judged": len(ratios),
        "quantiles": {str(share): _round_to_digits(ratios[math.ceil(share * len(ratios)) - 1]) for share in QUANTILES},
        "max_ratio": _round_to_digits(ratios[-1]),
        "max_rms": _round_to_digits(max(rms)) if rms else None,
        "reached_by": largest.implementation,
        "reached_on": largest.case,
    }


def _round_to_digits(value: float) -> float:
    """Round to `_SIGNIFICANT_DIGITS` significant digits."""
    return float(f"{value:.{_SIGNIFICANT_DIGITS}g}")


def _format_source(provenance: Mapping[str, Any]) -> str:
    """Format the level, the number of seeds and the platforms, as the tolerance table shows them."""
    level = f"at {provenance['level']}, " if provenance["level"] else ""
    seeds = len(provenance["seeds"])
    return f"{level}{seeds} {'seed' if seeds == 1 else 'seeds'}, on {', '.join(provenance['platforms'])}"
