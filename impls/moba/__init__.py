"""Mixture of block attention (MoBA): a dense form with all logits, and a block-sparse form; each has its own gate."""

from impls.moba.implementation import IMPLEMENTATIONS
from impls.moba.moba_dense import attention as dense_attention
from impls.moba.moba_sparse import attention

__all__ = ["IMPLEMENTATIONS", "attention", "dense_attention"]
