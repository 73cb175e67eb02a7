"""Static plan and arrays of a call, the keys that its queries see, and its logits.

Query `i` of a sequence stands at position `kv_len - q_len + i` of it, and sees key `j` if `j <= position`, and with a
window if `j >= position - left` too (docs/contract.md, section 8). So a query sees one run of keys, and so do queries
that follow one another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, Shaped


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedPlan:
    """Static part of one call. Equal plans share one compiled function.

    Attributes:
      left: keys beside its own that a query sees; none for all before it.
      scale: factor of `<q, k>`.
      soft_cap: bound of the logits; none if there is none.
      block_q: queries of a tile, all of one sequence.
      block_pages: pages that are read together.
      value_dim: how many coordinates of a key, the first ones, are its value; none where values have their own pages.
      block_rows: queries times heads of a latent that are computed at a time on a TPU.
      block_keys: keys that are read together on a GPU, wherever pages end; a power of two.
      programs: how many programs share all keys on a GPU, for each key/value head; none for as many as fill it.
    """

    left: int | None
    scale: float
    soft_cap: float | None
    block_q: int
    block_pages: int
    value_dim: int | None = None
    block_rows: int = 0
    block_keys: int = 0
    programs: int | None = None


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
    page_scales: Float32[Array, "pages page_size W"] | None = None  # both side by side (`impls.paged.page_scales`)


def find_key_range(plan: PagedPlan, position: Any) -> tuple[Any, Any]:
    """Find the first key that the query at `position` sees, and one past the last; the range may be empty."""
    return 0 if plan.left is None else jnp.maximum(position - plan.left, 0), position + 1


def find_block_range(plan: PagedPlan, position: Any, queries: Any, block: int) -> tuple[Any, Any]:
    """Find the first block of `block` keys that any of `queries` queries from `position` on sees, and the end."""
    low, _ = find_key_range(plan, position)
    _, high = find_key_range(plan, position + (queries - 1))
    return low // block, jnp.maximum(high + (block - 1), 0) // block


def compute_allowed(plan: PagedPlan, position: Any, j: Any) -> Any:
    """Compute whether the query at `position` sees key `j`."""
    low, high = find_key_range(plan, position)
    return (j >= low) & (j < high)


def compute_logits(
    plan: PagedPlan, products: jax.Array, unit: float = 1.0, of_keys: Callable[[Any], Any] = lambda scale: scale
) -> jax.Array:
    """Compute logits in units of `unit` from products `<q, k>`; `of_keys` multiplies by the scale of each key."""
    if plan.soft_cap is None:
        return products * of_keys(jnp.float32(plan.scale / unit))  # scaled logits, equation (1)
    bent = jnp.tanh(products * of_keys(jnp.float32(plan.scale / plan.soft_cap)))
    return jnp.float32(plan.soft_cap / unit) * bent  # logits with soft cap, equations (1) and (2)
