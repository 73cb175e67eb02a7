"""Default block sizes from a table by chip, depth, dtype, length and mask, and the description for the tuner.

The table is filled without a chip, from the compiler's schedules (`python -m conformance tune --static`). So its sizes
should be fast, but were not measured on a chip.
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
from impls.contract.tunable import (
    Knob,
    KnobSettings,
    Setting,
    TableEntry,
    Traffic,
    Tunable,
    read_table,
    report_no_traffic,
)
from impls.jax_compat import get_device_kind
from impls.pallas_tpu.tpu_tiles import DEFAULT_SCOPED, find_limit, round_up
from impls.splash_tpu.splash_plan import Blocks, BlockSizes, Depths, estimate_vmem
from impls.splash_tpu.splash_schedule import COMPUTE, build_static_steps

TABLE = Path(__file__).with_name("block_sizes.json")
KERNEL_KNOBS = ("forward", "dq", "dkv", "fused")
"""Kernels that have block sizes. The fused one computes the results of dq and dkv in one call."""
BACKWARD_CHOICES = (({"fused": 0}, ("dq", "dkv")), ({"fused": 1}, ("fused",)))
"""Choices for the backward pass: the setting, and the kernels that it runs."""
_ENTRIES = read_table(TABLE)
_RESERVED_VMEM = DEFAULT_SCOPED // 4
"""VMEM reserved for stored masks, ids and caps: the tuned calls had none of them."""
_CANDIDATES = ((512, 512, 512, 512), (1024, 512, 512, 512), (1024, 1024, 512, 512), (1024, 1024, 512, 256))
"""Candidates `(q, kv, kv_compute, part)`, in the order of the VMEM that they take."""
_EXTRA_CANDIDATES = {"forward": ((2048, 2048, 512, 512),)}
"""Further candidates of single kernels."""
_FUSED_CANDIDATES = ((1024, 1024, 512, 512), (1024, 1024, 512, 256), (1024, 2048, 512, 512), (1024, 512, 512, 512))
"""Candidates of the fused kernel. Each key block moves dq from HBM and back: short ones suit chips with little VMEM."""


def bound_seen_keys(mask: Mask, kv_length: int) -> int:
    """Bound the number of keys that a query may attend to by the kind of the mask."""
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
    """Look up the block sizes for the target chip: those of the most similar call in the table.

    Whether the backward pass is fused also follows the most similar call, even for calls with segments, caps or stored
    masks. For these calls blocks are 512 by 512, and the fused kernel gains as much. In an interpreter there is no
    chip: blocks are 512 by 512, and the backward pass is fused if the table fuses it on any chip.

    Args:
      depths: head depths, and bytes per element of the operands.
      plain: whether the call has no segments, no cap and no stored mask.
    """
    kind = get_device_kind("tpu")
    keys = bound_seen_keys(mask, kv_length)
    if not kind:
        closest = (
            _find_closest(device, keys, kv_length, depths) for device in sorted({entry.device for entry in _ENTRIES})
        )
        return BlockSizes(fused_backward=any(_is_fused(one) for one in closest if one is not None))
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
    """Find the most similar call in the table: smallest sufficient depth, then closest in `keys`, then in S."""
    fitting = [
        entry
        for entry in _ENTRIES
        if entry.device == kind
        and entry.key["itemsize"] == depths.itemsize
        and entry.key["head_dim"] >= depths.head_dim
        and entry.key["head_dim_v"] >= depths.head_dim_v
    ]

    def compute_distance(entry: TableEntry) -> tuple[float, ...]:
        return (
            entry.key["head_dim"] + entry.key["head_dim_v"],
            abs(math.log2(entry.key["span"] / keys)),
            abs(math.log2(entry.key["kv_length"] / kv_length)),
        )

    return min(fitting, key=compute_distance).settings if fitting else None


def _is_fused(settings: KnobSettings) -> bool:
    return settings["backward"]["fused"] == 1


def build_tunable(attention: Any) -> Tunable:
    """Describe to the tuner the block sizes of the canonical call, which takes `block_sizes`."""

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
    """Estimate the HBM traffic of dq, which the fused kernel sums in f32 in HBM.

    Each computed block reads a block of dq and writes it back; the cost model already counts operand and result once.
    Outside the kernel dq is cleared, scaled and rounded. Each key block waits for its last copy of dq.
    """
    blocks = Blocks(**setting).clip(case.q_length, case.kv_length)
    steps, _ = build_static_steps(
        _build_mask(case), (case.q_length, case.kv_length), blocks, "kv", case.num_q_heads // case.num_kv_heads, 1
    )
    heads = case.batch * case.num_q_heads
    lists = steps.q.shape[1] * steps.q.shape[2]  # number of lists: for each batch row and head that has its own
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
    blocks = Blocks()
    usual = {"q": blocks.q, "kv": blocks.kv, "kv_compute": blocks.compute, "part": blocks.part}
    return kept or {**dict.fromkeys(KERNEL_KNOBS, usual), "backward": BACKWARD_CHOICES[0][0]}


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
