"""Define planted bugs, small changes to a correct kernel that a real project has had, and load banks of them."""

from __future__ import annotations

import dataclasses
import importlib
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from cases.case import Case
from conformance.contract import Implementation

_SLUG = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


def _matches_any_case(case: Case) -> bool:
    """Return True: the default trigger."""
    return True


def _find_no_obstacle() -> str | None:
    """Return None: by default nothing keeps a bug from being measured."""
    return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlantedBug:
    """A small, realistic change to a correct implementation.

    Attributes:
      name: a slug that says what is wrong.
      family: what the bug is about, as tables group it (`"soft cap"`, `"sinks"`, `"blocks"`, ...).
      kind: the class of the bug. Bugs that differ only in detail share it.
      reference: where a real project had it (repository and issue, pull request, commit), or `"inferred from ..."`.
      shows: observables in which it should show, as records name them, or their first part (`"dq"`, `"out"`).
      build: makes the implementation with the bug in it.
      trigger: tells whether a case has the condition under which the bug shows. Such cases are judged first, which
        saves time and changes no result.
      unmeasurable: returns why this machine cannot tell whether the gate sees the bug, or None if it can.
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
    """The bank cannot be used; the message is the one line that the user sees."""


def load_bank(name: str) -> tuple[PlantedBug, ...]:
    """Load the bank `module:attribute`. Raises `BankError`."""
    source, _, attribute = name.partition(":")
    if not source or not attribute:
        raise BankError(f"bank {name!r} is incomplete: write module:attribute")
    if (current_folder := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, current_folder)
    try:
        bugs = getattr(importlib.import_module(source), attribute)
    except (Exception, SystemExit) as error:  # whatever the import raises, the user needs one line
        raise BankError(f"bank {name}: {type(error).__name__}: {error}".split("\n")[0]) from error
    if not (isinstance(bugs, Sequence) and bugs and all(isinstance(bug, PlantedBug) for bug in bugs)):
        raise BankError(f"bank {name} must be a sequence of conformance.sensitivity.PlantedBug, and not empty")
    names = [bug.name for bug in bugs]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise BankError(f"bank {name}: names must be unique, {', '.join(repeated)} occurs twice")
    return tuple(bugs)
