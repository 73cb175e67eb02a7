"""Bugs of attention to listed keys: which entries name a key, where it lies, and what becomes of its gradient.

The kernels and their steps are those of `tests.planted.planting.listed`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from cases.case import Case
from conformance.mutation.kernels.triggers import Trigger, both, grouped, has
from impls.contract.implementation import Implementation
from tests.bank import PlantedBug
from tests.planted.planting.listed import (
    Array,
    Call,
    ListSteps,
    MarkSteps,
    gathered,
    mark,
    paged,
    scattered,
)

_LISTED = has("indices")
_CAUSAL = has("indices", "causal")
_TRAINED = has("indices", "train")
_SUNK = has("indices", "sinks")
_PAGED = has("indices", "paged")
_FORWARD = "out logsumexp max_logits"


def _bug(
    name: str,
    steps: Any,
    *,
    kind: str,
    build: Callable[[str, Any], Implementation],
    reference: str = "inferred",
    shows: str = _FORWARD,
    trigger: Trigger = _LISTED,
) -> PlantedBug:
    return PlantedBug(
        name=f"listed-{name}",
        family="masks",
        kind=f"lists.{kind}",
        reference=reference,
        shows=tuple(shows.split()),
        build=functools.partial(build, f"listed-{name}", steps),
        trigger=trigger,
    )


_gathered = functools.partial(_bug, build=gathered)
_scattered = functools.partial(_bug, build=scattered, shows="out")
_paged = functools.partial(_bug, build=paged, shows="out", trigger=_PAGED)


def _several_rows(case: Case) -> bool:
    return "indices" in case.features and case.batch > 1


def _several_queries(case: Case) -> bool:
    return "indices" in case.features and case.q_length > 1


def _far(case: Case) -> bool:
    return "indices" in case.features and case.kv_length > 128


def _several_pages(case: Case) -> bool:
    return _PAGED(case) and case.stored is not None and case.kv_length > (case.stored.size or 1)


def _stop_at_padding(lists: Array, call: Call) -> Array:
    return jnp.cumprod(lists >= 0, axis=-1, dtype=jnp.int32) > 0


def _is_found_by_bisection(lists: Array, call: Call) -> Array:
    """Return whether a binary search in the list finds each of its entries, as it does in a sorted one."""
    low, high = jnp.zeros_like(lists), jnp.full_like(lists, lists.shape[-1])
    for _ in range(lists.shape[-1].bit_length() + 1):
        middle = jnp.minimum((low + high) // 2, lists.shape[-1] - 1)
        before = jnp.take_along_axis(lists, middle, axis=-1) < lists
        is_open = low < high
        low, high = jnp.where(is_open & before, middle + 1, low), jnp.where(is_open & ~before, middle, high)
    found = jnp.take_along_axis(lists, jnp.minimum(low, lists.shape[-1] - 1), axis=-1)
    return (lists >= 0) & (found == lists)


def _add_next_list(lists: Array, call: Call) -> Array:
    """Round the length up to a multiple of 8 with entries of the next query's list."""
    return jnp.concatenate([lists, jnp.roll(lists, -1, axis=1)[..., : -lists.shape[-1] % 8]], axis=-1)


def _name_first_instead(lists: Array, call: Call) -> Array:
    """Replace entries of -1 by the list's largest entry."""
    return jnp.where(lists < 0, lists.max(axis=-1, keepdims=True), lists)


def _forget_causal_if_all_fit(place: Array, call: Call) -> Array:
    if call.kv_length <= place.shape[-1]:
        return jnp.full(place.shape, True)
    return place <= call.positions if call.causal else jnp.full(place.shape, True)


def _entry(found: Array) -> Array:
    """The number of each entry of a list, in place of the key that it names."""
    return jnp.arange(found.shape[2]) % 8


def _see_all_if_empty(lists: Array, kv_length: int) -> Array:
    return mark(lists, kv_length) | (lists < 0).all(axis=-1, keepdims=True)


def _erase_first_key(lists: Array, kv_length: int) -> Array:
    """Write False for entries of -1, to key 0, after the others."""
    marked = mark(lists, kv_length)
    return marked.at[..., 0].set(marked[..., 0] & (lists >= 0).all(axis=-1))


def _wrap(lists: Array, kv_length: int) -> Array:
    b, t = jnp.ogrid[: lists.shape[0], : lists.shape[1]]
    return jnp.zeros((*lists.shape[:2], kv_length), bool).at[b[..., None], t[..., None], lists].set(True)


def _count(weights: Array, lists: Array) -> Array:
    """Count key 0 once for each entry of -1 besides its own."""
    counts = 1 + (lists < 0).sum(axis=-1)[:, None, :, None]
    return jnp.where(jnp.arange(weights.shape[-1]) == 0, weights * counts, weights)


def _start_of_sequence(call: Call) -> Array:
    assert call.cu_q_lens is not None
    assert call.sequence is not None
    return call.cu_q_lens[call.sequence]


def _lists_by_place_in_sequence(lists: Array, call: Call) -> Array:
    own = jnp.arange(len(lists)) - _start_of_sequence(call)[:, 0]
    return lists[jnp.clip(own, 0, len(lists) - 1)]


def _in_memory_order(place: Array, pages: Array, call: Call) -> tuple[Array, Array]:
    return place // call.page_size, place % call.page_size


def _row_modulo_next_power(place: Array, pages: Array, call: Call) -> tuple[Array, Array]:
    size = 1 << (call.page_size - 1).bit_length()
    return pages[call.sequence, place // call.page_size], jnp.minimum(place % size, call.page_size - 1)


def _row_not_modulo(place: Array, pages: Array, call: Call) -> tuple[Array, Array]:
    return pages[call.sequence, place // call.page_size], jnp.minimum(place, call.page_size - 1)


def _table_of_first_sequence(place: Array, pages: Array, call: Call) -> tuple[Array, Array]:
    return pages[0, place // call.page_size], place % call.page_size


def _places_from_first_query(place: Array, pages: Array, call: Call) -> tuple[Array, Array]:
    """Count places from the query's own position backwards, as in a list of distances."""
    place = jnp.maximum(call.positions - place, 0)
    return pages[call.sequence, place // call.page_size], place % call.page_size


BUGS: tuple[PlantedBug, ...] = (
    _gathered(
        "minus-one-is-the-last-key",
        ListSteps(
            is_named=lambda lists, call: jnp.full(lists.shape, True),
            find_place=lambda lists, call: jnp.where(lists < 0, call.kv_length - 1, lists),
        ),
        kind="padding",
        reference="inferred from NumPy's rule that -1 is the last place, which JAX's gather follows",
    ),
    _gathered(
        "minus-one-is-key-0",
        ListSteps(is_named=lambda lists, call: jnp.full(lists.shape, True)),
        kind="padding",
        reference="inferred from sgl-project/sglang#36207, where 0 as padding names a page that exists",
    ),
    _gathered(
        "weight-of-padding-kept",
        ListSteps(hide=lambda x, seen: jnp.where(seen, x, 0.0)),
        kind="padding",
        reference="inferred from tenstorrent/tt-metal#38004, padding that gets the weight exp(0)",
    ),
    _gathered(
        "list-ends-at-its-first-padding",
        ListSteps(is_named=_stop_at_padding),
        kind="padding",
        reference="inferred from flashinfer-ai/flashinfer#5095, which reads a list by its length",
    ),
    _gathered(
        "list-padded-by-the-next-list",
        ListSteps(read=_add_next_list),
        kind="length",
        reference="flashinfer-ai/flashinfer#5095, entries past the length of a list that are not masked",
        trigger=_several_queries,
    ),
    _gathered("padding-repeats-a-key", ListSteps(read=_name_first_instead), kind="padding"),
    _gathered("last-entry-dropped", ListSteps(read=lambda lists, call: lists.at[..., -1].set(-1)), kind="length"),
    _gathered(
        "only-the-first-half-of-a-list",
        ListSteps(read=lambda lists, call: lists[..., : -(-lists.shape[-1] // 2)]),
        kind="length",
    ),
    _gathered("lists-taken-as-sorted", ListSteps(is_named=_is_found_by_bisection), kind="order"),
    _gathered(
        "list-of-the-first-query",
        ListSteps(read=lambda lists, call: jnp.broadcast_to(lists[:, :1], lists.shape)),
        kind="query",
        trigger=_several_queries,
    ),
    _gathered(
        "lists-of-the-first-batch-row",
        ListSteps(read=lambda lists, call: jnp.broadcast_to(lists[:1], lists.shape)),
        kind="batch-row",
        trigger=_several_rows,
    ),
    _gathered(
        "places-in-eight-bits",
        ListSteps(find_place=lambda lists, call: jnp.maximum(lists, 0) % 128),
        kind="overflow",
        trigger=_far,
    ),
    _gathered(
        "later-keys-seen-if-listed",
        ListSteps(is_allowed=lambda place, call: jnp.full(place.shape, True)),
        kind="causal",
        reference="sgl-project/sglang#39593 turned round: a list taken for the whole mask",
        trigger=_CAUSAL,
    ),
    _gathered(
        "causal-forgotten-if-all-keys-fit",
        ListSteps(is_allowed=_forget_causal_if_all_fit),
        kind="causal",
        reference="osaurus-ai/vmlx-swift#429, selection skipped and the causal mask forgotten",
        trigger=both(_CAUSAL, lambda case: "listed-k300" in case.mask),
    ),
    _gathered(
        "causal-only-in-the-forward-pass",
        ListSteps(is_allowed_backward=lambda place, call: jnp.full(place.shape, True)),
        kind="backward",
        shows="dq dk dv",
        trigger=both(_CAUSAL, _TRAINED),
    ),
    _gathered(
        "padding-named-in-the-backward-pass",
        ListSteps(is_named_backward=lambda lists, call: jnp.full(lists.shape, True)),
        kind="backward",
        reference="Dao-AILab/flash-attention#2755, gradients of keys and values added at entries of -1",
        shows="dk dv",
        trigger=_TRAINED,
    ),
    _gathered(
        "head-groups-interleaved",
        ListSteps(repeat=lambda x, group: jnp.concatenate([x] * group, axis=-2)),
        kind="heads",
        trigger=both(_LISTED, lambda case: grouped(case) and case.num_kv_heads > 1),
    ),
    _gathered(
        "sinks-left-out",
        ListSteps(add_up=lambda weights, sink, shift: weights.sum(axis=-1)),
        kind="sinks",
        reference="sgl-project/sglang-jax#905, a fused path that ignores sinks; ml-explore/mlx-lm#1443",
        trigger=_SUNK,
    ),
    _gathered(
        "empty-list-is-nan",
        ListSteps(divide=lambda weights, total: weights / total[..., None]),
        kind="empty",
        shows="out",
    ),
    _gathered(
        "short-list-averaged-over-all-entries",
        ListSteps(weigh=lambda p, seen: p * seen.mean(axis=-1, keepdims=True)),
        kind="normalisation",
        shows="out",
    ),
    _gathered(
        "key-gradient-of-one-list-only",
        ListSteps(add_keys=lambda total, at, found: total.at[at].set(found)),
        kind="scatter",
        shows="dk",
        trigger=_TRAINED,
    ),
    _gathered(
        "value-gradient-of-one-list-only",
        ListSteps(add_values=lambda total, at, found: total.at[at].set(found)),
        kind="scatter",
        shows="dv",
        trigger=_TRAINED,
    ),
    _gathered(
        "key-gradient-added-in-16-bits",
        ListSteps(add_keys=lambda total, at, found: total.astype(jnp.bfloat16).at[at].add(found.astype(jnp.bfloat16))),
        kind="precision",
        shows="dk",
        trigger=_TRAINED,
    ),
    _gathered(
        "key-gradient-by-place-in-the-list",
        ListSteps(
            add_keys=lambda total, at, found: total.at[at[0], jnp.broadcast_to(_entry(found), at[1].shape)].add(found)
        ),
        kind="scatter",
        shows="dk",
        trigger=_TRAINED,
    ),
    _scattered("minus-one-marks-the-last-key", MarkSteps(mark=_wrap), kind="padding"),
    _scattered("minus-one-marks-key-0", MarkSteps(read=lambda lists: jnp.maximum(lists, 0)), kind="padding"),
    _scattered("padding-erases-key-0", MarkSteps(mark=_erase_first_key), kind="padding"),
    _scattered("padding-counts-key-0-again", MarkSteps(weigh=_count), kind="padding"),
    _scattered("all-keys-if-the-list-is-empty", MarkSteps(mark=_see_all_if_empty), kind="empty"),
    _scattered(
        "lists-or-causal",
        MarkSteps(join=lambda marked, causal: marked | causal),
        kind="causal",
        trigger=_CAUSAL,
    ),
    _scattered(
        "later-keys-marked",
        MarkSteps(join=lambda marked, causal: marked),
        kind="causal",
        reference="osaurus-ai/vmlx-swift#429",
        trigger=_CAUSAL,
    ),
    _scattered(
        "marks-of-the-first-query",
        MarkSteps(read=lambda lists: jnp.broadcast_to(lists[:, :1], lists.shape)),
        kind="query",
        trigger=_several_queries,
    ),
    _scattered(
        "sinks-left-out-of-marks",
        MarkSteps(keep_sinks=False),
        kind="sinks",
        reference="sgl-project/sglang-jax#905",
        trigger=_SUNK,
    ),
    _paged(
        "places-of-the-pool",
        ListSteps(locate=_in_memory_order),
        kind="pages",
        reference="inferred from aiter#2996, ids used as slots of tokens",
    ),
    _paged(
        "row-modulo-a-power-of-two",
        ListSteps(locate=_row_modulo_next_power),
        kind="pages",
        trigger=both(_several_pages, lambda case: case.stored is not None and case.stored.size == 5),
    ),
    _paged("row-not-modulo-the-page", ListSteps(locate=_row_not_modulo), kind="pages", trigger=_several_pages),
    _paged(
        "table-of-the-first-sequence",
        ListSteps(locate=_table_of_first_sequence),
        kind="pages",
        reference="vllm-project/flash-attention#176, all rows folded onto the first",
        trigger=both(_PAGED, _several_rows),
    ),
    _paged("places-counted-backwards", ListSteps(locate=_places_from_first_query), kind="pages"),
    _paged(
        "list-by-place-in-the-sequence",
        ListSteps(read=_lists_by_place_in_sequence),
        kind="packing",
        trigger=both(_PAGED, _several_rows),
    ),
    _paged(
        "padding-reads-row-0",
        ListSteps(clean=lambda x, seen: x),
        kind="memory",
        reference="inferred from vllm-project/vllm#936, zero times NaN",
    ),
)
