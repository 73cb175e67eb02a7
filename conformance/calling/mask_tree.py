"""Masks as trees that JAX can trace: the array of an `Indexer` is a leaf, and all else is static.

Registered when this module is imported.
"""

from __future__ import annotations

from typing import Any

import jax

from cases.masks import (
    And,
    Bidirectional,
    Causal,
    Chunked,
    Dense,
    Full,
    Indexer,
    Lengths,
    LoadBalancedCausal,
    Or,
    OwnWindow,
    Window,
)
from cases.moba import Moba

_STATIC = (Bidirectional, Causal, Chunked, Dense, Full, Lengths, LoadBalancedCausal, Moba, OwnWindow, Window)


def _indexer(_: None, children: Any) -> Indexer:
    """An `Indexer` of whatever a transformation puts in place of its array, which need not be one."""
    mask = object.__new__(Indexer)
    object.__setattr__(mask, "array", children[0])
    return mask


jax.tree_util.register_pytree_node(Indexer, lambda mask: ((mask.array,), None), _indexer)
jax.tree_util.register_pytree_node(And, lambda mask: ((mask.left, mask.right), None), lambda _, both: And(*both))
jax.tree_util.register_pytree_node(Or, lambda mask: ((mask.left, mask.right), None), lambda _, both: Or(*both))
for _kind in _STATIC:
    jax.tree_util.register_pytree_node(_kind, lambda mask: ((), mask), lambda mask, _: mask)
