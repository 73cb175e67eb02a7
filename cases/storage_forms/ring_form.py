"""Storage form `ring`: a head-major cache whose slots are a ring buffer, as in decode with a sliding window.

    attention(q, k_cache, v_cache, *, cache_seqlens, window=None, ...)

`q` is `[rows, T, N, H]`, `k_cache` is `[rows, K, slots, H]`, `v_cache` is `[rows, K, slots, V]`, and `cache_seqlens` is
int32 `[rows]`. The names are those of flash-attention's `flash_attn_with_kvcache`. Token `p` of a sequence lies in slot
`p % slots` of its row. A sequence has `cache_seqlens[b]` tokens, and the last `slots` of them are in the cache. Its `T`
queries are its last tokens, so query `i` stands at position `cache_seqlens[b] - T + i`.

With `num_sink_tokens=F`, the first `F` tokens of each sequence stay in slots 0 to `F - 1`, and all queries see them
(StreamingLLM, arXiv:2309.17453). The other slots are the ring: token `p >= F` lies in slot `F + (p - F) % (slots - F)`.
The name of the parameter is that of `SinkCache` in Hugging Face transformers. The mask of the case says `F`.

A case id writes `ring16` for 16 slots. Every sequence has all `T` queries. Queries at negative positions, in a sequence
of fewer than `T` tokens, see no key.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cases.storage_forms.mask_sides import Sides
from cases.storage_forms.storage_form import (
    FIRST_PARAMETER,
    STORED_OPERANDS,
    StorageForm,
    StorageSpec,
    StoredCase,
)
from cases.storage_forms.storage_layout import NOBODY, Request, Storage, list_own_keys

TABLES = ("cache_seqlens",)


def find_mask_refusal(case: StoredCase, spec: StorageSpec, sides: Sides) -> str | None:
    """Return why a case's ring cannot hold all keys that the queries see, or None if it can."""
    assert spec.size is not None
    if spec.size <= sides.first:
        return f"mask: {spec.size} slots for {sides.first} first tokens leave none for the others"
    longest, slots = max(case.kv_lengths), spec.size - sides.first
    seen = None if sides.left is None else sides.left + case.q_length
    if longest <= spec.size or (seen is not None and seen <= slots):
        return None
    shown = "all" if seen is None else f"up to {seen}"
    return f"mask: {case.q_length} queries see {shown} of {longest} tokens, and {slots} slots have lost some"


def find_widest_left(storage: Storage, first: int) -> int | None:
    """Return the left side of the widest window whose keys the rings hold; None if they hold all keys."""
    (_, q_length), slots = storage.q_rows.shape, storage.held.shape[1]
    return slots - first - q_length if storage.tables["cache_seqlens"].max() > slots else None


def draw_layout(case: StoredCase, spec: StorageSpec) -> Storage:
    """Build the layout of a case; if B + T is odd, the cache has one more row, without a sequence."""
    assert spec.size is not None
    requests = [Request(row=b, queries=case.q_length, keys=n) for b, n in enumerate(case.kv_lengths)]
    held = np.full((case.batch + (case.batch + case.q_length) % 2, spec.size), NOBODY, np.int32)
    for row, request in enumerate(requests):
        place_keys(held[row], request, case.kv_length, first=case.first_tokens)
    return build_layout(requests, (case.batch, case.q_length, case.kv_length), held)


def place_keys(slots: np.ndarray, request: Request, kv_length: int, start: int = 0, *, first: int = 0) -> None:
    """Write a request's keys, from key `start` on, into its row's `slots [slots]`, in place of earlier keys.

    The first `first` keys of a request have slots of their own, which no later key takes.
    """
    for p in range(start, request.keys):
        slot = p if p < first else first + (p - first) % (len(slots) - first)
        slots[slot] = request.row * kv_length + p


def build_layout(requests: Sequence[Request | None], sizes: tuple[int, int, int], held: np.ndarray) -> Storage:
    """Build the layout of `requests`, one for each row of the cache.

    Args:
      requests: the sequence in each row of the cache; None for a row without a sequence. Further rows have no sequence.
      sizes: B, T and S of the dense problem.
      held: the dense key in each slot, `[rows, slots]`.
    """
    batch, q_length, kv_length = sizes
    rows = len(held)
    q_rows, places = np.full((rows, q_length), NOBODY, np.int32), np.full((batch, q_length), NOBODY, np.int32)
    lengths = np.zeros(rows, np.int32)
    for row, request in enumerate(requests):
        if request is None:
            continue
        i = np.arange(q_length - request.queries, q_length)
        q_rows[row, i], places[request.row, i] = request.row * q_length + i, row * q_length + i
        lengths[row] = request.keys
    return Storage(
        form="ring",
        q_rows=q_rows,
        places=places,
        held=held,
        owner=list_own_keys(batch, kv_length),
        tables={"cache_seqlens": lengths},
    )


def describe_layout(storage: Storage) -> str:
    """Describe a layout for messages: its rows and slots, and how many sequences have more tokens than slots."""
    rows, slots = storage.held.shape
    longer = int((storage.tables["cache_seqlens"] > slots).sum())
    return f"{rows} rows of {slots} slots, {longer} of them with more tokens than slots"


RING = StorageForm(
    name="ring",
    description="a head-major cache whose slots are a ring buffer, with the length of each sequence",
    prefixes={False: "ring"},
    unit="rings",
    has_q_lengths=False,
    is_cache=True,
    find_mask_refusal=find_mask_refusal,
    find_widest_left=find_widest_left,
    draw_layout=draw_layout,
    describe_layout=describe_layout,
    operands=("q", "k_cache", "v_cache"),
    tables=TABLES,
    parameters=(*TABLES, "causal", "window", FIRST_PARAMETER, *STORED_OPERANDS, "save_residuals"),
    required={"cache_seqlens": "how many tokens each sequence has, including its queries, [rows]"},
    marks=TABLES,
    noun="a ring buffer",
    arrange=lambda arrays: {"k_cache": arrays["k"].swapaxes(1, 2), "v_cache": arrays["v"].swapaxes(1, 2)},
    example="ring128",
    level="ring",
    condition="the cache is a ring buffer",
)
