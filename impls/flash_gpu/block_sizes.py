"""Block sizes of the kernels: tiles, warps and preferred back end, in one table by device, depth and dtype.

Every entry states its provenance. Measured entries, each for one kind of device, are data in a file next to this one,
which `python -m conformance tune --impl=flash_gpu` fills on a machine with a GPU. Tiles are clipped to the lengths of
the call, so that a short call does not compute mostly padding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from impls.contract import tunable
from impls.pallas_gpu.triton_tiles import MIN_TILE, round_up_to_tile

Axis = Literal["q", "kv"]
Kernel = Literal["forward", "dq", "dkv"]
KERNELS: tuple[Kernel, ...] = ("forward", "dq", "dkv")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    """Tile sizes and launch parameters of one Triton kernel."""

    block_q: int  # queries per tile, a power of two of at least 16
    block_kv: int  # keys per tile, a power of two of at least 16
    num_warps: int = 4  # warps per program, a power of two
    num_stages: int = 2  # tiles in flight in the software pipeline

    def __post_init__(self) -> None:
        for name, block in (("block_q", self.block_q), ("block_kv", self.block_kv)):
            if block < MIN_TILE or block & (block - 1):
                raise ValueError(f"{name} must be a power of two of at least {MIN_TILE}, got {block}")
        if self.num_warps < 1 or self.num_warps & (self.num_warps - 1):
            raise ValueError(f"num_warps must be a power of two, got {self.num_warps}")
        if self.num_stages < 1:
            raise ValueError(f"num_stages must be positive, got {self.num_stages}")

    def cut_to(self, q_length: int, kv_length: int) -> Tiles:
        """Clip the tiles to the lengths."""
        return dataclasses.replace(
            self,
            block_q=min(self.block_q, round_up_to_tile(q_length)),
            block_kv=min(self.block_kv, round_up_to_tile(kv_length)),
        )


RING_BLOCKS = (64, 128)
"""Allowed numbers of rows of the tiles that a Mosaic GPU kernel visits.

They are multiples of the 64 rows that Mosaic GPU requires of a product's summed axis, and small enough for a
warpgroup's registers.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ring:
    """Ring buffer of tiles in shared memory, for one Mosaic GPU kernel.

    A program of the kernel owns a block of queries or of keys. It streams tiles of the other axis through the ring.
    """

    # Queries or keys per tile, one of `RING_BLOCKS`. At depths up to 128 no loop over full blocks spills registers with
    # 64 or 128 (`ptxas` of CUDA 13.0), and 128 takes fewer instructions per pair. The kernel of dk and dv spills
    # registers in masked blocks of 128 queries.
    block: int = 64
    num_stages: int = 2  # tiles in flight, at least 2, or 1 with `early_copies` and without `ping_pong`
    # Whether the kernel is used instead of Triton's on GPUs and calls that it supports. Only set where measured: fewer
    # instructions are not always faster, and a default kernel must be correct.
    preferred: bool = False
    # Whether one computing warpgroup multiplies while the other computes exponentials. Forward kernel only.
    ping_pong: bool = False
    # Whether there is one program per multiprocessor, which computes several tiles. Forward kernel only.
    persistent: bool = False
    # Whether keys and values are released separately, each as soon as it is read, so that their next copies start
    # earlier. Not for the kernel of dk and dv.
    early_copies: bool = False
    # Tiles of values in flight, at most `num_stages`; None for as many. Only with `early_copies`.
    num_v_stages: int | None = None
    # Tiles of queries in flight, 1 or 2. With 2, a persistent kernel fetches the queries of its next tile during this
    # one.
    num_q_stages: int = 1

    def __post_init__(self) -> None:
        if self.block not in RING_BLOCKS:
            raise ValueError(f"block must be one of {', '.join(map(str, RING_BLOCKS))}, got {self.block}")
        # In a turn, a warpgroup multiplies by the next tile of keys before the other one has released this tile.
        if self.num_stages < (1 if self.early_copies and not self.ping_pong else 2):
            raise ValueError(
                "num_stages must be at least 2, or 1 with early_copies=True and ping_pong=False; got "
                f"{self.num_stages} with early_copies={self.early_copies}, ping_pong={self.ping_pong}"
            )
        if self.num_v_stages is not None and not (self.early_copies and 1 <= self.num_v_stages <= self.num_stages):
            raise ValueError(
                f"num_v_stages must be 1 to num_stages={self.num_stages}, with early_copies=True; got "
                f"{self.num_v_stages} with early_copies={self.early_copies}"
            )
        if self.num_q_stages not in (1, 2) or (self.num_q_stages == 2 and not self.persistent):
            raise ValueError(
                f"num_q_stages must be 1, or 2 with persistent=True; got {self.num_q_stages} with "
                f"persistent={self.persistent}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockSizes:
    """Block sizes of the kernels: forward, gradient of q (and of the bias), gradients of k and v.

    `forward`, `dq` and `dkv` are the tiles of the Triton kernels. The fields that begin with `mosaic_` are the rings of
    the Mosaic GPU kernels.
    """

    forward: Tiles
    dq: Tiles
    dkv: Tiles
    mosaic_forward: Ring = Ring()
    mosaic_dq: Ring = Ring()
    mosaic_dkv: Ring = Ring()

    def __post_init__(self) -> None:
        for name, ring in (("mosaic_dq", self.mosaic_dq), ("mosaic_dkv", self.mosaic_dkv)):
            if ring.ping_pong or ring.persistent:
                raise ValueError(f"{name} must be without ping_pong and persistent: only the forward kernel has them")
        if self.mosaic_dkv.early_copies:
            raise ValueError("mosaic_dkv must be without early_copies: it reads queries and cotangents to the end")

    def ring(self, kernel: Kernel) -> Ring:
        """Return the ring of one Mosaic GPU kernel."""
        return {"forward": self.mosaic_forward, "dq": self.mosaic_dq, "dkv": self.mosaic_dkv}[kernel]

    def cut_to(self, q_length: int, kv_length: int) -> BlockSizes:
        """Clip Triton's tiles to the lengths. Mosaic's operands are padded with zeros instead."""
        return dataclasses.replace(
            self,
            forward=self.forward.cut_to(q_length, kv_length),
            dq=self.dq.cut_to(q_length, kv_length),
            dkv=self.dkv.cut_to(q_length, kv_length),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """One row of the table."""

    device: str  # text that JAX's device kind must contain; empty for any device
    max_depth: int  # largest head depth, of keys or values, that the row is for
    max_itemsize: int  # bytes of the largest operand dtype that the row is for
    sizes: BlockSizes
    provenance: str  # how the block sizes were found, for example measured, or counted in machine code
    full_mask: bool = False  # whether the row is only for calls in which every query attends to every key


MEASURED_TABLE = Path(__file__).with_name("block_sizes.json")


def parse_settings(settings: Mapping[str, Mapping[str, Any]]) -> BlockSizes:
    """Parse block sizes from plain data with the field names of `BlockSizes`, `Tiles` and `Ring`."""
    sizes: dict[str, Any] = {
        name: (Ring if name.startswith("mosaic_") else Tiles)(**setting) for name, setting in settings.items()
    }
    return BlockSizes(**sizes)


def _load_measured() -> tuple[Entry, ...]:
    """Load the measured entries from their file."""
    return tuple(
        Entry(
            device=entry.device,
            max_depth=entry.key["max_depth"],
            max_itemsize=entry.key["max_itemsize"],
            full_mask=bool(entry.key.get("full_mask", False)),
            sizes=parse_settings(entry.settings),
            provenance=f"measured on {entry.device}, {entry.provenance['date']}, jax {entry.provenance['jax']}",
        )
        for entry in tunable.read_table(MEASURED_TABLE)
    )


_TileSpec = tuple[int, int, int, int]  # queries per tile, keys per tile, warps, stages


def _build_entry(
    device: str,
    depth: int,
    itemsize: int,
    tiles: tuple[_TileSpec, _TileSpec, _TileSpec],  # of the forward kernel, of dq, and of dk and dv
    provenance: str,
    **rings: Ring,
) -> Entry:
    forward, dq, dkv = (Tiles(block_q=q, block_kv=kv, num_warps=warps, num_stages=n) for q, kv, warps, n in tiles)
    sizes = BlockSizes(forward=forward, dq=dq, dkv=dkv, **rings)
    return Entry(device=device, max_depth=depth, max_itemsize=itemsize, sizes=sizes, provenance=provenance)


_ANY_DEPTH = 1 << 30
_REASONED = "reasoned from shared memory and registers, compiled for A100, H100 and B200, timed on none of them"
_REASONED_ENTRIES = (
    _build_entry("", 64, 2, ((128, 64, 4, 3), (64, 64, 4, 2), (64, 64, 4, 2)), _REASONED),
    _build_entry("", 128, 2, ((128, 64, 8, 2), (64, 64, 4, 2), (64, 64, 4, 2)), _REASONED),
    _build_entry("", 128, 4, ((64, 32, 4, 2), (32, 32, 4, 1), (32, 32, 4, 1)), _REASONED),
    _build_entry(
        "",
        256,
        2,
        ((64, 32, 4, 2), (32, 32, 4, 1), (32, 32, 4, 1)),
        f"{_REASONED}; the Mosaic rings compiled for H100 alone",
        # In the kernel of dq there is shared memory for two tiles of keys, but for only one of values.
        mosaic_forward=Ring(ping_pong=True, persistent=True, early_copies=True),
        mosaic_dq=Ring(early_copies=True, num_v_stages=1),
    ),
    _build_entry("", _ANY_DEPTH, 4, ((32, 16, 4, 1), (16, 16, 4, 1), (16, 16, 4, 1)), _REASONED),
)
_COUNTED = "counted in machine code (`python -m conformance cycles --target=h100`), timed on no chip"
# The owned axis has 128 rows: with 64 rows, 8 warps would compute half of the pairs twice on these GPUs.
_WIDE_BACKWARD = ((128, 64, 8, 2), (64, 128, 8, 2))
_COUNTED_ENTRIES = (
    *(
        entry
        for device in ("H100", "H200")
        for entry in (
            _build_entry(
                device,
                64,
                2,
                ((128, 128, 8, 2), (64, 128, 4, 2), (64, 64, 4, 2)),
                _COUNTED,
                mosaic_forward=Ring(block=128),
                mosaic_dq=Ring(block=128),
            ),
            _build_entry(device, 128, 2, ((128, 128, 8, 2), *_WIDE_BACKWARD), _COUNTED, mosaic_forward=Ring(block=128)),
        )
    ),
    _build_entry("B200", 128, 2, ((128, 64, 8, 2), *_WIDE_BACKWARD), _COUNTED),
)

TABLE = (*_load_measured(), *_REASONED_ENTRIES, *_COUNTED_ENTRIES)


def look_up(device_kind: str, depth: int, itemsize: int, *, full_mask: bool = False) -> Entry:
    """Look up the narrowest entry for a device kind, head depth (the larger of keys' and values') and dtype size.

    Among the entries that fit, the smallest `max_itemsize` wins, then the smallest `max_depth`. Between equals, an
    entry for this device wins over one for any device, and then one for full masks over one for any mask.
    """
    return find_narrowest(TABLE, device_kind, depth, itemsize, full_mask=full_mask)


def find_narrowest(
    table: tuple[Entry, ...], device_kind: str, depth: int, itemsize: int, *, full_mask: bool = False
) -> Entry:
    """Find the narrowest entry of a table, by the rules of `look_up`."""
    fitting = (
        entry
        for entry in table
        if entry.device in device_kind
        and depth <= entry.max_depth
        and itemsize <= entry.max_itemsize
        and entry.full_mask <= full_mask
    )
    return min(fitting, key=lambda entry: (entry.max_itemsize, entry.max_depth, not entry.device, not entry.full_mask))


_COMPILED = "compiled for A100, H100 and B200, at most 4 bytes of registers spilled (`ptxas` of CUDA 13.0), never timed"

# Each warp computes 16 rows of a product; more warps than rows / 16 would duplicate work. Matrix instructions of Hopper
# and Blackwell keep operands in shared memory, which leaves room for larger tiles. f32 does not use these instructions.
_ENTRIES_16_BIT = (
    _build_entry("", 64, 2, ((128, 32, 8, 2), (64, 32, 4, 2), (32, 64, 4, 2)), _COMPILED),
    _build_entry("", 128, 2, ((128, 16, 8, 2), (64, 32, 4, 2), (16, 64, 4, 2)), _COMPILED),
    _build_entry("", 256, 2, ((32, 32, 4, 1), (32, 16, 4, 1), (16, 32, 4, 1)), _COMPILED),
    *(
        _build_entry(device, 64, 2, ((128, 64, 8, 2), (64, 64, 4, 2), (64, 128, 8, 2)), _COMPILED)
        for device in ("H100", "H200")
    ),
    *(
        _build_entry(device, 128, 2, ((128, 64, 8, 2), (128, 32, 8, 2), (32, 128, 8, 2)), _COMPILED)
        for device in ("H100", "H200", "B200")
    ),
)
_ENTRIES_32_BIT = (
    _build_entry("", 64, 4, ((64, 32, 8, 2), (32, 32, 8, 1), (32, 64, 8, 1)), _COMPILED),
    _build_entry("", 128, 4, ((32, 16, 8, 2), (32, 16, 8, 1), (16, 32, 4, 1)), _COMPILED),
    _build_entry("", _ANY_DEPTH, 4, ((32, 16, 8, 1), (16, 16, 8, 1), (16, 16, 4, 1)), _COMPILED),
)
PACKED_TABLE = _ENTRIES_16_BIT + _ENTRIES_32_BIT
"""Triton's tiles for packed sequences: smaller than those for dense operands.

The masks of packed sequences are only known at run time, so every kernel contains code to mask. With the tiles for
dense operands that takes more registers than a thread has. Smaller tiles also waste less work at the ends of sequences.
"""


def look_up_packed(device_kind: str, depth: int, itemsize: int) -> BlockSizes:
    """Look up the tiles for a device kind, head depth (the larger of keys' and values') and dtype size."""
    return find_narrowest(PACKED_TABLE, device_kind, depth, itemsize).sizes
