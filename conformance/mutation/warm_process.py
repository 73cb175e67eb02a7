"""Run pytest again and again in forks of a process that has loaded JAX and pytest, so that each run starts at once.

The process has loaded nothing of the suite: each fork imports the suite's modules, and in them the function is
replaced. No backend of JAX is started before the fork.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_POLL = 0.02  # seconds between two looks at the fork


class WarmProcess:
    """A process that runs pytest in forks.

    Args:
      python: the interpreter.
      environment: the environment variables that all runs share.
    """

    def __init__(self, python: str, environment: Mapping[str, str]) -> None:
        self.process = subprocess.Popen(
            [python, "-c", "from conformance.mutation.warm_process import serve; serve()"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, request: Mapping[str, Any]) -> int | None:
        """Run pytest once; return its exit code, or None if it ran past its time.

        Args:
          request: `arguments` of pytest, whether the current folder is on Python's path (`in_folder`), further
            `environment`, the file `log` for what it prints, and `seconds`.

        Raises:
          OSError: if the process has ended.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise OSError("the process that runs the tests has ended")
        code: int | None = json.loads(answer)
        return code

    def stop(self) -> None:
        """End the process and its fork."""
        self.process.terminate()
        try:
            self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return  # a fork may still hold the pipes
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


def find_python(command: Sequence[str], path: str | None) -> tuple[str, list[str], bool] | None:
    """Find the interpreter of a pytest command, among the folders of `path`.

    Returns:
      The interpreter, the arguments of pytest, and whether the current folder is on Python's path; None for a command
      that is not pytest.
    """
    program = Path(command[0]).name
    if program.startswith("python") and list(command[1:3]) == ["-m", "pytest"]:
        return command[0], list(command[3:]), True
    script = shutil.which(command[0], path=path) if program == "pytest" else None
    if script is not None and (python := Path(script).parent / "python").exists():
        return str(python), list(command[1:]), False
    return None


def serve() -> None:
    """Run pytest for each line of standard input, and print its exit code."""
    import jax  # noqa: F401  loaded before the forks
    import pytest  # noqa: F401  likewise

    import conformance.mutation.substitution  # noqa: F401  likewise

    fork = 0

    def end(*_: Any) -> None:
        if fork:
            _kill(fork)
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    sys.path[:] = [one for one in sys.path if one]  # `python -c` has the current folder
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        request = json.loads(line)
        fork = os.fork()
        if not fork:
            _run_pytest(request)
        code = _wait(fork, request["seconds"])
        _kill(fork)
        fork = 0
        answers.write(json.dumps(code) + "\n")
        answers.flush()
    end()


def _run_pytest(request: Mapping[str, Any]) -> None:
    """Run pytest in this fork, and end it."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    for old, new in ((null, 0), (log, 1), (log, 2)):
        os.dup2(old, new)
    os.environ.update(request["environment"])
    if request["in_folder"]:
        sys.path.insert(0, os.getcwd())
    sys.argv = ["pytest", *request["arguments"]]
    runpy.run_path(str(Path(__file__).parent / "site" / "sitecustomize.py"))
    code = 3
    try:
        runpy.run_module("pytest", run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(bool(ended.code))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(fork: int, seconds: float | None) -> int | None:
    """Wait for a fork; return its exit code, negative for a signal, or None if it ran past its time."""
    end = None if seconds is None else time.monotonic() + seconds
    while True:
        found, status = os.waitpid(fork, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if end is not None and time.monotonic() > end:
            return None
        time.sleep(_POLL)


def _kill(fork: int) -> None:
    """End what is left of a fork's processes."""
    with contextlib.suppress(ProcessLookupError, PermissionError, ChildProcessError):
        os.killpg(fork, signal.SIGKILL)
        os.waitpid(fork, 0)
