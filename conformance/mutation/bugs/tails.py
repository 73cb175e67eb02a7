"""Bugs of padding, lengths and memory: tails, block starts, first blocks, and places that nobody writes."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from conformance.mutation.kernels.block_triggers import (
    key_tail,
    kinds,
    query_tail,
    several_blocks,
)
from conformance.mutation.kernels.blockwise import planted
from conformance.mutation.kernels.layout import BLOCK_KV, BLOCK_Q, EMPTY, FULL, PARTIAL, Call
from conformance.mutation.kernels.steps import Outputs, Rows, Running
from conformance.mutation.planted_bug import PlantedBug

_bug = functools.partial(planted, family="blocks")
_SHOWS = ("out", "out_with_residuals", "logsumexp", "max_logits", "dq", "dk", "dv")
_WRAP = 512 // BLOCK_KV


def _full_tiles_unbounded(allowed: jax.Array, kind: jax.Array, in_range: jax.Array) -> jax.Array:
    return (kind == FULL) | (allowed & (kind == PARTIAL) & in_range)


def _clamped(blocks: jax.Array, call: Call, axis: int) -> jax.Array:
    """The last block starts early enough to end with the array, as a clamped dynamic slice does; keys are on `axis`."""
    if blocks.shape[0] < 2:
        return blocks
    padding = call.kv_blocks * BLOCK_KV - call.kv_length
    both = jnp.concatenate([blocks[-2], blocks[-1]], axis=axis - 1)
    last = jnp.take(both, jnp.arange(BLOCK_KV - padding, 2 * BLOCK_KV - padding), axis=axis - 1)
    return blocks.at[-1].set(last)


def _clamped_keys(blocks: jax.Array, call: Call) -> jax.Array:
    return _clamped(blocks, call, 3)


def _stale_last(blocks: jax.Array, call: Call) -> jax.Array:
    return blocks.at[-1].set(blocks[-2]) if blocks.shape[0] > 1 else blocks


def _wrapped(blocks: jax.Array, call: Call) -> jax.Array:
    return blocks[jnp.arange(blocks.shape[0]) % _WRAP]


def _without_boundary(rows: jax.Array, columns: jax.Array, call: Call) -> jax.Array:
    boundary = (columns % BLOCK_KV == 0) & (columns > 0)
    return (rows < call.q_length) & (columns < call.kv_length) & ~boundary


def _rows_of(kind: jax.Array) -> jax.Array:
    """`[b, k, g, q tiles]` by row."""
    return jnp.repeat(kind, BLOCK_Q, axis=-1)


def _start_where_first_is_empty(state: Running, kinds: jax.Array, garbage: float) -> Running:
    missed = _rows_of(kinds[0] == EMPTY)
    total = jnp.where(missed, garbage, state.total)
    acc = jnp.where(missed[..., None], garbage, state.acc)
    return Running(jnp.where(missed, 0.0, state.pivot), total, acc, state.top)


def _whole_tiles(rows: jax.Array, call: Call) -> jax.Array:
    return jnp.arange(rows.shape[3]) < call.q_length // BLOCK_Q * BLOCK_Q


def _tail_unstored(rows: Rows, kinds: jax.Array, call: Call) -> Rows:
    return rows._replace(out=jnp.where(_whole_tiles(rows.logsumexp, call)[:, None], rows.out, 0.0))


def _residual_tail_unstored(rows: Rows, kinds: jax.Array, call: Call) -> Rows:
    whole = _whole_tiles(rows.logsumexp, call)
    return rows._replace(logsumexp=jnp.where(whole, rows.logsumexp, 0.0))


def _without_logsumexp(outputs: Outputs) -> Outputs:
    return outputs._replace(logsumexp=jnp.zeros_like(outputs.logsumexp))


BUGS: tuple[PlantedBug, ...] = (
    _bug(
        name="tail-keys-attended",
        says="Padding after the last key takes part in the softmax.",
        kind="len.nonmultiple-gpu",
        reference="jax#27224",
        shows=_SHOWS,
        trigger=key_tail,
        in_range=lambda rows, columns, call: rows < call.q_length,
    ),
    _bug(
        name="tail-one-key-too-many",
        says="One padded key after the last key takes part in the softmax.",
        kind="I.ragged-mask-le",
        reference="inferred from maxtext 65e8bcff0",
        shows=_SHOWS,
        trigger=key_tail,
        in_range=lambda rows, columns, call: (rows < call.q_length) & (columns <= call.kv_length),
    ),
    _bug(
        name="tail-one-key-too-few",
        says="The last key is masked for all queries.",
        kind="I.ragged-mask-le",
        reference="inferred from maxtext 65e8bcff0",
        shows=_SHOWS,
        trigger=lambda case: case.mask == "full",
        in_range=lambda rows, columns, call: (rows < call.q_length) & (columns < call.kv_length - 1),
    ),
    _bug(
        name="tail-last-row-masked",
        says="The last query sees no key at all.",
        kind="pad.q8",
        reference="inferred from tokamax e1ab701",
        shows=_SHOWS,
        trigger=lambda case: True,
        in_range=lambda rows, columns, call: (rows < call.q_length - 1) & (columns < call.kv_length),
    ),
    _bug(
        name="tail-bounds-skipped-in-full-tiles",
        says="Tiles that the mask leaves whole are not cut at the last key, so padding takes part.",
        kind="kend.split-k-rank",
        reference="inferred from tokamax f896356",
        shows=_SHOWS,
        trigger=lambda case: key_tail(case) and bool((kinds(case)[..., -1] == FULL).any()),
        visible=_full_tiles_unbounded,
    ),
    _bug(
        name="block-count-from-query-length",
        says="The number of key blocks is computed from the query length.",
        kind="len.q-ne-kv",
        reference="jax bd9a10e4eb",
        shows=_SHOWS,
        trigger=lambda case: case.q_length < case.kv_length,
        count=lambda call: min(call.kv_blocks, -(-call.q_length // BLOCK_KV)),
    ),
    _bug(
        name="block-count-floored",
        says="The number of key blocks is rounded down, so the last keys are skipped.",
        kind="paged.floor-div",
        reference="maxtext 65e8bcff0",
        shows=_SHOWS,
        trigger=key_tail,
        count=lambda call: call.kv_length // BLOCK_KV,
    ),
    _bug(
        name="block-count-short-on-whole-blocks",
        says="The last key block is skipped, unless it is the only one.",
        kind="I.ragged-last-block",
        reference="inferred from maxtext 65e8bcff0",
        shows=_SHOWS,
        trigger=lambda case: case.kv_length % BLOCK_KV == 0,
        count=lambda call: max(1, (call.kv_length - 1) // BLOCK_KV),
    ),
    _bug(
        name="block-count-misses-tail-of-one-key",
        says="A last key block with a single key is skipped.",
        kind="I.ragged-last-block",
        reference="inferred from maxtext 65e8bcff0",
        shows=_SHOWS,
        trigger=lambda case: case.kv_length % BLOCK_KV == 1,
        count=lambda call: (call.kv_length + BLOCK_KV - 2) // BLOCK_KV,
    ),
    _bug(
        name="block-start-clamped-for-bias",
        says="The last block of the bias starts early to end with the array, which shifts its columns.",
        kind="alibi.boundary",
        reference="inferred from flash-attn PR 540",
        shows=("out", "out_with_residuals", "logsumexp", "max_logits", "dbias"),
        trigger=lambda case: key_tail(case) and several_blocks(case) and case.bias is not None,
        bias_blocks=lambda blocks, call: _clamped(blocks, call, 5),
    ),
    _bug(
        name="block-overlap-counted-twice",
        says="The last key block starts early to end with the array, so overlapping keys count twice.",
        kind="len.nonmultiple-gpu",
        reference="inferred from jax#27224",
        shows=_SHOWS,
        trigger=lambda case: key_tail(case) and several_blocks(case),
        key_blocks=_clamped_keys,
        value_blocks=_clamped_keys,
        mask_tiles=lambda tiles, kinds, call: _clamped(tiles, call, 6),
        in_range=lambda rows, columns, call: rows < call.q_length,
    ),
    _bug(
        name="block-values-stale-in-last-block",
        says="The last key block reads the values of the block before.",
        kind="race.dma-sem",
        reference="inferred from jax 0e690c1a88",
        shows=("out", "out_with_residuals"),
        trigger=several_blocks,
        value_blocks=_stale_last,
    ),
    _bug(
        name="block-offset-wraps-at-512",
        says="Offsets of keys and values wrap at 512, so later blocks read the first ones.",
        kind="int32.token-sharp",
        reference="inferred from fla#1080",
        shows=_SHOWS,
        trigger=lambda case: case.kv_length > 512,
        key_blocks=_wrapped,
        value_blocks=_wrapped,
    ),
    _bug(
        name="block-boundary-key-left-out",
        says="The first key of every block but the first is left out.",
        kind="I.chunk-boundary",
        reference="inferred from maxtext 8f82f2d02",
        shows=_SHOWS,
        trigger=several_blocks,
        in_range=_without_boundary,
    ),
    _bug(
        name="block-state-stale-where-first-block-is-empty",
        says="The running sums are not initialised if the first key block is fully masked.",
        kind="init.masked-store",
        reference="jax 08c2a36e28",
        shows=_SHOWS,
        trigger=lambda case: bool((kinds(case)[..., 0] == EMPTY).any()),
        start=lambda state, kinds: _start_where_first_is_empty(state, kinds, 0.5),
    ),
    _bug(
        name="tail-rows-unwritten",
        says="Output rows past the last whole tile of 32 queries are never written.",
        kind="pad.q8",
        reference="tokamax e1ab701",
        shows=("out", "out_with_residuals"),
        trigger=query_tail,
        store=_tail_unstored,
    ),
    _bug(
        name="tail-rows-of-logsumexp-unwritten",
        says="logsumexp past the last whole tile of 32 queries is never written.",
        kind="pad.q8",
        reference="tokamax 2a6963a",
        shows=("logsumexp",),
        trigger=query_tail,
        store=_residual_tail_unstored,
    ),
    _bug(
        name="block-values-behind-mask-read",
        says="Values that no query sees are read with weight zero in key blocks, so NaN spreads.",
        kind="nan.masked-v",
        reference="jax 11cf85deb0",
        shows=("out",),
        trigger=lambda case: bool((kinds(case) == EMPTY).all(axis=2).any()) or "dense" in case.mask,
        hide_v=lambda v, seen: v,
    ),
    _bug(
        name="block-logsumexp-written-in-training-only",
        says="logsumexp is written only if the call is differentiated, and is zero otherwise.",
        kind="lse.zeros",
        reference="attention-gym#37",
        shows=("logsumexp",),
        trigger=lambda case: True,
        undifferentiated=_without_logsumexp,
    ),
)
"""Bugs of padding, lengths and memory."""
