"""Adapter of `flash_attn_varlen` of fa4-jax, on its back end in plain JAX, which it takes where there is no GPU.

A `MaskMod` gets the place of a query among those of its sequence, and the contract's functions its position. So the
mask captures by how much they differ. Tokens past the last sequence are defined only with `defined_padding`
(https://github.com/nshepperd/fa4-jax).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from fa4_jax import MaskMod, flash_attn_varlen
from fa4_jax.masks import static

from impls.contract.declarations import declare


@dataclasses.dataclass(frozen=True)
class _PlacedMask(MaskMod):  # type: ignore[misc]  # the library has no types
    before: Any  # [sequences], the number of keys before those of the queries
    function: Callable[..., Any] = static()  # noqa: RUF009  a field that the library marks as static

    def __call__(self, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        """Call the function with the position of the query in its sequence."""
        return self.function(b, h, q_idx + self.before[b], kv_idx)


@declare(empty_rows="zero", behind_mask="finite")
def varlen(
    q: Any,
    k: Any,
    v: Any,
    *,
    cu_q_lens: Any,
    cu_kv_lens: Any,
    causal: bool = False,
    window: Any = None,
    mask_mod: Any = None,
    scale: Any = None,
    save_residuals: bool = False,
) -> Any:
    """`fa4_jax.flash_attn_varlen` with `backend="reference"`."""
    before = jnp.diff(cu_kv_lens) - jnp.diff(cu_q_lens)
    out, logsumexp = flash_attn_varlen(
        q,
        k,
        v,
        cu_q_lens,
        cu_kv_lens,
        causal=causal,
        window_size=window,
        scale=scale,
        mask_mod=None if mask_mod is None else _PlacedMask(before, mask_mod),
        return_lse=True,
        backend="reference",
        defined_padding=True,
    )
    return (out, {"logsumexp": logsumexp.T}) if save_residuals else out
