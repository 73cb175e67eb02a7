"""Flash attention for GPUs in Pallas: block skipping, any length and depth, hand-written backward."""

from impls.flash_gpu.attention import attention
from impls.flash_gpu.block_sizes import BlockSizes, Ring, Tiles
from impls.flash_gpu.implementation import IMPLEMENTATIONS, implementation

__all__ = ["IMPLEMENTATIONS", "BlockSizes", "Ring", "Tiles", "attention", "implementation"]
