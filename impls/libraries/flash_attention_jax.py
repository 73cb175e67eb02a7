"""Adapters of flash-attention-jax, in the layout `[B, N, T, H]`.

`flash_attention` takes a mask of keys, `causal_flash_attention` takes none and aligns the last query with the last key
(https://github.com/lucidrains/flash-attention-jax). Documented are q, k and v of one number of heads and one depth.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

import flash_attention_jax as library
import jax
import jax.numpy as jnp

from impls.contract.declarations import declare

_UNSUPPORTED = {
    **dict.fromkeys(("gqa", "mqa"), "q, k and v have the same number of heads"),
    "v_head_dim": "values have the depth of keys",
}
# Before 0.3.0 the causal function takes one sequence of one head, `[T, H]`.
_HAS_BATCH = not importlib.metadata.version("flash-attention-jax").startswith("0.2.")


def _swap(x: Any) -> Any:
    """Swap the axes of heads and sequence."""
    return jnp.swapaxes(x, 1, 2)


@declare(behind_mask="finite", unsupported=_UNSUPPORTED)
def flash_attention(q: Any, k: Any, v: Any) -> Any:
    """`flash_attention_jax.flash_attention`, with a mask that keeps all keys."""
    return _swap(library.flash_attention(_swap(q), _swap(k), _swap(v), jnp.ones(k.shape[:2], bool)))


@declare(behind_mask="finite", causal="end", unsupported={**_UNSUPPORTED, "full": "always causal"})
def causal_flash_attention(q: Any, k: Any, v: Any, *, causal: bool = True) -> Any:
    """`flash_attention_jax.causal_flash_attention`."""
    if not causal:
        raise NotImplementedError("attention is always causal")
    call = library.causal_flash_attention if _HAS_BATCH else jax.vmap(jax.vmap(library.causal_flash_attention))
    return _swap(call(_swap(q), _swap(k), _swap(v)))
