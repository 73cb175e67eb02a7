"""How a bug of a kernel whose operands are stored is planted: one step of it is replaced."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from conformance.mutation.kernels.triggers import Trigger
from impls.contract.implementation import Implementation
from tests.bank import PlantedBug


def bug(
    name: str,
    steps: Any,
    *,
    family: str,
    build: Callable[[str, Any], Implementation],
    kind: str,
    reference: str,
    shows: str,
    trigger: Trigger,
) -> PlantedBug:
    """The kernel that `build` makes of `steps`, one of which is wrong; `shows` has names of observables."""
    return PlantedBug(
        name=name,
        family=family,
        kind=kind,
        reference=reference,
        shows=tuple(shows.split()),
        build=functools.partial(build, name, steps),
        trigger=trigger,
    )
