"""Define the exceptions that end a session or stop its run, and the exit code of a command that judges."""

from __future__ import annotations


class CannotJudge(Exception):
    """Raised if a session or command cannot do its work, for example because of its options.

    The message is the one line that the user sees. The exit code is 2.
    """


class RunStopped(Exception):
    """Raised to stop a run in an orderly way: the records so far are kept and reported. The message says why.

    The callbacks that follow the progress of a run raise this, for example at the first failure of `--fail-fast`.
    """


def choose_exit_code(*, is_wrong: bool, is_judged: bool) -> int:
    """Return 1 if something is wrong; otherwise 0 if all that counts was judged, and 2 if not."""
    return 1 if is_wrong else 0 if is_judged else 2
