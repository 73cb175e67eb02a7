"""Correct attention with dropout in replaceable steps, in two styles.

- By arrays: `jax.random.bernoulli` draws one array, and JAX differentiates the forward pass.
- By counters: each pair hashes the key and its indices, and a backward pass written by hand draws again.

With `read`, a kernel by counters takes a mask in place of a key, and reads it in both passes. `build_on_devices` hashes
counters on several devices that share the sequence.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from conformance import declare
from conformance.execution.plain_functions import build_implementation
from conformance.mutation.kernels.plain import product
from impls.contract.implementation import Implementation

Array = jax.Array
Step = Callable[..., Any]
BLOCK = 64
"""Queries and keys of a block of the kernel that draws by counters."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dropout:
    """What steps read of a call: rate, key or mask, queries `[B, T, N, H]`, and how many query heads share a key."""

    rate: float
    key: Array
    mask: Any = None  # [B or 1, N or 1, T, S], if the kernel takes a mask in place of a key
    q: Array
    shape: tuple[int, ...]  # (B, N, T, S)
    group: int
    backward: bool = False
    residuals: bool = False


def draw_bernoulli(call: Dropout) -> Array:
    """Draw all pairs as one array."""
    return jax.random.bernoulli(call.key, 1 - call.rate, call.shape)


def mix(x: Array) -> Array:
    """Mix the bits of 32-bit words (multipliers of `lowbias32`, by C. Wellons)."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        x = (x ^ (x >> shift)) * np.uint32(factor)
    return x


def hash_pairs(call: Dropout, b: Array, n: Array, i: Array, j: Array) -> Array:
    """Hash the words of the key and the indices of pairs."""
    word = mix(call.key[0] + np.uint32(0x9E3779B9))
    for part in (call.key[1], b, n, i, j):
        word = mix(word * np.uint32(0x85EBCA6B) + jnp.asarray(part, jnp.uint32) + np.uint32(0x9E3779B9))
    return word


def exceeds_rate(word: Array, call: Dropout) -> Array:
    """Keep a pair whose word is at least the rate, in units of 2**-32."""
    return word >= np.uint32(min(round(call.rate * 2**32), 2**32 - 1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Steps:
    """The steps of dropout, in order; each gets the `Dropout` last."""

    rate: Step = lambda rate, call: rate
    key: Step = lambda key, call: key
    draw: Step | None = draw_bernoulli  # None: by counters
    read: Step | None = None  # from the `Dropout` to the mask that was given
    indices: Step = lambda b, n, i, j, call: (b, n, i, j)
    word: Step = lambda b, n, i, j, call: hash_pairs(call, b, n, i, j)
    keeps: Step = exceeds_rate
    logits: Step = lambda z, kept, call: z  # [B, N, T, S]
    weights: Step = lambda p, kept, call: jnp.where(kept, p / (1 - call.rate), 0)
    out: Step = lambda out, kept, call: out
    total: Step = lambda total, weights, kept, call: total  # of the logsumexp
    in_dv: Step = lambda p, kept, call: jnp.where(kept, p / (1 - call.rate), 0)
    dp: Step = lambda dp, kept, call: jnp.where(kept, dp / (1 - call.rate), 0)
    d: Step = lambda d, p, undropped, call: d  # D; `undropped` is <do, v>
    dx_of_bias: Step = lambda dx, p, undropped, call: dx


def draw(call: Dropout, steps: Steps) -> Array:
    """Draw which pairs are kept, booleans `[B, N, T, S]`, or read it."""
    if steps.read is not None:
        return jnp.broadcast_to(steps.read(call), call.shape)
    rate = steps.rate(call.rate, call)
    call = dataclasses.replace(call, rate=rate, key=steps.key(call.key, call))
    if steps.draw is not None:
        return jnp.broadcast_to(steps.draw(call), call.shape)
    indices = jnp.meshgrid(*map(jnp.arange, call.shape), indexing="ij", sparse=True)
    word = steps.word(*steps.indices(*indices, call), call)
    return jnp.broadcast_to(steps.keeps(word, call), call.shape)


def _forward(operands: dict[str, Any], steps: Steps, call: Dropout | None, options: dict[str, Any]) -> Any:
    q, k, v = (operands[name] for name in "qkv")
    k, v = (jnp.repeat(x.astype(jnp.float32), q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if options["scale"] is None else options["scale"]
    x = product("btnh,bsnh->bnts", q.astype(jnp.float32), k) * scale
    if operands.get("bias") is not None:
        x = x + operands["bias"]
    cap = options["soft_cap"]
    z = x if cap is None else cap * jnp.tanh(x / cap)
    kept = None if call is None else draw(call, steps)
    if call is not None:
        z = steps.logits(z, kept, call)
    allowed = True if options["mask"] is None else options["mask"]
    if options["segment_ids"] is not None:
        q_ids, kv_ids = options["segment_ids"]
        allowed = allowed & (q_ids[:, None, :, None] == kv_ids[:, None, None, :])
    z = jnp.where(allowed, z, -jnp.inf)
    top, sinks = z.max(axis=-1, keepdims=True), operands.get("sinks")
    top = top if sinks is None else jnp.maximum(top, sinks[:, None, None])
    top = jax.lax.stop_gradient(jnp.where(jnp.isfinite(top), top, 0))
    weights = jnp.exp(z - top)
    total = weights.sum(axis=-1, keepdims=True)
    total = total if sinks is None else total + jnp.exp(sinks[:, None, None] - top)
    p = weights / jnp.where(total == 0, 1, total)
    dropped = p if call is None else steps.weights(p, kept, call)
    out = product("bnts,bsnv->btnv", dropped, v)
    if call is not None:
        out, total = steps.out(out, kept, call), steps.total(total, weights, kept, call)
    lse = jnp.where(total == 0, -jnp.inf, top + jnp.log(jnp.where(total == 0, 1, total)))
    return out.astype(q.dtype), lse[..., 0], (p, x, k, v, scale)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _by_hand(operands: dict[str, Any], steps: Steps, rate: float, scale_and_cap: tuple[Any, Any, bool]) -> Any:
    return _run_by_hand(operands, steps, rate, scale_and_cap)[:2]


def _run_by_hand(operands: Any, steps: Steps, rate: float, static: Any, **how: Any) -> Any:
    scale, cap, residuals = static
    options = {"scale": scale, "soft_cap": cap, "mask": operands["mask"], "segment_ids": operands["segment_ids"]}
    call = _build_call(operands, rate, residuals=residuals, **how)
    return _forward(operands, steps, call, options)


def _build_call(operands: Any, rate: float, **how: Any) -> Dropout:
    q, k = operands["q"], operands["k"]
    shape = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    how = {**how, "key": operands["dropout_key"], "mask": operands["dropout_mask"]}
    return Dropout(rate=rate, q=q, shape=shape, group=q.shape[2] // k.shape[2], **how)


def _by_hand_fwd(operands: Any, steps: Steps, rate: float, static: Any) -> Any:
    out, lse, saved = _run_by_hand(operands, steps, rate, static)
    return (out, lse), (operands, out, lse, saved)


def _by_hand_bwd(steps: Steps, rate: float, static: Any, saved: Any, cotangents: Any) -> Any:
    operands, out, lse, (p, x, k, v, scale) = saved
    do, dlse = cotangents
    cap, q = static[1], operands["q"]
    call = _build_call(operands, rate, backward=True)
    kept = draw(call, steps)
    do = do.astype(jnp.float32)
    undropped = product("btnv,bsnv->bnts", do, v)
    dp = steps.dp(undropped, kept, call)
    d = product("btnv,btnv->bnt", out.astype(jnp.float32), do)[..., None]
    d = steps.d(d, p, undropped, call)
    dz = p * (dp - d + dlse[..., None])
    dx = dz if cap is None else dz * (1 - jnp.tanh(x / cap) ** 2)

    def sum_group(dx: Array) -> Array:
        return dx.reshape(*dx.shape[:2], -1, call.group, dx.shape[-1]).sum(axis=3)

    dq = scale * product("bnts,bsnh->btnh", dx, k)
    dk = sum_group(scale * product("bnts,btnh->bsnh", dx, q.astype(jnp.float32)))
    dv = sum_group(product("bnts,btnv->bsnv", steps.in_dv(p, kept, call), do))
    gradients = {name: jax.tree.map(_zero_gradient, value) for name, value in operands.items()}
    gradients |= {"q": dq.astype(q.dtype), "k": dk.astype(q.dtype), "v": dv.astype(q.dtype)}
    if operands["bias"] is not None:
        of_bias = steps.dx_of_bias(dx, p, undropped, call)
        axes = tuple(axis for axis, size in enumerate(operands["bias"].shape) if size == 1)
        gradients["bias"] = of_bias.sum(axis=axes, keepdims=True).astype(operands["bias"].dtype)
    if (sinks := operands["sinks"]) is not None:
        p_sink = jnp.exp(sinks[:, None] - lse)
        gradients["sinks"] = (p_sink * (dlse - d[..., 0])).sum(axis=(0, 2))
    return (gradients,)


def _zero_gradient(x: Any) -> Any:
    is_float = jnp.issubdtype(x.dtype, jnp.floating)
    return jnp.zeros_like(x) if is_float else np.zeros(x.shape, jax.dtypes.float0)


_by_hand.defvjp(_by_hand_fwd, _by_hand_bwd)


def build(name: str, steps: Steps, *, by_hand: bool, **declared: Any) -> Implementation:
    """Build the implementation made of `steps`."""

    def attention(
        q: Any,
        k: Any,
        v: Any,
        *,
        mask: Any = None,
        segment_ids: Any = None,
        soft_cap: Any = None,
        sinks: Any = None,
        bias: Any = None,
        scale: Any = None,
        dropout_rate: Any = None,
        dropout_key: Any = None,
        dropout_mask: Any = None,
        save_residuals: bool = False,
    ) -> Any:
        operands = {"q": q, "k": k, "v": v, "bias": bias, "sinks": sinks}
        options = {"scale": scale, "soft_cap": soft_cap, "mask": mask, "segment_ids": segment_ids}
        if not dropout_rate or not by_hand:
            given = {**operands, "dropout_key": dropout_key, "dropout_mask": dropout_mask}
            call = _build_call(given, dropout_rate, residuals=save_residuals) if dropout_rate else None
            out, lse, _ = _forward(operands, steps, call, options)
        else:
            static = (scale, soft_cap, save_residuals)
            given = {**operands, "mask": mask, "segment_ids": segment_ids}
            given |= {"dropout_key": dropout_key, "dropout_mask": dropout_mask}
            out, lse = _by_hand(given, steps, dropout_rate, static)
        return (out, {"logsumexp": lse}) if save_residuals else out

    signature = inspect.signature(attention)
    lacks = "dropout_mask" if steps.read is None else "dropout_key"
    parameters = [p for p in signature.parameters.values() if p.name != lacks]
    vars(attention)["__signature__"] = signature.replace(parameters=parameters)
    declared = {"behind_mask": "finite", "empty_rows": "zero", **declared}
    return build_implementation(declare(**declared)(attention), name)


def build_on_devices(name: str, steps: Steps, **declared: Any) -> Implementation:
    """Build a kernel by counters for the queries of one device, which gets the keys of all devices."""

    @declare(**{"context_axes": ("context",), "behind_mask": "finite", "dropout_mask": "places", **declared})
    def attention(
        q: Any, k: Any, v: Any, *, causal: bool = False, dropout_rate: Any = None, dropout_key: Any = None
    ) -> Any:
        gathered = (jax.lax.all_gather(x, "context", axis=1, tiled=True) for x in (k, v))
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2).astype(jnp.float32) for x in gathered)
        b, n, i, j = jnp.meshgrid(
            *(jnp.arange(size) for size in (q.shape[0], q.shape[2], q.shape[1], k.shape[1])), indexing="ij", sparse=True
        )
        i = i + jax.lax.axis_index("context") * q.shape[1]
        x = product("btnh,bsnh->bnts", q.astype(jnp.float32), k) * q.shape[-1] ** -0.5
        p = jax.nn.softmax(jnp.where(i >= j, x, -1e30) if causal else x)
        if dropout_rate:
            call = Dropout(rate=dropout_rate, key=dropout_key, q=q, shape=p.shape, group=1)
            p = steps.weights(p, steps.keeps(steps.word(*steps.indices(b, n, i, j, call), call), call), call)
        return product("bnts,bsnv->btnv", p, v).astype(q.dtype)

    return build_implementation(attention, name)
