"""Cases of the storage form `paged`: steps of a server, which mix whole prompts, chunks of prompts and single tokens.

A shape computes the lengths of its sequences from the page size `p`, so that some are a whole page, one token more, or
zero. The model of sizes has more heads and sequences, and lengths around blocks of 128. The models for kernels that
take quantised pages have one more axis, the format of the cache. Kernels that write pages have their own shapes
(`cases.storage_forms.page_write_cases`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from cases.case import KV_FEATURES, Case
from cases.counter_rng import draw_integers
from cases.covering_model import Axis, Model
from cases.quantization import (
    COMPUTED_CACHES,
    GIVEN_CACHES,
    PAGED_CACHES,
    PAGES_HOLD,
    QUERIES,
    READ_CACHES,
    SEQUENCE_CACHES,
    UNIT_CACHES,
    WHOLE_CACHES,
    get_block_size,
    has_whole_blocks,
    list_cache_features,
    split_level,
)
from cases.storage_forms import paged_form
from cases.storage_forms.form_cases import BEHIND_MASK, SAVED, Caches, FormCases, TraceStep, build_case
from cases.storage_forms.page_write_cases import WRITE_SHAPES, build_write_models
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
from cases.storage_forms.storage_layout import NOBODY, Request, Storage

# A chunk of a prompt, a single token in the last row of a page, a single token in the first row, and a whole prompt.
_MIXED = Shape("mixed", lambda p: ((13, 13 + 2 * p), (1, p), (1, p + 1), (9, 9)))
_SHAPES = (
    _MIXED,
    Shape("decode", lambda p: ((1, 3 * p), (0, p), (1, 2 * p + 1), (1, max(1, p - 1))), phase="decode"),
    Shape("prompts", lambda p: ((23, 23), (1, 1), (p + 1 if p < 60 else 40, p + 1))),
    Shape("chunk", lambda p: ((16, 17 + 2 * p),)),
    # Sequences without queries, with neither queries nor keys, and with a query but no keys, among others.
    Shape("gaps", lambda p: ((0, 0), (1, p + 2), (0, 2 * p), (5, 5 + p), (0, 0), (0, 0), (1, 0), (1, p))),
    Shape("tokens", list_token_lengths, phase="decode"),
    # Sequences long enough that they can share whole pages of a common prefix.
    Shape("alike", lambda p: ((4, 4 * p + 4), (1, 4 * p), (7, 4 * p + 9))),
)
_SIZES = (
    Shape("borders", fix_lengths((128, 128), (127, 255), (1, 129), (129, 129)), heads=(2, 1), depths=(32, 32)),
    Shape("long", fix_lengths((1, 1), (1, 2), (4, 1030), (1, 3)), heads=(8, 1)),
    Shape("heads", fix_lengths((17, 33), (1, 40)), heads=(32, 4), depths=(32, 32)),
    Shape("odd_heads", fix_lengths((6, 20), (3, 50), (1, 9)), heads=(15, 3), depths=(80, 80)),
    Shape("many", lambda p: tuple((1, 1 + 7 * n % 90) for n in range(17)), phase="decode", heads=(4, 4)),
    Shape("deep", fix_lengths((5, 21), (1, 64)), heads=(3, 1), depths=(192, 128)),
    Shape("deepest", fix_lengths((9, 140), (1, 300)), heads=(4, 2), depths=(256, 256)),
)
# Left sides of windows: the number of keys before the query's own that it sees. "inf" is causal. For pages of 16: 5 is
# less than a page, 15 with the query's own key is a whole page, 40 is several pages. 0 leaves only the query's own key.
_WINDOWS: tuple[Any, ...] = ("inf", 5, 15, 40, 0)
_PAGE_SIZES = (16, 1, 5, 64, 256)
# Further levels cost no program here: there are as many page sizes as levels.
_HEAD_AXES = tuple(
    dataclasses.replace(axis, levels=(*axis.levels, further))
    for axis, further in zip(HEAD_AXES, ((6, 1), (72, 40)), strict=True)
)
_SHARED = Axis("shared", (False, True), combined=True)
MODELS: tuple[Model, Model] = (
    build_model(
        "paged",
        Axis("shape", _SHAPES),
        Axis("page", _PAGE_SIZES),
        Axis("window", _WINDOWS, combined=15),
        FIRST,
        *_HEAD_AXES,
        *VALUE_AXES,
        _SHARED,
    ),
    build_model(
        "paged",
        Axis("shape", _SIZES),
        Axis("page", (16, 32, 128)),
        Axis("window", ("inf", 31, 130)),
        FIRST,
        *VALUE_AXES,
        _SHARED,
        strongest=2,
    ),
)
"""The models of features and of sizes for kernels whose pages have the dtype of the operands."""


def add_caches(models: tuple[Model, Model], *caches: str | None) -> tuple[Model, Model]:
    """Return `models` with the formats `caches` as one more axis, which is left out if only the first is supported.

    A format is as `cases.quantization.split_level` takes it.
    """

    def add(model: Model) -> Model:
        def assemble(levels: Mapping[str, Any], seed: int) -> Case:
            return dataclasses.replace(model.assemble(levels, seed), **split_level(levels["kv_cache"]))

        def is_compatible(levels: Mapping[str, Any]) -> bool:
            shape = levels.get("shape")
            depths = levels.get("depths") if shape is None else shape.depths or levels.get("depths")
            level = levels.get("kv_cache")
            fits = depths is None or level is None or has_whole_blocks(level, *depths[:2])
            return fits and model.compatible(levels)

        axes = (*model.axes, Axis("kv_cache", caches, rare=True))
        return dataclasses.replace(model, axes=axes, assemble=assemble, compatible=is_compatible)

    features, sizes = models
    return add(features), add(sizes)


WRITE_MODELS = build_write_models(MODELS)
"""The models for kernels that write pages."""
BOTH_SCALE_MODELS = add_caches(MODELS, None, *PAGED_CACHES, *WHOLE_CACHES)
"""The models for kernels that take pages with a scale for each token and head, and pages with one scale for all."""


def find_models(writes_pages: bool, offers: frozenset[str]) -> tuple[Model, Model]:
    """Return the models for a kernel, from whether it writes pages and from the opt-in features that it offers."""
    return _build_models(writes_pages, _list_caches(writes_pages, offers))


@functools.cache
def _build_models(writes_pages: bool, caches: tuple[str, ...]) -> tuple[Model, Model]:
    models = WRITE_MODELS if writes_pages else MODELS
    return add_caches(models, None, *caches) if caches else models


def _list_caches(writes_pages: bool, offers: frozenset[str]) -> tuple[str, ...]:
    """List the formats of quantised pages for a kernel, as `cases.quantization.split_level` takes them."""
    if not offers & KV_FEATURES:
        return ()
    caches: tuple[str, ...]
    if writes_pages:
        given = (*GIVEN_CACHES, *UNIT_CACHES) if "kv_writes_scaled" in offers else ()
        caches = (*given, *(COMPUTED_CACHES if "kv_writes_computed" in offers else ()))
    else:
        whole: tuple[str, ...] = WHOLE_CACHES if "kv_tensor_scales" in offers else ()
        whole += tuple(cache for cache in READ_CACHES if offers.issuperset(list_cache_features(cache)))
        caches = (*(PAGED_CACHES if "kv_token_scales" in offers or not whole else ()), *whole)
    queries = {cache: "q_descale" if cache in SEQUENCE_CACHES else "q_fp8" for cache in caches}
    return (
        *caches,
        *(cache + QUERIES for cache in caches if cache.startswith("kvfp8") and queries[cache] in offers),
    )


# Pages of one token, pages shorter and longer than spans and chunks.
_MASK_PAGES = Axis("page", (16, 5, 1, 64))
MASK_MODEL = build_mask_model(
    "paged",
    (_MIXED, _SHAPES[1], _SHAPES[4], FAR),
    _MASK_PAGES,
    cross=Shape("cross", lambda p: ((20, 7), (3, p + 9), (0, 4), (1, 1))),
)
"""The model of further masks and operands for kernels that read pages."""
MASK_WRITE_MODEL = build_mask_model("paged", (*WRITE_SHAPES[:4], FAR), _MASK_PAGES, cross=WRITE_SHAPES[4])
"""The model of further masks and operands for kernels that write pages."""


def find_further_models(writes_pages: bool, offers: frozenset[str]) -> tuple[Model, ...]:
    """Return the model of further masks and operands for a kernel that offers one of them."""
    return (MASK_WRITE_MODEL if writes_pages else MASK_MODEL,) if offers & FEATURES else ()


_DRAWN_PAGE_SIZES = (1, 2, 8, 16, 32, 64, 128, 256)
_MAX_DRAWN_QUERIES = 40


def draw_paged_cases(phases: tuple[str, ...], caches: Caches = (None,)) -> st.SearchStrategy[Case]:
    """Return the Hypothesis strategy for paged cases of these phases, with pages in one of the formats `caches`."""
    own = tuple(phase for phase in ("prefill", "decode") if phase in phases)
    if not own:
        return st.nothing()
    sizes = st.sampled_from(_DRAWN_PAGE_SIZES) | st.integers(1, 48)
    drawn = draw_sequences("paged", own, sizes, _draw_lengths)
    return drawn if caches == (None,) else _draw_caches(drawn, caches)


@st.composite
def _draw_caches(draw: st.DrawFn, drawn: st.SearchStrategy[Case], caches: Caches) -> Case:
    case, fields = draw(drawn), split_level(draw(st.sampled_from(caches)))
    size = get_block_size(fields["kv_cache"])
    if size > 1:
        fields |= {name: -(-getattr(case, name) // size) * size for name in ("head_dim", "v_head_dim")}
    return dataclasses.replace(case, **fields)


@st.composite
def _draw_lengths(draw: st.DrawFn, phase: str, size: int | None) -> tuple[int, int]:
    """Draw the numbers of queries and keys of one sequence; keys often fill whole pages, give or take one token."""
    ways: list[Any] = [st.integers(0, MAX_DRAWN_LENGTH), st.integers(1, 24)]
    if size is not None and size <= MAX_DRAWN_LENGTH:
        whole = st.integers(0, MAX_DRAWN_LENGTH // size).map(lambda n: n * size)
        ways += [whole, whole.map(lambda n: n + 1), whole.map(lambda n: max(0, n - 1))]
    keys = draw(st.one_of(*ways))
    if phase == "decode":
        return draw(st.sampled_from((1, 1, 1, 0))), keys
    return draw(st.integers(0, min(keys, _MAX_DRAWN_QUERIES))), keys


_BUCKET = 32  # the number of packed queries in each step of a trace, padding included
_TRACE_SEQUENCES = 4  # the number of rows of the tables in each step of a trace


def iter_trace_layouts(case: Case, steps: Sequence[TraceStep], sizes: tuple[int, int, int]) -> Iterator[Storage]:
    """Yield the layout of each step of a trace: requests take pages as they grow, and free them when they end.

    A page that is taken again keeps the old keys in the rows that its new owner has not yet written.

    Args:
      sizes: B, T and S of the dense problem of a step.
    """
    assert case.stored is not None
    assert case.stored.size is not None
    size = case.stored.size
    last = {row: stop for step in steps for row, _, stop in step}
    width = -(-case.kv_length // size) + 1
    pool = 3 * width + 2
    # The free pages, a stack: the pages that were freed last are taken first.
    free = np.argsort(draw_integers(case.seed, "life", (pool,), 2**32), kind="stable").tolist()
    held = np.full((pool, size), NOBODY, np.int32)
    pages: dict[int, tuple[int, ...]] = {}
    for step in steps:
        requests = []
        for row, start, stop in step:
            own = pages.get(row, ())
            own = (*own, *(free.pop() for _ in range(-(-stop // size) - len(own))))
            pages[row] = own
            request = Request(row=row, queries=stop - start, keys=stop, pages=own)
            paged_form.place_keys(held, request, case.kv_length, start)
            requests.append(request)
        yield paged_form.build_layout(
            requests,
            sizes,
            held.copy(),
            max_seqs=_TRACE_SEQUENCES,
            total_q=_BUCKET,
            pages_per_seq=width,
            seed=case.seed,
            form=case.stored.form,
        )
        for row, _, stop in step:
            if stop == last[row]:
                free.extend(pages.pop(row))


TRACE_SIZES = (8, 16, 32)
TRACE_WINDOWS = ("inf", "7")
# Sequences with two and with four queries. Some of their windows begin before the first row of a page, some after it.
BORDER: dict[str, Any] = {
    **{"phase": "prefill", "batch": 3, "q_length": 4, "kv_length": 80},
    **{"mask": "own-l31-48-64-80", "soft_cap": None},  # each key has some weight
}
# Six sequences with three queries in all, two of which are in one sequence. So tables have more rows than there are
# queries.
ROOM: dict[str, Any] = {
    **{"phase": "prefill", "batch": 6, "q_length": 2, "kv_length": 40},
    **{"mask": "own-linf-17-40-8-33-1-24", "soft_cap": None},
}


def _build_compiled() -> tuple[Case, ...]:
    """Build paged cases to compile: decode of many sequences, chunks of prompts, and both; pages of 5 to 128 tokens."""
    served: dict[str, Any] = {"heads": (64, 8), "depths": (128, 128)}
    return (
        build_case((1, 4096), **served, mask="causal-o4095", batch=64, phase="decode", storage="paged16"),
        build_case((1, 4096), **served, mask="causal-o4095", batch=64, phase="decode", storage="paged128"),
        build_case(
            (512, 4096),
            **served,
            mask="window-l1023-r0-o3584",
            batch=4,
            phase="prefill",
            storage="paged32-q512-1-1-1",
            soft_cap=50.0,
            sinks=True,
        ),
        build_case(
            (256, 1024), (8, 8), (64, 64), "causal-o768", dtype="f32", batch=2, phase="prefill", storage="paged64"
        ),
        build_case((4, 2000), (10, 1), (80, 48), "causal-o1996", batch=3, phase="prefill", storage="paged5-q4-1-4"),
        *_build_compiled_scales(),
        build_case(
            (64, 512),
            (8, 2),
            (64, 64),
            "chunked-128_at-512-300",
            batch=2,
            phase="prefill",
            storage="paged16-q64-1",
            alibi=True,
            soft_cap=30.0,
            logit_scale=True,
        ),
        build_case(
            (16, 512), (8, 2), (64, 64), "tree-16-9_at-512-90", batch=2, phase="prefill", storage="paged16-q16-9"
        ),
        build_case(
            (64, 512),
            (6, 2),
            (128, 128),
            "dense-d40_at-512-300",
            batch=2,
            phase="prefill",
            storage="paged16-q64-1",
            score="score-rows",
        ),
    )


def _build_compiled_scales() -> tuple[Case, ...]:
    """Build cases of quantised pages to compile, each with a sequence of several queries."""
    grouped: dict[str, Any] = {"heads": (64, 8), "depths": (128, 128), "phase": "prefill"}
    served: dict[str, Any] = {"batch": 2, "phase": "prefill", "storage": "paged32-q16-1"}
    token, token8 = "kvint8-token", "kvfp8-token"
    others = (*WHOLE_CACHES, *GIVEN_CACHES, *COMPUTED_CACHES)
    return (
        build_case((4, 4096), **grouped, mask="causal-o4092", batch=4, storage="paged16-q4-1-1-1", kv_cache=token),
        build_case(
            (256, 2048),
            **grouped,
            mask="window-l511-r0-o1792",
            batch=2,
            storage="paged64-q256-1",
            soft_cap=50.0,
            sinks=True,
            kv_cache=token8,
        ),
        build_case(
            (64, 512),
            (8, 2),
            (64, 64),
            "causal-o448",
            dtype="f32",
            batch=2,
            phase="prefill",
            storage="paged32",
            kv_cache=token8,
        ),
        build_case(
            (4, 2000),
            (10, 1),
            (80, 48),
            "causal-o1996",
            batch=3,
            phase="prefill",
            storage="paged5-q4-1-4",
            kv_cache=token,
        ),
        *(build_case((16, 512), (8, 8), (128, 128), "causal-o496", **served, kv_cache=cache) for cache in others),
    )


# Fields of cases for the interpreter. `MIXED_LENGTHS` has a chunk of a prompt, single tokens and a sequence
# without queries. `WINDOW_LENGTHS` has windows that begin inside a page. Both have enough pages that a kernel copies
# pages ahead over several blocks, and from one sequence to the next.
MIXED_LENGTHS: dict[str, Any] = {
    **{"lengths": (20, 120), "mask": "own-linf-120-16-33-50-1", "dtype": "f32", "batch": 5, "phase": "prefill"},
    "sinks": True,
}
WINDOW_LENGTHS: dict[str, Any] = {
    **{"lengths": (9, 130), "mask": "own-l60-130-77-9", "batch": 3, "phase": "prefill", "soft_cap": 30.0},
}


# For kernels that multiply no f32, or need one scale for all keys, these replace `MIXED_LENGTHS`: a sequence with more
# keys than are in flight at once.
LONG_LENGTHS: dict[str, Any] = {
    **{"lengths": (2, 700), "mask": "own-linf-700-77-1", "batch": 3, "phase": "prefill", "sinks": True},
}


def _build_interpreted() -> tuple[tuple[Case, ...], ...]:
    long: dict[str, Any] = {**LONG_LENGTHS, "heads": (8, 2), "depths": (128, 128), "storage": "paged16-q2-1-0"}
    mixed: dict[str, Any] = {**MIXED_LENGTHS, "heads": (4, 2), "depths": (64, 64), "storage": "paged16-q20-1-1-0-1"}
    window: dict[str, Any] = {**WINDOW_LENGTHS, "depths": (64, 64), "storage": "shared16-q1-9-9"}
    masked: dict[str, Any] = {"lengths": (9, 130), "batch": 3, "phase": "prefill", "storage": "paged16-q9-1-5"}
    return (
        (build_case(**mixed), build_case(**long), build_case(**long, kv_cache="kvint8-tensor")),
        (build_case(**window, heads=(4, 1)),),
        (build_case(**long),),  # bf16, whole lanes and an even number of heads, which a kernel may read in pairs
        (build_case(**mixed, kv_cache="kvint8-token"),),
        (build_case(**window, heads=(4, 2), kv_cache="kvfp8-token"),),
        # Masks over sequences: later keys and operands of heads, and trees of drafted tokens.
        (
            build_case(
                **masked,
                mask="window-l60-r9_at-130-77-9",
                heads=(6, 2),
                depths=(64, 64),
                dtype="f32",
                alibi=True,
                logit_scale=True,
            ),
        ),
        (build_case(**masked, mask="tree-9-1-5_at-130-77-9", heads=(4, 2), depths=(128, 128)),),
    )


# What calls with queries in fp8 take, for server traces and drawn cases.
_QUERY_CACHES = tuple(cache + QUERIES for cache in ("kvfp8-token", "kvfp8-tensor", "kvfp8-given", "kvfp8-computed"))
_QUERY_CACHES += ("kvfp8-sequence" + QUERIES,)
_PROFILE_SIZES = "B4.T13.S45.N4.K2.H64.V64"


CASES = FormCases(
    models=MODELS,
    find_models=find_models,
    find_further_models=find_further_models,
    plain=Case(mask="own-linf-128", storage="paged16", phase="prefill"),
    draw_cases=draw_paged_cases,
    caches=(*PAGES_HOLD, *_QUERY_CACHES),
    further_sequences={
        # Forty sequences, and more than 255 pages.
        "forty": {
            "phase": "decode",
            "batch": 40,
            "q_length": 1,
            "kv_length": 13,
            "mask": f"own-linf-{FORTY}",
            "storage": "paged1",
        },
        # Single queries whose groups have 64 heads.
        "group": {
            "phase": "decode",
            "batch": 2,
            "q_length": 1,
            "kv_length": 40,
            "mask": "own-linf-40-17",
            "storage": "paged16",
            "num_q_heads": 192,
            "num_kv_heads": 3,
        },
        "border": {**BORDER, **MANY_KEY_HEADS, "storage": "paged16-q2-4-1"},
        "room": {**ROOM, **LARGE_GROUP, "storage": "paged16-q0-2-0-1-0-0"},
        # A prompt longer than any block, and two tokens. The windows of 128 keys have passed most of the prompt's own
        # keys. With four heads there are more rows of tokens and heads than the 1,248 that one launch holds.
        "prompt": {
            "phase": "prefill",
            "batch": 3,
            "q_length": 393,
            "kv_length": 393,
            "mask": "own-l127-200-393-17",
            "storage": "paged16-q1-393-1",
        },
        # Also more pages than 512.
        "long": {**LONG, "storage": "paged64"},
        "long_in_bf16": {**LONG, "storage": "paged64", "dtype": "bf16"},
        "chunk_starts": {**CHUNK_STARTS, "storage": "paged16"},
        "deepest": {**DEEPEST, "storage": "paged16-q5-1"},
    },
    trace_fields=(
        {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 32, "v_head_dim": 32},
        {"num_q_heads": 2, "num_kv_heads": 2},
        {"num_q_heads": 2, "num_kv_heads": 2, "head_dim": 128, "v_head_dim": 128, "dtype": "bf16"},
    ),
    trace_sizes=TRACE_SIZES,
    trace_windows=TRACE_WINDOWS,
    iter_trace_layouts=iter_trace_layouts,
    build_compiled=_build_compiled,
    build_interpreted=_build_interpreted,
    error_profile_cases=(
        # Mixed steps, decode, windows and optional operands, empty sequences, a long sequence, and bf16.
        (f"prefill/f32/{_PROFILE_SIZES}/own-linf-45-16-17-9/paged16-q13-1-1-9/normal", BEHIND_MASK),
        ("decode/f32/B3.T1.S48.N4.K2.H64.V64/own-linf-48-33-15/paged16/normal", SAVED),
        (f"prefill/f32/{_PROFILE_SIZES}/own-l7-45-16-17-9/softcap2/paged16-q13-1-1-9/normal", ()),
        (f"prefill/f32/{_PROFILE_SIZES}/own-linf-45-16-17-9/sinks/scale0.3/shared16-q13-1-1-9/normal", SAVED),
        ("prefill/f32/B5.T5.S32.N2.K2.H64.V64/own-linf-18-32-21-0-0/paged16-q1-0-5-0-1/normal", SAVED),
        ("prefill/f32/B2.T40.S300.N2.K1.H64.V64/own-linf-300-40/paged64/normal", ()),
        (f"prefill/bf16/{_PROFILE_SIZES}/own-linf-45-16-17-9/paged16-q13-1-1-9/normal", ()),
        # The same with quantised pages that have a scale for each token and head.
        (f"prefill/f32/{_PROFILE_SIZES}/own-linf-45-16-17-9/kvint8-token/paged16-q13-1-1-9/normal", BEHIND_MASK),
        ("decode/f32/B3.T1.S48.N4.K2.H64.V64/own-linf-48-33-15/kvint8-token/paged16/normal", SAVED),
        (f"prefill/f32/{_PROFILE_SIZES}/own-l7-45-16-17-9/softcap2/kvfp8-token/paged16-q13-1-1-9/normal", ()),
        (
            f"prefill/f32/{_PROFILE_SIZES}/own-linf-45-16-17-9/sinks/scale0.3/kvint8-token/shared16-q13-1-1-9/normal",
            (),
        ),
        ("prefill/f32/B5.T5.S32.N2.K2.H64.V64/own-linf-18-32-21-0-0/kvfp8-token/paged16-q1-0-5-0-1/normal", SAVED),
        ("prefill/f32/B2.T40.S300.N2.K1.H64.V64/own-linf-300-40/kvint8-token/paged64/normal", ()),
        (f"prefill/bf16/{_PROFILE_SIZES}/own-linf-45-16-17-9/kvint8-token/paged16-q13-1-1-9/normal", ()),
        # Quantised pages with one scale for all keys and one for all values.
        (f"prefill/f32/{_PROFILE_SIZES}/own-linf-45-16-17-9/kvint8-tensor/paged16-q13-1-1-9/normal", BEHIND_MASK),
        ("decode/f32/B3.T1.S48.N4.K2.H64.V64/own-linf-48-33-15/softcap2/kvfp8-tensor/paged16/normal", SAVED),
        # Steps for kernels that write pages: new tokens fill pages, and in the second, sequences share earlier pages.
        (f"prefill/f32/{_PROFILE_SIZES}/own-linf-45-32-33-9/paged16-q13-1-1-9/normal", SAVED),
        ("prefill/f32/B2.T17.S49.N4.K2.H64.V64/own-linf-49-40/sinks/shared16-q17-1/normal", ()),
    ),
)
