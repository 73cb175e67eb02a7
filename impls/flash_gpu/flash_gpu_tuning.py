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
from conformance.tunable import Knob, KnobSettings, Setting, Tunable
from impls.flash_gpu.block_sizes import MEASURED_TABLE, RING_BLOCKS, BlockSizes, Kernel, Ring, look_up, parse_settings
from impls.flash_gpu.pallas_backends import find_call_limit, find_misfit
from impls.jax_compat import get_device_kind

_TILE_SIDES = (32, 64, 128)
_WARPS = (4, 8)
_NUM_STAGES = (2, 3, 4)
# Upper bound, in bytes, of the shared memory of tiles in flight. It excludes candidates that fit no GPU; the compiler
# decides about the others.
_MAX_SHARED_MEMORY = 256 << 10
# The dtypes and depths that the tuner fills table entries for: the usual ones. `_LENGTH` is usual in benchmarks.
_TUNED_ON = (("bf16", 64), ("bf16", 128), ("bf16", 256), ("f32", 64), ("f32", 128))
_LENGTH, _WIDTH = 4096, 1024
_PHASES: dict[Kernel, str] = {"forward": "forward", "dkv": "forward+backward", "dq": "forward+backward"}


def build_tunable(call: Callable[..., Any]) -> Tunable:
    """Describe to the tuner the block sizes of `call`, which takes `block_sizes`."""

    def with_settings(settings: KnobSettings) -> Callable[..., Any]:
        return functools.partial(call, block_sizes=parse_settings(settings))

    triton = (
        Knob(
            name=kernel,
            phase=phase,
            candidates=functools.partial(_iter_triton_tiles, stages=(2, 3) if kernel == "forward" else (1, 2)),
            given={f"mosaic_{kernel}": dataclasses.asdict(Ring(preferred=False))},
        )
        for kernel, phase in _PHASES.items()
    )
    mosaic = (
        Knob(name=f"mosaic_{kernel}", phase=phase, candidates=functools.partial(_iter_mosaic_rings, kernel=kernel))
        for kernel, phase in _PHASES.items()
    )
    return Tunable(
        knobs=(*triton, *mosaic),
        settings=lambda case: dataclasses.asdict(_look_up_sizes(case)),
        call=with_settings,
        key=lambda case: {"max_depth": _get_depth(case), "max_itemsize": DTYPES[case.dtype].itemsize},
        cases=lambda: tuple(_build_case(dtype, depth) for dtype, depth in _TUNED_ON),
        table=MEASURED_TABLE,
    )


def _look_up_sizes(case: Case) -> BlockSizes:
    return look_up(get_device_kind("gpu"), _get_depth(case), DTYPES[case.dtype].itemsize).sizes


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
    either = (False, True) if kernel == "forward" else (False,)
    found = (
        Ring(block=block, num_stages=n, preferred=True, ping_pong=ping_pong, persistent=persistent)
        for ping_pong, persistent, block, n in itertools.product(either, either, RING_BLOCKS, _NUM_STAGES)
    )
    depths = case.head_dim, case.v_head_dim
    if fitting := [ring for ring in found if find_misfit(kernel, ring, *depths, segmented=True) is None]:
        off = dataclasses.replace(_look_up_sizes(case).ring(kernel), preferred=False)
        yield from (dataclasses.asdict(ring) for ring in (off, *fitting))


def _get_depth(case: Case) -> int:
    return max(case.head_dim, case.v_head_dim)


def _build_case(dtype: str, depth: int) -> Case:
    heads = _WIDTH // depth
    return Case(
        dtype=dtype,
        batch=4,
        q_length=_LENGTH,
        kv_length=_LENGTH,
        num_q_heads=heads,
        num_kv_heads=heads,
        head_dim=depth,
        v_head_dim=depth,
        mask="causal",
    )
