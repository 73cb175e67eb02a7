"""Define planted bugs, and load banks of planted bugs.

A planted bug is a small change to a correct kernel that makes it wrong as a real project's kernel was. A bank is a
sequence of planted bugs. `python -m tests.bank` judges each kernel of a bank, to measure what the checks detect.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from cases.case import Case
from impls.contract.implementation import Implementation

_SLUG = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


def _matches_any_case(case: Case) -> bool:
    """Return True for every case; the default for `PlantedBug.trigger`."""
    return True


def _find_no_obstacle() -> str | None:
    """Return None, which means that any machine can measure the bug; the default for `PlantedBug.unmeasurable`."""
    return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlantedBug:
    """A small, realistic change to a correct implementation.

    Attributes:
      name: a slug that says what is wrong.
      family: the feature or code that the bug is about, by which tables group bugs (`"soft cap"`, `"sinks"`, ...).
      kind: the class of the bug. Bugs that differ only in detail have the same kind.
      reference: the real project that had this bug (repository and issue, pull request or commit), or `"inferred from
        ..."`.
      shows: names of the observables in which the bug should show, as in records, or the part of a name before its
        first dot (`"dq"`, `"out"`).
      build: function that builds the implementation with the bug.
      trigger: function that returns whether a case has the condition under which the bug shows. Such cases are judged
        first, which saves time and changes no result.
      unmeasurable: function that returns the reason why this machine cannot measure whether the checks see the bug, or
        None if it can.
    """

    name: str
    family: str
    kind: str
    reference: str
    shows: tuple[str, ...]
    build: Callable[[], Implementation]
    trigger: Callable[[Case], bool] = _matches_any_case
    unmeasurable: Callable[[], str | None] = _find_no_obstacle

    def __post_init__(self) -> None:
        if not _SLUG.fullmatch(self.name):
            raise ValueError(f"name of a planted bug must be lower-case words joined by '-', got {self.name!r}")
        for field in ("family", "kind", "reference", "shows"):
            if not getattr(self, field):
                raise ValueError(f"planted bug {self.name}: {field} must not be empty")


class BankError(Exception):
    """The bank cannot be loaded; the message is the one line that the user sees."""


def load_bank(name: str) -> tuple[PlantedBug, ...]:
    """Load the bank that is named as `module:attribute`; the module may be in the current folder.

    Raises:
      BankError: if the name is incomplete, the import fails, or the attribute is no bank with unique names.
    """
    source, _, attribute = name.partition(":")
    if not source or not attribute:
        raise BankError(f"bank {name!r} is incomplete: write module:attribute")
    if (current_folder := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, current_folder)
    try:
        bugs = getattr(importlib.import_module(source), attribute)
    except (Exception, SystemExit) as error:  # the import may raise any type; the user sees it as one line
        raise BankError(f"bank {name}: {type(error).__name__}: {error}".split("\n")[0]) from error
    if not (isinstance(bugs, Sequence) and bugs and all(isinstance(bug, PlantedBug) for bug in bugs)):
        raise BankError(f"bank {name} must be a sequence of tests.bank.PlantedBug, and not empty")
    names = [bug.name for bug in bugs]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise BankError(f"bank {name}: names must be unique, {', '.join(repeated)} occurs twice")
    return tuple(bugs)
