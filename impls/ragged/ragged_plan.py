"""Static plan and arrays of a decode call, the keys that its queries see, and its logits. All back ends use them.

Inside the back ends, query heads are rows. The `R = T * G` rows of a key/value head are its group's heads for each
query token, `row = t * G + g`. Query head `n = k * G + g` reads key/value head `k`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from cases.masks import Causal, Chunked, Full, Lengths, Mask, OwnWindow, Window, list_conjuncts
from impls.softmax_merge import Part


@dataclasses.dataclass(frozen=True, kw_only=True)
class RaggedPlan:
    """Static part of one call. Equal plans share one compiled function."""

    mask: Mask
    q_length: int
    group: int
    kv_length: int
    scale: float
    soft_cap: float | None


class Operands(NamedTuple):
    """Arrays of one call."""

    q: Float[Array, "B K R H"]
    k: Float[Array, "B S K H"]
    v: Float[Array, "B S K V"]
    lengths: Int32[Array, " B"]  # number of keys that exist in each batch row
    positions: Int32[Array, " B"]  # position of the first query of each batch row


def flatten_queries(q: Float[Array, "B T N H"], num_kv_heads: int) -> Float[Array, "B K R H"]:
    """Flatten queries to rows `[B, K, R, H]`, where `R` is `T N / K`, the query before the head."""
    batch, q_length, num_q_heads, depth = q.shape
    group = num_q_heads // num_kv_heads
    split = q.reshape(batch, q_length, num_kv_heads, group, depth).transpose(0, 2, 1, 3, 4)
    return split.reshape(batch, num_kv_heads, q_length * group, depth)


def restore_queries(part: Part, q_length: int) -> Part:
    """Invert `flatten_queries` for the arrays of a part: `[B, K, R, .]` to `[B, T, N, .]`."""

    def join(x: jax.Array) -> jax.Array:
        batch, num_kv_heads, rows, depth = x.shape
        split = x.reshape(batch, num_kv_heads, q_length, rows // q_length, depth).transpose(0, 2, 1, 3, 4)
        return split.reshape(batch, q_length, -1, depth)

    return Part(*map(join, part))


def lower_lengths(mask: Mask, batch: int, kv_length: int) -> tuple[Mask, np.ndarray, np.ndarray]:
    """Split a mask into a static formula, and int32 `[B or 1]` lengths and positions, which may be traced.

    Everything that changes from token to token is in the arrays, so that a decoder compiles once. An offset that all
    parts of the mask share becomes the position of the first query.

    Raises:
      NotImplementedError: the mask is no conjunction of lengths, causal masks, windows and chunks, or of lengths and a
        window that moves with each batch row.
    """
    parts = [part for part in list_conjuncts(mask) if not isinstance(part, Full)]
    rows = (
        batch if isinstance(batch, int) else 1
    )  # a batch size that is symbolic in an exported program gets one row for all
    lengths = np.full(rows, kv_length, np.int32)
    for part in parts:
        if isinstance(part, Lengths):
            lengths = np.minimum(lengths, np.asarray(part.lengths, np.int32))
    formulas: list[Causal | Window | Chunked] = []
    own: list[OwnWindow] = []
    for part in parts:
        if isinstance(part, Causal | Window | Chunked):
            formulas.append(part)
        elif isinstance(part, OwnWindow):
            own.append(part)
        elif not isinstance(part, Lengths):
            raise NotImplementedError(
                f"ragged does not support {type(part).__name__} masks: {UNSUPPORTED_MASKS}; take Lengths, Causal, "
                "Window and Chunked, joined by &"
            )
    if own:
        if formulas or len(own) > 1:
            raise NotImplementedError("ragged does not support own_window combined with another mask than Lengths")
        return Window(own[0].left, 0), lengths, np.asarray(own[0].positions, np.int32)
    offsets = {formula.offset for formula in formulas}
    offset = offsets.pop() if len(offsets) == 1 else 0
    found: Mask = Full()
    for number, formula in enumerate(formulas):
        moved = dataclasses.replace(formula, offset=formula.offset - offset)
        found = moved if number == 0 else found & moved
    return found, lengths, np.full(rows, offset, np.int32)


UNSUPPORTED_MASKS = "only those that leave each query one run of keys"


def find_key_range(plan: RaggedPlan, length: Any, position: Any) -> tuple[Any, Any]:
    """Find the first key that the query at `position` sees, and one past the last; int32, broadcasting.

    Under a conjunction of lengths, causal masks, windows and chunks the visible keys are one run. The run is empty if
    it ends before it starts.
    """
    low, high = position * 0, jnp.clip(length, 0, plan.kv_length)
    for part in list_conjuncts(plan.mask):
        if isinstance(part, Causal):
            high = jnp.minimum(high, position + (part.offset + 1))
        elif isinstance(part, Window):
            if part.left is not None:
                low = jnp.maximum(low, position + (part.offset - part.left))
            if part.right is not None:
                high = jnp.minimum(high, position + (part.offset + part.right + 1))
        elif isinstance(part, Chunked):
            low = jnp.maximum(low, (position + part.offset) // part.size * part.size)
            high = jnp.minimum(high, position + (part.offset + 1))
    return low, high


def find_block_range(plan: RaggedPlan, lengths: Any, positions: Any, block: int) -> tuple[Any, Any]:
    """Find the first block with a key that any query of a batch row sees, and the number of blocks, int32 `[B]`."""
    low, _ = find_key_range(plan, lengths, positions)
    _, high = find_key_range(plan, lengths, positions + (plan.q_length - 1))
    first = low // block
    return first, jnp.where(high > low, (high + (block - 1)) // block - first, 0)


def compute_allowed(plan: RaggedPlan, length: Any, position: Any, j: Any) -> Any:
    """Compute whether the query at `position` sees key `j` of a row with `length` keys."""
    low, high = find_key_range(plan, length, position)
    return (j >= low) & (j < high)


def compute_logits(plan: RaggedPlan, products: jax.Array, unit: float = 1.0) -> jax.Array:
    """Compute logits in units of `unit` from products `<q, k>`."""
    if plan.soft_cap is None:
        return products * jnp.float32(plan.scale / unit)  # scaled logits, equation (1)
    x = products * jnp.float32(plan.scale)  # scaled logits, equation (1)
    return jnp.float32(plan.soft_cap / unit) * jnp.tanh(x * jnp.float32(1 / plan.soft_cap))  # soft cap, equation (2)
