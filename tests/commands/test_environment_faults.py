"""Faults of the environment: a command ends as documented, with one line where it cannot go on, never a traceback.

The quick ones print help, which loads no JAX. The others compare two files or judge one case, and are asked at night.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.process_helpers import COMMAND_TIMEOUT

# What is forked sets limits and starts another program. So JAX, which other tests have loaded here, has no part in it.
pytestmark = pytest.mark.filterwarnings(r"ignore:os\.fork:RuntimeWarning")

ROOT = Path(__file__).parent.parent.parent
CASE = "train/f32/B1.T2.S4.N2.K2.H4.V4/full/normal/s0"
KERNEL = """
from tests.kernels import naive
from conformance import declare


@declare(behind_mask="finite")
def right(q, k, v, *, causal=False):
    return naive.attention(q, k, v, causal=causal)
"""
HELP = ("--help",)
ABSENT = ("report", "absent.jsonl")
COMPARE = ("compare", "old.jsonl", "old.jsonl")
JUDGE = ("run", "--impl=kernel.py:right", f"--case={CASE}", "--check=forward", "--jobs=1")
FULL = Path("/dev/full")
_DROP_FROM_BOUNDING_SET = 24
_OVERRIDES = (1, 2)  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH: root heeds permissions without them


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault, the command that meets it, and the expected result.

    Attributes:
      name: the name of the test.
      command: the arguments; they may have bytes that are no text.
      code: the exit code.
      says: words of the one line on standard error; if empty and the code is not zero, any line will do.
      environ: environment variables to set, or to remove (None).
      before: what the process does before it becomes the command.
      out: standard output: a file that is opened for it, `closed`, or `unread`, a pipe that nobody reads.
      err: standard error, likewise.
      prepare: what is done in the folder before.
      drops: whether the process heeds permissions, which root's do not by themselves.
      folder: where it runs, below the folder of the test.
    """

    name: str
    command: tuple[str | bytes, ...] = HELP
    code: int = 0
    says: str = ""
    environ: Mapping[str, str | bytes | None] = dataclasses.field(default_factory=dict)
    before: Callable[[], None] | None = None
    out: str = ""
    err: str = ""
    prepare: Callable[[Path], object] | None = None
    drops: bool = False
    folder: str = "."


def limit(what: int, most: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(what, (most, most))


def close(*numbers: int) -> Callable[[], None]:
    def closing() -> None:
        for number in numbers:
            os.close(number)

    return closing


def without_permission(name: str, *, mode: int = 0) -> Callable[[Path], object]:
    """Create a folder with these permissions."""

    def made(folder: Path) -> None:
        (folder / name).mkdir()
        (folder / name).chmod(mode)

    return made


def leave_folder() -> None:
    """Enter a folder, and delete it."""
    Path("gone").mkdir()
    os.chdir("gone")
    Path("../gone").rmdir()


QUICK = [
    Fault("stdout-full", code=2, says="standard output cannot be written: No space left", out="/dev/full"),
    Fault("stdout-unread", code=2, says="standard output cannot be written: it is a pipe that nobody", out="unread"),
    Fault("stderr-full", err="/dev/full"),
    Fault("stderr-unread", err="unread"),
    Fault("an-error", ABSENT, code=2, says="absent.jsonl"),
    Fault("all-closed", before=close(0, 1, 2)),
    Fault("latin-1", environ={"PYTHONIOENCODING": "latin-1"}),
    Fault("locale-c", environ={"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}),
    Fault("columns-no-number", environ={"COLUMNS": "wide"}),
    *(
        Fault(f"memory-{mib}", COMPARE, code=2, says="memory ran out", before=limit(resource.RLIMIT_AS, mib << 20))
        for mib in (32, 128)
    ),
    Fault("no-home", environ={"HOME": None}),
    Fault("tmpdir-absent", environ={"TMPDIR": "/absent/folder"}),
    Fault("pythonpath-no-text", environ={"PYTHONPATH": b"/tmp/\xff\xfe"}),
    Fault("pythonpath-unreadable", environ={"PYTHONPATH": "closed"}, prepare=without_permission("closed"), drops=True),
    Fault("no-assertions", environ={"PYTHONOPTIMIZE": "2"}),
    Fault("few-files", before=limit(resource.RLIMIT_NOFILE, 8)),
    Fault("no-room-for-files", before=limit(resource.RLIMIT_FSIZE, 0)),
    Fault("folder-is-gone", JUDGE, code=2, says="the current folder is not there any more", before=leave_folder),
    Fault("no-text-in-a-command", (b"run", b"--impl=\xff\xfe", b"--levl=x"), code=2),
]

SLOW = [
    Fault("compare-stdout-full", COMPARE, code=2, says="standard output cannot be written", out="/dev/full"),
    Fault("judge-stdout-full", JUDGE, code=2, says="standard output cannot be written", out="/dev/full"),
    Fault("judge-stdout-unread", JUDGE, code=2, says="standard output cannot be written", out="unread"),
    Fault("judge-stderr-full", JUDGE, err="/dev/full"),
    Fault("judge-all-closed", JUDGE, before=close(0, 1, 2)),
    Fault("judge-latin-1", JUDGE, environ={"PYTHONIOENCODING": "latin-1"}),
    Fault("judge-locale-c", JUDGE, environ={"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}),
    Fault("judge-step-summary", JUDGE, environ={"GITHUB_STEP_SUMMARY": "/absent/folder/summary.md"}),
    Fault("judge-no-home", JUDGE, environ={"HOME": None, "XDG_CACHE_HOME": None}),
    Fault("judge-tmpdir-absent", JUDGE, environ={"TMPDIR": "/absent/folder"}),
    Fault("judge-no-temporary-folder", JUDGE, code=2, says="o", before=limit(resource.RLIMIT_FSIZE, 0)),
    Fault("judge-no-room-for-records", (*JUDGE, "--json=r.jsonl"), code=2, before=limit(resource.RLIMIT_FSIZE, 0)),
    Fault("judge-disk-full", (*JUDGE, "--json=/dev/full"), code=2, says="/dev/full cannot be written"),
    Fault("judge-few-files", JUDGE, code=2, says="open files", before=limit(resource.RLIMIT_NOFILE, 12)),
    Fault("judge-no-text-in-a-path", (*[word.encode() for word in JUDGE], b"--report=\xff.html")),
    Fault(
        "judge-pythonpath-unreadable",
        JUDGE,
        environ={"PYTHONPATH": f"closed{os.pathsep}{ROOT}"},
        prepare=without_permission("closed"),
        drops=True,
    ),
    Fault("judge-no-assertions", JUDGE, environ={"PYTHONOPTIMIZE": "1"}),
    Fault("judge-warnings-are-errors", JUDGE, environ={"PYTHONWARNINGS": "error"}),
    Fault(
        "judge-settings-are-a-folder",
        JUDGE,
        prepare=lambda folder: (folder / "pyproject.toml").mkdir(),
    ),
    Fault(
        "judge-folder-not-writable",
        (*JUDGE, "--json=r.jsonl"),
        code=2,
        says="cannot be written: Permission denied",
        prepare=lambda folder: folder.chmod(0o555),
        drops=True,
    ),
    Fault(
        "judge-kernel-not-readable",
        JUDGE,
        code=2,
        says="Permission denied",
        prepare=lambda folder: (folder / "kernel.py").chmod(0),
        drops=True,
    ),
]


def drop_overrides() -> None:
    """Make root respect permissions from the next program on."""
    for capability in _OVERRIDES:
        if ctypes.CDLL(None, use_errno=True).prctl(_DROP_FROM_BOUNDING_SET, capability, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "no capability can be dropped")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "kernel.py").write_text(KERNEL)
    record = (
        '{"implementation": "k", "platform": "cpu", "case": "' + CASE + '", "check": "forward", "observable": "out", '
        '"verdict": "pass", "schema": "attention-conformance/record/1"}'
    )
    (tmp_path / "old.jsonl").write_text(f"{record}\n")
    return tmp_path


def run(fault: Fault, folder: Path) -> tuple[int, str, str]:
    """Run a command, and return its exit code and its output, as far as that can be read."""
    if FULL.as_posix() in (fault.out, fault.err) and not FULL.exists():
        pytest.skip("there is no /dev/full here")
    if fault.drops and os.getuid() == 0 and not sys.platform.startswith("linux"):
        pytest.skip("root heeds no permissions here, and only Linux lets it drop what it has")
    if fault.prepare is not None:
        fault.prepare(folder)
    environ: dict[bytes, bytes] = {os.fsencode(name): os.fsencode(value) for name, value in os.environ.items()}
    environ[b"PYTHONPATH"] = os.fsencode(ROOT)
    for name, value in fault.environ.items():
        if value is None:
            environ.pop(name.encode(), None)
        else:
            environ[name.encode()] = os.fsencode(value)
    opened: dict[str, int] = {}
    for name, where in (("out", fault.out), ("err", fault.err)):
        if where == "unread":
            reading, opened[name] = os.pipe()
            os.close(reading)
        elif where:
            opened[name] = os.open(where, os.O_WRONLY)

    def before() -> None:
        if fault.drops and os.getuid() == 0:
            drop_overrides()
        if fault.before is not None:
            fault.before()

    try:
        done = subprocess.run(
            [sys.executable, "-m", "conformance", *fault.command],
            cwd=folder / fault.folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=opened.get("out", subprocess.PIPE),
            stderr=opened.get("err", subprocess.PIPE),
            preexec_fn=before,
            check=False,
            timeout=COMMAND_TIMEOUT,
        )
    except subprocess.SubprocessError as error:
        if fault.drops and "preexec_fn" in str(error):
            pytest.skip("this container does not let root drop what it has, so that permissions can be tried")
        raise
    finally:
        for number in opened.values():
            os.close(number)
        folder.chmod(0o755)
    return done.returncode, (done.stdout or b"").decode(errors="replace"), (done.stderr or b"").decode(errors="replace")


def is_met_as_documented(fault: Fault, folder: Path) -> None:
    code, out, err = run(fault, folder)
    assert "Traceback" not in out + err
    assert "Exception ignored" not in err
    assert code == fault.code, err
    if code and not fault.err:
        *plan, line = err.splitlines()
        assert len(plan) <= 1, err
        assert line.startswith("error: ")
        assert fault.says in line


@pytest.mark.parametrize("fault", QUICK, ids=lambda fault: fault.name)
def test_a_fault_of_the_environment_is_one_line_or_none(fault: Fault, folder: Path) -> None:
    is_met_as_documented(fault, folder)


@pytest.mark.nightly
@pytest.mark.parametrize("fault", SLOW, ids=lambda fault: fault.name)
def test_a_fault_that_shows_while_something_is_judged_is_one_line_or_none(fault: Fault, folder: Path) -> None:
    is_met_as_documented(fault, folder)
