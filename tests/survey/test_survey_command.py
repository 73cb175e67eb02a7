"""Test the command `survey` in environments that exist already, and once in one that uv creates."""

from __future__ import annotations

import gzip
import json
import os
import signal
import site
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from conformance.survey import environments, survey_command
from conformance.survey.judged_rows import RECORDS, RowOutcome, read_outcome
from impls.libraries import library_specs
from reports.records import read_runs
from reports.survey_results import parse_results, read_results
from tests.process_helpers import COMMAND_TIMEOUT, kill_on_exit, restore_signal_handlers, wait_until

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = library_specs.load_libraries()["jax"]
NEWEST = LIBRARY.versions[0]
SURVEY = [sys.executable, "-m", "conformance", "survey", "--library=jax_nn_xla", "--level=smoke", "--out=out"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder for `--out=out`, where the environment of JAX is that of the tests."""
    place = tmp_path / "out" / f"jax-{NEWEST}" / "environment"
    venv.create(place, symlinks=True)
    packages = next(place.glob("lib/python*/site-packages"))
    (packages / "here.pth").write_text("\n".join([str(ROOT), *site.getsitepackages()]))
    described = LIBRARY.build_environment(NEWEST)
    environments.write_stamp(place, described, environments.describe_project(), ["jax==0"])
    return tmp_path


def run_survey(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*SURVEY, *options], cwd=folder, capture_output=True, text=True, timeout=COMMAND_TIMEOUT, check=False
    )


def get_outcome(folder: Path) -> RowOutcome:
    found = read_outcome(folder / "out" / f"jax-{NEWEST}")
    assert found is not None
    return found


def test_a_survey_judges_reports_and_continues_where_it_was_stopped(folder: Path) -> None:
    row = folder / "out" / f"jax-{NEWEST}"
    with restore_signal_handlers():
        process = subprocess.Popen(
            SURVEY, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
    with kill_on_exit(process):
        wait_until(lambda: (row / RECORDS).is_file() and read_runs(row / RECORDS)[0].done, process, COMMAND_TIMEOUT)
        os.kill(process.pid, signal.SIGINT)
        out, _ = process.communicate(timeout=COMMAND_TIMEOUT)
    assert process.returncode == 130, out
    assert get_outcome(folder).state == "stopped"
    done = len(read_runs(row / RECORDS)[0].done)

    rest = run_survey(folder, "--json=r.json.gz", "--report=r.html")
    assert rest.returncode == 0, rest.stdout + rest.stderr
    assert f"{done} jobs were taken from the resumed file" in (row / "run.log").read_text()
    (result,) = parse_results(json.loads(gzip.decompress((folder / "r.json.gz").read_bytes())))
    (function,) = result.functions
    assert (result.version, function.function, function.red_count) == (NEWEST, "jax_nn_xla", 0)
    assert function.cells["causal f32"].passed
    assert set(function.precision) >= {"f32", "bf16"}
    assert "jax_nn_xla" in (folder / "r.html").read_text()

    before = (row / RECORDS).stat().st_mtime_ns
    again = run_survey(folder)
    assert again.returncode == 0
    assert "1 of 1 rows are finished" in again.stderr
    assert (row / RECORDS).stat().st_mtime_ns == before


def test_a_version_that_cannot_be_installed_is_a_row_with_the_reason(folder: Path) -> None:
    missing = {**os.environ, "UV_OFFLINE": "1"}
    done = subprocess.run(
        [*SURVEY[:4], "--library=jax==0.0.0", "--out=out"], cwd=folder, capture_output=True, text=True, env=missing,
        timeout=COMMAND_TIMEOUT, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "jax 0.0.0" in done.stdout
    outcome = read_outcome(folder / "out" / "jax-0.0.0")
    assert outcome is not None
    assert outcome.state == "not installed"
    assert "uv cannot install" in outcome.reason


def test_a_function_that_cannot_be_judged_here_is_a_result_with_the_reason(folder: Path) -> None:
    done = subprocess.run(
        [*SURVEY[:4], "--library=jax_mosaic_gpu", "--level=smoke", "--out=out", "--json=r.json"], cwd=folder,
        capture_output=True, text=True, timeout=COMMAND_TIMEOUT, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stdout + done.stderr
    assert get_outcome(folder).state == "judged"
    (result,) = read_results(folder / "r.json")
    reasons = {cell.reason for cell in result.functions[0].cells.values()}
    assert any("GPU" in reason for reason in reasons)


def test_the_list_names_all_functions(tmp_path: Path) -> None:
    done = subprocess.run(
        [*SURVEY[:4], "--list"], cwd=tmp_path, capture_output=True, text=True, timeout=COMMAND_TIMEOUT, check=False
    )
    assert done.returncode == 0
    for library in library_specs.load_libraries().values():
        assert f"{library.package}=={library.versions[0]}" in done.stdout
    assert not (tmp_path / "out").exists()


@pytest.mark.nightly
def test_uv_creates_an_environment_in_which_a_library_is_judged(tmp_path: Path) -> None:
    done = subprocess.run(
        [*SURVEY[:4], "--library=flax.nnx", "--level=smoke"], cwd=tmp_path, capture_output=True, text=True,
        timeout=COMMAND_TIMEOUT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "flax.nnx" in done.stdout


def test_reasons_name_no_folder_of_a_machine() -> None:
    reason = "no name 'a' (/home/me/out/a-1/environment/lib/python3.12/a.py) (/srv/x/impls/libraries/a.py:1: import a)"
    assert survey_command.shorten_paths(reason) == ("no name 'a' (environment/lib/python3.12/a.py) (a.py:1: import a)")
