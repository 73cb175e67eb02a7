"""Adapter of `jax.nn.dot_product_attention`, with `implementation="xla"` and with `implementation="cudnn"`.

Masks are passed by the native arguments `is_causal`, `local_window_size` and `key_value_seq_lengths` where these mean
exactly the same. Other masks are passed by the boolean `mask`. The library's logsumexp `[B, T, N]` is a natural
logarithm in the operands' dtype. So in bf16 most digits are lost before the adapter casts it to f32. The logsumexp
carries no gradient: the library applies `stop_gradient` for XLA, and its backward rule for cuDNN ignores the cotangent.

cuDNN's flash attention runs on NVIDIA GPUs only, and no interpreter runs it. The adapter refuses what the library's
checks refuse (`jax._src.cudnn.fused_attention_stablehlo`, `check_is_flash_attention` and `check_layout`, jax 0.10.2):
dtypes, depths, a bias that does not span both lengths, and gradients at odd lengths. The library means to refuse
gradients at odd lengths only with a bias, but its check mistakes the placeholder of a missing bias for one. For cuDNN,
a mask without a native argument becomes an additive bias.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from cases.case import Case
from cases.masks import Causal, Full, Lengths, Mask, Window, list_conjuncts
from impls.contract.declarations import Arithmetic
from impls.contract.implementation import Accelerator, Implementation
from impls.jax_compat import get_compute_capability, get_default_products, runs_on
from impls.libraries.adapter_refusals import refuse_because, refuse_unsupported

UNSUPPORTED = {
    "soft_cap": "takes no soft cap",
    "sinks": "takes no sinks",
    "segment_ids": "takes no segment ids",
    "v_head_dim": "needs values of the same depth as keys",
}
CUDNN_UNSUPPORTED = {**UNSUPPORTED, "f32": "takes bf16 and f16 operands only"}
NO_GPU = "cuDNN attention needs an NVIDIA GPU, and nothing interprets it elsewhere"
_HOPPER = (9, 0)


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K V"],
    *,
    mask: Mask,
    segment_ids: Any = None,
    soft_cap: float | None = None,
    sinks: Any = None,
    bias: Float[Array, "#B #N #T #S"] | None = None,
    scale: float | None = None,
    save_residuals: bool = False,
    backend: str = "xla",
) -> Any:
    """Implement the canonical call (`impls.contract`) by `backend`, the library's `implementation`."""
    others = {"segment_ids": segment_ids, "soft_cap": soft_cap, "sinks": sinks, "bias": bias, "scale": scale}
    refuse_unsupported(_get_name(backend), _get_unsupported(backend), (q, k, v), mask, **others)
    arguments = build_mask_arguments(mask, q.shape[0], q.shape[1], k.shape[1], backend=backend)
    if backend == "cudnn":
        narrow = bias is not None and bias.shape[2:] != (q.shape[1], k.shape[1])
        refuse_because(_get_name(backend), _find_cudnn_limit(q.shape[3], narrow=narrow))
    result: Any = jax.nn.dot_product_attention(  # type: ignore[call-overload] # overloads want a literal flag
        q, k, v, bias, scale=scale, implementation=backend, return_residual=save_residuals, **arguments
    )
    if not save_residuals:
        return result
    out, logsumexp = result
    return out, {"logsumexp": logsumexp.astype(jnp.float32).transpose(0, 2, 1)}


def build_mask_arguments(
    mask: Mask, batch: int, q_length: int, kv_length: int, *, backend: str = "xla"
) -> dict[str, Any]:
    """Build the keyword arguments of `jax.nn.dot_product_attention` that together mean `mask`."""
    native, rest = _split_mask(mask, backend)
    arguments: dict[str, Any] = {}
    for part in native:
        if isinstance(part, Causal):
            arguments["is_causal"] = True
        elif isinstance(part, Window):
            # `local_window_size` has no open side; a side as long as the sequence means the same.
            left = q_length if part.left is None else part.left
            right = kv_length if part.right is None else part.right
            arguments["local_window_size"] = (left, right)
        elif isinstance(part, Lengths):
            lengths = np.broadcast_to(np.asarray(part.lengths, np.int32), (batch,))
            arguments["key_value_seq_lengths"] = jnp.asarray(lengths)
    if rest:
        dense = functools.reduce(operator.and_, (part.dense(q_length, kv_length) for part in rest))
        arguments["mask"] = jnp.asarray(dense)
    return arguments


def _split_mask(mask: Mask, backend: str) -> tuple[list[Mask], list[Mask]]:
    """Split a mask into parts that have a native argument, at most one of each kind, and the rest."""
    parts = [part for part in list_conjuncts(mask) if not isinstance(part, Full)]
    # cuDNN supports only left windows, and only together with its causal mask.
    windows = backend == "xla" or Causal(0) in parts
    native: list[Mask] = []
    rest: list[Mask] = []
    for part in parts:
        known = part == Causal(0) or isinstance(part, Lengths)
        known = known or (isinstance(part, Window) and part.offset == 0 and windows)
        taken = known and (part == Causal(0) or not any(type(part) is type(other) for other in native))
        (native if taken else rest).append(part)
    return native, rest


def _find_cudnn_limit(head_dim: int, *, narrow: bool) -> str | None:
    deepest = 256 if (capability := get_compute_capability()) is None or capability >= _HOPPER else 128
    if head_dim > deepest or head_dim % 8:
        return f"needs a head_dim that is a multiple of 8 up to {deepest}, got {head_dim}"
    if narrow:
        return "needs a bias that spans both lengths"
    return None


def _find_cudnn_case_limit(case: Case) -> str | None:
    if (reason := _find_cudnn_limit(case.head_dim, narrow=case.bias == "biaskey")) is not None:
        return reason
    if case.phase == "train" and (case.q_length % 2 or case.kv_length % 2):
        return f"needs even lengths for gradients; T={case.q_length} and S={case.kv_length}"
    return None


def _get_unsupported(backend: str) -> dict[str, str]:
    return CUDNN_UNSUPPORTED if backend == "cudnn" else UNSUPPORTED


def _get_name(backend: str) -> str:
    return f"jax_nn_{backend}"


def _build_implementation(backend: str) -> Implementation:
    cudnn = backend == "cudnn"
    return Implementation(
        name=_get_name(backend),
        call=functools.partial(attention, backend=backend),
        description=f'jax.nn.dot_product_attention(implementation="{backend}")',
        unsupported=_get_unsupported(backend),
        supports_case=_find_cudnn_case_limit if cudnn else None,
        arithmetic=Arithmetic(products=get_default_products(), residuals="input" if cudnn else "f32"),
        residuals=frozenset({"logsumexp"}),
        differentiable_residuals=frozenset(),
        gradients=frozenset({"dq", "dk", "dv", "dbias"}),
        # Sums of cuDNN's backward pass have another order from call to call, unless XLA is told to exclude that
        # (`--xla_gpu_exclude_nondeterministic_ops`, https://github.com/openxla/xla/pull/14125).
        unordered_sums=frozenset({"dq", "dk", "dv"}) if cudnn else frozenset(),
        empty_rows="undefined" if cudnn else "mean",
        tangents=() if cudnn else ("out", "gradients"),
        # cuDNN's mask is added to the logits, so the NaN logit of a hidden key stays NaN.
        behind_mask="finite" if cudnn else "any",
        accelerator=Accelerator(platform="gpu", absent=None if runs_on("gpu") else NO_GPU) if cudnn else Accelerator(),
    )


IMPLEMENTATIONS: tuple[Implementation, ...] = (_build_implementation("xla"), _build_implementation("cudnn"))
