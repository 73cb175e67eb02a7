"""How a bug of a paged kernel is planted, and the cases that it shows on."""

from __future__ import annotations

import functools

from cases.case import Case
from conformance.sensitivity import PlantedBug
from tests.planted.planting.served import PagedSteps, paged
from tests.planted.planting.triggers import Trigger, has

in_pages = has("paged")


def several(case: Case) -> bool:
    """Several sequences in pages."""
    return in_pages(case) and case.batch > 1


def windowed(case: Case) -> bool:
    """A window over pages."""
    return in_pages(case) and "window" in case.features


def bug(
    name: str,
    steps: PagedSteps,
    *,
    kind: str,
    reference: str,
    shows: str = "out logsumexp max_logits",
    trigger: Trigger = in_pages,
) -> PlantedBug:
    """A paged kernel of which `steps` has one step that is wrong; `shows` has names of observables."""
    return PlantedBug(
        name=name,
        family="paged",
        kind=kind,
        reference=reference,
        shows=tuple(shows.split()),
        build=functools.partial(paged, name, steps),
        trigger=trigger,
    )
