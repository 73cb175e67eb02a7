"""Block sizes and operand layouts of the kernels."""

from __future__ import annotations

import dataclasses
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
