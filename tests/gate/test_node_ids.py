"""Test that ids printed by the gate can be pasted, in the project of a kernel's author."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from conformance.gate import node_ids
from conformance.gate.node_ids import GATE_FILE, GATE_PATH, NamedJob
from tests.gate.gate_repository import FEW_CASES, Repository, create_repository, run_gate

CASE = "train/f32/B1.T1.S72.N2.K1.H16.V48/full/normal/s0"


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    return create_repository(tmp_path, monkeypatch)


def test_a_printed_id_runs_that_test_alone(repository: Repository) -> None:
    whole = run_gate(repository, FEW_CASES, "-k", "forward and softcap", name="wrong")
    failed = whole.list_failed()
    assert len(failed) > 1
    assert all(test.startswith(f"{GATE_PATH}::test_conforms[kernel.py:wrong-cpu-train/f32/") for test in failed)
    whole.stdout.fnmatch_lines([f"*(narrowed to * -k 'forward and softcap': {len(failed)} of * jobs)*"])
    # Neither --pyargs nor --impl is needed: the id says both.
    pasted = repository.pytest("--conformance-diagnose-seconds=0", "-k", "forward", failed[0])
    assert pasted.ret == 1
    assert pasted.list_failed() == failed[:1]
    assert re.search(r"= 1 failed(, \d+ warnings?)? in", pasted.stdout.lines[-1])
    pasted.stdout.fnmatch_lines(["*(narrowed to 1 test by its id -k forward: 1 of * jobs)*"])
    listed = run_gate(repository, FEW_CASES, "--collect-only", "-q", "--deselect", failed[0], "-k", "softcap")
    assert failed[0] not in listed.stdout.lines
    again = repository.pytest("--pyargs", "--collect-only", "-q", *failed[:2])
    assert [line for line in again.stdout.lines if "::" in line] == failed[:2]


def test_the_path_of_the_gate_is_found_where_no_such_file_is(tmp_path: Path) -> None:
    installed = f"{GATE_FILE}::test_conforms[a-cpu-{CASE}]"
    given = [f"{GATE_PATH}::test_conforms[a-cpu-{CASE}]", f"../{GATE_PATH}", "test_other.py::test[x::y]"]
    assert node_ids.resolve_arguments(given, tmp_path) == [installed, str(GATE_FILE), "test_other.py::test[x::y]"]
    theirs = tmp_path / GATE_PATH
    theirs.parent.mkdir()
    theirs.touch()
    assert node_ids.resolve_arguments(given[:1], tmp_path) == given[:1]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (f"block_flash-cpu-{CASE}", ("block_flash", (), CASE)),
        (f"my-cpu-kernel.py:f-gpu-interpret-{CASE}", ("my-cpu-kernel.py:f", (), CASE)),
        (f"m:f-tpu-arguments-errors-{CASE}", ("m:f", ("arguments", "errors"), CASE)),
        ("x", None),
        (f"m:f-{CASE}", None),
    ],
)
def test_the_id_of_a_test_names_its_job(text: str, named: tuple[str, tuple[str, ...], str] | None) -> None:
    expected = None if named is None else NamedJob(text, named[2], named[1], named[0])
    assert node_ids.parse_gate_test(text) == expected


def test_the_gate_is_narrowed_only_if_each_argument_for_it_is_an_id(tmp_path: Path) -> None:
    one = f"{GATE_FILE}::test_conforms[a-cpu-{CASE}]"
    assert [job.implementation for job in node_ids.list_gate_jobs([one, "test_other.py"], tmp_path)] == ["a"]
    assert node_ids.list_gate_jobs([one, str(GATE_FILE.parent)], tmp_path) == []
    assert node_ids.list_gate_jobs([one, f"{GATE_FILE}::test_conforms"], tmp_path) == []


def test_a_folder_of_the_users_called_conformance_is_not_the_gate() -> None:
    assert not node_ids.is_requested(["tests/conformance/test_mine.py"], [], None)
    assert node_ids.is_requested(["conformance"], [], None)
    assert node_ids.is_requested([f"{GATE_PATH}::test_conforms[a-cpu-{CASE}]"], [], None)
    assert node_ids.is_requested([str(GATE_FILE)], [], None)
