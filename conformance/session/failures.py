"""Define the exceptions that end a session or stop its run, and the exit code of a command that judges."""

from __future__ import annotations


class CannotJudge(Exception):
    """Raised if a session or command cannot do its work, with exit code 2. The message is one line for the user."""


class RunStopped(Exception):
    """Raised by callbacks to stop a run but report its records, as `--fail-fast` does. The message says why."""


def choose_exit_code(*, is_wrong: bool, is_judged: bool) -> int:
    """Return 1 if something is wrong; otherwise 0 if all that counts was judged, and 2 if not."""
    return 1 if is_wrong else 0 if is_judged else 2
