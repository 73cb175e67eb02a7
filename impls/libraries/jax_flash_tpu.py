"""Adapter of `jax.experimental.pallas.ops.tpu.flash_attention`.

The library takes the layout `[B, N, T, H]`, equal head counts, a causal flag and segment ids. It adds its bias `ab`
*before* the scale, so the adapter passes `bias / scale`, broadcast to `[B, N, T, S]`. It returns no residuals.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import flash_attention as flash
from jaxtyping import Array, Float, Int

from cases.case import Case
from cases.masks import Mask
from impls.contract.declarations import Arithmetic
from impls.contract.implementation import Accelerator, Implementation
from impls.jax_compat import Interpret, get_default_products, resolve_interpret, runs_on, use_tpu_interpreter
from impls.libraries.adapter_refusals import forbid_gradients, refuse_because, refuse_unsupported
from impls.libraries.mask_flags import NO_OTHER_MASK, ONLY_CAUSAL, build_case_mask, find_causal_flag

NAME = "jax_flash_tpu"
BLOCK = 128  # Every block size of `BlockSizes.get_default`, and the smallest that the library's kernels take.
_NO_GROUPS = "needs as many key/value heads as query heads"
UNSUPPORTED = {
    "gqa": _NO_GROUPS,
    "mqa": _NO_GROUPS,
    **NO_OTHER_MASK,
    "soft_cap": "takes no soft cap",
    "sinks": "takes no sinks",
    "v_head_dim": "needs values of the same depth as keys",
}


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K V"],
    *,
    mask: Mask,
    segment_ids: tuple[Int[Array, "B T"], Int[Array, "B S"]] | None = None,
    soft_cap: float | None = None,
    sinks: Any = None,
    bias: Float[Array, "#B #N #T #S"] | None = None,
    scale: float | None = None,
    save_residuals: bool = False,
    interpret: Interpret = None,
) -> Any:
    """Implement the canonical call (`impls.contract.implementation`).

    `interpret` is as for `pallas_call`, by default true unless the process runs on a TPU.
    """
    others = {"segment_ids": segment_ids, "soft_cap": soft_cap, "sinks": sinks, "bias": bias, "scale": scale}
    refuse_unsupported(NAME, UNSUPPORTED, (q, k, v), mask, **others)
    causal = find_causal_flag(mask)
    refuse_because(NAME, _find_limit(causal, q.shape[1], k.shape[1], q.shape[3]))
    factor = 1 / math.sqrt(q.shape[3]) if scale is None else float(scale)
    if bias is not None:
        # In f32 before it is broadcast: the gradient of the broadcast is a sum in that dtype.
        full = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
        bias = jnp.broadcast_to(bias.astype(jnp.float32), full) / factor
    kernel: Callable[..., Any] = functools.partial(flash.flash_attention, causal=causal, sm_scale=factor)
    kernel = _make_interpretable(kernel, resolve_interpret(interpret, "tpu"))
    if reason := _find_gradient_limit(q.shape[1]):
        kernel = forbid_gradients(NAME, reason, kernel)
    out = kernel(
        *(x.transpose(0, 2, 1, 3) for x in (q, k, v)),
        bias,
        None if segment_ids is None else flash.SegmentIds(*segment_ids),
    ).transpose(0, 2, 1, 3)
    return (out, {}) if save_residuals else out


def _make_interpretable(kernel: Callable[..., Any], interpret: Interpret) -> Callable[..., Any]:
    """Trace `kernel` and its backward pass in the interpreter.

    The library selects the interpreter by a context, not an argument. JAX traces the backward pass after the forward
    call has returned, outside the context of that call.
    """
    if not interpret:
        return kernel

    @jax.custom_vjp
    def run(*operands: Any) -> Any:
        with use_tpu_interpreter(interpret):
            return kernel(*operands)

    def forward(*operands: Any) -> tuple[Any, Any]:
        with use_tpu_interpreter(interpret):
            return jax.vjp(kernel, *operands)

    def backward(pullback: Any, cotangent: Any) -> Any:
        with use_tpu_interpreter(interpret):
            return pullback(cotangent)

    run.defvjp(forward, backward)
    return run


def _find_case_limit(case: Case) -> str | None:
    reason = _find_limit(find_causal_flag(build_case_mask(case)), case.q_length, case.kv_length, case.head_dim)
    return reason or (_find_gradient_limit(case.q_length) if case.phase == "train" else None)


def _find_gradient_limit(q_length: int) -> str | None:
    if q_length % BLOCK:
        return f"needs a multiple of {BLOCK} queries, its block, for gradients; T is {q_length}"
    return None


def _find_limit(causal: bool | None, q_length: int, kv_length: int, head_dim: int) -> str | None:
    if causal is None:
        return ONLY_CAUSAL
    if q_length < BLOCK:
        return f"needs at least {BLOCK} queries, its block; T is {q_length}"
    if kv_length % BLOCK:
        return f"needs a multiple of {BLOCK} keys, its block; S is {kv_length}"
    if head_dim > BLOCK and head_dim % BLOCK and kv_length > BLOCK:
        return f"needs a head depth up to {BLOCK} or a multiple of it; H is {head_dim}"
    return None


IMPLEMENTATIONS: tuple[Implementation, ...] = (
    Implementation(
        name=NAME,
        call=attention,
        description="jax.experimental.pallas.ops.tpu.flash_attention",
        unsupported=UNSUPPORTED,
        supports_case=_find_case_limit,
        arithmetic=Arithmetic(products=get_default_products()),
        residuals=frozenset(),
        differentiable_residuals=frozenset(),
        gradients=frozenset({"dq", "dk", "dv", "dbias"}),
        empty_rows="undefined",
        accelerator=Accelerator(
            platform="tpu",
            interpreted=not runs_on("tpu"),
            under_interpreter=lambda parameters: functools.partial(attention, interpret=parameters),
            native=functools.partial(attention, interpret=False),
        ),
    ),
)
