"""What the gate can catch, measured: planted bugs, and which check kills which of them.

A bank is a sequence of `PlantedBug`s. Each is a small change to a correct kernel that a real project has had.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

from cases.case import Case
from conformance.contract import Implementation

_SLUG = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


def _always(case: Case) -> bool:
    return True


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlantedBug:
    """A small, realistic change to a correct implementation.

    Attributes:
      name: a slug that says what is wrong.
      family: what the bug is about, as the matrix groups it (`"soft cap"`, `"sinks"`, `"blocks"`, ...).
      kind: class of the bug; the same for bugs that differ only in detail.
      reference: where a real project had it (repository and issue, pull request or commit), or `"inferred"` and from
        what.
      shows: observables by which it should show, as records name them, or their first part (`"dq"`, `"out"`).
      build: makes the implementation with the bug in it.
      trigger: whether a case has the condition under which the bug shows. Such cases are judged first, which saves time
        and changes no result.
    """

    name: str
    family: str
    kind: str
    reference: str
    shows: tuple[str, ...]
    build: Callable[[], Implementation]
    trigger: Callable[[Case], bool] = _always

    def __post_init__(self) -> None:
        if not _SLUG.fullmatch(self.name):
            raise ValueError(f"name of a planted bug must be lower-case words joined by '-', got {self.name!r}")
        for field in ("family", "kind", "reference", "shows"):
            if not getattr(self, field):
                raise ValueError(f"planted bug {self.name}: {field} must not be empty")
