"""Cases of the storage form `latent_pages`: the cases of pages, with latents in place of keys and values.

A latent has `H = rank + rotary dimensions` coordinates. The first `V = rank` of them are the value. The scale is
`1 / sqrt` of the depth of the heads that the latent was compressed from: 0.144 for 32 + 16 dimensions, and 0.072 for
128 + 64. One shape of the model of sizes has the rank and the heads of DeepSeek V3 (arXiv:2412.19437), for kernels that
support no other rank.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

from hypothesis import strategies as st

from cases.case import Case
from cases.covering_model import Axis, Model
from cases.quantization import PAGED_CACHES, WHOLE_CACHES, list_cache_features
from cases.storage_forms import paged_cases
from cases.storage_forms.form_cases import BEHIND_MASK, SAVED, Caches, FormCases, build_case
from cases.storage_forms.page_write_cases import build_write_models
from cases.storage_forms.sequence_shapes import FORTY, STORED_DISTRIBUTIONS, Shape, fix_lengths


class Sizes(NamedTuple):
    """A level of heads `(N, K)` or depths `(H, V)`."""

    first: int
    second: int
    instead_of: Any = None  # the level that this one replaces, for kernels that do not support that level


DEEPSEEK_DEPTHS = (576, 512)
DEPTHS = Axis(
    "depths",
    (Sizes(80, 64), Sizes(192, 128), Sizes(40, 32), Sizes(64, 64), Sizes(576, 512, Sizes(80, 64))),
    combined=Sizes(80, 64),
)
HEADS = Axis(
    "heads",
    (Sizes(4, 1), Sizes(16, 1), Sizes(1, 1), Sizes(5, 1), Sizes(128, 1, Sizes(4, 1))),
    combined=Sizes(4, 1),
)
SCALE = Axis("scale", (0.144, 0.072, 0.3), combined=0.072)
# The distribution `cancel` is left out: it needs values that cancel although their keys are nearly equal. In latents,
# nearly equal keys have nearly equal values.
VALUES = Axis("distribution", tuple(name for name in STORED_DISTRIBUTIONS if name != "cancel"), cheap=True)


def convert_to_latents(case: Case) -> Case:
    """Return a case of keys and values in pages as a case of latents in pages."""
    assert case.storage is not None
    pages = case.storage.replace("paged", "latent", 1).replace("shared", "latentshared", 1)
    return dataclasses.replace(case, storage=pages)


def _build_model(usual: Model, *changed: Axis) -> Model:
    """Build a model of latents in pages from a model of keys and values in pages, with the axes `changed` replaced."""
    axes = {**{axis.name: axis for axis in usual.axes}, **{axis.name: axis for axis in (*changed, SCALE, VALUES)}}

    def assemble(levels: Mapping[str, Any], seed: int) -> Case:
        return convert_to_latents(usual.assemble(levels, seed))

    return Model(tuple(axes.values()), usual.compatible, assemble, usual.strongest)


_SIZES = (
    Shape("borders", fix_lengths((128, 128), (127, 255), (1, 129)), heads=(2, 1), depths=(40, 32)),
    Shape("long", fix_lengths((1, 1), (4, 1030), (1, 3)), heads=(8, 1), depths=(80, 64)),
    Shape("real", fix_lengths((1, 70), (2, 33), (1, 1)), heads=(128, 1), depths=DEEPSEEK_DEPTHS),
    Shape("odd", fix_lengths((6, 20), (3, 50), (1, 9)), heads=(10, 1), depths=(104, 88)),
    Shape("many", lambda p: tuple((1, 1 + 7 * n % 90) for n in range(17)), "decode", heads=(4, 1), depths=(80, 64)),
)

MODELS = (
    _build_model(paged_cases.MODELS[0], HEADS, DEPTHS),
    _build_model(paged_cases.MODELS[1], Axis("shape", _SIZES)),
)
"""The models of features and of sizes for kernels that read latents in pages."""
# A call that writes latents gets their rotary part by itself, so no latent is without one.
_WRITTEN_DEPTHS = dataclasses.replace(
    DEPTHS, levels=tuple(Sizes(72, 64) if depths.first == depths.second else depths for depths in DEPTHS.levels)
)
_CACHES = (*PAGED_CACHES, *WHOLE_CACHES)
WRITE_MODELS = build_write_models((_build_model(paged_cases.MODELS[0], HEADS, _WRITTEN_DEPTHS), MODELS[1]))
"""The models for kernels that write latents into pages."""


def find_models(writes_pages: bool, offers: frozenset[str]) -> tuple[Model, Model]:
    """Return the models for a kernel, from whether it writes pages and from the scales that it takes."""
    if writes_pages:
        return WRITE_MODELS
    return _build_read_models(tuple(cache for cache in _CACHES if offers.issuperset(list_cache_features(cache))))


@functools.cache
def _build_read_models(caches: tuple[str, ...]) -> tuple[Model, Model]:
    return paged_cases.add_caches(MODELS, None, *caches) if caches else MODELS


DRAWN_HEADS = (1, 2, 4, 8, 16, 20)
DRAWN_RANKS = (8, 16, 32, 64, 72, 128)
DRAWN_ROTARY = (0, 8, 16, 24, 64)
DRAWN_SCALES = (0.072, 0.144, 0.3, 1.0)


def _draw_cases(phases: tuple[str, ...], caches: Caches) -> st.SearchStrategy[Case]:
    own = tuple(phase for phase in ("prefill", "decode") if phase in phases)
    return _draw_latents(own, caches) if own else st.nothing()


@st.composite
def _draw_latents(draw: st.DrawFn, phases: tuple[str, ...], caches: Caches) -> Case:
    """Draw a paged case, then replace its keys and values by latents of any rank and rotary dimensions."""
    case = draw(paged_cases.draw_paged_cases(phases, caches))
    rank = draw(st.sampled_from(DRAWN_RANKS))
    return convert_to_latents(
        dataclasses.replace(
            case,
            num_q_heads=draw(st.sampled_from(DRAWN_HEADS)),
            num_kv_heads=1,
            head_dim=rank + draw(st.sampled_from(DRAWN_ROTARY)),
            v_head_dim=rank,
            scale=draw(st.sampled_from(DRAWN_SCALES)),
        )
    )


def _build_compiled() -> tuple[Case, ...]:
    """Build cases to compile, two like DeepSeek V3: one has its depth 576, one has 640, a whole number of TPU lanes."""
    real: dict[str, Any] = {"heads": (128, 1), "scale": 0.072}
    return (
        build_case(
            (1, 4096), depths=(576, 512), mask="causal-o4095", batch=64, phase="decode", storage="latent16", **real
        ),
        build_case(
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
        build_case(
            (64, 512), (8, 1), (80, 64), "causal-o448", dtype="f32", batch=2, phase="prefill", storage="latent32"
        ),
        build_case((4, 2000), (10, 1), (80, 48), "causal-o1996", batch=3, phase="prefill", storage="latent5-q4-1-4"),
    )


def _build_interpreted() -> tuple[tuple[Case, ...], ...]:
    latents: dict[str, Any] = {"depths": (80, 64), "scale": 0.144}
    return (
        (build_case(**paged_cases.MIXED_LENGTHS, heads=(6, 1), storage="latent16-q20-1-1-0-1", **latents),),
        (build_case(**paged_cases.WINDOW_LENGTHS, heads=(4, 1), storage="latentshared16-q1-9-9", **latents),),
    )


_MIXED = "B4.T13.S45.N4.K1.H80.V64"


CASES = FormCases(
    models=MODELS,
    find_models=find_models,
    plain=Case(mask="own-linf-128", num_kv_heads=1, v_head_dim=48, scale=0.144, storage="latent16", phase="prefill"),
    draw_cases=_draw_cases,
    caches=(None, *_CACHES),
    further_sequences={
        "forty": {
            "phase": "decode",
            "batch": 40,
            "q_length": 1,
            "kv_length": 13,
            "mask": f"own-linf-{FORTY}",
            "storage": "latent1",
        },
        "border": {**paged_cases.BORDER, "storage": "latent16-q2-4-1"},
        "room": {**paged_cases.ROOM, "storage": "latent16-q0-2-0-1-0-0"},
        # Depths (rank 35, 10 rotary dimensions) that are no multiple of a vector's width.
        "uneven": {**paged_cases.BORDER, "storage": "latent16-q2-4-1", "head_dim": 45, "v_head_dim": 35},
    },
    trace_fields=(
        {"num_q_heads": 4, "num_kv_heads": 1, "head_dim": 80, "v_head_dim": 64, "scale": 0.144},
        {"num_q_heads": 16, "num_kv_heads": 1, "head_dim": 576, "v_head_dim": 512, "scale": 0.072},
    ),
    trace_sizes=paged_cases.TRACE_SIZES,
    trace_windows=paged_cases.TRACE_WINDOWS,
    iter_trace_layouts=paged_cases.iter_trace_layouts,
    build_compiled=_build_compiled,
    build_interpreted=_build_interpreted,
    error_profile_cases=(
        (f"prefill/f32/{_MIXED}/own-linf-45-16-17-9/scale0.144/latent16-q13-1-1-9/normal", BEHIND_MASK),
        ("decode/f32/B3.T1.S48.N4.K1.H80.V64/own-linf-48-33-15/scale0.144/latent16/normal", SAVED),
        (f"prefill/f32/{_MIXED}/own-l7-45-16-17-9/softcap2/scale0.3/latent16-q13-1-1-9/normal", ()),
        (f"prefill/f32/{_MIXED}/own-linf-45-16-17-9/sinks/scale0.3/latentshared16-q13-1-1-9/normal", SAVED),
        (f"prefill/bf16/{_MIXED}/own-linf-45-16-17-9/scale0.144/latent16-q13-1-1-9/normal", ()),
    ),
)
