"""Arrays of a call: operands and results of its passes."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from impls.flash_gpu.packed_visits import KeyRanges


class Operands(NamedTuple):
    """Arrays of the canonical call, in its shapes. Packed sequences are one batch row."""

    q: jax.Array  # [B, T, N, H]
    k: jax.Array  # [B, S, K, H]
    v: jax.Array  # [B, S, K, V]
    bias: jax.Array | None  # [B or 1, N or 1, T or 1, S or 1]
    sinks: jax.Array | None  # [N]
    segment_ids: tuple[jax.Array, jax.Array] | None  # [B, T], [B, S]
    ranges: KeyRanges | None = None  # of packed sequences


class Outputs(NamedTuple):
    """Results of attention."""

    out: jax.Array  # [B, T, N, V]
    logsumexp: jax.Array  # [B, N, T] f32
    max_logits: jax.Array  # [B, N, T] f32


class QueryRows(NamedTuple):
    """Values per query that the backward pass needs beyond the operands."""

    d_out: jax.Array  # [B, T, N, V], in q's dtype
    shift: jax.Array  # [B, N, T] f32, `logsumexp`, 0 for rows that attend to nothing
    row_sums: jax.Array  # [B, N, T] f32, `D - dlse`


def make_shape(shape: tuple[int, ...], dtype: Any, varying: Any = None) -> jax.ShapeDtypeStruct:
    """Make the shape and dtype of an output, with the mesh axes over which it varies."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=varying)  # type: ignore[no-untyped-call]  # JAX leaves it untyped
