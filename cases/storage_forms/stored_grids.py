"""The models of attention as it is served: paged caches, and packed sequences with gradients.

A shape says how many queries and keys each sequence has, where a page has `p` tokens: one more than a page, exactly as
many, none at all; chunks of prompts beside single tokens. The second model of each kind has more heads and sequences,
and lengths around blocks of 128.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from cases.case import Case
from cases.covering_model import Axis, Model
from cases.storage_forms import storage_spec

Lengths = tuple[tuple[int, int], ...]
"""Queries and keys of each sequence."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """A level: what the step is, and the lengths of its sequences by page size; phase `decode` if all have one query.

    A shape of the models of sizes has heads `(N, K)` and depths `(H, V)` of its own.
    """

    name: str
    lengths: Callable[[int], Lengths]
    phase: str = "prefill"
    heads: tuple[int, int] | None = None
    depths: tuple[int, int] | None = None


def _fix_lengths(*lengths: tuple[int, int]) -> Callable[[int], Lengths]:
    return lambda p: lengths


# A chunk of a prompt, two single tokens at the end of a page and just behind it, and a whole prompt.
_MIXED = Shape("mixed", lambda p: ((13, 13 + 2 * p), (1, p), (1, p + 1), (9, 9)))
_PAGED = (
    _MIXED,
    Shape("decode", lambda p: ((1, 3 * p), (0, p), (1, 2 * p + 1), (1, max(1, p - 1))), phase="decode"),
    Shape("prompts", lambda p: ((23, 23), (1, 1), (p + 1 if p < 60 else 40, p + 1))),
    Shape("chunk", lambda p: ((16, 17 + 2 * p),)),
    # One that has come to nothing, one that waits, and one without keys.
    Shape("idle", lambda p: ((1, p + 2), (0, 2 * p), (5, 5 + p), (0, 0), (1, 0))),
    # Sequences that begin alike, of which some keep whole pages.
    Shape("alike", lambda p: ((4, 4 * p + 4), (1, 4 * p), (7, 4 * p + 9))),
)
_PACKED = (
    Shape("train", _fix_lengths((24, 24), (1, 1), (17, 17), (30, 30)), phase="train"),
    Shape("one", _fix_lengths((40, 40)), phase="train"),
    Shape("cross", _fix_lengths((12, 30), (20, 7), (1, 16), (9, 9)), phase="train"),
    # Without queries, without keys, without both.
    Shape("gaps", _fix_lengths((10, 10), (0, 6), (5, 0), (0, 0), (21, 21)), phase="train"),
    Shape("long", _fix_lengths((1, 1), (2, 2), (90, 90), (3, 3)), phase="train"),
    Shape("prefill", _fix_lengths((13, 45), (1, 32), (1, 33), (9, 9))),
    Shape("decode", _fix_lengths((1, 20), (0, 7), (1, 1), (1, 33)), phase="decode"),
)
_PAGED_SIZES = (
    Shape("borders", _fix_lengths((128, 128), (127, 255), (1, 129), (129, 129)), heads=(2, 1), depths=(32, 32)),
    Shape("long", _fix_lengths((1, 1), (1, 2), (4, 1030), (1, 3)), heads=(8, 1)),
    Shape("heads", _fix_lengths((17, 33), (1, 40)), heads=(32, 4), depths=(32, 32)),
    Shape("odd_heads", _fix_lengths((6, 20), (3, 50), (1, 9)), heads=(10, 2), depths=(80, 80)),
    Shape("many", lambda p: tuple((1, 1 + 7 * n % 90) for n in range(17)), phase="decode", heads=(4, 4)),
    Shape("deep", _fix_lengths((5, 21), (1, 64)), heads=(3, 1), depths=(192, 128)),
)
_PACKED_SIZES = (
    # Around whole blocks, long ones among short, and queries and keys of a sequence up to 129 tokens apart.
    Shape(
        "borders",
        _fix_lengths((128, 128), (2, 131), (131, 2), (1, 1), (127, 129)),
        phase="train",
        heads=(2, 1),
        depths=(32, 32),
    ),
    Shape("many", _fix_lengths(*((1 + 5 * n % 23, 1 + 5 * n % 23) for n in range(17))), phase="train", heads=(2, 2)),
    Shape("heads", _fix_lengths((33, 33), (40, 40)), phase="train", heads=(32, 4), depths=(32, 32)),
    Shape("odd_heads", _fix_lengths((6, 20), (50, 3), (9, 9)), phase="train", heads=(10, 2), depths=(80, 80)),
    Shape("deep", _fix_lengths((21, 21), (16, 16)), phase="train", heads=(3, 1), depths=(192, 128)),
)

# Keys beside the query's own: none, within a page, exactly pages of 16 with the query's own, more than a page.
_PAGED_WINDOWS: tuple[Any, ...] = ("inf", 5, 15, 40, 0)
_PACKED_WINDOWS: tuple[Any, ...] = ("inf", 5, 0, None)
_VALUES = (
    Axis("distribution", ("normal", "large", "dominant", "heavy", "small", "cancel", "ties", "knee"), cheap=True),
    Axis("dtype", ("f32", "bf16", "f16")),
    Axis("soft_cap", (None, 2.0, 30.0), rich=30.0),
    Axis("sinks", (False, True), rich=True),
    Axis("scale", (None, 0.3), rich=0.3),
)
_FORMS = (
    Axis("heads", ((2, 2), (4, 2), (6, 1), (1, 1)), rich=(4, 2)),
    Axis("depths", ((64, 64), (32, 32), (16, 48), (128, 128)), rich=(16, 48)),
)


def _is_compatible(levels: Mapping[str, Any]) -> bool:
    """False for logits at the knee of no cap."""
    return not (levels.get("distribution") == "knee" and "soft_cap" in levels and levels["soft_cap"] is None)


def _build_case(levels: Mapping[str, Any], seed: int) -> Case:
    shape, page = levels["shape"], levels.get("page")
    lengths = shape.lengths(page or 0)
    q_lengths, kv_lengths = zip(*lengths, strict=True)
    heads, depths = shape.heads or levels["heads"], shape.depths or levels.get("depths", (64, 64))
    ends = "-".join(map(str, kv_lengths))
    left = levels["window"]
    return Case(
        phase=shape.phase,
        dtype=levels["dtype"],
        batch=len(lengths),
        q_length=max(q_lengths),
        kv_length=max(kv_lengths),
        num_q_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=depths[0],
        v_head_dim=depths[1],
        mask=f"lengths-{ends}" if left is None else f"own-l{left}-{ends}",
        soft_cap=levels["soft_cap"],
        sinks=levels["sinks"],
        scale=levels["scale"],
        storage=storage_spec.format_storage(
            "packed" if page is None else "paged", page, q_lengths, shared=bool(levels.get("shared", False))
        ),
        distribution=levels["distribution"],
        seed=seed,
    )


def _build_model(*axes: Axis, strongest: int = 4) -> Model:
    return Model(axes, _is_compatible, _build_case, strongest)


_PAGES = (16, 1, 5, 64, 256)
_SHARED = Axis("shared", (False, True), rich=True)
MODELS: Mapping[str, tuple[Model, Model]] = {
    "paged": (
        _build_model(
            Axis("shape", _PAGED),
            Axis("page", _PAGES),
            Axis("window", _PAGED_WINDOWS, rich=15),
            *_FORMS,
            *_VALUES,
            _SHARED,
        ),
        _build_model(
            Axis("shape", _PAGED_SIZES),
            Axis("page", (16, 32, 128)),
            Axis("window", ("inf", 31, 130)),
            *_VALUES,
            _SHARED,
            strongest=2,
        ),
    ),
    "packed": (
        _build_model(Axis("shape", _PACKED), Axis("window", _PACKED_WINDOWS, rich=5), *_FORMS, *_VALUES),
        _build_model(Axis("shape", _PACKED_SIZES), Axis("window", ("inf", 31, None)), *_VALUES, strongest=2),
    ),
}
"""The models of features and of sizes, by kind of storage."""
