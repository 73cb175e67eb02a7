"""What may be tuned: the tiles and the launch of each of the three Triton kernels, one kernel after the other."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax

from cases.case import Case
from cases.inputs import DTYPES
from conformance.tunable import Knob, Setting, Settings, Tunable
from impls.flash_gpu.block_sizes import MEASURED, BlockSizes, Tiles, look_up

_SIDES = (32, 64, 128)
_WARPS = (4, 8)
# Shared memory that tiles in flight may take, in bytes, of the largest GPU; whether a candidate fits is for the
# compiler to say, this leaves out those that no GPU takes.
_MOST_SHARED = 256 << 10
# Depths and dtypes that tables have entries for: the field's usual ones. Lengths as benchmarks have them.
_TUNED_ON = (("bf16", 64), ("bf16", 128), ("bf16", 256), ("f32", 64), ("f32", 128))
_LENGTH, _WIDTH = 4096, 1024


def tunable(call: Callable[..., Any]) -> Tunable:
    """What may be tuned of `call`, which takes `block_sizes` and `backend`: the table is of Triton's tiles."""

    def with_settings(settings: Settings) -> Callable[..., Any]:
        sizes = BlockSizes(**{name: Tiles(**tiles) for name, tiles in settings.items()})
        return functools.partial(call, block_sizes=sizes, backend="triton")

    return Tunable(
        knobs=(
            Knob(name="forward", phase="forward", candidates=functools.partial(_candidates, stages=(2, 3))),
            Knob(name="dkv", phase="forward+backward", candidates=functools.partial(_candidates, stages=(1, 2))),
            Knob(name="dq", phase="forward+backward", candidates=functools.partial(_candidates, stages=(1, 2))),
        ),
        settings=_in_force,
        call=with_settings,
        key=lambda case: {"max_depth": _depth(case), "max_itemsize": DTYPES[case.dtype].itemsize},
        cases=lambda: tuple(_case(dtype, depth) for dtype, depth in _TUNED_ON),
        table=MEASURED,
    )


def _in_force(case: Case) -> Settings:
    sizes = look_up(jax.devices()[0].device_kind, _depth(case), DTYPES[case.dtype].itemsize).sizes
    return dataclasses.asdict(sizes)


def _candidates(case: Case, *, stages: tuple[int, ...]) -> Iterator[Setting]:
    row = _depth(case) * DTYPES[case.dtype].itemsize
    for block_q, block_kv, num_warps, num_stages in itertools.product(_SIDES, _SIDES, _WARPS, stages):
        if (block_q + 2 * block_kv * num_stages) * row <= _MOST_SHARED:
            yield {"block_q": block_q, "block_kv": block_kv, "num_warps": num_warps, "num_stages": num_stages}


def _depth(case: Case) -> int:
    return max(case.head_dim, case.v_head_dim)


def _case(dtype: str, depth: int) -> Case:
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
