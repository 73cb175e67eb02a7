"""How a run of the gate ends: by its own exit code, or not in success."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Protocol

import pytest

if TYPE_CHECKING:
    from conformance.records import Record

_SAYS = "attention conformance:"


class _Judging(Protocol):
    """The plugin that has the records."""

    @property
    def found(self) -> Iterable[Record]: ...


class Ending:
    """Keeps a run of the gate from ending in success by other ways than its own.

    A `conftest.py` may end the process, knowingly or by what it imports, and then nothing is reported at all. It may
    also have red tests reported as something else. Both are told from success here. Whoever means harm in the judge's
    process has other ways, and those are not closed.
    """

    def __init__(self, judging: str) -> None:
        """`judging` is the name of the plugin that has the records."""
        self._judging = judging
        self._watching = self._ended = False
        self._code = int(pytest.ExitCode.INTERRUPTED)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_load_initial_conftests(self, early_config: pytest.Config) -> Generator[None]:
        """Before any `conftest.py` is imported."""
        given = early_config.known_args_namespace
        if not is_asked_for(given.file_or_dir, given.impl, given.conformance_cases):
            return (yield)
        self._watch()
        try:
            return (yield)
        except SystemExit as error:
            sentence = f"a conftest.py ends the process (SystemExit: {error}), and nothing is judged"
            raise pytest.UsageError(sentence) from error

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_cmdline_main(self, config: pytest.Config) -> Generator[None, int, int]:
        """The last word: hooks of others may have changed the exit code, and what tests report."""
        code = yield
        if self._watching:
            judging: _Judging | None = config.pluginmanager.get_plugin(self._judging)
            code = self._code = _honest(int(code), judging.found if judging is not None else ())
            self._ended = True
        return code

    def _watch(self) -> None:
        """From now on `os._exit(0)` ends this process as the gate ended; its children exit as they like."""
        self._watching = True
        process, leave = os.getpid(), os._exit
        errors = os.dup(2)  # pytest captures the usual one

        def exit_honestly(status: int) -> NoReturn:
            if os.getpid() == process and status == 0 and self._code:
                if not self._ended:
                    os.write(errors, f"{_SAYS} the process was ended before the gate was\n".encode())
                leave(self._code)
            leave(status)

        os._exit = exit_honestly


def is_asked_for(arguments: Iterable[str], implementations: Iterable[str], cases: str | None) -> bool:
    """Whether a run of pytest is to judge, as far as its arguments say."""
    named = any("conformance" in Path(argument.split("::")[0]).parts for argument in arguments)
    return bool(named or list(implementations) or cases is not None)


def how_it_ended(session: pytest.Session) -> tuple[str, str]:
    """How the run ended, and why if not by itself."""
    from conformance import runs

    stopped = session.shouldfail or session.shouldstop
    if stopped or session.exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return runs.INTERRUPTED, str(stopped) if isinstance(stopped, str) else "it was stopped"
    return runs.COMPLETE, ""


def _honest(code: int, found: Iterable[Record]) -> int:
    """The exit code of a run that gave `code`: nothing that is red is a success, whatever became of its report."""
    from conformance.records import RED

    red = sum(record.verdict in RED for record in found)
    if code or not red:
        return code
    sys.stderr.write(f"{_SAYS} pytest ends in success, and {red} records are red\n")
    return int(pytest.ExitCode.TESTS_FAILED)
