"""Adapter of the attention layers of Penzai, composed as in its models like Llama.

`penzai.models.transformer.variants.llamalike_common.build_llamalike_attention` composes these layers: queries are
rescaled, then `NamedEinsum`, `TanhSoftCap`, a mask layer, `Softmax` and `NamedEinsum`
(https://penzai.readthedocs.io/en/stable/api/pz.nn.html). Its rotary embedding and projections are left out. Every layer
computes in the dtype of its inputs.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import ml_dtypes
from penzai import pz

from impls.contract.declarations import declare

_SHARED = {"batch": "b", "head_group": "g"}
_KEYS: dict[str, str] = {"seq": "tkv", **_SHARED, "projection": "p"}
_QUERIES: dict[str, str] = {"seq": "tq", **_SHARED, "query_head": "h", "projection": "p"}
_LOGITS: dict[str, str] = {"seq": "tq", **_SHARED, "query_head": "h", "kv_seq": "tkv"}
_POSITIONS = {"query_positions_input_name": "query_positions", "kv_positions_input_name": "kv_positions"}


@declare(logits="input", softmax="input", scaled_q=True, group_sums="input", empty_rows="mean", behind_mask="finite")
def llamalike(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    mask: Any = None,
    soft_cap: float | None = None,
    scale: float | None = None,
) -> Any:
    """Attention layers of `penzai.pz.nn`, composed as in models like Llama."""
    batch, length, num_heads, depth = q.shape
    kv_length, num_kv_heads = k.shape[1:3]
    lowest = ml_dtypes.finfo(q.dtype).min
    masked = {"masked_out_value": jnp.array(lowest, q.dtype)}
    inputs = {"query_positions": pz.nx.arange("seq", length), "kv_positions": pz.nx.arange("seq", kv_length)}
    layers: list[Any] = [pz.nn.NamedEinsum((_QUERIES, _KEYS), _LOGITS)]
    if soft_cap is not None:
        layers.append(pz.nn.TanhSoftCap(soft_cap=jnp.array(soft_cap, q.dtype)))
    if window is not None and window[0] is not None and window[1] == 0:
        size = window[0] + 1  # the query's own position counts
        layers.append(pz.nn.ApplyCausalSlidingWindowAttentionMask(sliding_window_size=size, **masked, **_POSITIONS))
    elif window is not None:
        band = _build_band(length, kv_length, window)[None, None]
        mask = band if mask is None else mask & band
    if causal:
        layers.append(pz.nn.ApplyCausalAttentionMask(**masked, **_POSITIONS))
    if mask is not None:
        mask = jnp.broadcast_to(mask, (batch, num_heads, length, kv_length))
        mask = mask.reshape(batch, num_kv_heads, num_heads // num_kv_heads, length, kv_length)
        inputs["mask"] = pz.nx.wrap(mask).tag("batch", "head_group", "query_head", "seq", "kv_seq")
        layers.append(pz.nn.ApplyExplicitAttentionMask(mask_input_name="mask", **masked))
    layers.append(pz.nn.Softmax("kv_seq"))

    grouped = q.reshape(batch, length, num_kv_heads, num_heads // num_kv_heads, depth)
    query = pz.nx.wrap(grouped).tag("batch", "seq", "head_group", "query_head", "projection")
    query = pz.nn.ConstantRescale(by=jnp.array(depth**-0.5 if scale is None else scale, q.dtype))(query)
    key, value = (pz.nx.wrap(x).tag("batch", "seq", "head_group", "projection") for x in (k, v))
    weights = pz.nn.Sequential(layers)((query, key), **inputs)
    out = pz.nn.NamedEinsum((_LOGITS, _KEYS), _QUERIES)((weights, value))
    out = out.unwrap("batch", "seq", "head_group", "query_head", "projection")
    return out.reshape(batch, length, num_heads, v.shape[3])


def _build_band(length: int, kv_length: int, window: tuple[int | None, int | None]) -> Any:
    """Build the mask `[T, S]` of a window that no layer has: one that is open on the left, or reaches ahead."""
    ahead = jnp.arange(kv_length) - jnp.arange(length)[:, None]
    left, right = window
    band = jnp.ones((length, kv_length), bool)
    band = band if left is None else band & (ahead >= -left)
    return band if right is None else band & (ahead <= right)
