"""Validate a call's operands over packed sequences, and compute the range of keys that each query sees.

The queries of a sequence are contiguous, and so are its keys. Under a causal mask or a window, the keys that a query
sees are contiguous too. So each query sees the keys `low` to `high - 1` of the packed array. From each query that sees
a key to the next, `low` and `high` do not decrease. Both are only known at run time (docs/contract.md, section 8,
"How operands lie in memory").
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from impls.contract.implementation import FLOATS

Side = int | None
# No token has an index of 2**30 or more, so a side of that length is open.
_UNBOUNDED_SIDE = 2**30


class SequenceTables(NamedTuple):
    """Borders of the sequences in the packed arrays (the operands of the same names), int32."""

    cu_q_lens: Int32[Array, " max_seqs+1"]
    cu_kv_lens: Int32[Array, " max_seqs+1"]
    num_seqs: Int32[Array, "1"]


def build_tables(cu_q_lens: Any, cu_kv_lens: Any, num_seqs: Any) -> SequenceTables:
    """Convert the tables of a call to int32. Raises `ValueError` that names an invalid table."""
    shape = cu_q_lens.shape
    if len(shape) != 1 or shape[0] < 2:
        raise ValueError(f"cu_q_lens must have shape (max_seqs + 1,), got {shape}")
    for name, x, wanted in (("cu_kv_lens", cu_kv_lens, shape), ("num_seqs", num_seqs, (1,))):
        if x.shape != wanted:
            raise ValueError(f"{name} must have shape {wanted}, got {x.shape}")
    for name, x in (("cu_q_lens", cu_q_lens), ("cu_kv_lens", cu_kv_lens), ("num_seqs", num_seqs)):
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise ValueError(f"{name} must be integers, got {x.dtype}")
    return SequenceTables(*(jnp.asarray(x, jnp.int32) for x in (cu_q_lens, cu_kv_lens, num_seqs)))


def check_packed_operands(q: Any, k: Any, v: Any, sinks: Any, soft_cap: Any, scale: Any) -> None:
    """Raise `ValueError` that names an operand of a packed call that violates the contract."""
    for name, x, axes in (
        ("q", q, "[total_q, heads, depth]"),
        ("k", k, "[total_kv, heads, depth]"),
        ("v", v, "[total_kv, heads, depth]"),
    ):
        if x.ndim != 3 or 0 in x.shape:
            raise ValueError(f"{name} must have the axes {axes}, none of them of size 0, got shape {x.shape}")
    if k.shape[:2] != v.shape[:2]:
        raise ValueError(f"k and v must agree in length and heads, got {k.shape} and {v.shape}")
    if q.shape[2] != k.shape[2]:
        raise ValueError(f"k has head_dim {k.shape[2]}, q has {q.shape[2]}: they must be equal")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"q has {q.shape[1]} heads, which must be a multiple of the {k.shape[1]} heads of k")
    if not (q.dtype == k.dtype == v.dtype and str(q.dtype) in FLOATS):
        raise ValueError(f"q, k and v must have one dtype of {FLOATS}, got {q.dtype}, {k.dtype} and {v.dtype}")
    if sinks is not None and sinks.shape != (q.shape[1],):
        raise ValueError(f"sinks must have shape {(q.shape[1],)}, one logit a query head, got {sinks.shape}")
    for name, number in (("soft_cap", soft_cap), ("scale", scale)):
        if number is not None and not (number > 0 and math.isfinite(number)):
            raise ValueError(f"{name} must be positive and finite, got {number}")


def resolve_window(causal: bool, window: tuple[Side, Side] | None) -> tuple[Side, Side]:
    """Return how many keys a query sees before and after its own; None is no limit. Raises `ValueError` if negative."""
    left, right = (None, None) if window is None else window
    if any(side is not None and side < 0 for side in (left, right)):
        raise ValueError(f"window must be (left, right), each at least 0 or None, got {window}")
    right = 0 if causal else right
    return _normalize_side(left), _normalize_side(right)


def _normalize_side(side: Side) -> Side:
    return None if side is None or side >= _UNBOUNDED_SIDE else int(side)


class QueryPlaces(NamedTuple):
    """The place of each query, int32 `[length]`; any integers for padding queries."""

    is_real: Bool[Array, " length"]  # whether it is no padding
    sequence: Int32[Array, " length"]
    position: Int32[Array, " length"]  # its position in the sequence
    kv_start: Int32[Array, " length"]  # the packed index of the sequence's first key
    keys: Int32[Array, " length"]  # the number of the sequence's keys
    before: Int32[Array, " length"]  # the number of these keys that come before those of the sequence's queries


def find_places(tables: SequenceTables, length: int) -> QueryPlaces:
    """Find the places of `length` packed queries. Entries of tables past the last sequence may be any integers."""
    count = tables.num_seqs[0]
    exists = jnp.arange(len(tables.cu_q_lens) - 1, dtype=jnp.int32) < count

    def ends_of(starts: jax.Array) -> jax.Array:
        return jnp.where(exists, starts[1:], starts[count])

    q_ends, kv_ends = ends_of(tables.cu_q_lens), ends_of(tables.cu_kv_lens)
    token = jnp.arange(length, dtype=jnp.int32)
    sequence = jnp.searchsorted(q_ends, token, side="right").astype(jnp.int32)  # padding is past all sequences
    sequence = jnp.minimum(sequence, len(q_ends) - 1)
    kv_start = tables.cu_kv_lens[sequence]
    keys = kv_ends[sequence] - kv_start
    return QueryPlaces(
        is_real=token < tables.cu_q_lens[count],
        sequence=sequence,
        position=keys - (q_ends[sequence] - token),
        kv_start=kv_start,
        keys=keys,
        before=keys - (q_ends[sequence] - tables.cu_q_lens[sequence]),
    )


def compute_key_ranges(
    tables: SequenceTables, sides: tuple[Side, Side], length: int
) -> tuple[Int32[Array, " {length}"], Int32[Array, " {length}"]]:
    """Compute the first key that each query sees, and one past the last; both 0 for a query that sees none.

    Args:
      tables: tables of the call. Entries past the last sequence may be any integers.
      sides: `(left, right)` as `resolve_window` returns it: numbers of keys before and after the query's own, or None.
      length: number of queries, including padding queries, which see no key.

    Returns:
      int32 `[length]` each.
    """
    (left, right), places = sides, find_places(tables, length)
    position, kv_start = places.position, places.kv_start
    low = jnp.zeros_like(position) if left is None else jnp.maximum(position - left, 0)
    high = places.keys if right is None else jnp.minimum(position + (right + 1), places.keys)
    some = places.is_real & (low < high)
    return jnp.where(some, kv_start + low, 0), jnp.where(some, kv_start + high, 0)
