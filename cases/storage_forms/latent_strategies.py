"""Hypothesis strategies over problems with a latent, in pages and not: any rank, rotary part, lengths and windows."""

from __future__ import annotations

import dataclasses

from hypothesis import strategies as st

from cases.case import Case
from cases.storage_forms.latent_grids import convert_to_latent_pages
from cases.storage_forms.storage_spec import Kind
from cases.storage_forms.stored_strategies import stored_cases

_HEADS = (1, 2, 4, 8, 16, 20)
_RANKS = (8, 16, 32, 64, 72, 128)
_ROTARY = (0, 8, 16, 24, 64)
_SCALES = (0.072, 0.144, 0.3, 1.0)
_LENGTHS = (1, 2, 16, 33, 64, 100)
_CAPS = (None, None, 30.0, 5.0)


def draw_latent_cases(kind: Kind, phases: tuple[str, ...]) -> st.SearchStrategy[Case]:
    """Cases of these phases whose operands are stored as `kind`, `st.nothing()` if it has none of them."""
    if kind == "latent":
        return _draw_dense_latents(phases) if phases else st.nothing()
    own = tuple(phase for phase in ("prefill", "decode") if phase in phases)
    return _draw_latent_pages(own) if own else st.nothing()


@st.composite
def _draw_latent_pages(draw: st.DrawFn, phases: tuple[str, ...]) -> Case:
    """Those of pages of keys and values, with latents in their place."""
    case = draw(stored_cases("paged", phases))
    rank = draw(st.sampled_from(_RANKS))
    return convert_to_latent_pages(
        dataclasses.replace(
            case,
            num_q_heads=draw(st.sampled_from(_HEADS)),
            num_kv_heads=1,
            head_dim=rank + draw(st.sampled_from(_ROTARY)),
            v_head_dim=rank,
            scale=draw(st.sampled_from(_SCALES)),
        )
    )


@st.composite
def _draw_dense_latents(draw: st.DrawFn, phases: tuple[str, ...]) -> Case:
    phase = draw(st.sampled_from(phases))
    q_length = 1 if phase == "decode" else draw(st.sampled_from(_LENGTHS))
    kv_length, rank = draw(st.sampled_from(_LENGTHS)), draw(st.sampled_from(_RANKS))
    masks = ("full", "causal", f"window-l{draw(st.integers(0, 40))}-r{draw(st.integers(0, 3))}")
    return Case(
        phase=phase,
        dtype=draw(st.sampled_from(("f32", "f32", "bf16", "f16"))),
        batch=draw(st.integers(1, 3)),
        q_length=q_length,
        kv_length=kv_length,
        num_q_heads=draw(st.sampled_from(_HEADS)),
        num_kv_heads=1,
        head_dim=rank + draw(st.sampled_from(_ROTARY)),
        v_head_dim=rank,
        mask=draw(st.sampled_from(masks)),
        segments=draw(st.sampled_from((None, None, "seg"))),
        soft_cap=draw(st.sampled_from(_CAPS)),
        sinks=draw(st.booleans()),
        scale=draw(st.sampled_from(_SCALES)),
        storage="latent",
        distribution=draw(st.sampled_from(("normal", "small", "large", "heavy", "dominant"))),
        seed=draw(st.integers(0, 999)),
    )
