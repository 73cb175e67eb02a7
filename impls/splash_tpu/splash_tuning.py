"""Block sizes for a call that names none: a table by chip, depth, dtype, length and mask, and what may be tuned.

The table is filled without a chip, from the schedules of the compiler (`python -m conformance tune --static`). So it
says what should be fast, which nobody has checked on a chip.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cases.case import Case
from cases.mask_spec import build_mask
from cases.masks import And, Chunked, Mask, Or, Window
from conformance.tunable import Knob, KnobSettings, Setting, TableEntry, Traffic, Tunable, read_table, report_no_traffic
from impls.jax_compat import get_device_kind
from impls.splash_tpu.block_sizes import Blocks, BlockSizes, round_up
from impls.splash_tpu.splash_schedule import COMPUTE, build_static_steps
from impls.splash_tpu.vmem import DEFAULT_SCOPED, Depths, estimate_vmem, find_limit

TABLE = Path(__file__).with_name("block_sizes.json")
KERNEL_KNOBS = ("forward", "dq", "dkv", "fused")
"""Kernels that have blocks: the last gives in one call what the two before it give."""
BACKWARD_CHOICES = (({"fused": 0}, ("dq", "dkv")), ({"fused": 1}, ("fused",)))
"""Of the backward pass, and their kernels."""
_ENTRIES = read_table(TABLE)
_RESERVED_VMEM = DEFAULT_SCOPED // 4
"""VMEM left for what a call has beside its blocks: stored masks, ids and caps, with which nothing was tuned."""
_CANDIDATES = ((512, 512, 512, 512), (1024, 512, 512, 512), (1024, 1024, 512, 512), (1024, 1024, 512, 256))
"""Queries and keys of a block, keys that are computed at a time, and queries and keys of a part; by VMEM."""
_EXTRA_CANDIDATES = {"forward": ((2048, 2048, 512, 512),)}
"""Of one kernel, after these."""
_FUSED_CANDIDATES = ((1024, 1024, 512, 512), (1024, 1024, 512, 256), (1024, 2048, 512, 512), (1024, 512, 512, 512))
"""Of the fused kernel. Each key block takes dq from HBM and back, so the shortest is for chips with little VMEM."""


def bound_seen_keys(mask: Mask, kv_length: int) -> int:
    """Keys that a query may attend to at most, as far as the mask's kind says."""
    match mask:
        case Window(left, right, _) if left is not None and right is not None:
            return min(kv_length, left + right + 1)
        case Chunked(size, _):
            return min(kv_length, size)
        case And():
            return min(bound_seen_keys(mask.left, kv_length), bound_seen_keys(mask.right, kv_length))
        case Or():
            return max(bound_seen_keys(mask.left, kv_length), bound_seen_keys(mask.right, kv_length))
        case _:
            return kv_length


def look_up(mask: Mask, kv_length: int, depths: Depths, *, plain: bool) -> BlockSizes:
    """The block sizes of each phase for the chip that is traced for, those of the likest call in the table.

    The backward is fused where the table says that of the likest call, whatever else the call has: with segments, caps
    and stored masks the fused kernel gains as much, in the same blocks of 512 by 512. In an interpreter, where there is
    no chip, blocks are 512 by 512, and the backward is fused where it is on any chip.

    Args:
      mask: of the call.
      kv_length: S.
      depths: and bytes an element of the operands.
      plain: whether the call has no segments and no cap, and computes its mask.
    """
    kind = get_device_kind("tpu")
    keys = bound_seen_keys(mask, kv_length)
    if not kind:
        likest = (
            _find_closest(device, keys, kv_length, depths) for device in sorted({entry.device for entry in _ENTRIES})
        )
        return BlockSizes(fused_backward=any(_is_fused(one) for one in likest if one is not None))
    settings = _find_closest(kind, keys, kv_length, depths)
    if settings is None:
        return BlockSizes()
    limit = find_limit(None).bytes if plain else DEFAULT_SCOPED - _RESERVED_VMEM

    def fitting(kernel: str) -> Blocks:
        blocks, fused = Blocks(**settings[kernel]), kernel == "fused"
        phase = "dkv" if fused else kernel
        fits = estimate_vmem(phase, blocks, depths, stored_mask=not plain, fused=fused) <= limit
        return blocks if fits else Blocks()

    if _is_fused(settings):
        return BlockSizes(fitting("forward"), fitting("fused"), fused_backward=True)
    return BlockSizes(fitting("forward"), fitting("dkv"), fitting("dq"))


def _find_closest(kind: str, keys: int, kv_length: int, depths: Depths) -> KnobSettings | None:
    """The settings of the likest call in the table: of the least depth that is enough, then in `keys`, then in S."""
    fitting = [
        entry
        for entry in _ENTRIES
        if entry.device == kind
        and entry.key["itemsize"] == depths.itemsize
        and entry.key["head_dim"] >= depths.head_dim
        and entry.key["head_dim_v"] >= depths.head_dim_v
    ]

    def unlike(entry: TableEntry) -> tuple[float, ...]:
        return (
            entry.key["head_dim"] + entry.key["head_dim_v"],
            abs(math.log2(entry.key["span"] / keys)),
            abs(math.log2(entry.key["kv_length"] / kv_length)),
        )

    return min(fitting, key=unlike).settings if fitting else None


def _is_fused(settings: KnobSettings) -> bool:
    return settings["backward"]["fused"] == 1


def build_tunable(attention: Any) -> Tunable:
    """What may be tuned of the canonical call, which takes `block_sizes`."""

    def call(settings: KnobSettings, **options: Any) -> Any:
        forward, dq, dkv, fused = (Blocks(**settings[kernel]) for kernel in KERNEL_KNOBS)
        sizes = BlockSizes(forward, fused, fused_backward=True) if _is_fused(settings) else BlockSizes(forward, dkv, dq)
        return functools.partial(attention, block_sizes=sizes, **options)

    return Tunable(
        knobs=(*map(_build_knob, KERNEL_KNOBS), _BACKWARD_KNOB),
        settings=_get_settings,
        call=call,
        native=functools.partial(call, interpret=False),
        key=_build_key,
        cases=lambda: tuple(_build_case(mask) for mask in ("causal", "window-l1023-r0")),
        table=TABLE,
    )


def _build_knob(kernel: str) -> Knob:
    return Knob(
        name=kernel,
        phase="forward" if kernel == "forward" else "forward+backward",
        candidates=functools.partial(_iter_candidates, kernel),
        kernel="_dq_dkv" if kernel == "fused" else f"_{kernel}",
        given=next(({"backward": way} for way, kernels in BACKWARD_CHOICES if kernel in kernels), {}),
        traffic=_estimate_traffic if kernel == "fused" else report_no_traffic,
    )


_BACKWARD_KNOB = Knob(
    name="backward",
    phase="forward+backward",
    candidates=lambda case: tuple(way for way, _ in BACKWARD_CHOICES),
    ways=BACKWARD_CHOICES,
)


def _estimate_traffic(case: Case, setting: Setting) -> Traffic:
    """Of dq, which the fused kernel adds up in f32 in HBM.

    Each block that is computed takes a block of dq and gives it back, where the operand and the result count once each.
    Beside it dq is cleared, scaled and rounded. What a key block's last block of dq takes to go is waited for.
    """
    blocks = Blocks(**setting).clip(case.q_length, case.kv_length)
    steps, _ = build_static_steps(
        _build_mask(case), (case.q_length, case.kv_length), blocks, "kv", case.num_q_heads // case.num_kv_heads, 1
    )
    heads = case.batch * case.num_q_heads
    lists = steps.q.shape[1] * steps.q.shape[2]  # for batch rows, and for heads
    computed = int((steps.flags & COMPUTE > 0).sum()) * (heads if steps.head is None else case.batch) // lists
    block = blocks.q * case.head_dim * 4
    whole_dq = heads * round_up(case.q_length, blocks.q) * case.head_dim
    waits = case.batch * case.num_kv_heads * (round_up(case.kv_length, blocks.kv) // blocks.kv)
    return Traffic(
        within=2 * (computed * block - whole_dq * 4),
        beside=whole_dq * (4 + 4 + _get_itemsize(case)) + waits * block,
    )


def _get_settings(case: Case) -> KnobSettings:
    depths = Depths(case.head_dim, case.v_head_dim, _get_itemsize(case))
    kept = _find_closest(
        get_device_kind("tpu"), bound_seen_keys(_build_mask(case), case.kv_length), case.kv_length, depths
    )
    return kept or {**dict.fromkeys(KERNEL_KNOBS, _serialize_blocks(Blocks())), "backward": BACKWARD_CHOICES[0][0]}


def _serialize_blocks(blocks: Blocks) -> Setting:
    return {"q": blocks.q, "kv": blocks.kv, "kv_compute": blocks.compute, "part": blocks.part}


def _iter_candidates(kernel: str, case: Case) -> Iterator[Setting]:
    longest = bound_seen_keys(_build_mask(case), case.kv_length)
    for q, kv, compute, part in (
        _FUSED_CANDIDATES if kernel == "fused" else (*_CANDIDATES, *_EXTRA_CANDIDATES.get(kernel, ()))
    ):
        if q <= case.q_length and kv <= longest:
            yield {"q": q, "kv": kv, "kv_compute": compute, "part": part}


def _build_key(case: Case) -> dict[str, int]:
    return {
        "itemsize": _get_itemsize(case),
        "head_dim": case.head_dim,
        "head_dim_v": case.v_head_dim,
        "kv_length": case.kv_length,
        "span": bound_seen_keys(_build_mask(case), case.kv_length),
    }


def _build_mask(case: Case) -> Mask:
    return build_mask(case.mask, case.batch, case.num_q_heads, case.q_length, case.kv_length, case.seed)


def _get_itemsize(case: Case) -> int:
    return 4 if case.dtype == "f32" else 2


def _build_case(mask: str) -> Case:
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
