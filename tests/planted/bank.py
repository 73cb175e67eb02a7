"""The bank: every planted bug there is."""

from __future__ import annotations

from conformance.sensitivity import PlantedBug
from tests.planted import (
    backward,
    bias,
    blocks,
    cotangents,
    decode,
    empty_rows,
    epilogue,
    gaming,
    heads,
    laws,
    masks,
    merging,
    online,
    operands,
    pallas_tpu,
    precision,
    residuals,
    scale,
    segments,
    sinks,
    soft_cap,
    softmax,
    sums,
    tails,
    transforms,
    windows,
)

_MODULES = (
    soft_cap,
    sinks,
    scale,
    bias,
    masks,
    windows,
    segments,
    empty_rows,
    heads,
    softmax,
    residuals,
    precision,
    online,
    epilogue,
    blocks,
    tails,
    sums,
    operands,
    backward,
    cotangents,
    transforms,
    laws,
    gaming,
    decode,
    merging,
    pallas_tpu,
)

BANK: tuple[PlantedBug, ...] = tuple(bug for module in _MODULES for bug in module.BUGS)
