"""The bugs of this package, which were written before the grids that are to see them."""

from __future__ import annotations

from conformance.sensitivity import PlantedBug
from tests.planted.beyond import (
    arguments,
    derivatives,
    fast_paths,
    long_caches,
    long_sequences,
    precision,
    precision_backward,
    segment_ids,
    sizes,
    state,
    values,
    whole_blocks,
)

_MODULES = (
    whole_blocks,
    fast_paths,
    long_caches,
    long_sequences,
    sizes,
    arguments,
    segment_ids,
    values,
    precision,
    precision_backward,
    derivatives,
    state,
)

BEYOND: tuple[PlantedBug, ...] = tuple(bug for module in _MODULES for bug in module.BUGS)
