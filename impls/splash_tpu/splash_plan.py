"""Static description of a kernel object and of each kernel launch, fixed before compilation."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax

from cases.masks import Mask
from impls.jax_compat import Interpret
from impls.pallas_tpu.tpu_tiles import round_up
from impls.splash_tpu.block_sizes import Blocks, BlockSizes, Layouts
from impls.splash_tpu.splash_schedule import StepKinds

Precision = Literal["exact", "bf16"]
Phase = Literal["forward", "dq", "dkv"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplashPlan:
    """Static part of a kernel object; equal plans share compiled functions.

    Attributes:
      mask: the mask as a formula; None if mask blocks are stored.
      num_q_heads: query heads, N.
      num_kv_heads: key/value heads, K.
      q_length: queries of one shard, T.
      kv_length: S.
      scale: factor of the logits; None for `1 / sqrt(H)`.
      soft_cap: cap of the logits.
      block_sizes: block sizes of each phase.
      layouts: memory layouts of q, k and v.
      precision: how f32 operands are multiplied: `"exact"`, or rounded to `"bf16"`, which is fastest on the MXU.
      mask_value: `logsumexp` and `max_logits` of queries that may attend to nothing.
      save_max_logits: whether the forward pass computes `max_logits`.
      checkpoint_name: name of the backward pass's residuals for `jax.checkpoint` policies.
      vmem_limit_bytes: VMEM a kernel may use; None for the capacity of the chip.
      interpret: as for `pallas_call`.
      forward: kinds of steps that occur in the forward pass.
      dq: kinds of steps that occur in the kernel of dq.
      dkv: kinds of steps that occur in the kernel of dk and dv.
    """

    mask: Mask | None
    num_q_heads: int
    num_kv_heads: int
    q_length: int
    kv_length: int
    scale: float | None
    soft_cap: float | None
    block_sizes: BlockSizes
    layouts: Layouts
    precision: Precision
    mask_value: float
    save_max_logits: bool
    checkpoint_name: str | None
    vmem_limit_bytes: int | None
    interpret: Interpret
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
    """Arrays of one call, with heads before lengths.

    The fields are not typed as arrays, since JAX also builds this pytree with placeholders.
    """

    q: Any  # [B, N, T, H]
    k: Any  # [B, K, S, H]
    v: Any  # [B, K, S, V]
    sinks: Any  # [N] or None
    q_ids: Any  # int32 [B, T] or None
    kv_ids: Any  # int32 [B, S] or None
    low: Any = None  # int32 [B, T], the first key that each query sees, if key ranges are traced
    high: Any = None  # int32 [B, T], one past the last key that each query sees


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
