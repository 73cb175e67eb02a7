"""Test that a confined process can do what a kernel needs, and nothing that concerns others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from conformance.fork_server import visible_environment
from conformance.sandbox import confinement, policy, seccomp, system_calls
from conformance.sandbox.seccomp import FilterOptions
from tests.sandbox.attempts import NUMBERS, attempts

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the sandbox is Linux's")
NEEDED = (
    *("read a module", "read a data file", "list the tree", "read the library", "write to scratch"),
    *("make a file in scratch", "copy in scratch"),
    *("rename in scratch", "a child", "a thread", "shared memory of its own", "the machine's processors"),
    *("its own limits", "signal itself", "write to /dev/null", "read /dev/urandom"),
)
IGNORED = ("change a mode",)
WITH_NVIDIA = ("name a thread",)
DENIED = tuple(name for name in attempts(Path()) if name not in (*NEEDED, *IGNORED, *WITH_NVIDIA))


def make_folder(folder: Path) -> Path:
    """Make a source tree, with entries beside it and in it that a kernel must not read."""
    for name in (
        "tree/data/table.txt",
        "tree/helper.py",
        "tree/.git/config",
        "tree/.env",
        "tree/data/.env",
        "tree/records.jsonl",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("here")
    for name in ("tree/out/page.html", "neighbour.txt", "other/file", "driver"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("here")
    (folder / "tree" / "link.txt").symlink_to(folder / "neighbour.txt")
    (folder / "tree" / "alias.txt").symlink_to(folder / "tree" / ".env")
    (folder / "scratch").mkdir()
    return folder


def run_attempts(folder: Path, driver: str) -> Mapping[str, str]:
    """Return the outcome of each attempt in a confined process."""
    command = [sys.executable, "-m", "tests.sandbox.attempts", str(folder), driver]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: Mapping[str, str] = json.loads(done.stdout)
    if not confinement.is_confined(found["sentence"]):
        pytest.skip(found["sentence"])
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a folder for `attempts`."""
    return make_folder(tmp_path_factory.mktemp("confined"))


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> Mapping[str, str]:
    """Return the outcome of each attempt."""
    return run_attempts(folder, str(folder / "no driver"))


@pytest.mark.parametrize("attempt", NEEDED)
def test_what_a_kernel_needs_is_allowed(attempt: str, outcomes: Mapping[str, str]) -> None:
    assert outcomes[attempt] == "done"


@pytest.mark.parametrize("attempt", DENIED)
def test_what_concerns_others_is_denied(attempt: str, outcomes: Mapping[str, str]) -> None:
    assert outcomes[attempt] in ("EPERM", "EACCES", "EXDEV", "ENOTSUP", "EOPNOTSUPP", "ENOTTY")


def test_modes_and_times_of_files_stay_as_they_are(outcomes: Mapping[str, str], folder: Path) -> None:
    assert [outcomes[attempt] for attempt in IGNORED] == ["done"]
    about = (folder / "neighbour.txt").stat()
    assert about.st_mode & 0o600
    assert about.st_mtime > 1


def test_an_nvidia_driver_names_its_threads(outcomes: Mapping[str, str], tmp_path: Path) -> None:
    """Check it because without names no GPU starts: the driver fails with `CUDA_ERROR_OPERATING_SYSTEM`."""
    assert outcomes["name a thread"] == "EACCES"
    found = run_attempts(make_folder(tmp_path), str(tmp_path / "driver"))
    assert found["name a thread"] == "done"
    assert "shared memory" in found["sentence"]
    assert {name: what for name, what in found.items() if name in DENIED and what == "done"} == {}


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("options", [FilterOptions(), FilterOptions(True, True)], ids=["cpu", "gpu"])
def test_a_filter_decides_every_call_of_the_table(machine: str, options: FilterOptions) -> None:
    verdicts = {}
    for calls in (
        *(system_calls.ALLOWED, system_calls.IGNORED, system_calls.UNSUPPORTED, system_calls.CHECKED),
        *(system_calls.UNIX_SERVER, system_calls.FALLBACK, system_calls.FORBIDDEN),
    ):
        for call in calls:
            assert call.name not in verdicts, "a call stands in two tables"
            verdicts[call.name] = decide(seccomp.build_filter(machine, options, 5), machine, getattr(call, machine))
    assert all(verdicts[call.name] == "allow" for call in system_calls.ALLOWED if getattr(call, machine) is not None)
    assert verdicts["connect"] == verdicts["sendto"] == verdicts["sendmsg"] == 1
    assert verdicts["bind"] == ("allow" if options.unix_server else 1)
    assert verdicts["clone3"] == 38
    assert {name: number for name, (number, _) in NUMBERS.items() if machine == "x86_64"}.items() <= {
        call.name: call.x86_64 for call in (*system_calls.FORBIDDEN, *system_calls.UNSUPPORTED, *system_calls.CHECKED)
    }.items()


def decide(steps: list[seccomp.Step], machine: str, number: int | None, *arguments: int) -> str | int | None:
    """Run a filter as the kernel does; return `allow`, or the error number."""
    if number is None:
        return None
    architecture = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}[machine]
    data = {0: number, 4: architecture} | {16 + 8 * place: value for place, value in enumerate((*arguments, 0, 0))}
    word, at = 0, 0
    while True:
        code, yes, no, operand = steps[at]
        at += 1
        match code:
            case 0x20:
                word = data[operand]
            case 0x54:
                word &= operand
            case 0x06:
                return "allow" if operand == 0x7FFF0000 else operand & 0xFFFF
            case _:
                holds = {0x15: word == operand, 0x25: word > operand, 0x35: word >= operand, 0x45: word & operand}[code]
                at += yes if holds else no


@pytest.mark.parametrize(
    ("call", "arguments", "verdict"),
    [
        ("clone", (0x3D0F00,), "allow"),  # a thread
        ("clone", (0x10000011,), 1),  # a process in a new user namespace
        ("ioctl", (3, 0x5401), "allow"),
        ("ioctl", (3, 0x5412), 25),  # TIOCSTI types into a terminal
        ("ioctl", (3, 0x40086602), 25),  # FS_IOC_SETFLAGS
        ("prlimit64", (0,), "allow"),
        ("prlimit64", (5,), "allow"),
        ("prlimit64", (6,), 1),
        ("socket", (1,), 1),
    ],
)
def test_a_filter_looks_at_arguments(call: str, arguments: tuple[int, ...], verdict: str | int) -> None:
    numbers = {one.name: one.x86_64 for one in (*system_calls.CHECKED, *system_calls.UNIX_SERVER)}
    assert decide(seccomp.build_filter("x86_64", FilterOptions(), 5), "x86_64", numbers[call], *arguments) == verdict


def test_an_accelerator_is_driven_by_commands_that_are_no_files() -> None:
    machine = "x86_64"
    steps = seccomp.build_filter(machine, FilterOptions(accelerator=True), 5)
    assert decide(steps, machine, 16, 3, 0xC020462A) == "allow"  # NV_ESC_RM_CONTROL
    assert decide(steps, machine, 16, 3, 0x30000001) == "allow"  # UVM_INITIALIZE
    assert decide(steps, machine, 16, 3, 0x40086602) == 25
    assert decide(steps, machine, 16, 3, 0x5412) == 25
    assert decide(steps, machine, 16, 3, 0xAA00) == 25  # USERFAULTFD_IOC_NEW


def test_devices_are_those_that_every_kernel_needs_and_those_of_accelerators(tmp_path: Path) -> None:
    allowed = {
        "null",
        "zero",
        "random",
        "urandom",
        "nvidia0",
        "nvidiactl",
        "nvidia-uvm",
        "accel0",
        "vfio",
        "kfd",
        "dri",
    }
    others = {"userfaultfd", "kvm", "net", "ptmx", "pts", "loop-control", "loop0", "cpu_dma_latency", "shm", "mem"}
    for name in allowed | others | {"tty", "console", "sda", "fuse", "vsock", "hwrng"}:
        (tmp_path / name).touch()
    (tmp_path / "nvidia-link").symlink_to(tmp_path / "mem")
    assert {device.name for device in confinement.find_devices(folder=tmp_path)} == allowed


def test_calls_of_the_other_word_size_are_refused() -> None:
    steps = seccomp.build_filter("x86_64", FilterOptions(), 5)
    assert decide(steps, "x86_64", 0x40000000) == 1  # x32
    assert decide(steps, "aarch64", 0) == 1


def test_secrets_stay_out_of_the_environment() -> None:
    given = {
        **{"PATH": "/bin", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--x", "CUDA_VISIBLE_DEVICES": "0"},
        **{"GITHUB_TOKEN": "s", "AWS_SECRET_ACCESS_KEY": "s", "PYTEST_CURRENT_TEST": "t", "CONFORMANCE_CACHE": "c"},
        "BLOCK_Q": "128",
    }
    assert set(visible_environment.filter_environment(given)) == {
        "PATH",
        "JAX_PLATFORMS",
        "XLA_FLAGS",
        "CUDA_VISIBLE_DEVICES",
    }
    assert visible_environment.filter_environment(given, ["BLOCK_Q"])["BLOCK_Q"] == "128"


def test_a_home_shows_its_modules_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("flash.py", "package/__init__.py", "letters/one.txt", "diary.txt", ".ssh/id_rsa"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    found = policy.find_readable_sources(tmp_path, [])
    assert sorted(str(path.relative_to(tmp_path)) for path in found) == ["flash.py", "package/__init__.py"]


def test_dot_files_and_records_stay_hidden_at_any_depth_and_under_other_names(tmp_path: Path) -> None:
    shown = {"flash.py", "plain/a/b.txt", "mixed/c.txt", "mixed/more/d.txt", "out/e.txt"}
    for name in shown | {".env", "mixed/.env", "mixed/more/.git/config", "out/f/g.jsonl"}:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "alias").symlink_to(tmp_path / ".env")
    (tmp_path / "mixed" / "alias").symlink_to(tmp_path / "mixed" / "more" / ".git")
    allowed = list(policy.find_readable_sources(tmp_path, [tmp_path / "plain" / "a" / "later.html"]))
    assert tmp_path / "plain" / "a" not in allowed  # the command will write a file there
    readable = {path for place in allowed for path in (place, *place.rglob("*")) if path.is_file()}
    assert {str(path.relative_to(tmp_path)) for path in readable} == shown
    named = list(policy.find_readable_entries(tmp_path / "mixed" / "more" / ".git", []))
    assert named == [tmp_path / "mixed" / "more" / ".git" / "config"]


def test_the_current_folder_counts_if_the_kernel_lies_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    for folder in (here / "kernels", elsewhere):
        folder.mkdir(parents=True)
        (folder / "flash.py").write_text("")
    monkeypatch.chdir(here)
    path = [str(here), str(here), str(tmp_path / "configured"), os.__file__]
    (tmp_path / "configured").mkdir()
    assert policy.find_source_trees("kernels/flash.py:attention", path) == [
        here / "kernels",
        here,
        tmp_path / "configured",
    ]
    assert policy.find_source_trees(f"{elsewhere}/flash.py:attention", path) == [elsewhere, tmp_path / "configured"]
