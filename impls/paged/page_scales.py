"""Layout of page scales for the TPU kernel: the scales of a token's keys and values in one row of lanes.

Copies must be whole tiles of 8 by 128 numbers. XLA lays out `[pages, page_size, K]` with the pages in the lanes, so the
scales of one page are not contiguous. Pages of `[page_size, 128]` are contiguous. So scales are stored in that layout
from the start, and a row is written with its token. Converting the layout in every call would touch all pages, also
those that are not read.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from impls.paged.page_blocks import LANES


def side_by_side(k_scales: jax.Array, v_scales: jax.Array) -> jax.Array:
    """Convert scales `[pages, page_size, K]` to the layout of the TPU kernel.

    Args:
      k_scales: scales of the keys, f32.
      v_scales: scales of the values, f32.

    Returns:
      f32 `[pages, page_size, W]` with W lanes, a multiple of 128: the first K lanes hold the scales of the keys, the
      next K lanes the scales of the values, and the others zeros.
    """
    both = jnp.concatenate([k_scales, v_scales], axis=-1)
    return jnp.pad(both, ((0, 0), (0, 0), (0, -both.shape[-1] % LANES)))


def check_page_scales(page_scales: Any, k_pages: Any) -> None:
    """Raise `ValueError` if `page_scales` has a wrong shape or dtype for the TPU kernel; the message says which."""
    *rows, num_kv_heads, _ = k_pages.shape
    if page_scales.ndim != 3 or [*page_scales.shape[:2]] != rows or page_scales.shape[2] % LANES:
        wanted = f"[{rows[0]}, {rows[1]}, a multiple of {LANES}]"
        raise ValueError(f"page_scales must have shape {wanted}, as side_by_side gives, got {page_scales.shape}")
    if page_scales.shape[2] < 2 * num_kv_heads:
        raise ValueError(
            f"page_scales must have lanes for keys and values of {num_kv_heads} heads, got {page_scales.shape[2]}"
        )
    if page_scales.dtype != jnp.float32:
        raise ValueError(f"page_scales must be float32, got {page_scales.dtype}: cast with astype")
