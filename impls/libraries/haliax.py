"""Adapter of `haliax.nn.attention.dot_product_attention`, whose axes have names.

Heads of a group share an axis of keys and values by its name. Logits and softmax are in the operands' dtype, unless
`attention_dtype` is given (https://haliax.readthedocs.io/en/latest/nn/#attention).
"""

from __future__ import annotations

from typing import Any

import haliax
import jax.numpy as jnp
from haliax.nn import attention as haliax_attention

from impls.contract.declarations import declare


@declare(logits="input", softmax="input", scaled_q=True, group_sums="input", empty_rows="mean", behind_mask="finite")
def dot_product_attention(q: Any, k: Any, v: Any, *, mask: Any = None, bias: Any = None) -> Any:
    """`haliax.nn.attention.dot_product_attention` in the dtype of its operands, which is the default."""
    return _call(q, k, v, mask, bias)


@declare(scaled_q=True, group_sums="input", empty_rows="mean", behind_mask="finite")
def dot_product_attention_f32(q: Any, k: Any, v: Any, *, mask: Any = None, bias: Any = None) -> Any:
    """`haliax.nn.attention.dot_product_attention` with `attention_dtype=jnp.float32`, as models of Levanter set it."""
    return _call(q, k, v, mask, bias, attention_dtype=jnp.float32)


def _call(q: Any, k: Any, v: Any, mask: Any, bias: Any, **options: Any) -> Any:
    """Call the function with named axes."""
    batch, length, num_heads, depth = q.shape
    group = num_heads // k.shape[2]
    query = haliax.named(
        q.reshape(batch, length, k.shape[2], group, depth), ("batch", "position", "kv_head", "group", "depth")
    )
    key = haliax.named(k, ("batch", "key_position", "kv_head", "depth"))
    value = haliax.named(v, ("batch", "key_position", "kv_head", "value_depth"))
    out = haliax_attention.dot_product_attention(
        "key_position",
        "depth",
        query,
        key,
        value,
        mask=_name_pairs(mask, group),
        bias=_name_pairs(bias, group),
        **options,
    )
    return out.rearrange(("batch", "position", "kv_head", "group", "value_depth")).array.reshape(
        batch, length, num_heads, v.shape[3]
    )


def _name_pairs(x: Any, group: int) -> Any:
    """Name the axes of a mask or bias `[B, N, T, S]`. Axes of size 1 are left out, which is how haliax broadcasts."""
    if x is None:
        return None
    batch, num_heads, length, kv_length = x.shape
    heads = (1, 1) if num_heads == 1 else (num_heads // group, group)
    sizes = {"batch": batch, "kv_head": heads[0], "group": heads[1], "position": length, "key_position": kv_length}
    kept = {name: size for name, size in sizes.items() if size != 1}
    return haliax.named(x.reshape(tuple(kept.values())), tuple(kept))
