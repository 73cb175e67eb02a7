"""Adapter of `kauldron.modules.attention.ImprovedMultiHeadDotProductAttention`, with identity projections.

Its weights are a softmax in f32 of rounded logits, cast back. A bias or mask is `[B, N, T, S]`, where N, T and S may be
1 and B may not (https://kauldron.readthedocs.io/en/latest/api/kd/nn/ImprovedMultiHeadDotProductAttention.html).
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from typing import Any

if "tensorflow" not in sys.modules:
    # Kauldron imports TensorFlow, of 600 MB, for its data pipelines and type annotations.
    _stub = types.ModuleType("tensorflow")
    _stub.__getattr__ = lambda name: type(name, (), {})  # type: ignore[method-assign] # of this stub alone
    _stub.__spec__ = importlib.machinery.ModuleSpec("tensorflow", None)
    sys.modules["tensorflow"] = _stub

import jax
import jax.numpy as jnp
from kauldron.modules import attention as kauldron_attention

from impls.contract.declarations import declare
from impls.libraries.identity_projections import initialize_identity, merge_heads, split_heads


@declare(
    logits="input",
    scaled_q=True,
    empty_rows="mean",
    behind_mask="finite",
    unsupported={"gqa": "it has one number of heads", "mqa": "it has one number of heads"},
)
def improved_multi_head(q: Any, k: Any, v: Any, *, mask: Any = None, bias: Any = None) -> Any:
    """`kauldron.modules.attention.ImprovedMultiHeadDotProductAttention` with identity projections."""
    num_heads, value_features = q.shape[2], v.shape[2] * v.shape[3]
    module = kauldron_attention.ImprovedMultiHeadDotProductAttention(
        num_heads=num_heads,
        v_features=value_features,
        out_features=value_features,
        use_bias=False,
        kernel_init=initialize_identity,
    )
    options = {
        name: x if x is None else jnp.broadcast_to(x, (q.shape[0], *x.shape[1:]))
        for name, x in (("mask", mask), ("bias", bias))
    }
    with jax.default_matmul_precision("highest"):
        out, _ = module.init_with_output(jax.random.key(0), *(merge_heads(x) for x in (q, k, v)), **options)
    return split_heads(out, num_heads)
