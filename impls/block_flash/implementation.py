"""Declare block-sparse flash attention as implementations to judge: over dense, packed and latent operands."""

from __future__ import annotations

import functools

from impls.block_flash.attention import attention, latent_attention
from impls.block_flash.block_flash_packed import packed_attention
from impls.block_flash.block_sizes import build_tunable
from impls.contract.declarations import Arithmetic
from impls.contract.implementation import Implementation

# Queries and keys per block of the variants. Neither size divides the other or the usual lengths.
_VARIANT_BLOCKS = ((32, 48), (80, 24))


def build_implementation(name: str, *, block_q: int | None = None, block_kv: int | None = None) -> Implementation:
    """Declare block flash attention under `name`, by default with the block sizes of the table."""
    blocks = "tuned blocks" if block_q is None or block_kv is None else f"blocks of {block_q} x {block_kv}"
    return Implementation(
        name=name,
        call=functools.partial(attention, block_q=block_q, block_kv=block_kv),
        description=f"block-sparse flash attention in plain JAX, {blocks}, any backend",
        offers=frozenset({"alibi_slopes", "score_mod", "captures", "dropout"}),
        dropout_mask="places",
        arithmetic=Arithmetic(probabilities="input"),
        empty_rows="zero",
        behind_mask="any",
        validates=True,
        variants={
            f"blocks_{q}_{kv}": functools.partial(attention, block_q=q, block_kv=kv)
            for q, kv in _VARIANT_BLOCKS
            if (q, kv) != (block_q, block_kv)
        },
        memory="linear",
        checkpoint_names=("out", "logsumexp"),
        tunable=build_tunable(attention),
    )


def build_packed_implementation(name: str, *, block_q: int, block_kv: int) -> Implementation:
    """Declare block flash attention over packed sequences under `name`."""
    return Implementation(
        name=name,
        call=functools.partial(packed_attention, block_q=block_q, block_kv=block_kv),
        description="block-sparse flash attention in plain JAX over packed sequences, by their borders, with gradients",
        arithmetic=Arithmetic(probabilities="input"),
        gradients=frozenset({"dq", "dk", "dv", "dsinks"}),
        empty_rows="zero",
        behind_mask="any",
        storage="packed",
        offers=frozenset({"placed", "tree", "packed_segments", "alibi_slopes", "score_mod"}),
        refuses_by_signature=True,
        variants={
            "default_blocks": packed_attention,
            **{
                f"blocks_{q}_{kv}": functools.partial(packed_attention, block_q=q, block_kv=kv)
                for q, kv in _VARIANT_BLOCKS
                if (q, kv) != (block_q, block_kv)
            },
        },
        memory="linear",
        checkpoint_names=("out", "logsumexp"),
    )


def build_latent_implementation(name: str) -> Implementation:
    """Declare block flash attention to one latent shared by all heads under `name`."""
    return Implementation(
        name=name,
        call=latent_attention,
        description="latent attention in its absorbed form, block-sparse in plain JAX, with gradients",
        arithmetic=Arithmetic(probabilities="input"),
        empty_rows="zero",
        behind_mask="any",
        storage="latent",
        variants={
            f"blocks_{q}_{kv}": functools.partial(latent_attention, block_q=q, block_kv=kv) for q, kv in _VARIANT_BLOCKS
        },
        memory="linear",
        checkpoint_names=("out", "logsumexp"),
    )


# The blocks of the packed form are small and of different sizes, so that sequences begin and end inside blocks.
IMPLEMENTATIONS: tuple[Implementation, ...] = (
    build_implementation("block_flash"),
    build_packed_implementation("block_flash_packed", block_q=16, block_kv=24),
    build_latent_implementation("block_flash_latent"),
)
