"""The tolerance table is complete, has sources, and keeps its distance from what correct kernels reach."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cases.operand_registry import FURTHER_RESULTS, OBSERVABLES
from conformance.truth import calibration, tolerances
from conformance.truth.tolerances import DTYPES
from impls.contract.declarations import Arithmetic
from reports.records import FAIL, PASS, UNSUPPORTED, Record

STORED = json.loads(tolerances.CALIBRATION.read_text())


def test_every_dtype_and_observable_has_a_limit_with_its_source() -> None:
    table = tolerances.load_default_tolerances()
    assert [(row["dtype"], row["observable"]) for row in table.rows()] == [(d, o) for d in DTYPES for o in OBSERVABLES]
    for row in table.rows():
        measured = row["observable"] not in FURTHER_RESULTS  # these have the widest limit
        assert ("correct kernels reached" if measured else "the widest limit of all") in row["source"]


def test_correct_kernels_stay_well_below_each_limit() -> None:
    table = tolerances.load_default_tolerances()
    for row in STORED["rows"]:
        limit = table.limit(row["dtype"], row["observable"])
        assert row["max_ratio"] <= limit.ratio / 1.5
        assert (row["max_rms"] or 0) <= limit.rms / 2


def test_no_limit_is_more_than_a_step_above_what_the_rule_gives() -> None:
    table = tolerances.load_default_tolerances()
    ratio, rms = (max(row[name] or 0 for row in STORED["rows"]) for name in ("max_ratio", "max_rms"))
    for row in STORED["rows"]:
        limit = table.limit(row["dtype"], row["observable"])
        assert limit.ratio < 1.5 * ratio + 1
        assert limit.rms < 1.5 * rms + 0.5
        assert row["max_rms"] is None or limit.rms < 3 * row["max_rms"] + 0.1


def test_narrow_limits_hold_for_what_was_measured() -> None:
    table = tolerances.load_default_tolerances()
    assert table.of(Arithmetic(), "cpu") == table
    assert table.of(Arithmetic(probabilities="f32"), "cpu") == table
    widest = {(max(x.ratio for x in table.limits.values()), max(x.rms for x in table.limits.values()))}
    for other in (table.of(Arithmetic(), "tpu"), table.of(Arithmetic(products="tf32"), "cpu")):
        assert {(limit.ratio, limit.rms) for limit in other.limits.values()} == widest


def test_a_limit_that_the_user_set_stays_where_nothing_was_measured() -> None:
    own = tolerances.override_limits(tolerances.load_default_tolerances(), {"f32.out": 1.5}, "pyproject.toml")
    elsewhere = own.of(Arithmetic(), "gpu")
    assert elsewhere.limit("f32", "out") == own.limit("f32", "out")
    assert elsewhere.limit("f32", "dq").ratio == 4.0


def record(dtype: str, observable: str, ratio: float, **changed: Any) -> Record:
    fields: dict[str, Any] = {"check": "forward", "rms": ratio / 4, "rms_limit": 1.5, "limit": 4.0, "verdict": PASS}
    return Record(
        implementation="right",
        platform="cpu",
        case=f"train/{dtype}/B1.T16.S16.N2.K2.H16.V16/causal/normal/s{int(100 * ratio)}",
        dtype=dtype,
        observable=observable,
        ratio=ratio,
        **{**fields, **changed},
    )


def judged() -> list[Record]:
    """Ten judgements of everything, ratios 0.1 to 1."""
    return [record(d, o, n / 10) for d in DTYPES for o in OBSERVABLES for n in range(1, 11)]


def test_a_calibration_says_what_was_reached_and_by_what() -> None:
    rms_is_not_judged = [record("f32", "dsinks", 2.0, rms_limit=None)]
    found = calibration.tabulate([*judged(), *rms_is_not_judged], level="standard", jax="0.10.2")
    rows = {(row["dtype"], row["observable"]): row for row in found["rows"]}
    assert rows["bf16", "dq"] == {
        "dtype": "bf16",
        "observable": "dq",
        "judged": 10,
        "quantiles": {"0.5": 0.5, "0.9": 0.9, "0.99": 1.0, "0.999": 1.0},
        "max_ratio": 1.0,
        "max_rms": 0.25,
        "reached_by": "right",
        "reached_on": "train/bf16/B1.T16.S16.N2.K2.H16.V16/causal/normal/s100",
    }
    assert rows["f32", "dsinks"]["max_ratio"] == 2.0
    assert rows["f32", "dsinks"]["max_rms"] == 0.25
    assert found["provenance"] == {
        "name": "at standard, 11 seeds, on cpu",
        "implementations": ["right"],
        "platforms": ["cpu"],
        "level": "standard",
        "seeds": [*range(10, 101, 10), 200],
        "jax": "0.10.2",
        "judgements": len(judged()) + 1,
    }


def test_labels_count_for_the_observable_whose_limit_judged_them() -> None:
    labels = {"out.nan": "out", "dq.huge": "dq", "out_with_residuals": "out", "effect_of_bias": "out"}
    found = calibration.tabulate([*judged(), *(record("f16", label, 2.5) for label in labels)])
    counts = {row["observable"]: row["judged"] for row in found["rows"] if row["dtype"] == "f16"}
    assert (counts["out"], counts["dq"], counts["dk"]) == (12, 11, 10)  # an effect compares two answers


def test_only_judgements_by_a_bound_count() -> None:
    others = [
        record("f32", "out.spread", 9.0, check="ensemble"),
        record("f32", "out", 9.0, verdict=UNSUPPORTED),
        msgspec.structs.replace(record("f32", "out", 9.0), ratio=None),
        record("f32", "refusal", 9.0),
    ]
    found = calibration.tabulate([*judged(), *others])
    assert max(row["max_ratio"] for row in found["rows"]) == 1.0


def test_a_calibration_is_read_back_as_a_table(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    calibration.write_calibration(calibration.tabulate([*judged(), record("f16", "dk", 2.1)], level="quick"), path)
    table = tolerances.build_tolerances(json.loads(path.read_text()))
    assert table.limit("f16", "dk").ratio == 4.0  # 1.5 * 2.1, rounded up
    assert table.limit("f16", "dk").rms == 1.0  # 1.5 * 2.1 / 4, rounded up to a half
    assert table.limit("f32", "out").ratio == 4.0  # one limit for all
    assert table.limit("f32", "out").rms == 0.8  # 3 * 1.0 / 4, rounded up to a tenth
    assert table.limit("f16", "dk").source.startswith("correct kernels reached 2.10 (rms 0.53) at quick, 11 seeds")
    assert max(len(line) for line in path.read_text().splitlines()) < 400


def test_what_was_once_reached_stays_reached() -> None:
    before = calibration.tabulate([*judged(), record("f16", "dk", 2.1)], level="standard", jax="0.10.2")
    later = calibration.tabulate([*judged(), record("f32", "dq", 1.7)], level="quick", jax="0.10.3")
    found = calibration.merge_calibrations(later, before)
    largest = {(row["dtype"], row["observable"]): (row["max_ratio"], row["max_rms"]) for row in found["rows"]}
    assert (largest["f16", "dk"], largest["f32", "dq"]) == ((2.1, 0.525), (1.7, 0.425))
    assert largest["f32", "out"] == (1.0, 0.25)
    assert found["rows"][0]["judged"] == 20
    assert found["provenance"]["name"] == "at standard, 11 seeds, on cpu, and at quick, 11 seeds, on cpu"
    assert found["provenance"]["judgements"] == sum(x["provenance"]["judgements"] for x in (before, later))
    assert set(found) == set(before)
    assert set(found["provenance"]) == set(before["provenance"])


def test_the_gradient_of_a_new_operand_has_the_widest_limit_until_it_is_measured() -> None:
    complete = tolerances.build_tolerances(STORED)
    rows = [row for row in STORED["rows"] if (row["dtype"], row["observable"]) != ("bf16", "dbias")]
    limit = tolerances.build_tolerances({**STORED, "rows": rows}).limit("bf16", "dbias")
    assert limit.ratio == complete.limit("bf16", "dbias").ratio
    assert limit.rms == max(x.rms for x in complete.limits.values())
    assert "no correct kernel was measured" in limit.source
    measured = calibration.tabulate(judged())
    assert (
        calibration.merge_calibrations(measured, {**measured, "rows": measured["rows"][1:]})["rows"][0]
        == (measured["rows"][0])
    )


def test_failures_and_gaps_are_refused() -> None:
    with pytest.raises(ValueError, match="right is not correct: fail of forward/out on train/f32"):
        calibration.tabulate([*judged(), record("f32", "out", 9.0, verdict=FAIL)])
    with pytest.raises(ValueError, match=r"no record judges f32\.dbias, bf16\.dbias, f16\.dbias"):
        calibration.tabulate([one for one in judged() if one.observable != "dbias"])
    with pytest.raises(ValueError, match="schema of the calibration is 'other'"):
        tolerances.build_tolerances({**STORED, "schema": "other"})
