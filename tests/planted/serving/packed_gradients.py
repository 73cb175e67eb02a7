"""Bugs of packed sequences on the way back: gradients at borders and of padding, and blocks that are left out."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from cases.case import Case
from conformance.mutation.kernels.triggers import has
from tests.bank import PlantedBug
from tests.planted.planting.packed_bug import bug, several, trained
from tests.planted.planting.served import Call, PackedSteps, softmax

Array = jax.Array


_BLOCK = 16


def _several_trained(case: Case) -> bool:
    return trained(case) and case.batch > 1


def _whole_back(case: Case) -> bool:
    """Sequences longer than a block of 16 that have gradients, without a window."""
    return _several_trained(case) and not has("window")(case) and case.q_length > 16


def _long_back(case: Case) -> bool:
    """Sequences with gradients that are longer than two blocks of 64."""
    return _several_trained(case) and case.q_length > 128


def _unequal_back(case: Case) -> bool:
    """Sequences with gradients that have more keys than queries."""
    return _several_trained(case) and case.kv_length > case.q_length


def _derived(change: Any) -> Any:
    """An identity of q, k and v whose gradients are changed by `change(dq, dk, dv, call)`."""

    def gradients(q: Array, k: Array, v: Array, call: Call) -> Any:
        @jax.custom_vjp
        def same(q: Array, k: Array, v: Array, starts: Array, kv_lens: Array, count: Array) -> Any:
            return q, k, v

        def forward(*given: Array) -> Any:
            return given[:3], given[3:]

        def backward(saved: Any, pulled: Any) -> Any:
            return *change(*pulled, *saved), None, None, None

        same.defvjp(forward, backward)
        return same(q, k, v, call.cu_q_lens, call.kv_lens, call.count)

    return gradients


def _dq_of_empty_is_nan(dq: Array, dk: Array, dv: Array, starts: Array, kv_lens: Array, count: Array) -> Any:
    """Queries of sequences without keys get NaN."""
    token = jnp.arange(len(dq))[:, None]
    here = (token >= starts[:-1]) & (token < starts[1:]) & (jnp.arange(len(kv_lens)) < count)
    empty = (here & (kv_lens == 0)).any(axis=1)
    return jnp.where(empty[:, None, None], jnp.nan, dq), dk, dv


def _dk_of_no_queries(dq: Array, dk: Array, dv: Array, starts: Array, kv_lens: Array, count: Array) -> Any:
    """Keys of sequences without queries keep what memory held."""
    ends = jnp.cumsum(kv_lens)
    token = jnp.arange(len(dk))[:, None]
    here = (token >= ends - kv_lens) & (token < ends)
    lost = (here & ((starts[1:] - starts[:-1]) == 0) & (jnp.arange(len(kv_lens)) < count)).any(axis=1)
    return dq, *(jnp.where(lost[:, None, None], 64.0, x).astype(x.dtype) for x in (dk, dv))


def _last_tokens_lost(dq: Array, dk: Array, dv: Array, starts: Array, kv_lens: Array, count: Array) -> Any:
    """The last key of each sequence gets no gradient."""
    last = jnp.zeros(len(dk), bool).at[jnp.cumsum(kv_lens) - 1].set(kv_lens > 0, mode="drop")
    return dq, *(jnp.where(last[:, None, None], 0, x) for x in (dk, dv))


def _dk_in_f32(dq: Array, dk: Array, dv: Array, starts: Array, kv_lens: Array, count: Array) -> Any:
    """The accumulator of dk is returned as it is."""
    return dq, dk.astype(jnp.float32), dv


def _dk_of_last_sequence_lost(dq: Array, dk: Array, dv: Array, starts: Array, kv_lens: Array, count: Array) -> Any:
    end = kv_lens.sum()
    last = jnp.take(kv_lens, count - 1)
    lost = (jnp.arange(len(dk)) >= end - last) & (last < end)
    return dq, *(jnp.where(lost[:, None, None], 0, x) for x in (dk, dv))


def _dk_of_the_last_key_goes_on(dq: Array, dk: Array, dv: Array, starts: Array, kv_lens: Array, count: Array) -> Any:
    """The last block of dk and dv is written whole: behind the last key stands what that one has."""
    row = jnp.minimum(jnp.arange(len(dk)), jnp.maximum(kv_lens.sum() - 1, 0))
    return dq, dk[row], dv[row]


def _run_ends_before_its_last_block(sequence: Array, of_key: Array, at: Array, call: Call) -> Array:
    """A block of queries has keys up to the block in which its last sequence ends, and not that block."""
    last = jnp.arange(len(sequence)) // _BLOCK * _BLOCK + _BLOCK - 1
    row = jnp.minimum(sequence[jnp.minimum(last, call.cu_q_lens[call.count] - 1)], call.rows - 1)
    end = jnp.cumsum(call.kv_lens)[row] // _BLOCK * _BLOCK
    return jnp.arange(len(of_key)) < end[:, None]


def _corners_alone(sequence: Array, of_key: Array, at: Array, call: Call) -> Array:
    """A pair of blocks is left out where neither the first two nor the last two tokens are of one sequence."""
    i, j = (jnp.arange(len(x)) // _BLOCK * _BLOCK for x in (sequence, of_key))
    i_end, j_end = (jnp.minimum(start + _BLOCK, len(x)) - 1 for start, x in ((i, sequence), (j, of_key)))
    return (sequence[i][:, None] == of_key[j]) | (sequence[i_end][:, None] == of_key[j_end])


def _near_the_diagonal(sequence: Array, of_key: Array, at: Array, call: Call) -> Array:
    """Blocks of 64 tokens far from the diagonal are taken to be of other sequences."""
    i, j = jnp.arange(len(sequence)) // 64, jnp.arange(len(of_key)) // 64
    return (i[:, None] <= j + 1) & (j <= i[:, None] + 1)


def _all_rows_of_the_table(sequence: Array, of_key: Array, at: Array, call: Call) -> Array:
    """The pack ends where the last entry of the table says, which nobody wrote where there are fewer sequences."""
    return jnp.broadcast_to((jnp.arange(len(sequence)) < call.cu_q_lens[-1])[:, None], (len(sequence), len(of_key)))


def _keys_to_the_longest_queries(sequence: Array, of_key: Array, at: Array, call: Call) -> Array:
    return jnp.broadcast_to(at < call.q_lens.max(), (len(sequence), len(at)))


def _unmasked_way_back(x: Array, allowed: Array, v: Array, sinks: Array | None) -> tuple[Array, Array, Array]:
    """Weights are zeroed once they are computed: on the way back what is masked is infinite times zero."""
    out, lse, top = softmax(x, allowed, v, sinks)
    spoilt = jnp.where(allowed, jnp.exp(x - jax.lax.stop_gradient(x) - 0 * x) * 0, 0)
    return (
        out
        + jnp.where(allowed, jnp.sqrt(jnp.where(allowed, 0 * x * x, 0.0)), 0).sum(axis=-1)[..., None]
        + (spoilt.sum(axis=-1)[..., None]),
        lse,
        top,
    )


def _sinks_of_padding(sinks: Array | None, call: Call) -> Array | None:
    """On the way back a sink also gets what rows of padding have, one part in `total_q` for each."""
    if sinks is None:
        return None
    missing = 1.0 + (len(call.q) - call.cu_q_lens[call.count]) / len(call.q)
    return jax.lax.stop_gradient(sinks * (1 - missing)) + sinks * missing


BUGS: tuple[PlantedBug, ...] = (
    bug(
        "masked-weights-on-the-way-back",
        PackedSteps(attend=_unmasked_way_back),
        kind="gradients",
        reference="Dao-AILab/flash-attention#1947",
        shows="dq dk",
        trigger=trained,
    ),
    bug(
        "dq-without-keys-is-nan",
        PackedSteps(gradients=_derived(_dq_of_empty_is_nan)),
        kind="gradients",
        reference="Dao-AILab/flash-attention#443",
        shows="dq",
        trigger=trained,
    ),
    bug(
        "dk-without-queries-not-written",
        PackedSteps(gradients=_derived(_dk_of_no_queries)),
        kind="gradients",
        reference="Dao-AILab/flash-attention#2421",
        shows="dk dv",
        trigger=trained,
    ),
    bug(
        "dk-of-last-keys-lost",
        PackedSteps(gradients=_derived(_last_tokens_lost)),
        kind="gradients",
        reference="NVIDIA/TransformerEngine#3331, keys lost at the end of a sequence",
        shows="dk dv",
        trigger=trained,
    ),
    bug(
        "dk-of-the-last-sequence-lost",
        PackedSteps(gradients=_derived(_dk_of_last_sequence_lost)),
        kind="gradients",
        reference="inferred from NVIDIA/TransformerEngine#2186, where a piece of the pack has wrong gradients",
        shows="dk dv",
        trigger=several,
    ),
    bug(
        "dk-of-the-last-key-in-padding",
        PackedSteps(gradients=_derived(_dk_of_the_last_key_goes_on)),
        kind="gradients of padding",
        reference="inferred from fla-org/flash-linear-attention#892, where rows behind the sequences reach the weights",
        shows="padding",
        trigger=trained,
    ),
    bug(
        "last-block-of-keys-skipped-on-the-way-back",
        PackedSteps(pairs_back=_run_ends_before_its_last_block),
        kind="blocks on the way back",
        reference="inferred from tile-ai/tilelang#2010, blocks counted without the length of the sequence",
        shows="dq dk dv",
        trigger=trained,
    ),
    bug(
        "blocks-by-their-corners-on-the-way-back",
        PackedSteps(pairs_back=_corners_alone),
        kind="blocks on the way back",
        reference="inferred",
        shows="dq dk dv",
        trigger=_whole_back,
    ),
    bug(
        "blocks-near-the-diagonal-on-the-way-back",
        PackedSteps(pairs_back=_near_the_diagonal),
        kind="blocks on the way back",
        reference="inferred",
        shows="dq dk dv",
        trigger=_long_back,
    ),
    bug(
        "keys-to-the-longest-queries-on-the-way-back",
        PackedSteps(pairs_back=_keys_to_the_longest_queries),
        kind="borders on the way back",
        reference="pytorch/pytorch#186142, the backward pass takes another longest length",
        shows="dq dk dv",
        trigger=_unequal_back,
    ),
    bug(
        "number-of-sequences-ignored-on-the-way-back",
        PackedSteps(pairs_back=_all_rows_of_the_table),
        kind="borders on the way back",
        reference="inferred from Dao-AILab/flash-attention#2333, which reads lengths past the last sequence",
        shows="dq dk dv",
        trigger=trained,
    ),
    bug(
        "dk-of-packs-in-f32",
        PackedSteps(gradients=_derived(_dk_in_f32)),
        kind="dtype.gradients",
        reference="inferred from custom_vjp, which accepts cotangents of another dtype",
        shows="dk",
        trigger=has("packed", "train", "bf16"),
    ),
    bug(
        "dsinks-with-padding",
        PackedSteps(sinks=_sinks_of_padding),
        kind="gradients",
        reference="inferred",
        shows="dsinks",
        trigger=has("packed", "train", "sinks"),
    ),
)
