"""Cases of the storage form `ring`: sequences with fewer tokens than the ring has slots, as many, and many more.

A shape computes the lengths of its sequences from the number of slots `p`. A ring must hold all keys that its queries
see. So if a sequence has more tokens than slots, the left side of its window is at most `p` minus the number of its
queries. The level `fill` of the axis of windows is that largest left side.

The models for kernels that keep the first tokens of each sequence have one more axis: how many. Shapes then count
tokens behind these.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from cases.case import Case
from cases.covering_model import Axis, Model
from cases.masks import FIRST_TOKENS
from cases.storage_forms import ring_form
from cases.storage_forms.form_cases import BEHIND_MASK, SAVED, Caches, FormCases, TraceStep, build_case
from cases.storage_forms.form_registry import FORMS
from cases.storage_forms.sequence_shapes import (
    FIRST,
    FORTY,
    HEAD_AXES,
    LARGE_GROUP,
    MANY_KEY_HEADS,
    MAX_DRAWN_LENGTH,
    VALUE_AXES,
    SequenceLengths,
    Shape,
    build_model,
    is_compatible,
    list_fitting_distributions,
    list_token_lengths,
)
from cases.storage_forms.storage_layout import NOBODY, Request, Storage

_SHAPES = (
    # A turn is `p` tokens, which fill the ring once. More than two turns, exactly one, one token more, one token less.
    Shape("decode", lambda p: ((1, 2 * p + 3), (1, p), (1, p + 1), (1, max(1, p - 1))), phase="decode"),
    # Chunks of four tokens that end a turn, begin a turn, and cross from one turn to the next.
    Shape("chunk", lambda p: ((4, 3 * p), (4, 2 * p + 4), (4, p + 2))),
    Shape("begun", lambda p: ((1, 1), (1, min(2, p)), (1, 0)), phase="decode"),
    Shape("prompts", lambda p: ((p, p), (p, max(1, p // 2)))),
    # Sequences with fewer tokens than queries, and without tokens.
    Shape("short", lambda p: ((3, p + 5), (3, 2), (3, 0), (3, p + 1))),
    Shape("turned", lambda p: ((1, 5 * p - 1), (1, 4 * p)), phase="decode"),
    Shape("gaps", lambda p: ((1, 0), (1, p + 1), (1, 0), (1, 0), (1, 2 * p), (1, min(2, p))), phase="decode"),
    Shape("tokens", list_token_lengths, phase="decode"),
)
_SIZES = (
    Shape("borders", lambda p: ((2, p), (2, p + 1), (2, 2 * p - 1), (2, 2 * p)), heads=(2, 1), depths=(32, 32)),
    Shape("long", lambda p: ((1, 9 * p + 5), (1, 3)), phase="decode", heads=(8, 1)),
    Shape("heads", lambda p: ((17, 2 * p + 5), (17, 40)), heads=(32, 4), depths=(32, 32)),
    Shape("odd_heads", lambda p: ((6, p + 20), (6, 50), (6, 9)), heads=(15, 3), depths=(80, 80)),
    Shape("many", lambda p: tuple((1, 1 + 29 * n % (3 * p)) for n in range(17)), phase="decode", heads=(4, 4)),
    Shape("deep", lambda p: ((5, p + 3), (5, 64)), heads=(3, 1), depths=(192, 128)),
)
_FILL = "fill"
_SLOTS = (16, 7, 2, 64)
_WINDOWS: tuple[Any, ...] = (_FILL, 5, 0, "inf")


def _compute_left(shape: Shape, slots: int, window: Any) -> Any:
    """Return the left side of a level of windows; for `fill`, the number of slots minus the most queries."""
    return slots - max(queries for queries, _ in shape.lengths(slots)) if window == _FILL else window


def _fits(shape: Shape, slots: int, window: Any) -> bool:
    """Return whether a ring of `slots` slots holds all keys that the queries of a shape see."""
    left = _compute_left(shape, slots, window)
    longer = [queries for queries, keys in shape.lengths(slots) if queries and keys > slots]
    if left == "inf" or not longer:
        return not longer and (left == "inf" or left >= 0)
    return bool(0 <= left <= slots - max(longer))


def _build_ring_model(
    shapes: tuple[Shape, ...], slots: tuple[int, ...], windows: tuple[Any, ...], **facts: Any
) -> Model:
    """Build a covering-array model in which every ring holds all keys that its windows see."""
    # The number of slots varies along the axis `page`, which is the page size in other forms.
    own = Axis("shape", shapes), Axis("page", slots), Axis("window", windows, combined=_FILL)
    usual = build_model("ring", *own, FIRST, *facts.pop("axes", ()), *VALUE_AXES, **facts)

    def compatible(levels: Mapping[str, Any]) -> bool:
        chosen = [(levels[axis.name],) if axis.name in levels else axis.levels for axis in own]
        fit = any(_fits(shape, n, window) for shape in chosen[0] for n in chosen[1] for window in chosen[2])
        return fit and is_compatible(levels)

    def assemble(levels: Mapping[str, Any], seed: int) -> Case:
        left = _compute_left(levels["shape"], levels["page"], levels["window"])
        return usual.assemble({**levels, "window": left}, seed)

    return Model(usual.axes, compatible, assemble, usual.strongest)


def _add_first_tokens(model: Model, *further: Shape) -> Model:
    """Return a model of rings with one more axis, how many first tokens of each sequence stay, and further shapes."""
    axes = tuple(
        dataclasses.replace(axis, levels=(*axis.levels, *further)) if axis.name == "shape" else axis
        for axis in model.axes
    )
    shapes, sizes, windows = (next(axis for axis in axes if axis.name == name) for name in ("shape", "page", "window"))
    kept = Axis(FIRST_TOKENS, (0, 4, 1), combined=4, rare=True)

    def compatible(levels: Mapping[str, Any]) -> bool:
        chosen = [
            (levels[axis.name],) if axis.name in levels else axis.levels for axis in (shapes, sizes, windows, kept)
        ]
        fit = any(
            size > first and (window != "inf" or not first) and _fits(shape, size - first, window)
            for shape, size, window, first in itertools.product(*chosen)
        )
        return fit and is_compatible(levels)

    def assemble(levels: Mapping[str, Any], seed: int) -> Case:
        shape, first = levels["shape"], levels[FIRST_TOKENS]
        left = _compute_left(shape, levels["page"] - first, levels["window"])
        behind = dataclasses.replace(shape, lengths=lambda p: _add_tokens(shape.lengths(p - first), p - first, first))
        case = model.assemble({**levels, "shape": behind, "window": left}, seed)
        return dataclasses.replace(case, mask=case.mask.replace(f"l{left}", f"l{left}-f{first}")) if first else case

    return Model((*axes, kept), compatible, assemble, model.strongest)


def _add_tokens(lengths: SequenceLengths, slots: int, first: int) -> SequenceLengths:
    """Add `first` tokens to sequences that fill a ring of `slots` slots or all but one; shorter ones stay."""
    return tuple((queries, keys + first if keys >= max(1, slots - 1) else keys) for queries, keys in lengths)


_MAX_DRAWN_QUERIES = 12


def _draw_cases(phases: tuple[str, ...], caches: Caches) -> st.SearchStrategy[Case]:
    own = tuple(phase for phase in ("prefill", "decode") if phase in phases)
    return _draw_rings(own) if own else st.nothing()


@st.composite
def _draw_rings(draw: st.DrawFn, phases: tuple[str, ...]) -> Case:
    """Draw a case with any number of slots; Hypothesis shrinks it towards one sequence of one token in one slot."""
    phase = draw(st.sampled_from(phases))
    slots = draw(st.integers(1, 48) | st.sampled_from((1, 2, 8, 16, 32, 64, 128)))
    q_length = 1 if phase == "decode" else draw(st.integers(1, min(slots, _MAX_DRAWN_QUERIES)))
    turns = st.integers(0, 4).map(lambda n: n * slots)
    around = turns | turns.map(lambda n: n + 1) | turns.map(lambda n: max(0, n - 1))
    keys = draw(st.lists(st.integers(0, MAX_DRAWN_LENGTH) | around, min_size=1, max_size=5))
    first = draw(st.sampled_from((*[0] * 12, *range(1, 5)[: slots - q_length])))  # few kernels keep first tokens
    widest = st.integers(0, slots - first - q_length)
    left = draw(widest if first or max(keys) > slots else st.just("inf") | widest)
    heads = draw(st.sampled_from(((1, 1), (2, 2), (4, 2), (3, 1), (15, 3))))
    head_dim = draw(st.sampled_from((8, 16, 64, 72)))
    ends = "-".join(map(str, keys))
    cap = draw(st.sampled_from((None, None, 30.0, 2.0)))
    return Case(
        phase=phase,
        dtype=draw(st.sampled_from(("f32", "f32", "bf16", "f16"))),
        batch=len(keys),
        q_length=q_length,
        kv_length=max(1, *keys),
        num_q_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        v_head_dim=draw(st.just(head_dim) | st.sampled_from((8, 64))),
        mask=f"own-l{left}-f{first}-{ends}" if first else f"own-l{left}-{ends}",
        soft_cap=cap,
        sinks=draw(st.booleans()),
        scale=draw(st.sampled_from((None, None, 1.0, 0.3))),
        storage=FORMS["ring"].format(slots, (q_length,)),
        distribution=draw(st.sampled_from(list_fitting_distributions(cap))),
        seed=draw(st.integers(0, 999)),
    )


_TRACE_SLOTS = 20  # enough for a chunk of 13 queries, each of which sees 7 keys before its own
_TRACE_ROWS = 3  # the number of rows of the cache in each step of a trace


def iter_trace_layouts(case: Case, steps: Sequence[TraceStep], sizes: tuple[int, int, int]) -> Iterator[Storage]:
    """Yield the layout of each step of a trace: a request takes a row of the cache, and frees it when it ends.

    The ring of a step has fewer slots than the ring of the case, which holds all tokens. So long requests go around the
    ring. A slot that a request has not written yet keeps the token of the request that had the row before.

    Args:
      sizes: B, T and S of the dense problem of a step.
    """
    last = {row: stop for step in steps for row, _, stop in step}
    free = list(reversed(range(_TRACE_ROWS)))
    first = case.first_tokens
    held = np.full((_TRACE_ROWS, _TRACE_SLOTS + first), NOBODY, np.int32)
    rows: dict[int, int] = {}
    for step in steps:
        requests: list[Request | None] = [None] * _TRACE_ROWS
        for row, start, stop in step:
            if row not in rows:
                rows[row] = free.pop()
            request = Request(row=row, queries=stop - start, keys=stop)
            ring_form.place_keys(held[rows[row]], request, case.kv_length, start, first=first)
            requests[rows[row]] = request
        yield ring_form.build_layout(requests, sizes, held.copy())
        for row, _, stop in step:
            if stop == last[row]:
                free.append(rows.pop(row))


def _build_compiled() -> tuple[Case, ...]:
    served: dict[str, Any] = {"heads": (64, 8), "depths": (128, 128)}
    return (
        build_case((1, 4096), **served, mask="window-l1023-r0-o4095", batch=64, phase="decode", storage="ring1024"),
        build_case(
            (4, 2000),
            (10, 1),
            (80, 48),
            "window-l507-r0-o1996",
            batch=3,
            phase="prefill",
            storage="ring512",
            sinks=True,
        ),
    )


def _build_interpreted() -> tuple[tuple[Case, ...], ...]:
    sizes: dict[str, Any] = {"heads": (4, 2), "depths": (64, 64), "dtype": "f32", "batch": 3, "phase": "prefill"}
    return ((build_case((4, 120), mask="own-l28-120-16-33", storage="ring32", sinks=True, **sizes),),)


MODELS = (
    _build_ring_model(_SHAPES, _SLOTS, _WINDOWS, axes=HEAD_AXES),
    _build_ring_model(_SIZES, (128, 96), (_FILL, 31), strongest=2),
)
"""The models of features and of sizes for kernels over rings."""
FIRST_MODELS = (
    # Chunks of as many queries as the ring has slots: each of them sees itself and the first tokens.
    _add_first_tokens(MODELS[0], Shape("filled", lambda p: ((p, 2 * p + 3), (p, p), (p, 3 * p), (p, p - 1)))),
    _add_first_tokens(MODELS[1]),
)
"""The models for kernels over rings that keep the first tokens of each sequence."""


def find_models(writes_pages: bool, offers: frozenset[str]) -> tuple[Model, Model]:
    """Return the models for a kernel, from whether it keeps the first tokens; no ring is written."""
    del writes_pages
    return FIRST_MODELS if FIRST_TOKENS in offers else MODELS


CASES = FormCases(
    models=MODELS,
    find_models=find_models,
    plain=Case(mask="own-linf-128", storage="ring128", phase="prefill"),
    draw_cases=_draw_cases,
    further_sequences={
        # Forty sequences.
        "forty": {
            "phase": "decode",
            "batch": 40,
            "q_length": 1,
            "kv_length": 13,
            "mask": f"own-l7-{FORTY}",
            "storage": "ring8",
        },
        # Queries before and after the first slot of a turn.
        "border": {
            "phase": "prefill",
            "batch": 3,
            "q_length": 4,
            "kv_length": 80,
            "mask": "own-l12-50-66-80",
            "storage": "ring16",
            "soft_cap": None,
            **MANY_KEY_HEADS,
        },
        # A sequence of more than 4,096 tokens, of which the ring still holds 64.
        "long": {
            "phase": "decode",
            "batch": 1,
            "q_length": 1,
            "kv_length": 4233,
            "mask": "own-l63-4233",
            "storage": "ring64",
            "soft_cap": None,
            **LARGE_GROUP,
        },
    },
    has_sized_sequences=True,
    trace_fields=(
        {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 32, "v_head_dim": 32},
        {"num_q_heads": 2, "num_kv_heads": 2},
    ),
    trace_sizes=(40,),
    trace_windows=("7", "2", "7-f3"),
    iter_trace_layouts=iter_trace_layouts,
    build_compiled=_build_compiled,
    build_interpreted=_build_interpreted,
    error_profile_cases=(
        # Lengths around the number of slots, windows as wide as the ring and narrower, chunks, and short sequences.
        ("decode/f32/B4.T1.S45.N4.K2.H64.V64/own-l15-45-16-17-9/ring16/normal", BEHIND_MASK),
        ("decode/f32/B4.T1.S45.N4.K2.H64.V64/own-l7-45-32-33-9/sinks/ring16/normal", SAVED),
        ("prefill/f32/B3.T4.S50.N4.K2.H64.V64/own-l12-50-34-18/softcap2/ring16/normal", ()),
        ("prefill/f32/B2.T4.S9.N4.K2.H64.V64/own-linf-9-2/scale0.3/ring16/normal", SAVED),
        ("decode/f32/B2.T1.S300.N2.K1.H64.V64/own-l63-300-256/ring64/normal", ()),
        ("decode/bf16/B4.T1.S45.N4.K2.H64.V64/own-l15-45-16-17-9/ring16/normal", ()),
    ),
)
