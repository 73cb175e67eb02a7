"""End a command with an error: print one line, with exit code 2."""

from __future__ import annotations

import argparse
import os
import re
import sys
import traceback
from typing import Any, NoReturn

from absl.flags import argparse_flags

from conformance import exhausted_memory, packages
from conformance.commands import standard_streams
from conformance.session.failures import CannotJudge
from conformance.session.run_spec import reject_empty

TRACEBACK_VARIABLE = "CONFORMANCE_TRACEBACK"
"""Name of the environment variable that makes an unexpected error print its traceback."""
_UNKNOWN_ARGUMENTS = "unrecognized arguments: "
_INVALID_CHOICE = re.compile(r"invalid choice: '(?P<name>[^']*)' \(choose from (?P<known>[^)]*)\)")

# Commands of earlier versions, and what does the same.
_MOVED = {"sensitivity": "python -m tests.bank"}


class Parser(argparse_flags.ArgumentParser):
    """The parser of the whole command line."""

    def error(self, message: str) -> NoReturn:
        """Print the error in one line, and end the process with exit code 2."""
        refuse_arguments(self, message)


class CommandParser(argparse.ArgumentParser):
    """The parser of a sub-command. It refuses abbreviated options, so that a misspelt option cannot weaken the gate."""

    def __init__(self, **options: Any) -> None:
        """Create a parser from the options of `argparse.ArgumentParser`."""
        super().__init__(**options, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)

    def parse_known_args(  # type: ignore[override] # overloads that differ only in the type of the namespace
        self, args: Any = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse arguments; refuse empty ones, repeated cases and unknown ones, and suggest known options for these."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"{_UNKNOWN_ARGUMENTS}{' '.join(unknown)}")
        for action in self._actions:
            try:
                reject_empty(
                    action.option_strings[0] if action.option_strings else action.dest, vars(found).get(action.dest)
                )
            except CannotJudge as error:
                self.error(str(error))
        self._reject_repeated([str(arg).partition("=")[0] for arg in (sys.argv[1:] if args is None else args)])
        return found, []

    def _reject_repeated(self, given: list[str]) -> None:
        """Refuse `--case` and `--cases` that take one value and are given more often: only the last would be judged."""
        for action in self._actions:
            option = action.option_strings[0] if action.option_strings else ""
            if (
                option in ("--case", "--cases")
                and isinstance(action, argparse._StoreAction)
                and given.count(option) > 1
            ):
                self.error(f"{option} takes one value, and is given {given.count(option)} times")

    def error(self, message: str) -> NoReturn:
        """Print the error in one line, and end the process with exit code 2."""
        refuse_arguments(self, message)


def refuse_arguments(refusing: argparse.ArgumentParser, message: str) -> NoReturn:
    """Print one line with the error, what may have been meant, and how to get help; exit with code 2."""
    refusing.exit(2, f"error: {message}{_suggest(refusing, message)} (see {refusing.prog} --help)\n")


def _suggest(refusing: argparse.ArgumentParser, message: str) -> str:
    """Return what may have been meant, as the end of the message; empty if nothing is close."""
    from cases.name_suggestions import suggest_name  # late, as all of our packages with everyday names

    if message.startswith(_UNKNOWN_ARGUMENTS):
        words = message.removeprefix(_UNKNOWN_ARGUMENTS).split()
        # The most common unknown argument is a kernel without --impl before it.
        kernel = next((word for word in words if not word.startswith("-") and (".py" in word or ":" in word)), None)
        if kernel is not None:
            return f"; a kernel is named by --impl={kernel}"
        known = [option for action in refusing._actions for option in action.option_strings]
        options = (word.partition("=")[0] for word in words if word.startswith("--"))
        return next((found for option in options if (found := suggest_name(option, known))), "")
    if (choice := _INVALID_CHOICE.search(message)) is not None:
        if choice["name"] in _MOVED:
            return f"; in a clone of attention-conformance, {_MOVED[choice['name']]} does this"
        return suggest_name(choice["name"], [word.strip(" '") for word in choice["known"].split(",")])
    return ""


def describe_error(error: Exception) -> str:
    """Return a line on why a command ended; for an unexpected error, also how to report it with its traceback."""
    lookup = sys.modules.get("conformance.execution.implementation_registry")  # not imported here, since it loads NumPy
    expected: tuple[type[Exception], ...] = (CannotJudge, packages.NameTaken, standard_streams.OutputFailed)
    if lookup is not None:
        expected += (lookup.ImplementationNotFound,)
    if isinstance(error, expected):
        return _make_printable(str(error))
    if os.environ.get(TRACEBACK_VARIABLE):
        standard_streams.print_error("".join(traceback.format_exception(error)).rstrip())
    if sentence := exhausted_memory.describe_exhausted_memory(error):
        return to_one_line(sentence)
    if isinstance(error, OSError):
        return to_one_line(standard_streams.describe_os_error(error))
    return to_one_line(
        f"unexpected {type(error).__name__}: {error}; this is a bug of attention-conformance: "
        f"please report it with the traceback, which {TRACEBACK_VARIABLE}=1 prints"
    )


def to_one_line(text: str, longest: int = 400) -> str:
    """Return the text as one printable line."""
    line = _make_printable(" ".join(text.split()))
    return line if len(line) <= longest else f"{line[:longest]}…"


def _make_printable(text: str) -> str:
    """Return the text on one line; also where our packages cannot be imported, which may be what the text says."""
    try:
        with packages.prefer_own_packages():
            from reports.printable_text import make_printable
    except ImportError:
        return text.encode("unicode_escape").decode()
    return make_printable(text)
