"""The page has addresses, headings, captions and labels, and is complete without its script."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from conformance.judging.run_aggregation import aggregate_runs
from reports import html_page, record_table
from reports.matrices import build_matrices
from reports.page_model import build_summary
from reports.record_groups import NO_FEATURE, group_records
from reports.record_query import RecordFiles, build_query_command
from reports.records import (
    EXPECTED_FAIL,
    FAIL,
    PASS,
    RED,
    UNSUPPORTED,
    ErrorMap,
    Kernel,
    Record,
    Run,
    RunInfo,
    read_runs,
    serialize_record,
    serialize_run,
)
from tests.reports.markup import Element, find_faults, parse_page, strip_scripts
from tests.reports.report_samples import (
    HOSTILE,
    make_failure,
    make_many,
    make_one_of_each,
    make_record,
    make_run_info,
    render_html,
)

MAP = ErrorMap(axes=("T", "BN"), shape=(16, 2), cells=("20", "30"), blocks=(0, 0), at=(0, 0), along="T")


def make_some() -> list[Record]:
    """Make records of every verdict, with reasons, patterns and an error map, of several implementations."""
    drawn = msgspec.structs.replace(make_failure(case="train/f32/drawn", pattern="only rows from 8 on"), error_map=MAP)
    expected = [make_failure(case=f"expected/{i}", verdict=EXPECTED_FAIL, reason=f"known {i}") for i in range(4)]
    return [*make_one_of_each(), *make_many(300), *expected, drawn]


def read_data(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return dict(json.loads(found[1]))


@pytest.mark.parametrize("records", [make_some(), [], [make_record()]], ids=["some", "none", "one"])
def test_the_page_has_no_fault_of_structure(records: list[Record]) -> None:
    assert find_faults(render_html(records, make_run_info())) == []


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("<caption>", "<caption><b>", "closes"),
        (' scope="col"', "", "no scope"),
        ('id="verdict"', 'id="verdicts"', "leads nowhere"),
        ("<h3", "<h5", "level 5"),
        ("<label>Search", "Search", "closes"),
    ],
)
def test_a_fault_of_structure_is_seen(old: str, new: str, said: str) -> None:
    page = render_html(make_some(), make_run_info())
    assert old in page
    try:
        found = " ".join(find_faults(page.replace(old, new).replace("</h3>", "</h5>" if old == "<h3" else "</h3>")))
    except ValueError as error:
        found = str(error)
    assert said in found


def test_findings_come_first_then_the_matrices() -> None:
    headings = [
        heading.attributes.get("id") for heading in parse_page(render_html(make_some(), make_run_info())).all("h2")
    ]
    assert headings[:5] == ["findings", "verdict", "features", "checks", "records"]


def test_every_cell_leads_to_its_records_and_every_case_has_an_address() -> None:
    records = make_some()
    root = parse_page(render_html(records, make_run_info()))
    there = {e.attributes["id"]: e for e in root.all("div", "li") if "id" in e.attributes}
    for matrix in build_matrices(group_records(records)):
        for (_, row), cell in matrix.cells.items():
            block = there[cell.anchor]
            assert block.all("li")
            assert row in block.words or row == NO_FEATURE
    assert {f"case-{one.case}" for one in records} <= set(there)


def test_the_data_hold_every_record_once() -> None:
    records = make_some()
    data = read_data(render_html(records, make_run_info()))
    rows = [[*row, *[0] * (9 - len(row))] for row in data["rows"]]
    keys = {
        (data["implementations"][r[0]][1], data["cases"][r[4]][0], data["checks"][r[1]], data["observables"][r[2]])
        for r in rows
    }
    assert keys == {(r.implementation, r.case, r.check, r.observable) for r in records}
    assert len(rows) == data["total"] == len(records)
    verdicts = [data["verdicts"][row[3]][0] for row in rows]
    red = sum(one.verdict in RED for one in records)
    assert set(verdicts[:red]) <= RED
    assert not set(verdicts[red:]) & RED
    assert {row[6] > 0 for row in rows[:red]} == {True}  # each under its finding


def test_what_is_too_much_for_the_page_is_what_passed_furthest_from_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_table, "MAX_RECORDS", 60)
    passes = [make_record(case=f"case/{i}", ratio=i / 100) for i in range(100)]
    red = [make_failure(case=f"red/{i}") for i in range(40)]
    data = read_data(render_html([*passes, *red], make_run_info()))
    assert (len(data["rows"]), data["total"]) == (60, 140)
    shown = [data["cases"][row[4]][0] for row in data["rows"]]
    assert sorted(shown[:40]) == sorted(one.case for one in red)
    assert shown[40:] == [f"case/{i}" for i in range(99, 79, -1)]


def test_only_the_script_of_the_page_may_run() -> None:
    page = render_html([make_failure(reason=HOSTILE, case=HOSTILE)], make_run_info())
    scripts = re.findall(r"<script(?: type=\"application/json\" id=\"data\")?>(.*?)</script>", page, re.DOTALL)
    assert len(scripts) == page.count("<script") == 2
    assert "alert" not in scripts[1]
    digest = base64.b64encode(hashlib.sha256(scripts[1].encode()).digest()).decode()
    policy = next(m for m in parse_page(page).all("meta") if "http-equiv" in m.attributes).attributes["content"]
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|fetch\(|import\(", scripts[1])
    assert read_data(page)["cases"][0][0] == HOSTILE


def test_what_needs_the_script_is_hidden_without_it() -> None:
    root = parse_page(strip_scripts(render_html(make_some(), make_run_info())))
    for element in root.all("form", "input", "select", "button"):
        parts: tuple[Element, ...] = (*element.above, element)
        assert any("hidden" in part.attributes for part in parts)


@pytest.mark.parametrize("kind", ["feature", "check"])
def test_the_command_finds_the_records_of_a_cell(kind: str, tmp_path: Path) -> None:
    records = [
        make_record(features=("causal",)),
        make_record(features=(), check="poison"),
        make_record(implementation="other's"),
    ]
    (tmp_path / "r.jsonl").write_text('{"schema": "x/1"}\n' + "".join(serialize_record(one) + "\n" for one in records))
    (matrix,) = (matrix for matrix in build_matrices(group_records(records)) if matrix.kind == kind)
    assert len(matrix.cells) == 3
    for (implementation, row), cell in matrix.cells.items():
        command = build_query_command(implementation, kind, row, RecordFiles("r.jsonl"))
        assert len(run_query(command, tmp_path)) == cell.counts.total


def test_merged_runs_of_one_kernel_are_asked_for_by_their_files() -> None:
    both = [msgspec.structs.replace(make_record(), run=f"commit {name}") for name in ("a", "b")]
    labels = [f"{one.implementation} ({one.platform}, {one.run})" for one in both]
    files = {label: [f"{name} run.jsonl"] for label, name in zip(labels, "ab", strict=True)}
    page = render_html(both, dataclasses.replace(make_run_info(), files=files))
    assert [row[0] for row in read_data(page)["implementations"]] == labels
    assert [row[3] for row in read_data(page)["implementations"]] == ["'a run.jsonl'", "'b run.jsonl'"]
    commands = [one for one in parse_page(page).all("code") if one.text.startswith("jq")]
    assert {one.text.rpartition("' '")[2] for one in commands} >= {"a run.jsonl'", "b run.jsonl'"}


def save_two_runs(folder: Path) -> tuple[Path, list[Record], RunInfo]:
    """Save a page of two runs of a kernel, and the one file that has both."""
    one = Run(
        started="2026-01-01T00:00:00+00:00",
        command="run",
        level="quick",
        seeds=(),
        tolerances=(),
        kernels={make_record().implementation: Kernel(arrays=())},
        resumed=(),
    )
    first = msgspec.structs.replace(one, id="0a", environment={"jax": "0.10.2"})
    other = msgspec.structs.replace(one, environment={"jax": "0.12.0"})  # from before runs had ids
    text = (
        serialize_run(first)
        + "\n"
        + serialize_record(make_record())
        + "\n"
        + serialize_record(make_failure(case="a/b"))
        + "\n"
    )
    (folder / "report.jsonl").write_text(text + serialize_run(other) + "\n" + serialize_record(make_record()) + "\n")
    found, info = aggregate_runs(read_runs(folder / "report.jsonl"), command="report")
    html_page.save_page(folder / "report.html", build_summary(found, info))
    return folder / "report.html", found, info


def test_runs_of_one_kernel_in_one_file_are_told_apart(tmp_path: Path) -> None:
    page, found, info = save_two_runs(tmp_path)
    assert sorted(info.runs.values()) == [["0a"], ["2026-01-01T00:00:00+00:00"]]
    named = {label: " ".join(files) for label, files in info.files.items()}
    features, checks = build_matrices(group_records(found))
    assert len(checks.implementations) == 2
    for (implementation, check), cell in checks.cells.items():
        command = build_query_command(implementation, "check", check, RecordFiles("report.jsonl", named, info.runs))
        assert len(run_query(command, tmp_path)) == cell.counts.total
    assert page.read_text().count("jq -cn") == len(features.cells) + len(checks.cells)


def run_query(command: str, folder: Path) -> list[str]:
    """Run a command of `jq` in a shell and return its lines."""
    if shutil.which("jq") is None:
        pytest.skip("jq is not installed: the command of a cell was not tried")
    return subprocess.run(
        command, shell=True, cwd=folder, capture_output=True, text=True, check=True
    ).stdout.splitlines()


@pytest.mark.long
def test_a_long_run_of_ten_implementations_stays_small() -> None:
    records = [
        make_record(
            implementation=f"kernel_{i % 10}",
            case=f"train/bf16/B2.T{i % 1400}.S128.N4.K2.H64.V64/causal/seg/softcap30/sinks/normal/s{i % 1400}",
            check=("forward", "gradients", "poison", "transforms")[i % 4],
            observable=("out", "dq", "dk", "dv")[i // 4 % 4],
            features=("causal", "sinks", "bf16"),
            verdict=FAIL if i % 50 == 0 else UNSUPPORTED if i % 9 == 0 else PASS,
            ratio=50.0 if i % 50 == 0 else i % 997 / 300,
        )
        for i in range(25_000)
    ]
    page = render_html(records, make_run_info())
    assert len(page.encode()) < 5_000_000
    assert len(read_data(page)["rows"]) == record_table.MAX_RECORDS
