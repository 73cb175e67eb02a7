"""Bugs of packed sequences: their borders, what is padding, and where queries stand."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from conformance.mutation.kernels.triggers import grouped, has
from tests.bank import PlantedBug
from tests.planted.planting.packed_bug import bug, in_packs, several, trained
from tests.planted.planting.served import PackedSteps, softmax

Array = jax.Array


def _shared_shift(x: Array, allowed: Array, v: Array, sinks: Array | None) -> tuple[Array, Array, Array]:
    out, lse, top = softmax(x, allowed, v, sinks)
    return out * (1 + 0 * x.max()), lse, top


def _interleaved(x: Array, count: int) -> Array:
    return jnp.tile(x, (1, count // x.shape[1], 1))


BUGS: tuple[PlantedBug, ...] = (
    bug(
        "starts-off-by-one",
        PackedSteps(starts=lambda q, kv, count: (q, kv.at[1].add(-1))),
        kind="borders",
        reference="inferred",
        trigger=several,
    ),
    bug(
        "borders-ignored",
        PackedSteps(same=lambda sequence, of_key: (of_key < of_key.max() + 1)[None]),
        kind="borders",
        reference="inferred from pytorch/pytorch#194168, where all rows are one sequence's",
        trigger=several,
    ),
    bug(
        "packed-causal-from-the-start",
        PackedSteps(position=lambda place, q, kv, token: place),
        kind="alignment",
        reference="sparkinfer#3",
    ),
    bug(
        "position-by-row-of-the-pack",
        PackedSteps(position=lambda place, q, kv, token: kv - q + token),
        kind="alignment",
        reference="inferred",
        trigger=several,
    ),
    bug(
        "packed-window-ignored",
        PackedSteps(sides=lambda left, right: (None, right)),
        kind="window",
        reference="mistral.rs#2094",
        trigger=has("packed", "window"),
    ),
    bug(
        "padding-queries-on-the-way-back",
        PackedSteps(clean=lambda q, sequence, call: q),
        kind="padding",
        reference="sgl-project/sglang#18659, NaN of padding in rows that count",
        shows="dk",
        trigger=trained,
    ),
    bug(
        "packed-padding-reaches-real-rows",
        PackedSteps(attend=_shared_shift, clean=lambda q, sequence, call: q),
        kind="padding",
        reference="sgl-project/sglang#18659",
    ),
    bug(
        "packed-heads-interleaved",
        PackedSteps(heads=_interleaved),
        kind="heads",
        reference="native-sparse-attention-triton#27",
        trigger=lambda case: in_packs(case) and grouped(case),
    ),
)
