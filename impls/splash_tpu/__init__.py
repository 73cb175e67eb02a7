"""Splash attention: block-sparse flash attention in Pallas for TPU, forward and backward."""

from impls.splash_tpu.attention import IMPLEMENTATIONS, attention, implementation
from impls.splash_tpu.block_sizes import Blocks, BlockSizes, Layouts
from impls.splash_tpu.kernel import Splash, make_splash, make_splash_dynamic

__all__ = [
    "IMPLEMENTATIONS",
    "BlockSizes",
    "Blocks",
    "Layouts",
    "Splash",
    "attention",
    "implementation",
    "make_splash",
    "make_splash_dynamic",
]
