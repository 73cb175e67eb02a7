"""Block-sparse flash attention in plain JAX: linear memory, any backend, hand-written backward."""

from impls.block_flash.attention import attention
from impls.block_flash.block_flash_packed import packed_attention
from impls.block_flash.implementation import IMPLEMENTATIONS, build_implementation

__all__ = ["IMPLEMENTATIONS", "attention", "build_implementation", "packed_attention"]
