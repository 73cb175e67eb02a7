"""Flash attention for GPUs in Pallas: block skipping, any length and depth, hand-written backward.

The modules, each building on the ones before: `block_sizes` (tiles, and their tables), `packed_visits` (for packed
sequences), `tile_schedule` (the plan and the arrays of a call, and which tiles are visited), `triton` and `mosaic` (the
kernels), `pallas_backends` (which of the two computes which kernel), `attention` and `flash_gpu_packed` (the public
calls), `flash_gpu_tuning` and `implementation` (declarations).
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
