"""Record where the queries, keys and values of a dense problem lie in memory.

A layout is integers alone: which dense query each stored one is, which dense key lies in each place of a cache, and the
tables by which a kernel finds them. The queries of a sequence are the last of its `T`, so that the positions of the
mask are those of the contract (docs/contract.md, section 8).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import numpy as np

from cases.counter_rng import draw_integers

NOBODY = -1
"""Marks a place where no query or key of the problem lies."""
# Entries of tables that no kernel may use: beyond every page, before the first, and numbers that could be a page.
_JUNK_ENTRIES = (2**31 - 1, -1, -(2**31), 0, 1, 2**20)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Storage:
    """Where all operands of a problem lie, in int32.

    Attributes:
      form: the name of the storage form.
      q_rows: the dense query `b * T + i` that each stored query is, or `NOBODY`: `[total_q]` where queries are packed,
        `[rows, T]` where each sequence has a row.
      places: `[B, T]`, the place in the flattened `q_rows` of each dense query, or `NOBODY`.
      held: the dense key `b * S + j` in each place of the keys, or `NOBODY`: `[total_kv]`, `[pages, page_size]` or
        `[rows, slots]`.
      owner: `[B, S]`, the dense key in the place where a kernel reads this one: another key where pages are shared.
      tables: the arrays by which a kernel finds queries and keys, by name.
      stale: the number in memory that holds nothing of the problem; none for the worst that a kernel must bear.
    """

    form: str
    q_rows: np.ndarray
    places: np.ndarray
    held: np.ndarray
    owner: np.ndarray
    tables: Mapping[str, np.ndarray]
    stale: float | None = None

    @functools.cached_property
    def arrays(self) -> Mapping[str, np.ndarray]:
        """The arrays that a stored call needs: its tables, and where queries and keys lie."""
        return {**self.tables, "q_rows": self.q_rows, "places": self.places, "held": self.held}

    @property
    def present(self) -> np.ndarray:
        """Which dense queries there are, booleans `[B, T]`."""
        return self.places != NOBODY

    @functools.cached_property
    def shares(self) -> bool:
        """Whether two dense keys lie in one place."""
        return bool((self.owner.ravel() != np.arange(self.owner.size)).any())

    def settle(self, x: np.ndarray) -> np.ndarray:
        """Return `x [B, S, ...]` as it is stored: a key that shares its place is what the owner of the place is."""
        if not self.shares:
            return x
        return x.reshape(-1, *x.shape[2:])[self.owner.ravel()].reshape(x.shape)

    def spread_over_shared(self, keys: np.ndarray) -> np.ndarray:
        """Return booleans `[B, S, ...]` that are true of a key if they are true of any key in its place."""
        if not self.shares:
            return keys
        flat = keys.reshape(-1, *keys.shape[2:])
        found = np.zeros_like(flat)
        np.logical_or.at(found, self.owner.ravel(), flat)
        return self.settle(found.reshape(keys.shape))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A sequence that a call gets, one row of its tables.

    Attributes:
      row: the batch row of the sequence in the dense problem.
      queries: how many of its `T` queries the call has, the last ones.
      keys: how many of its keys the call may read.
      pages: its pages in order, where there are pages.
    """

    row: int
    queries: int
    keys: int
    pages: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedQueries:
    """Queries of all sequences behind each other: two fields of a `Storage`, and two of its tables."""

    q_rows: np.ndarray
    places: np.ndarray
    cu_q_lens: np.ndarray
    num_seqs: np.ndarray


def pack_queries(
    requests: Sequence[Request], batch: int, q_length: int, *, max_seqs: int, total_q: int, seed: int
) -> PackedQueries:
    """Return where queries lie if those of all requests are packed behind each other.

    Args:
      requests: the rows of the tables, in order.
      batch: B of the dense problem.
      q_length: T of the dense problem.
      max_seqs: the number of rows of the tables.
      total_q: the number of packed queries, with padding.
      seed: of entries that no kernel may use.
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
    """Return the owners, int32 `[B, S]`, where each key has a place of its own."""
    return np.arange(batch * kv_length, dtype=np.int32).reshape(batch, kv_length)


def draw_junk(seed: int, stream: str, shape: tuple[int, ...]) -> np.ndarray:
    """Draw table entries that no kernel may use, int32."""
    return np.take(_JUNK_ENTRIES, draw_integers(seed, f"junk-{stream}", shape, len(_JUNK_ENTRIES))).astype(np.int32)
