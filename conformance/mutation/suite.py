"""Run the command of a suite with the function replaced."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from conformance.mutation import warm_process
from conformance.mutation.pytest_selection import list_callers, read_events

SITE = str(Path(__file__).parent / "site")
_SUMMARY = "short test summary info"
_FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class SuiteRun:
    """One run of the suite.

    Attributes:
      code: the exit code; None if it ran past its time.
      seconds: how long it ran.
      output: what it printed, its end if that is long.
      folder: what its processes wrote.
    """

    code: int | None
    seconds: float
    output: str
    folder: Path

    @property
    def first_failure(self) -> str:
        """The first test that failed, if pytest named one."""
        found = _FAILED.search(self.output.rpartition(_SUMMARY)[2])
        return found[1] if found else ""

    @property
    def reasons(self) -> dict[str, int]:
        """Why calls were left as they are, with the number of tests that made such calls."""
        found: dict[str, int] = {}
        for event in read_events(self.folder):
            if event["reason"]:
                found[event["reason"]] = found.get(event["reason"], 0) + 1
        return found

    @property
    def was_replaced(self) -> bool:
        """Return whether a call of the function was noted that is not left as it is."""
        return any(not event["reason"] for event in read_events(self.folder))


@dataclasses.dataclass
class Suite:
    """The command of a suite, and the function that is replaced in its processes.

    Attributes:
      command: the command and its arguments.
      function: `module:name` of the function.
      through: `file.py:name` of a function that turns its calls into calls of the contract; empty to read them by name.
      folder: a folder for what its processes write.
      environment: the environment variables of its processes.
      by_hand: whether correct attention has a backward pass written by hand.
      callers: the tests that called the function, once this is known.
    """

    command: Sequence[str]
    function: str
    through: str
    folder: Path
    environment: Mapping[str, str]
    by_hand: bool = True
    callers: Sequence[str] = ()
    _running: set[subprocess.Popen[str]] = dataclasses.field(default_factory=set)
    _warm: list[warm_process.WarmProcess] = dataclasses.field(default_factory=list)
    _threads: threading.local = dataclasses.field(default_factory=threading.local)
    _lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    @property
    def is_pytest(self) -> bool:
        """Return whether the command runs pytest."""
        words = [Path(self.command[0]).name, *self.command[1:3]]
        return "pytest" in words or "py.test" in words

    def run(self, mode: str, *, seconds: float | None = None) -> SuiteRun:
        """Run the suite with the function replaced as `mode` says: `true`, `right`, or the name of a wrong one."""
        folder = self.folder / mode
        folder.mkdir(exist_ok=True)
        for old in folder.iterdir():
            old.unlink()
        settings: dict[str, Any] = {"replace": self.function, "through": self.through, "mode": mode}
        settings |= {"folder": str(folder), "by_hand": self.by_hand, "callers": list(self.callers)}
        file = self.folder / f"{mode}.json"
        file.write_text(json.dumps(settings), encoding="utf-8")
        shared = self._build_environment()
        own = {"CONFORMANCE_MUTANTS": str(file)}
        if self.is_pytest:
            options = "-rfE --color=no --disable-warnings -p no:cacheprovider" + ("" if mode == "true" else " -x")
            own["PYTEST_ADDOPTS"] = f"{self.environment.get('PYTEST_ADDOPTS', '')} {options}".strip()
        start = time.monotonic()
        log = folder / "output.txt"
        found = warm_process.find_python(self.command, shared.get("PATH"))
        if found is None:
            code = self._run_cold({**shared, **own}, log, seconds)
        else:
            python, arguments, in_folder = found
            request = {"arguments": arguments, "in_folder": in_folder, "environment": own}
            code = self._run_warm(python, shared, {**request, "log": str(log), "seconds": seconds})
        text = log.read_text(encoding="utf-8", errors="replace")
        return SuiteRun(code, time.monotonic() - start, text[-20_000:], folder)

    def _build_environment(self) -> dict[str, str]:
        """Build the environment variables that all runs share."""
        environment = dict(self.environment)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (SITE, self.environment.get("PYTHONPATH"))))
        if "JAX_COMPILATION_CACHE_DIR" not in environment:  # most programs are the same with each wrong function
            environment["JAX_COMPILATION_CACHE_DIR"] = str(self.folder / "programs")
            environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
            environment["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
        if self.is_pytest:
            plugins = (self.environment.get("PYTEST_PLUGINS"), "conformance.mutation.pytest_selection")
            environment["PYTEST_PLUGINS"] = ",".join(filter(None, plugins))
        return environment

    def _run_warm(self, python: str, environment: dict[str, str], request: dict[str, Any]) -> int | None:
        """Run pytest in a fork of a process of this thread."""
        warm: warm_process.WarmProcess | None = getattr(self._threads, "warm", None)
        if warm is None or self._threads.environment != environment:
            warm = self._threads.warm = warm_process.WarmProcess(python, environment)
            self._threads.environment = environment
            with self._lock:
                self._warm.append(warm)
        return warm.run(request)

    def _run_cold(self, environment: dict[str, str], log: Path, seconds: float | None) -> int | None:
        """Run the command."""
        with log.open("w", encoding="utf-8") as output:
            process = subprocess.Popen(
                self.command,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
            with self._lock:
                self._running.add(process)
            try:
                return process.wait(timeout=seconds)
            except subprocess.TimeoutExpired:
                return None
            finally:
                _kill(process)
                with self._lock:
                    self._running.discard(process)

    def list_callers(self, run: SuiteRun) -> list[str]:
        """List the tests that called the function in a run."""
        return list_callers(run.folder)

    def stop(self) -> None:
        """End all that is running."""
        with self._lock:
            for process in self._running:
                _kill(process)
            for warm in self._warm:
                warm.stop()
            self._warm.clear()


def _kill(process: subprocess.Popen[str]) -> None:
    """End a process and those that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
