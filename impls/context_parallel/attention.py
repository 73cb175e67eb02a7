"""Attention to whole arrays on several devices: distribute operands, attend in a `shard_map`, collect the results."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from cases.masks import Full, Indexer, Mask, iter_leaves
from impls import block_flash
from impls.context_parallel.all_gather import all_gather
from impls.context_parallel.local_attention import Kernel
from impls.context_parallel.ring import ring
from impls.context_parallel.sequence_layout import Layout, TokenOrder
from impls.context_parallel.ulysses import ulysses, usp
from impls.contract.implementation import validate_mask, validate_operands
from impls.explicit_sharding import find_explicit_mesh

Method = Literal["all_gather", "ring", "ulysses", "usp"]
RING_AXIS, HEADS_AXIS = "ring", "heads"
METHODS: dict[Method, Callable[..., Any]] = {
    "all_gather": functools.partial(all_gather, axis_name=RING_AXIS),
    "ring": functools.partial(ring, axis_name=RING_AXIS),
    "ulysses": functools.partial(ulysses, axis_name=HEADS_AXIS),
    "usp": functools.partial(usp, axis_names=(RING_AXIS, HEADS_AXIS)),
}
DEFAULT_DEVICES = 4
_TOKENS = (RING_AXIS, HEADS_AXIS)
UNSUPPORTED = {"indexer": "the masks of the devices are found before the program runs"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _ContextPlan:
    """Static part of a context-parallel call. Equal plans share one compiled function."""

    method: Method
    kernel: Kernel
    mask: Mask
    queries: Layout
    keys: Layout
    soft_cap: float | None
    scale: float | None
    mesh: Mesh
    check_vma: bool


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K V"],
    *,
    mask: Mask = Full(),
    segment_ids: tuple[Int[Array, "B T"], Int[Array, "B S"]] | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    bias: Float[Array, "#B #N #T #S"] | None = None,
    scale: float | None = None,
    save_residuals: bool = False,
    kernel: Kernel = block_flash.attention,
    method: Method = "ring",
    devices: int = DEFAULT_DEVICES,
    order: TokenOrder = "balanced",
    group: int = 2,
    check_vma: bool = False,
) -> Any:
    """Compute softmax attention by `kernel`, with the sequence sharded over the first `devices` devices.

    Operands are whole arrays. A model with sharded arrays calls the function of `METHODS` in its own
    `shard_map`. Lengths may be any: they are padded to a multiple of the devices.

    The operands and results are those of the contract (docs/contract.md, section 1).

    Args:
      kernel: an attention function with the contract's arguments (docs/contract.md, section 1) and a differentiable
        `logsumexp`. A call that the kernel refuses is refused. The kernel gets q, k and v in f32, whatever their dtype,
        where its results are summed: in a ring, and in an all-gather's backward pass.
      method: how devices see each other's keys: `"all_gather"`, `"ring"`, `"ulysses"` (devices exchange tokens for
        heads) or `"usp"` (groups exchange tokens for heads, and are a ring).
      devices: number of devices that share the sequence.
      order: the order of tokens on the devices, or on the groups of `"usp"`.
      group: number of devices in a group of `"usp"`.
      check_vma: whether JAX checks over which mesh axes values vary. The kernel must support this. JAX's interpreters
        of Pallas kernels do not.

    Raises:
      ValueError: an operand, the mask or an option is invalid, or there are too few devices.
      NotImplementedError: the mask is traced, the call is inside a `shard_map`, or the devices that share the query
        heads do not divide them.
    """
    validate_operands(q, k, v, segment_ids=segment_ids, soft_cap=soft_cap, sinks=sinks, bias=bias, scale=scale)
    validate_mask(mask, q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    if method not in METHODS:
        raise ValueError(f"method must be one of {tuple(METHODS)}, got {method!r}")
    if any(isinstance(leaf, Indexer) for leaf in iter_leaves(mask)):
        raise NotImplementedError(f"context parallelism does not support indexer: {UNSUPPORTED['indexer']}")
    if jax.sharding.get_abstract_mesh().manual_axes:
        raise NotImplementedError(
            "context_parallel.attention makes its own shard_map: inside another one call ring or all_gather, ulysses "
            "or usp"
        )
    if find_explicit_mesh((q, k, v, segment_ids, sinks, bias)) is not None:
        raise NotImplementedError(
            "context_parallel.attention makes its own mesh: for operands on one with explicit axes, call the "
            "method itself in a shard_map over it"
        )
    if devices < 1 or group < 1 or (method == "usp" and devices % group):
        raise ValueError(f"devices must be positive and a multiple of group, got devices={devices}, group={group}")
    together = {"ulysses": devices, "usp": group}.get(method, 1)
    size, multiple = (devices, 1) if method == "ulysses" else (devices // together, together)
    plan = _ContextPlan(
        method=method,
        kernel=kernel,
        mask=mask,
        queries=Layout(q.shape[1], size, order, multiple),
        keys=Layout(k.shape[1], size, order, multiple),
        soft_cap=soft_cap,
        scale=scale,
        mesh=_build_mesh(devices // together, together),
        check_vma=check_vma,
    )
    arrays = {"q": q, "k": k, "v": v, "segment_ids": segment_ids, "sinks": sinks, "bias": bias}
    out, residuals = _attend(plan, {name: x for name, x in arrays.items() if x is not None})
    return (out, residuals) if save_residuals else out


@functools.partial(jax.jit, static_argnums=0)
def _attend(plan: _ContextPlan, arrays: dict[str, Any]) -> tuple[jax.Array, dict[str, jax.Array]]:
    queries, keys = plan.queries, plan.keys
    dealt = {"q": queries.deal(arrays["q"], 1), "k": keys.deal(arrays["k"], 1), "v": keys.deal(arrays["v"], 1)}
    sequence = _build_spec(None, _TOKENS)
    specs: dict[str, Any] = {"q": sequence, "k": sequence, "v": sequence}
    if "segment_ids" in arrays:
        q_ids, kv_ids = (jnp.asarray(ids) for ids in arrays["segment_ids"])
        dealt["segment_ids"] = queries.deal(q_ids, 1), keys.deal(kv_ids, 1)
        specs["segment_ids"] = sequence
    if "sinks" in arrays:
        dealt["sinks"], specs["sinks"] = jnp.asarray(arrays["sinks"]), _build_spec()
    if "bias" in arrays:
        bias = jnp.asarray(arrays["bias"])
        if bias.shape[2] == 1:
            # All devices have the whole bias, so its gradient is a sum over devices, in the dtype that they have.
            bias = bias.astype(jnp.float32)
        specs["bias"] = _build_spec(None, None, _TOKENS) if bias.shape[2] > 1 else _build_spec()
        bias = queries.deal(bias, 2) if bias.shape[2] > 1 else bias
        dealt["bias"] = keys.deal(bias, 3) if bias.shape[3] > 1 and plan.method in ("ring", "usp") else bias
    rows = _build_spec(None, None, _TOKENS)

    def on_device(x: dict[str, Any]) -> Any:
        return METHODS[plan.method](
            **x,
            kernel=plan.kernel,
            mask=plan.mask,
            queries=queries,
            keys=keys,
            soft_cap=plan.soft_cap,
            scale=plan.scale,
        )

    out, residuals = jax.shard_map(
        on_device,
        mesh=plan.mesh,
        in_specs=(specs,),
        out_specs=(sequence, {"logsumexp": rows, "max_logits": rows}),
        check_vma=plan.check_vma,
    )(dealt)
    collected = {name: queries.collect(x, 2) for name, x in residuals.items()}
    return queries.collect(out, 1).astype(arrays["q"].dtype), collected


@functools.lru_cache(maxsize=8)
def _build_mesh(ring_size: int, group: int) -> Mesh:
    """Build a mesh of the first devices. Raises `ValueError` if the process has fewer devices."""
    devices = ring_size * group
    if (count := len(jax.devices())) < devices:
        raise ValueError(
            f"devices must be at most the number of devices, got {devices} and there are {count}; on CPU, XLA_FLAGS "
            f"can have --xla_force_host_platform_device_count={devices}"
        )
    types = (AxisType.Auto, AxisType.Auto)
    return jax.make_mesh((ring_size, group), _TOKENS, axis_types=types, devices=jax.devices()[:devices])


def _build_spec(*axes: Any) -> Any:
    return PartitionSpec(*axes)
