"""Records are strict JSON lines: they are read back unchanged, merge, and are refused where they are malformed."""

from __future__ import annotations

import json
import math
from pathlib import Path

import msgspec
import numpy as np
import pytest

from reports import records
from reports.records import (
    FAIL,
    MAX_CELLS,
    PASS,
    UNJUDGED,
    ErrorMap,
    Record,
    RecordFileError,
    Worst,
)

RECORD = Record(
    implementation="kernel",
    platform="cpu",
    case="train/f32/x",
    check="forward",
    observable="out",
    verdict=FAIL,
    features=("f32", "causal"),
    ratio=math.inf,
    rms=1.25,
    worst=Worst(index=(0, 3), got=math.nan, expected=-math.inf, bound=0.5),
    reason="naïve",
)


def test_a_record_comes_back_as_it_was() -> None:
    line = records.serialize_record(RECORD)
    json.loads(line, parse_constant=pytest.fail)  # strict JSON has no NaN and no Infinity
    found = records.parse_record(line)
    assert found.worst is not None
    assert math.isnan(found.worst.got)
    assert msgspec.structs.replace(found, worst=None) == msgspec.structs.replace(RECORD, worst=None)


def test_numbers_of_numpy_are_written_as_numbers() -> None:
    worst = Worst(index=(0, 3), got=np.float64(1.5), expected=np.float64("inf"), bound=0.5)
    computed = msgspec.structs.replace(RECORD, ratio=np.float64(0.1), worst=worst, figures={"rows": np.float64(3)})
    assert records.parse_record(records.serialize_record(computed)) == computed


def test_the_worse_of_two_answers_counts_whichever_comes_first() -> None:
    passed = msgspec.structs.replace(RECORD, verdict=PASS)
    unjudged = msgspec.structs.replace(RECORD, verdict=UNJUDGED)
    assert records.merge_records([RECORD], [passed]) == records.merge_records([passed], [RECORD]) == [RECORD]
    assert records.merge_records([unjudged], [passed]) == [passed]


def test_answers_of_two_runs_stand_beside_each_other() -> None:
    passed = msgspec.structs.replace(RECORD, verdict=PASS, run="jax 0.12.0")
    assert records.merge_records([RECORD], [passed]) == [RECORD, passed]


def test_a_torn_last_line_is_noted_and_loses_nothing_else(tmp_path: Path) -> None:
    first = msgspec.structs.replace(RECORD, worst=None)
    line = records.serialize_record(first)
    (tmp_path / "r.jsonl").write_text(f"{line}\n{line[:40]}")
    (_, found), (_, note) = records.iter_lines(tmp_path / "r.jsonl")
    assert found == first
    assert "torn" in str(note)
    assert records.read_jsonl(tmp_path / "r.jsonl") == [first]
    (tmp_path / "r.jsonl").write_text(line[:40])  # nothing says that this was ever one of ours
    with pytest.raises(ValueError, match="not a conformance record"):
        records.read_jsonl(tmp_path / "r.jsonl")


@pytest.mark.parametrize("line", ["", "3", "null", "[]", "{}", '{"schema": "attention-conformance/record/1"}', "{"])
def test_what_is_no_record_is_named_by_file_and_line(line: str, tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    file.write_text(records.serialize_record(RECORD) + "\n" + line + "\n")
    with pytest.raises(ValueError, match=r"r\.jsonl:2 is not a conformance record"):
        records.read_jsonl(file)


def test_an_unknown_field_is_refused(tmp_path: Path) -> None:
    data = json.loads(records.serialize_record(RECORD)) | {"surprise": 1}
    (tmp_path / "r.jsonl").write_text(json.dumps(data) + "\n")
    with pytest.raises(ValueError, match="surprise"):
        records.read_jsonl(tmp_path / "r.jsonl")


@pytest.mark.parametrize(
    "figures",
    [
        {"ratio": 5.0, "limit": 4.0},
        {"ratio": "nan", "limit": 4.0},
        {"ratio": "nan"},
        {"ratio": 0.5, "limit": "nan"},
        {"ratio": 0.5, "limit": 4.0, "rms": 1.5, "rms_limit": 0.9},
        {"ratio": "inf"},
    ],
)
def test_a_pass_that_its_own_figures_deny_is_refused(figures: dict[str, object], tmp_path: Path) -> None:
    none = dict.fromkeys(("ratio", "limit", "rms", "rms_limit"))
    data = json.loads(records.serialize_record(msgspec.structs.replace(RECORD, verdict=PASS))) | none | figures
    (tmp_path / "r.jsonl").write_text(json.dumps(data) + "\n")
    with pytest.raises(ValueError, match=r"r\.jsonl:1 .* a pass whose r"):
        records.read_jsonl(tmp_path / "r.jsonl")


def test_a_pass_at_its_limit_is_one() -> None:
    passed = msgspec.structs.replace(RECORD, verdict=PASS, ratio=4.0, limit=4.0, rms=0.9, rms_limit=0.9, worst=None)
    assert records.parse_record(records.serialize_record(passed)) == passed


def test_figures_come_back_and_a_line_without_them_is_read_too() -> None:
    measured = msgspec.structs.replace(
        RECORD, worst=None, figures={"compile_seconds": 1.5, "temporary_bytes": math.inf}
    )
    line = records.serialize_record(measured)
    json.loads(line, parse_constant=pytest.fail)
    assert records.parse_record(line) == measured
    plain = records.serialize_record(msgspec.structs.replace(RECORD, worst=None))
    assert "figures" not in plain
    assert records.parse_record(plain).figures == {}


DRAWN = ErrorMap(
    axes=("T", "BN"),
    shape=(3, 2),
    cells=("-0", "19", "82"),
    at=(0, 1),
    mask=("10", "21", "22"),
    mask_shape=(3, 300),
    marks="058",
    along="T",
    blocks=(128, 0),
)


def test_a_pattern_and_its_picture_come_back_and_most_lines_have_none() -> None:
    seen = msgspec.structs.replace(RECORD, worst=None, pattern="only the last row; there zero", error_map=DRAWN)
    assert records.parse_record(records.serialize_record(seen)) == seen
    assert hash(records.parse_record(records.serialize_record(seen))) == hash(seen)
    plain = records.serialize_record(msgspec.structs.replace(RECORD, worst=None))
    assert "pattern" not in plain
    assert "error_map" not in plain
    assert (records.parse_record(plain).pattern, records.parse_record(plain).error_map) == ("", None)


def test_a_pattern_is_one_line_that_shows() -> None:
    seen = msgspec.structs.replace(RECORD, pattern="only\nrows\x1b[2J")
    assert seen.pattern == "only rows\\x1b[2J"


def test_a_picture_is_small() -> None:
    full = msgspec.structs.replace(DRAWN, cells=("8" * MAX_CELLS,) * MAX_CELLS, mask=("2" * MAX_CELLS,) * MAX_CELLS)
    assert len(records.serialize_record(msgspec.structs.replace(RECORD, error_map=full))) < 2000


@pytest.mark.parametrize(
    "changed",
    [
        {"cells": ["<b>"]},
        {"cells": ["0" * (MAX_CELLS + 1)]},
        {"cells": ["0"] * (MAX_CELLS + 1)},
        {"cells": ["00", "0"]},
        {"cells": "00"},
        {"cells": [3]},
        {"cells": [["0"]]},
        {"mask": ["x"]},
        {"marks": "0\n"},
        {"marks": 3},
        {"axes": ["T"]},
        {"axes": ["T", "<script>"]},
        {"axes": ["T", 3]},
        {"axes": ["T", ""]},
        {"shape": [3, -1]},
        {"shape": [3, 1.5]},
        {"shape": [3, True]},
        {"shape": [3, 10**30]},
        {"shape": 3},
        {"at": ["0", "1"]},
        {"mask_shape": [1, 2, 3]},
        {"along": "x"},
        {"along": ["T"]},
        {"blocks": ["128", 0]},
        {"blocks": 128},
        {"surprise": 1},
    ],
)
def test_a_picture_of_other_types_and_sizes_is_refused(changed: dict[str, object], tmp_path: Path) -> None:
    data = json.loads(records.serialize_record(msgspec.structs.replace(RECORD, error_map=DRAWN)))
    data["error_map"] |= changed
    file = tmp_path / "r.jsonl"
    file.write_text(json.dumps(data) + "\n")
    with pytest.raises(ValueError, match=r"r\.jsonl:1 is not a conformance record"):
        records.read_jsonl(file)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("error_map", "x"),
        ("error_map", 3),
        ("error_map", []),
        ("error_map", True),
        ("pattern", 3),
        ("pattern", ["only"]),
        ("pattern", {"a": 1}),
        ("pattern", None),
        ("ratio", "1.5"),
        ("ratio", True),
        ("seconds", "inf"),
        ("seconds", None),
        ("figures", {"rows": None}),
        ("worst", {"index": [0], "got": 1.0, "expected": 1.0}),
        ("features", "f32"),
        ("schema", "attention-conformance/record/9"),
    ],
)
def test_a_field_of_another_type_is_named(field: str, value: object) -> None:
    data = json.loads(records.serialize_record(RECORD)) | {field: value}
    with pytest.raises(ValueError, match=rf"`\$\.{field}"):
        records.parse_record(json.dumps(data))


def test_a_line_that_is_not_unicode_is_refused(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_bytes(records.serialize_record(RECORD).encode() + b"\n\xff\n")
    with pytest.raises(RecordFileError, match="at byte"):
        records.read_jsonl(tmp_path / "r.jsonl")


def test_half_a_surrogate_pair_is_written_as_its_escape() -> None:
    line = records.serialize_strict_json({"command": "run \udcff"})
    assert json.loads(line) == {"command": "run \\udcff"}
