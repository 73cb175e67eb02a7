"""Storage form `paged`: packed queries, and a cache of keys and values in pages that a table lists for each sequence.

    attention(q, k_pages, v_pages, *, kv_lens, page_indices, cu_q_lens, num_seqs, window=None, ...)

`q` is `[total_q, N, H]`, `k_pages` is `[pages, page_size, K, H]` and `v_pages` is `[pages, page_size, K, V]`. If pages
are quantised, the function also gets `k_scales` and `v_scales`, f32 `[pages, page_size, K]`, the numbers `k_scale` and
`v_scale`, or other scales (`PAGED.scales`). `cases.storage_forms.page_writes` describes functions that write pages.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cases import quantization
from cases.counter_rng import draw_integers
from cases.storage_forms.packed_form import compute_max_seqs, compute_padding
from cases.storage_forms.storage_form import (
    MASK_PARAMETERS,
    STORED_OPERANDS,
    ScaleParameters,
    StorageForm,
    StorageSpec,
    StoredCase,
)
from cases.storage_forms.storage_layout import NOBODY, Request, Storage, draw_junk, list_own_keys, pack_queries

TABLES = ("kv_lens", "page_indices", "cu_q_lens", "num_seqs")
SCALES = ("k_scales", "v_scales")
"""The parameters that take a scale for each row of a page and head, f32 `[pages, page_size, K]`."""
WHOLE_SCALES = ("k_scale", "v_scale")
"""The parameters that take one scale for all keys and one for all values, as Python numbers."""
DESCALES = ("k_descale", "v_descale")
"""The parameters that take a scale for each sequence and head, f32 `[max_seqs, K]`."""
BLOCK_SCALES = ("k_block_scales", "v_block_scales")
"""The parameters that take a scale for each block of a row, `[pages, page_size, K, blocks]`."""
GLOBAL_SCALES = ("k_global_scale", "v_global_scale")
"""The parameters that take the scales over all blocks of keys and of values, as Python numbers."""
CHANNEL_SCALES = ("k_channel_scales", "v_token_scales")
"""The parameters for scales with zero points: of keys f32 `[pages, K, H]`, of values f32 `[pages, page_size, K]`."""
ZEROS = ("k_channel_zeros", "v_token_zeros")
"""The parameters for their zero points, of the same shapes."""
QUERY_PARAMETERS = ("q_scale", "q_descale", "out_dtype")
"""The parameters for queries in fp8: their scale, a Python number or f32 `[max_seqs, K]`, and the dtype of `out`."""
SCALED_FEATURES = frozenset({"kv_int8", "kv_fp8", "kv_token_scales"})
"""The features of pages with a scale for each token and head (`cases.quantization.PAGED_CACHES`)."""
WHOLE_FEATURES = frozenset({"kv_int8", "kv_fp8", "kv_tensor_scales"})
"""The features of pages with one scale for all keys and one for all values (`cases.quantization.WHOLE_CACHES`)."""
WRITTEN_FEATURES = WHOLE_FEATURES | {"kv_writes_scaled"}
"""The features of calls that write such pages (`cases.quantization.GIVEN_CACHES`)."""
SEQUENCE_FEATURES = frozenset({"kv_int8", "kv_fp8", "kv_sequence_scales"})
"""The features of pages with a scale for each sequence and head (`cases.quantization.SEQUENCE_CACHES`)."""
BLOCK_FEATURES = frozenset({"kv_mxfp8", "kv_nvfp4"})
"""The features of pages with scales of blocks (`cases.quantization.BLOCK_CACHES`)."""
CHANNEL_FEATURES = frozenset({"kv_channel_scales"})
"""The features of pages with zero points (`cases.quantization.CHANNEL_CACHES`)."""
COMPUTED_FEATURES = SCALED_FEATURES | {"kv_writes_computed"}
"""The features of calls that write pages and compute their scales (`cases.quantization.COMPUTED_CACHES`)."""
REQUIRED = {
    "page_indices": "the table of pages, [max_seqs, pages_per_seq]",
    "kv_lens": "how many keys each sequence has, [max_seqs]",
    "cu_q_lens": "where the queries of each sequence begin, [max_seqs + 1]",
}
_FURTHER = ("alibi_slopes", "score_mod", "logit_scale")
_UNUSED_PAGES = 3  # how many pages of a layout belong to no sequence


def check_lengths(text: str, q_lengths: Sequence[int], kv_lengths: Sequence[int]) -> None:
    """Raise `ValueError` for a sequence that has keys, but fewer keys than queries.

    The keys of a sequence include those of the tokens that are its queries, since a server writes them first.

    Raises:
      ValueError: naming the first such sequence, its lengths and what to change.
    """
    for b, (queries, keys) in enumerate(zip(q_lengths, kv_lengths, strict=True)):
        if 0 < keys < queries:
            raise ValueError(
                f"storage {text!r}: sequence {b} has {queries} queries but {keys} keys in its pages. The keys include "
                f"those of the queries' own tokens: give it at least {queries} keys or at most {keys} queries, or no "
                "keys at all"
            )


def draw_layout(case: StoredCase, spec: StorageSpec) -> Storage:
    """Draw the layout of a case. The seed decides the order of pages and the junk in unused entries, and no shape."""
    assert spec.size is not None
    q_lengths, kv_lengths, size = spec.get_q_lengths(case.batch, case.q_length), case.kv_lengths, spec.size
    counts = [-(-n // size) for n in kv_lengths]
    alike = count_shared_pages(spec, kv_lengths)
    pool = sum(counts) + _UNUSED_PAGES
    order = np.argsort(draw_integers(case.seed, "pages", (pool,), 2**32), kind="stable").tolist()
    first = tuple(order.pop() for _ in range(counts[0]))
    pages = [first] + [
        (*first[:same], *(order.pop() for _ in range(count - same)))
        for count, same in zip(counts[1:], alike[1:], strict=True)
    ]
    requests = [
        Request(row=b, queries=q, keys=n, pages=own)
        for b, (q, n, own) in enumerate(zip(q_lengths, kv_lengths, pages, strict=True))
    ]
    held = np.full((pool, size), NOBODY, np.int32)
    for request in reversed(requests):  # reversed, so that the first sequence owns the shared pages
        place_keys(held, request, case.kv_length)
    return build_layout(
        requests,
        (case.batch, case.q_length, case.kv_length),
        held,
        max_seqs=compute_max_seqs(case),
        total_q=sum(q_lengths) + compute_padding(case),
        pages_per_seq=max(1, -(-case.kv_length // size)) + (size + case.kv_length) % 3,
        seed=case.seed,
        form=spec.form,
    )


def count_shared_pages(spec: StorageSpec, kv_lengths: tuple[int, ...]) -> list[int]:
    """Return how many pages each sequence shares with the first: 0, or half of the pages that both fill, rounded up."""
    size = spec.size or 1
    return [(min(n, kv_lengths[0]) // size + 1) // 2 if spec.shared and b else 0 for b, n in enumerate(kv_lengths)]


def place_keys(held: np.ndarray, request: Request, kv_length: int, start: int = 0) -> None:
    """Write the keys of a request, from key `start` on, into its pages; this changes `held [pages, page_size]`."""
    size = held.shape[1]
    for j in range(start, request.keys):
        held[request.pages[j // size], j % size] = request.row * kv_length + j


def build_layout(
    requests: Sequence[Request],
    sizes: tuple[int, int, int],
    held: np.ndarray,
    *,
    max_seqs: int,
    total_q: int,
    pages_per_seq: int,
    seed: int,
    form: str,
) -> Storage:
    """Build the layout of `requests` in pages.

    Args:
      requests: the rows of the tables, in order.
      sizes: B, T and S of the dense problem.
      held: the dense key in each row of each page, `[pages, page_size]`.
      total_q: the number of packed queries, padding included.
      seed: the seed of the junk in table entries that no kernel may use.
    """
    batch, q_length, kv_length = sizes
    size = held.shape[1]
    kv_lens = draw_junk(seed, "kv_lens", (max_seqs,))
    indices = draw_junk(seed, "page_indices", (max_seqs, pages_per_seq))
    # A third of the entries that no kernel may use are valid page numbers, as stale entries of a server's table are.
    there = draw_integers(seed, "stale", indices.shape, 3) == 0
    indices = np.where(there, draw_integers(seed, "stale_pages", indices.shape, len(held)), indices).astype(np.int32)
    owner, rows = list_own_keys(batch, kv_length), np.full(max_seqs, NOBODY, np.int32)
    for n, request in enumerate(requests):
        kv_lens[n], rows[n] = request.keys, request.row
        indices[n, : len(request.pages)] = request.pages
        j = np.arange(request.keys)
        owner[request.row, : request.keys] = held[np.array(request.pages, int)[j // size], j % size]
    queries = pack_queries(requests, batch, q_length, max_seqs=max_seqs, total_q=total_q, seed=seed)
    return Storage(
        form=form,
        q_rows=queries.q_rows,
        places=queries.places,
        held=held,
        owner=owner,
        rows=rows,
        tables={
            "kv_lens": kv_lens,
            "page_indices": indices,
            "cu_q_lens": queries.cu_q_lens,
            "num_seqs": queries.num_seqs,
        },
    )


def describe_layout(storage: Storage) -> str:
    """Describe a layout for messages: the number and size of its pages, and whether sequences share pages."""
    pages, size = storage.held.shape
    shared = "some of them shared" if storage.shares else "none of them shared"
    return f"{pages} pages of {size}, {shared}; a table of {storage.tables['page_indices'].shape[1]} pages a sequence"


PAGED = StorageForm(
    name="paged",
    description="packed queries, and keys and values in pages that a table names",
    prefixes={False: "paged", True: "shared"},
    unit="pages",
    is_cache=True,
    takes_masks=True,
    further_operands=_FURTHER,
    maps_over_batch=False,
    check_lengths=check_lengths,
    draw_layout=draw_layout,
    describe_layout=describe_layout,
    tables=TABLES,
    parameters=(
        *(*TABLES, *SCALES, *WHOLE_SCALES, *DESCALES, *BLOCK_SCALES, *GLOBAL_SCALES),
        *(*CHANNEL_SCALES, *ZEROS, *QUERY_PARAMETERS),
        *("causal", "window", "indices", "local_window", *MASK_PARAMETERS),
        *(*STORED_OPERANDS, *_FURTHER, "save_residuals"),
    ),
    required=REQUIRED,
    marks=("page_indices",),
    noun="pages",
    scales=(
        ScaleParameters(
            names=SCALES,
            descriptions=(
                "the scales of k_pages, [pages, page_size, K]",
                "the scales of v_pages, [pages, page_size, K]",
            ),
            features=SCALED_FEATURES,
            written_features=COMPUTED_FEATURES,
            caches=(*quantization.PAGED_CACHES, *quantization.COMPUTED_CACHES),
        ),
        ScaleParameters(
            names=WHOLE_SCALES,
            descriptions=("the scale of all k_pages, a number", "the scale of all v_pages, a number"),
            features=WHOLE_FEATURES,
            written_features=WRITTEN_FEATURES,
            caches=(*quantization.WHOLE_CACHES, *quantization.GIVEN_CACHES, *quantization.UNIT_CACHES),
        ),
        ScaleParameters(
            names=DESCALES,
            descriptions=(
                "the scales of the keys of each sequence, [max_seqs, K]",
                "the scales of the values of each sequence, [max_seqs, K]",
            ),
            features=SEQUENCE_FEATURES,
            caches=quantization.SEQUENCE_CACHES,
        ),
        ScaleParameters(
            names=BLOCK_SCALES,
            descriptions=(
                "the scales of blocks of keys, [pages, page_size, K, H / 32]",
                "the scales of blocks of values, [pages, page_size, K, V / 32]",
            ),
            features=frozenset({"kv_mxfp8"}),
            caches=("kvmxfp8-block",),
        ),
        ScaleParameters(
            names=(*BLOCK_SCALES, *GLOBAL_SCALES),
            descriptions=(
                "the scales of blocks of keys, [pages, page_size, K, H / 16]",
                "the scales of blocks of values, [pages, page_size, K, V / 16]",
                "the scale over all keys, a number",
                "the scale over all values, a number",
            ),
            features=frozenset({"kv_nvfp4"}),
            caches=("kvnvfp4-block",),
        ),
        ScaleParameters(
            names=(*CHANNEL_SCALES, *ZEROS),
            descriptions=(
                "the scales of the channels of keys in each page, [pages, K, H]",
                "the scales of values, [pages, page_size, K]",
                "the zero points of the channels of keys, [pages, K, H]",
                "the zero points of values, [pages, page_size, K]",
            ),
            features=CHANNEL_FEATURES,
            caches=quantization.CHANNEL_CACHES,
        ),
    ),
    example="paged16",
    level="paged",
    condition="operands are paged",
)
