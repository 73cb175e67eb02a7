"""Triton's tiles for packed sequences: smaller than those for dense operands.

The masks of packed sequences are only known at run time, so every kernel contains code to mask. With the tiles for
dense operands that takes more registers than a thread has. Smaller tiles also waste less work at the ends of sequences.
"""

from __future__ import annotations

from impls.flash_gpu.block_sizes import BlockSizes, Entry, Tiles, find_narrowest

_COMPILED = "compiled for A100, H100 and B200, at most 4 bytes of registers spilled (`ptxas` of CUDA 13.0), never timed"
_ANY_DEPTH = 1 << 30

_TileSpec = tuple[int, int, int, int]  # queries per tile, keys per tile, warps, stages


def _build_entry(device: str, depth: int, itemsize: int, forward: _TileSpec, dq: _TileSpec, dkv: _TileSpec) -> Entry:
    def tiles(side: _TileSpec) -> Tiles:
        return Tiles(block_q=side[0], block_kv=side[1], num_warps=side[2], num_stages=side[3])

    sizes = BlockSizes(forward=tiles(forward), dq=tiles(dq), dkv=tiles(dkv))
    return Entry(device=device, max_depth=depth, max_itemsize=itemsize, sizes=sizes, provenance=_COMPILED)


# Each warp computes 16 rows of a product; more warps than rows / 16 would duplicate work. Matrix instructions of Hopper
# and Blackwell keep operands in shared memory, which leaves room for larger tiles. f32 does not use these instructions.
_ENTRIES_16_BIT = (
    _build_entry("", 64, 2, (128, 32, 8, 2), (64, 32, 4, 2), (32, 64, 4, 2)),
    _build_entry("", 128, 2, (128, 16, 8, 2), (64, 32, 4, 2), (16, 64, 4, 2)),
    _build_entry("", 256, 2, (32, 32, 4, 1), (32, 16, 4, 1), (16, 32, 4, 1)),
    *(_build_entry(device, 64, 2, (128, 64, 8, 2), (64, 64, 4, 2), (64, 128, 8, 2)) for device in ("H100", "H200")),
    *(
        _build_entry(device, 128, 2, (128, 64, 8, 2), (128, 32, 8, 2), (32, 128, 8, 2))
        for device in ("H100", "H200", "B200")
    ),
)
_ENTRIES_32_BIT = (
    _build_entry("", 64, 4, (64, 32, 8, 2), (32, 32, 8, 1), (32, 64, 8, 1)),
    _build_entry("", 128, 4, (32, 16, 8, 2), (32, 16, 8, 1), (16, 32, 4, 1)),
    _build_entry("", _ANY_DEPTH, 4, (32, 16, 8, 1), (16, 16, 8, 1), (16, 16, 4, 1)),
)
PACKED_TABLE = _ENTRIES_16_BIT + _ENTRIES_32_BIT


def look_up_packed(device_kind: str, depth: int, itemsize: int) -> BlockSizes:
    """Look up the tiles for a device kind, head depth (the larger of keys' and values') and dtype size."""
    return find_narrowest(PACKED_TABLE, device_kind, depth, itemsize).sizes
