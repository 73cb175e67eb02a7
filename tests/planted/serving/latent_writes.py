"""Bugs of calls that write latents into pages: which part goes where, when, and what is read of it.

Bugs of the first half are steps of `tests.planted.planting.latent_writes`. Those of the second half change a passage of
`tests.kernels.latent_attention.writing`, which writes token by token in two parts.
"""

from __future__ import annotations

import functools
import importlib

import jax
import jax.numpy as jnp

from conformance.execution.plain_functions import build_implementation
from impls.contract.implementation import Implementation
from tests.bank import PlantedBug
from tests.planted.planting.latent import in_pages
from tests.planted.planting.latent_writes import LatentWriteSteps, bug
from tests.planted.planting.page_writes import Tokens, WriteSteps, scattered
from tests.planted.planting.served import Call
from tests.planted.planting.source_change import Change, changed

Array = jax.Array
_PARTS = "parts of a latent"
_SLOT = "slot of a new latent"
_ORDER = "order of writing and reading"
_UNASKED = "unasked latents written"


def _table(call: Call) -> Array:
    assert call.page_indices is not None
    return call.page_indices


def _keep_old_rotary_part(c_kv: Array, k_pe: Array, pool: Array, page: Array, row: Array) -> Array:
    old = pool[jnp.clip(page, 0, len(pool) - 1), row]
    return jnp.concatenate([c_kv, old[:, c_kv.shape[1] :]], axis=-1)


def _drop_signs_of_zeros(c_kv: Array, k_pe: Array, pool: Array, page: Array, row: Array) -> Array:
    """Write 0.0 for -0.0, as an addition of 0 does."""
    latent = jnp.concatenate([c_kv, k_pe], axis=-1)
    return jnp.where(latent == 0, 0, latent)


def _slot_by_token(tokens: Tokens, call: Call) -> tuple[Array, Array]:
    """Take entry `j` of the table where entry `j // page_size` is meant."""
    table = _table(call)
    return table[tokens.sequence, jnp.minimum(tokens.j, table.shape[1] - 1)], tokens.j % call.page_size


def _slot_of_next_sequence(tokens: Tokens, call: Call) -> tuple[Array, Array]:
    """Take the row of the table of the sequence behind."""
    table = _table(call)
    other = jnp.minimum(tokens.sequence + 1, jnp.maximum(call.count - 1, 0))
    return table[other, tokens.j // call.page_size], tokens.j % call.page_size


def _write_two_rows(pool: Array, x: Array, page: Array, row: Array) -> Array:
    """Write rows in pairs, as a kernel does that packs two bf16 numbers in 32 bits: the neighbour becomes zero."""
    return scattered(pool.at[page, row ^ 1].set(0, mode="drop"), x, page, row)


def _read_values_behind(latent: Array, rank: int) -> Array:
    """Take the last `rank` coordinates for values, which are rotary ones too."""
    return latent[..., -rank:]


_IN_STEPS = (
    bug(
        "rotary-part-written-to-the-compressed-columns",
        LatentWriteSteps(latent=lambda c_kv, k_pe, pool, page, row: jnp.concatenate([k_pe, c_kv], axis=-1)),
        kind=_PARTS,
        reference="inferred from tpu-inference's caches, which pad each part to whole lanes",
    ),
    bug(
        "rotary-part-of-new-tokens-not-written",
        LatentWriteSteps(latent=_keep_old_rotary_part),
        kind=_PARTS,
        reference="inferred from ejkernel, whose two parts are two arrays",
    ),
    bug(
        "logits-of-the-rotary-part-dropped",
        LatentWriteSteps(queries=lambda content, rotary: jnp.concatenate([content, 0 * rotary], axis=-1)),
        kind=_PARTS,
        reference="inferred: one of the two products of a latent's parts is left out",
        shows="out logsumexp max_logits",
    ),
    bug(
        "values-take-rotary-columns",
        LatentWriteSteps(values=_read_values_behind),
        kind=_PARTS,
        reference="inferred",
        shows="out",
    ),
    bug(
        "scale-by-the-depth-of-a-latent",
        LatentWriteSteps(scale=lambda scale, rank, depth: depth**-0.5),
        kind="scale",
        reference="ejkernel 0.0.80.3, whose default is that of the latent's depth",
        shows="out logsumexp max_logits",
    ),
    bug(
        "latent-written-to-the-entry-of-its-token",
        LatentWriteSteps(writes=WriteSteps(slot=_slot_by_token)),
        kind=_SLOT,
        reference="inferred from huggingface/text-generation-inference#2711, slots without the table",
    ),
    bug(
        "latent-written-to-pages-of-another-sequence",
        LatentWriteSteps(writes=WriteSteps(slot=_slot_of_next_sequence)),
        kind=_SLOT,
        reference="inferred",
        trigger=lambda case: in_pages(case) and case.batch > 1,
    ),
    bug(
        "latents-attended-before-they-are-written",
        LatentWriteSteps(writes=WriteSteps(attended=lambda before, after: before)),
        kind=_ORDER,
        reference="inferred from sgl-project/sglang#19636",
        shows="out",
    ),
    bug(
        "pages-of-latents-returned-as-they-were",
        LatentWriteSteps(writes=WriteSteps(returned=lambda before, after: before)),
        kind=_ORDER,
        reference="sgl-project/sgl-jax: new tokens that were not written while the output was right",
        shows="latent_pages",
    ),
    bug(
        "padding-latent-written-to-page-0",
        LatentWriteSteps(writes=WriteSteps(padding=lambda page, tokens, call: jnp.where(tokens.there, page, 0))),
        kind=_UNASKED,
        reference="sgl-project/sglang#36207",
    ),
    bug(
        "padding-latent-written-to-slot-minus-one",
        LatentWriteSteps(writes=WriteSteps(padding=lambda page, tokens, call: jnp.where(tokens.there, page, -1))),
        kind=_UNASKED,
        reference="sgl-project/sglang#33816",
    ),
    bug(
        "zeros-of-new-latents-lose-their-sign",
        LatentWriteSteps(latent=_drop_signs_of_zeros),
        kind=_PARTS,
        reference="inferred from an addition of zero",
        shows="latent_pages",
    ),
    bug(
        "row-beside-a-new-latent-overwritten",
        LatentWriteSteps(writes=WriteSteps(write=_write_two_rows)),
        kind=_UNASKED,
        reference="inferred from the packing of bf16 rows in tpu-inference's pages",
        trigger=lambda case: in_pages(case) and case.stored is not None and case.stored.size != 1,
    ),
)


def _build_changed(name: str, before: str, after: str) -> Implementation:
    package = f"planted_{name.replace('-', '_')}"
    changed("tests.kernels", package, Change("latent_attention", before, after))
    return build_implementation(importlib.import_module(f"{package}.latent_attention").writing, name)


def _in_text(
    name: str, before: str, after: str, *, kind: str, reference: str = "inferred", shows: str = "latent_pages out"
) -> PlantedBug:
    return PlantedBug(
        name=name,
        family="latent",
        kind=kind,
        reference=reference,
        shows=tuple(shows.split()),
        build=functools.partial(_build_changed, name, before, after),
        trigger=in_pages,
    )


_SECOND_PART = ".at[page, row, rank:].set(k_pe[token])"
_IN_TEXT = (
    _in_text(
        "text-rotary-part-written-over-the-compressed-one",
        _SECOND_PART,
        ".at[page, row, : k_pe.shape[1]].set(k_pe[token])",
        kind=_PARTS,
        reference="inferred: an offset that is left out",
    ),
    _in_text(
        "text-rotary-part-in-the-next-row", _SECOND_PART, ".at[page, row + 1, rank:].set(k_pe[token])", kind=_PARTS
    ),
    _in_text(
        "text-last-token-not-written", "fori_loop(start, stop, write", "fori_loop(start, stop - 1, write", kind=_SLOT
    ),
    _in_text(
        "text-position-without-earlier-tokens",
        "j = kv_lens[b] - stop + token\n",
        "j = token - start\n",
        kind=_SLOT,
        reference="inferred from huggingface/text-generation-inference#2711",
    ),
    _in_text(
        "text-table-entry-of-the-page-before",
        "page, row = page_indices[b, j // size]",
        "page, row = page_indices[b, jnp.maximum(-(-j // size) - 1, 0)]",
        kind=_SLOT,
        reference="inferred from MinivLLM#87",
    ),
    _in_text(
        "text-attends-to-given-pages",
        "rows = pool[jnp.clip",
        "rows = latent_pages[jnp.clip",
        kind=_ORDER,
        reference="inferred from sgl-project/sglang#19636",
        shows="out",
    ),
    _in_text(
        "text-rotary-logits-dropped",
        'x += jnp.einsum("tnr,sr->tns"',
        'x += 0 * jnp.einsum("tnr,sr->tns"',
        kind=_PARTS,
        shows="out logsumexp max_logits",
    ),
    _in_text(
        "text-scale-by-the-rank",
        "        x *= scale\n",
        "        x *= rank**-0.5\n",
        kind="scale",
        reference="inferred from NVIDIA/Megatron-LM#1429",
        shows="out logsumexp max_logits",
    ),
    _in_text(
        "text-padding-counted-as-tokens-of-the-last-sequence",
        "start, stop = cu_q_lens[b], cu_q_lens[b + 1]",
        "start, stop = cu_q_lens[b], jnp.where(b + 1 == num_seqs[0], total, cu_q_lens[b + 1])",
        kind=_UNASKED,
        reference="inferred from sgl-project/sglang#36207",
    ),
)

BUGS: tuple[PlantedBug, ...] = (*_IN_STEPS, *_IN_TEXT)
