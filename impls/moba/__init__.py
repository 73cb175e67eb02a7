"""Mixture of block attention (MoBA): a dense form with all logits in memory, and a block-sparse form.

Each form has its own code for the gate, which selects the chunks of keys that a query attends to.
"""

from impls.moba.implementation import IMPLEMENTATIONS
from impls.moba.moba_dense import attention as dense_attention
from impls.moba.moba_sparse import attention

__all__ = ["IMPLEMENTATIONS", "attention", "dense_attention"]
