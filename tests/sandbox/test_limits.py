"""Test that a kernel's process that takes too much is reported in one sentence, and the run goes on."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cases.case import Case
from cases.operand_values import draw_problem
from conformance import temporary_folders
from conformance.sandbox import resource_usage, sandboxed_executor, supervisor
from conformance.sandbox.kernel_process import Limits, ProcessLost
from conformance.sandbox.resource_usage import OverLimit, UsageMonitor
from conformance.temporary_folders import TemporaryFolder
from impls.contract.implementation import Implementation
from tests.process_helpers import kill_on_exit, wait_until

CASE = Case(q_length=16, kv_length=16, head_dim=16, v_head_dim=16)
HERE = Path(__file__).parent
LIMITS = Limits(timeout=60.0, memory=2**30)

needs_supervisor = pytest.mark.skipif(not supervisor.IS_AVAILABLE, reason="only Linux has a supervisor that measures")


@pytest.fixture
def find() -> Iterator[Callable[[str], Implementation]]:
    """Load a kernel of `greedy_kernels`; its process ends with the test."""
    found: list[Implementation] = []

    def kernel(name: str) -> Implementation:
        found.append(sandboxed_executor.load_sandboxed(f"{HERE}/greedy_kernels.py:{name}", None, LIMITS))
        return found[-1]

    yield kernel
    for implementation in found:
        sandboxed_executor.end_process(implementation)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("holds_memory_files", "--memory"),
        pytest.param("holds_shared_memory", "--memory", marks=pytest.mark.nightly),
        pytest.param("holds_memory_in_children", "--memory", marks=pytest.mark.nightly),
        pytest.param("fills_its_folder", "in files.*--memory", marks=pytest.mark.nightly),
    ],
)
@needs_supervisor
def test_a_kernel_that_takes_too_much_is_ended(find: Callable[[str], Implementation], name: str, words: str) -> None:
    with pytest.raises(ProcessLost, match=words):
        sandboxed_executor.create_executor(find(name)).forward(draw_problem(CASE))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("returns_much", "33,554,432 bytes of arrays"),
        ("announces_3_gib", "3,221,225,472 bytes of arrays"),
        ("answers_with_a_huge_shape", "500 digits"),
        ("answers_deeply", "nested|RecursionError"),
    ],
)
def test_an_answer_that_nobody_asked_for_is_not_read(
    find: Callable[[str], Implementation], name: str, words: str
) -> None:
    with pytest.raises(ProcessLost, match=words):
        sandboxed_executor.create_executor(find(name)).forward(draw_problem(CASE))


def test_a_file_has_a_largest_size(find: Callable[[str], Implementation]) -> None:
    with pytest.raises(OSError, match="File too large"):
        sandboxed_executor.create_executor(find("writes_a_large_file")).forward(draw_problem(CASE))


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["shares_memory_with_children", "makes_a_sparse_file"])
def test_what_takes_little_is_not_ended(find: Callable[[str], Implementation], name: str) -> None:
    assert sandboxed_executor.create_executor(find(name)).forward(draw_problem(CASE)).values["out"].shape == (
        1,
        16,
        2,
        16,
    )


# Each holds 192 MiB in a child of the process whose descendants are measured.
HOLDS = {
    "private": "held = b'x' * SIZE",
    "memfd": "os.write(os.memfd_create('held'), bytes(SIZE))",
    "shared": "held = mmap.mmap(-1, SIZE); held.write(bytes(SIZE))",
    "shared and not resident": (
        "held = mmap.mmap(-1, SIZE); held.write(bytes(SIZE)); held.madvise(mmap.MADV_DONTNEED)"
    ),
    "removed file": "file = open(FOLDER + '/held', 'wb', 0); os.unlink(file.name); file.write(bytes(SIZE))",
    "file": "open(FOLDER + '/held', 'wb').write(bytes(SIZE))",
    "linked file": "open(FOLDER + '/held', 'wb').write(bytes(SIZE)); os.link(FOLDER + '/held', FOLDER + '/same')",
    "file in a folder": "os.mkdir(FOLDER + '/one'); open(FOLDER + '/one/held', 'wb').write(bytes(SIZE))",
    "child of a thread": (
        "import threading; thread = threading.Thread(target=fork_and_hold); thread.start(); thread.join()"
    ),
    "shared with children": "held = b'x' * SIZE; [fork_and_sleep() for _ in range(4)]",
}
MARGIN = 64 * 2**20  # for Python itself
HOLDER = """
import mmap, os, sys, time
SIZE, FOLDER = 192 * 2**20, {folder!r}
def fork_and_sleep():
    if os.fork() == 0:
        time.sleep(60)
        os._exit(0)
def fork_and_hold():
    ready, wrote = os.pipe()
    if os.fork() == 0:
        held = b'x' * SIZE
        os.write(wrote, b'r')
        time.sleep(600)
        os._exit(0)
    os.read(ready, 1)
if os.fork() == 0:
    {hold}
    print('ready', flush=True)
    time.sleep(600)
    os._exit(0)
os.wait()
"""


def check_holder(hold: str, folder: Path, memory: int) -> None:
    """Check what a process below another one holds, until all kinds of checks were made."""
    text = textwrap.dedent(HOLDER).format(folder=str(folder), hold=hold)
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", text], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    with kill_on_exit(process):
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        monitor = UsageMonitor(process.pid, str(folder), memory)
        for _ in range(resource_usage.CHECKS_PER_THOROUGH):
            monitor.check()


@pytest.mark.parametrize("hold", HOLDS.values(), ids=HOLDS.keys())
@needs_supervisor
def test_all_ways_to_hold_memory_are_measured_once(hold: str, tmp_path: Path) -> None:
    size = 192 * 2**20
    with pytest.raises(OverLimit, match="--memory"):
        check_holder(hold, tmp_path, size - 2**20)
    for left in tmp_path.rglob("*"):
        if left.is_file():
            left.unlink()
    for left in tmp_path.iterdir():
        left.rmdir()
    check_holder(hold, tmp_path, size + MARGIN)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root is shown how much of shared memory nobody has mapped")
@needs_supervisor
def test_shared_memory_that_is_hardly_mapped_is_measured(tmp_path: Path) -> None:
    hold = "held = mmap.mmap(-1, SIZE); held.write(bytes(SIZE)); held.resize(4096)"
    with pytest.raises(OverLimit):
        check_holder(hold, tmp_path, 128 * 2**20)


@needs_supervisor
def test_folders_that_cannot_be_measured_are_too_much(tmp_path: Path) -> None:
    hold = "[(os.mkdir('d'), os.chdir('d')) for _ in range(100) if _ or not os.chdir(FOLDER)]"
    with pytest.raises(OverLimit, match="nested"):
        check_holder(hold, tmp_path, 2**40)


@needs_supervisor
def test_more_processes_than_are_allowed_are_too_much(tmp_path: Path) -> None:
    with pytest.raises(OverLimit, match="256 processes"):
        check_holder("[fork_and_sleep() for _ in range(260)]", tmp_path, 2**40)


@needs_supervisor
def test_more_files_than_are_allowed_are_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource_usage, "MAX_FILES", 100)
    with pytest.raises(OverLimit, match="100 files"):
        check_holder("[open(f'{FOLDER}/{number}', 'w').close() for number in range(101)]", tmp_path, 2**40)


def list_leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith("conformance-kernel-")]


def test_a_locked_folder_is_removed(
    find: Callable[[str], Implementation], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    kernel = find("locks_its_folder")
    assert list_leftovers(tmp_path)
    sandboxed_executor.create_executor(kernel).forward(draw_problem(CASE))
    sandboxed_executor.end_process(kernel)
    assert not list_leftovers(tmp_path)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux has capabilities to give up")
def test_a_user_without_privileges_removes_folders_of_any_mode_and_depth(tmp_path: Path) -> None:
    code = """
        import os, sys, tempfile
        from conformance import temporary_folders
        top = tempfile.mkdtemp()
        here = os.getcwd()
        os.chdir(top)
        for _ in range(1500):
            os.mkdir("d")
            open("file", "w").close()
            os.chdir("d")
        os.chdir(top)
        for name in (b"\\xff", b"a\\nb", b"-rf", "locked", "d", "."):
            os.makedirs(name, exist_ok=True)
            os.chmod(name, 0)
        os.chdir(here)
        try:
            os.listdir(top)
        except PermissionError:
            pass
        else:
            raise AssertionError("modes bind nobody here")
        assert temporary_folders.remove_folder(top) == []
        assert not os.path.lexists(top)
    """
    # Without its capabilities, root is subject to file modes like other users.
    code = (
        "import ctypes\nctypes.CDLL(None).capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())\n"
        + (textwrap.dedent(code))
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_cannot_be_removed_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    remains = temporary_folders.remove_folder("/proc/self/fdinfo")
    assert remains
    temporary_folders.report_remains(remains)
    assert "cannot be removed: /proc/self/fdinfo" in capsys.readouterr().err


def test_folders_of_other_judges_stay_and_those_of_killed_ones_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    abandoned = tmp_path / "conformance-serve-1234abcd.tmp"
    (tmp_path / "conformance-of-a-user").mkdir()
    (abandoned / "inner").mkdir(parents=True)
    (abandoned / "inner").chmod(0)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "conformance-kernel-link.tmp").symlink_to(elsewhere)
    first, second = TemporaryFolder("kernel"), TemporaryFolder("explorer")
    assert sorted(path.name for path in tmp_path.glob("conformance-*")) == sorted(
        [Path(first.path).name, Path(second.path).name, "conformance-kernel-link.tmp", "conformance-of-a-user"]
    )
    first.remove()
    second.remove()
    assert elsewhere.exists()


def test_the_next_folder_removes_that_of_a_killed_explorer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
        import os, signal
        from conformance.judging import explorer
        with explorer.use_temporary_home():
            os.kill(os.getpid(), signal.SIGKILL)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    assert subprocess.run(command, env={**os.environ, "TMPDIR": str(tmp_path)}, check=False).returncode == -9
    assert len(list(tmp_path.iterdir())) == 1
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    TemporaryFolder("kernel").remove()
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_removed_before_it_is_locked_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    create, created = tempfile.mkdtemp, []

    def create_and_remove_first(**options: str) -> str:
        created.append(create(**options))
        if len(created) == 1:
            temporary_folders.remove_abandoned_folders()
        return created[-1]

    monkeypatch.setattr("tempfile.mkdtemp", create_and_remove_first)
    folder = TemporaryFolder("kernel")
    assert [folder.path] == created[1:]
    folder.remove()
    assert not list(tmp_path.iterdir())


@needs_supervisor
def test_a_judge_that_is_killed_leaves_no_folder(tmp_path: Path) -> None:
    case = "train/f32/B1.T16.S16.N2.K2.H16.V16/full/normal/s0"
    kernel = f"--impl={HERE}/greedy_kernels.py:waits_with_files"
    command = [sys.executable, "-m", "conformance", "run", kernel, f"--case={case}"]
    environment = {**os.environ, "TMPDIR": str(tmp_path), "CONFORMANCE_CACHE": ""}
    judge = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, text=True, start_new_session=True)
    with kill_on_exit(judge):
        wait_until(lambda: list_leftovers(tmp_path), judge)
        wait_until(lambda: any(Path(tmp_path, name, "waits").exists() for name in list_leftovers(tmp_path)), judge)
        judge.kill()
    wait_until(lambda: not list_leftovers(tmp_path))
