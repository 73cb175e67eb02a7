"""Runs that are killed at any moment leave a file that can be read, lose no finished job, and can be resumed."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from reports import records
from reports.records import Record, RecordedRun, read_runs, serialize_run
from tests.process_helpers import COMMAND_TIMEOUT, kill_on_exit, restore_signal_handlers, wait_until

KERNEL = """
from tests.kernels import naive
from conformance import declare

@declare(behind_mask="finite")
def right(q, k, v, *, causal=False):
    return naive.attention(q, k, v, causal=causal)
"""
ROOT = Path(__file__).parent.parent.parent
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
WHAT = ("--impl=kernel.py:right", "--cases=train/f32/*.T1.*.H64.*", "--jobs=1")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "conformance", "run", *arguments]


def recorded(path: Path) -> RecordedRun | None:
    found = read_runs(path) if path.exists() else []
    assert len(found) <= 1
    return found[0] if found else None


GATE_CASES = "--conformance-cases=train/f32/*.T1.*.H64.*"
MARK = "PYTHON_KILLED_IN"  # a variable that all processes of a killed command have: those of kernels get PYTHON*
BUGS = ("--bank=tests.planted.bank:BANK", "--bug=cap-before-bias", "--bug=cap-derivative-missing")


@dataclasses.dataclass(frozen=True)
class Door:
    """A way to judge: its command, and the command that continues its file, if there is one."""

    name: str
    start: Callable[[Path, int], list[str]]
    resume: Callable[[Path, int], list[str]] | None = None
    has_file: bool = True


def pytest_command(file: Path, *arguments: str) -> list[str]:
    words = ("-p", "no:cacheprovider", "--pyargs", "conformance", "--impl=kernel.py:right", GATE_CASES)
    return [sys.executable, "-m", "pytest", *words, *arguments]


def _run(file: Path, jobs: int) -> list[str]:
    return command(WHAT[0], WHAT[1], f"--jobs={jobs}", f"--json={file}", f"--report={file.with_name('page.html')}")


def _resume_run(file: Path, jobs: int) -> list[str]:
    return command(f"--resume={file}", f"--jobs={jobs}")


def _gate(file: Path, jobs: int) -> list[str]:
    return pytest_command(file, f"--conformance-json={file}", f"--conformance-report={file.with_name('page.html')}")


def _resume_gate(file: Path, jobs: int) -> list[str]:
    return pytest_command(file, f"--conformance-resume={file}")


def _explore(file: Path, jobs: int) -> list[str]:
    words = ("explore", "--impl=kernel.py:right", "--profile=ci", "--examples=12", "--cases=train/f32/*")
    outputs = (f"--json={file}", f"--report={file.with_name('page.html')}")
    return [sys.executable, "-m", "conformance", *words, *outputs]


def _measure_bank(file: Path, jobs: int) -> list[str]:
    words = (*BUGS, "--level=smoke", f"--jobs={jobs}", f"--report={file.with_name('page.html')}")
    return [sys.executable, "-m", "tests.bank", *words]


DOORS = {
    door.name: door
    for door in (
        Door("run", _run, _resume_run),
        Door("gate", _gate, _resume_gate),
        Door(
            "xdist",
            lambda file, jobs: [*_gate(file, jobs), f"-n{jobs}"],
            lambda file, jobs: [*_resume_gate(file, jobs), f"-n{jobs}"],
        ),
        Door("explore", _explore),
        Door("bank", _measure_bank, has_file=False),
    )
}


@dataclasses.dataclass(frozen=True)
class Home:
    """A folder with a kernel, and the result of each undisturbed command there, as far as it is known."""

    path: Path
    known: dict[str, tuple[float, int, list[Record]]] = dataclasses.field(default_factory=dict)

    def undisturbed(self, door: Door) -> tuple[float, int, list[Record]]:
        """Return the seconds that the command takes, the number of lines that it writes, and the records."""
        if door.name not in self.known:
            file = self.path / door.name / "r.jsonl"
            file.parent.mkdir()
            began = time.monotonic()
            process = started(door.start(file, 1), self.path, file.parent)
            with kill_on_exit(process):
                _, err = process.communicate(timeout=COMMAND_TIMEOUT)
            assert process.returncode in (0, 2), err  # so few bugs measure no check
            seconds = time.monotonic() - began
            lines = len(file.read_text().splitlines()) if door.has_file else 0
            self.known[door.name] = seconds, lines, in_order(recorded(file)) if door.has_file else []
        return self.known[door.name]


def in_order(found: RecordedRun | None) -> list[Record]:
    """Return the records by job in the order in which they came, without their times."""
    assert found is not None
    assert found.is_complete
    ordered = [*itertools.chain.from_iterable(found.done[number] for number in sorted(found.done)), *found.others]
    return [msgspec.structs.replace(record, seconds=0.0, figures={}) for record in ordered]


def started(words: list[str], home: Path, folder: Path) -> subprocess.Popen[str]:
    """Start the command, with its temporary files in `folder` and a mark by which its processes are found."""
    scratch = folder / "scratch"
    scratch.mkdir(exist_ok=True)
    environ = {**os.environ, "TMPDIR": str(scratch), MARK: str(folder), "PYTEST_ADDOPTS": ""}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    with restore_signal_handlers():
        return subprocess.Popen(
            words,
            cwd=home,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )


def living(folder: Path) -> list[int]:
    """Find the living processes that a command has started in this folder."""
    mark = f"{MARK}={folder}".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (process / "environ").read_bytes().split(b"\0"):
                found.append(int(process.name))
    return found


def wait_for_moment(door: Door, home: Home, file: Path, process: subprocess.Popen[str], moment: float) -> None:
    """Wait until the command has written so many lines, or by the clock before its first line and without one.

    The clock decides only which moment is tried.
    """
    seconds, lines, _ = home.undisturbed(door)
    if not door.has_file or moment < 0.3:
        time.sleep(seconds * moment)
        return
    wanted = round(lines * (moment - 0.3) / 0.7)

    def has_come() -> bool:
        return process.poll() is not None or (file.exists() and file.read_bytes().count(b"\n") >= wanted)

    wait_until(has_come, seconds=COMMAND_TIMEOUT)


def is_killed_and_gone_on_with(
    door: Door,
    number: signal.Signals,
    jobs: int,
    moment: float,
    home: Home,
    folder: Path,
    *,
    whole_group: bool = False,
    resumes: bool = True,
) -> None:
    """Kill a command, and check that nothing is lost, nothing is left, and that it can be continued."""
    file, page = folder / "r.jsonl", folder / "page.html"
    home.undisturbed(door)  # before this one begins
    process = started(door.start(file, jobs), home.path, folder)
    with kill_on_exit(process):
        wait_for_moment(door, home, file, process, moment)
        before = recorded(file)
        with contextlib.suppress(ProcessLookupError):  # it has come to its end
            (os.killpg if whole_group else os.kill)(process.pid, number)
        out, err = process.communicate(timeout=COMMAND_TIMEOUT)
        wait_until(lambda: not living(folder))
    said = f"{out}\n{err}"
    assert "Traceback" not in said
    assert "INTERNALERROR" not in said
    code = -number if number == signal.SIGKILL else 128 + number
    after = recorded(file)
    has_ended = door.has_file and after is not None and after.is_complete
    assert process.returncode == code or (has_ended and process.returncode == 0), said
    if before is not None:
        assert after is not None
        assert all(after.done[job] == found for job, found in before.done.items())
    if number != signal.SIGKILL:
        assert not list((folder / "scratch").glob("conformance-kernel-*"))
        if after is not None:
            assert after.end is not None, said
            assert page.exists(), said
    if door.resume is None or not resumes:
        return
    process = started(door.resume(file, jobs), home.path, folder)
    with kill_on_exit(process):
        out, err = process.communicate(timeout=COMMAND_TIMEOUT)
        wait_until(lambda: not living(folder))
    if after is None:  # killed before it began its file
        assert process.returncode in (2, 4)
        return
    assert process.returncode == 0, f"{out}\n{err}"
    assert in_order(recorded(file)) == home.undisturbed(door)[2]
    assert not list((folder / "scratch").glob("conformance-kernel-*"))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    if not Path("/proc/self/environ").exists():
        pytest.skip("there is no /proc here by which to find processes")
    folder = tmp_path_factory.mktemp("home")
    (folder / "kernel.py").write_text(KERNEL)
    return Home(folder)


@pytest.fixture(scope="module")
def undisturbed(home: Home) -> tuple[Path, list[Record]]:
    """Return the folder with a kernel, the file of a run, and its records."""
    _, _, found = home.undisturbed(DOORS["run"])
    (home.path / "r.jsonl").write_bytes((home.path / "run" / "r.jsonl").read_bytes())
    return home.path, found


# Door, signal, jobs, moment, whether Ctrl-C reaches its whole group, whether it is gone on with.
SAMPLE = [
    ("run", signal.SIGTERM, 2, 0.6, False, True),
    ("run", signal.SIGKILL, 1, 0.7, False, True),
    ("run", signal.SIGINT, 2, 0.05, True, False),
    ("gate", signal.SIGTERM, 1, 0.6, False, False),
    ("xdist", signal.SIGINT, 2, 0.5, True, False),
    ("xdist", signal.SIGTERM, 2, 0.15, False, False),
    ("explore", signal.SIGTERM, 1, 0.6, False, False),
    ("bank", signal.SIGINT, 2, 0.5, True, False),
]


@pytest.mark.long
@pytest.mark.parametrize(
    ("door", "number", "jobs", "moment", "whole_group", "resumes"),
    SAMPLE,
    ids=[f"{name}-{number.name}-{moment}" for name, number, _, moment, _, _ in SAMPLE],
)
def test_a_killed_command_loses_nothing_and_leaves_nothing(
    door: str,
    number: signal.Signals,
    jobs: int,
    moment: float,
    whole_group: bool,
    resumes: bool,
    home: Home,
    tmp_path: Path,
) -> None:
    is_killed_and_gone_on_with(
        DOORS[door], number, jobs, moment, home, tmp_path, whole_group=whole_group, resumes=resumes
    )


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(200))
def test_at_no_moment_is_anything_lost(seed: int, home: Home, tmp_path: Path) -> None:
    drawn = random.Random(seed)
    door = list(DOORS.values())[seed % len(DOORS)]
    number, jobs, moment = drawn.choice(SIGNALS), drawn.choice((1, 2)), drawn.random()
    whole_group = number == signal.SIGINT and drawn.random() < 0.5
    is_killed_and_gone_on_with(door, number, jobs, moment, home, tmp_path, whole_group=whole_group)


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), int(sys.argv[1])))
from conformance import cli
sys.exit(cli.main(cli.build_parser().parse_args(sys.argv[2:])))
"""


@pytest.mark.long
def test_a_disk_that_fills_up_leaves_whole_lines_and_one_clear_line(
    undisturbed: tuple[Path, list[Record]], tmp_path: Path
) -> None:
    home, _ = undisturbed
    whole = (home / "r.jsonl").stat().st_size
    file = tmp_path / "r.jsonl"
    arguments = [sys.executable, "-c", LIMITED, str(whole - 2000), "run", *WHAT, f"--json={file}"]
    done = subprocess.run(arguments, cwd=home, capture_output=True, text=True, check=False, timeout=COMMAND_TIMEOUT)
    assert done.returncode == 2
    assert f"{file} cannot be written: File too large; what was judged before is in it" in done.stderr
    assert "Traceback" not in done.stderr
    found = recorded(file)
    assert found is not None
    assert found.done
    assert not found.note
    assert file.read_text().endswith("\n")


def test_a_disk_that_is_full_is_told_before_anything_is_judged(
    undisturbed: tuple[Path, list[Record]],
) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    home, _ = undisturbed
    arguments = command(*WHAT, "--json=/dev/full")
    done = subprocess.run(arguments, cwd=home, capture_output=True, text=True, check=False, timeout=COMMAND_TIMEOUT)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "error: /dev/full cannot be written: No space left on device"


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
    arguments: list[str], message: str, undisturbed: tuple[Path, list[Record]]
) -> None:
    home, expected = undisturbed
    (home / "old.jsonl").write_text("".join(f"{records.serialize_record(record)}\n" for record in expected))
    found = recorded(home / "r.jsonl")
    assert found is not None
    assert found.run is not None
    changed = msgspec.structs.replace(found.run, environment={**found.run.environment, "jax": "0.0.1"})
    (home / "changed.jsonl").write_text(serialize_run(changed) + "\n")
    before = (home / "r.jsonl").read_bytes()
    done = subprocess.run(
        command(*arguments), cwd=home, capture_output=True, text=True, check=False, timeout=COMMAND_TIMEOUT
    )
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert message in done.stderr
    assert (home / "r.jsonl").read_bytes() == before
