"""Flash attention for GPUs in Pallas: block skipping, any length and depth, hand-written backward."""

from impls.flash_gpu.attention import IMPLEMENTATIONS, attention, implementation
from impls.flash_gpu.block_sizes import BlockSizes, Tiles

__all__ = ["IMPLEMENTATIONS", "BlockSizes", "Tiles", "attention", "implementation"]
