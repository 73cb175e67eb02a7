"""Bugs of the softmax's sums: their dtypes and units, the epilogue and the residuals."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from conformance.mutation.kernels.block_triggers import (
    always,
    empty_rows,
    rounds,
    several_blocks,
)
from conformance.mutation.kernels.blockwise import planted
from conformance.mutation.kernels.steps import Block, Running, keep, logits, product, to_bf16
from conformance.mutation.planted_bug import PlantedBug

_bug = functools.partial(planted, family="online softmax")
_OUT = ("out", "out_with_residuals", "logsumexp")
_LOG2E_SHORT = 1.4427


def _is_last(block: Block) -> jax.Array:
    return block.index == block.call.kv_blocks - 1


def _total_rounded(total: jax.Array, alpha: jax.Array, weights: jax.Array, block: Block) -> jax.Array:
    return (total * alpha + weights.sum(axis=-1)).astype(block.q.dtype).astype(jnp.float32)


def _total_of_rounded(total: jax.Array, alpha: jax.Array, weights: jax.Array, block: Block) -> jax.Array:
    return total * alpha + weights.astype(block.q.dtype).astype(jnp.float32).sum(axis=-1)


def _total_without_last(total: jax.Array, alpha: jax.Array, weights: jax.Array, block: Block) -> jax.Array:
    return total * alpha + jnp.where(_is_last(block) & (block.index > 0), 0.0, weights.sum(axis=-1))


def _update(weights: jax.Array, v: jax.Array) -> jax.Array:
    return product("bkgts,bksv->bkgtv", weights.astype(v.dtype), v)


def _acc_rounded(acc: jax.Array, alpha: jax.Array, weights: jax.Array, v: jax.Array, block: Block) -> jax.Array:
    return (acc * alpha[..., None] + _update(weights, v)).astype(v.dtype).astype(jnp.float32)


def _truncated(out: jax.Array, dtype: jnp.dtype) -> jax.Array:
    if dtype != jnp.bfloat16:
        return out.astype(dtype)
    bits = lax.bitcast_convert_type(out, jnp.uint32) & jnp.uint32(0xFFFF0000)
    return lax.bitcast_convert_type(bits, jnp.float32).astype(dtype)


def _logits_rounded(products: jax.Array, block: Block) -> tuple[jax.Array, jax.Array | float]:
    z, slope = logits(products, block)
    return z.astype(block.q.dtype).astype(jnp.float32), slope


def _normalised_in_block(state: Running, sinks: jax.Array | None, block: Block) -> Running:
    return state._replace(acc=state.acc / jnp.where(state.total == 0, 1, state.total)[..., None])


def _logsumexp_of_total(state: Running) -> jax.Array:
    return jnp.log(state.total)


def _logsumexp_zero(state: Running) -> jax.Array:
    empty = state.total == 0
    return jnp.where(empty, 0.0, state.pivot + jnp.log(jnp.where(empty, 1.0, state.total)))


BUGS: tuple[PlantedBug, ...] = (
    _bug(
        name="total-of-rounded-weights",
        says="The running denominator sums weights rounded to the input dtype.",
        kind="p.lowp-before-sum",
        reference="inferred from tokamax e98c877",
        shows=("logsumexp",),
        trigger=rounds,
        add_total=_total_of_rounded,
    ),
    _bug(
        name="total-in-input-dtype",
        says="The running denominator is rounded to the input dtype after every key block.",
        kind="precision.lowp-stats",
        reference="maxtext fbef426f5",
        shows=_OUT,
        trigger=rounds,
        add_total=_total_rounded,
    ),
    _bug(
        name="total-misses-last-block",
        says="The denominator leaves out the last of several key blocks.",
        kind="paged.floor-div",
        reference="inferred from maxtext 65e8bcff0",
        shows=_OUT,
        trigger=several_blocks,
        add_total=_total_without_last,
    ),
    _bug(
        name="acc-restarts-in-every-block",
        says="The output accumulator keeps the last key block only.",
        kind="I.alpha-missing",
        reference="inferred from TileOPs PR 1511",
        shows=("out",),
        trigger=several_blocks,
        add_weights=lambda acc, alpha, weights, v, block: _update(weights, v),
    ),
    _bug(
        name="acc-not-rescaled",
        says="The output accumulator is not rescaled when a key block raises the running maximum.",
        kind="I.alpha-missing",
        reference="gpuemu-corpus flash_attention_triton_buggy (arXiv:2606.20128)",
        shows=("out",),
        trigger=several_blocks,
        add_weights=lambda acc, alpha, weights, v, block: acc + _update(weights, v),
    ),
    _bug(
        name="acc-in-input-dtype",
        says="The output accumulator is rounded to the input dtype after every key block.",
        kind="splitkv.partial-dtype",
        reference="flash-attn PR 2336",
        shows=("out",),
        trigger=lambda case: rounds(case) and several_blocks(case),
        add_weights=_acc_rounded,
    ),
    _bug(
        name="out-truncated",
        says="The bf16 output is truncated, not rounded to the nearest value.",
        kind="accum.biased-rounding",
        reference="inferred from flash-attn#2151",
        shows=("out",),
        trigger=lambda case: case.dtype == "bf16",
        round_out=_truncated,
    ),
    _bug(
        name="block-logits-in-input-dtype",
        says="The logits of each key block are rounded to the input dtype.",
        kind="precision.lowp-stats",
        reference="maxtext fbef426f5",
        shows=("out", "logsumexp", "max_logits"),
        trigger=rounds,
        logits=_logits_rounded,
    ),
    _bug(
        name="weights-in-bf16",
        says="Weights are rounded to bf16 before they multiply f32 values.",
        kind="dtype.bwd-inconsistent",
        reference="inferred from jax d5e5b42de8",
        shows=("out",),
        trigger=lambda case: case.dtype == "f32",
        add_weights=lambda acc, alpha, weights, v, block: acc * alpha[..., None] + _update(to_bf16(weights), v),
    ),
    _bug(
        name="weights-base-2",
        says="Weights and rescaling factors of key blocks are powers of 2, not of e.",
        kind="lse.base2-into-merge",
        reference="inferred from sglang#40903",
        shows=_OUT,
        trigger=always,
        weights=lambda z, shift, block: jnp.exp2(z - shift[..., None]),
        alpha=lambda old, shift, block: jnp.exp2(old - shift),
    ),
    _bug(
        name="weights-by-short-log2e",
        says="The exponentials use exp2 with log2(e) rounded to 1.4427.",
        kind="softmax.exact-tie-input",
        reference="inferred from triton#5971",
        shows=_OUT,
        trigger=lambda case: case.dtype == "f32" and case.soft_cap is None and case.distribution in ("normal", "heavy"),
        weights=lambda z, shift, block: jnp.exp2((z - shift[..., None]) * _LOG2E_SHORT),
        alpha=lambda old, shift, block: jnp.exp2((old - shift) * _LOG2E_SHORT),
    ),
    _bug(
        name="block-logsumexp-without-pivot",
        says="logsumexp is the logarithm of the running sum, without the running maximum.",
        kind="lse.local-max",
        reference="flash-attn#404",
        shows=("logsumexp",),
        trigger=always,
        logsumexp=_logsumexp_of_total,
    ),
    _bug(
        name="block-logsumexp-zero-where-nothing-is-seen",
        says="logsumexp of rows without keys is 0, not -inf.",
        kind="lse.masked-row",
        reference="inferred from tokamax 5f2912e",
        shows=("logsumexp",),
        trigger=lambda case: empty_rows(case) and not case.sinks,
        logsumexp=_logsumexp_zero,
    ),
    _bug(
        name="block-max-logits-of-last-block",
        says="The returned maximum of the logits is that of the last key block.",
        kind="softmax.max-copy-paste",
        reference="inferred from pytorch PR 156379",
        shows=("max_logits",),
        trigger=several_blocks,
        top=lambda top, z, block: z.max(axis=-1),
    ),
    _bug(
        name="epilogue-reciprocal-in-bf16",
        says="The output is multiplied by a reciprocal of the denominator that is rounded to bf16.",
        kind="precision.lowp-stats",
        reference="inferred from maxtext fbef426f5",
        shows=("out",),
        trigger=lambda case: case.dtype != "bf16",
        normalise=lambda acc, total, call: acc * to_bf16(1 / jnp.where(total == 0, 1, total))[..., None],
    ),
    _bug(
        name="epilogue-in-every-block",
        says="The output is divided by the running denominator after every key block, not once at the end.",
        kind="I.l-vs-lse",
        reference="inferred from maxtext 211ec5efe",
        shows=("out",),
        trigger=several_blocks,
        between=_normalised_in_block,
        normalise=keep,
    ),
    _bug(
        name="epilogue-missing",
        says="The output is never divided by the denominator.",
        kind="decode.unnormalised",
        reference="maxtext 211ec5efe",
        shows=("out",),
        trigger=always,
        normalise=keep,
    ),
    _bug(
        name="epilogue-divides-without-guard",
        says="Rows without keys divide zero by zero, so their output is NaN.",
        kind="decode.pad-sample-len0",
        reference="HabanaAI vllm-fork#318",
        shows=("out",),
        trigger=lambda case: empty_rows(case) and not case.sinks,
        normalise=lambda acc, total, call: acc / total[..., None],
    ),
    _bug(
        name="epilogue-not-cast",
        says="The last step does not cast the accumulator, so 16-bit inputs give an f32 output.",
        kind="splitk.dtype",
        reference="tokamax 8a7432c",
        shows=("out",),
        trigger=rounds,
        round_out=keep,
    ),
)
"""Bugs of the softmax's sums."""
