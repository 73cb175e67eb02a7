"""Cases of the storage form `packed`: packed sequences in training, with gradients, and in prefill and decode.

The model of features varies masks and operands. The model of sizes has more heads and sequences, and lengths around
blocks of 128.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from cases.case import Case
from cases.covering_model import Axis, Model
from cases.storage_forms.form_cases import BEHIND_MASK, SAVED, SAVED_WITH_GRADIENT, Caches, FormCases, build_case
from cases.storage_forms.sequence_mask_cases import FAR, FEATURES, build_mask_model
from cases.storage_forms.sequence_shapes import (
    CHUNK_STARTS,
    DEEPEST,
    FIRST,
    FORTY,
    HEAD_AXES,
    LARGE_GROUP,
    LONG,
    MANY_KEY_HEADS,
    MAX_DRAWN_LENGTH,
    VALUE_AXES,
    Shape,
    build_model,
    draw_sequences,
    fix_lengths,
    list_token_lengths,
)

_BLOCK = 16  # a usual block of keys, around whose borders the caches of many single tokens end
_SHAPES = (
    Shape("train", fix_lengths((24, 24), (1, 1), (17, 17), (30, 30)), phase="train"),
    Shape("one", fix_lengths((40, 40)), phase="train"),
    Shape("cross", fix_lengths((12, 30), (20, 7), (1, 16), (9, 9)), phase="train"),
    # Sequences without queries, without keys, and without both.
    Shape("gaps", fix_lengths((0, 0), (10, 10), (0, 6), (0, 0), (5, 0), (1, 1), (21, 21)), phase="train"),
    Shape("long", fix_lengths((1, 1), (2, 2), (90, 90), (3, 3)), phase="train"),
    Shape("prefill", fix_lengths((13, 45), (1, 32), (1, 33), (9, 9))),
    Shape("decode", fix_lengths((1, 20), (0, 7), (1, 1), (1, 33)), phase="decode"),
    Shape("tokens", lambda p: list_token_lengths(_BLOCK), phase="decode"),
)
_SIZES = (
    # Lengths around whole blocks of 128, long and short sequences mixed. T and S of a sequence differ by up to 129.
    Shape(
        "borders",
        fix_lengths((128, 128), (2, 131), (131, 2), (1, 1), (127, 129)),
        phase="train",
        heads=(2, 1),
        depths=(32, 32),
    ),
    Shape("many", fix_lengths(*((1 + 5 * n % 23, 1 + 5 * n % 23) for n in range(17))), phase="train", heads=(2, 2)),
    Shape("heads", fix_lengths((33, 33), (40, 40)), phase="train", heads=(32, 4), depths=(32, 32)),
    Shape("odd_heads", fix_lengths((6, 20), (50, 3), (9, 9)), phase="train", heads=(15, 3), depths=(80, 80)),
    Shape("deep", fix_lengths((21, 21), (16, 16)), phase="train", heads=(3, 1), depths=(192, 128)),
    Shape("deepest", fix_lengths((70, 70), (1, 33), (40, 9)), phase="train", heads=(4, 1), depths=(256, 256)),
)
# Left sides of windows: the number of keys before the query's own that it sees. "inf" is causal, None is no mask.
_WINDOWS: tuple[Any, ...] = ("inf", 5, 0, None)
_MAX_DRAWN_QUERIES = 40


def _draw_cases(phases: tuple[str, ...], caches: Caches) -> st.SearchStrategy[Case]:
    """Return the Hypothesis strategy for packed cases of these phases; `caches` is not used."""
    own = tuple(phase for phase in ("train", "prefill", "decode") if phase in phases)
    return draw_sequences("packed", own, None, _draw_lengths) if own else st.nothing()


@st.composite
def _draw_lengths(draw: st.DrawFn, phase: str, size: int | None) -> tuple[int, int]:
    """Draw the numbers of queries and keys of one sequence; except in decode, half the draws have equal numbers."""
    keys = draw(st.one_of(st.integers(0, MAX_DRAWN_LENGTH), st.integers(1, 24)))
    if phase == "decode":
        return draw(st.sampled_from((1, 1, 1, 0))), keys
    if draw(st.booleans()):
        return keys, keys
    return draw(st.integers(0, _MAX_DRAWN_QUERIES)), keys


_MASK_MODEL = build_mask_model(
    "packed",
    (_SHAPES[0], _SHAPES[3], _SHAPES[5], _SHAPES[6], FAR),
    Axis("segments", (None, "seg", "segwild", "segamid"), combined="seg", rare=True),
    cross=_SHAPES[2],
)


def _find_further_models(writes_pages: bool, offers: frozenset[str]) -> tuple[Model, ...]:
    """Return the model of further masks and operands for a kernel that offers one of them."""
    return (_MASK_MODEL,) if offers & FEATURES else ()


def _build_compiled() -> tuple[Case, ...]:
    return (
        build_case(512, (8, 2), (128, 128), "causal", batch=4, storage="packed"),
        build_case(
            512, (4, 4), (64, 64), "window-l127-r0", dtype="f32", batch=2, storage="packed-q512-100", sinks=True
        ),
    )


def _build_interpreted() -> tuple[tuple[Case, ...], ...]:
    return (
        (build_case(100, (4, 2), (64, 64), "own-linf-100-37-1", dtype="f32", batch=3, storage="packed-q100-37-1"),),
        # Several blocks of queries and of keys. Sequences end inside blocks, windows skip keys, and some pairs of a
        # query block and a key block have no sequence in common.
        (
            build_case(
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
    )


_PACKED = "B4.T30.S30.N4.K2.H64.V64"


CASES = FormCases(
    models=(
        build_model(
            "packed", Axis("shape", _SHAPES), Axis("window", _WINDOWS, combined=5), FIRST, *HEAD_AXES, *VALUE_AXES
        ),
        build_model(
            "packed", Axis("shape", _SIZES), Axis("window", ("inf", 31, None)), FIRST, *VALUE_AXES, strongest=2
        ),
    ),
    find_further_models=_find_further_models,
    plain=Case(mask="own-linf-128", storage="packed", phase="prefill"),
    draw_cases=_draw_cases,
    further_sequences={
        # The last 24 of the 40 tokens of a single sequence. The window is unbounded to the left and sees three keys to
        # the right.
        "one_chunk": {
            **{"batch": 1, "q_length": 24, "kv_length": 40, "mask": "window-linf-r3-o16"},
            **MANY_KEY_HEADS,
            "storage": "packed",
        },
        # The total numbers of queries and keys are equal, but they differ in every sequence.
        "as_many_in_all": {
            "batch": 3,
            "q_length": 17,
            "kv_length": 20,
            "mask": "own-linf-20-3-9",
            "storage": "packed-q7-17-8",
            **LARGE_GROUP,
        },
        "forty": {
            "batch": 40,
            "q_length": 13,
            "kv_length": 13,
            "mask": f"own-linf-{FORTY}",
            "storage": f"packed-q{FORTY}",
        },
        "long": {**LONG, "storage": "packed", "dtype": "bf16"},
        "chunk_starts": {**CHUNK_STARTS, "storage": "packed"},
        "deepest": {**DEEPEST, "storage": "packed-q5-1"},
    },
    build_compiled=_build_compiled,
    build_interpreted=_build_interpreted,
    error_profile_cases=(
        # Training, training without a causal mask, training with empty sequences, prefill, and training in bf16.
        (f"train/f32/{_PACKED}/own-linf-24-1-17-30/packed-q24-1-17-30/normal", SAVED_WITH_GRADIENT),
        (f"train/f32/{_PACKED}/own-l5-24-1-17-30/softcap2/packed-q24-1-17-30/normal", ()),
        (f"train/f32/{_PACKED}/own-linf-24-1-17-30/sinks/scale0.3/packed-q24-1-17-30/normal", SAVED),
        ("train/f32/B4.T20.S30.N2.K2.H64.V64/lengths-30-7-16-9/packed-q12-20-1-9/normal", BEHIND_MASK),
        ("train/f32/B5.T21.S21.N2.K2.H64.V64/own-linf-10-6-0-0-21/packed-q10-0-5-0-21/normal", SAVED),
        ("prefill/f32/B4.T13.S45.N4.K2.H64.V64/own-linf-45-32-33-9/packed-q13-1-1-9/normal", ()),
        (f"train/bf16/{_PACKED}/own-linf-24-1-17-30/packed-q24-1-17-30/normal", ()),
    ),
)
