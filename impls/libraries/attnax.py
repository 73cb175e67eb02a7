"""Adapters of the kernels of attnax, in the layout `[B, N, T, H]`.

A bias is a score function (`additive_bias_mod`). Softmax is in the operands' dtype
(https://github.com/glibtkachenko/attnax, `attnax/kernels/attention.py`).
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from attnax import kernels

from impls.contract.declarations import declare

_EQUAL_HEADS = dict.fromkeys(("gqa", "mqa"), "q, k and v have the same number of heads")


def _call(kernel: Any, q: Any, k: Any, v: Any, mask: Any, bias: Any = None, score_mod: Any = None) -> Any:
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
    shape = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    if bias is not None:
        score_mod = kernels.additive_bias_mod(jnp.broadcast_to(bias, shape))
    return jnp.swapaxes(kernel(q, k, v, mask=mask, score_mod=score_mod), 1, 2)


@declare(
    empty_rows="mean",
    behind_mask="finite",
    logits="input",
    softmax="input",
    unsupported=_EQUAL_HEADS,
)
def standard(q: Any, k: Any, v: Any, *, mask: Any = None, bias: Any = None) -> Any:
    """`attnax.kernels.standard_attention`."""
    return _call(kernels.standard_attention, q, k, v, mask, bias)


@declare(
    empty_rows="mean",
    behind_mask="finite",
    logits="input",
    softmax="input",
    block_sums=512,
    unsupported={**_EQUAL_HEADS, "v_head_dim": "values have the depth of keys"},
)
def flash(q: Any, k: Any, v: Any, *, mask: Any = None, bias: Any = None) -> Any:
    """`attnax.kernels.flash_attention`, in blocks of 512 queries and keys."""
    return _call(kernels.flash_attention, q, k, v, mask, bias)


@declare(
    empty_rows="mean",
    behind_mask="finite",
    logits="input",
    softmax="input",
    captures=True,
    unsupported={**_EQUAL_HEADS, "soft_cap": "the library has no soft cap"},
)
def scored(q: Any, k: Any, v: Any, *, mask: Any = None, score_mod: Any = None) -> Any:
    """`attnax.kernels.standard_attention` with a score function."""
    return _call(kernels.standard_attention, q, k, v, mask, score_mod=score_mod)


@declare(
    empty_rows="mean",
    behind_mask="finite",
    logits="input",
    softmax="input",
    captures=True,
    block_sums=512,
    unsupported={
        **_EQUAL_HEADS,
        "soft_cap": "the library has no soft cap",
        "v_head_dim": "values have the depth of keys",
    },
)
def scored_flash(q: Any, k: Any, v: Any, *, mask: Any = None, score_mod: Any = None) -> Any:
    """`attnax.kernels.flash_attention` with a score function, in blocks of 512 queries and keys."""
    return _call(kernels.flash_attention, q, k, v, mask, score_mod=score_mod)
