"""Cases for the checks of accelerator kernels: few, long, each with several features at once.

Compilers and interpreters of accelerators cost seconds a case. What they find depends on single shapes and features
more than on combinations of them. So each shape and feature occurs at least once, if an implementation supports it.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from cases.case import Case
from cases.grid import Supports
from cases.quantization import WHOLE_CACHES


def _build_case(
    lengths: int | tuple[int, int], heads: tuple[int, int], depths: tuple[int, int], mask: str, **changes: Any
) -> Case:
    q_length, kv_length = lengths if isinstance(lengths, tuple) else (lengths, lengths)
    sizes = {"q_length": q_length, "kv_length": kv_length}
    named = {"num_q_heads": heads[0], "num_kv_heads": heads[1], "head_dim": depths[0], "v_head_dim": depths[1]}
    return Case(**{"dtype": "bf16", "mask": mask, **sizes, **named, **changes})


@functools.cache
def _build_compiled_cases() -> tuple[Case, ...]:
    """Cases that have, between them, every dtype, every kind of mask and every operand.

    Heads are equal, grouped, or share one key/value head. Depths are below, at and beyond the 128 lanes, and unequal.
    Lengths are 8 to 32 blocks of 128, and one that no block divides. The longest case is forward only: gradients take
    three times as long to compile. They are made when they are asked for: drawing a mask takes a tenth of a second.
    """
    return (
        _build_case(1024, (4, 4), (128, 128), "causal"),
        _build_case(1024, (4, 2), (64, 64), "full"),
        _build_case(1024, (2, 2), (64, 64), "full", dtype="f32"),
        _build_case(4096, (2, 1), (128, 128), "causal", phase="prefill"),
        _build_case(2048, (4, 1), (64, 64), "window-l255-r0", soft_cap=50.0, sinks=True),
        _build_case(1024, (2, 2), (192, 128), "causal"),
        _build_case(1024, (2, 2), (256, 256), "causal", dtype="f32"),
        _build_case(1024, (2, 1), (128, 128), "chunked-256", segments="seg"),
        _build_case(1024, (4, 2), (128, 128), "causal_or_spans-64-300-512-700"),
        _build_case(1024, (4, 2), (128, 128), "balanced-4"),
        _build_case(1024, (2, 1), (128, 128), "densehead-d40"),
        _build_case(1024, (2, 2), (128, 128), "causal", segments="segpad"),
        _build_case(1024, (8, 2), (128, 128), "window-l127-r0", dtype="f32", segments="seg", soft_cap=30.0, sinks=True),
        _build_case(1024, (2, 2), (128, 128), "causal", bias="biashead"),
        _build_case(1024, (4, 2), (128, 128), "lengths-1000-300", batch=2),
        _build_case((512, 1024), (8, 2), (128, 128), "causal-o512", phase="prefill"),
        _build_case((1, 2048), (8, 2), (128, 128), "full", phase="decode"),
        _build_case(1024, (4, 4), (64, 64), "causal", dtype="f16"),
        _build_case(1000, (4, 2), (80, 48), "causal", dtype="f16", segments="seg"),
        _build_case((1, 2000), (8, 2), (128, 128), "lengths-1999-300", batch=2, phase="decode", sinks=True),
        _build_case((1, 2048), (8, 8), (64, 64), "window-l255-r0-o2047", phase="decode", dtype="f32", soft_cap=50.0),
        _build_case((4, 2048), (4, 1), (192, 128), "chunked-512-o2040_and_lengths-2044-2044", batch=2, phase="prefill"),
        _build_case(1024, (4, 2), (128, 128), "moba-256-3"),
        _build_case(1000, (2, 1), (64, 64), "moba-200-3", dtype="f32", soft_cap=30.0, sinks=True),
        *_build_stored_cases(),
    )


def _build_stored_cases() -> tuple[Case, ...]:
    """Caches in pages of 16 to 128 tokens, with single tokens of many sequences, prompts and both; and packs."""
    served: dict[str, Any] = {"heads": (64, 8), "depths": (128, 128)}
    return (
        _build_case((1, 4096), **served, mask="causal-o4095", batch=64, phase="decode", storage="paged16"),
        _build_case((1, 4096), **served, mask="causal-o4095", batch=64, phase="decode", storage="paged128"),
        _build_case(
            (512, 4096),
            **served,
            mask="window-l1023-r0-o3584",
            batch=4,
            phase="prefill",
            storage="paged32-q512-1-1-1",
            soft_cap=50.0,
            sinks=True,
        ),
        _build_case(
            (256, 1024), (8, 8), (64, 64), "causal-o768", dtype="f32", batch=2, phase="prefill", storage="paged64"
        ),
        _build_case((4, 2000), (10, 1), (80, 48), "causal-o1996", batch=3, phase="prefill", storage="paged5-q4-1-4"),
        *_build_latent_cases(),
        *_build_scaled_page_cases(),
        _build_case(512, (8, 2), (128, 128), "causal", batch=4, storage="packed"),
        _build_case(
            512, (4, 4), (64, 64), "window-l127-r0", dtype="f32", batch=2, storage="packed-q512-100", sinks=True
        ),
    )


def _build_latent_cases() -> tuple[Case, ...]:
    """Latents in pages, of the rank and the heads of DeepSeek V3 too, as wide as they are and in whole lanes."""
    real: dict[str, Any] = {"heads": (128, 1), "scale": 0.072}
    return (
        _build_case(
            (1, 4096), depths=(576, 512), mask="causal-o4095", batch=64, phase="decode", storage="latent16", **real
        ),
        _build_case(
            (256, 2048),
            depths=(640, 512),
            mask="window-l511-r0-o1792",
            batch=2,
            phase="prefill",
            storage="latent64-q256-1",
            soft_cap=50.0,
            sinks=True,
            **real,
        ),
        _build_case(
            (64, 512), (8, 1), (80, 64), "causal-o448", dtype="f32", batch=2, phase="prefill", storage="latent32"
        ),
        _build_case((4, 2000), (10, 1), (80, 48), "causal-o1996", batch=3, phase="prefill", storage="latent5-q4-1-4"),
    )


def _build_scaled_page_cases() -> tuple[Case, ...]:
    """Pages with scales. Each has a sequence of several queries: kernels of one query a sequence have others."""
    grouped: dict[str, Any] = {"heads": (64, 8), "depths": (128, 128), "phase": "prefill"}
    served: dict[str, Any] = {"batch": 2, "phase": "prefill", "storage": "paged32-q16-1"}
    return (
        _build_case(
            (4, 4096), **grouped, mask="causal-o4092", batch=4, storage="paged16-q4-1-1-1", kv_cache="kvint8-token"
        ),
        _build_case(
            (256, 2048),
            **grouped,
            mask="window-l511-r0-o1792",
            batch=2,
            storage="paged64-q256-1",
            soft_cap=50.0,
            sinks=True,
            kv_cache="kvfp8-token",
        ),
        _build_case(
            (64, 512),
            (8, 2),
            (64, 64),
            "causal-o448",
            dtype="f32",
            batch=2,
            phase="prefill",
            storage="paged32",
            kv_cache="kvfp8-token",
        ),
        _build_case(
            (4, 2000),
            (10, 1),
            (80, 48),
            "causal-o1996",
            batch=3,
            phase="prefill",
            storage="paged5-q4-1-4",
            kv_cache="kvint8-token",
        ),
        *(
            _build_case((16, 512), (8, 8), (128, 128), "causal-o496", **served, kv_cache=cache)
            for cache in WHOLE_CACHES
        ),
    )


# Lengths from short to long with every depth, and nothing else varied: what grows out of proportion shows.
_LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
_DEPTHS = ((64, 64), (128, 128), (192, 128), (256, 256))
_LENGTH_SWEEP = tuple(
    _build_case(length, (2, 1), depths, mask)
    for mask in ("causal", "window-l1023-r0")
    for depths in _DEPTHS
    for length in _LENGTHS
)

# Of each line, the first case that is supported is taken. The lines: gradients with all operands; forward only under a
# mask that hides whole blocks; ragged decode. Four key blocks of 128 are enough for a sum to go wrong in their order.
# Two cores can share two query blocks and two heads. There is one batch row, and one key/value head where that is
# supported: some kernels are mapped over these, and the interpreter has no `vmap`.
_OPERANDS = {"segments": "seg", "soft_cap": 30.0, "sinks": True}
_INTERPRETED: tuple[tuple[Case, ...], ...] = (
    (
        _build_case((256, 512), (2, 1), (64, 64), "causal-o256", dtype="f32", **_OPERANDS),
        _build_case((256, 512), (2, 1), (64, 64), "causal-o256", dtype="f32"),
        _build_case(512, (2, 1), (64, 64), "causal", dtype="f32"),
        _build_case(512, (2, 2), (64, 64), "causal", dtype="f32"),
        _build_case(512, (2, 2), (64, 64), "full", dtype="f32"),
    ),
    (
        _build_case((256, 512), (2, 2), (64, 64), "window-l200-r0-o256", phase="prefill"),
        _build_case(512, (2, 2), (64, 64), "window-l200-r0", phase="prefill"),
        _build_case((256, 512), (2, 2), (64, 64), "full", phase="prefill"),
        _build_case((256, 512), (2, 2), (64, 64), "full", phase="prefill", dtype="f32"),
        _build_case((1, 512), (2, 1), (64, 64), "full", phase="decode"),
    ),
    # Prompts, single tokens and a sequence without queries, in pages; then windows that begin within a page. Pages are
    # copied ahead over several blocks of them, and over the borders of sequences.
    (
        _build_case(
            (20, 120),
            (4, 2),
            (64, 64),
            "own-linf-120-16-33-50-1",
            dtype="f32",
            batch=5,
            phase="prefill",
            storage="paged16-q20-1-1-0-1",
            sinks=True,
        ),
    ),
    (
        _build_case(
            (9, 130),
            (4, 1),
            (64, 64),
            "own-l60-130-77-9",
            batch=3,
            phase="prefill",
            storage="shared16-q1-9-9",
            soft_cap=30.0,
        ),
    ),
    # The same two with scales, and of latents.
    (
        _build_case(
            (20, 120),
            (4, 2),
            (64, 64),
            "own-linf-120-16-33-50-1",
            dtype="f32",
            batch=5,
            phase="prefill",
            storage="paged16-q20-1-1-0-1",
            kv_cache="kvint8-token",
            sinks=True,
        ),
    ),
    (
        _build_case(
            (9, 130),
            (4, 2),
            (64, 64),
            "own-l60-130-77-9",
            batch=3,
            phase="prefill",
            storage="shared16-q1-9-9",
            kv_cache="kvfp8-token",
            soft_cap=30.0,
        ),
    ),
    (
        _build_case(
            (20, 120),
            (6, 1),
            (80, 64),
            "own-linf-120-16-33-50-1",
            dtype="f32",
            batch=5,
            phase="prefill",
            storage="latent16-q20-1-1-0-1",
            scale=0.144,
            sinks=True,
        ),
    ),
    (
        _build_case(
            (9, 130),
            (4, 1),
            (80, 64),
            "own-l60-130-77-9",
            batch=3,
            phase="prefill",
            storage="latentshared16-q1-9-9",
            scale=0.144,
            soft_cap=30.0,
        ),
    ),
    (_build_case(100, (4, 2), (64, 64), "own-linf-100-37-1", dtype="f32", batch=3, storage="packed-q100-37-1"),),
    # Packs of several blocks each way: borders inside blocks, windows, and blocks that hold no pair of a sequence.
    (
        _build_case(
            (200, 300),
            (2, 1),
            (64, 64),
            "own-l90-300-130-40",
            batch=3,
            storage="packed-q200-130-40",
            soft_cap=30.0,
            sinks=True,
        ),
    ),
    # Chunks that queries choose: of fewer keys than are computed at a time, and of more, with a last one that is cut.
    (_build_case(120, (2, 1), (64, 48), "moba-24-3", dtype="f32", soft_cap=30.0, sinks=True),),
    (_build_case((200, 500), (2, 2), (64, 64), "moba-150-2-o300"),),
    # Sequences of a cache are batch rows: kernels that take their lengths have a batch axis of their own.
    (_build_case((1, 500), (4, 2), (64, 64), "lengths-0-1-500-0", batch=4, phase="decode", dtype="f32", sinks=True),),
)


# One case, since each program takes seconds. Its last query block and its last key block are not whole. It has more key
# blocks than are in flight at once, full and partial ones, and every operand that the kernels take.
_INTERPRETED_GPU: tuple[tuple[Case, ...], ...] = (
    (_build_case((100, 180), (2, 1), (128, 128), "causal-o80", **_OPERANDS),),
)


def select_interpreted_cases(
    seed: int = 0, supports: Supports = lambda case: None, platform: str | None = "tpu"
) -> tuple[Case, ...]:
    """The cases to run in the interpreter of an accelerator, of those that are supported."""
    chosen = _INTERPRETED_GPU if platform == "gpu" else _INTERPRETED
    lines = ((dataclasses.replace(case, seed=seed) for case in line) for line in chosen)
    found = (next((case for case in line if supports(case) is None), None) for line in lines)
    return tuple(case for case in found if case is not None)


def select_compiled_cases(supports: Supports = lambda case: None, *, sweep: bool = False) -> tuple[Case, ...]:
    """The cases to compile, of those that are supported; with `sweep` also 1024 to 32768 long with every depth."""
    return tuple(case for case in _build_compiled_cases() + (_LENGTH_SWEEP if sweep else ()) if supports(case) is None)
