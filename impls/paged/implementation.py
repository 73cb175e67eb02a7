"""What paged attention declares."""

from __future__ import annotations

import functools

from conformance.contract import Arithmetic, Implementation
from impls.paged.attention import attention


def implementation(name: str) -> Implementation:
    """Paged attention in plain JAX, under `name`.

    Tiles and blocks are small and unlike each other, so that prompts have several tiles, and sequences end before, at
    and behind the ends of blocks.
    """
    return Implementation(
        name=name,
        call=functools.partial(attention, block_q=8, block_kv=48),
        description="attention over a cache in pages, in plain JAX, prompts and single tokens in one call",
        arithmetic=Arithmetic(probabilities="input"),
        differentiable_residuals=frozenset(),
        gradients=frozenset(),
        empty_rows="zero",
        behind_mask="any",
        storage="paged",
        refuses_by_signature=True,
        variants={
            "default_blocks": attention,
            "single_pages": functools.partial(attention, block_q=1, block_kv=1),
            "blocks_of_7": functools.partial(attention, block_q=7, block_kv=64),
        },
    )


IMPLEMENTATIONS: tuple[Implementation, ...] = (implementation("paged"),)
