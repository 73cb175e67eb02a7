"""How a bug of a packed kernel is planted, and the cases that it shows on."""

from __future__ import annotations

import functools

from cases.case import Case
from conformance.sensitivity import PlantedBug
from tests.planted.planting.served import PackedSteps, packed
from tests.planted.planting.triggers import Trigger, has

in_packs = has("packed")
trained = has("packed", "train")


def several(case: Case) -> bool:
    """Several sequences in a pack."""
    return in_packs(case) and case.batch > 1


def bug(
    name: str,
    steps: PackedSteps,
    *,
    kind: str,
    reference: str,
    shows: str = "out logsumexp max_logits dq dk dv",
    trigger: Trigger = in_packs,
) -> PlantedBug:
    """A packed kernel of which `steps` has one step that is wrong; `shows` has names of observables."""
    return PlantedBug(
        name=name,
        family="packed",
        kind=kind,
        reference=reference,
        shows=tuple(shows.split()),
        build=functools.partial(packed, name, steps),
        trigger=trigger,
    )
