"""Bugs of mixture of block attention: in the gate, in what is taken, and in the blocks that follow from it."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax import lax

from cases.case import Case
from cases.moba_mask import Moba
from conformance.mutation.kernels.plain import Call, PlainSteps, kernel, stop
from conformance.mutation.kernels.triggers import Trigger, both, grouped, has, trains
from impls.moba import forward as sparse_forward
from impls.moba.moba_blocks import Operands, restore_rows, split_lanes
from impls.moba.moba_plan import MobaPlan, MobaWork, divide_work
from tests.bank import PlantedBug
from tests.planted.planting.moba import MobaSteps, block_sparse, chosen_pairs, correct, highest, implementation

sparse_backward = importlib.import_module("impls.moba.backward")

Array = jax.Array
_moba = has("moba")
_FORWARD = "out logsumexp max_logits"


def _bug(
    name: str, call: Callable[..., Any], *, kind: str, reference: str, shows: str, trigger: Trigger = _moba
) -> PlantedBug:
    build = functools.partial(implementation, name, call)
    return PlantedBug(
        name=name,
        family="moba",
        kind=kind,
        reference=reference,
        shows=tuple(shows.split()),
        build=build,
        trigger=trigger,
    )


def _one_chunk(case: Case) -> bool:
    return case.mask.startswith("moba") and case.mask.split("-")[2] == "1"


def _ties(case: Case) -> bool:
    return case.mask.startswith("moba-12") and case.distribution == "ties"


def _moved(case: Case) -> bool:
    return case.mask.startswith("moba") and "-o" in case.mask


def _next_at_the_boundary(chunk: Array, own: Array, position: Array, mask: Moba) -> Array:
    """A chunk that begins right behind the query counts as an earlier one."""
    return (chunk * mask.chunk <= position[:, None] + 1) & (chunk != own[:, None])


def _ties_to_the_last(gates: Array, earlier: Array, others: int, mask: Moba) -> Array:
    return highest(gates[..., ::-1], others)[..., ::-1] & earlier


def _top_k_of_too_few(gates: Array, earlier: Array, others: int, mask: Moba) -> Array:
    found = lax.top_k(gates, others)[1]
    return jax.nn.one_hot(found, gates.shape[-1], dtype=jnp.int32).sum(axis=-2).astype(bool) & earlier


def _filled_with_later_ones(gates: Array, earlier: Array, others: int, mask: Moba) -> Array:
    return highest(gates, others)


def _as_the_first_row(gates: Array, earlier: Array, others: int, mask: Moba) -> Array:
    return jnp.broadcast_to((highest(gates, others) & earlier)[:1], gates.shape)


def _gates_of_the_group(q: Array, means: Array, mask: Moba) -> Array:
    # `means` are repeated for the query heads; equal neighbours belong to one key/value head.
    shared = jnp.cumsum(jnp.any(means[:, :1] != jnp.roll(means[:, :1], 1, axis=2), axis=(0, 1, 3)))
    same = shared[:, None] == shared
    mean_q = jnp.einsum("btnh,nm->btmh", q, same / same.sum(axis=0), precision="highest")
    return jnp.einsum("btnh,bcnh->bntc", mean_q, means, precision="highest")


def _straight_through(products: Array, scale: float, call: Call) -> Array:
    """The gate of a pair's chunk gets the gradient of its logit too."""
    mask = call.mask
    assert isinstance(mask, Moba)
    pieces = jnp.pad(call.k, ((0, 0), (0, -call.kv_length % mask.chunk), (0, 0), (0, 0)))
    pieces = pieces.reshape(call.k.shape[0], -1, mask.chunk, *call.k.shape[2:])
    means = jnp.repeat(pieces.mean(axis=2), call.group, axis=2)
    gates = jnp.einsum("btnh,bcnh->bntc", call.q, means).astype(jnp.float32)
    by_key = jnp.repeat(gates, mask.chunk, axis=-1)[..., : call.kv_length]
    return scale * products + 0.1 * (by_key - stop(by_key))


def _empty_slots_are_the_first_chunk(x: Array, call: Call) -> Array:
    """Slots that stay empty hold index 0, and the first chunk counts once for each of them."""
    mask = call.mask
    assert isinstance(mask, Moba)
    own = (jnp.arange(call.q_length) + mask.offset) // mask.chunk
    empty = jnp.clip(mask.topk - 1, 0, mask.count_chunks(call.kv_length)) - own
    times = 1 + jnp.clip(empty, 0)[:, None] * (jnp.arange(call.kv_length) < mask.chunk)
    z = x if call.soft_cap is None else call.soft_cap * jnp.tanh(x / call.soft_cap)
    return z + jnp.log(times.astype(jnp.float32))


def _not_rescaled(plan: MobaPlan, operands: Operands, work: MobaWork) -> Any:
    """Parts of a row are added up as if they had been shifted by one maximum."""
    right = sparse_forward.forward(plan, operands, work)
    parts = sparse_forward._compute_parts(plan, split_lanes(plan, operands), work)
    _, total, out = (sparse_forward.gather_slots(x, work.places, 0) for x in parts)
    out = out.sum(axis=1) / total.sum(axis=1)[:, None]
    return right._replace(out=restore_rows(plan, out.astype(operands.q.dtype)))


def _own_chunk_in_logsumexp(plan: MobaPlan, operands: Operands, work: MobaWork) -> Any:
    right = sparse_forward.forward(plan, operands, work)
    parts = sparse_forward._compute_parts(plan, split_lanes(plan, operands), work)
    maximum, total, _ = (sparse_forward.gather_slots(x, work.places[:, :1], 0) for x in parts)
    own = (maximum + jnp.log(total)).reshape(right.logsumexp.shape)
    return right._replace(logsumexp=own)


def _beyond_capacity(plan: MobaPlan, chosen: Array) -> MobaWork:
    """As many blocks as the pairs would fill if no block had rows to spare."""
    work = divide_work(plan, chosen)
    return work._replace(in_use=jnp.minimum(work.in_use, max(1, plan.pairs // plan.block_rows)))


def _stored_instead_of_added(*operands: Any) -> Any:
    with mock.patch.object(sparse_backward, "take_block", lambda x, index: jnp.zeros_like(x[0])):
        return sparse_backward.backward(*operands)


def _only_first_slot_of_dq(*operands: Any) -> Any:
    slots = sparse_backward.gather_slots
    with mock.patch.object(sparse_backward, "gather_slots", lambda x, places, fill: slots(x, places[:, :1], fill)):
        return sparse_backward.backward(*operands)


def _chosen_at_the_end_of_the_cache(mask: Moba, call: Call) -> Array:
    """The gates take the queries for the last tokens that the cache can hold."""
    steps = MobaSteps(position=lambda length, mask: jnp.arange(length) + call.kv_length - length)
    return chosen_pairs(steps, mask, call)


BUGS: tuple[PlantedBug, ...] = (
    _bug(
        "moba-one-chunk-is-everything",
        correct(MobaSteps(with_own=lambda taken, own, mask: taken | own | (mask.topk == 1))),
        kind="moba.topk1-fallback",
        reference="MoBA PR 26; fla PR 845",
        shows=_FORWARD,
        trigger=_one_chunk,
    ),
    _bug(
        "moba-ties-to-the-last-chunk",
        correct(MobaSteps(taken=_ties_to_the_last)),
        kind="moba.ties",
        reference="inferred from MoBA issue 23",
        shows=_FORWARD,
        trigger=_ties,
    ),
    _bug(
        "moba-next-chunk-at-the-boundary",
        correct(
            MobaSteps(
                earlier=_next_at_the_boundary,
                pairs=lambda taken, own, causal, mask: taken & (causal | ~own),
            )
        ),
        kind="moba.causal-boundary",
        reference="MoBA issue 25",
        shows=_FORWARD,
    ),
    _bug(
        "moba-tail-dropped",
        correct(
            MobaSteps(
                pairs=lambda taken, own, causal, mask: (
                    taken & causal & (jnp.arange(taken.shape[-1]) < taken.shape[-1] // mask.chunk * mask.chunk)
                )
            )
        ),
        kind="moba.tail",
        reference="flash-moba issue 10",
        shows=_FORWARD,
    ),
    _bug(
        "moba-top-k-of-too-few",
        correct(MobaSteps(taken=_top_k_of_too_few)),
        kind="sparse.k-out-of-range",
        reference="native-sparse-attention-pytorch PR 18",
        shows="error",
        trigger=lambda case: case.mask.startswith("moba") and "-99" in case.mask,
    ),
    _bug(
        "moba-own-chunk-must-earn-its-place",
        correct(
            MobaSteps(
                earlier=lambda chunk, own, position, mask: chunk <= own[:, None],
                others=lambda mask: mask.topk,
                with_own=lambda taken, own, mask: taken,
            )
        ),
        kind="moba.current",
        reference="inferred from MaxText's moba mask",
        shows=_FORWARD,
    ),
    _bug(
        "moba-filled-with-later-chunks",
        correct(
            MobaSteps(
                taken=_filled_with_later_ones,
                pairs=lambda taken, own, causal, mask: taken & (causal | ~own),
            )
        ),
        kind="moba.future",
        reference="inferred from MaxText's moba mask",
        shows=_FORWARD,
    ),
    _bug(
        "moba-gradient-through-the-gate",
        correct(scaled=_straight_through),
        kind="moba.gate-grad",
        reference="inferred from MoBA, arXiv 2502.13189",
        shows="dq dk",
        trigger=trains("moba"),
    ),
    _bug(
        "moba-group-shares-its-gate",
        correct(MobaSteps(gates=_gates_of_the_group)),
        kind="moba.gqa-shared",
        reference="inferred from native sparse attention, arXiv 2502.11089",
        shows=_FORWARD,
        trigger=both(has("moba"), grouped),
    ),
    _bug(
        "moba-heads-interleaved-in-the-gate",
        correct(MobaSteps(heads=lambda q, means, mask: jnp.tile(means, (1, 1, q.shape[2] // means.shape[2], 1)))),
        kind="moba.gqa-map",
        reference="inferred from the interleaved groups of other kernels",
        shows=_FORWARD,
        trigger=both(has("moba"), grouped),
    ),
    _bug(
        "moba-one-chunk-too-many",
        correct(MobaSteps(others=lambda mask: mask.topk)),
        kind="moba.topk-off-by-one",
        reference="inferred from MoBA, arXiv 2502.13189 (the own chunk counts)",
        shows=_FORWARD,
    ),
    _bug(
        "moba-one-chunk-too-few",
        correct(MobaSteps(others=lambda mask: max(0, mask.topk - 2))),
        kind="moba.topk-off-by-one",
        reference="inferred from MoBA, arXiv 2502.13189 (the own chunk counts)",
        shows=_FORWARD,
    ),
    _bug(
        "moba-means-in-bf16",
        correct(MobaSteps(means=lambda pieces, mask: pieces.mean(axis=2).astype(jnp.bfloat16).astype(jnp.float32))),
        kind="moba.gate-dtype",
        reference="inferred from contract section 5 (the gate is in f32)",
        shows=_FORWARD,
    ),
    _bug(
        "moba-gate-of-the-largest-key",
        correct(MobaSteps(means=lambda pieces, mask: pieces.max(axis=2))),
        kind="moba.pooling",
        reference="inferred from the pooling choices of block-sparse kernels",
        shows=_FORWARD,
    ),
    _bug(
        "moba-gate-by-magnitude",
        correct(
            MobaSteps(
                gates=lambda q, means, mask: jnp.abs(jnp.einsum("btnh,bcnh->bntc", q, means, precision="highest"))
            )
        ),
        kind="moba.gate-sign",
        reference="inferred from selection by magnitude in sparse attention",
        shows=_FORWARD,
    ),
    _bug(
        "moba-chunks-counted-from-the-first-query",
        correct(MobaSteps(own=lambda position, mask: (position - mask.offset) // mask.chunk)),
        kind="moba.offset",
        reference="inferred from MaxText's chunked prefill",
        shows=_FORWARD,
        trigger=_moved,
    ),
    _bug(
        "moba-queries-at-the-end-of-the-cache",
        kernel(PlainSteps(mask=_chosen_at_the_end_of_the_cache)),
        kind="moba.cache-end",
        reference="inferred from mlx-lm PR 1673 (the padded buffer's length instead of the offset)",
        shows=_FORWARD,
        trigger=_moved,
    ),
    _bug(
        "moba-first-batch-row-chooses",
        correct(MobaSteps(taken=_as_the_first_row)),
        kind="moba.batch0",
        reference="inferred from masks shared over the batch",
        shows=_FORWARD,
        trigger=lambda case: case.mask.startswith("moba") and case.batch > 1,
    ),
    _bug(
        "moba-empty-slots-are-the-first-chunk",
        correct(cap=_empty_slots_are_the_first_chunk),
        kind="sparse.sentinel",
        reference="cudnn-frontend PR 298 (sentinels clamped to 0)",
        shows=_FORWARD,
    ),
    _bug(
        "moba-parts-not-rescaled",
        block_sparse(forward=_not_rescaled),
        kind="moba.merge",
        reference="inferred from MoBA, arXiv 2502.13189, algorithm 1",
        shows="out",
    ),
    _bug(
        "moba-logsumexp-of-the-own-chunk",
        block_sparse(forward=_own_chunk_in_logsumexp),
        kind="moba.merge",
        reference="inferred from MoBA, arXiv 2502.13189, algorithm 1",
        shows="logsumexp dq dk dv",
    ),
    _bug(
        "moba-rows-beyond-capacity-dropped",
        block_sparse(divided=_beyond_capacity),
        kind="moba.capacity",
        reference="inferred from token dropping in mixtures of experts",
        shows=_FORWARD,
    ),
    _bug(
        "moba-dk-stored-instead-of-added",
        block_sparse(backward=_stored_instead_of_added),
        kind="sparse.dup-indices",
        reference="cudnn-frontend issue 385",
        shows="dk dv",
        trigger=trains("moba"),
    ),
    _bug(
        "moba-dq-of-the-own-chunk",
        block_sparse(backward=_only_first_slot_of_dq),
        kind="moba.dq-parts",
        reference="inferred from MoBA, arXiv 2502.13189, algorithm 1",
        shows="dq",
        trigger=trains("moba"),
    ),
)
