"""The type of a named regression."""

from __future__ import annotations

import dataclasses
import re

from cases.case import Case

_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Regression:
    """A published attention bug, and the least case that triggers it.

    Attributes:
      name: how lists and reports name it: lower-case words with hyphens.
      case: the condition that the bug needs, otherwise as small and plain as the bug allows.
      kind: family and class of the bug, such as `cap.order-mask`.
      reference: where it was published: `owner/repository#number` of an issue or pull request,
        `owner/repository@commit`, or `arXiv:number`.
      shows: what goes wrong, in one line.
    """

    name: str
    case: Case
    kind: str
    reference: str
    shows: str

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"a regression's name is lower-case words with hyphens, got {self.name!r}")
