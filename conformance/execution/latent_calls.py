"""Calls that take one latent in place of keys and values, asked about a dense problem.

    latent:       call(q, latent, *, value_dim, scale, mask=..., segment_ids=None, ...)
    latent_pages: call(q, latent_pages, *, value_dim, scale, kv_lens, page_indices, cu_q_lens, num_seqs, window=None)

The latent is the one key of the dense problem, `[B, S, H]`, or in pages `[pages, page_size, H]`, and its first
`value_dim` coordinates are the values (docs/contract.md, section 8). What differentiates the dense call gets the
gradient of the latent as that of k, and zeros for v.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax


def add_latent_options(q: Any, value_dim: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a call with a latent, which is always told the scale: its default would go by the expanded heads."""
    scale = options.get("scale")
    return {**options, "value_dim": value_dim, "scale": 1 / math.sqrt(q.shape[-1]) if scale is None else scale}


@dataclasses.dataclass(frozen=True)
class LatentCall:
    """The canonical call, made by one that takes `latent [B, S, H]`.

    Attributes:
      call: the call in its own convention.
    """

    call: Callable[..., Any]

    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array, **options: Any) -> Any:
        """What the call returns, of `k [B, S, 1, H]`; of `v [B, S, 1, V]` the depth alone counts."""
        return self.call(q, k[:, :, 0], **add_latent_options(q, v.shape[-1], options))
