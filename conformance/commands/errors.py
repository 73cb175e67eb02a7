"""What ends a command with one line: a command line that is wrong, and what cannot be judged."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from absl.flags import argparse_flags

_UNKNOWN = "unrecognized arguments: "


class CannotJudge(Exception):  # noqa: N818 -- a statement, as the message is
    """The command cannot be carried out; the message is the one line that the user sees. Exit code 2."""


class Parser(argparse_flags.ArgumentParser):
    """Parser of the whole command line."""

    def error(self, message: str) -> NoReturn:
        """One line and exit code 2."""
        # A kernel that is given as a bare word is the commonest of them.
        words = message.removeprefix(_UNKNOWN).split() if message.startswith(_UNKNOWN) else []
        kernel = next((word for word in words if not word.startswith("-") and (".py" in word or ":" in word)), None)
        refuse(self, f"{message}; a kernel is named by --impl={kernel}" if kernel else message)


class CommandParser(argparse.ArgumentParser):
    """Parser of a sub-command. An abbreviated option is refused: what is misspelt must not weaken the gate."""

    def __init__(self, **options: Any) -> None:
        """A parser with the options of argparse's own."""
        super().__init__(**options, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """One line and exit code 2."""
        refuse(self, message)


def refuse(refusing: argparse.ArgumentParser, message: str) -> NoReturn:
    """End with one line that says what is wrong, and where help is."""
    refusing.exit(2, f"error: {message} (see {refusing.prog} --help)\n")
