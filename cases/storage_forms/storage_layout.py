"""Where the queries, keys and values of a dense problem lie: packed behind each other, or in pages that a table names.

The problem stays `[B, T, ...]` and `[B, S, ...]`. What is here are integers: which dense query each packed one is,
which dense key lies in each place of each page, and the operands by which a kernel finds them. Queries of a sequence
are the last of its `T`, so that the mask's positions are those of the contract.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from cases.counter_rng import draw_integers
from cases.storage_forms import storage_spec as specs
from cases.storage_forms.storage_spec import Kind

if TYPE_CHECKING:  # a case knows how its storage is written, and nothing of what that means
    from cases.case import Case

NOBODY = -1
"""Stands where no query or key of the problem lies."""
TABLES: dict[Kind, tuple[str, ...]] = {
    "packed": ("cu_q_lens", "cu_kv_lens", "num_seqs"),
    "paged": ("kv_lens", "page_indices", "cu_q_lens", "num_seqs"),
    "latent": (),
    "latent_pages": ("kv_lens", "page_indices", "cu_q_lens", "num_seqs"),
}
"""The operands of a call beside q, k and v, by kind."""
SCALES = ("k_scales", "v_scales")
"""What a call gets with pages that have scales: those of each row of a page and head, f32 `[pages, page_size, K]`."""
WHOLE_SCALES = ("k_scale", "v_scale")
"""Likewise, where all keys have one scale and all values one: Python numbers."""
# What stands in entries that nobody may use: beyond every page, before the first, and what a page could be.
_JUNK_ENTRIES = (2**31 - 1, -1, -(2**31), 0, 1, 2**20)
# Pages to which no table refers.
_UNUSED_PAGES = 3


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Storage:
    """Where everything lies, all int32.

    Attributes:
      kind: `"packed"`, `"paged"` or `"latent_pages"`.
      q_rows: `[total_q]`, the dense query `b * T + i` that each packed query is, or `NOBODY`.
      places: `[B, T]`, the packed query that each dense one is, or `NOBODY`.
      held: `[pages, page_size]` or `[total_kv]`, the dense key `b * S + j` that lies there, or `NOBODY`.
      owner: `[B, S]`, the dense key that lies where the table says this one does: another one where pages are shared.
      cu_q_lens: `[max_seqs + 1]`, where the queries of each sequence begin.
      num_seqs: `[1]`, how many sequences there are; entries past them hold anything.
      kv_lens: `[max_seqs]`, how many keys each has; with pages.
      page_indices: `[max_seqs, pages_per_seq]`, its pages in order; with pages.
      cu_kv_lens: `[max_seqs + 1]`, where its keys begin; packed.
      stale: what memory holds where nobody's operands lie, none for what it may hold at worst.
    """

    kind: Kind
    q_rows: np.ndarray
    places: np.ndarray
    held: np.ndarray
    owner: np.ndarray
    cu_q_lens: np.ndarray
    num_seqs: np.ndarray
    kv_lens: np.ndarray | None = None
    page_indices: np.ndarray | None = None
    cu_kv_lens: np.ndarray | None = None
    stale: float | None = None

    @functools.cached_property
    def arrays(self) -> Mapping[str, np.ndarray]:
        """What a call needs to store the dense problem and to read it: the tables of its kind, and what lies where."""
        tables = {name: getattr(self, name) for name in TABLES[self.kind]}
        return {**tables, "q_rows": self.q_rows, "places": self.places, "held": self.held}

    @property
    def present(self) -> np.ndarray:
        """Which dense queries there are, booleans `[B, T]`."""
        return self.places != NOBODY

    @functools.cached_property
    def shares(self) -> bool:
        """Whether some key lies where another one does."""
        return bool((self.owner.ravel() != np.arange(self.owner.size)).any())

    def settled(self, x: np.ndarray) -> np.ndarray:
        """`x [B, S, ...]` as it is stored: what shares a place is what its owner is."""
        if not self.shares:
            return x
        return x.reshape(-1, *x.shape[2:])[self.owner.ravel()].reshape(x.shape)

    def anywhere(self, keys: np.ndarray) -> np.ndarray:
        """Booleans `[B, S, ...]` that are true of a key if they are of any that shares its place."""
        if not self.shares:
            return keys
        flat = keys.reshape(-1, *keys.shape[2:])
        found = np.zeros_like(flat)
        np.logical_or.at(found, self.owner.ravel(), flat)
        return self.settled(found.reshape(keys.shape))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One row of the tables: a sequence of the dense problem, how much of it there is, and its pages in order."""

    row: int  # of the dense problem
    queries: int  # the last of its T
    keys: int
    pages: tuple[int, ...] = ()


def draw_storage(case: Case) -> Storage | None:
    """The storage of a case, drawn from its seed; shapes go by the case alone. None if no table says where they lie."""
    if case.storage is None:
        return None
    spec = specs.parse_storage(case.storage, case.batch, case.q_length)
    if spec.kind == "latent":
        return None
    q_lengths, kv_lengths = spec.lengths(case.batch, case.q_length), case.kv_lengths
    max_seqs = case.batch + (case.batch + case.q_length) % 3
    padding = (0, 3, 13)[(case.q_length + case.kv_length) % 3]
    sizes = (case.batch, case.q_length, case.kv_length)
    if spec.page_size is None:
        rows = tuple(
            Request(row=b, queries=q, keys=n) for b, (q, n) in enumerate(zip(q_lengths, kv_lengths, strict=True))
        )
        return build_packed(
            rows, sizes, max_seqs=max_seqs, total_q=sum(q_lengths) + padding, padding=padding, seed=case.seed
        )
    size = spec.page_size
    counts = [-(-n // size) for n in kv_lengths]
    alike = count_shared_pages(spec, kv_lengths)
    pool = sum(counts) + _UNUSED_PAGES
    order = np.argsort(draw_integers(case.seed, "pages", (pool,), 2**32), kind="stable").tolist()
    first = tuple(order.pop() for _ in range(counts[0]))
    pages = [first] + [
        (*first[:same], *(order.pop() for _ in range(count - same)))
        for count, same in zip(counts[1:], alike[1:], strict=True)
    ]
    rows = tuple(
        Request(row=b, queries=q, keys=n, pages=own)
        for b, (q, n, own) in enumerate(zip(q_lengths, kv_lengths, pages, strict=True))
    )
    held = np.full((pool, size), NOBODY, np.int32)
    for request in reversed(rows):  # the first sequence owns what is shared
        place_keys(held, request, case.kv_length)
    width = max(1, -(-case.kv_length // size)) + (size + case.kv_length) % 3
    return build_paged(
        rows,
        sizes,
        held,
        max_seqs=max_seqs,
        total_q=sum(q_lengths) + padding,
        pages_per_seq=width,
        seed=case.seed,
        kind=spec.kind,
    )


def count_shared_pages(spec: specs.Spec, kv_lengths: tuple[int, ...]) -> list[int]:
    """How many pages each sequence has from the first one: whole ones alone, half of those that both fill."""
    size = spec.page_size or 1
    return [(min(n, kv_lengths[0]) // size + 1) // 2 if spec.shared and b else 0 for b, n in enumerate(kv_lengths)]


def place_keys(held: np.ndarray, request: Request, kv_length: int, start: int = 0) -> None:
    """Put the keys from `start` on of a request in its pages; `held [pages, page_size]` is changed."""
    size = held.shape[1]
    for j in range(start, request.keys):
        held[request.pages[j // size], j % size] = request.row * kv_length + j


def build_paged(
    requests: tuple[Request, ...],
    sizes: tuple[int, int, int],
    held: np.ndarray,
    *,
    max_seqs: int,
    total_q: int,
    pages_per_seq: int,
    seed: int,
    kind: Kind = "paged",
) -> Storage:
    """The storage of `requests` in pages.

    Args:
      requests: the rows of the tables, in order.
      sizes: B, T and S of the dense problem.
      held: the dense key that lies in each place of each page, `[pages, page_size]`.
      max_seqs: how many rows the tables have.
      total_q: how many packed queries there are, with padding.
      pages_per_seq: how many entries a row of the table has.
      seed: of what stands in entries that nobody may use.
      kind: what lies in the pages.
    """
    batch, _, kv_length = sizes
    size = held.shape[1]
    kv_lens = _draw_junk(seed, "kv_lens", (max_seqs,))
    indices = _draw_junk(seed, "page_indices", (max_seqs, pages_per_seq))
    # Among what nobody may use are also pages that there are.
    there = draw_integers(seed, "stale", indices.shape, 3) == 0
    indices = np.where(there, draw_integers(seed, "stale_pages", indices.shape, len(held)), indices).astype(np.int32)
    owner = np.arange(batch * kv_length, dtype=np.int32).reshape(batch, kv_length)
    for n, request in enumerate(requests):
        kv_lens[n] = request.keys
        indices[n, : len(request.pages)] = request.pages
        j = np.arange(request.keys)
        owner[request.row, : request.keys] = held[np.array(request.pages, int)[j // size], j % size]
    return Storage(
        kind=kind,
        **_place_queries(requests, sizes, max_seqs=max_seqs, total_q=total_q, seed=seed),
        held=held,
        owner=owner,
        kv_lens=kv_lens,
        page_indices=indices,
    )


def build_packed(
    requests: tuple[Request, ...], sizes: tuple[int, int, int], *, max_seqs: int, total_q: int, padding: int, seed: int
) -> Storage:
    """The storage of `requests` with keys behind each other too, and as much padding behind them."""
    batch, _, kv_length = sizes
    held = [np.arange(request.keys) + request.row * kv_length for request in requests]
    starts = _draw_junk(seed, "cu_kv_lens", (max_seqs + 1,))
    starts[: len(requests) + 1] = np.cumsum([0, *(request.keys for request in requests)])
    # A tensor without any keys would be no tensor.
    end = np.full(max(padding, 1 if not sum(map(len, held)) else 0), NOBODY)
    return Storage(
        kind="packed",
        **_place_queries(requests, sizes, max_seqs=max_seqs, total_q=total_q, seed=seed),
        held=np.concatenate([*held, end]).astype(np.int32),
        owner=np.arange(batch * kv_length, dtype=np.int32).reshape(batch, kv_length),
        cu_kv_lens=starts,
    )


def _place_queries(
    requests: tuple[Request, ...], sizes: tuple[int, int, int], *, max_seqs: int, total_q: int, seed: int
) -> dict[str, Any]:
    """What is the same for both kinds: where queries lie."""
    batch, q_length, _ = sizes
    starts = _draw_junk(seed, "cu_q_lens", (max_seqs + 1,))
    q_rows, places = np.full(total_q, NOBODY, np.int32), np.full((batch, q_length), NOBODY, np.int32)
    at = 0
    for n, request in enumerate(requests):
        starts[n] = at
        here = np.arange(at, at + request.queries)
        rows = np.arange(q_length - request.queries, q_length)
        q_rows[here], places[request.row, rows] = request.row * q_length + rows, here
        at += request.queries
    starts[len(requests)] = at
    return {
        "q_rows": q_rows,
        "places": places,
        "cu_q_lens": starts,
        "num_seqs": np.array([len(requests)], np.int32),
    }


def _draw_junk(seed: int, stream: str, shape: tuple[int, ...]) -> np.ndarray:
    return np.take(_JUNK_ENTRIES, draw_integers(seed, f"junk-{stream}", shape, len(_JUNK_ENTRIES))).astype(np.int32)
