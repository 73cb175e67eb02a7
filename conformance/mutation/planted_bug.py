"""Define planted bugs: small changes to a correct kernel that make it wrong as a real project's kernel was."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

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
      says: one sentence: what the kernel does wrong.
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
    says: str = ""
    unmeasurable: Callable[[], str | None] = _find_no_obstacle

    def __post_init__(self) -> None:
        if not _SLUG.fullmatch(self.name):
            raise ValueError(f"name of a planted bug must be lower-case words joined by '-', got {self.name!r}")
        for field in ("family", "kind", "reference", "shows"):
            if not getattr(self, field):
                raise ValueError(f"planted bug {self.name}: {field} must not be empty")
