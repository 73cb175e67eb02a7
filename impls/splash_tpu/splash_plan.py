"""Static description of a kernel object and of each kernel launch, fixed before compilation."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, Literal

import jax

from cases.masks import Mask
from impls.dropout_bits import compute_keep_factor
from impls.jax_compat import Interpret
from impls.pallas_tpu.tpu_tiles import LANES, VmemLimit, round_up

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
    than `kv_compute` if its position is known when the kernel is built (`impls.splash_tpu.splash_schedule`).
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


_CANDIDATE_SIZES = (4096, 2048, 1024, 512, 256, 128)


@dataclasses.dataclass(frozen=True)
class Depths:
    """Head depths, and bytes per element of the operands."""

    head_dim: int
    head_dim_v: int
    itemsize: int


def estimate_vmem(
    phase: str,
    blocks: Blocks,
    depths: Depths,
    *,
    stored_mask: bool,
    fused: bool = False,
    ranged: bool = False,
    dropout: bool = False,
) -> int:
    """Estimate the VMEM of a kernel in bytes.

    Operand and result blocks count twice, since the next ones are fetched while these are used. Scratch counts once,
    and so do the values of a tile: three arrays `[q, kv_compute]` in f32.

    Args:
      phase: `"forward"`, `"dq"` or `"dkv"`.
      stored_mask: whether mask blocks are fetched.
      fused: whether the kernel of dk and dv also computes dq.
      ranged: whether each query has a range of keys, which takes one column more than segment ids.
      dropout: whether weights are dropped, for which each query or key has two words.
    """
    h, v = round_up(depths.head_dim, LANES), round_up(depths.head_dim_v, LANES)
    q_row, kv_row, f32 = h * depths.itemsize, (h + v) * depths.itemsize, 4
    fetched = blocks.q * q_row + blocks.kv * kv_row + (blocks.q * blocks.kv if stored_mask else 0)
    words = 2 * LANES if dropout else 0
    columns = (4 if ranged else 3) * LANES + words
    if phase == "forward":
        fetched += blocks.q * v * depths.itemsize  # out
        scratch = blocks.q * (v + columns) * f32
    elif phase == "dq":
        fetched += blocks.q * (v + h) * depths.itemsize  # d_out, dq
        scratch = blocks.q * (h + columns) * f32
    else:
        fetched += blocks.q * v * depths.itemsize + blocks.kv * kv_row  # d_out; dk, dv
        scratch = blocks.kv * (h + v + LANES + words) * f32 + (2 * blocks.q * h * f32 if fused else 0)
    return 2 * fetched + scratch + 3 * blocks.q * blocks.compute * f32


def check_vmem(phase: str, blocks: Blocks, depths: Depths, *, limit: VmemLimit, **kind: bool) -> int:
    """Return the estimated VMEM in bytes. Raises `ValueError`, with sizes that fit, if it is over the limit."""
    need = estimate_vmem(phase, blocks, depths, **kind)
    if need <= limit.bytes:
        return need
    sizes = [size for size in _CANDIDATE_SIZES if size <= max(blocks.q, blocks.kv)]
    fitting = [
        f"{q} x {kv}"
        for q, kv in itertools.product(sizes, sizes)
        if estimate_vmem(phase, Blocks(q, kv), depths, **kind) <= limit.bytes
    ]
    remedy = f"these would fit (q x kv): {', '.join(fitting[:4])}" if fitting else "no block size would fit"
    raise ValueError(
        f"block sizes of the {phase} kernel, q {blocks.q}, kv {blocks.kv}, kv_compute {blocks.compute}, take about "
        f"{need / 2**20:.1f} MiB of VMEM at head_dim {depths.head_dim} and {depths.head_dim_v}, over the limit of "
        f"{limit.bytes / 2**20:.1f} MiB ({limit.of}); {remedy}"
    )


Precision = Literal["exact", "bf16"]
Phase = Literal["forward", "dq", "dkv"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplashPlan:
    """Static part of a kernel object; equal plans share compiled functions."""

    mask: Mask | None  # the mask as a formula; None if mask blocks are stored
    num_q_heads: int
    num_kv_heads: int
    q_length: int  # queries of one shard, T
    kv_length: int  # S
    scale: float | None  # factor of the logits; None for `1 / sqrt(H)`
    soft_cap: float | None
    block_sizes: BlockSizes
    layouts: Layouts
    # How f32 operands are multiplied: `"exact"`, or rounded to `"bf16"`, which is fastest on the MXU.
    precision: Precision
    mask_value: float  # `logsumexp` and `max_logits` of queries that may attend to nothing
    save_max_logits: bool  # whether the forward pass computes `max_logits`
    checkpoint_name: str | None  # name of the backward pass's residuals for `jax.checkpoint` policies
    vmem_limit_bytes: int | None  # VMEM a kernel may use; None for the capacity of the chip
    interpret: Interpret
    dropout_rate: float | None = None  # None if no weight is dropped
    forward: StepKinds
    dq: StepKinds
    dkv: StepKinds

    @property
    def group(self) -> int:
        """Query heads per key/value head, G."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def variant(self) -> str:
        """`mha`, `gqa` or `mqa`, part of the names of kernels."""
        if self.group == 1:
            return "mha"
        return "mqa" if self.num_kv_heads == 1 else "gqa"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Operands:
    """Arrays of one call, with heads before lengths; untyped, since JAX also builds this pytree with placeholders."""

    q: Any  # [B, N, T, H]
    k: Any  # [B, K, S, H]
    v: Any  # [B, K, S, V]
    sinks: Any  # [N] or None
    q_ids: Any  # int32 [B, T] or None
    kv_ids: Any  # int32 [B, S] or None
    low: Any = None  # int32 [B, T], the first key that each query sees, if key ranges are traced
    high: Any = None  # int32 [B, T], one past the last key that each query sees
    dropout_key: Any = None  # uint32 [2] or None


@dataclasses.dataclass(frozen=True)
class KernelCall:
    """Static description of one kernel launch."""

    phase: Phase
    plan: SplashPlan
    batch: int
    head_dim: int
    head_dim_v: int
    dtype: Any
    segmented: bool
    ranged: bool
    scale: float

    @property
    def keep_factor(self) -> float:
        """Factor of the weights that dropout keeps."""
        rate = self.plan.dropout_rate
        return 1.0 if rate is None else compute_keep_factor(rate)

    @property
    def kinds(self) -> StepKinds:
        """Kinds of steps that occur."""
        found: StepKinds = getattr(self.plan, self.phase)
        return found

    @property
    def blocks(self) -> Blocks:
        """Block sizes, no longer than the lengths."""
        sizes: Blocks = getattr(self.plan.block_sizes, self.phase)
        return sizes.clip(self.plan.q_length, self.plan.kv_length)

    @property
    def q_padded(self) -> int:
        """T rounded up to whole blocks."""
        return round_up(self.plan.q_length, self.blocks.q)

    @property
    def kv_padded(self) -> int:
        """S rounded up to whole blocks."""
        return round_up(self.plan.kv_length, self.blocks.kv)

    @property
    def fused(self) -> bool:
        """Whether the kernel of dk and dv also computes dq."""
        return bool(self.plan.block_sizes.fused_backward) and self.phase == "dkv"


def build_call(phase: Phase, plan: SplashPlan, operands: Operands) -> KernelCall:
    """Describe the kernel of `phase` for these operands."""
    batch, _, _, head_dim = operands.q.shape
    return KernelCall(
        phase=phase,
        plan=plan,
        batch=batch,
        head_dim=head_dim,
        head_dim_v=operands.v.shape[3],
        dtype=operands.q.dtype,
        segmented=operands.q_ids is not None,
        ranged=operands.low is not None,
        scale=head_dim**-0.5 if plan.scale is None else plan.scale,
    )


@dataclasses.dataclass(frozen=True)
class StepKinds:
    """Kinds of steps that occur in the lists. A kernel has code for no other kind."""

    full: bool  # whether there are pairs of blocks without a hidden position
    masked: bool  # whether there are partially hidden pairs of blocks
    empty: bool  # whether there are steps that compute nothing
    stored: bool  # whether masked blocks are stored
    parts: bool  # whether some parts of masked blocks are completely hidden
    dead: bool  # whether there may be keys that no query may attend to; their k and v may be NaN
    diagonals: tuple[int, ...] = ()  # diagonals that the kernel has specialised code for (`Band`)
