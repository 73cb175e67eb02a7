"""Block sizes and operand layouts of the kernels."""

from __future__ import annotations

import dataclasses
from typing import Literal

from impls.pallas_tpu.tpu_tiles import LANES, round_up

_MAX_PARTS = 16

Layout = Literal["head_dim_minor", "sequence_minor"]


@dataclasses.dataclass(frozen=True)
class Layouts:
    """Which axis of q, k and v is innermost in memory: the head depth or the sequence.

    If the depth is innermost and below 128, lanes of vector registers stay unused. With the sequence innermost, all
    lanes are used.
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
    """Block sizes of one kernel: queries and keys of a block in VMEM, and keys computed at once.

    All are multiples of 128. `kv_compute` divides `kv` and defaults to `kv`. A partially masked block is divided into
    parts of `part` queries and keys; parts that the mask hides completely are skipped. Longer blocks overlap more
    products with exponentials, and skipping parts keeps them from computing hidden positions. A part may be shorter
    than `kv_compute` if its position is known when the kernel is built (`impls.splash_tpu.diagonal_bands`).
    """

    q: int = 512
    kv: int = 512
    kv_compute: int | None = None
    part: int = 512

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
        """Number of keys computed at once."""
        return self.kv if self.kv_compute is None else self.kv_compute

    @property
    def parts(self) -> tuple[int, int]:
        """Queries and keys per part; the whole block if parts do not divide it or are more than the flag bits."""
        q = self.part if self.q % self.part == 0 else self.q
        kv = self.part if self.kv % self.part == 0 and self.part % self.compute == 0 else self.kv
        few = (self.q // q) * (self.kv // kv) <= _MAX_PARTS
        return (q, kv) if few else (self.q, self.kv)

    @property
    def static_parts(self) -> tuple[int, int]:
        """Queries and keys per part in blocks whose hidden positions are known at build time, which need no flags."""
        q, kv = (self.part if length % self.part == 0 else length for length in (self.q, self.kv))
        return q, kv if kv % self.compute == 0 or self.compute % kv == 0 else self.kv

    def clip(self, q_length: int, kv_length: int) -> Blocks:
        """Shorten blocks to the lengths, rounded up to whole lanes."""
        q, kv = min(self.q, round_up(q_length, LANES)), min(self.kv, round_up(kv_length, LANES))
        compute = self.compute if self.compute < kv and kv % self.compute == 0 else None
        return Blocks(q, kv, compute, self.part)


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """Block sizes of each phase.

    With `fused_backward` one kernel computes all gradients and `dq` is unused. In `impls.splash_tpu.attention`, None
    lets the table decide (`impls.splash_tpu.splash_tuning`). Elsewhere None means False.
    """

    forward: Blocks = Blocks()
    dkv: Blocks = Blocks()
    dq: Blocks = Blocks()
    fused_backward: bool | None = False

    @classmethod
    def uniform(
        cls,
        q: int,
        kv: int,
        kv_compute: int | None = None,
        part: int = Blocks.part,
        *,
        fused_backward: bool | None = False,
    ) -> BlockSizes:
        """Build block sizes that are the same in every phase."""
        blocks = Blocks(q, kv, kv_compute, part)
        return cls(forward=blocks, dkv=blocks, dq=blocks, fused_backward=fused_backward)
