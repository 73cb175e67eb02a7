"""Calls that write pages: the rows that new tokens go to, and pages before and after the call.

    attention(q, k, v, k_pages, v_pages, *, kv_lens, page_indices, cu_q_lens, num_seqs, window=None, ...)

The tokens of the queries are the last of their sequence. A call that writes gets their keys and values packed as the
queries are, puts them in their rows of the pages, attends to all keys, and returns the pages too. Every other row keeps
its bits (docs/contract.md, section 8).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import numpy as np

from cases.case import Case
from cases.counter_rng import draw_integers
from cases.operand_values import Problem
from cases.storage_forms.paged_form import count_shared_pages
from cases.storage_forms.storage_layout import NOBODY, Storage

PAGE_ARRAYS = ("k_pages", "v_pages")
"""The pages that such a call takes and returns."""
# The bits of a NaN that are set, and how many numbers its other ones, but for the sign, may be. The first bit of its
# fraction is set, as processors set it in what passes through. In bf16 there is no choice: on a CPU, XLA has a scatter
# of bf16 computed in f32, and every NaN comes back as this one.
_NAN = {"float16": (0x7E00, 0x200), "bfloat16": (0x7FC0, 1), "float32": (0x7FC00000, 0x400000)}
_FINITE = 2.0**6


@dataclasses.dataclass(frozen=True, eq=False)
class TokenSlots:
    """Where each packed token goes, int32 `[total_q]`: its key in the dense problem, its page, and its row there.

    All three are `NOBODY` for tokens past the last sequence.
    """

    key: np.ndarray
    page: np.ndarray
    row: np.ndarray

    @functools.cached_property
    def there(self) -> np.ndarray:
        """Which tokens are written, booleans `[total_q]`."""
        return self.key != NOBODY


def find_slots(storage: Storage) -> TokenSlots:
    """Return where the tokens of the queries go in pages."""
    tables = storage.tables
    size, (_, q_length), (_, kv_length) = storage.held.shape[1], storage.places.shape, storage.owner.shape
    key, page, row = (np.full(len(storage.q_rows), NOBODY, np.int32) for _ in range(3))
    for n in range(int(tables["num_seqs"][0])):
        start, stop = tables["cu_q_lens"][n : n + 2]
        j = np.arange(tables["kv_lens"][n] - (stop - start), tables["kv_lens"][n])
        key[start:stop] = storage.q_rows[start:stop] // q_length * kv_length + j
        page[start:stop] = tables["page_indices"][n, j // size]
        row[start:stop] = j % size
    return TokenSlots(key, page, row)


def clear_written(storage: Storage, slots: TokenSlots) -> np.ndarray:
    """Return the dense key in each place of each page before the call, `[pages, page_size]`."""
    held = storage.held.copy()
    held[slots.page[slots.there], slots.row[slots.there]] = NOBODY
    return held


def find_write_refusal(case: Case) -> str | None:
    """Return why no call that writes pages is asked for a case in pages, or None if one is."""
    spec = case.stored
    assert spec is not None
    lengths = list(zip(case.q_lengths, case.kv_lengths, strict=True))
    if any(queries > keys for queries, keys in lengths):
        return f"{case.storage}: more queries than keys, and the new tokens of a call that writes are among the keys"
    alike = count_shared_pages(spec, case.kv_lengths)
    kept = [max(alike), *alike[1:]]
    size = spec.size or 1
    if any(queries and (keys - queries) // size < pages for (queries, keys), pages in zip(lengths, kept, strict=True)):
        return f"{case.storage}: a page that sequences share would be written"
    return None


@dataclasses.dataclass(frozen=True, eq=False)
class Writing:
    """What one call writes.

    Attributes:
      tokens: `k` and `v`, packed as the queries are, with arbitrary numbers past the last sequence.
      before: `k_pages` and `v_pages` as the call gets them.
      after: the pages as it must return them.
      written: which rows it writes, booleans `[pages, page_size]`.
    """

    tokens: Mapping[str, np.ndarray]
    before: Mapping[str, np.ndarray]
    after: Mapping[str, np.ndarray]
    written: np.ndarray


def build_writing(
    problem: Problem, seed: int, *, finite: bool, before: Mapping[str, np.ndarray] | None = None
) -> Writing:
    """Build what the call of a problem in pages gets and must write.

    Args:
      problem: the operands, dense.
      seed: of the numbers where no key or value of the problem lies.
      finite: whether all of these are finite; else they are NaN of many bit patterns.
      before: pages as an earlier call left them; by default they hold the keys of the problem and arbitrary numbers.
    """
    storage = problem.storage
    assert storage is not None
    slots = find_slots(storage)
    held = clear_written(storage, slots)
    tokens, pools, after = {}, {}, {}
    for name, pool, x in (("k", "k_pages", problem.k), ("v", "v_pages", problem.v)):
        tokens[name] = _gather_pages(x, slots.key, seed, f"{name}-tokens", finite=finite)
        pools[pool] = _gather_pages(x, held, seed, pool, finite=finite) if before is None else before[pool]
        after[pool] = pools[pool].copy()
        after[pool][slots.page[slots.there], slots.row[slots.there]] = tokens[name][slots.there]
    written = np.zeros(held.shape, bool)
    written[slots.page[slots.there], slots.row[slots.there]] = True
    return Writing(tokens, pools, after, written)


def view_bits(x: np.ndarray) -> np.ndarray:
    """Return `x` as unsigned integers of its width, so that NaN can be compared."""
    return x.view(f"u{x.dtype.itemsize}")


def _gather_pages(x: np.ndarray, held: np.ndarray, seed: int, stream: str, *, finite: bool) -> np.ndarray:
    """Return `x [B, S, K, depth]` at the keys `held [...]`, `[..., K, depth]`, with arbitrary numbers elsewhere."""
    flat = x.reshape(-1, *x.shape[2:])
    anything = _draw_garbage(seed, stream, (*held.shape, *x.shape[2:]), x.dtype, finite=finite)
    return np.where((held != NOBODY)[..., None, None], flat[np.maximum(held, 0)], anything)


def _draw_garbage(seed: int, stream: str, shape: tuple[int, ...], dtype: np.dtype, *, finite: bool) -> np.ndarray:
    """Draw other bits for each row, so that a moved row shows: NaN of either sign, or numbers around 64."""
    drawn = draw_integers(seed, f"written-{stream}", shape, 2**31)
    sign = drawn % 2
    if finite:
        return ((1 - 2 * sign) * _FINITE * (1 + (drawn >> 1) / 2.0**30)).astype(dtype)
    fixed, free = _NAN[dtype.name]
    negative = sign << (8 * dtype.itemsize - 1)
    return (negative | fixed | (drawn >> 1) % free).astype(f"u{dtype.itemsize}").view(dtype)
