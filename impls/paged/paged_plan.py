"""Static plan, arrays and query tiles of a paged call, which keys its queries see, and its logits.

All back ends use them. Query `i` of a sequence has position `kv_len - q_len + i`. It sees key `j` if `j <= position`
and, with a window, `j >= position - left` (docs/contract.md, section 8). So each query sees one run of consecutive
keys, and consecutive queries together see one run too. Other masks hide some keys of such a run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32, Shaped


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedPlan:
    """Static part of one call. Equal plans share one compiled function."""

    left: int | None  # number of keys before its own position that a query sees; None for all of them
    right: int | None = 0  # number of keys after its own position that a query sees; None for all of them
    scale: float
    soft_cap: float | None
    block_q: int  # queries per tile, all of one sequence
    block_pages: int  # number of pages that are read together
    # Number of leading coordinates of a key that are its value; None if values have their own pages.
    value_dim: int | None = None
    block_rows: int = 0  # for latents, queries times heads that are computed at a time on a TPU
    block_keys: int = 0  # number of keys that are read together on a GPU, even across the ends of pages; a power of two
    # Number of GPU programs per key/value head, which share all keys; None for as many as fill the GPU.
    programs: int | None = None
    # Functions of places (docs/contract.md, section 2): whether a query sees a key, and a change of its logit.
    mask_mod: Callable[..., Any] | None = None
    score_mod: Callable[..., Any] | None = None


class PageScales(NamedTuple):
    """The scales and zero points of keys or of values in pages; a field that is None is not applied.

    A stored number is multiplied by `scales`, `zeros` are added, and the sum is multiplied by `sequences`.
    """

    # One for each of `blocks` equal parts of a row; `rows` is the page size, or 1 if all rows have the same.
    scales: Shaped[Array, "pages rows K blocks"] | None = None
    zeros: Float32[Array, "pages rows K blocks"] | None = None  # these are added
    sequences: Float32[Array, "max_seqs K"] | None = None


class Operands(NamedTuple):
    """Arrays of one call."""

    q: Float[Array, "total_q N H"]
    k_pages: Shaped[Array, "pages page_size K H"]
    v_pages: Shaped[Array, "pages page_size K V"] | None  # None if values are a part of the keys
    kv_lens: Int32[Array, " max_seqs"]
    page_indices: Int32[Array, "max_seqs pages_per_seq"]
    cu_q_lens: Int32[Array, " max_seqs+1"]
    num_seqs: Int32[Array, "1"]
    k_scales: Float32[Array, "pages page_size K"] | None = None  # None if pages are not quantised
    v_scales: Float32[Array, "pages page_size K"] | None = None
    page_scales: Float32[Array, "pages page_size W"] | None = None  # both in one array (`impls.paged.page_copies`)
    k_stored: Any = None  # `PageScales`: other scales of quantised pages
    v_stored: Any = None
    mask: Bool[Array, "total_q S"] | None = None  # whether a query sees each key of its sequence
    tree_mask: Bool[Array, "total_q W"] | None = None  # whether it sees the key of each query of its sequence
    alibi_slopes: Float32[Array, " N"] | None = None
    logit_scale: Float32[Array, " N"] | None = None


def find_key_range(plan: PagedPlan, position: Any, end: Any = None) -> tuple[Any, Any]:
    """Find the first key that the query at `position` sees, and one past the last; the range may be empty.

    Args:
      end: the number of keys of the sequence; not needed where no query sees a key after its own position.
    """
    low = 0 if plan.left is None else jnp.maximum(position - plan.left, 0)
    if plan.right == 0:
        return low, position + 1
    return low, end if plan.right is None else jnp.minimum(position + (plan.right + 1), end)


def find_block_range(plan: PagedPlan, position: Any, queries: Any, block: int, end: Any = None) -> tuple[Any, Any]:
    """Find the blocks of `block` keys that `queries` queries from `position` on see: first block, one past the last."""
    low, _ = find_key_range(plan, position, end)
    _, high = find_key_range(plan, position + (queries - 1), end)
    return low // block, jnp.maximum(high + (block - 1), 0) // block


def compute_allowed(plan: PagedPlan, position: Any, j: Any, end: Any = None) -> Any:
    """Compute whether the query at `position` sees key `j`."""
    low, high = find_key_range(plan, position, end)
    return (j >= low) & (j < high)


def compute_logits(
    plan: PagedPlan, products: jax.Array, unit: float = 1.0, of_keys: Callable[[Any], Any] = lambda scale: scale
) -> jax.Array:
    """Compute logits in units of `unit` from products `<q, k>`; `of_keys` multiplies by the scale of each key."""
    if plan.soft_cap is None:
        return products * of_keys(jnp.float32(plan.scale / unit))  # scaled logits, equation (1)
    bent = jnp.tanh(products * of_keys(jnp.float32(plan.scale / plan.soft_cap)))
    return jnp.float32(plan.soft_cap / unit) * bent  # logits with soft cap, equations (1) and (2)


def compute_changed_logits(
    plan: PagedPlan,
    products: jax.Array,
    locate: Callable[[], tuple[Any, Any, Any, Any]],
    *,
    factor: Any = None,
    slopes: Any = None,
    unit: float = 1.0,
    of_keys: Callable[[Any], Any] = lambda scale: scale,
) -> jax.Array:
    """Compute logits in units of `unit` with what only some calls have, equations (1) and (2).

    Args:
      locate: function that finds the sequence, the query head, the position of the query and that of the key of each
        product; they broadcast with `products`.
      factor: the logit scale of each product, or None.
      slopes: the ALiBi slope of each product, or None.
      of_keys: as in `compute_logits`.
    """
    if factor is None and slopes is None and plan.score_mod is None:
        return compute_logits(plan, products, unit, of_keys)
    places = locate()
    x = products * of_keys(jnp.float32(plan.scale))
    if factor is not None:
        x = x * factor
    if slopes is not None:
        _, _, i, j = places
        x = x - slopes * jnp.abs(i - j).astype(jnp.float32)
    if plan.score_mod is not None:
        x = plan.score_mod(x, *places)
    if plan.soft_cap is not None:
        return jnp.float32(plan.soft_cap / unit) * jnp.tanh(x / plan.soft_cap)
    return x if unit == 1.0 else x * jnp.float32(1 / unit)


class QueryTiles(NamedTuple):
    """Tiles of queries: the queries of each sequence, `block_q` at a time, one sequence after the other; int32.

    The lists have the maximal length for the shapes, and only the first `total` tiles are computed. So the work grows
    with the actual queries, not with `max_seqs`. They are built on the device from tables that may differ in every
    call.
    """

    total: Int32[Array, ""]  # number of tiles
    sequence: Int32[Array, " L"]  # sequence of the tile
    row: Int32[Array, " L"]  # index of the tile's first query in `q`
    queries: Int32[Array, " L"]  # number of the tile's queries
    position: Int32[Array, " L"]  # position of the tile's first query in its sequence


def build_tiles(operands: Operands, block_q: int) -> QueryTiles:
    """Build the tiles of a call. Table entries past the last sequence may be any integers."""
    most = len(operands.kv_lens)
    number_of = jnp.arange(most, dtype=jnp.int32)
    q_lens = jnp.where(number_of < operands.num_seqs[0], jnp.diff(operands.cu_q_lens), 0)
    tiles = (q_lens + (block_q - 1)) // block_q
    ends = jnp.cumsum(tiles, dtype=jnp.int32)
    longest = min(-(-len(operands.q) // block_q) + most, len(operands.q))  # each tile has a query
    number = jnp.arange(longest, dtype=jnp.int32)
    sequence = jnp.minimum(jnp.searchsorted(ends, number, side="right", method="scan_unrolled"), most - 1).astype(
        jnp.int32
    )
    inside = (number - (ends - tiles)[sequence]) * block_q
    return QueryTiles(
        total=ends[-1],
        sequence=sequence,
        row=operands.cu_q_lens[sequence] + inside,
        queries=jnp.minimum(q_lens[sequence] - inside, block_q),
        position=(operands.kv_lens - q_lens)[sequence] + inside,
    )
