"""Block-sparse flash attention in plain JAX: linear memory, any backend, hand-written backward."""

from impls.block_flash.attention import attention
from impls.block_flash.implementation import IMPLEMENTATIONS, implementation

__all__ = ["IMPLEMENTATIONS", "attention", "implementation"]
