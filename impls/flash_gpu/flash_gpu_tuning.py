"""Describe to the tuner the launch parameters of each kernel: first of Triton's kernels, then of Mosaic GPU's.

A Mosaic kernel's ring competes with the Triton kernel that was just tuned, and is preferred afterwards if it wins. So
one table also decides which back end computes a kernel.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from cases import mask_spec
from cases.case import Case
from cases.operand_values import DTYPES
from impls.contract.tunable import ParameterSettings, Setting, Tunable, TuningParameter
from impls.flash_gpu.block_sizes import MEASURED_TABLE, RING_BLOCKS, BlockSizes, Kernel, Ring, look_up, parse_settings
from impls.flash_gpu.pallas_backends import find_call_limit, find_misfit
from impls.flash_gpu.tile_schedule import has_dead_keys
from impls.jax_compat import get_device_kind

_TILE_SIDES = (32, 64, 128)
_WARPS = (4, 8)
_NUM_STAGES = (2, 3, 4)
# Upper bound, in bytes, of the shared memory of tiles in flight. It excludes candidates that fit no GPU; the compiler
# decides about the others.
_MAX_SHARED_MEMORY = 256 << 10
# The dtypes, depths (H, V) and masks that the tuner fills table entries for: the usual ones, and those of latent
# attention. `_LENGTH` is usual in benchmarks.
_TUNED_ON = (
    ("bf16", 64, 64, "causal"),
    ("bf16", 64, 64, "full"),
    ("bf16", 128, 128, "causal"),
    ("bf16", 128, 128, "full"),
    ("bf16", 192, 128, "causal"),
    ("bf16", 256, 256, "causal"),
    ("f32", 64, 64, "causal"),
    ("f32", 128, 128, "causal"),
)
_LENGTH, _WIDTH = 4096, 1024
# Schedules of Mosaic rings that are tried with every tile. Early copies without turns are left out, to save time.
_PING_PONG: dict[str, Any] = {"ping_pong": True}
_PERSISTENT: dict[str, Any] = {"persistent": True}
_EARLY: dict[str, Any] = {"early_copies": True}
_SCHEDULES: dict[Kernel, tuple[dict[str, Any], ...]] = {
    "forward": (
        {},
        _PERSISTENT,
        _PING_PONG,
        _PING_PONG | _PERSISTENT,
        _PING_PONG | _EARLY,
        _PING_PONG | _PERSISTENT | _EARLY,
        _PING_PONG | _PERSISTENT | _EARLY | {"num_q_stages": 2},
    ),
    "dq": ({}, _EARLY),
    "dkv": ({},),
}
_PHASES: dict[Kernel, str] = {"forward": "forward", "dkv": "forward+backward", "dq": "forward+backward"}


def build_tunable(call: Callable[..., Any]) -> Tunable:
    """Describe to the tuner the block sizes of `call`, which takes `block_sizes`."""

    def with_settings(settings: ParameterSettings) -> Callable[..., Any]:
        return functools.partial(call, block_sizes=parse_settings(settings))

    triton = (
        TuningParameter(
            name=kernel,
            phase=phase,
            candidates=functools.partial(_iter_triton_tiles, stages=(2, 3) if kernel == "forward" else (1, 2)),
            given={f"mosaic_{kernel}": dataclasses.asdict(Ring(preferred=False))},
        )
        for kernel, phase in _PHASES.items()
    )
    mosaic = (
        TuningParameter(
            name=f"mosaic_{kernel}", phase=phase, candidates=functools.partial(_iter_mosaic_rings, kernel=kernel)
        )
        for kernel, phase in _PHASES.items()
    )
    return Tunable(
        parameters=(*triton, *mosaic),
        settings=lambda case: dataclasses.asdict(_look_up_sizes(case)),
        call=with_settings,
        key=_build_key,
        cases=lambda: tuple(itertools.starmap(_build_case, _TUNED_ON)),
        table=MEASURED_TABLE,
    )


def _look_up_sizes(case: Case) -> BlockSizes:
    itemsize = DTYPES[case.dtype].itemsize
    return look_up(get_device_kind("gpu"), _get_depth(case), itemsize, full_mask=_has_full_mask(case)).sizes


def _has_full_mask(case: Case) -> bool:
    return case.mask == "full" and case.segments is None


def _build_key(case: Case) -> dict[str, int]:
    """Build the key of the table entry for a case; entries for full masks have a key of their own."""
    key: dict[str, int] = {"max_depth": _get_depth(case), "max_itemsize": DTYPES[case.dtype].itemsize}
    return {**key, "full_mask": True} if _has_full_mask(case) else key


def _iter_triton_tiles(case: Case, *, stages: tuple[int, ...]) -> Iterator[Setting]:
    """Yield candidate tiles of a Triton kernel."""
    row = _get_depth(case) * DTYPES[case.dtype].itemsize
    for block_q, block_kv, num_warps, num_stages in itertools.product(_TILE_SIDES, _TILE_SIDES, _WARPS, stages):
        if (block_q + 2 * block_kv * num_stages) * row <= _MAX_SHARED_MEMORY:
            yield {"block_q": block_q, "block_kv": block_kv, "num_warps": num_warps, "num_stages": num_stages}


def _iter_mosaic_rings(case: Case, *, kernel: Kernel) -> Iterator[Setting]:
    """Yield the setting that keeps Triton's kernel, then each Mosaic ring that fits; nothing for unsupported cases."""
    mask = mask_spec.build_mask(case.mask, case.batch, case.num_q_heads, case.q_length, case.kv_length, case.seed)
    if find_call_limit(get_device_kind("gpu"), DTYPES[case.dtype], mask, biased=case.bias is not None) is not None:
        return
    segmented, depths = case.segments is not None, (case.head_dim, case.v_head_dim)
    dead_keys = segmented or has_dead_keys(mask, case.q_length, case.kv_length)
    fitting: list[Ring] = []
    for schedule, block, num_stages in itertools.product(_SCHEDULES[kernel], RING_BLOCKS, _NUM_STAGES):
        ring = Ring(block=block, num_stages=num_stages, preferred=True, **schedule)
        # With early copies, there may be room for one tile of values less.
        rings = (ring, dataclasses.replace(ring, num_v_stages=num_stages - 1)) if ring.early_copies else (ring,)
        fits = (find_misfit(kernel, x, *depths, segmented=segmented, dead_keys=dead_keys) is None for x in rings)
        fitting += [ring for ring, is_fit in zip(rings, fits, strict=True) if is_fit][:1]
    if fitting:
        off = dataclasses.replace(_look_up_sizes(case).ring(kernel), preferred=False)
        yield from (dataclasses.asdict(ring) for ring in (off, *fitting))


def _get_depth(case: Case) -> int:
    return max(case.head_dim, case.v_head_dim)


def _build_case(dtype: str, head_dim: int, v_head_dim: int, mask: str) -> Case:
    heads = _WIDTH // head_dim
    return Case(
        dtype=dtype,
        batch=4,
        q_length=_LENGTH,
        kv_length=_LENGTH,
        num_q_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        mask=mask,
    )
