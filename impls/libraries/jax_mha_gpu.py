"""Adapter of `jax.experimental.pallas.ops.gpu.attention.mha`, with its Triton and its XLA backward pass.

The library takes the layout `[B, T, N, H]`, equal head counts, a causal flag and one array of segment ids for queries
and keys. Its logsumexp `[B, N, T]` is in base 2; the adapter converts it. With residuals the library's function cannot
be differentiated.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from cases.case import Case
from cases.masks import Mask
from impls.contract.declarations import Arithmetic, Products
from impls.contract.implementation import Accelerator, Implementation
from impls.jax_compat import Interpret, load_pallas_gpu_attention, resolve_interpret, runs_on
from impls.libraries.adapter_refusals import forbid_gradients, refuse_because, refuse_unsupported
from impls.libraries.mask_flags import NO_OTHER_MASK, ONLY_CAUSAL, build_case_mask, find_causal_flag

BLOCK = 128  # Forward blocks of `BlockSizes.get_default()`, clipped to shorter lengths.
BACKWARD_BLOCK = 32  # Backward blocks of `BlockSizes.get_default()`, clipped to shorter lengths.
SHARED_MEMORY = 227 * 1024  # bytes per thread block on Hopper and Blackwell
_NO_GROUPS = "needs as many key/value heads as query heads"
_ONE_ARRAY = "takes one array of segment ids for queries and keys"
UNSUPPORTED = {
    "gqa": _NO_GROUPS,
    "mqa": _NO_GROUPS,
    **NO_OTHER_MASK,
    "soft_cap": "takes no soft cap",
    "sinks": "takes no sinks",
    "bias": "takes no bias",
    "v_head_dim": "needs values of the same depth as keys",
}


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K V"],
    *,
    mask: Mask,
    segment_ids: tuple[Int[Array | np.ndarray, "B T"], Int[Array | np.ndarray, "B S"]] | None = None,
    soft_cap: float | None = None,
    sinks: Any = None,
    bias: Any = None,
    scale: float | None = None,
    save_residuals: bool = False,
    backward: str = "triton",
    interpret: Interpret = None,
) -> Any:
    """Implement the canonical call (`impls.contract.implementation`).

    The operands are those of `impls.contract`.

    Args:
      mask: `Full()` or `Causal(0)`.
      segment_ids: Equal ids of q and kv. If they are traced and differ at run time, the output is NaN.
      backward: `"triton"` or `"xla"`, the library's `backward_pass_impl`.
      interpret: As in `pallas_call`; by default true unless the process runs on a GPU.
    """
    name = _get_name(backward)
    others = {"segment_ids": segment_ids, "soft_cap": soft_cap, "sinks": sinks, "bias": bias, "scale": scale}
    refuse_unsupported(name, UNSUPPORTED, (q, k, v), mask, **others)
    causal = find_causal_flag(mask)
    refuse_because(name, _find_limit(causal, q.shape[1], k.shape[1], segment_ids is not None))
    if not resolve_interpret(interpret, "gpu"):
        refuse_because(name, _find_memory_limit(max(q.shape[1], k.shape[1]), q.shape[3], q.dtype.itemsize))
    ids, same = (None, None) if segment_ids is None else _merge_ids(name, *segment_ids)
    kernel: Callable[..., Any] = functools.partial(
        load_pallas_gpu_attention().mha,
        sm_scale=1 / math.sqrt(q.shape[3]) if scale is None else float(scale),
        causal=causal,
        backward_pass_impl=backward,
        interpret=resolve_interpret(interpret, "gpu"),
        return_residuals=save_residuals,
    )
    if reason := _find_gradient_limit(backward, q.shape[1], k.shape[1]):
        kernel = forbid_gradients(name, reason, kernel)
    result = kernel(q, k, v, ids)
    out, base_2 = result if save_residuals else (result, None)
    if same is not None:
        out = jnp.where(same, out, jnp.nan)
    return out if base_2 is None else (out, {"logsumexp": base_2 * math.log(2)})


def _merge_ids(name: str, q_ids: Any, kv_ids: Any) -> tuple[Any, jax.Array | None]:
    """Merge segment ids; if traced, also return whether they agree. Raises `NotImplementedError` if they differ."""
    if q_ids is kv_ids:
        return q_ids, None
    traced = isinstance(q_ids, jax.core.Tracer) or isinstance(kv_ids, jax.core.Tracer)
    if q_ids.shape != kv_ids.shape or not (traced or np.array_equal(q_ids, kv_ids)):
        raise NotImplementedError(f"{name} does not support segment_ids that differ for q and kv: it {_ONE_ARRAY}")
    return q_ids, jnp.all(q_ids == kv_ids) if traced else None


def _find_case_limit(case: Case, *, backward: str) -> str | None:
    if case.segments == "segpad":
        return f"{_ONE_ARRAY}, and the padding of the two has different ids"
    reason = _find_limit(
        find_causal_flag(build_case_mask(case)), case.q_length, case.kv_length, case.segments is not None
    )
    if reason is None and runs_on("gpu"):
        reason = _find_memory_limit(max(case.q_length, case.kv_length), case.head_dim, 4 if case.dtype == "f32" else 2)
    return reason or (_find_gradient_limit(backward, case.q_length, case.kv_length) if case.phase == "train" else None)


def _find_memory_limit(length: int, head_dim: int, itemsize: int) -> str | None:
    # The kernel compiled for H100 takes 4 blocks: 256 KiB at depth 128 in f32, and 512 KiB at depth 256.
    need = 4 * min(BLOCK, length) * head_dim * itemsize
    if need > SHARED_MEMORY:
        return (
            f"needs {need} bytes of shared memory, of which a GPU has {SHARED_MEMORY}, for H={head_dim} in this dtype"
        )
    return None


def _find_gradient_limit(backward: str, q_length: int, kv_length: int) -> str | None:
    q_blocks, kv_blocks = (n // min(n, BACKWARD_BLOCK) for n in (q_length, kv_length))
    if backward == "triton" and q_blocks != kv_blocks:
        return (
            f"needs as many query blocks as key blocks, of {BACKWARD_BLOCK} each, for gradients; "
            f"T={q_length} and S={kv_length} give {q_blocks} and {kv_blocks}"
        )
    return None


def _find_limit(causal: bool | None, q_length: int, kv_length: int, segments: bool) -> str | None:
    if causal is None:
        return ONLY_CAUSAL
    if segments and q_length != kv_length:
        return f"{_ONE_ARRAY}, which T != S rules out"
    for name, length in (("T", q_length), ("S", kv_length)):
        if length > BLOCK and length % BLOCK:
            return f"needs lengths up to {BLOCK} or multiples of {BLOCK}, its block; {name} is {length}"
        if runs_on("gpu") and length < BLOCK and length & (length - 1):
            return f"needs lengths that are powers of two below its block of {BLOCK} (Triton tiles); {name} is {length}"
    return None


def _get_name(backward: str) -> str:
    return "jax_mha_gpu" if backward == "triton" else f"jax_mha_gpu_{backward}_bwd"


def _build_implementation(backward: str) -> Implementation:
    products: Products = "tf32" if runs_on("gpu") else "exact"
    return Implementation(
        name=_get_name(backward),
        call=functools.partial(attention, backward=backward),
        description=f"jax.experimental.pallas.ops.gpu.attention.mha, backward pass {backward!r}",
        unsupported=UNSUPPORTED,
        supports_case=functools.partial(_find_case_limit, backward=backward),
        arithmetic=Arithmetic(products=products),
        residuals=frozenset({"logsumexp"}),
        differentiable_residuals=frozenset(),
        gradients=frozenset({"dq", "dk", "dv"}),
        empty_rows="undefined",
        accelerator=Accelerator(
            platform="gpu",
            interpreted=not runs_on("gpu"),
            native=functools.partial(attention, backward=backward, interpret=False),
        ),
    )


IMPLEMENTATIONS: tuple[Implementation, ...] = (_build_implementation("triton"), _build_implementation("xla"))
