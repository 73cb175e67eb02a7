"""Bugs of latent attention in its absorbed form: what of a latent is read, by what it is scaled, and its gradient."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from tests.bank import PlantedBug
from tests.planted.planting.latent import LatentSteps, bug, in_pages, trained, turned
from tests.planted.planting.served import Call, PagedSteps
from tests.planted.planting.triggers import both
from tests.planted.serving.paged_softmax import narrow_splits

Array = jax.Array
_LANES = 64
_HEADS = 64


def _paged(**steps: Any) -> LatentSteps:
    return LatentSteps(pages=PagedSteps(**steps))


def _in_order_of_memory(slot: Array, call: Call) -> Array:
    assert call.page_indices is not None
    return call.page_indices[:, :1] + slot


def _rows_as_heads(x: Array, count: int) -> Array:
    """A page of one head is taken for one of `count` heads: each head has a row of its own."""
    j = jnp.arange(x.shape[1])[:, None] // count * count + jnp.arange(count)
    return x[:, jnp.minimum(j, x.shape[1] - 1), 0]


def _first_heads_again(out: Array, call: Call) -> Array:
    """Heads beyond those of one block are those of the first."""
    del call
    return out[:, jnp.arange(out.shape[1]) % _HEADS]


def _whole_lanes(latent: Array, value_dim: int) -> Array:
    """Products over whole blocks of lanes: what is left of the depth behind them is not added."""
    del value_dim
    depth = jnp.arange(latent.shape[-1])
    return jnp.where(depth < max(latent.shape[-1] // _LANES, 1) * _LANES, latent, 0)


def _without_rotary_part(latent: Array, value_dim: int) -> Array:
    return latent.at[..., value_dim:].set(0)


def _split(first: bool, latent: Array, value_dim: int) -> Array:
    """The latent, of which the first coordinates or those behind them pass no gradient."""
    parts = latent[..., :value_dim], latent[..., value_dim:]
    kept = [stop_gradient(part) if (n == 0) is first else part for n, part in enumerate(parts)]
    return jnp.concatenate(kept, axis=-1)


@jax.custom_vjp
def _values_pulled_to_the_end(latent: Array, like: Array) -> Array:
    return latent[..., : like.shape[-1]]


_values_pulled_to_the_end.defvjp(
    lambda latent, like: (latent[..., : like.shape[-1]], latent),
    lambda latent, dv: (jnp.zeros_like(latent).at[..., latent.shape[-1] - dv.shape[-1] :].set(dv), None),
)


@jax.custom_vjp
def _halved(latent: Array) -> Array:
    """The latent, whose gradient is a mean over two ranks where it must be their sum."""
    return latent


_halved.defvjp(lambda latent: (latent, None), lambda _, pulled: (pulled / 2,))


BUGS: tuple[PlantedBug, ...] = (
    bug(
        "latent-splits-rounded-before-they-are-merged",
        _paged(attend=functools.partial(narrow_splits, True)),
        kind="splitkv.partial-dtype",
        reference="flash-attn PR 2336, over latents",
        shows="out",
        trigger=lambda case: in_pages(case) and case.dtype != "f32",
    ),
    bug(
        "latent-values-from-its-end",
        LatentSteps(values=lambda latent, value_dim: latent[..., latent.shape[-1] - value_dim :]),
        kind="latent read",
        reference="inferred from kernels that keep the rotary part first and slice values behind it",
        shows="out",
        trigger=both(in_pages, turned),
    ),
    bug(
        "latent-queries-with-the-rotary-part-first",
        LatentSteps(queries=lambda q, value_dim: jnp.roll(q, q.shape[-1] - value_dim, axis=-1)),
        kind="latent read",
        reference="inferred from kernels that take q_pe before q_nope where the cache has them the other way round",
        trigger=both(in_pages, turned),
    ),
    bug(
        "latent-rotary-part-left-out-of-logits",
        LatentSteps(keys=_without_rotary_part),
        kind="latent read",
        reference="inferred from kernels that take q_nope and q_pe apart and add two products",
        trigger=both(in_pages, turned),
    ),
    bug(
        "latent-depth-in-whole-blocks-of-lanes",
        LatentSteps(keys=_whole_lanes),
        kind="latent read",
        reference="sgl-project/sglang#15522, where a block lies over the border of latent and rotary part",
        trigger=both(in_pages, lambda case: case.head_dim % _LANES > 0 and case.head_dim > _LANES),
    ),
    bug(
        "latent-values-behind-the-length-not-cleared",
        _paged(clean_values=lambda x, seen: x),
        kind="latent read",
        reference="flashinfer-ai/flashinfer#942, where NaN in other rows of a page reaches out",
        shows="out",
    ),
    bug(
        "latent-scale-by-its-own-width",
        LatentSteps(scale=lambda scale, depth, value_dim: depth**-0.5),
        kind="latent scale",
        reference="inferred from kernels whose default scale goes by the depth of q",
    ),
    bug(
        "latent-scale-by-its-rank",
        LatentSteps(scale=lambda scale, depth, value_dim: value_dim**-0.5),
        kind="latent scale",
        reference="inferred from NVIDIA/Megatron-LM#1429, where the scale of latent attention is another",
    ),
    bug(
        "latent-pages-in-order-of-memory",
        _paged(pages=_in_order_of_memory),
        kind="latent pages",
        reference="flashinfer-ai/flashinfer#3219, where results depend on where pages lie",
    ),
    bug(
        "latent-rows-taken-as-heads",
        _paged(heads=_rows_as_heads),
        kind="latent pages",
        reference="inferred from caches with an axis of heads, of which a latent has one: as if K were N",
        trigger=both(in_pages, lambda case: case.num_q_heads > 1),
    ),
    bug(
        "latent-heads-beyond-64-are-the-first-again",
        _paged(output=_first_heads_again),
        kind="latent pages",
        reference="inferred from kernels that take 64 heads a block, asked for the 128 of DeepSeek V3",
        shows="out",
        trigger=both(in_pages, lambda case: case.num_q_heads > _HEADS),
    ),
    bug(
        "latent-tokens-of-a-step-see-one-another",
        _paged(causal=lambda j, position: jnp.ones((len(position), len(j)), bool)),
        kind="latent pages",
        reference="inferred from decode kernels for one query that are given several, as speculative decoding does",
        trigger=both(in_pages, lambda case: case.q_length > 1),
    ),
    bug(
        "latent-gradient-without-that-of-values",
        LatentSteps(values=lambda latent, value_dim: stop_gradient(latent)[..., :value_dim]),
        kind="latent gradient",
        reference="inferred from kernels with dk and dv of their own where both are one tensor",
        shows="dk",
    ),
    bug(
        "latent-gradient-of-values-written-over-that-of-keys",
        LatentSteps(keys=lambda latent, value_dim: _split(True, latent, value_dim)),
        kind="latent gradient",
        reference="inferred from kernels that store dv into the first columns of dk",
        shows="dk",
    ),
    bug(
        "latent-gradient-of-values-in-its-last-coordinates",
        LatentSteps(
            values=lambda latent, value_dim: _values_pulled_to_the_end(latent, jnp.zeros(value_dim, latent.dtype))
        ),
        kind="latent gradient",
        reference="inferred from padding that is put in front of dv and not behind it",
        shows="dk",
        trigger=both(trained, turned),
    ),
    bug(
        "latent-gradient-without-the-rotary-part",
        LatentSteps(keys=lambda latent, value_dim: _split(False, latent, value_dim)),
        kind="latent gradient",
        reference="inferred from backward kernels whose tile of dk is as deep as that of v",
        shows="dk",
        trigger=both(trained, turned),
    ),
    bug(
        "latent-gradient-a-mean-over-two",
        LatentSteps(
            keys=lambda latent, value_dim: _halved(latent),
            values=lambda latent, value_dim: _halved(latent)[..., :value_dim],
        ),
        kind="latent gradient",
        reference="inferred from gradients of what all heads share, averaged over ranks that hold some of the heads",
        shows="dk",
    ),
)
