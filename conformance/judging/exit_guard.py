"""Keep code of the judged repository from ending the pytest gate with exit code 0.

The gate runs in the user's pytest, which imports the repository's `conftest.py` files and plugins. `ExitGuard` is a
pytest plugin that notices if one of them ends the process, replaces pytest, or changes reports of failed tests.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Protocol

import pytest

from conformance import interrupts, packages

if TYPE_CHECKING:
    from reports.records import Record

PLUGIN_NAME = "attention-conformance-ending"
"""The name under which pytest registers the guard."""
_MESSAGE_PREFIX = "attention conformance:"


class _RecordHolder(Protocol):
    """The pytest plugin of the gate, as far as the guard uses it: the records of the run."""

    @property
    def found(self) -> Iterable[Record]: ...


class ExitGuard:
    """Give pytest a failing exit code if other code stopped the gate or hid its failures.

    A `conftest.py` may end the process, on purpose or through an import, so that nothing is reported. It may also
    report failed tests as something else. The guard notices both. It does not protect against malicious code, which
    runs in the judge's process too and has other ways.

    Attributes:
      stopped: why Ctrl-C or a plugin stopped the run; empty if nothing did.
    """

    def __init__(self, holder_name: str) -> None:
        """Create the guard; `holder_name` is the name of the pytest plugin that holds the gate's records."""
        self._holder_name = holder_name
        self._is_guarding = self._has_begun = self._has_ended = False
        self._code = int(pytest.ExitCode.INTERRUPTED)
        self.stopped = ""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_load_initial_conftests(self, early_config: pytest.Config) -> Generator[None]:
        """Start the guard, before any `conftest.py` is imported."""
        options = early_config.known_args_namespace
        paths = options.file_or_dir or early_config.getini("testpaths")
        if not is_requested(paths, options.impl, options.conformance_cases):
            return (yield)
        packages.exit_if_customized()
        self._guard_process()
        try:
            return (yield)
        except SystemExit as error:
            sentence = f"a conftest.py ended the process (SystemExit: {error}), and nothing was judged"
            raise pytest.UsageError(sentence) from error

    def pytest_sessionstart(self) -> None:
        """Record that pytest itself runs the tests, and no other program in its place."""
        self._has_begun = True

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Record why the run was stopped.

        Pytest calls this hook after Ctrl-C and after `pytest.exit`, which may request exit code 0.
        """
        self.stopped = str(excinfo.value) or type(excinfo.value).__name__

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Record the exit code that the results require, since other hooks may end the process from here on."""
        self._code = self._determine_exit_code(session.config, int(session.exitstatus))
        self._has_ended = True

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_cmdline_main(self, config: pytest.Config) -> Generator[None, int, int]:
        """Correct the exit code after all other hooks, which may have changed the code or the reports of tests."""
        try:
            code = int((yield))
        except SystemExit as error:  # raised by a hook that pytest calls at the end
            if not self._is_guarding:
                raise
            given = error.code if isinstance(error.code, int) else int(pytest.ExitCode.INTERRUPTED)
            code = given or int(pytest.ExitCode.INTERRUPTED)
        option = config.option
        if self._is_guarding and not (self._has_begun or code or option.help or option.version or option.markers):
            sys.stderr.write(f"{_MESSAGE_PREFIX} another program ran in place of pytest, and nothing was judged\n")
            code = int(pytest.ExitCode.INTERRUPTED)
        self._code = self._determine_exit_code(config, code)
        self._has_ended = True
        return self._code

    def _determine_exit_code(self, config: pytest.Config, code: int) -> int:
        """Return the exit code to use in place of pytest's `code`: never 0 for a stopped or failed run."""
        if self.stopped and not code and self._is_guarding:
            sys.stderr.write(f"{_MESSAGE_PREFIX} the run was stopped: {self.stopped}\n")
            code = int(pytest.ExitCode.INTERRUPTED)
        holder: _RecordHolder | None = config.pluginmanager.get_plugin(self._holder_name)
        if self._is_guarding and not code and (names := _find_replaced(config)):
            sys.stderr.write(
                f"{_MESSAGE_PREFIX} this repository replaced {names[0]} of the judge, {len(names)} names in all\n"
            )
            code = int(pytest.ExitCode.INTERRUPTED)
        return _correct_exit_code(code, holder.found if holder is not None else ())

    def _guard_process(self) -> None:
        """Make `os._exit(0)` end this process with the gate's exit code, and make `os.exec` raise `PermissionError`.

        Child processes are not affected. Both stay in force after pytest has ended, since functions registered with
        `atexit` run later.
        """
        self._is_guarding = True
        guarded_pid, real_exit = os.getpid(), os._exit
        errors = os.dup(2)  # pytest captures descriptor 2

        def exit_with_earned_code(status: int) -> NoReturn:
            if os.getpid() == guarded_pid and status == 0 and self._code:
                if not self._has_ended:
                    os.write(errors, f"{_MESSAGE_PREFIX} the process ended before the gate did\n".encode())
                real_exit(self._code)
            real_exit(status)

        def refuse_exec(event: str, _: object) -> None:
            if event == "os.exec" and os.getpid() == guarded_pid:
                sentence = "a file of the repository starts another program in place of the gate (os.exec)"
                os.write(errors, f"{_MESSAGE_PREFIX} {sentence}, which is refused\n".encode())
                raise PermissionError(f"{sentence}: give the environment that it needs to the command")

        for module in filter(None, (os, sys.modules.get("posix"))):  # `os` imports `_exit` from `posix`
            vars(module)["_exit"] = exit_with_earned_code
        sys.addaudithook(refuse_exec)


def is_requested(arguments: Iterable[str], implementations: Iterable[str], cases: str | None) -> bool:
    """Tell whether a run of pytest judges kernels, according to its paths, `--impl` and `--conformance-cases`."""
    return bool(any(map(_is_of_gate, arguments)) or list(implementations) or cases is not None)


def _is_of_gate(argument: str) -> bool:
    """Tell whether an argument names this package, as a module or by its folder, or a test of the gate by its id."""
    path = argument.partition("[")[0].partition("::")[0]
    if path.partition(".")[0] == "conformance" or Path(path).parts[-2:] == ("conformance", "test_gate.py"):
        return True
    return bool(path) and Path(path).resolve().is_relative_to(packages.HOME / "conformance")


def describe_end(session: pytest.Session) -> tuple[str, str]:
    """Return how the run ended (`runs.COMPLETE` or `runs.INTERRUPTED`), and the reason if something stopped it."""
    from reports import runs

    guard: ExitGuard | None = session.config.pluginmanager.get_plugin(PLUGIN_NAME)
    stop_reason = session.shouldfail or session.shouldstop or (guard is not None and guard.stopped)
    if interrupts.get_received_signal() is not None:
        return runs.INTERRUPTED, interrupts.describe_signal()
    if stop_reason or session.exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return runs.INTERRUPTED, str(stop_reason) if isinstance(stop_reason, str) else "it was stopped"
    return runs.COMPLETE, ""


def _find_replaced(config: pytest.Config) -> list[str]:
    """List functions of the judge that the repository has replaced in this process.

    Workers of pytest-xdist need no look of their own: they import the same files.
    """
    from conformance.sandbox import repository_overrides

    return repository_overrides.find_overrides(config.rootpath)


def _correct_exit_code(code: int, records: Iterable[Record]) -> int:
    """Return pytest's exit code `code`, or that of failed tests if `code` is 0 although some records are red."""
    from reports.records import RED

    red = sum(record.verdict in RED for record in records)
    if code or not red:
        return code
    sys.stderr.write(f"{_MESSAGE_PREFIX} pytest ends in success, and {red} records are red\n")
    return int(pytest.ExitCode.TESTS_FAILED)
