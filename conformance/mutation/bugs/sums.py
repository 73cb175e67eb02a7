"""Bugs of the sums into dq, dk and dv: over blocks and groups, with the scale, and where they are stored."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from conformance.mutation.kernels.block_triggers import (
    dead_block,
    empty_rows,
    grouped,
    key_tail,
    rounds,
    train,
    train_blocks,
)
from conformance.mutation.kernels.blockwise import planted
from conformance.mutation.kernels.layout import BLOCK_KV, BLOCK_Q, EMPTY, PARTIAL, Call
from conformance.mutation.kernels.steps import Block, Gradients, product
from conformance.mutation.planted_bug import PlantedBug

_bug = functools.partial(planted, family="backward")
# Reduction steps of dq in the bug that bounds them.
_STEPS = 3

_LANES = 32


def _twice_first(x: jax.Array) -> jax.Array:
    return x.sum(axis=2) + (x[:, :, 0] if x.shape[2] > 1 else 0)


def _interleaved(x: jax.Array, call: Call) -> jax.Array:
    """Query heads as `[G, K]`, where `[K, G]` is meant, and `T` padded."""
    x = jnp.pad(x, [(0, 0), (0, -x.shape[1] % BLOCK_Q), (0, 0), (0, 0)])
    return x.reshape(*x.shape[:2], call.group, call.num_kv_heads, -1).transpose(0, 3, 2, 1, 4)


def _last_tile(x: jax.Array, block: Block) -> jax.Array:
    """Only the rows `[B, K, G, T, ...]` of the last query tile."""
    return jnp.where(block.rows // BLOCK_Q == (block.call.q_length - 1) // BLOCK_Q, x, 0)


def _from_diagonal(x: jax.Array, block: Block) -> jax.Array:
    """Only rows from the query tile on at which a square causal mask lets the key block in."""
    return jnp.where(block.rows >= block.index * BLOCK_KV, x, 0)


def _dk(dx: jax.Array, q: jax.Array) -> jax.Array:
    return product("bkgts,bkgth->bkgsh", dx, q)


def _dv(p: jax.Array, do: jax.Array) -> jax.Array:
    return product("bkgts,bkgtv->bkgsv", p.astype(do.dtype), do)


def _dq_without_diagonal(dq: jax.Array, update: jax.Array, block: Block) -> jax.Array:
    """Partial tiles that the floored upper bound of a causal loop leaves out."""
    tile = block.rows // BLOCK_Q
    beyond = block.index >= (tile + 1) * BLOCK_Q // BLOCK_KV
    return dq + jnp.where((block.kind_by_row == PARTIAL) & beyond, 0, update)


def _dq_few_steps(dq: jax.Array, update: jax.Array, block: Block) -> jax.Array:
    return dq + jnp.where(block.index < _STEPS, update, 0)


def _dq_rounded(dq: jax.Array, update: jax.Array, block: Block) -> jax.Array:
    return (dq + update).astype(block.q.dtype).astype(jnp.float32)


Tile = tuple[jax.Array, jax.Array]


def _unvisited(tile: Tile, block: Block, garbage: float) -> Tile:
    """Key blocks that no query tile visits keep what was in memory."""
    dead = (block.kind == EMPTY).all(axis=(2, 3))[..., None, None]
    return jnp.where(dead, garbage, tile[0]), jnp.where(dead, garbage, tile[1])


def _other_place(tile: Tile, block: Block) -> Tile:
    """Past key 512 the offset wraps, and what is stored there is lost."""
    lost = block.index * BLOCK_KV >= 512
    return jnp.where(lost, 0, tile[0]), jnp.where(lost, 0, tile[1])


def _empty_tiles_unwritten(found: Gradients, kinds: jax.Array, call: Call) -> Gradients:
    dead = jnp.repeat((kinds == EMPTY).all(axis=0), BLOCK_Q, axis=-1)[..., : call.q_length]
    heads = dead.shape[1] * dead.shape[2]
    dead = dead.reshape(dead.shape[0], heads, -1).transpose(0, 2, 1)[..., None]
    return found._replace(q=jnp.where(dead, jnp.nan, found.q))


def _tail_keys_unwritten(found: Gradients, kinds: jax.Array, call: Call) -> Gradients:
    whole = (jnp.arange(call.kv_length) < call.kv_length // BLOCK_KV * BLOCK_KV)[:, None, None]
    return found._replace(k=jnp.where(whole, found.k, 0), v=jnp.where(whole, found.v, 0))


def _bleeding(found: Gradients, kinds: jax.Array, call: Call) -> Gradients:
    """The padding of a head is stored over the first keys of the next."""
    padding = call.kv_blocks * BLOCK_KV - call.kv_length
    return found._replace(v=found.v.at[:, :padding, 1:].set(0))


def _whole_lanes(x: jax.Array) -> jax.Array:
    depth = max(_LANES, x.shape[-1] // _LANES * _LANES)
    return x.at[..., depth:].set(0)


BUGS: tuple[PlantedBug, ...] = (
    _bug(
        name="bwd-dq-scale-missing",
        says="dq is not multiplied by the scale.",
        kind="I.dk-scale",
        reference="inferred from flash-attn PR 2657",
        shows=("dq",),
        trigger=train,
        scale_dq=lambda dq, call: dq,
    ),
    _bug(
        name="bwd-dq-scale-twice",
        says="A backward pass over key blocks multiplies dq by the scale twice.",
        kind="scale.dq-twice",
        reference="inferred from jax 916e53a8a2",
        shows=("dq",),
        trigger=train,
        scale_dq=lambda dq, call: dq * call.scale * call.scale,
    ),
    _bug(
        name="bwd-dk-scale-missing",
        says="dk is not multiplied by the scale.",
        kind="bwd.sm120-scale-none",
        reference="flash-attn PR 2657",
        shows=("dk",),
        trigger=train,
        scale_dk=lambda dk, call: dk,
    ),
    _bug(
        name="bwd-dq-of-last-block-only",
        says="dq keeps the part of the last key block only.",
        kind="bwd.dq-steps",
        reference="inferred from tokamax 602c79a",
        shows=("dq",),
        trigger=train_blocks,
        add_dq=lambda dq, update, block: update,
    ),
    _bug(
        name="bwd-dq-partial-sums-lost",
        says="dq is summed over the first three key blocks only.",
        kind="bwd.dq-steps",
        reference="tokamax 602c79a",
        shows=("dq",),
        trigger=lambda case: train(case) and case.kv_length > _STEPS * BLOCK_KV,
        add_dq=_dq_few_steps,
    ),
    _bug(
        name="bwd-dq-without-diagonal-tiles",
        says="dq leaves out partly masked tiles past a diagonal bound that is rounded down.",
        kind="causal.ub-floor",
        reference="jax b8b9f2bc33",
        shows=("dq",),
        trigger=lambda case: train(case) and "causal" in case.mask,
        add_dq=_dq_without_diagonal,
    ),
    _bug(
        name="bwd-dq-in-input-dtype",
        says="The sum of dq over key blocks is rounded to the input dtype after each block.",
        kind="cp.bf16-partials",
        reference="inferred from ring-flash-attention#42",
        shows=("dq",),
        trigger=lambda case: train_blocks(case) and rounds(case),
        add_dq=_dq_rounded,
    ),
    _bug(
        name="bwd-dq-of-empty-tiles-unwritten",
        says="dq of query tiles without keys is never written.",
        kind="bwd.init-loop-empty",
        reference="tokamax d318ef7",
        shows=("dq",),
        trigger=lambda case: train(case) and empty_rows(case),
        gradients=_empty_tiles_unwritten,
    ),
    _bug(
        name="bwd-dq-past-whole-lanes-stale",
        says="A backward pass over key blocks leaves columns of dq past a multiple of 32 at zero.",
        kind="bwd.hd-nonmult32",
        reference="flash-attn PR 2896",
        shows=("dq",),
        trigger=lambda case: train(case) and case.head_dim % _LANES != 0 and case.head_dim > _LANES,
        gradients=lambda found, kinds, call: found._replace(q=_whole_lanes(found.q)),
    ),
    _bug(
        name="bwd-dp-by-key-depth",
        says="The product of dout and values stops at the key depth, though values are deeper.",
        kind="bwd.hdv-extent",
        reference="native-sparse-attention-triton#27",
        shows=("dq", "dk"),
        trigger=lambda case: train(case) and case.v_head_dim > case.head_dim,
        dp=lambda do, v, block: product("bkgtv,bksv->bkgts", do[..., : block.k.shape[-1]], v[..., : block.k.shape[-1]]),
    ),
    _bug(
        name="bwd-dv-unnormalised",
        says="A backward pass over key blocks computes dv from weights relative to the block maximum.",
        kind="I.dv-unnormalised",
        reference="inferred from maxtext 211ec5efe",
        shows=("dv",),
        trigger=train,
        dv=lambda p, do, z, block: _dv(jnp.exp(z - jnp.maximum(z.max(axis=-1, keepdims=True), -1e30)), do),
    ),
    _bug(
        name="bwd-group-first-head-twice",
        says="The first query head of a group enters dk and dv twice.",
        kind="bwd.gqa-alias",
        reference="tokamax 339f271",
        shows=("dk", "dv"),
        trigger=grouped,
        group_sum=_twice_first,
    ),
    _bug(
        name="bwd-group-mean",
        says="A backward pass over key blocks averages dk and dv over the group, where it must sum.",
        kind="gqa.mean",
        reference="inferred from levanter#449",
        shows=("dk", "dv"),
        trigger=grouped,
        group_sum=lambda x: x.mean(axis=2),
    ),
    _bug(
        name="bwd-group-interleaved-cotangent",
        says="The backward pass reads dout with the axes of groups and key/value heads swapped.",
        kind="gqa.interleave-div",
        reference="native-sparse-attention-triton#27",
        shows=("dq", "dk", "dv"),
        trigger=lambda case: grouped(case) and case.num_kv_heads > 1,
        split_do=_interleaved,
    ),
    _bug(
        name="bwd-dkv-of-last-query-tile-only",
        says="dk and dv are summed over the last query tile only.",
        kind="I.gqa-last-only",
        reference="inferred from tokamax 701317b",
        shows=("dk", "dv"),
        trigger=lambda case: train(case) and case.q_length > BLOCK_Q,
        dk=lambda dx, q, block: _dk(_last_tile(dx, block), q),
        dv=lambda p, do, z, block: _dv(_last_tile(p, block), do),
    ),
    _bug(
        name="bwd-dkv-loop-starts-at-diagonal",
        says="The loop of dk and dv over queries starts at the diagonal, whatever the mask is.",
        kind="bwd.causal-square-align",
        reference="ffpa-attn PR 300",
        shows=("dk", "dv"),
        trigger=train_blocks,
        dk=lambda dx, q, block: _dk(_from_diagonal(dx, block), q),
        dv=lambda p, do, z, block: _dv(_from_diagonal(p, block), do),
    ),
    _bug(
        name="bwd-dkv-of-unvisited-block-nan",
        says="dk and dv of key blocks that no query visits are never written.",
        kind="bwd.empty-kv-tile",
        reference="tokamax 21fcf2b",
        shows=("dk", "dv"),
        trigger=lambda case: train(case) and dead_block(case),
        write=lambda tile, block: _unvisited(tile, block, float("nan")),
    ),
    _bug(
        name="bwd-dkv-past-512-lost",
        says="dk and dv of keys from 512 on are lost and stay zero.",
        kind="int32.batch",
        reference="inferred from flash-attn PR 1500",
        shows=("dk", "dv"),
        trigger=lambda case: train(case) and case.kv_length > 512,
        write=_other_place,
    ),
    _bug(
        name="bwd-dkv-tail-unwritten",
        says="dk and dv are zero past the last whole block of 64 keys.",
        kind="varlen.trailing-uninit",
        reference="inferred from pytorch#176793",
        shows=("dk", "dv"),
        trigger=lambda case: train(case) and key_tail(case),
        gradients=_tail_keys_unwritten,
    ),
    _bug(
        name="bwd-dv-tail-bleeds-into-next-head",
        says="The padding of one head of dv overwrites the first keys of the next head with zeros.",
        kind="bwd.offset-nonpow2",
        reference="FlagGems PR 898",
        shows=("dv",),
        trigger=lambda case: train(case) and key_tail(case) and case.num_kv_heads > 1,
        gradients=_bleeding,
    ),
)
"""Bugs of the sums into dq, dk and dv."""
