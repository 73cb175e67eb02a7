"""Bugs of the schedules of the Mosaic GPU forward kernel, each one passage of its source changed.

None leaves an arrival out: then a warpgroup waits for ever in JAX's interpreter, as on a chip. That is for the model of
barriers in `tests/impls/test_flash_gpu_barriers.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib

from cases.case import Case, parse_case_id
from conformance.contract import Accelerator, Implementation
from conformance.sensitivity import PlantedBug
from tests.planted.planting import stored_bug
from tests.planted.planting.source_change import Change, changed

CASE = parse_case_id("prefill/bf16/B1.T160.S160.N2.K2.H64.V64/causal/normal/s0")
"""Four tiles of two lengths, one more than an interpreted persistent kernel has programs."""


def tiled(case: Case) -> bool:
    """More tiles than programs, which are of several heads and of different lengths."""
    return case.num_q_heads > 1 and case.q_length > 128 and case.mask == "causal"


def scheduled(package: str, name: str) -> Implementation:
    """The kernel of a package with turns and with several tiles a program, interpreted as if that were a chip."""
    module = importlib.import_module(f"{package}.implementation")
    sizes = dataclasses.replace(module.INTERPRETED_SIZES, mosaic_forward=module.Ring(ping_pong=True, persistent=True))
    call = functools.partial(module.attention, backend="mosaic", block_sizes=sizes)
    found: Implementation = module.build_mosaic_implementation(name)
    accelerator = Accelerator(
        platform="gpu", interpreted=True, under_interpreter=lambda given: functools.partial(call, interpret=given)
    )
    return dataclasses.replace(found, call=call, variants={}, accelerator=accelerator)


def _build(name: str, change: Change) -> Implementation:
    return scheduled(changed("impls.flash_gpu", f"planted_{name.replace('-', '_')}", change).__name__, name)


_bug = functools.partial(
    stored_bug.bug, family="flash gpu mosaic", build=_build, shows="out logsumexp max_logits", trigger=tiled
)
_LET_GO = "        place.release_slot(slot)\n"
_SECOND_PRODUCT = "        turns.take()\n        out = accumulate(plan, softmax.out, weights, v)  # (6), not divided\n"

BUGS: tuple[PlantedBug, ...] = (
    _bug(
        "flash-gpu-mosaic-tile-of-the-first-round",
        Change("mosaic.mosaic_launch", "program_tiles[self.program, 1 + at]", "program_tiles[self.program, 1]"),
        kind="tile.number",
        reference="inferred from persistent kernels: the number of the tile computed before the loop over tiles",
    ),
    _bug(
        "flash-gpu-mosaic-head-of-the-first-tile",
        Change("mosaic.mosaic_launch", "batch=batch, head=head, block=block", "batch=batch, block=block"),
        kind="tile.head",
        reference="inferred from persistent kernels: the head taken once, where the tiles of a program are of several",
    ),
    _bug(
        "flash-gpu-mosaic-keys-of-the-first-tile",
        Change("mosaic.mosaic_launch", "copy_step(place, at, place.slot(at))", "copy_step(self, at, place.slot(at))"),
        kind="tile.keys",
        reference="inferred from persistent kernels: who fetches goes on with the blocks of the first tile",
    ),
    _bug(
        "flash-gpu-mosaic-slot-let-go-with-the-exponentials",
        Change("mosaic.forward", _SECOND_PRODUCT + _LET_GO, _LET_GO + _SECOND_PRODUCT),
        kind="ring.let-go",
        reference="inferred from FlashAttention-3 (a slot of k is free after the first product, that of v is not)",
        shows="races out",
    ),
)
