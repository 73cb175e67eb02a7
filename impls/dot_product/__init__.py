"""Plain dot-product attention: every feature of the contract, differentiated by JAX itself."""

from impls.dot_product.attention import attention
from impls.dot_product.implementation import IMPLEMENTATIONS, build_implementation

__all__ = ["IMPLEMENTATIONS", "attention", "build_implementation"]
