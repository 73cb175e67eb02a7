"""Build the cases on which TPU and GPU kernels are compiled and interpreted: few, long, with several features each.

Compilers and interpreters of accelerators cost seconds a case. What they find depends on single shapes and features
more than on combinations. So each shape and feature occurs at least once, if an implementation supports it.
"""

from __future__ import annotations

import dataclasses
import functools

from cases.case import Case
from cases.grid import Supports
from cases.storage_forms.form_cases import build_case, load_all_form_cases


@functools.cache
def _build_compiled_cases() -> tuple[Case, ...]:
    """Build cases that have, between them, every dtype, every kind of mask and every operand.

    Heads are equal, grouped, or share one key/value head. Depths are below, at and beyond the 128 lanes, and unequal.
    Lengths are 8 to 32 blocks of 128, and one that no block divides. The longest case is forward only: gradients take
    three times as long to compile. The cases are built on demand, since drawing a mask takes a tenth of a second.
    """
    return (
        build_case(1024, (4, 4), (128, 128), "causal"),
        build_case(1024, (4, 2), (64, 64), "full"),
        build_case(1024, (2, 2), (64, 64), "full", dtype="f32"),
        build_case(4096, (2, 1), (128, 128), "causal", phase="prefill"),
        build_case(2048, (4, 1), (64, 64), "window-l255-r0", soft_cap=50.0, sinks=True),
        build_case(1024, (2, 2), (192, 128), "causal"),
        build_case(1024, (2, 2), (256, 256), "causal", dtype="f32"),
        build_case(1024, (4, 2), (256, 256), "causal", segments="seg"),
        build_case(1024, (2, 1), (128, 128), "chunked-256", segments="seg"),
        build_case(1024, (4, 2), (128, 128), "causal_or_spans-64-300-512-700"),
        build_case(1024, (4, 2), (128, 128), "balanced-4"),
        build_case(1024, (2, 1), (128, 128), "densehead-d40"),
        build_case(1024, (2, 2), (128, 128), "causal", segments="segpad"),
        build_case(1024, (8, 2), (128, 128), "window-l127-r0", dtype="f32", segments="seg", soft_cap=30.0, sinks=True),
        build_case(1024, (2, 2), (128, 128), "causal", bias="biashead"),
        build_case(1024, (4, 2), (128, 128), "lengths-1000-300", batch=2),
        build_case((512, 1024), (8, 2), (128, 128), "causal-o512", phase="prefill"),
        build_case((1, 2048), (8, 2), (128, 128), "full", phase="decode"),
        build_case(1024, (4, 4), (64, 64), "causal", dtype="f16"),
        build_case(1000, (4, 2), (80, 48), "causal", dtype="f16", segments="seg"),
        build_case((1, 2000), (8, 2), (128, 128), "lengths-1999-300", batch=2, phase="decode", sinks=True),
        build_case((1, 2048), (8, 8), (64, 64), "window-l255-r0-o2047", phase="decode", dtype="f32", soft_cap=50.0),
        build_case((4, 2048), (4, 1), (192, 128), "chunked-512-o2040_and_lengths-2044-2044", batch=2, phase="prefill"),
        build_case(1024, (4, 2), (128, 128), "moba-256-3"),
        build_case(1000, (2, 1), (64, 64), "moba-200-3", dtype="f32", soft_cap=30.0, sinks=True),
        *(case for form in load_all_form_cases().values() for case in form.build_compiled()),
    )


# Lengths from short to long with every depth and two masks. Nothing else varies, so that what grows faster than the
# length is visible.
_LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
_DEPTHS = ((64, 64), (128, 128), (192, 128), (256, 256))
_LENGTH_SWEEP = tuple(
    build_case(length, (2, 1), depths, mask)
    for mask in ("causal", "window-l1023-r0")
    for depths in _DEPTHS
    for length in _LENGTHS
)

# Each inner tuple is a list of alternatives, of which the first supported case is used. The first list has gradients
# with all operands. The second is forward only, with a mask that hides whole blocks. Four key blocks of 128 are enough
# for a sum to go wrong by their order. Two cores can share two query blocks and two heads. There is one batch row, and
# one key/value head where that is supported: some kernels use `vmap` over these, and the interpreter has no `vmap`.
_OPERANDS = {"segments": "seg", "soft_cap": 30.0, "sinks": True}
_INTERPRETED: tuple[tuple[Case, ...], ...] = (
    (
        build_case((256, 512), (2, 1), (64, 64), "causal-o256", dtype="f32", **_OPERANDS),
        build_case((256, 512), (2, 1), (64, 64), "causal-o256", dtype="f32"),
        build_case(512, (2, 1), (64, 64), "causal", dtype="f32"),
        build_case(512, (2, 2), (64, 64), "causal", dtype="f32"),
        build_case(512, (2, 2), (64, 64), "full", dtype="f32"),
    ),
    (
        build_case((256, 512), (2, 2), (64, 64), "window-l200-r0-o256", phase="prefill"),
        build_case(512, (2, 2), (64, 64), "window-l200-r0", phase="prefill"),
        build_case((256, 512), (2, 2), (64, 64), "full", phase="prefill"),
        build_case((256, 512), (2, 2), (64, 64), "full", phase="prefill", dtype="f32"),
        build_case((1, 512), (2, 1), (64, 64), "full", phase="decode"),
    ),
    # MoBA masks: chunks of fewer keys than a kernel's block, and chunks of more keys, of which the last is partial.
    (build_case(120, (2, 1), (64, 48), "moba-24-3", dtype="f32", soft_cap=30.0, sinks=True),),
    (build_case((200, 500), (2, 2), (64, 64), "moba-150-2-o300"),),
    # Four batch rows, one for each sequence of a cache. Kernels that take lengths have a batch axis, so they need no
    # `vmap`.
    (build_case((1, 500), (4, 2), (64, 64), "lengths-0-1-500-0", batch=4, phase="decode", dtype="f32", sinks=True),),
)


# Few cases, since each program takes seconds. The last query block and the last key block are partial. There are more
# key blocks than are in flight at once, full and partial ones, and every operand that the kernels take. The second case
# is for kernels that decode. It has all this too, with two queries, and a sequence without keys. Warpgroups may divide
# the work otherwise at larger depths, which the third case has.
_INTERPRETED_GPU: tuple[tuple[Case, ...], ...] = (
    (
        build_case((100, 180), (2, 1), (128, 128), "causal-o80", **_OPERANDS),
        build_case((2, 448), (8, 2), (128, 128), "lengths-430-0-130", batch=3, phase="prefill", sinks=True),
    ),
    (build_case((100, 180), (2, 1), (256, 192), "causal-o80", **_OPERANDS),),
)


def select_interpreted_cases(
    seed: int = 0, supports: Supports = lambda case: None, platform: str | None = "tpu"
) -> tuple[Case, ...]:
    """Select the supported cases to run in the interpreter of an accelerator."""
    stored = (line for form in load_all_form_cases().values() for line in form.build_interpreted())
    dense = _INTERPRETED_GPU if platform == "gpu" else _INTERPRETED
    lines = ((dataclasses.replace(case, seed=seed) for case in line) for line in (*dense, *stored))
    found = (next((case for case in line if supports(case) is None), None) for line in lines)
    return tuple(case for case in found if case is not None)


def select_compiled_cases(supports: Supports = lambda case: None, *, sweep: bool = False) -> tuple[Case, ...]:
    """Select the supported cases to compile; with `sweep` also lengths of 1024 to 32768 with every depth."""
    return tuple(case for case in _build_compiled_cases() + (_LENGTH_SWEEP if sweep else ()) if supports(case) is None)
