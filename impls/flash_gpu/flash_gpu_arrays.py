"""Named tuples of arrays that the forward and the backward pass take and return."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Array, Float, Float32, Int

from impls.flash_gpu.packed_visits import KeyRanges


class Operands(NamedTuple):
    """Operands of the call, in the shapes of docs/contract.md, section 1. Packed sequences are one batch row."""

    q: Float[Array, "B T N H"]
    k: Float[Array, "B S K H"]
    v: Float[Array, "B S K V"]
    bias: Float[Array, "#B #N #T #S"] | None
    sinks: Float[Array, " N"] | None
    segment_ids: tuple[Int[Array, "B T"], Int[Array, "B S"]] | None
    ranges: KeyRanges | None = None  # keys that each query sees; only for packed sequences


class Outputs(NamedTuple):
    """Results of the forward pass: the output and the residuals that callers may request."""

    out: Float[Array, "B T N V"]
    logsumexp: Float32[Array, "B N T"]
    max_logits: Float32[Array, "B N T"]


class QueryRows(NamedTuple):
    """Values per query that the backward pass needs beyond the operands."""

    d_out: Float[Array, "B T N V"]  # in q's dtype
    shift: Float32[Array, "B N T"]  # `logsumexp`, 0 for rows that attend to nothing
    row_sums: Float32[Array, "B N T"]  # `<out, d_out>` minus the cotangent of `logsumexp`
