"""The kernel object: built once from a mask, then called like a function under any JAX transformation.

A pass pads the operands to whole blocks, runs the kernels, and computes the rest in XLA. The kernels compute equations
(1) to (10) and (12) to (15) of `impls/__init__.py`; XLA computes (11) and (17). If dq comes from the fused kernel, XLA
also multiplies it by the scale, as in equation (14).

`impls.splash_tpu.attention` builds one for each mask. Callers whose arrays have heads before lengths use it directly.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Float32, Int, Shaped, UInt32

from cases.masks import Full, Mask
from impls.block_arithmetic import compute_dsinks, make_shape
from impls.derivative_refusals import refuse_derivatives
from impls.dropout_bits import draw_key_words, draw_query_words
from impls.jax_compat import Interpret, resolve_interpret
from impls.pallas_tpu.tpu_tiles import LANES
from impls.splash_tpu.dkv_kernel import compute_dkv
from impls.splash_tpu.dq_kernel import compute_dq
from impls.splash_tpu.forward import forward
from impls.splash_tpu.splash_launch import Inputs, Outputs
from impls.splash_tpu.splash_plan import (
    BlockSizes,
    KernelCall,
    Layouts,
    Operands,
    Phase,
    Precision,
    SplashPlan,
    build_call,
)
from impls.splash_tpu.splash_schedule import COMPUTE, Order, Steps, build_dynamic_steps, build_static_steps, downcast
from impls.varying_axes import find_varying_axes, mark_varying


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class StepLists:
    """Steps of each phase, and the position of the first query. The first axis of every list is the shard."""

    forward: Steps
    dq: Steps | None  # None if the backward pass is fused
    dkv: Steps
    q_offset: Any  # int32 [shards]


def run_forward(plan: SplashPlan, lists: StepLists, operands: Operands) -> Outputs:
    """Compute `out [B, N, T, V]`, and f32 `[B, N, T]` `logsumexp` and, if the plan says so, `max_logits`."""
    call = build_call("forward", plan, operands)
    batch, heads, length = operands.q.shape[:3]
    row = make_shape((batch * heads, 1, call.q_padded), jnp.float32)
    shapes = Outputs(
        out=make_shape((batch * heads, call.q_padded, call.head_dim_v), operands.q.dtype),
        logsumexp=row,
        max_logits=row if plan.save_max_logits else None,
    )
    found = forward(call, lists.forward, lists.q_offset, _build_inputs(call, operands, lists.forward), shapes)

    def rows(x: jax.Array) -> jax.Array:
        return x[:, 0, :length].reshape(batch, heads, length)

    return Outputs(
        out=_split_batch(found.out[:, :length], batch),
        logsumexp=rows(found.logsumexp),
        max_logits=None if found.max_logits is None else rows(found.max_logits),
    )


def run_backward(
    plan: SplashPlan,
    lists: StepLists,
    operands: Operands,
    out: Float[Array, "B N T V"],
    logsumexp: Float32[Array, "B N T"],
    do: Float[Array, "B N T V"],
    dlse: Float32[Array, "B N T"],
) -> Operands:
    """Compute the gradients of the operands for cotangents `do` of `out` and `dlse` of `logsumexp`."""
    # The barrier keeps XLA from fusing these with earlier operations. Fusing takes 33 MiB of HBM at length 32768 and
    # depth 256 on v6e (libtpu 0.0.42.1).
    out, do = jax.lax.optimization_barrier((out, do))
    # D, equation (11)
    row_sums = jnp.einsum("bntv,bntv->bnt", out, do, precision="highest", preferred_element_type=jnp.float32) - dlse
    # Queries that attended to nothing get probabilities of zero.
    shift = jnp.where(logsumexp == plan.mask_value, jnp.inf, logsumexp)
    dsinks = compute_dsinks(operands.sinks, shift, row_sums)  # dsinks, equation (17)

    def inputs(call: KernelCall, steps: Steps) -> Inputs:
        sums = row_sums if call.keep_factor == 1 else row_sums / jnp.float32(call.keep_factor)
        rows = call.q_padded - call.plan.q_length
        return _build_inputs(call, dataclasses.replace(operands, sinks=None), steps)._replace(
            do=_merge_batch(_pad_axis(do.astype(operands.q.dtype), 2, call.q_padded)),
            logsumexp=_merge_batch(jnp.pad(shift, ((0, 0), (0, 0), (0, rows)), constant_values=jnp.inf)[:, :, None]),
            row_sums=_merge_batch(_pad_axis(sums, 2, call.q_padded)[:, :, None]),
        )

    call = build_call("dkv", plan, operands)
    given = inputs(call, lists.dkv)
    batch, q_heads, q_length, head_dim = operands.q.shape
    kv_heads, kv_length = operands.k.shape[1:3]
    shapes = Outputs(
        dq=make_shape((batch * q_heads, call.q_padded, head_dim), jnp.float32) if call.fused else None,
        dk=make_shape((batch * kv_heads, call.kv_padded, head_dim), operands.k.dtype),
        dv=make_shape((batch * kv_heads, call.kv_padded, call.head_dim_v), operands.v.dtype),
    )
    if call.fused:
        given = given._replace(dq=jnp.zeros((batch * q_heads, call.q_padded, head_dim), jnp.float32))
    found = compute_dkv(call, lists.dkv, lists.q_offset, given, shapes)
    if call.fused:
        dq = (found.dq * jnp.float32(call.scale * call.keep_factor)).astype(operands.q.dtype)  # dq, equation (14)
    else:
        assert lists.dq is not None
        call = build_call("dq", plan, operands)
        shape = make_shape((batch * q_heads, call.q_padded, head_dim), operands.q.dtype)
        dq = compute_dq(call, lists.dq, lists.q_offset, inputs(call, lists.dq), Outputs(dq=shape)).dq
    return Operands(
        q=_split_batch(dq[:, :q_length], batch),
        k=_split_batch(found.dk[:, :kv_length], batch),
        v=_split_batch(found.dv[:, :kv_length], batch),
        sinks=dsinks,
        q_ids=None,
        kv_ids=None,
    )


def _build_inputs(call: KernelCall, operands: Operands, steps: Steps) -> Inputs:
    """Pad the operands to whole blocks and transpose them to their layouts."""
    layouts = call.plan.layouts

    def tiles(x: jax.Array, length: int, layout: str) -> jax.Array:
        x = _merge_batch(_pad_axis(x, 2, length))
        return x if layout == "head_dim_minor" else x.swapaxes(1, 2)

    sinks = operands.sinks
    if sinks is not None:
        sinks = jnp.broadcast_to(sinks.astype(jnp.float32)[:, None, None], (len(sinks), 1, LANES))

    def row(x: jax.Array | None, length: int) -> jax.Array | None:
        return None if x is None else _pad_axis(x, 1, length)[:, None]

    words: dict[str, jax.Array] = {}
    if (key := operands.dropout_key) is not None:
        of_queries = draw_query_words(key, call.batch, call.plan.num_q_heads, call.plan.q_length)
        of_keys = draw_key_words(key, call.plan.kv_length)
        for name in ("term", "factor"):
            words[f"q_{name}"] = _merge_batch(_pad_axis(getattr(of_queries, name), 2, call.q_padded)[:, :, None])
            words[f"kv_{name}"] = _pad_axis(getattr(of_keys, name), 0, call.kv_padded)[None, None]

    return Inputs(
        q=tiles(operands.q, call.q_padded, layouts.q),
        k=tiles(operands.k, call.kv_padded, layouts.k),
        v=tiles(operands.v, call.kv_padded, layouts.v),
        q_ids=row(operands.q_ids, call.q_padded),
        kv_ids=row(operands.kv_ids, call.kv_padded),
        low=row(operands.low, call.q_padded),
        high=row(operands.high, call.q_padded),
        sinks=sinks,
        stored=steps.stored,
        **words,
    )


def _pad_axis(x: jax.Array, axis: int, length: int) -> jax.Array:
    """Pad `x` with zeros to `length` along `axis`."""
    missing = length - x.shape[axis]
    return jnp.pad(x, [(0, missing if a == axis else 0) for a in range(x.ndim)]) if missing else x


def _merge_batch(x: Shaped[Array, "B N *rest"]) -> Shaped[Array, " B*N *rest"]:
    """Merge batch and heads: `[B, N, ...]` to `[B * N, ...]`."""
    return x.reshape(-1, *x.shape[2:])


def _split_batch(x: Shaped[Array, " BN *rest"], batch: int) -> Shaped[Array, "{batch} N *rest"]:
    """Invert `_merge_batch`."""
    return x.reshape(batch, -1, *x.shape[1:])


PHASE_ORDERS: dict[Phase, Order] = {"forward": "q", "dq": "q", "dkv": "kv"}


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True, eq=False)
class Splash:
    """A callable kernel for one mask. It is a pytree of its lists of steps, so it may be passed into `jit`."""

    lists: StepLists
    plan: SplashPlan

    def __call__(
        self,
        q: Float[Array, "B N T H"],
        k: Float[Array, "B K S H"],
        v: Float[Array, "B K S V"],
        *,
        segment_ids: tuple[Int[Array, "B T"], Int[Array, "B S"]] | None = None,
        sinks: Float[Array, " N"] | None = None,
        dropout_key: UInt32[Array, " 2"] | None = None,
        save_residuals: bool = False,
    ) -> Any:
        """Compute attention.

        Args:
          q: queries `[B, N, T, H]`, bf16 or f32.
          k: keys `[B, K, S, H]`.
          v: values `[B, K, S, V]`.
          segment_ids: int32 `[B, T]` and `[B, S]`; a pair attends only where they are equal.
          sinks: `[N]`, an additional logit in the softmax denominator of each query head.
          dropout_key: the raw key that decides which weights are dropped, if the kernel has a `dropout_rate`.
          save_residuals: also return `logsumexp` and, if the kernel is built for it, `max_logits`, f32 `[B, N, T]`.

        Returns:
          `out [B, N, T, V]` in q's dtype, or `(out, residuals)`.

        Raises:
          ValueError: an operand does not fit the kernel, or blocks do not fit VMEM.
        """
        q_ids, kv_ids = segment_ids or (None, None)
        operands = Operands(q, k, v, sinks, q_ids, kv_ids, dropout_key=dropout_key)
        self._check(operands)
        operands = mark_varying(operands, find_varying_axes(operands))
        out, logsumexp, max_logits = attend(self.plan, self.lists, operands)
        if not save_residuals:
            return out
        residuals = {"logsumexp": logsumexp}
        return out, residuals if max_logits is None else residuals | {"max_logits": max_logits}

    def sharding_spec(self, heads: str | None = None, queries: str | None = None) -> Splash:
        """Build a tree of `PartitionSpec`s for `shard_map`'s `in_specs`.

        Args:
          heads: mesh axis over which heads are sharded; it matters only if masks differ between heads.
          queries: mesh axis over which queries are sharded, of the size `q_shards`.
        """

        def spec(*axes: str | None) -> Any:
            return PartitionSpec(*axes)

        def build_specs(steps: Steps) -> Steps:
            list_spec = spec(queries, None, heads if steps.q.shape[2] > 1 else None)
            found = jax.tree.map(lambda _: list_spec, steps)
            return found if steps.stored is None else dataclasses.replace(found, stored=spec())

        lists = StepLists(
            forward=build_specs(self.lists.forward),
            dq=None if self.lists.dq is None else build_specs(self.lists.dq),
            dkv=build_specs(self.lists.dkv),
            q_offset=spec(queries),
        )
        return Splash(lists, self.plan)

    def work(self) -> dict[str, dict[str, int]]:
        """Count for each phase the grid steps per head and batch row, and those that compute. Needs a static mask."""
        found = {}
        for phase in ("forward", "dq", "dkv"):
            steps = getattr(self.lists, phase)
            if steps is not None:
                computed = int((np.asarray(steps.flags) & COMPUTE > 0).sum())
                found[phase] = {"steps": int(steps.flags.size), "computed": computed}
        return found

    def tree_flatten(self) -> tuple[tuple[StepLists], SplashPlan]:
        """Return the arrays and the static part."""
        return (self.lists,), self.plan

    @classmethod
    def tree_unflatten(cls, plan: SplashPlan, children: tuple[StepLists]) -> Splash:
        """Invert `tree_flatten`."""
        return cls(children[0], plan)

    def _check(self, operands: Operands) -> None:
        s = self.plan
        if (operands.dropout_key is None) != (s.dropout_rate is None):
            raise ValueError("dropout_key must be given if, and only if, the kernel has a dropout_rate")
        shards = np.shape(self.lists.q_offset)[0]
        if shards != 1:
            raise ValueError(
                f"the kernel has {shards} shards of queries: call it in shard_map, with sharding_spec() among in_specs"
            )
        listed = np.shape(self.lists.forward.q)[2]
        if listed not in (1, s.num_q_heads):
            raise ValueError(
                f"the kernel has masks for {listed} heads in shards of {s.num_q_heads}: call it in shard_map, with "
                "sharding_spec(heads=...) among in_specs"
            )
        for name, x, heads, length in (
            ("q", operands.q, s.num_q_heads, s.q_length),
            ("k", operands.k, s.num_kv_heads, s.kv_length),
            ("v", operands.v, s.num_kv_heads, s.kv_length),
        ):
            if x.ndim != 4 or x.shape[2] != length:
                raise ValueError(
                    f"{name} must be [batch, heads, length, depth] with length {length}, got shape {x.shape}"
                )
            if name == "q" and x.shape[1] % operands.k.shape[1]:
                raise ValueError(f"q has {x.shape[1]} heads, which must be a multiple of k's {operands.k.shape[1]}")
            if x.shape[1] != heads:
                raise ValueError(f"{name} must have {heads} heads, as the kernel was built for, got {x.shape[1]}")
            if x.dtype not in (jnp.float32, jnp.bfloat16):
                raise NotImplementedError(f"{name} has dtype {x.dtype}; splash_tpu takes float32 and bfloat16")


def make_splash(
    mask: Mask,
    q_length: int,
    kv_length: int,
    *,
    num_q_heads: int,
    num_kv_heads: int | None = None,
    block_sizes: BlockSizes = BlockSizes(),
    layouts: Layouts = Layouts(),
    scale: float | None = None,
    soft_cap: float | None = None,
    precision: Precision = "exact",
    dropout_rate: float | None = None,
    mask_value: float = -math.inf,
    save_max_logits: bool = True,
    head_shards: int = 1,
    q_shards: int = 1,
    downcast_smem_data: bool = True,
    checkpoint_name: str | None = None,
    vmem_limit_bytes: int | None = None,
    interpret: Interpret = None,
) -> Splash:
    """Build a kernel for a static mask.

    Args:
      mask: mask of all queries, batch rows and heads.
      q_length: T, over all shards.
      kv_length: S.
      num_q_heads: N, over all shards.
      num_kv_heads: K, over all shards, by default N.
      block_sizes: block sizes of each phase.
      layouts: memory layouts of q, k and v.
      scale: factor of the logits, by default `1 / sqrt(H)`.
      soft_cap: logits become `soft_cap * tanh(logits / soft_cap)`.
      precision: `"exact"` products of f32 operands, or rounded to `"bf16"`.
      dropout_rate: the share of the weights that is dropped after the softmax (`impls.dropout_bits`); not of shards.
      mask_value: `logsumexp` and `max_logits` of queries that may attend to nothing.
      save_max_logits: whether to compute `max_logits`.
      head_shards: number of equal shards of the query heads under `shard_map`. Key/value heads are sharded alike, but a
        single key/value head is replicated.
      q_shards: number of equal shards of the queries under `shard_map`.
      downcast_smem_data: store the lists of steps in the narrowest integers that hold them.
      checkpoint_name: name of `out` and `logsumexp` for `jax.checkpoint` policies.
      vmem_limit_bytes: VMEM that a kernel may use; by default the capacity of a core of the target chip.
      interpret: as for `pallas_call`; by default true unless the process runs on a TPU.

    Raises:
      ValueError: lengths do not fit the mask or the shards, or head counts do not divide.
    """
    num_kv_heads = num_q_heads if num_kv_heads is None else num_kv_heads
    if num_kv_heads <= 0 or num_q_heads % num_kv_heads:
        raise ValueError(f"num_q_heads = {num_q_heads} must be a multiple of num_kv_heads = {num_kv_heads}")
    if q_length % q_shards:
        raise ValueError(f"q_length = {q_length} must be a multiple of q_shards = {q_shards}")
    if num_q_heads % head_shards or (num_kv_heads > 1 and num_kv_heads % head_shards):
        raise ValueError(
            f"num_q_heads = {num_q_heads} and num_kv_heads = {num_kv_heads} must be multiples of "
            f"head_shards = {head_shards}, or num_kv_heads 1"
        )
    if dropout_rate is not None and (head_shards > 1 or q_shards > 1):
        raise NotImplementedError("dropout_rate: a shard does not know its heads and queries among all")
    num_q_heads, num_kv_heads = num_q_heads // head_shards, max(1, num_kv_heads // head_shards)
    mask.check_lengths(q_length, kv_length)
    local = q_length // q_shards
    found = {
        phase: build_static_steps(
            mask,
            (q_length, kv_length),
            getattr(block_sizes, phase).clip(local, kv_length),
            order,
            num_q_heads // num_kv_heads,
            q_shards,
        )
        for phase, order in PHASE_ORDERS.items()
    }
    steps = {phase: downcast(s) if downcast_smem_data else s for phase, (s, _) in found.items()}
    lists = StepLists(
        forward=steps["forward"],
        dq=None if block_sizes.fused_backward else steps["dq"],
        dkv=steps["dkv"],
        q_offset=np.arange(q_shards, dtype=np.int32) * local,
    )
    plan = SplashPlan(
        mask=mask if mask.is_computed else None,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        q_length=local,
        kv_length=kv_length,
        scale=None if scale is None else float(scale),
        soft_cap=None if soft_cap is None else float(soft_cap),
        block_sizes=block_sizes,
        layouts=layouts,
        precision=precision,
        dropout_rate=dropout_rate,
        mask_value=mask_value,
        save_max_logits=save_max_logits,
        checkpoint_name=checkpoint_name,
        vmem_limit_bytes=vmem_limit_bytes,
        interpret=resolve_interpret(interpret, "tpu"),
        **{phase: kinds for phase, (_, kinds) in found.items()},
    )
    return Splash(lists, plan)


def make_splash_dynamic(
    allowed: Bool[Array, "b n T S"], *, num_q_heads: int, num_kv_heads: int | None = None, **options: Any
) -> Splash:
    """Build a kernel for a mask that may be traced: booleans `[b, n, T, S]`, `b` and `n` being 1 or B and N.

    It takes the options of `make_splash` except shards. It may be called while tracing, also in `shard_map` with the
    booleans of one shard. Empty blocks are skipped at run time.

    Raises:
      ValueError: shards were requested.
    """
    for name in ("head_shards", "q_shards"):
        if options.get(name, 1) != 1:
            raise ValueError(f"{name} is for static masks: in shard_map call make_splash_dynamic for each shard")
    num_kv_heads = num_q_heads if num_kv_heads is None else num_kv_heads
    q_length, kv_length = allowed.shape[2:]
    plain = make_splash(Full(), q_length, kv_length, num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, **options)
    sizes = plain.plan.block_sizes
    found = {
        phase: build_dynamic_steps(
            allowed, getattr(sizes, phase).clip(q_length, kv_length), order, num_q_heads // num_kv_heads
        )
        for phase, order in PHASE_ORDERS.items()
        if phase != "dq" or not sizes.fused_backward
    }
    steps = {phase: s for phase, (s, _) in found.items()}
    kinds: dict[str, Any] = {phase: k for phase, (_, k) in found.items()}
    lists = StepLists(steps["forward"], steps.get("dq"), steps["dkv"], np.zeros(1, np.int32))
    return Splash(lists, dataclasses.replace(plain.plan, mask=None, **kinds))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _splash(plan: SplashPlan, lists: StepLists, operands: Operands) -> Any:
    found = run_forward(plan, lists, operands)
    return found.out, found.logsumexp, found.max_logits


def _splash_forward(plan: SplashPlan, lists: StepLists, operands: Operands) -> Any:
    out, logsumexp, max_logits = _splash(plan, lists, operands)
    if plan.checkpoint_name is not None:
        out = checkpoint_name(out, plan.checkpoint_name)
        logsumexp = checkpoint_name(logsumexp, plan.checkpoint_name)
    return (out, logsumexp, max_logits), (lists, operands, out, logsumexp)


def _splash_backward(plan: SplashPlan, saved: Any, cotangents: Any) -> Any:
    lists, operands, out, logsumexp = saved
    do, dlse, _ = cotangents
    pull_back = functools.partial(run_backward, plan)
    return None, refuse_derivatives("splash_tpu", pull_back, lists, operands, out, logsumexp, do, dlse)


_splash.defvjp(_splash_forward, _splash_backward)

# Differentiable in reverse mode. Jitted so that calls outside `jit` compile once per kernel, not once per call.
attend = jax.jit(_splash, static_argnums=0)
