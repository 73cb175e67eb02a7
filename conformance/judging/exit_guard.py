"""How a run of the gate ends: by its own exit code, or not in success."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Protocol

import pytest

from conformance import interrupts, packages

if TYPE_CHECKING:
    from conformance.records import Record

PLUGIN_NAME = "attention-conformance-ending"
"""That of the plugin."""
_MESSAGE_PREFIX = "attention conformance:"


class _RecordHolder(Protocol):
    """The plugin that has the records."""

    @property
    def found(self) -> Iterable[Record]: ...


class ExitGuard:
    """Keeps a run of the gate from ending in success by other ways than its own.

    A `conftest.py` may end the process, knowingly or by what it imports, and then nothing is reported at all. It may
    also have red tests reported as something else. Both are told from success here. Whoever means harm in the judge's
    process has other ways, and those are not closed.

    Attributes:
      stopped: why a plugin stopped the run, empty if none did.
    """

    def __init__(self, judging: str) -> None:
        """`judging` is the name of the plugin that has the records."""
        self._judging = judging
        self._watching = self._began = self._ended = False
        self._code = int(pytest.ExitCode.INTERRUPTED)
        self.stopped = ""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_load_initial_conftests(self, early_config: pytest.Config) -> Generator[None]:
        """Before any `conftest.py` is imported."""
        given = early_config.known_args_namespace
        asked = given.file_or_dir or early_config.getini("testpaths")
        if not is_requested(asked, given.impl, given.conformance_cases):
            return (yield)
        packages.exit_if_customized()
        self._guard_process()
        try:
            return (yield)
        except SystemExit as error:
            sentence = f"a conftest.py ends the process (SystemExit: {error}), and nothing is judged"
            raise pytest.UsageError(sentence) from error

    def pytest_sessionstart(self) -> None:
        """Pytest itself runs tests: no other took its place."""
        self._began = True

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Ctrl-C, or `pytest.exit`, which may ask for the exit code of a success."""
        self.stopped = str(excinfo.value) or type(excinfo.value).__name__

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """All is judged: others may end the process from here on, by the code that this run has earned."""
        self._code = self._determine_exit_code(session.config, int(session.exitstatus))
        self._ended = True

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_cmdline_main(self, config: pytest.Config) -> Generator[None, int, int]:
        """The last word: hooks of others may have changed the exit code, and what tests report."""
        try:
            code = int((yield))
        except SystemExit as error:  # out of a hook that is called at the end
            if not self._watching:
                raise
            left = error.code if isinstance(error.code, int) else int(pytest.ExitCode.INTERRUPTED)
            code = left or int(pytest.ExitCode.INTERRUPTED)
        option = config.option
        if self._watching and not (self._began or code or option.help or option.version or option.markers):
            sys.stderr.write(f"{_MESSAGE_PREFIX} something else than pytest ran in its place, and nothing is judged\n")
            code = int(pytest.ExitCode.INTERRUPTED)
        self._code = self._determine_exit_code(config, code)
        self._ended = True
        return self._code

    def _determine_exit_code(self, config: pytest.Config, code: int) -> int:
        """The exit code of a run that gave `code`: nothing that was stopped or is red is a success."""
        if self.stopped and not code and self._watching:
            sys.stderr.write(f"{_MESSAGE_PREFIX} the run was stopped: {self.stopped}\n")
            code = int(pytest.ExitCode.INTERRUPTED)
        judging: _RecordHolder | None = config.pluginmanager.get_plugin(self._judging)
        if self._watching and not code and (names := _find_replaced(config)):
            sys.stderr.write(
                f"{_MESSAGE_PREFIX} {names[0]}, by which is judged, is of this repository: {len(names)} replaced\n"
            )
            code = int(pytest.ExitCode.INTERRUPTED)
        return _correct_exit_code(code, judging.found if judging is not None else ())

    def _guard_process(self) -> None:
        """From now on `os._exit(0)` ends this process as the gate ended, and `os.exec` is refused; not in its children.

        That stays so when pytest is done: what was registered with `atexit` comes last of all.
        """
        self._watching = True
        process, leave = os.getpid(), os._exit
        errors = os.dup(2)  # pytest captures the usual one

        def exit_honestly(status: int) -> NoReturn:
            if os.getpid() == process and status == 0 and self._code:
                if not self._ended:
                    os.write(errors, f"{_MESSAGE_PREFIX} the process was ended before the gate was\n".encode())
                leave(self._code)
            leave(status)

        def stays(event: str, _: object) -> None:
            if event == "os.exec" and os.getpid() == process:
                sentence = "a file of the repository puts another program in the gate's place (os.exec)"
                os.write(errors, f"{_MESSAGE_PREFIX} {sentence}, which is refused\n".encode())
                raise PermissionError(f"{sentence}: give the environment that it needs to the command")

        for module in filter(None, (os, sys.modules.get("posix"))):  # `os` has it from there
            vars(module)["_exit"] = exit_honestly
        sys.addaudithook(stays)


def is_requested(arguments: Iterable[str], implementations: Iterable[str], cases: str | None) -> bool:
    """Whether a run of pytest is to judge, as far as its arguments say."""
    named = any("conformance" in Path(argument.split("::")[0]).parts for argument in arguments)
    return bool(named or list(implementations) or cases is not None)


def describe_end(session: pytest.Session) -> tuple[str, str]:
    """How the run ended, and why if not by itself."""
    from conformance import runs

    ending: ExitGuard | None = session.config.pluginmanager.get_plugin(PLUGIN_NAME)
    stopped = session.shouldfail or session.shouldstop or (ending is not None and ending.stopped)
    if interrupts.get_received_signal() is not None:
        return runs.INTERRUPTED, interrupts.describe_signal()
    if stopped or session.exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return runs.INTERRUPTED, str(stopped) if isinstance(stopped, str) else "it was stopped"
    return runs.COMPLETE, ""


def _find_replaced(config: pytest.Config) -> list[str]:
    """What has been put in the place of functions that judge. Workers of pytest-xdist import the same files."""
    from conformance.sandbox import repository_overrides

    return repository_overrides.find_overrides(config.rootpath)


def _correct_exit_code(code: int, found: Iterable[Record]) -> int:
    """The exit code of a run that gave `code`: nothing that is red is a success, whatever became of its report."""
    from conformance.records import RED

    red = sum(record.verdict in RED for record in found)
    if code or not red:
        return code
    sys.stderr.write(f"{_MESSAGE_PREFIX} pytest ends in success, and {red} records are red\n")
    return int(pytest.ExitCode.TESTS_FAILED)
