"""Mixture of block attention, as a mask over all logits and block-sparse, each with a gate of its own."""

from impls.moba.implementation import IMPLEMENTATIONS
from impls.moba.moba_dense import attention as dense_attention
from impls.moba.moba_sparse import attention

__all__ = ["IMPLEMENTATIONS", "attention", "dense_attention"]
