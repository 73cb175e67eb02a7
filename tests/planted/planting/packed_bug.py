"""How a bug of a packed kernel is planted, and the cases that it shows on."""

from __future__ import annotations

import functools

from cases.case import Case
from conformance.mutation.kernels.triggers import has
from tests.planted.planting import stored_bug
from tests.planted.planting.served import packed

in_packs = has("packed")
trained = has("packed", "train")


def several(case: Case) -> bool:
    """Several sequences in a pack."""
    return in_packs(case) and case.batch > 1


bug = functools.partial(
    stored_bug.bug, family="packed", build=packed, shows="out logsumexp max_logits dq dk dv", trigger=in_packs
)
"""A packed kernel of which one of `PackedSteps` is wrong."""
