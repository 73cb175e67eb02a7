"""Choose the small, plain case on which the calls of a user's first minute are judged."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from cases.case import Case

# Lengths that no usual block divides, and two batch rows. The second entry is for kernels that take whole blocks only.
_CHANGES: tuple[dict[str, Any], ...] = ({"batch": 2, "q_length": 24, "kv_length": 24}, {"batch": 2}, {})


def select_first_call_cases(
    plainest: Sequence[Case], supports: Callable[[Case], str | None] = lambda case: None
) -> tuple[Case, ...]:
    """Return a small variant of the plainest supported case, or that case itself if no variant is supported."""
    if not plainest or plainest[0].storage is not None:  # a storage layout fixes the lengths
        return tuple(plainest[:1])
    variants = (dataclasses.replace(plainest[0], **changes) for changes in _CHANGES)
    chosen = next((case for case in variants if supports(case) is None), None)
    return () if chosen is None else (chosen,)
