"""Bugs of packed sequences: their borders, what is padding, and where queries stand."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tests.bank import PlantedBug
from tests.planted.planting.packed_bug import bug, in_packs, several, trained
from tests.planted.planting.served import Call, PackedSteps, sequences, softmax
from tests.planted.planting.triggers import grouped, has

Array = jax.Array


def _border(starts: Array, call: Call, length: int) -> tuple[Array, Array]:
    """The first token of a sequence is looked up on the wrong side of the border."""
    token = jnp.arange(length)
    before = ((token[:, None] > starts[1:]) & (jnp.arange(call.rows) < call.count)).sum(axis=1)
    found = jnp.where(token < starts[call.count], jnp.minimum(before, call.rows), call.rows)
    return found, token - starts[jnp.minimum(found, call.rows)]


def _last_takes_the_rest(starts: Array, call: Call, length: int) -> tuple[Array, Array]:
    """The last sequence has all keys to the end of the tensor."""
    found, _ = sequences(starts, call, length)
    found = jnp.where(found == call.rows, call.count - 1, found)
    return found, jnp.arange(length) - starts[found]


def _one_query_each(call: Call) -> tuple[Array, Array]:
    sequence, place = PackedSteps().sequence(call)
    token = jnp.arange(len(call.q))
    single = call.q_lens.max() <= 1
    return jnp.where(single, jnp.minimum(token, call.rows), sequence), jnp.where(single, 0, place)


def _shared_shift(x: Array, allowed: Array, v: Array, sinks: Array | None) -> tuple[Array, Array, Array]:
    out, lse, top = softmax(x, allowed, v, sinks)
    return out * (1 + 0 * x.max()), lse, top


def _interleaved(x: Array, count: int) -> Array:
    return jnp.tile(x, (1, count // x.shape[1], 1))


BUGS: tuple[PlantedBug, ...] = (
    bug(
        "keys-found-by-the-starts-of-queries",
        PackedSteps(starts=lambda q, kv, count: (q, q)),
        kind="borders",
        reference="inferred from NVIDIA/cudnn-frontend#737, where offsets are made of lengths",
    ),
    bug(
        "packed-query-at-a-border-to-its-neighbour",
        PackedSteps(sequence=lambda call: _border(call.cu_q_lens, call, len(call.q))),
        kind="borders",
        reference="inferred",
        trigger=several,
    ),
    bug(
        "packed-key-at-a-border-to-its-neighbour",
        PackedSteps(of_key=_border),
        kind="borders",
        reference="inferred",
        trigger=several,
    ),
    bug(
        "starts-off-by-one",
        PackedSteps(starts=lambda q, kv, count: (q, kv.at[1].add(-1))),
        kind="borders",
        reference="inferred",
        trigger=several,
    ),
    bug(
        "padding-keys-to-the-last-sequence",
        PackedSteps(of_key=_last_takes_the_rest),
        kind="padding",
        reference="NVIDIA/Megatron-LM#5541",
    ),
    bug(
        "packed-one-query-for-every-sequence",
        PackedSteps(sequence=_one_query_each),
        kind="borders",
        reference="Dao-AILab/flash-attention#1537",
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
        "packed-causal-without-the-own-key",
        PackedSteps(sides=lambda left, right: (left, None if right is None else right - 1)),
        kind="alignment",
        reference="flashinfer-ai/flashinfer#348",
        trigger=has("packed", "causal"),
    ),
    bug(
        "packed-window-one-key-long",
        PackedSteps(sides=lambda left, right: (None if left is None else left + 1, right)),
        kind="window",
        reference="ml-explore/mlx-lm#390",
        trigger=has("packed", "window"),
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
        "padding-keys-kept",
        PackedSteps(clean_keys=lambda x, seen: x),
        kind="padding",
        reference="Dao-AILab/flash-attention#1947",
        trigger=in_packs,
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
