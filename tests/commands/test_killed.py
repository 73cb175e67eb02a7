"""Runs that are killed at any moment leave a file that can be read, lack nothing that was done, and can be resumed."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conformance import records, runs
from conformance.records import Record
from conformance.runs import Recorded
from tests.processes import PATIENCE, ended, interruptible, until

KERNEL = """
from tests.kernels import naive
from conformance import declare

@declare(behind_mask="finite")
def right(q, k, v, *, causal=False):
    return naive.attention(q, k, v, causal=causal)
"""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
WHAT = ("--impl=kernel.py:right", "--cases=train/f32/*.T1.*", "--jobs=1")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "conformance", "run", *arguments]


def compared(found: list[Record]) -> list[Record]:
    """Records without what the clock says."""
    return records.merge(dataclasses.replace(record, seconds=0.0, figures={}) for record in found)


def recorded(path: Path) -> Recorded | None:
    found = runs.read(path) if path.exists() else []
    assert len(found) <= 1
    return found[0] if found else None


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float, list[Record]]:
    """A folder with a kernel, the time that a run takes there once its first record is written, and what it finds."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "kernel.py").write_text(KERNEL)
    process = subprocess.Popen(
        command(*WHAT, "--json=r.jsonl"), cwd=folder, stdout=subprocess.DEVNULL, text=True, start_new_session=True
    )
    with ended(process):
        until(lambda: (folder / "r.jsonl").exists(), process, PATIENCE)
        began = time.monotonic()
        assert process.wait(timeout=PATIENCE) == 0
    found = recorded(folder / "r.jsonl")
    assert found is not None
    assert found.is_complete
    return folder, time.monotonic() - began, compared(found.records)


def is_killed_and_gone_on_with(
    undisturbed: tuple[Path, float, list[Record]], number: signal.Signals, moment: float, folder: Path
) -> None:
    home, seconds, expected = undisturbed
    file = folder / "r.jsonl"
    killed = command(*WHAT, f"--json={file}", f"--report={folder / 'page.html'}")
    with interruptible():
        process = subprocess.Popen(
            killed, cwd=home, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
    with ended(process):
        until(file.exists, process, PATIENCE)
        time.sleep(moment * seconds)
        before = recorded(file)
        os.kill(process.pid, number)
        out, err = process.communicate(timeout=PATIENCE)
    assert "Traceback" not in out + err
    after = recorded(file)
    if before is not None:
        assert after is not None
        assert set(before.done) <= set(after.done)
    if number != signal.SIGKILL and after is not None and before is not None and before.end is None:
        assert after.end is not None
        assert (folder / "page.html").exists()
    done = subprocess.run(
        command(f"--resume={file}", "--jobs=1"), cwd=home, capture_output=True, text=True, check=False, timeout=PATIENCE
    )
    if after is None:  # killed before it began its file
        assert done.returncode == 2
        return
    assert done.returncode == 0, done.stderr
    resumed = recorded(file)
    assert resumed is not None
    assert resumed.is_complete
    assert compared(resumed.records) == expected


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_a_killed_run_loses_nothing_and_can_be_gone_on_with(
    number: signal.Signals, undisturbed: tuple[Path, float, list[Record]], tmp_path: Path
) -> None:
    is_killed_and_gone_on_with(undisturbed, number, 0.5, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(200))
def test_at_no_moment_is_anything_lost(
    seed: int, undisturbed: tuple[Path, float, list[Record]], tmp_path: Path
) -> None:
    drawn = random.Random(seed)
    is_killed_and_gone_on_with(undisturbed, drawn.choice(SIGNALS), drawn.random(), tmp_path)


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), int(sys.argv[1])))
from conformance import cli
sys.exit(cli.main(cli.parser().parse_args(sys.argv[2:])))
"""


@pytest.mark.long
def test_a_disk_that_fills_up_leaves_whole_lines_and_one_clear_line(
    undisturbed: tuple[Path, float, list[Record]], tmp_path: Path
) -> None:
    home, _, _ = undisturbed
    whole = (home / "r.jsonl").stat().st_size
    file = tmp_path / "r.jsonl"
    arguments = [sys.executable, "-c", LIMITED, str(whole - 2000), "run", *WHAT, f"--json={file}"]
    done = subprocess.run(arguments, cwd=home, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert done.returncode == 2
    assert f"{file} cannot be written: File too large; what was judged before is in it" in done.stderr
    assert "Traceback" not in done.stderr
    found = recorded(file)
    assert found is not None
    assert found.done
    assert not found.note
    assert file.read_text().endswith("\n")


def test_a_disk_that_is_full_is_told_before_anything_is_judged(
    undisturbed: tuple[Path, float, list[Record]],
) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    home, _, _ = undisturbed
    arguments = command(*WHAT, "--json=/dev/full")
    done = subprocess.run(arguments, cwd=home, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert done.returncode == 2
    assert done.stderr.splitlines() == ["error: /dev/full cannot be written: No space left on device"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--resume=absent.jsonl"], "absent.jsonl cannot be read"),
        (["--resume=old.jsonl"], "--resume=old.jsonl has no run record"),
        pytest.param(["--resume=r.jsonl", "--impl=kernel.py:right"], "narrowed was --cases=", marks=pytest.mark.long),
        (["--resume=changed.jsonl"], "jax was 0.0.1 there and is"),
    ],
)
def test_what_cannot_be_gone_on_with_is_one_clear_line(
    arguments: list[str], message: str, undisturbed: tuple[Path, float, list[Record]]
) -> None:
    home, _, expected = undisturbed
    records.write_jsonl(home / "old.jsonl", expected)
    found = recorded(home / "r.jsonl")
    assert found is not None
    assert found.run is not None
    changed = dataclasses.replace(found.run, environment={**found.run.environment, "jax": "0.0.1"})
    (home / "changed.jsonl").write_text(runs.run_line(changed) + "\n")
    before = (home / "r.jsonl").read_bytes()
    done = subprocess.run(command(*arguments), cwd=home, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert message in done.stderr
    assert (home / "r.jsonl").read_bytes() == before
