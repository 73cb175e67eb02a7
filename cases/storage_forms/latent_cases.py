"""Cases of the storage form `latent`: dense latents, in training with gradients, prefill and decode.

Depths and scales are those of `cases.storage_forms.latent_pages_cases`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

from cases.case import Case
from cases.covering_model import Axis, Model
from cases.optional_operands.bias_operand import HIDING
from cases.storage_forms.form_cases import BEHIND_MASK, SAVED, SAVED_WITH_GRADIENT, Caches, FormCases
from cases.storage_forms.latent_pages_cases import (
    DEEPSEEK_DEPTHS,
    DEPTHS,
    DRAWN_HEADS,
    DRAWN_RANKS,
    DRAWN_ROTARY,
    DRAWN_SCALES,
    HEADS,
    SCALE,
    VALUES,
)
from cases.storage_forms.sequence_shapes import (
    VALUE_AXES,
    is_compatible,
    list_fitting_distributions,
    list_token_lengths,
)

_BLOCK = 16  # a usual block of keys


@dataclasses.dataclass(frozen=True)
class _Lengths:
    """A level of the axis `lengths`: phase, B, T, S. In the model of sizes, also heads `(N, K)` and depths `(H, V)`."""

    phase: str
    batch: int
    q: int
    kv: int
    heads: tuple[int, int] | None = None
    depths: tuple[int, int] | None = None


# The mask spec of each level of the axis `mask`. `{o}` is S - T, which aligns the last query with the last key.
_MASKS = {
    "causal": "causal-o{o}",
    "full": "full",
    "window": "window-l9-r0-o{o}",
    "lengths": "lengths-{lengths}",
    "array": "dense-d40",
}


def _list_key_lengths(size: _Lengths) -> tuple[int, ...]:
    """Return the key lengths of the rows: around borders of blocks in a long batch, and with an empty row in others."""
    if size.batch > 3:
        return tuple(keys for _, keys in list_token_lengths(_BLOCK))
    return (size.kv - 5, 0, size.kv - 7)[: size.batch]


def _assemble(levels: Mapping[str, Any], seed: int) -> Case:
    size = levels["lengths"]
    heads, depths = size.heads or levels["heads"], size.depths or levels["depths"]
    lengths = "-".join(map(str, _list_key_lengths(size)))
    mask = _MASKS[levels["mask"]].format(o=size.kv - size.q, lengths=lengths).replace("-o0", "")
    return Case(
        phase=size.phase,
        dtype=levels["dtype"],
        batch=size.batch,
        q_length=size.q,
        kv_length=size.kv,
        num_q_heads=heads[0],
        num_kv_heads=1,
        head_dim=depths[0],
        v_head_dim=depths[1],
        mask=mask,
        segments=levels["segments"],
        soft_cap=levels["soft_cap"],
        sinks=levels["sinks"],
        bias=levels["bias"],
        scale=levels["scale"],
        storage="latent",
        distribution=levels["distribution"],
        seed=seed,
    )


def _build_model(*own: Axis, strongest: int = 4) -> Model:
    usual = {axis.name: axis for axis in VALUE_AXES}
    shared = (VALUES, usual["dtype"], usual["soft_cap"], usual["sinks"], SCALE)
    segments = Axis("segments", (None, "seg"), combined="seg")
    mask = Axis("mask", tuple(_MASKS), combined="window")
    bias = Axis("bias", (None, "bias", "biashead", *HIDING), combined="biashead")
    return Model((*own, mask, segments, *shared, bias), is_compatible, _assemble, strongest)


_DRAWN_LENGTHS = (1, 2, 16, 33, 64, 100)
_DRAWN_CAPS = (None, None, 30.0, 5.0)


def _draw_cases(phases: tuple[str, ...], caches: Caches) -> st.SearchStrategy[Case]:
    return _draw_latents(phases) if phases else st.nothing()


@st.composite
def _draw_latents(draw: st.DrawFn, phases: tuple[str, ...]) -> Case:
    """Draw a case of dense latents, with any rank, rotary dimensions, lengths and window."""
    phase = draw(st.sampled_from(phases))
    q_length = 1 if phase == "decode" else draw(st.sampled_from(_DRAWN_LENGTHS))
    kv_length, rank = draw(st.sampled_from(_DRAWN_LENGTHS)), draw(st.sampled_from(DRAWN_RANKS))
    cap = draw(st.sampled_from(_DRAWN_CAPS))
    fitting = [name for name in list_fitting_distributions(cap) if name in VALUES.levels]
    masks = ("full", "causal", f"window-l{draw(st.integers(0, 40))}-r{draw(st.integers(0, 3))}")
    return Case(
        phase=phase,
        dtype=draw(st.sampled_from(("f32", "f32", "bf16", "f16"))),
        batch=draw(st.integers(1, 3)),
        q_length=q_length,
        kv_length=kv_length,
        num_q_heads=draw(st.sampled_from(DRAWN_HEADS)),
        num_kv_heads=1,
        head_dim=rank + draw(st.sampled_from(DRAWN_ROTARY)),
        v_head_dim=rank,
        mask=draw(st.sampled_from(masks)),
        segments=draw(st.sampled_from((None, None, "seg"))),
        soft_cap=cap,
        sinks=draw(st.booleans()),
        scale=draw(st.sampled_from(DRAWN_SCALES)),
        storage="latent",
        distribution=draw(st.sampled_from(fitting)),
        seed=draw(st.integers(0, 999)),
    )


_SIZES = "B2.T40.S40.N4.K1.H80.V64"


CASES = FormCases(
    models=(
        _build_model(
            Axis(
                "lengths",
                (
                    _Lengths("train", 2, 40, 40),
                    _Lengths("train", 1, 64, 64),
                    _Lengths("train", 2, 24, 72),
                    _Lengths("train", 2, 40, 16),
                    _Lengths("prefill", 2, 16, 80),
                    _Lengths("decode", 3, 1, 40),
                    _Lengths("decode", 25, 1, 65),
                ),
            ),
            HEADS,
            DEPTHS,
        ),
        _build_model(
            Axis(
                "lengths",
                (
                    _Lengths("train", 1, 129, 129, (2, 1), (40, 32)),
                    _Lengths("train", 1, 17, 24, (128, 1), DEEPSEEK_DEPTHS),
                    _Lengths("train", 3, 20, 150, (10, 1), (104, 88)),
                ),
            ),
            strongest=2,
        ),
    ),
    plain=Case(num_kv_heads=1, v_head_dim=48, scale=0.144, storage="latent"),
    draw_cases=_draw_cases,
    other_masks=("window-l9-r0", "window-l2-r0", "causal", "full"),
    error_profile_cases=(
        # Training, training with optional operands and in bf16, a chunk of a prompt, and decode.
        (f"train/f32/{_SIZES}/full/scale0.144/latent/normal", SAVED_WITH_GRADIENT),
        (f"train/f32/{_SIZES}/causal/seg/scale0.144/latent/normal", ()),
        (f"train/f32/{_SIZES}/causal/softcap2/sinks/bias/scale0.3/latent/normal", SAVED),
        (f"train/bf16/{_SIZES}/causal/scale0.144/latent/normal", ()),
        ("prefill/f32/B2.T16.S80.N6.K1.H64.V64/causal-o64/scale0.072/latent/normal", SAVED),
        ("decode/f32/B3.T1.S40.N4.K1.H80.V64/lengths-40-33-26/scale0.144/latent/normal", BEHIND_MASK),
    ),
)
