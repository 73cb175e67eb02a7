"""Define `Regression`: a published bug of an attention kernel, with a case that triggers it."""

from __future__ import annotations

import dataclasses
import re

from cases.case import Case

_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Regression:
    """A published bug of an attention kernel, with the smallest case that triggers it."""

    name: str
    case: Case  # a case that meets the condition of the bug, and is otherwise as small and plain as possible
    kind: str  # the family and class of the bug, such as `cap.order-mask`
    # The publication of the bug: `owner/repository#number` for an issue or pull request, `owner/repository@commit`, or
    # `arXiv:number`.
    reference: str
    shows: str  # one line that says what a kernel with the bug does wrong

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"a regression's name must be lower-case words with hyphens, got {self.name!r}")
