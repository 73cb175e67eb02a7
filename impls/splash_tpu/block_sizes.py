"""Block sizes and operand layouts of the kernels, and the VMEM that they take."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Literal

LANES = 128
"""Width of a vector register; block lengths are multiples of it."""

Layout = Literal["head_dim_minor", "sequence_minor"]


@dataclasses.dataclass(frozen=True)
class Layouts:
    """Which axis of q, k and v is the innermost in memory: the head depth, or the sequence.

    A depth below 128 leaves lanes unused where it is innermost; with the sequence innermost it does not.
    """

    q: Layout = "head_dim_minor"
    k: Layout = "head_dim_minor"
    v: Layout = "head_dim_minor"

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if (value := getattr(self, field.name)) not in ("head_dim_minor", "sequence_minor"):
                raise ValueError(f"layout of {field.name} must be head_dim_minor or sequence_minor, got {value!r}")


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Sizes of one kernel: queries and keys of a block in VMEM, and keys of one step of computing inside it.

    All are multiples of 128; `kv_compute` divides `kv` and is `kv` by default.
    """

    q: int = 512
    kv: int = 512
    kv_compute: int | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is None:
                continue
            if value <= 0 or value % LANES:
                raise ValueError(f"block size {field.name} must be a positive multiple of {LANES}, got {value}")
        if self.kv % self.compute:
            raise ValueError(f"block size kv_compute must divide kv = {self.kv}, got {self.compute}")

    @property
    def compute(self) -> int:
        """Keys of one step of computing."""
        return self.kv if self.kv_compute is None else self.kv_compute

    def clipped(self, q_length: int, kv_length: int) -> Blocks:
        """No block longer than the whole length in whole lanes."""
        q, kv = min(self.q, whole(q_length, LANES)), min(self.kv, whole(kv_length, LANES))
        return Blocks(q, kv, self.compute if self.compute < kv and kv % self.compute == 0 else None)


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """Block sizes of each phase; with `fused_backward` one kernel gives all gradients and `dq` is not used."""

    forward: Blocks = Blocks()
    dkv: Blocks = Blocks()
    dq: Blocks = Blocks()
    fused_backward: bool = False

    @classmethod
    def uniform(cls, q: int, kv: int, kv_compute: int | None = None, *, fused_backward: bool = False) -> BlockSizes:
        """The same sizes in every phase."""
        blocks = Blocks(q, kv, kv_compute)
        return cls(forward=blocks, dkv=blocks, dq=blocks, fused_backward=fused_backward)


def whole(length: int, block: int) -> int:
    """`length` rounded up to whole blocks."""
    return -(-length // block) * block


@dataclasses.dataclass(frozen=True)
class Depths:
    """What the VMEM of a kernel follows from, beside its blocks: depths, and bytes an element of the operands."""

    head_dim: int
    head_dim_v: int
    itemsize: int


def vmem_bytes(phase: str, blocks: Blocks, depths: Depths, *, stored_mask: bool, fused: bool = False) -> int:
    """VMEM that a kernel takes, estimated.

    Operand and result blocks are counted twice, since the next ones are fetched while these are used; scratch once;
    and the values of one step of computing, three arrays of `[q, kv_compute]` in f32, once.

    Args:
      phase: `"forward"`, `"dq"` or `"dkv"`.
      blocks: its block sizes.
      depths: of the operands.
      stored_mask: whether mask blocks are fetched.
      fused: whether the kernel of dk and dv gives dq too.
    """
    h, v = whole(depths.head_dim, LANES), whole(depths.head_dim_v, LANES)
    q_row, kv_row, f32 = h * depths.itemsize, (h + v) * depths.itemsize, 4
    fetched = blocks.q * q_row + blocks.kv * kv_row + (blocks.q * blocks.kv if stored_mask else 0)
    if phase == "forward":
        fetched += blocks.q * v * depths.itemsize  # out
        scratch = blocks.q * (v + 3 * LANES) * f32
    elif phase == "dq":
        fetched += blocks.q * (v + h) * depths.itemsize  # do, dq
        scratch = blocks.q * (h + 3 * LANES) * f32
    else:
        fetched += blocks.q * v * depths.itemsize + blocks.kv * kv_row  # do; dk, dv
        scratch = blocks.kv * (h + v + LANES) * f32 + (2 * blocks.q * h * f32 if fused else 0)
    return 2 * fetched + scratch + 3 * blocks.q * blocks.compute * f32


def check_vmem(
    phase: str, blocks: Blocks, depths: Depths, *, stored_mask: bool, limit: int, fused: bool = False
) -> None:
    """Refuse blocks that do not fit.

    Raises:
      ValueError: the estimate is over `limit` bytes; the message says which sizes would fit.
    """
    need = vmem_bytes(phase, blocks, depths, stored_mask=stored_mask, fused=fused)
    if need <= limit:
        return
    sizes = [size for size in (2048, 1024, 512, 256, 128) if size <= max(blocks.q, blocks.kv)]
    fitting = [
        f"{q} x {kv}"
        for q, kv in itertools.product(sizes, sizes)
        if vmem_bytes(phase, Blocks(q, kv), depths, stored_mask=stored_mask, fused=fused) <= limit
    ]
    remedy = f"these would fit (q x kv): {', '.join(fitting[:4])}" if fitting else "no block size would fit"
    raise ValueError(
        f"block sizes of the {phase} kernel, q {blocks.q}, kv {blocks.kv}, kv_compute {blocks.compute}, take about "
        f"{need / 2**20:.1f} MiB of VMEM at head_dim {depths.head_dim} and {depths.head_dim_v}, over the limit of "
        f"{limit / 2**20:.1f} MiB; {remedy}"
    )
