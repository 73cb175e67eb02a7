"""Compute what a call that writes pages must do: the rows that new tokens go to, and the pages before and after it.

    attention(q, k, v, k_pages, v_pages, *, kv_lens, page_indices, cu_q_lens, num_seqs, window=None, ...)

The new tokens of a sequence are its queries and its last keys. The call gets their keys and values as `k` and `v`,
packed as the queries are. It writes them into their rows of the pages, attends to all keys, and returns the output and
the pages. Every other row must keep its bits (docs/contract.md, section 8).

If the pages are quantised, the keys and values of a problem are stored numbers, and `k` and `v` of the call are values
that it must turn into these.

Calls over latents get queries and new latents in two parts, the compressed part and the rotary part:

    attention(q_nope, q_pe, c_kv, k_pe, latent_pages, *, scale, kv_lens, page_indices, cu_q_lens, num_seqs, ...)
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cases import quantization
from cases.case import Case
from cases.counter_rng import draw_integers, draw_uniform
from cases.operand_values import Problem
from cases.storage_forms.paged_form import SCALES, count_shared_pages
from cases.storage_forms.storage_layout import NOBODY, Storage


@dataclasses.dataclass(frozen=True)
class WriteForm:
    """The operands of a call that writes pages, in one storage form."""

    queries: tuple[str, ...]  # the names of the arrays of queries; two for the two parts of a latent's queries
    tokens: tuple[str, ...]  # the names of the arrays of new tokens; two for the two parts of a latent
    pools: tuple[str, ...]  # the names of the arrays of pages, in the order in which the call returns them
    scales: tuple[str, ...] = ()  # the names of the arrays of scales, which a call that computes scales returns too

    @property
    def operands(self) -> tuple[str, ...]:
        """The names of the call's positional arguments, in order."""
        return (*self.queries, *self.tokens, *self.pools)

    def name_queries(self, q: Any, value_dim: int) -> dict[str, Any]:
        """Return the queries `[..., H]` by name, in two parts if the form has two."""
        return {self.queries[0]: q} if len(self.queries) == 1 else _split_latent(self.queries, q, value_dim)

    def name_tokens(self, arrays: Sequence[Any], value_dim: int) -> dict[str, Any]:
        """Return the new tokens by name, from new keys and values, or from new latents `[..., H]` alone."""
        if len(arrays) == len(self.tokens):
            return dict(zip(self.tokens, arrays, strict=True))
        return _split_latent(self.tokens, arrays[0], value_dim)


def _split_latent(names: tuple[str, ...], x: Any, value_dim: int) -> dict[str, Any]:
    """Split `x [..., H]` into its first `value_dim` coordinates and the others, by name."""
    return dict(zip(names, (x[..., :value_dim], x[..., value_dim:]), strict=True))


WRITE_FORMS = {
    "paged": WriteForm(("q",), ("k", "v"), ("k_pages", "v_pages"), SCALES),
    "latent_pages": WriteForm(("q_nope", "q_pe"), ("c_kv", "k_pe"), ("latent_pages",)),
}
"""The operands of calls that write pages, by the name of each storage form that has such calls."""
# For each dtype, the bits that are set in every NaN that is drawn, and the number of values of the bits that are free
# (the sign is free too). The first bit of the fraction is always set, because processors set it in any NaN that passes
# through them. In bf16 there is only one NaN of each sign: on a CPU, XLA computes a scatter of bf16 in f32, which turns
# every NaN into this one.
_NAN = {"float16": (0x7E00, 0x200), "bfloat16": (0x7FC0, 1), "float32": (0x7FC00000, 0x400000)}
_NAN |= {"float8_e4m3fn": (0x7F, 1)}
_FINITE = 2.0**6


@dataclasses.dataclass(frozen=True, eq=False)
class TokenSlots:
    """The place in the pages that each packed token is written to; all arrays are int32 `[total_q]`.

    Tokens of padding, past the last sequence, have `NOBODY` in all arrays.
    """

    key: np.ndarray  # the token's key in the dense problem, `b * S + j`
    page: np.ndarray  # the page that the token is written to
    row: np.ndarray  # the row within that page

    @functools.cached_property
    def there(self) -> np.ndarray:
        """Whether each packed token is written, booleans `[total_q]`; padding is not."""
        return self.key != NOBODY


def find_slots(storage: Storage) -> TokenSlots:
    """Find the page and the row that each new token is written to."""
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
    """Return the dense key in each page row before the call, `[pages, page_size]`; rows to be written have `NOBODY`."""
    held = storage.held.copy()
    held[slots.page[slots.there], slots.row[slots.there]] = NOBODY
    return held


def find_write_refusal(case: Case) -> str | None:
    """Return why a call that writes pages cannot be judged on a paged case, or None if it can."""
    spec = case.stored
    assert spec is not None
    lengths = list(zip(case.q_lengths, case.kv_lengths, strict=True))
    if any(queries > keys for queries, keys in lengths):
        return f"{case.storage}: more queries than keys, but the new tokens of a call that writes are among the keys"
    if len(WRITE_FORMS[spec.form].queries) > 1 and case.head_dim == case.v_head_dim:
        return f"{case.storage}: no rotary part, and a call that writes latents gets this part by itself"
    alike = count_shared_pages(spec, case.kv_lengths)
    kept = [max(alike), *alike[1:]]
    size = spec.size or 1
    if any(queries and (keys - queries) // size < pages for (queries, keys), pages in zip(lengths, kept, strict=True)):
        return f"{case.storage}: a page that sequences share would be written"
    return None


@dataclasses.dataclass(frozen=True, eq=False)
class Writing:
    """The inputs of a call that writes pages, and the pages that it must return."""

    # The new tokens by name, packed as the queries are, with arbitrary numbers in the padding.
    tokens: Mapping[str, np.ndarray]
    # The arrays of pages by name, as the call gets them, and those of scales if it computes scales.
    before: Mapping[str, np.ndarray]
    after: Mapping[str, np.ndarray]  # the same arrays as the call must return them
    written: np.ndarray  # whether the call writes each row, booleans `[pages, page_size]`


def build_writing(
    problem: Problem, seed: int, *, finite: bool, before: Mapping[str, np.ndarray] | None = None
) -> Writing:
    """Build the inputs of a call that writes pages, and the pages that it must return.

    Args:
      seed: the seed of the arbitrary numbers in rows that hold no key or value of the problem.
      finite: whether these arbitrary numbers are finite; otherwise they are NaNs of many bit patterns.
      before: the pages that an earlier call returned. By default, pages are built from the earlier keys of the problem,
        with arbitrary numbers in all other rows.
    """
    storage = problem.storage
    assert storage is not None
    slots, form = find_slots(storage), WRITE_FORMS[storage.form]
    held = clear_written(storage, slots)
    keys = (problem.k, problem.v) if len(form.pools) > 1 else (problem.k[:, :, 0],)
    given = keys if problem.kv_scales is None else tuple(build_raw_operands(problem).values())
    new, pools, after = [], dict(before or {}), {}

    def write(pool: str, x: np.ndarray, rows: np.ndarray) -> None:
        if pool not in pools:
            pools[pool] = _gather_pages(x, held, seed, pool, finite=finite)
        after[pool] = pools[pool].copy()
        after[pool][slots.page[slots.there], slots.row[slots.there]] = rows

    for pool, x, raw in zip(form.pools, keys, given, strict=True):
        stream = f"{pool.removesuffix('_pages')}-tokens"
        new.append(_gather_pages(raw, slots.key, seed, stream, finite=finite))
        write(pool, x, x.reshape(-1, *x.shape[2:])[slots.key[slots.there]])
    if problem.computes_scales:
        assert problem.kv_scales is not None
        for pool, x, tokens in zip(form.scales, problem.kv_scales, new, strict=True):
            write(pool, x, find_token_scales(tokens[slots.there], problem.k.dtype))
    written = np.zeros(held.shape, bool)
    written[slots.page[slots.there], slots.row[slots.there]] = True
    return Writing(form.name_tokens(new, problem.v.shape[-1]), pools, after, written)


def find_token_scales(tokens: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Find the f32 scales `[tokens, K]` of raw tokens `[tokens, K, D]` for a stored dtype; 0 for tokens of zeros."""
    largest = quantization.find_largest(dtype)
    assert largest is not None
    return (np.abs(tokens.astype(np.float64)).max(axis=-1) / largest).astype(np.float32)


def build_raw_operands(problem: Problem) -> dict[str, np.ndarray]:
    """Build `k [B, S, K, H]` and `v [B, S, K, V]` in the dtype of q that a call must quantise to those of `problem`."""
    assert problem.kv_scales is not None
    return {
        name: quantization.build_raw_tokens(
            stored, scale, problem.q.dtype, draw_uniform(0, f"raw-{name}", stored.shape)
        )
        for name, stored, scale in zip(("k", "v"), (problem.k, problem.v), problem.kv_scales, strict=True)
    }


def view_bits(x: np.ndarray) -> np.ndarray:
    """View the bits of `x` as unsigned integers of the same width, so that NaNs can be compared."""
    return x.view(f"u{x.dtype.itemsize}")


def _gather_pages(x: np.ndarray, held: np.ndarray, seed: int, stream: str, *, finite: bool) -> np.ndarray:
    """Gather `x [B, S, *axes]` at keys `held [...]` as `[..., *axes]`, with arbitrary numbers for `NOBODY`."""
    flat = x.reshape(-1, *x.shape[2:])
    anything = _draw_garbage(seed, stream, (*held.shape, *x.shape[2:]), x.dtype, finite=finite)
    there = (held != NOBODY).reshape(*held.shape, *(1,) * (x.ndim - 2))
    return np.where(there, flat[np.maximum(held, 0)], anything)


def _draw_garbage(seed: int, stream: str, shape: tuple[int, ...], dtype: np.dtype, *, finite: bool) -> np.ndarray:
    """Draw NaNs, or magnitudes of 64 to 128, whose bits differ from row to row, so that a moved row is noticed.

    Integers, which have no NaN, may be any.
    """
    drawn = draw_integers(seed, f"written-{stream}", shape, 2**31)
    if dtype == np.int8:
        return (drawn >> 1).astype(np.uint8).view(np.int8)
    sign = drawn % 2
    if finite:
        return ((1 - 2 * sign) * _FINITE * (1 + (drawn >> 1) / 2.0**30)).astype(dtype)
    fixed, free = _NAN[dtype.name]
    negative = sign << (8 * dtype.itemsize - 1)
    return (negative | fixed | (drawn >> 1) % free).astype(f"u{dtype.itemsize}").view(dtype)
