"""The arrays of a call: what goes into its passes, and what comes out."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from impls.flash_gpu.packed_visits import KeyRanges


class Operands(NamedTuple):
    """Arrays of the canonical call, in its shapes. A pack is one batch row."""

    q: jax.Array  # [B, T, N, H]
    k: jax.Array  # [B, S, K, H]
    v: jax.Array  # [B, S, K, V]
    bias: jax.Array | None  # [B or 1, N or 1, T or 1, S or 1]
    sinks: jax.Array | None  # [N]
    segment_ids: tuple[jax.Array, jax.Array] | None  # [B, T], [B, S]
    ranges: KeyRanges | None = None  # of a pack


class Outputs(NamedTuple):
    """What attention returns."""

    out: jax.Array  # [B, T, N, V]
    logsumexp: jax.Array  # [B, N, T] f32
    max_logits: jax.Array  # [B, N, T] f32


class QueryRows(NamedTuple):
    """What the backward pass knows of each query beyond the operands."""

    d_out: jax.Array  # [B, T, N, V], in q's dtype
    shift: jax.Array  # [B, N, T] f32, `logsumexp`, 0 for rows that attend to nothing
    row_sums: jax.Array  # [B, N, T] f32, `D - dlse`


def make_shape(shape: tuple[int, ...], dtype: Any, varying: Any = None) -> jax.ShapeDtypeStruct:
    """Shape and dtype of an output, and over which mesh axes it differs."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=varying)  # type: ignore[no-untyped-call]  # JAX leaves it untyped
