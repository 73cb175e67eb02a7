"""Give the pytest gate the exit code that its records require, whatever a `conftest.py` or a plugin does by accident.

The gate runs in the user's pytest, which imports the repository's `conftest.py` files and plugins. One of them may end
the process, so that nothing is reported, or change the exit status or the reports of failed tests. `ExitGuard` writes
the exit code last. It does not protect against malicious code, which runs in the judge's process too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from typing import TYPE_CHECKING, NoReturn

import pytest

from conformance import interrupts, packages
from conformance.gate import gate_options, repository_overrides

if TYPE_CHECKING:
    from reports.records import Record

PLUGIN_NAME = "attention-conformance-ending"
"""The name under which pytest registers the guard."""
_MESSAGE_PREFIX = "attention conformance:"


class ExitGuard:
    """Replace exit code 0 of a run that was stopped, was changed by the repository, or has red records.

    Attributes:
      records: the records of the gate, which the gate adds; without those of test files.
      stopped: why Ctrl-C or a plugin stopped the run; empty if nothing did.
    """

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.stopped = ""
        self._is_guarding = False
        self._code = int(pytest.ExitCode.INTERRUPTED)  # until the session has finished

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_load_initial_conftests(
        self, early_config: pytest.Config, parser: pytest.Parser, args: list[str]
    ) -> Generator[None]:
        """Start the guard, before any `conftest.py` is imported. Expand the short forms of options after that."""
        if gate_options.is_requested(early_config, args):
            packages.exit_if_customized()
            self._guard_exit()
        try:
            yield
        except SystemExit as error:
            if not self._is_guarding:
                raise
            sentence = f"a conftest.py ended the process (SystemExit: {error}), and nothing was judged"
            raise pytest.UsageError(sentence) from error
        gate_options.expand_short_forms(parser, args)
        self._is_guarding = self._is_guarding and gate_options.is_requested(early_config, args, parser=parser)

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Record why the run was stopped: by Ctrl-C, or by `pytest.exit`, which may request exit code 0."""
        self.stopped = str(excinfo.value) or type(excinfo.value).__name__

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Settle the exit code, since other hooks may end the process from here on."""
        self._code = self._settle_exit_code(session.config, int(session.exitstatus))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_cmdline_main(self, config: pytest.Config) -> Generator[None, int, int]:
        """Settle the exit code after all other hooks, which may have changed it, or the reports of tests."""
        try:
            code = int((yield))
        except SystemExit as error:  # raised by a hook that pytest calls at the end
            if not self._is_guarding:
                raise
            code = self._code or int(bool(error.code))
        self._code = self._settle_exit_code(config, code)
        return self._code

    def _settle_exit_code(self, config: pytest.Config, code: int) -> int:
        """Return the exit code to use in place of pytest's `code`, and say on standard error why it is another one."""
        if code or not (self._is_guarding or self.records):
            return code
        from reports.records import RED

        names = repository_overrides.find_overrides(config.rootpath) if self._is_guarding else []
        if self._is_guarding and self.stopped:
            code, why = pytest.ExitCode.INTERRUPTED, f"the run was stopped: {self.stopped}"
        elif names:
            code = pytest.ExitCode.INTERRUPTED
            why = f"this repository replaced {names[0]} of the judge, {len(names)} names in all"
        elif red := sum(record.verdict in RED for record in self.records):
            code, why = pytest.ExitCode.TESTS_FAILED, f"pytest ends in success, and {red} records are red"
        else:
            return code
        sys.stderr.write(f"{_MESSAGE_PREFIX} {why}\n")
        return int(code)

    def _guard_exit(self) -> None:
        """Make `os._exit(0)` end this process, not its children, with the gate's exit code.

        This stays in force after pytest has ended, since functions registered with `atexit` run later.
        """
        self._is_guarding = True
        guarded_pid, real_exit = os.getpid(), os._exit
        errors = os.dup(2)  # pytest captures descriptor 2

        def exit_with_earned_code(status: int) -> NoReturn:
            if self._is_guarding and os.getpid() == guarded_pid and status == 0 and self._code:
                os.write(errors, f"{_MESSAGE_PREFIX} os._exit(0) ends with {self._code}, the gate's code\n".encode())
                real_exit(self._code)
            real_exit(status)

        vars(os)["_exit"] = exit_with_earned_code


def describe_stop(session: pytest.Session) -> str:
    """Return why the run was stopped before its end; empty if it was not."""
    if interrupts.get_received_signal() is not None:
        return interrupts.describe_signal()
    guard: ExitGuard | None = session.config.pluginmanager.get_plugin(PLUGIN_NAME)
    reason = session.shouldfail or session.shouldstop or (guard is not None and guard.stopped)
    if reason or session.exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return reason if isinstance(reason, str) else "it was stopped"
    return ""


def name_end(reason: str) -> str:
    """Return `interrupted` if `reason`, which `describe_stop` returned, is not empty; otherwise `complete`."""
    from reports.records import COMPLETE, INTERRUPTED

    return INTERRUPTED if reason else COMPLETE
