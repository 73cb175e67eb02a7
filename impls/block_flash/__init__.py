"""Block-sparse flash attention in plain JAX: linear memory, any backend, hand-written backward."""

from impls.block_flash.attention import attention
from impls.block_flash.implementation import IMPLEMENTATIONS, implementation
from impls.block_flash.packed import packed_attention

__all__ = ["IMPLEMENTATIONS", "attention", "implementation", "packed_attention"]
