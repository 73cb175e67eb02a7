"""Bugs of the queries of paged caches: whose they are, where they stand, and what window they have."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tests.bank import PlantedBug
from tests.planted.planting.paged_bug import bug, several, windowed
from tests.planted.planting.served import Call, PagedSteps

Array = jax.Array


def _window_from_page(j: Array, position: Array, call: Call, place: Array) -> Array:
    """The page in which the window begins is read from its start."""
    if call.left is None:
        return jnp.asarray(True)
    first = jnp.maximum(position - call.left, 0) // call.page_size * call.page_size
    return j >= first[:, None]


def _window_from_next_page(j: Array, position: Array, call: Call, place: Array) -> Array:
    """The page in which the window begins is taken for freed, unless it is the query's own."""
    if call.left is None:
        return jnp.asarray(True)
    size = call.page_size
    first = -(-jnp.maximum(position - call.left, 0) // size) * size
    first = jnp.where(first > position, jnp.maximum(position - call.left, 0), first)
    return j >= first[:, None]


def _window_of(more: int) -> PagedSteps:
    def window(j: Array, position: Array, call: Call, place: Array) -> Array:
        return jnp.asarray(True) if call.left is None else j >= position[:, None] - call.left - more

    return PagedSteps(window=window)


def _window_by_place(j: Array, position: Array, call: Call, place: Array) -> Array:
    return jnp.asarray(True) if call.left is None else j >= place[:, None] - call.left


def _window_of_first_query(j: Array, position: Array, call: Call, place: Array) -> Array:
    """All queries of a chunk have the window of its first."""
    return jnp.asarray(True) if call.left is None else j >= (position - place)[:, None] - call.left


def _no_window_in_decode(j: Array, position: Array, call: Call, place: Array) -> Array:
    if call.left is None:
        return jnp.asarray(True)
    single = jnp.repeat(call.q_lens == 1, len(place) // call.rows + 1)[: len(place)]
    of_query = (jnp.arange(len(place))[:, None] >= call.cu_q_lens[1:]).sum(axis=1)
    single = (call.q_lens == 1)[jnp.minimum(of_query, call.rows - 1)]
    return (j >= position[:, None] - call.left) | single[:, None]


def _by_junk(call: Call) -> tuple[Array, Array]:
    """Every entry of the table of starts is taken for a sequence's."""
    token = jnp.arange(len(call.q))
    sequence = jnp.clip((token[:, None] >= call.cu_q_lens[1:]).sum(axis=1), 0, call.rows - 1)
    return sequence, token - call.cu_q_lens[sequence]


def _border(call: Call) -> tuple[Array, Array]:
    """The first query of a sequence is looked up on the wrong side of the border, unless it is the first of all."""
    token = jnp.arange(len(call.q))
    ends = jnp.where(jnp.arange(1, call.rows + 1) <= call.count, call.cu_q_lens[1:], len(call.q) + 1)
    found = (token[:, None] > ends).sum(axis=1)
    found = jnp.where(token < call.cu_q_lens[call.count], found, call.rows)
    return found, token - call.cu_q_lens[jnp.minimum(found, call.rows)]


def _one_query_each(call: Call) -> tuple[Array, Array]:
    """If no sequence has more than one query, each is taken to have one."""
    sequence, place = PagedSteps().sequence(call)
    token = jnp.arange(len(call.q))
    single = call.q_lens.max() <= 1
    return jnp.where(single, jnp.minimum(token, call.rows), sequence), jnp.where(single, 0, place)


BUGS: tuple[PlantedBug, ...] = (
    bug(
        "values-before-the-window-kept",
        PagedSteps(
            clean_values=lambda x, seen: jnp.where(
                (jnp.cumsum(seen[:, ::-1], axis=1)[:, ::-1] > 0)[..., None, None], x, 0
            )
        ),
        kind="window",
        reference="vllm-project/vllm#30887, values of a page that was freed",
        shows="out",
        trigger=windowed,
    ),
    bug(
        "new-tokens-counted-twice",
        PagedSteps(position=lambda place, q, kv, call: kv + place),
        kind="alignment",
        reference="sgl-project/sglang#27738",
    ),
    bug(
        "causal-from-the-start",
        PagedSteps(position=lambda place, q, kv, call: place),
        kind="alignment",
        reference="jax-ml/jax#24491",
    ),
    bug(
        "causal-without-the-own-key",
        PagedSteps(causal=lambda j, position: j < position[:, None]),
        kind="alignment",
        reference="flashinfer-ai/flashinfer#348",
    ),
    bug(
        "chunk-without-causal",
        PagedSteps(causal=lambda j, position: jnp.asarray(True)),
        kind="alignment",
        reference="nano-vllm#213, the length of the whole prompt for a chunk",
    ),
    bug(
        "last-position-for-every-query",
        PagedSteps(position=lambda place, q, kv, call: kv - 1),
        kind="alignment",
        reference="vllm-project/vllm#45227, a plan of one query used with several",
    ),
    bug(
        "position-by-the-longest-chunk",
        PagedSteps(position=lambda place, q, kv, call: kv - call.q_lens.max() + place),
        kind="alignment",
        reference="inferred from flashinfer-ai/flashinfer#4829",
        trigger=several,
    ),
    bug(
        "paged-window-by-pages",
        PagedSteps(window=_window_from_page),
        kind="window",
        reference="vllm-project/tpu-inference#1185, no mask in the block in which the window begins",
        trigger=windowed,
    ),
    bug(
        "first-page-of-the-window-freed",
        PagedSteps(window=_window_from_next_page),
        kind="window",
        reference="imp#967, what evicts rounds up and what reads rounds down",
        trigger=windowed,
    ),
    bug(
        "paged-window-one-key-short",
        _window_of(-1),
        kind="window",
        reference="sgl-project/sglang#32087",
        trigger=windowed,
    ),
    bug(
        "paged-window-one-key-long",
        _window_of(1),
        kind="window",
        reference="ml-explore/mlx-lm#390",
        trigger=windowed,
    ),
    bug(
        "window-by-place-in-the-chunk",
        PagedSteps(window=_window_by_place),
        kind="window",
        reference="lalamo#200",
        trigger=windowed,
    ),
    bug(
        "window-of-the-first-query-of-a-chunk",
        PagedSteps(window=_window_of_first_query),
        kind="window",
        reference="flashinfer-ai/flashinfer#4972",
        trigger=windowed,
    ),
    bug(
        "no-window-for-single-tokens",
        PagedSteps(window=_no_window_in_decode),
        kind="window",
        reference="mistral.rs#2094",
        trigger=windowed,
    ),
    bug(
        "sequences-past-the-last-counted",
        PagedSteps(sequence=_by_junk),
        kind="borders",
        reference="inferred from vllm-project/vllm#45005, where a row that is not in use gets a slot",
    ),
    bug(
        "query-at-a-border-to-its-neighbour",
        PagedSteps(sequence=_border),
        kind="borders",
        reference="inferred",
        trigger=several,
    ),
    bug(
        "one-query-for-every-sequence",
        PagedSteps(sequence=_one_query_each),
        kind="borders",
        reference="Dao-AILab/flash-attention#1537",
        trigger=several,
    ),
)
