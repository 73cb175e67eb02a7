"""Files of records that a person, a fault or a forger changed are read, or refused with one line."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.judging.run_aggregation import aggregate_runs
from reports import records
from reports.records import (
    COMPLETE,
    FAIL,
    PASS,
    CoveringArraySize,
    End,
    ErrorMap,
    Kernel,
    PlannedJob,
    Query,
    Record,
    RecordedRun,
    RecordFileError,
    Run,
    Worst,
    read_runs,
    serialize_end,
    serialize_job,
    serialize_probe,
    serialize_run,
)
from tests.reports.report_samples import render_html, render_markdown

CASES = tuple(f"train/f32/B1.T{n}.S{n}.N2.K2.H16.V16/causal/normal/s0" for n in (16, 32))
RUN = Run(
    started="2026-01-01T00:00:00+00:00",
    command="run",
    level="quick",
    seeds=(0,),
    query=Query(impl=["kernel"], all=False, level=None, seed=[], timeout=300.0),
    environment={"jax": "0.10.2"},
    tolerances=({"dtype": "f32", "observable": "out", "limit": 4.0},),
    kernels={
        "kernel": Kernel(
            package="kernels 1.2",
            declared={"behind_mask": "finite"},
            block_lengths=(128,),
            arrays=(CoveringArraySize(strength=2, combinations=6), CoveringArraySize(strength=2, combinations=0)),
        )
    },
    jobs=tuple(PlannedJob("kernel", case, ("forward",), (row, "")) for case, row in zip(CASES, "01", strict=True)),
    whole={"kernel": 3},
    resumed=(),
    id="ab12",
)
PASSED = Record(
    implementation="kernel",
    platform="cpu",
    case=CASES[0],
    check="forward",
    observable="out",
    verdict=PASS,
    dtype="f32",
    features=("f32", "causal"),
    ratio=0.5,
    limit=4.0,
    figures={"compile_seconds": 0.5, "rows": 3},
)
FAILED = msgspec.structs.replace(
    PASSED,
    case=CASES[1],
    verdict=FAIL,
    ratio=math.inf,
    worst=Worst(index=(0, 3), got=math.nan, expected=-1.0, bound=0.5),
    error_map=ErrorMap(axes=("T", "BN"), shape=(3, 2), cells=("-0", "19"), marks="05", along="T"),
    reason="ratio inf exceeds 4",
)
LINES = [
    line
    for text in (
        serialize_run(RUN),
        serialize_job(0, [PASSED]),
        serialize_job(1, [FAILED]),
        serialize_probe(FAILED),
        serialize_end(End(ended="2026-01-01T00:01:00+00:00", how=COMPLETE, jobs=2, seconds=60.0)),
    )
    for line in text.splitlines()
]

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([2**64, -1, 10**30, 10**400])
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["inf", "nan", "-inf", "", "x" * 3000, "\x1b[31m\n", "kernel", CASES[0], "pass", "fail"])
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def of_the_type_of(value: Any) -> st.SearchStrategy[Any]:
    """Draw other values of the same JSON type, which a schema alone cannot tell from right ones."""
    if isinstance(value, bool):
        return st.booleans()
    if isinstance(value, int | float):
        return st.integers(0, 3) | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    if isinstance(value, str):
        return st.sampled_from(["inf", "nan", "", "x" * 3000, "\x1b[31m\n", "*", "kernel", "2/3", *CASES]) | VALUES
    if isinstance(value, list):
        return st.just([]) | st.just(value * 2)
    return st.just({})


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Yield the path to each value within a JSON value, by keys and indices."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, item in items for found in ((*path, key), *places(item, (*path, key)))]


@st.composite
def changed_fields(draw: st.DrawFn) -> bytes:
    """Draw a file with fields replaced, removed, renamed or repeated in some lines."""
    lines = [json.loads(line) for line in LINES]
    texts = list(LINES)
    for number in draw(st.lists(st.sampled_from(range(len(lines))), min_size=1, max_size=2)):
        data = lines[number]
        path = draw(st.sampled_from(places(data)))
        parent = data
        for key in path[:-1]:
            parent = parent[key]
        how = draw(st.sampled_from(["replace", "resemble", "resemble", "delete", "add", "twice"]))
        if how == "replace":
            parent[path[-1]] = draw(VALUES)
        elif how == "resemble":
            parent[path[-1]] = draw(of_the_type_of(parent[path[-1]]))
        elif how == "delete":
            del parent[path[-1]]
        elif how == "add" and isinstance(parent, dict):
            parent[draw(st.text(max_size=5))] = draw(VALUES)
        texts[number] = json.dumps(data)
        if how == "twice":
            texts[number] = texts[number][:-1] + ", " + json.dumps({str(path[0]): draw(VALUES)})[1:]
    return "".join(f"{text}\n" for text in texts).encode()


@st.composite
def changed_lines(draw: st.DrawFn) -> bytes:
    """Draw a file with lines reordered, missing or repeated."""
    return "".join(f"{line}\n" for line in draw(st.lists(st.sampled_from(LINES), max_size=8))).encode()


@st.composite
def changed_bytes(draw: st.DrawFn) -> bytes:
    """Draw a file with bytes removed, replaced or repeated."""
    content = "".join(f"{line}\n" for line in LINES).encode()
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(content)))
        until = draw(st.integers(at, min(len(content), at + 40)))
        put = draw(
            st.sampled_from([b"", b"\0", b"\n", b'"', b"}", b"[" * 3000, b"9" * 5000, b"\xff", b"\\ud800", b"NaN"])
        )
        content = content[:at] + put + content[draw(st.sampled_from([at, until])) :]
    return content


MUTATED = st.one_of(changed_fields(), changed_lines(), changed_bytes())


def check_reading(content: bytes, reports: Callable[..., str] | None = None) -> None:
    """Read the content of a file, and accept only runs and the one error."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "r.jsonl"
        path.write_bytes(content)
        found = [_read(read, path) for read in (read_runs, records.read_jsonl)]
        if reports is not None and found[0]:
            judged, info = aggregate_runs(found[0], command="report")
            reports(judged, info)


def _read(read: Callable[[Path], Any], path: Path) -> Any:
    try:
        return read(path)
    except RecordFileError as error:
        message = str(error)
        assert message.isprintable()
        assert message.startswith(str(path))
        assert len(message) < 1000
        return None


@settings(max_examples=120, deadline=None)
@given(MUTATED)
def test_a_changed_file_is_read_or_refused_with_one_line(content: bytes) -> None:
    check_reading(content)


@settings(max_examples=120, deadline=None)
@given(MUTATED)
def test_what_is_read_of_a_changed_file_can_be_summed_up(content: bytes) -> None:
    check_reading(content, render_markdown)


@pytest.mark.nightly
@settings(max_examples=4_000, deadline=None)
@given(MUTATED)
def test_many_changed_files(content: bytes) -> None:
    check_reading(content)


@pytest.mark.nightly
@settings(max_examples=200, deadline=None)
@given(MUTATED)
def test_many_changed_files_can_be_shown(content: bytes) -> None:
    check_reading(content, render_html)


def test_the_file_that_is_changed_is_one(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text("".join(f"{line}\n" for line in LINES))
    (found,) = read_runs(tmp_path / "r.jsonl")
    assert isinstance(found, RecordedRun)
    assert found.run == RUN
    assert found.is_complete
    assert {number: len(done) for number, done in found.done.items()} == {0: 1, 1: 1}
