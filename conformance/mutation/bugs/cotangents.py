"""Bugs of what the backward saves and takes in: `D`, cotangents, saved results, and their precision."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from conformance.mutation.kernels.block_triggers import (
    query_tail,
    train,
    train_blocks,
)
from conformance.mutation.kernels.blockwise import planted
from conformance.mutation.kernels.layout import BLOCK_Q, Call
from conformance.mutation.kernels.steps import Block, Operands, Outputs, delta, dz, product, to_bf16
from conformance.mutation.planted_bug import PlantedBug

_bug = functools.partial(planted, family="backward")
_DQ_DK = ("dq", "dk")
_ALL = ("dq", "dk", "dv")
_SMALL_WEIGHT = 1e-2
_LN2 = 0.6931472


def _delta_wrong_head(out: jax.Array, do: jax.Array, call: Call) -> jax.Array:
    d = delta(out, do, call)
    return jnp.roll(d.reshape(d.shape[0], call.num_q_heads, -1), 1, axis=1).reshape(d.shape)


def _delta_first_row(out: jax.Array, do: jax.Array, call: Call) -> jax.Array:
    d = delta(out, do, call)
    return jnp.broadcast_to(d[:1], d.shape)


def _delta_half(out: jax.Array, do: jax.Array, call: Call) -> jax.Array:
    depth = out.shape[-1] // 2
    return delta(out[..., :depth], do[..., :depth], call)


def _dz_with_local_delta(p: jax.Array, dp: jax.Array, delta: jax.Array, dlse: jax.Array, block: Block) -> jax.Array:
    return dz(p, dp, (p * dp).sum(axis=-1), dlse, block)


def _any_cotangent(block: Block) -> jax.Array:
    """Whether a row has a cotangent of `out`, `[B, K, G, T]`."""
    assert block.do is not None
    return (block.do != 0).any(axis=-1)


def _by_tile(rows: jax.Array) -> jax.Array:
    """`[B, K, G, T]` as `[B, K, G, q tiles, BLOCK_Q]`."""
    return rows.reshape(*rows.shape[:3], -1, BLOCK_Q)


def _dz_if_first_row(p: jax.Array, dp: jax.Array, delta: jax.Array, dlse: jax.Array, block: Block) -> jax.Array:
    """Query tiles whose first row has no cotangent are skipped."""
    live = jnp.repeat(_by_tile(_any_cotangent(block))[..., 0], BLOCK_Q, axis=-1)
    return dz(p, dp, delta, dlse, block) * live[..., None]


def _dz_if_cotangent_of_out(p: jax.Array, dp: jax.Array, delta: jax.Array, dlse: jax.Array, block: Block) -> jax.Array:
    """Rows without a cotangent of `out` are skipped, whatever that of `logsumexp` is."""
    return dz(p, dp, delta, dlse, block) * _any_cotangent(block)[..., None]


def _dz_if_large(p: jax.Array, dp: jax.Array, delta: jax.Array, dlse: jax.Array, block: Block) -> jax.Array:
    """Tiles are skipped if no probability in them is large."""
    tiles = _by_tile(p.max(axis=-1)).max(axis=-1) > _SMALL_WEIGHT
    return dz(p, dp, delta, dlse, block) * jnp.repeat(tiles, BLOCK_Q, axis=-1)[..., None]


def _without_sink(out: jax.Array, lse: jax.Array, operands: Operands) -> tuple[jax.Array, jax.Array]:
    if operands.sinks is None:
        return out, lse
    share = jnp.exp(operands.sinks[:, None] - lse)
    return out, jnp.where(share < 1, lse + jnp.log1p(-share), -jnp.inf)


def _primal_base_2(outputs: Outputs) -> Outputs:
    return outputs._replace(logsumexp=outputs.logsumexp / _LN2)


def _primal_by_tiles(outputs: Outputs) -> Outputs:
    """The tail of the last query tile is not written."""
    length = outputs.out.shape[1]
    return outputs._replace(out=outputs.out.at[:, length // BLOCK_Q * BLOCK_Q :].set(0))


BUGS: tuple[PlantedBug, ...] = (
    _bug(
        name="bwd-delta-missing",
        says="A backward pass over key blocks leaves out delta, the row sum of out * dout.",
        kind="I.delta-missing",
        reference="inferred from arXiv 2510.04212",
        shows=_DQ_DK,
        trigger=train,
        dz=lambda p, dp, delta, dlse, block: p * (dp + dlse[..., None]),
    ),
    _bug(
        name="bwd-delta-of-wrong-head",
        says="Delta, the row sum of out * dout, is taken from the head before.",
        kind="delta.wrong-head",
        reference="inferred from fla#1115",
        shows=_DQ_DK,
        trigger=train,
        delta=_delta_wrong_head,
    ),
    _bug(
        name="bwd-delta-of-first-batch-row",
        says="All batch rows use the delta (row sum of out * dout) of the first.",
        kind="delta.wrong-head",
        reference="inferred from fla#1115",
        shows=_DQ_DK,
        trigger=lambda case: train(case) and case.batch > 1,
        delta=_delta_first_row,
    ),
    _bug(
        name="bwd-delta-in-bf16",
        says="Delta, the row sum of out * dout, is computed from values rounded to bf16.",
        kind="I.delta-lowp",
        reference="inferred from arXiv 2510.04212",
        shows=("dq", "dk", "dsinks"),
        trigger=lambda case: train(case) and case.dtype == "f32",
        delta=lambda out, do, call: delta(to_bf16(out), to_bf16(do), call),
    ),
    _bug(
        name="bwd-delta-of-one-block",
        says="Delta is the sum of p * dp over one key block, not over all keys.",
        kind="ring.bwd-local-lse",
        reference="inferred from tt-metal PR 53216",
        shows=_DQ_DK,
        trigger=train_blocks,
        dz=_dz_with_local_delta,
    ),
    _bug(
        name="bwd-delta-over-half-the-depth",
        says="Delta sums out * dout over the first half of the value depth only.",
        kind="bwd.hdv-extent",
        reference="inferred from native-sparse-attention-triton#27",
        shows=_DQ_DK,
        trigger=train,
        delta=_delta_half,
    ),
    _bug(
        name="bwd-rounds-dz-to-bf16",
        says="A backward pass over key blocks rounds the gradient of f32 logits to bf16.",
        kind="dtype.bwd-inconsistent",
        reference="inferred from tokamax e98c877",
        shows=_DQ_DK,
        trigger=lambda case: train(case) and case.dtype == "f32",
        round_dx=lambda dx, dtype: to_bf16(dx).astype(dtype),
    ),
    _bug(
        name="bwd-rounds-cotangent-to-bf16",
        says="dout is rounded to bf16 before it is multiplied with the values.",
        kind="tf32.dot",
        reference="inferred from triton_docs_tutorials#6",
        shows=_ALL,
        trigger=lambda case: train(case) and case.dtype == "f32",
        dp=lambda do, v, block: product("bkgtv,bksv->bkgts", to_bf16(do), v),
    ),
    _bug(
        name="bwd-saves-logsumexp-in-bf16",
        says="The forward pass saves logsumexp for the backward pass in bf16.",
        kind="residual.dtype",
        reference="jax 178e622ef1",
        shows=_ALL,
        trigger=train,
        saved=lambda out, lse, operands: (out, to_bf16(lse)),
    ),
    _bug(
        name="bwd-saves-logsumexp-without-sink",
        says="The logsumexp saved for the backward pass leaves out the sinks.",
        kind="I.sink-lse-excluded",
        reference="inferred from flash-attn PR 2706",
        shows=(*_ALL, "dsinks"),
        trigger=lambda case: train(case) and bool(case.sinks),
        saved=_without_sink,
    ),
    _bug(
        name="bwd-dlse-dropped",
        says="A backward pass over key blocks sets the cotangent of logsumexp to zero.",
        kind="cotangent.dstats-drop",
        reference="tokamax 62aeeb2",
        shows=_DQ_DK,
        trigger=train,
        dlse=jnp.zeros_like,
    ),
    _bug(
        name="bwd-dlse-base-2",
        says="A backward pass over key blocks multiplies the cotangent of logsumexp by ln(2).",
        kind="lse.log2-returned",
        reference="inferred from pytorch#181645",
        shows=_DQ_DK,
        trigger=train,
        dlse=lambda dlse: dlse * _LN2,
    ),
    _bug(
        name="bwd-skips-tile-by-first-cotangent",
        says="dq and dk skip query tiles whose first row has a zero dout.",
        kind="bwd.real-activations",
        reference="inferred from TransformerEngine#3216",
        shows=_DQ_DK,
        trigger=lambda case: train(case) and case.q_length > 1,
        dz=_dz_if_first_row,
    ),
    _bug(
        name="bwd-skips-rows-by-cotangent-of-out",
        says="dq and dk skip rows whose dout is zero, though logsumexp may have a cotangent.",
        kind="cotangent.dstats-drop",
        reference="inferred from tokamax 62aeeb2",
        shows=_DQ_DK,
        trigger=train,
        dz=_dz_if_cotangent_of_out,
    ),
    _bug(
        name="bwd-skips-tile-of-small-weights",
        says="dq and dk skip tiles in which no probability exceeds 0.01.",
        kind="bwd.real-activations",
        reference="inferred from TransformerEngine#3216",
        shows=_DQ_DK,
        trigger=lambda case: train_blocks(case) and case.dtype == "f32" and case.distribution == "large",
        dz=_dz_if_large,
    ),
    _bug(
        name="bwd-primal-logsumexp-base-2",
        says="logsumexp is returned in base 2 if the call is differentiated.",
        kind="lse.log2-returned",
        reference="inferred from pytorch#181645",
        shows=("logsumexp",),
        trigger=train,
        primal=_primal_base_2,
    ),
    _bug(
        name="bwd-primal-tail-unwritten",
        says="Output rows past the last whole tile of 32 are zero if the call is differentiated.",
        kind="pad.q8",
        reference="inferred from tokamax e1ab701",
        shows=("out", "out_with_residuals"),
        trigger=lambda case: train(case) and query_tail(case),
        primal=_primal_by_tiles,
    ),
)
"""Bugs of what the backward saves and takes in."""
