"""What is fixed before a kernel is compiled."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

from cases.masks import Mask
from impls.splash_tpu.block_sizes import Blocks, BlockSizes, Layouts, round_up
from impls.splash_tpu.splash_schedule import StepKinds

Precision = Literal["exact", "bf16"]
Phase = Literal["forward", "dq", "dkv"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplashPlan:
    """What a kernel object is built for; equal plans share compiled functions.

    Attributes:
      mask: the formula of the mask, none if mask blocks are stored.
      num_q_heads: query heads, N.
      num_kv_heads: key/value heads, K.
      q_length: T, of one shard.
      kv_length: S.
      scale: factor of the logits, none for `1 / sqrt(H)`.
      soft_cap: cap of the logits.
      block_sizes: of each phase.
      layouts: of q, k and v.
      precision: how f32 operands are multiplied: `"exact"`, or rounded to `"bf16"` as the MXU does fastest.
      mask_value: what `logsumexp` and `max_logits` are for queries that may attend to nothing.
      save_max_logits: whether the forward pass finds `max_logits`.
      checkpoint_name: name of the residuals of the backward pass for policies of `jax.checkpoint`.
      vmem_limit_bytes: VMEM a kernel may take, none for what the chip has.
      interpret: as `pallas_call` takes it.
      forward: which kinds of steps its lists have.
      dq: likewise.
      dkv: likewise.
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
    interpret: Any
    forward: StepKinds
    dq: StepKinds
    dkv: StepKinds

    @property
    def group(self) -> int:
        """Query heads a key/value head, G."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def variant(self) -> str:
        """`mha`, `gqa` or `mqa`, for the names of kernels."""
        if self.group == 1:
            return "mha"
        return "mqa" if self.num_kv_heads == 1 else "gqa"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Operands:
    """Arrays of one call, heads before lengths."""

    q: Any  # [B, N, T, H]
    k: Any  # [B, K, S, H]
    v: Any  # [B, K, S, V]
    sinks: Any  # [N] f32 or none
    q_ids: Any  # int32 [B, T] or none
    kv_ids: Any  # int32 [B, S] or none
    low: Any = None  # int32 [B, T], the first key that a query sees, where that is known at run time only
    high: Any = None  # int32 [B, T], one past the last, likewise


@dataclasses.dataclass(frozen=True)
class KernelCall:
    """One kernel: its phase, and everything static about it."""

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
        """Which kinds of steps there are."""
        found: StepKinds = getattr(self.plan, self.phase)
        return found

    @property
    def blocks(self) -> Blocks:
        """Block sizes, no longer than the lengths."""
        sizes: Blocks = getattr(self.plan.block_sizes, self.phase)
        return sizes.clip(self.plan.q_length, self.plan.kv_length)

    @property
    def q_padded(self) -> int:
        """T in whole blocks."""
        return round_up(self.plan.q_length, self.blocks.q)

    @property
    def kv_padded(self) -> int:
        """S in whole blocks."""
        return round_up(self.plan.kv_length, self.blocks.kv)

    @property
    def precision(self) -> jax.lax.Precision:
        """Of products: only that of f32 operands depends on it."""
        exact = self.plan.precision == "exact" and self.dtype == jnp.float32
        return jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT

    @property
    def fused(self) -> bool:
        """Whether the kernel of dk and dv gives dq too."""
        return bool(self.plan.block_sizes.fused_backward) and self.phase == "dkv"


def build_call(phase: Phase, plan: SplashPlan, operands: Operands) -> KernelCall:
    """The kernel of `phase` for these operands."""
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
