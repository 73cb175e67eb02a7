"""Test the script that judges and times kernels on a chip, by its trial on a CPU, and the page with its figures."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from reports.records import UNSUPPORTED, read_measurements, read_runs
from reports.records.measurement import AGREES, BACKWARD, DIFFERS, FORWARD, Measurement
from tests.process_helpers import COMMAND_TIMEOUT, kill_on_exit, restore_signal_handlers, wait_until
from website import measurement_tables

DOCS = Path(__file__).parent.parent.parent / "docs"
SCRIPT = DOCS / "measure_on_chip.py"
CASE = "train/f32/B1.T64.S64.N2.K2.H16.V16/causal/normal/s0"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """Load the script, which is in no package."""
    spec = importlib.util.spec_from_file_location("measure_on_chip", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["measure_on_chip"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def run_trial(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(SCRIPT), "--plan=cpu-trial", f"--out={folder}", *options]
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=COMMAND_TIMEOUT)


def read(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "times.json").read_text(encoding="utf-8"))
    return found


# It takes 40 s. By day a trial is interrupted in its second step, and the page is made of figures that are given.
@pytest.mark.nightly
def test_a_whole_trial_judges_times_and_makes_a_page(tmp_path: Path) -> None:
    folder = tmp_path / "chip"
    done = run_trial(folder, "--seconds=2000")
    assert done.returncode == 0, done.stdout + done.stderr
    found = read(folder)
    assert (found["ended"], found["chip"]) == ("complete", "cpu")
    assert found["command"].startswith("python docs/measure_on_chip.py --plan=cpu-trial")
    assert {step["code"] for step in found["steps"]} == {0}
    tuned = json.loads((folder / "tuned-blocks.json").read_text(encoding="utf-8"))
    assert any(entry["device"] == "cpu" for entry in tuned["entries"])
    assert found["versions"]["jax"]
    verdicts = {name: standing["verdict"] for name, standing in found["judged"].items()}
    assert (verdicts["block_flash"], verdicts["paged"], verdicts["ragged"]) == ("green", "green", "not judged")
    statuses = {(row["kernel"], row["status"]) for row in found["rows"]}
    assert statuses >= {("block_flash", "result"), ("jax_nn_xla", "result"), ("paged", "result")}
    assert ("ragged", "not judged") in statuses
    assert {one["case"] for one in found["comparisons"]} == {CASE, CASE.replace("causal", "full")}
    row = next(row for row in found["rows"] if row["kernel"] == "block_flash")
    assert 0 < row["seconds"]["lower"] <= row["seconds"]["median"] <= row["seconds"]["upper"]
    assert found["ceilings"]["copies"]
    for path in folder.glob("*.jsonl"):
        if path.name.startswith("times-"):
            assert read_measurements(path)
        else:
            assert all(one.is_complete for one in read_runs(path))
    assert {path.stem for path in (folder / "raw").iterdir()} == {step["step"] for step in found["steps"]}
    chips = tmp_path / "chips"
    chips.mkdir()
    (chips / "trial.json").write_text(json.dumps(found))
    page = measurement_tables.format_chips(chips)
    assert "`block_flash` against `jax_nn_xla`" in page
    assert "`ragged` (not judged)" in page
    assert "| `ragged` |" not in page
    assert sum("| `block_flash` |" in line and "µs (" in line for line in page.splitlines()) == 2
    assert found["command"] in page


def test_a_trial_whose_time_ends_keeps_what_was_done_and_names_the_rest(tmp_path: Path) -> None:
    folder = tmp_path / "chip"
    done = run_trial(folder, "--seconds=25.5")  # enough for one step, which loads JAX
    assert done.returncode == 2, done.stdout + done.stderr
    found = read(folder)
    assert found["ended"] == "time ended"
    assert [step["step"] for step in found["steps"]] == ["machine"]
    assert any("no time left" in line for line in found["left_out"])
    assert found["rows"] == []


@pytest.mark.long
def test_ctrl_c_in_the_middle_keeps_what_was_done(tmp_path: Path) -> None:
    folder = tmp_path / "chip"
    words = [sys.executable, str(SCRIPT), "--plan=cpu-trial", f"--out={folder}", "--seconds=2000"]
    with restore_signal_handlers():
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True)
    with kill_on_exit(process):
        wait_until((folder / "smoke-ours-1.jsonl").exists, process)
        os.kill(process.pid, signal.SIGINT)
        process.communicate(timeout=COMMAND_TIMEOUT)
    assert process.returncode == 130
    found = read(folder)
    assert found["ended"] == "interrupted"
    assert found["versions"]["jax"]
    assert [step["step"] for step in found["steps"]] == ["machine", "smoke-ours-1"]
    assert found["steps"][1]["stopped"] == "interrupted"
    assert read_runs(folder / "smoke-ours-1.jsonl")


WAITS = """
import signal, time
try:
    print("waits", flush=True)
    time.sleep(1000)
except KeyboardInterrupt:
    print("kept", flush=True)
    raise SystemExit(3)
"""
STUBBORN = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(1000)"


@pytest.mark.parametrize(("code", "ended", "kept"), [(WAITS, 3, "kept"), (STUBBORN, -signal.SIGKILL, "")])
def test_a_step_over_its_time_may_write_its_files_and_then_ends(
    code: str, ended: int, kept: str, tmp_path: Path, script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "_STOP_SECONDS", 4.0 if not kept else 60.0)
    with (tmp_path / "out").open("w") as output, restore_signal_handlers():
        result = script._run_process([sys.executable, "-c", code], output, 3.0, os.environ)
    assert (result.code, bool(result.stopped)) == (ended, True)
    assert kept in (tmp_path / "out").read_text()


def build_measurement(kernel: str, phase: str, seconds: float, outcome: str = AGREES) -> Measurement:
    samples = (seconds, seconds) if outcome != UNSUPPORTED else ()
    return Measurement(
        implementation=kernel,
        platform="cpu",
        device="cpu",
        case=CASE,
        phase=phase,
        outcome=outcome,
        samples=samples,
        speed=None,
        error=None,
    )


def build_rows(script: ModuleType, verdicts: dict[str, str], outcome: str = AGREES) -> tuple[list[Any], Any]:
    group = script.Group(name="train", kernels=("ours", "theirs"), cases=(CASE,))
    times = {("ours", FORWARD): 2.0, ("theirs", FORWARD): 4.0, ("ours", BACKWARD): 8.0, ("theirs", BACKWARD): 8.0}
    rows = [
        script._build_row(build_measurement(kernel, phase, seconds, outcome), group, verdicts[kernel])
        for (kernel, phase), seconds in times.items()
    ]
    return rows, group


def test_the_backward_pass_is_what_the_gradients_add(script: ModuleType) -> None:
    rows, group = build_rows(script, {"ours": "green", "theirs": "green"})
    (found,) = script.compare_rows(rows, [group])
    assert (found["forward"], found["backward"]) == (0.5, 1.5)


@pytest.mark.parametrize(
    ("verdicts", "outcome", "status"),
    [
        ({"ours": "red", "theirs": "green"}, AGREES, "judged red"),
        ({"ours": "not judged", "theirs": "green"}, AGREES, "not judged"),
        ({"ours": "green", "theirs": "green"}, DIFFERS, "wrong"),
        ({"ours": "green", "theirs": "green"}, UNSUPPORTED, "not timed"),
    ],
)
def test_times_of_what_is_not_judged_green_are_no_results(
    verdicts: dict[str, str], outcome: str, status: str, script: ModuleType
) -> None:
    rows, group = build_rows(script, verdicts, outcome)
    assert rows[0]["status"] == status
    assert script.compare_rows(rows, [group]) == []


def test_every_case_of_the_tuning_plan_is_one_that_its_kernel_takes(script: ModuleType) -> None:
    from cases.case_id import parse_case_id
    from conformance.execution import implementation_registry

    for tuning in script.PLANS["gpu-tune"]().tunings:
        kernel = implementation_registry.find_implementation(tuning.kernel)
        assert kernel.supports(parse_case_id(tuning.case)) is None
        assert kernel.tunable is not None
        assert {one.name for one in kernel.tunable.parameters} >= set(tuning.parameters)


def test_every_case_of_the_plan_for_gpus_is_one_that_its_kernels_take(script: ModuleType) -> None:
    from cases.case_id import parse_case_id
    from conformance.execution import implementation_registry

    plan = script.PLANS["gpu"]()
    known = implementation_registry.list_implementations()
    for group in plan.groups:
        names = [name for name in group.kernels if name in known]
        assert names, group.name
        ours = implementation_registry.find_implementation(names[0])
        assert [ours.supports(parse_case_id(case)) for case in group.cases] == [None] * len(group.cases)
    assert sum(len(group.cases) for group in plan.groups if group.phase == "both") == 18
    judged = {name for kernels in plan.ours for name in kernels} | set(plan.published)
    assert {name for group in plan.groups for name in group.kernels} <= judged


@pytest.mark.parametrize(
    ("cache", "layout", "rate"), [("", "in pages", "4.00"), ("/kvint8-tensor", "in pages, int8", "2.00")]
)
def test_the_rate_of_decoding_counts_stored_bytes(cache: str, layout: str, rate: str) -> None:
    case = f"decode/bf16/B2.T1.S1024.N8.K2.H64.V64/own-linf-1024-1024{cache}/paged16/normal/s0"
    row = {"case": case, "kernel": "paged_gpu", "seconds": {"median": 2 * 2 * 1024 * 2 * 128 / 4e12}}
    cells = measurement_tables._list_decode_cells(row)
    assert (cells[0], cells[-1]) == (layout, f"{rate} TB/s")


def test_the_page_counts_in_how_many_calls_ours_is_faster(tmp_path: Path) -> None:
    found = json.loads((DOCS / "measurements/data/chips/h100-2026-11-26.json").read_text(encoding="utf-8"))
    found["comparisons"] = found["comparisons"][:3]
    (tmp_path / "one.json").write_text(json.dumps(found))
    page = measurement_tables.format_chips(tmp_path)
    assert "forward in 1 of 3 calls" in page
    assert "backward in 1 of 3 calls" in page
    assert found["provenance"] in page
