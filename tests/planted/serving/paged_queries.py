"""Bugs of the queries of paged caches: whose they are, where they stand, and what window they have."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tests.bank import PlantedBug
from tests.planted.planting.paged_bug import bug, several, windowed
from tests.planted.planting.served import Call, PagedSteps

Array = jax.Array
_LAUNCH_ROWS = 1248


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


def _rows_of_one_launch(out: Array, call: Call) -> Array:
    """One launch computes 1,248 rows, which are tokens times heads; there is no second one."""
    tokens, heads = out.shape[:2]
    return jnp.where((jnp.arange(tokens) < _LAUNCH_ROWS // heads)[:, None, None], out, 0)


def _locate_in_sixteen_bits(j: Array, call: Call) -> tuple[Array, Array]:
    """The number of a key is stored in int16: beyond 32,767 it is negative, and the first page is read."""
    j = j.astype(jnp.int16).astype(jnp.int32)
    return jnp.maximum(j // call.page_size, 0), j % call.page_size


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
        "position-by-the-longest-chunk",
        PagedSteps(position=lambda place, q, kv, call: kv - call.q_lens.max() + place),
        kind="alignment",
        reference="inferred from flashinfer-ai/flashinfer#4829",
        trigger=several,
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
        "rows-beyond-one-launch-left-out",
        PagedSteps(output=_rows_of_one_launch),
        kind="launch",
        reference="inferred from a launch that holds 1,248 rows of tokens and heads",
        shows="out",
    ),
    bug(
        "places-of-keys-in-sixteen-bits",
        PagedSteps(locate=_locate_in_sixteen_bits),
        kind="launch",
        reference="inferred from positions in int16",
    ),
)
