"""Adapter of jax-flash-attn2 on its platform `jax`.

Heads are grouped, and lengths must be multiples of the blocks (https://github.com/erfanzar/jax-flash-attn2).
Its package imports Triton and eformer, which do not import with current versions of JAX, so these are replaced.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any
from unittest import mock

import jax.numpy as jnp

from impls.contract.declarations import declare

_STUBS = {
    "eformer": ModuleType("eformer"),
    "eformer.escale": mock.MagicMock(),
    "jax_flash_attn2.flash_attention_triton": mock.MagicMock(),
}
with mock.patch.dict(sys.modules, _STUBS):
    import jax_flash_attn2.flash_attention as library


_SAME_DEPTH = {"v_head_dim": "values have the depth of keys"}
_SAME_HEADS = dict.fromkeys(("gqa", "mqa"), "q, k and v have the same number of heads")


def _refuse_lengths(q: Any, k: Any) -> None:
    """Refuse what the library refuses by an assertion."""
    if any(length % min(128, length) for length in (q.shape[1], k.shape[1])):
        raise NotImplementedError("lengths are multiples of the blocks")


def _broadcast(x: Any, q: Any, k: Any) -> Any:
    """Broadcast a mask or bias to all its axes, which the library slices."""
    return None if x is None else jnp.broadcast_to(x, (q.shape[0], q.shape[2], q.shape[1], k.shape[1]))


@declare(
    behind_mask="finite",
    logits="input",
    softmax="input",
    scaled_q=True,
    block_sums=128,
    unsupported={**_SAME_DEPTH, **_SAME_HEADS},
)
def function(q: Any, k: Any, v: Any, *, mask: Any = None, bias: Any = None, scale: Any = None) -> Any:
    """`jax_flash_attention`, in blocks of 128 queries and keys, whose output is in the operands' dtype."""
    _refuse_lengths(q, k)
    operands = (q, k, v, _broadcast(mask, q, k), _broadcast(bias, q, k))
    return library.jax_flash_attention(*operands, softmax_scale=scale, dtype=q.dtype)


@declare(
    behind_mask="finite",
    logits="input",
    softmax="input",
    scaled_q=True,
    block_sums=128,
    group_sums="input",
    unsupported=_SAME_DEPTH,
)
def flash_attention(
    q: Any, k: Any, v: Any, *, causal: bool = False, mask: Any = None, bias: Any = None, scale: Any = None
) -> Any:
    """`FlashAttention` on its platform `jax`, which repeats the heads of k and v."""
    _refuse_lengths(q, k)
    attend = library.create_flash_attention(backend="cpu", platform="jax", softmax_scale=scale)
    options = {"bias": _broadcast(bias, q, k), "attention_mask": _broadcast(mask, q, k)}
    return attend(q, k, v, causal=causal, **options)
