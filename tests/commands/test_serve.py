"""A server makes `run` start at once, and changes no verdict."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from conformance import served_command, served_run
from conformance.fork_server import command_server, forked_process
from conformance.fork_server.forked_process import ForkedProcess
from conformance.sandbox import compilation_cache
from tests.process_helpers import (
    COMMAND_TIMEOUT,
    OWN_SERVER,
    kill_on_exit,
    restore_signal_handlers,
    run_server,
    wait_until,
)

ROOT = Path(__file__).parent.parent.parent
KERNEL = """
import time
from tests.kernels import naive
from conformance import declare

@declare(behind_mask="finite")
def attention(q, k, v, *, causal=False):
    time.sleep({delay})
    return naive.attention(q, k, v, causal=causal){change}
"""
WAITS = """while not __import__("os").path.exists("go"):
        time.sleep(0.05)"""
CASE = "--case=train/f32/B1.T37.S37.N2.K2.H16.V16/causal/normal/s0"
SEVERAL = ("--cases=train/f32/*.T1.*", "--check=forward", "--jobs=1")

pytestmark = pytest.mark.skipif(not command_server.is_supported(), reason="only Linux has abstract sockets")


@pytest.fixture(scope="module")
def environ(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    own = {"CONFORMANCE_CACHE": str(tmp_path_factory.mktemp("cache")), "PYTHONPATH": str(ROOT)}
    return {**os.environ, **OWN_SERVER, **own, "TMPDIR": str(tmp_path_factory.mktemp("temporary"))}


@pytest.fixture(scope="module")
def server(environ: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    with run_server(environ) as process:
        yield process


def judge(
    folder: Path, environ: dict[str, str], what: Sequence[str] = (CASE,), *, change: str = "", delay: float = 0.0
) -> tuple[int, list[str], subprocess.CompletedProcess[str]]:
    """Judge a kernel with a change; return the exit code, the judged lines without times, and the process."""
    (folder / "kernel.py").write_text(KERNEL.format(change=change, delay=delay))
    command = [sys.executable, "-m", "conformance", "run", "--impl=kernel.py:attention", *what]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=COMMAND_TIMEOUT)
    lines = [line for line in done.stdout.splitlines() if not line.startswith("level ") and " s" not in line[-3:]]
    return done.returncode, lines, done


def test_verdicts_are_the_same_with_and_without_a_server(
    tmp_path: Path, environ: dict[str, str], server: subprocess.Popen[str]
) -> None:
    alone = {**environ, "JAX_CONFORMANCE_TEST": "alone"}
    for change in ("", " * 1.01", ""):
        served, by_itself = judge(tmp_path, environ, change=change), judge(tmp_path, alone, change=change)
        assert served[:2] == by_itself[:2]
        assert served[0] == (1 if change else 0)


def test_a_server_with_older_sources_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_CONFORMANCE_TEST", f"older-{os.getpid()}")
    assert command_server.join_server() == command_server.FoundServer("", has_stale=False)
    with socket.socket(socket.AF_UNIX) as older:
        older.bind(f"\0{command_server._name_installation()}-older")
        older.listen()
        assert command_server.join_server() == command_server.FoundServer("", has_stale=True)


def test_the_server_keeps_expectations_and_programs_for_the_next_version(
    tmp_path: Path, environ: dict[str, str], server: subprocess.Popen[str]
) -> None:
    (kept,) = Path(environ["TMPDIR"]).glob("conformance-serve-*")
    # A process's programs of its last second are not kept. So tracing the next one takes longer than that.
    judge(tmp_path, environ, SEVERAL, delay=1.5)
    expectations = {file.name for file in (kept / "expectations").iterdir()}
    programs = {file.relative_to(kept) for file in (kept / "programs").rglob("*-cache")}
    assert expectations
    assert programs
    judge(tmp_path, environ, SEVERAL, change="  # the same programs", delay=1.5)
    assert {file.name for file in (kept / "expectations").iterdir()} == expectations
    later = {file.relative_to(kept) for file in (kept / "programs").rglob("*-cache")}
    assert programs <= later
    assert {file.parent for file in later} == {file.parent for file in programs}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_signal_reaches_the_served_command(
    tmp_path: Path, environ: dict[str, str], server: subprocess.Popen[str], number: signal.Signals
) -> None:
    (tmp_path / "kernel.py").write_text(KERNEL.format(change="", delay=0.0))
    command = [sys.executable, "-m", "conformance", "run", "--impl=kernel.py:attention", "--json=found.jsonl"]
    with restore_signal_handlers():
        process = subprocess.Popen(command, cwd=tmp_path, env=environ, stderr=subprocess.PIPE, text=True)
    with kill_on_exit(process):
        found = tmp_path / "found.jsonl"
        wait_until(lambda: found.exists() and found.read_text().count("\n") > 3)
        process.send_signal(number)
        assert process.wait(COMMAND_TIMEOUT) == 128 + number
    assert server.poll() is None


def test_a_second_server_is_refused(environ: dict[str, str], server: subprocess.Popen[str]) -> None:
    command = [sys.executable, "-m", "conformance", "serve"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=COMMAND_TIMEOUT)
    assert done.returncode == 2
    assert "runs already" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_command_outlives_its_server_and_nothing_is_left(
    environ: dict[str, str], tmp_path: Path, number: signal.Signals
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    alone = {**environ, "TMPDIR": str(temporary)}
    (tmp_path / "kernel.py").write_text(KERNEL.replace("time.sleep({delay})", WAITS).format(change=""))
    command = [sys.executable, "-m", "conformance", "run", "--impl=kernel.py:attention", CASE, "--json=found.jsonl"]
    with restore_signal_handlers():
        serving = subprocess.Popen(
            [*command[:3], "serve"], env=alone, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
    said = tmp_path / "said.txt"
    with kill_on_exit(serving), said.open("w") as stderr:
        assert serving.stderr is not None
        assert serving.stderr.readline().startswith("serving")
        running = subprocess.Popen(command, cwd=tmp_path, env=alone, stderr=stderr, text=True, start_new_session=True)
        with kill_on_exit(running):
            wait_until((tmp_path / "found.jsonl").exists, running)
            serving.send_signal(number)
            serving.wait(COMMAND_TIMEOUT)
            left = [path.name for path in temporary.glob("conformance-serve-*")]
            wait_until(lambda: "has ended; this command goes on by itself" in said.read_text(), running)
            (tmp_path / "go").touch()
            assert running.wait(COMMAND_TIMEOUT) == 0, said.read_text()
    assert len(left) == (number == signal.SIGKILL)
    subprocess.run([*command[:4], "--impl=dot_product", CASE], cwd=tmp_path, env=alone, check=True, capture_output=True)
    assert not list(temporary.glob("conformance-*"))


def test_a_command_that_its_server_never_began_runs_by_itself(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("_server", None), ("_started_servers", [])):
        monkeypatch.setattr(forked_process, name, value)
    ours, theirs = socket.socketpair()
    forked_process.adopt_connection(ours.detach(), forked_process.read_import_environment())
    process = ForkedProcess(print)
    end, ending = os.pipe()
    for ended in (theirs.detach(), ending):
        os.close(ended)
    assert served_command._wait(process, command_server.FoundServer("/folder", has_stale=False, end=end)) is None
    assert capfd.readouterr().err.count("goes on by itself") == 1
    process.release()
    os.close(end)


@pytest.mark.parametrize("variable", ["TMPDIR", "XDG_RUNTIME_DIR"])
def test_a_server_with_other_places_for_temporary_files_is_not_found(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_CONFORMANCE_TEST", f"{variable}-{os.getpid()}")
    monkeypatch.setattr("tempfile.tempdir", None)
    with socket.socket(socket.AF_UNIX) as older:
        older.bind(f"\0{command_server._name_installation()}-older")
        older.listen()
        assert command_server.join_server().has_stale
        monkeypatch.setenv(variable, str(tmp_path))
        monkeypatch.setattr("tempfile.tempdir", None)
        assert not command_server.join_server().has_stale


def test_the_folder_of_an_ended_server_is_neither_used_nor_created_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(served_run.FOLDER_VARIABLE, str(tmp_path))
    assert served_run.find_folder() == tmp_path
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)  # another user has created it
    assert served_run.find_folder() is None
    ended = tmp_path / "ended"
    monkeypatch.setenv(served_run.FOLDER_VARIABLE, str(ended))
    assert served_run.find_folder() is None
    compilation_cache.link_programs(None, str(tmp_path))
    linked = compilation_cache.find_linked_programs(str(tmp_path))
    assert linked is not None
    program = linked / f"jit_f-{'0' * 64}-cache"
    program.write_text("x")
    os.utime(program, (1, 1))
    assert compilation_cache._find_new_programs(linked)
    compilation_cache.store_programs(ended / "programs" / "digest", str(tmp_path))
    assert not ended.exists()
