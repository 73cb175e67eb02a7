"""Adapter of memory-efficient-attention in JAX (arXiv:2112.05682).

Its package also imports its version for PyTorch, so the module for JAX is loaded by its path
(https://github.com/AminRezaei0x443/memory-efficient-attention). Weights enter the second product unrounded.
"""

from __future__ import annotations

from typing import Any

from impls.contract.declarations import declare
from impls.libraries._module_files import load_module

_EQUAL_HEADS = dict.fromkeys(("gqa", "mqa"), "q, k and v have the same number of heads")
_library = load_module("memory_efficient_attention", "attention_jax.py")


@declare(
    empty_rows="mean", behind_mask="finite", logits="input", softmax="input", scaled_q=True, unsupported=_EQUAL_HEADS
)
def attention(q: Any, k: Any, v: Any, *, mask: Any = None, bias: Any = None) -> Any:
    """`efficient_dot_product_attention_jax`, in blocks of 1024 queries and 4096 keys, in the operands' dtype."""
    return _library.efficient_dot_product_attention(q, k, v, mask=mask, bias=bias)
