"""Block sizes for a call that names none: a table by chip, depth, dtype, length and mask, and what may be tuned.

The table is filled without a chip, from the schedules of the compiler (`python -m conformance tune --static`). So it
says what should be fast, which nobody has checked on a chip.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cases.case import Case
from cases.mask_spec import build
from cases.masks import And, Chunked, Mask, Or, Window
from conformance.tunable import Entry, Knob, KnobSettings, Setting, Tunable, read
from impls.splash_tpu.block_sizes import Blocks, BlockSizes
from impls.splash_tpu.vmem import DEFAULT_SCOPED, Depths, limit_of, vmem_bytes
from impls.versions import device_kind

TABLE = Path(__file__).with_name("block_sizes.json")
PHASES = ("forward", "dq", "dkv")
_ENTRIES = read(TABLE)
_ROOM = DEFAULT_SCOPED // 4
"""VMEM left for what a call has beside its blocks: stored masks, ids and caps, with which nothing was tuned."""
_TRIED = ((512, 512, 512, 512), (1024, 512, 512, 512), (1024, 1024, 512, 512), (1024, 1024, 512, 256))
"""Queries and keys of a block, keys that are computed at a time, and queries and keys of a part; by VMEM."""
_TRIED_FORWARD = (*_TRIED, (2048, 2048, 512, 512))
"""Of the forward, likewise."""


def span(mask: Mask, kv_length: int) -> int:
    """Keys that a query may attend to at most, as far as the mask's kind says."""
    match mask:
        case Window(left, right, _) if left is not None and right is not None:
            return min(kv_length, left + right + 1)
        case Chunked(size, _):
            return min(kv_length, size)
        case And():
            return min(span(mask.left, kv_length), span(mask.right, kv_length))
        case Or():
            return max(span(mask.left, kv_length), span(mask.right, kv_length))
        case _:
            return kv_length


def look_up(mask: Mask, kv_length: int, depths: Depths, *, plain: bool) -> BlockSizes:
    """The block sizes of each phase for the chip that is traced for, those of the likest call in the table.

    Args:
      mask: of the call.
      kv_length: S.
      depths: and bytes an element of the operands.
      plain: whether the call has no segments and no cap, and computes its mask.
    """
    kind = device_kind("tpu")
    fitting = [
        entry
        for entry in _ENTRIES
        if entry.device == kind
        and entry.key["itemsize"] == depths.itemsize
        and entry.key["head_dim"] >= depths.head_dim
        and entry.key["head_dim_v"] >= depths.head_dim_v
    ]
    if not fitting:
        return BlockSizes()
    keys = span(mask, kv_length)

    def unlike(entry: Entry) -> tuple[float, ...]:
        return (
            entry.key["head_dim"] + entry.key["head_dim_v"],
            abs(math.log2(entry.key["span"] / keys)),
            abs(math.log2(entry.key["kv_length"] / kv_length)),
        )

    settings = min(fitting, key=unlike).settings
    limit = limit_of(None).bytes if plain else DEFAULT_SCOPED - _ROOM

    def fitting_blocks(phase: str) -> Blocks:
        blocks = Blocks(**settings[phase])
        fits = vmem_bytes(phase, blocks, depths, stored_mask=not plain) <= limit
        return blocks if fits else Blocks()

    return _of_phases(fitting_blocks)


def _of_phases(blocks: Callable[[str], Blocks]) -> BlockSizes:
    return BlockSizes(forward=blocks("forward"), dq=blocks("dq"), dkv=blocks("dkv"))


def tunable(attention: Any) -> Tunable:
    """What may be tuned of the canonical call, which takes `block_sizes`."""

    def call(settings: KnobSettings, **options: Any) -> Any:
        sizes = _of_phases(lambda phase: Blocks(**settings[phase]))
        return functools.partial(attention, block_sizes=sizes, **options)

    return Tunable(
        knobs=tuple(
            Knob(
                name=phase,
                phase="forward" if phase == "forward" else "forward+backward",
                candidates=functools.partial(_candidates, phase),
                kernel=f"_{phase}",
            )
            for phase in PHASES
        ),
        settings=_settings,
        call=call,
        native=functools.partial(call, interpret=False),
        key=_key,
        cases=lambda: tuple(_case(mask) for mask in ("causal", "window-l1023-r0")),
        table=TABLE,
    )


def _settings(case: Case) -> KnobSettings:
    depths = Depths(case.head_dim, case.v_head_dim, _itemsize(case))
    sizes = look_up(_mask(case), case.kv_length, depths, plain=True)
    return {phase: _setting(getattr(sizes, phase)) for phase in PHASES}


def _setting(blocks: Blocks) -> Setting:
    return {"q": blocks.q, "kv": blocks.kv, "kv_compute": blocks.compute, "part": blocks.part}


def _candidates(phase: str, case: Case) -> Iterator[Setting]:
    longest = span(_mask(case), case.kv_length)
    for q, kv, compute, part in _TRIED_FORWARD if phase == "forward" else _TRIED:
        if q <= case.q_length and kv <= longest:
            yield {"q": q, "kv": kv, "kv_compute": compute, "part": part}


def _key(case: Case) -> dict[str, int]:
    return {
        "itemsize": _itemsize(case),
        "head_dim": case.head_dim,
        "head_dim_v": case.v_head_dim,
        "kv_length": case.kv_length,
        "span": span(_mask(case), case.kv_length),
    }


def _mask(case: Case) -> Mask:
    return build(case.mask, case.batch, case.num_q_heads, case.q_length, case.kv_length, case.seed)


def _itemsize(case: Case) -> int:
    return 4 if case.dtype == "f32" else 2


def _case(mask: str) -> Case:
    return Case(
        dtype="bf16",
        q_length=8192,
        kv_length=8192,
        num_q_heads=1,
        num_kv_heads=1,
        head_dim=128,
        v_head_dim=128,
        mask=mask,
    )
