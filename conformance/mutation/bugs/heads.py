"""Bugs of grouped heads, head depths and layouts."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax.numpy as jnp

from cases.case import Case
from cases.masks import Mask
from conformance.mutation.kernels.plain import (
    Array,
    BackwardSteps,
    Call,
    PlainSteps,
    Saved,
    planted,
    product,
    repeat_heads,
)
from conformance.mutation.kernels.triggers import both, grouped, has, one_query, trains
from conformance.mutation.planted_bug import PlantedBug

_bug = functools.partial(planted, "heads")
_FORWARD = "out logsumexp max_logits"
_trained_group = both(trains(), grouped)


def _tiled(x: Array, call: Call) -> Array:
    """Query head `n` reads key/value head `n % K`."""
    return jnp.tile(x, (1, 1, call.group, 1))


def _group_of_power_of_two(x: Array, call: Call) -> Array:
    group = 1 << (call.group - 1).bit_length()
    return x[:, :, jnp.minimum(jnp.arange(call.q.shape[2]) // group, x.shape[2] - 1)]


def _by_group(dx: Array, saved: Saved) -> Array:
    batch, length, _, depth = dx.shape
    return dx.reshape(batch, length, -1, saved.call.group, depth)


def _interleaved_sum(dx: Array, saved: Saved) -> Array:
    batch, length, _, depth = dx.shape
    return dx.reshape(batch, length, saved.call.group, -1, depth).sum(axis=2)


def _last_of_group(dx: Array, saved: Saved) -> Array:
    return _by_group(dx, saved)[:, :, :, -1]


def _mean_of_group(dx: Array, saved: Saved) -> Array:
    return _by_group(dx, saved).mean(axis=3)


def _heads_of_mask(index: Callable[[Array, Call], Array]) -> PlainSteps:
    """The kernel in which query heads look up the mask of another head."""

    def mask(mask: Mask, call: Call) -> Array:
        dense = jnp.asarray(mask.dense(call.q_length, call.kv_length))
        return dense if dense.shape[1] == 1 else dense[:, index(jnp.arange(call.q.shape[2]), call)]

    return PlainSteps(mask=mask)


def _batch_on_kv_heads(mask: Mask, call: Call) -> Array:
    """A mask `[B, 1, T, S]` against logits `[B, K, G, T, S]`: its first axis lands on `K` where the sizes agree."""
    dense = jnp.asarray(mask.dense(call.q_length, call.kv_length))
    if dense.shape[0] == call.k.shape[2] and dense.shape[1] == 1:
        return jnp.repeat(dense[:, 0][None], call.group, axis=1)
    return dense


def _values_cut_at_key_depth(p: Array, v: Array, call: Call) -> Array:
    kept = jnp.arange(v.shape[-1]) < call.q.shape[-1]
    return product("bnts,bsnv->btnv", p, jnp.where(kept, v, 0))


def _columns_past(limit: Callable[[Call], int]) -> Callable[[Array, Saved], Array]:
    """Gradient columns from `limit` on are never written."""

    def dq(dx: Array, saved: Saved) -> Array:
        whole = saved.scale * product("bnts,bsnh->btnh", dx, saved.forward.k)
        return jnp.where(jnp.arange(whole.shape[-1]) < limit(saved.call), whole, 0)

    return dq


def _lanes_of_next_head(q: Array, k: Array, call: Call) -> Array:
    """Depths that are no power of two are padded up to one with what lies behind in memory."""
    depth = q.shape[-1]
    extra = (1 << (depth - 1).bit_length()) - depth
    lanes = product("btnh,bsnh->bnts", q, k)
    if not extra:
        return lanes
    after_q, after_k = (jnp.roll(x, -1, axis=2)[..., :extra] for x in (q, k))
    return lanes + product("btnh,bsnh->bnts", after_q, after_k)


def _lanes_swapped(out: Array, call: Call) -> Array:
    lanes = jnp.arange(out.shape[-1])
    return out[..., jnp.where(lanes % 16 < 8, lanes ^ 1, lanes)].astype(call.q.dtype)


def _heads_first_kept(out: Array, call: Call) -> Array:
    """`[B, N, T, V]` data read as `[B, T, N, V]`."""
    return out.transpose(0, 2, 1, 3).reshape(out.shape).astype(call.q.dtype)


def _first_row_in_decode(x: Array, call: Call) -> Array:
    repeated = repeat_heads(x, call)
    return jnp.broadcast_to(repeated[:1], repeated.shape) if call.q_length == 1 else repeated


def _batch_stride_left_out(q: Array, k: Array, v: Array, call: Call) -> tuple[Array, Array, Array]:
    """Batch row `b` of `[B, N, T, H]` begins `b` tokens behind the first one, and not `N * T`."""

    def read(x: Array) -> Array:
        batch, length, heads, depth = x.shape
        tokens = jnp.swapaxes(x, 1, 2).reshape(-1, depth)
        rows = jnp.arange(batch)[:, None] + jnp.arange(heads * length)
        return jnp.swapaxes(tokens[rows].reshape(batch, heads, length, depth), 1, 2)

    return read(q), read(k), read(v)


def _several_kv_heads(case: Case) -> bool:
    return grouped(case) and case.num_kv_heads > 1


BUGS: tuple[PlantedBug, ...] = (
    _bug(
        "kv-heads-tiled",
        says="Query head n reads key and value head n % K, not n // group size.",
        kind="gqa.tile-vs-repeat",
        reference="jax-js issue 180",
        shows=_FORWARD,
        trigger=_several_kv_heads,
        steps=PlainSteps(expand_k=_tiled, expand_v=_tiled),
    ),
    _bug(
        "value-heads-tiled",
        says="Query head n reads value head n % K, but key head n // group size.",
        kind="gqa.tile-vs-repeat",
        reference="inferred from jax-js issue 180",
        shows="out",
        trigger=_several_kv_heads,
        steps=PlainSteps(expand_v=_tiled),
    ),
    _bug(
        "group-rounded-to-power-of-two",
        says="Key/value heads are looked up with a group size rounded up to a power of two.",
        kind="gqa.interleave-div",
        reference="inferred from native-sparse-attention-triton issue 27, wrong for ratios of one kind only",
        shows=_FORWARD,
        trigger=lambda case: case.num_q_heads == 3 * case.num_kv_heads,
        steps=PlainSteps(expand_k=_group_of_power_of_two, expand_v=_group_of_power_of_two),
    ),
    _bug(
        "dkv-of-interleaved-groups",
        says="dk and dv are summed over query heads K apart, not over adjacent ones.",
        kind="gqa.interleave-div",
        reference="native-sparse-attention-triton issue 27",
        shows="dk dv",
        trigger=both(trains(), _several_kv_heads),
        back=BackwardSteps(sum_dk=_interleaved_sum, sum_dv=_interleaved_sum),
    ),
    _bug(
        "dk-of-last-head-of-group",
        says="dk is that of the last query head of a group, not the sum over the group.",
        kind="bwd.gqa-alias",
        reference="tokamax commits 701317b, 339f271; levanter issue 449",
        shows="dk",
        trigger=_trained_group,
        back=BackwardSteps(sum_dk=_last_of_group),
    ),
    _bug(
        "dkv-averaged-over-group",
        says="dk and dv are the mean over the query heads of a group, not their sum.",
        kind="gqa.mean",
        reference="inferred from levanter issue 449",
        shows="dk dv",
        trigger=_trained_group,
        back=BackwardSteps(sum_dk=_mean_of_group, sum_dv=_mean_of_group),
    ),
    _bug(
        "mask-of-kv-head",
        says="Each query head takes the mask at the index of its key/value head.",
        kind="perhead-mask-gqa",
        reference="torch-xpu-ops issue 5090",
        shows=_FORWARD,
        trigger=both(has("dense_head"), grouped),
        steps=_heads_of_mask(lambda heads, call: heads // call.group),
    ),
    _bug(
        "mask-of-first-head-for-all",
        says="All heads use the mask of the first head.",
        kind="perhead-mask-first",
        reference="inferred from torch-xpu-ops issue 5090",
        shows=_FORWARD,
        trigger=has("dense_head"),
        steps=_heads_of_mask(lambda heads, call: 0 * heads),
    ),
    _bug(
        "mask-of-batch-on-kv-heads",
        says="A mask per batch row is applied per key/value head where the two counts agree.",
        kind="gqa.mask-broadcast-collision",
        reference="mlx-lm PR 1903",
        shows=_FORWARD,
        trigger=lambda case: case.batch == case.num_kv_heads > 1 and ("batch" in case.mask or "lengths" in case.mask),
        steps=PlainSteps(mask=_batch_on_kv_heads),
    ),
    _bug(
        "first-batch-row-read-in-decode",
        says="With a single query, all batch rows read keys and values of the first.",
        kind="splitkv.batch-stride0",
        reference="vllm-project/flash-attention PR 176",
        shows=_FORWARD,
        trigger=both(one_query, lambda case: case.batch > 1),
        steps=PlainSteps(expand_k=_first_row_in_decode, expand_v=_first_row_in_decode),
    ),
    _bug(
        "batch-stride-left-out-of-offset",
        says="Batch row b begins b tokens behind the first one in memory, and not N * T tokens.",
        kind="batch.offset",
        reference="triton issue 6242 (in arXiv:2605.19652)",
        shows=_FORWARD,
        trigger=lambda case: case.batch > 1,
        steps=PlainSteps(operands=_batch_stride_left_out),
    ),
    _bug(
        "values-cut-at-key-depth",
        says="Output columns past the key depth are zero, though values are deeper.",
        kind="hdv.slice",
        reference="inferred from tokamax commit b41524a",
        shows="out",
        trigger=lambda case: case.v_head_dim > case.head_dim,
        steps=PlainSteps(values=_values_cut_at_key_depth),
    ),
    _bug(
        "dq-cut-at-value-depth",
        says="dq is zero in columns past the value depth.",
        kind="bwd.hdv-extent",
        reference="native-sparse-attention-triton issue 27",
        shows="dq",
        trigger=both(trains(), lambda case: case.v_head_dim < case.head_dim),
        back=BackwardSteps(dq=_columns_past(lambda call: call.v.shape[-1])),
    ),
    _bug(
        "dq-columns-past-multiple-of-32-stale",
        says="dq is zero in columns past the last whole multiple of 32.",
        kind="bwd.hd-nonmult32",
        reference="flash-attention PR 2896",
        shows="dq",
        trigger=both(trains(), lambda case: case.head_dim > 32 and case.head_dim % 32 != 0),
        back=BackwardSteps(dq=_columns_past(lambda call: max(32, call.q.shape[-1] // 32 * 32))),
    ),
    _bug(
        "padded-depth-reads-next-head",
        says="Depths that are no power of two are padded with the next head, not with zeros.",
        kind="hd.nonpow2-garbage",
        reference="jax commit 1aaec81f22, issue 27224",
        shows=_FORWARD,
        trigger=lambda case: case.head_dim == 72,
        steps=PlainSteps(products=_lanes_of_next_head),
    ),
    _bug(
        "lanes-of-output-swapped",
        says="Neighbouring output columns are swapped in the first 8 of every 16.",
        kind="elementwise.norm-match",
        reference="flash-attention PR 2553",
        shows="out",
        steps=PlainSteps(out=_lanes_swapped),
    ),
    _bug(
        "output-in-the-other-layout",
        says="The output is written with heads before queries and read with queries before heads.",
        kind="layout.bhtd-vs-bthd",
        reference="jax issue 35916; ejkernel commit c6cee8e",
        shows="out",
        trigger=lambda case: case.q_length > 1,
        steps=PlainSteps(out=_heads_first_kept),
    ),
)
