"""Exceptions that end a session, or stop its run."""

from __future__ import annotations


class CannotJudge(Exception):  # noqa: N818 -- a statement, as the message is
    """A session or command cannot be carried out; the message is the one line that the user sees. Exit code 2."""


class RunStopped(Exception):  # noqa: N818 -- no error of this program
    """Stop a run in order: what is judged so far is kept and reported. The message says why.

    Whoever watches the progress of a run raises this.
    """
