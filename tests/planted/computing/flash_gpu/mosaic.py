"""Bugs of the schedules of the Mosaic GPU kernels, each one passage of their source changed.

None leaves an arrival out: then a warpgroup waits for ever in JAX's interpreter, as on a chip. That is for the model of
barriers in `tests/impls/test_flash_gpu_barriers.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from typing import Any

from cases.case import Case
from cases.case_id import parse_case_id
from impls.contract.implementation import Accelerator, Implementation
from tests.bank import PlantedBug
from tests.planted.planting import stored_bug
from tests.planted.planting.source_change import Change, changed

CASE = parse_case_id("prefill/bf16/B1.T160.S160.N2.K2.H64.V64/causal/normal/s0")
"""Four tiles of two lengths, one more than an interpreted persistent kernel has programs."""


DEEP_CASE = parse_case_id("train/bf16/B1.T80.S200.N1.K1.H192.V64/causal-o120/normal/s0")
"""Two warpgroups share the keys of dk and dv at this depth, and visit two tiles of queries."""


def is_deep(case: Case) -> bool:
    """More than one tile of queries, at a depth at which one warpgroup computes dk and the other dv."""
    return case.phase == "train" and case.q_length > 64 and case.head_dim > 128


def tiled(case: Case) -> bool:
    """More tiles than programs, which are of several heads and of different lengths."""
    return case.num_q_heads > 1 and case.q_length > 128 and case.mask == "causal"


LATE = {"ping_pong": True, "persistent": True}
EARLY = LATE | {"early_copies": True, "num_q_stages": 2}


def scheduled(package: str, name: str, options: dict[str, Any] = LATE) -> Implementation:
    """The kernel of a package with these options of its forward ring, interpreted as if that were a chip."""
    module = importlib.import_module(f"{package}.implementation")
    sizes = dataclasses.replace(module.INTERPRETED_SIZES, mosaic_forward=module.Ring(**options))
    call = functools.partial(module.attention, backend="mosaic", block_sizes=sizes)
    found: Implementation = module.build_mosaic_implementation(name)
    accelerator = Accelerator(
        platform="gpu", interpreted=True, under_interpreter=lambda given: functools.partial(call, interpret=given)
    )
    return dataclasses.replace(found, call=call, variants={}, accelerator=accelerator)


def _build(name: str, change: Change, options: dict[str, Any] = LATE) -> Implementation:
    return scheduled(changed("impls.flash_gpu", f"planted_{name.replace('-', '_')}", change).__name__, name, options)


_bug = functools.partial(
    stored_bug.bug, family="flash gpu mosaic", build=_build, shows="out logsumexp max_logits", trigger=tiled
)
_LET_GO = (
    "        if plan.segmented:\n"
    "            place.release_keys(at, read_as_values=place.reads_ids_unfenced)"
    "  # the ids of the keys were read until here\n"
    "        place.release_values(at)\n"
    "        place.end_step(at, read_as_values=place.reads_ids_unfenced)\n"
)
_FIRST_PRODUCT = (
    '        products = multiply(plan, q, scratch["k_tile"].at[slot], transposed=True, issued=turns.give)\n'
)
_LET_KEYS_GO = "        if not plan.segmented:\n            place.release_keys(at)\n"
_READ_WEIGHTS = '        weights = scratch["weights_tile"][...]\n'
_LET_WEIGHTS_GO = '        place.release(scratch["weights_free"].at[0], read_as_values=True)\n'
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
        Change(
            "mosaic.mosaic_launch", "copy_step(place, at)", "copy_step(dataclasses.replace(self, base=place.base), at)"
        ),
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
    stored_bug.bug(
        "flash-gpu-mosaic-keys-let-go-before-they-are-read",
        Change("mosaic.forward", _FIRST_PRODUCT + _LET_KEYS_GO, _LET_KEYS_GO + _FIRST_PRODUCT),
        family="flash gpu mosaic",
        build=functools.partial(_build, options=EARLY),
        kind="ring.let-go",
        reference="inferred from rings whose keys are released apart from values: before the product has read them",
        shows="races out logsumexp max_logits",
        trigger=tiled,
    ),
)

DEEP_BUGS: tuple[PlantedBug, ...] = (
    stored_bug.bug(
        "flash-gpu-mosaic-weights-let-go-before-they-are-read",
        Change("mosaic.split_dkv", _READ_WEIGHTS + _LET_WEIGHTS_GO, _LET_WEIGHTS_GO + _READ_WEIGHTS),
        family="flash gpu mosaic",
        build=_build,
        kind="ring.let-go",
        reference="inferred from warpgroups that pass weights through shared memory: free before they are read",
        shows="races dk",
        trigger=is_deep,
    ),
)
