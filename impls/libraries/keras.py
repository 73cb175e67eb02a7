"""Adapters of the attention of Keras on JAX: the operation, and two layers.

The operation calls `jax.nn.dot_product_attention`. It documents values of the keys' shape, and a soft cap for TPUs only
(https://keras.io/api/ops/nn/#dotproductattention-function). The layers call the operation; a layer that returns its
scores computes these first (https://keras.io/api/layers/attention_layers/multi_head_attention/). They are called with
identity projections.
"""

from __future__ import annotations

import functools
import inspect
import os
import tempfile
from typing import Any

# Keras reads both at import. A folder of its own, since a sandboxed call may not read the user's settings of Keras.
os.environ["KERAS_BACKEND"] = "jax"
os.environ["KERAS_HOME"] = tempfile.mkdtemp()

import jax
import jax.numpy as jnp
from keras import layers, ops

from impls.contract.declarations import declare
from impls.libraries.identity_projections import initialize_identity, merge_heads, split_heads

_EQUAL_HEADS = {"gqa": "it has one number of heads", "mqa": "it has one number of heads"}
_EQUAL_DEPTHS = {"v_head_dim": "values have the depth of keys"}
_ONE_MASK = {"dense_head": "attention_mask is [B, T, S], the same for all heads"}
_Window = tuple[int | None, int | None]


@declare(empty_rows="mean", behind_mask="finite", unsupported=_EQUAL_DEPTHS)
def dot_product_attention(
    q: Any, k: Any, v: Any, *, causal: bool = False, mask: Any = None, bias: Any = None, scale: float | None = None
) -> Any:
    """`keras.ops.dot_product_attention`, which calls `jax.nn.dot_product_attention`."""
    return ops.dot_product_attention(q, k, v, bias=bias, mask=mask, scale=scale, is_causal=causal)


# The layer documents `value_dim`, but not that of the operation.
@declare(empty_rows="mean", behind_mask="finite", unsupported=_EQUAL_HEADS | _ONE_MASK)
def multi_head_attention(
    q: Any, k: Any, v: Any, *, causal: bool = False, window: _Window | None = None, mask: Any = None
) -> Any:
    """`keras.layers.MultiHeadAttention`, which calls `keras.ops.dot_product_attention`."""
    return _call_layer(layers.MultiHeadAttention, q, k, v, causal, window, mask)


@declare(
    logits="input",
    softmax="input",
    scaled_q=True,
    residuals="input",
    empty_rows="zero",
    behind_mask="finite",
    unsupported=_EQUAL_HEADS | _ONE_MASK,
)
def multi_head_attention_scores(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: _Window | None = None,
    mask: Any = None,
    dropout_rate: float | None = None,
    dropout_key: Any = None,
    save_residuals: bool = False,
) -> Any:
    """`keras.layers.MultiHeadAttention` with `return_attention_scores=True`: `keras.layers.Softmax` gives weights."""
    dropout = (dropout_rate or 0.0, dropout_key)
    kind = layers.MultiHeadAttention
    out, weights = _call_layer(kind, q, k, v, causal, window, mask, dropout, return_attention_scores=True)
    return (out, {"weights": weights}) if save_residuals else out


@declare(group_sums="input", empty_rows="mean", behind_mask="finite", unsupported=_EQUAL_DEPTHS | _ONE_MASK)
def grouped_query_attention(
    q: Any, k: Any, v: Any, *, causal: bool = False, window: _Window | None = None, mask: Any = None
) -> Any:
    """`keras.layers.GroupQueryAttention`, which repeats keys and values for the heads of a group."""
    return _call_layer(layers.GroupQueryAttention, q, k, v, causal, window, mask)


def _call_layer(
    kind: Any,
    q: Any,
    k: Any,
    v: Any,
    causal: bool,
    window: _Window | None,
    mask: Any,
    dropout: tuple[float, Any] = (0.0, None),
    **options: Any,
) -> Any:
    """Call a layer with identity projections. `dropout` has the rate and the key, which replaces the state of the seed.

    A window is passed as `sliding_window` if that can say it: the same reach on both sides, or a left side and causal.
    """
    sliding = None
    if mask is not None:
        mask = jnp.broadcast_to(mask, (q.shape[0], 1, q.shape[1], k.shape[1]))[:, 0]
    if window is not None and window[0] is not None and window[1] in (0, window[0]) and _has_window(kind):
        sliding, causal = window[0] + 1, causal or window[1] == 0
    elif window is not None:
        band = _build_band(q.shape[1], k.shape[1], window)[None]
        mask = band if mask is None else mask & band
    if mask is not None:
        mask = jnp.broadcast_to(mask, (q.shape[0], q.shape[1], k.shape[1]))
    layer = _build_layer(kind, q.shape[2], k.shape[2], q.shape[3], v.shape[3], q.dtype.name, sliding, dropout[0])
    weights = [initialize_identity(None, variable.shape, q.dtype) for variable in layer.trainable_variables]
    with jax.default_matmul_precision("highest"):
        result, _ = layer.stateless_call(
            weights,
            [dropout[1]] if dropout[0] else layer.non_trainable_variables,
            merge_heads(q),
            merge_heads(v),
            key=merge_heads(k),
            attention_mask=mask,
            use_causal_mask=causal,
            training=dropout[0] > 0,
            **options,
        )
    out = result[0] if isinstance(result, tuple) else result
    out = split_heads(out, q.shape[2])
    return (out, *result[1:]) if isinstance(result, tuple) else out


def _has_window(kind: Any) -> bool:
    """Return whether the layer has the argument `sliding_window`, which it has from Keras 3.15 on."""
    return "sliding_window" in inspect.signature(kind).parameters


def _build_band(q_length: int, kv_length: int, window: _Window) -> Any:
    """Build the mask `[T, S]` of a window whose first query is at the first key."""
    ahead = jnp.arange(kv_length) - jnp.arange(q_length)[:, None]
    left, right = window
    band = jnp.ones((q_length, kv_length), bool)
    band = band if left is None else band & (ahead >= -left)
    return band if right is None else band & (ahead <= right)


@functools.cache
def _build_layer(
    kind: Any,
    num_heads: int,
    num_kv_heads: int,
    depth: int,
    value_depth: int,
    dtype: str,
    sliding: int | None,
    rate: float,
) -> Any:
    """Build a layer without biases. Its variables are concrete even where a call of it is traced."""
    options: dict[str, Any] = {"use_bias": False, "dtype": dtype}
    if sliding is not None:
        options["sliding_window"] = sliding
    if kind is layers.MultiHeadAttention:
        layer = kind(num_heads, depth, value_depth, rate, output_shape=num_heads * value_depth, **options)
    else:
        layer = kind(depth, num_heads, num_kv_heads, **options)
    with jax.ensure_compile_time_eval():
        shapes = (None, None, num_kv_heads * value_depth), (None, None, num_kv_heads * depth)
        layer.build((None, None, num_heads * depth), *shapes)
    return layer
