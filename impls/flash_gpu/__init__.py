"""Flash attention for GPUs in Pallas: block skipping, any length and depth, hand-written backward.

The modules in the order in which they build on each other: `block_sizes` (tiles, and the table of them), `schedule`
(the plan of a call, and which tiles are visited), `packed_sizes` and `ranges` (these for packed sequences), `operands`
(arrays in and out), `triton` and `mosaic` (the kernels), `backends` (which of the two computes which kernel), `passes`
(forward and backward), `attention` and `packed` (the public calls), `tuning` and `implementation` (what is declared).
"""

from impls.flash_gpu.attention import attention
from impls.flash_gpu.block_sizes import BlockSizes, Ring, Tiles
from impls.flash_gpu.flash_gpu_packed import packed_attention
from impls.flash_gpu.implementation import IMPLEMENTATIONS, build_implementation, build_packed_implementation

__all__ = [
    "IMPLEMENTATIONS",
    "BlockSizes",
    "Ring",
    "Tiles",
    "attention",
    "build_implementation",
    "build_packed_implementation",
    "packed_attention",
]
