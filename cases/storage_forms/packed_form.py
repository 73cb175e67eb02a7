"""Storage form `packed`: all sequences concatenated along one axis, with cumulative lengths (variable-length layout).

    attention(q, k, v, *, cu_q_lens, cu_kv_lens, num_seqs, causal=False, window=None, ...)

`q` is `[total_q, N, H]`, `k` is `[total_kv, K, H]` and `v` is `[total_kv, K, V]`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cases.storage_forms.storage_form import (
    MASK_PARAMETERS,
    STORED_OPERANDS,
    StorageForm,
    StorageSpec,
    StoredCase,
)
from cases.storage_forms.storage_layout import NOBODY, Request, Storage, draw_junk, list_own_keys, pack_queries

TABLES = ("cu_q_lens", "cu_kv_lens", "num_seqs")
_FURTHER = ("segment_ids", "alibi_slopes", "score_mod", "logit_scale")


def compute_padding(case: StoredCase) -> int:
    """Compute how many tokens of padding follow the last sequence of the case: 0, 3 or 13."""
    return (0, 3, 13)[(case.q_length + case.kv_length) % 3]


def compute_max_seqs(case: StoredCase) -> int:
    """Compute how many sequences the tables of the case have room for: `batch` or up to two more."""
    return case.batch + (case.batch + case.q_length) % 3


def draw_layout(case: StoredCase, spec: StorageSpec) -> Storage:
    """Draw the layout of a case. The seed decides only the junk in unused table entries, and no shape."""
    q_lengths = spec.get_q_lengths(case.batch, case.q_length)
    rows = [Request(row=b, queries=q, keys=n) for b, (q, n) in enumerate(zip(q_lengths, case.kv_lengths, strict=True))]
    return build_layout(rows, case, compute_max_seqs(case), compute_padding(case))


def build_layout(requests: Sequence[Request], case: StoredCase, max_seqs: int, padding: int) -> Storage:
    """Build the layout of `requests`, with `padding` unused tokens after the last query and after the last key."""
    queries = pack_queries(
        requests,
        case.batch,
        case.q_length,
        max_seqs=max_seqs,
        total_q=sum(request.queries for request in requests) + padding,
        seed=case.seed,
    )
    held = [np.arange(request.keys) + request.row * case.kv_length for request in requests]
    starts = draw_junk(case.seed, "cu_kv_lens", (max_seqs + 1,))
    starts[: len(requests) + 1] = np.cumsum([0, *(request.keys for request in requests)])
    # Keep at least one place, so that no array of keys has an axis of length 0.
    end = np.full(max(padding, 1 if not sum(map(len, held)) else 0), NOBODY)
    return Storage(
        form="packed",
        q_rows=queries.q_rows,
        places=queries.places,
        held=np.concatenate([*held, end]).astype(np.int32),
        owner=list_own_keys(case.batch, case.kv_length),
        tables={"cu_q_lens": queries.cu_q_lens, "cu_kv_lens": starts, "num_seqs": queries.num_seqs},
    )


PACKED = StorageForm(
    name="packed",
    description="sequences packed behind each other, with cumulative lengths",
    prefixes={False: "packed"},
    is_cache=False,
    takes_masks=True,
    further_operands=_FURTHER,
    draw_layout=draw_layout,
    describe_layout=lambda storage: f"{len(storage.held)} packed keys",
    tables=TABLES,
    parameters=(
        *(*TABLES, "causal", "window", "indices", "local_window", *MASK_PARAMETERS),
        *(*STORED_OPERANDS, *_FURTHER, "save_residuals"),
    ),
    required={
        "cu_q_lens": "where the queries of each sequence begin, [max_seqs + 1]",
        "cu_kv_lens": "where the keys of each sequence begin, [max_seqs + 1]",
    },
    # `kv_lens` is a table of paged functions. A function with it, but without `page_indices`, counts as packed, and the
    # message then names the tables that it lacks.
    marks=(*TABLES, "kv_lens"),
    noun="packed sequences",
    example="packed",
    level="packed",
    condition="operands are packed",
)
