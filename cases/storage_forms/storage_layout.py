"""Define `Storage`, the layout of a case: where the queries, keys and values of a dense problem lie in memory.

A layout has only integers. They say which dense query each stored query is, which dense key lies in each place of a
cache, and what is in the tables by which a kernel finds them. Storage forms draw layouts, and
`conformance.execution.stored_calls` uses them to store dense operands. A sequence with fewer than `T` queries has the
last of the `T`, so that the mask's positions are those of the contract (docs/contract.md, section 8).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import numpy as np

from cases.counter_rng import draw_integers

NOBODY = -1
"""Marks a place where no query or key of the problem lies."""
JUNK_ENTRIES = (2**31 - 1, -1, -(2**31), 0, 1, 2**20)
"""Junk for table entries that no kernel may use: indices above every page, negative indices, and plausible indices."""


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Storage:
    """The place in memory of every operand of a problem; all arrays are int32."""

    form: str
    # For each stored query, its dense query `b * T + i`, or `NOBODY`. The shape is `[total_q]` if queries are packed,
    # and `[rows, T]` if each sequence has a row.
    q_rows: np.ndarray
    places: np.ndarray  # for each dense query, its index in the flattened `q_rows`, or `NOBODY`, `[B, T]`
    # For each place of a key, the dense key `b * S + j` that lies there, or `NOBODY`. The shape is `[total_kv]`,
    # `[pages, page_size]` or `[rows, slots]`.
    held: np.ndarray
    # For each dense key, the dense key whose value a kernel reads in its stead, `[B, S]`. It is another key only if
    # sequences share a page.
    owner: np.ndarray
    tables: Mapping[str, np.ndarray]  # the arrays by which a kernel finds queries and keys, by name
    # For each row of the tables, its batch row in the dense problem, or `NOBODY`, `[max_seqs]`. None if no array of the
    # form has such rows.
    rows: np.ndarray | None = None
    # The number that fills memory without an operand of the problem. None for the worst number that the kernel must
    # tolerate: NaN, or a finite number if the kernel declares that such memory must be finite.
    stale: float | None = None

    @functools.cached_property
    def arrays(self) -> Mapping[str, np.ndarray]:
        """The integer arrays that a stored call needs: its tables, `q_rows`, `places` and `held`."""
        return {**self.tables, "q_rows": self.q_rows, "places": self.places, "held": self.held}

    @property
    def present(self) -> np.ndarray:
        """Whether each dense query is stored, booleans `[B, T]`."""
        return self.places != NOBODY

    @functools.cached_property
    def shares(self) -> bool:
        """Whether any two dense keys lie in the same place, because sequences share pages."""
        return bool((self.owner.ravel() != np.arange(self.owner.size)).any())

    def settle(self, x: np.ndarray) -> np.ndarray:
        """Return `x [B, S, ...]` as a kernel reads it: a key in a shared place has the value of the place's owner."""
        if not self.shares:
            return x
        return x.reshape(-1, *x.shape[2:])[self.owner.ravel()].reshape(x.shape)

    def spread_over_shared(self, keys: np.ndarray) -> np.ndarray:
        """Return booleans `[B, S, ...]` that are true for a key if `keys` is true for any key in the same place."""
        if not self.shares:
            return keys
        flat = keys.reshape(-1, *keys.shape[2:])
        found = np.zeros_like(flat)
        np.logical_or.at(found, self.owner.ravel(), flat)
        return self.settle(found.reshape(keys.shape))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One sequence of a call, which is one row of the call's tables."""

    row: int  # the batch row of the sequence in the dense problem
    queries: int  # the number of queries in the call; they are the last of the `T` queries of the batch row
    keys: int  # the number of keys that the call may read, from key 0 on
    pages: tuple[int, ...] = ()  # the indices of the sequence's pages, in order; empty in forms without pages


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedQueries:
    """The layout of packed queries: the fields `q_rows` and `places` of a `Storage`, and two of its tables."""

    q_rows: np.ndarray
    places: np.ndarray
    cu_q_lens: np.ndarray
    num_seqs: np.ndarray


def pack_queries(
    requests: Sequence[Request], batch: int, q_length: int, *, max_seqs: int, total_q: int, seed: int
) -> PackedQueries:
    """Compute the layout of the queries of all requests, concatenated in order.

    Args:
      requests: the rows of the tables, in order.
      total_q: the number of packed queries, padding included.
      seed: the seed of the junk in table entries that no kernel may use.
    """
    starts = draw_junk(seed, "cu_q_lens", (max_seqs + 1,))
    q_rows, places = np.full(total_q, NOBODY, np.int32), np.full((batch, q_length), NOBODY, np.int32)
    at = 0
    for n, request in enumerate(requests):
        starts[n] = at
        here = np.arange(at, at + request.queries)
        rows = np.arange(q_length - request.queries, q_length)
        q_rows[here], places[request.row, rows] = request.row * q_length + rows, here
        at += request.queries
    starts[len(requests)] = at
    return PackedQueries(q_rows=q_rows, places=places, cu_q_lens=starts, num_seqs=np.array([len(requests)], np.int32))


def list_own_keys(batch: int, kv_length: int) -> np.ndarray:
    """Return `Storage.owner`, int32 `[B, S]`, for a layout in which no two keys share a place."""
    return np.arange(batch * kv_length, dtype=np.int32).reshape(batch, kv_length)


def draw_junk(seed: int, stream: str, shape: tuple[int, ...]) -> np.ndarray:
    """Draw junk for table entries that no kernel may use, int32 of this shape."""
    return np.take(JUNK_ENTRIES, draw_integers(seed, f"junk-{stream}", shape, len(JUNK_ENTRIES))).astype(np.int32)
