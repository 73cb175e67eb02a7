"""Bugs of batch invariance: right within rounding, with bits that depend on the rest of the call."""

from __future__ import annotations

import jax.numpy as jnp

from tests.bank import PlantedBug
from tests.planted.planting.invariant import Array, InvariantSteps, paged, planted


def _pages_by_index(pages: Array, there: Array) -> Array:
    """Add the pages of a sequence in the order of their indices."""
    return jnp.argsort(jnp.where(there, pages, 2**30))


BUGS: tuple[PlantedBug, ...] = (
    planted(
        "splits-by-batch-size",
        InvariantSteps(splits=lambda call: 4 if call.sequences < 4 else 1),
        kind="splits",
        reference="flash-attention issue 1897: splits are chosen to fill the device",
        says="The keys are split in four where few sequences share the call.",
    ),
    planted(
        "splits-by-all-tokens",
        InvariantSteps(splits=lambda call: 2 if call.queries <= 16 else 1),
        kind="splits",
        reference="sglang issue 35161: splits depend on the tokens of the batch",
        says="The keys are split in two where the call has few tokens.",
        build=paged,
    ),
    planted(
        "splits-by-the-longest-sequence",
        InvariantSteps(splits=lambda call: -(-call.keys // 512)),
        kind="splits",
        reference="vllm issue 58131: sequences long enough to be split are not batch-invariant",
        says="The longest sequence of the call decides how often the keys of all are split.",
    ),
    planted(
        "blocks-by-batch-size",
        InvariantSteps(block=lambda call: 32 if call.sequences > 4 else 16),
        kind="blocks",
        reference="inferred from block sizes that are tuned for each batch size",
        says="The blocks of keys are larger where many sequences share the call.",
    ),
    planted(
        "pages-added-by-index",
        InvariantSteps(order=_pages_by_index),
        kind="order",
        reference="inferred from kernels that sort pages to read memory in order",
        says="The pages of a sequence are added in the order of their indices.",
        build=paged,
    ),
    planted(
        "padding-in-the-maximum",
        InvariantSteps(top=lambda z, allowed: z.max(axis=-1)),
        kind="padding",
        reference="inferred from kernels that take the maximum before the mask",
        says="Keys of padding take part in the maximum of their block.",
    ),
    planted(
        "another-order-for-one-sequence",
        InvariantSteps(block=lambda call: 1024 if call.sequences == 1 else 16),
        kind="fast path",
        reference="inferred from programs for one sequence that have larger blocks",
        says="A call with one sequence adds 1,024 keys at once.",
    ),
    planted(
        "chunks-merged-by-logsumexp",
        InvariantSteps(cut=lambda call: max(0, call.prefix) if call.queries > call.sequences else 0),
        kind="chunks",
        reference="inferred from chunked prefill that attends to the prefix and to the chunk, and merges both",
        says="A chunk of a prompt attends to the keys before it in a part of its own.",
    ),
)
