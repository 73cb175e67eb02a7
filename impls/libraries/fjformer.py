"""Adapter of FJFormer's FlashAttention 2 for CPUs, in the layout `[B, N, T, H]`.

The documented mask has three axes at most, but the code slices four, `[B, N, T, S]`. Lengths must be multiples of the
blocks (https://github.com/erfanzar/FJFormer, `fjformer/kernels/cpu_ops/jax_flash_attention_2.py`). The package does not
import with current versions of JAX, so this file is loaded alone.
"""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import jax.numpy as jnp

from impls.contract.declarations import declare
from impls.libraries._module_files import load_module

_library = load_module(
    "fjformer",
    "kernels/cpu_ops/jax_flash_attention_2.py",
    {"fjformer": mock.MagicMock(), "fjformer.sharding": mock.MagicMock(with_sharding_constraint=lambda x, _: x)},
)
_UNSUPPORTED = {
    "gqa": "q, k and v have the same number of heads",
    "mqa": "q, k and v have the same number of heads",
    "v_head_dim": "values have the depth of keys",
}


def _swap(x: Any) -> Any:
    """Swap the axes of heads and sequence."""
    return jnp.swapaxes(x, 1, 2)


@declare(behind_mask="finite", logits="input", softmax="input", scaled_q=True, block_sums=64, unsupported=_UNSUPPORTED)
def flash_attention2(q: Any, k: Any, v: Any, *, mask: Any = None, bias: Any = None, scale: Any = None) -> Any:
    """`flash_attention2`, in blocks of at most 64 queries and keys, whose output is in the operands' dtype."""
    shape = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    mask, bias = (None if x is None else jnp.broadcast_to(x, shape) for x in (mask, bias))
    blocks = {"q_block": math.gcd(q.shape[1], 64), "k_block": math.gcd(k.shape[1], 64)}
    operands = (_swap(q), _swap(k), _swap(v), mask, bias)
    return _swap(_library.flash_attention2(*operands, dtype=q.dtype, softmax_scale=scale, **blocks))
