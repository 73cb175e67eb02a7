"""How a bug of a paged kernel is planted, and the cases that it shows on."""

from __future__ import annotations

import functools

from cases.case import Case
from conformance.mutation.kernels.triggers import has
from tests.planted.planting import stored_bug
from tests.planted.planting.served import paged

in_pages = has("paged")


def several(case: Case) -> bool:
    """Several sequences in pages."""
    return in_pages(case) and case.batch > 1


def windowed(case: Case) -> bool:
    """A window over pages."""
    return in_pages(case) and "window" in case.features


bug = functools.partial(stored_bug.bug, family="paged", build=paged, shows="out logsumexp max_logits", trigger=in_pages)
"""A paged kernel of which one of `PagedSteps` is wrong."""
