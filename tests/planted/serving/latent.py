"""Bugs of latent attention in its absorbed form: what of a latent is read, by what it is scaled, and its gradient."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from conformance.mutation.kernels.triggers import both
from tests.bank import PlantedBug
from tests.planted.planting.latent import LatentSteps, bug, in_pages, turned
from tests.planted.planting.served import Call, PagedSteps
from tests.planted.serving.paged_softmax import narrow_splits

Array = jax.Array
_HEADS = 64


def _paged(**steps: Any) -> LatentSteps:
    return LatentSteps(pages=PagedSteps(**steps))


def _in_order_of_memory(slot: Array, call: Call) -> Array:
    assert call.page_indices is not None
    return call.page_indices[:, :1] + slot


def _first_heads_again(out: Array, call: Call) -> Array:
    """Heads beyond those of one block are those of the first."""
    del call
    return out[:, jnp.arange(out.shape[1]) % _HEADS]


def _without_rotary_part(latent: Array, value_dim: int) -> Array:
    return latent.at[..., value_dim:].set(0)


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
        "latent-rotary-part-left-out-of-logits",
        LatentSteps(keys=_without_rotary_part),
        kind="latent read",
        reference="inferred from kernels that take q_nope and q_pe apart and add two products",
        trigger=both(in_pages, turned),
    ),
    bug(
        "latent-scale-by-its-own-width",
        LatentSteps(scale=lambda scale, depth, value_dim: depth**-0.5),
        kind="latent scale",
        reference="inferred from kernels whose default scale goes by the depth of q",
    ),
    bug(
        "latent-pages-in-order-of-memory",
        _paged(pages=_in_order_of_memory),
        kind="latent pages",
        reference="flashinfer-ai/flashinfer#3219, where results depend on where pages lie",
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
