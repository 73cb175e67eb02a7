"""Adapter of the native attention back end of sglang-jax, on packed sequences.

`forward_attention` reads keys and values by their place in a cache whose first slot is reserved
(https://github.com/sgl-project/sglang-jax, `python/sgl_jax/srt/layers/attention/native_backend.py`). Its package needs
the dependencies of a server, so this file is loaded alone. Softmax is in the operands' dtype.
"""

from __future__ import annotations

import enum
import importlib.metadata
from types import ModuleType
from typing import Any
from unittest import mock

import jax.numpy as jnp

from impls.contract.declarations import declare
from impls.libraries._module_files import load_module

_ForwardMode = enum.Enum("_ForwardMode", "EXTEND DECODE")
_PACKAGES = ("", ".srt", ".srt.layers", ".srt.layers.attention", ".srt.managers", ".srt.mem_cache")
_MODULES = (
    "layers.attention.base_attn_backend",
    "layers.radix_attention",
    "managers.schedule_batch",
    "mem_cache.memory_pool",
    "model_executor.forward_batch_info",
    "utils.jax_utils",
)
_STUBS = {f"sgl_jax{name}": ModuleType(f"sgl_jax{name}") for name in (*_PACKAGES, ".srt.model_executor", ".srt.utils")}
_NAMES = {"ForwardMode": _ForwardMode, "AttentionBackend": object}
_library = load_module(
    "sgl_jax",
    "srt/layers/attention/native_backend.py",
    {**_STUBS, **{f"sgl_jax.srt.{name}": mock.MagicMock(**_NAMES) for name in _MODULES}},
)
# In 0.0.1 a token has one axis, of all heads, and callers pass the scale.
_IS_FLAT = importlib.metadata.version("sglang-jax") == "0.0.1"


@declare(
    logits="input",
    softmax="input",
    group_sums="input",
    behind_mask="finite",
    causal="end",
    empty_sequences=False,
    unsupported={"v_head_dim": "values have the depth of keys"},
)
def native(q: Any, k: Any, v: Any, *, cu_q_lens: Any, cu_kv_lens: Any, causal: bool = False, scale: Any = None) -> Any:
    """`forward_attention` in its mode EXTEND, on a cache that holds the keys in order behind its reserved slot."""
    q_lens, kv_lens = jnp.diff(cu_q_lens), jnp.diff(cu_kv_lens)
    k_cache, v_cache = (jnp.concatenate([jnp.zeros_like(x[:1]), x]) for x in (k, v))
    places, prefix = 1 + jnp.arange(k.shape[0]), kv_lens - q_lens
    lengths = (kv_lens, places, prefix, q_lens)
    options = {"scale": scale, "is_causal": bool(causal), "mode": _ForwardMode.EXTEND}
    operands: tuple[Any, ...] = (q, k_cache, v_cache)
    if _IS_FLAT:
        options["scale"] = q.shape[-1] ** -0.5 if scale is None else scale
        operands = tuple(x.reshape(x.shape[0], -1) for x in operands)
    out = _library.forward_attention(*operands, *lengths, q.shape[1], k.shape[1], **options)
    return out.reshape(q.shape)
