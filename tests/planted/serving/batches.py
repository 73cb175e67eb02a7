"""Bugs of batches: many single tokens, empty sequences at a place, and head counts that are no powers of two."""

from __future__ import annotations

import functools
import itertools
import math

import jax
import jax.numpy as jnp

from cases.case import Case
from conformance.mutation.kernels.triggers import both
from tests.bank import PlantedBug
from tests.planted.planting import latent, packed_bug, paged_bug, ring_cache
from tests.planted.planting.latent import LatentSteps
from tests.planted.planting.ring_cache import RingSteps
from tests.planted.planting.served import Call, PackedSteps, PagedSteps

Array = jax.Array
_BLOCK = 16
_CAP = 24


def _are_single(call: Call) -> Array:
    """Return whether no sequence has more than one query, so that the kernel takes its path for single tokens."""
    return call.q_lens.max() <= 1


def _single_tokens_modulo(call: Call) -> tuple[Array, Array]:
    """Read the sequence of a token by its lane of a block, in the path for single tokens."""
    sequence, place = PagedSteps().sequence(call)
    lane = sequence[jnp.arange(len(sequence)) % _BLOCK]
    return jnp.where(_are_single(call) & (sequence < call.count), lane, sequence), place


def _capped_tokens(out: Array, call: Call) -> Array:
    """Compute at most 24 tokens, one by each program of the grid, in the path for single tokens."""
    beyond = (jnp.arange(len(out)) >= _CAP)[:, None, None]
    return jnp.where(_are_single(call) & beyond, 0, out)


def _whole_blocks_of_tokens(out: Array, call: Call) -> Array:
    """Leave out the tokens behind the last whole block of eight, in the path for single tokens."""
    tokens = call.cu_q_lens[call.count]
    done = jnp.where(tokens >= 8, tokens // 8 * 8, tokens)
    beyond = (jnp.arange(len(out)) >= done)[:, None, None]
    return jnp.where(_are_single(call) & beyond, 0, out)


def _shifted_by_empty_pairs(call: Call) -> tuple[Array, Array]:
    """Skip only one of two sequences in a row that have no query."""
    sequence, place = PagedSteps().sequence(call)
    empty = (call.q_lens == 0) & (jnp.arange(call.rows) < call.count)
    both_empty = jnp.concatenate([jnp.zeros(1, int), jnp.cumsum(empty[1:] & empty[:-1])])
    lost = both_empty[jnp.minimum(sequence, call.rows - 1)]
    return jnp.where(sequence < call.count, sequence - lost, sequence), place


def _first_is_filled(call: Call) -> tuple[Array, Array]:
    """Take the first token for one of the first sequence, which may be empty."""
    sequence, place = PackedSteps().sequence(call)
    first = jnp.where(len(sequence) > 0, sequence[0], 0)
    return jnp.where(sequence == first, 0, sequence), place


def _key_heads_in_pairs(x: Array, count: int) -> Array:
    """Read key heads in pairs: for the last of an odd number, read its neighbour."""
    heads = x.shape[2]
    index = jnp.arange(count) // (count // heads)
    odd = heads % 2 == 1 and heads > 1
    return x[:, :, jnp.where(odd & (index == heads - 1), heads - 2, index)]


def _heads_by_a_shift(axis: int, x: Array, count: int) -> Array:
    """Find the key head of a query head by a shift, which divides by a power of two."""
    heads = x.shape[axis]
    index = jnp.arange(count) >> int(math.log2(count // heads))
    return jnp.take(x, jnp.minimum(index, heads - 1), axis=axis)


def _rows_modulo(x: Array) -> Array:
    return x.swapaxes(1, 2)[jnp.arange(len(x)) % _BLOCK]


def _tokens(more_than: int, case: Case) -> bool:
    return case.q_length == 1 and sum(case.q_lengths) > more_than


def _begins_empty(case: Case) -> bool:
    return case.q_lengths[0] == 0


def _two_empty(case: Case) -> bool:
    return any(not one and not other for one, other in itertools.pairwise(case.q_lengths))


def _odd_key_heads(case: Case) -> bool:
    return case.num_kv_heads % 2 == 1 and case.num_kv_heads > 1


def _odd_groups(case: Case) -> bool:
    group = case.num_q_heads // case.num_kv_heads
    return case.num_kv_heads > 1 and group & (group - 1) > 0


BUGS: tuple[PlantedBug, ...] = (
    paged_bug.bug(
        "paged-single-tokens-by-lanes-of-sixteen",
        PagedSteps(sequence=_single_tokens_modulo),
        kind="batch of single tokens",
        reference="inferred from decode kernels whose block of rows is a tile of 16",
        trigger=both(paged_bug.in_pages, functools.partial(_tokens, _BLOCK)),
    ),
    paged_bug.bug(
        "paged-single-tokens-capped-at-24",
        PagedSteps(output=_capped_tokens),
        kind="batch of single tokens",
        reference="inferred from grids that are bound by the number of cores",
        shows="out",
        trigger=both(paged_bug.in_pages, functools.partial(_tokens, _CAP)),
    ),
    latent.bug(
        "latent-single-tokens-in-whole-blocks",
        LatentSteps(pages=PagedSteps(output=_whole_blocks_of_tokens)),
        kind="batch of single tokens",
        reference="inferred from grids of total_q // 8 programs",
        shows="out",
        trigger=both(latent.in_pages, functools.partial(_tokens, 8)),
    ),
    ring_cache.bug(
        "ring-rows-by-lanes-of-sixteen",
        RingSteps(keys=_rows_modulo),
        kind="batch of single tokens",
        reference="inferred from decode kernels whose block of rows is a tile of 16",
        trigger=both(ring_cache.in_ring, lambda case: case.batch > _BLOCK),
    ),
    paged_bug.bug(
        "paged-second-empty-sequence-in-a-row-counts",
        PagedSteps(sequence=_shifted_by_empty_pairs),
        kind="empty sequences",
        reference="inferred from searches for the sequence of a token that step over one equal start",
        trigger=both(paged_bug.in_pages, _two_empty),
    ),
    packed_bug.bug(
        "packed-first-sequence-taken-for-filled",
        PackedSteps(sequence=_first_is_filled),
        kind="empty sequences",
        reference="inferred from loops over tokens that begin with sequence 0",
        trigger=both(packed_bug.in_packs, _begins_empty),
    ),
    paged_bug.bug(
        "paged-key-heads-in-pairs",
        PagedSteps(heads=_key_heads_in_pairs),
        kind="heads",
        reference="inferred from kernels that load two key heads of 16 bits as one of 32",
        trigger=both(paged_bug.in_pages, _odd_key_heads),
    ),
    packed_bug.bug(
        "packed-groups-by-a-shift",
        PackedSteps(heads=functools.partial(_heads_by_a_shift, 1)),
        kind="heads",
        reference="inferred from kernels that divide by the group with a shift",
        trigger=both(packed_bug.in_packs, _odd_groups),
    ),
)
