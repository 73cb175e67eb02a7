"""Adapters of Mosaic GPU attention for Hopper: JAX's `attention_mgpu`, and the kernel of tokamax (OpenXLA).

JAX's kernel takes the layout `[B, T, N, H]`. It has no scale, so the adapter computes `q * scale` in f32 and rounds it
to q's dtype, as the kernel's callers do. Its buffers are f16 for all operands, and its backward pass supports no mask.
Its logsumexp is in base 2. tokamax's kernel has no batch axis, so the adapter maps over the batch. Its residuals are
the maximum and the sum. No interpreter runs these kernels, so they only run on a Hopper GPU. Their compiler works on
every machine.

tokamax's module is private, so the extra `upstream` pins the version that this adapter was written for, 0.0.12.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
from packaging.version import Version

from cases.case import Case
from cases.masks import Mask
from impls.contract.declarations import Arithmetic
from impls.contract.implementation import Accelerator, Implementation
from impls.jax_compat import get_compute_capability, runs_on
from impls.libraries.adapter_refusals import forbid_gradients, refuse_because, refuse_unsupported
from impls.libraries.mask_flags import NO_OTHER_MASK, ONLY_CAUSAL, build_case_mask, find_causal_flag

HOPPER = (9, 0)
BLOCK_Q = 64  # queries per warpgroup; two warpgroups compute
BLOCK_KV = 128  # keys per block: one of three sizes in the benchmark of JAX's kernel, and tokamax's default
FIRST_UNSUPPORTED_JAX = Version("0.11")
BACKWARD_BLOCK = 64  # queries and keys per warpgroup, tokamax's default
_SHARED_UNSUPPORTED = {
    **NO_OTHER_MASK | {"offset": ONLY_CAUSAL},
    "f32": "multiplies 16-bit numbers only",
    "segment_ids": "takes no segment ids",
    "sinks": "takes no sinks",
    "bias": "is not given a bias",
    "v_head_dim": "needs values of the same depth as keys",
}
UNSUPPORTED: Mapping[str, Mapping[str, str]] = {
    "jax_mosaic_gpu": {**_SHARED_UNSUPPORTED, "bf16": "has buffers of f16", "soft_cap": "takes no soft cap"},
    "tokamax_mosaic_gpu": _SHARED_UNSUPPORTED,
}
_TOKAMAX_MODULES = "tokamax._src.ops.attention.pallas_mosaic_gpu"


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K V"],
    *,
    mask: Mask,
    segment_ids: Any = None,
    soft_cap: float | None = None,
    sinks: Any = None,
    bias: Any = None,
    scale: float | None = None,
    save_residuals: bool = False,
    library: str,
) -> Any:
    """Implement the canonical call (`impls.contract.implementation`).

    The operands are those of `impls.contract`.

    Args:
      mask: `Full()` or `Causal(0)`.
      soft_cap: Cap of the logits; refused for JAX's kernel.
      bias: Refused, since the adapter passes none to either kernel.
      library: `"jax"` or `"tokamax"`.
    """
    name = f"{library}_mosaic_gpu"
    others = {"segment_ids": segment_ids, "soft_cap": soft_cap, "sinks": sinks, "bias": bias, "scale": scale}
    refuse_unsupported(name, UNSUPPORTED[name], (q, k, v), mask, **others)
    causal = find_causal_flag(mask)
    refuse_because(name, _find_limit(causal, q.shape[1], k.shape[1], q.shape[3]))
    factor = 1 / math.sqrt(q.shape[3]) if scale is None else float(scale)
    if library == "jax":
        return _call_jax(name, q, k, v, bool(causal), factor, save_residuals)
    out, logsumexp = jax.vmap(_build_tokamax_call(bool(causal), factor, soft_cap, save_residuals))(q, k, v)
    return (out, {"logsumexp": logsumexp}) if save_residuals else out


def _call_jax(name: str, q: jax.Array, k: jax.Array, v: jax.Array, causal: bool, factor: float, residuals: bool) -> Any:
    module = importlib.import_module("jax.experimental.pallas.ops.gpu.attention_mgpu")
    config = module.TuningConfig(
        block_q=BLOCK_Q,
        block_kv=BLOCK_KV,
        max_concurrent_steps=2,
        causal=causal,
        block_q_dkv=BACKWARD_BLOCK,
        block_kv_dkv=BACKWARD_BLOCK,
        block_q_dq=BACKWARD_BLOCK,
        block_kv_dq=BACKWARD_BLOCK,
        compute_wgs_bwd=2,
    )
    kernel: Callable[..., Any] = functools.partial(module.attention, config=config, save_residuals=residuals)
    if causal or residuals:
        kernel = forbid_gradients(name, "is differentiated without a mask and without residuals only", kernel)
    scaled = (q.astype(jnp.float32) * jnp.float32(factor)).astype(q.dtype)
    found = kernel(scaled, k, v)
    return (found[0], {"logsumexp": found[1][0] * math.log(2)}) if residuals else found


def _build_tokamax_call(causal: bool, factor: float, soft_cap: float | None, residuals: bool) -> Callable[..., Any]:
    """Build tokamax's attention of one batch row, `[T, N, H]`, which also returns the logsumexp with residuals."""
    forward_module, backward_module = _load_tokamax_module("kernel_sm90"), _load_tokamax_module("vjp_kernel_sm90")
    options = {"is_causal": causal, "logits_soft_cap": soft_cap, "logits_scale": factor}

    def forward(q: jax.Array, k: jax.Array, v: jax.Array, residuals: bool) -> Any:
        return forward_module.flash_attention_kernel(
            q,
            k,
            v,
            *(None, None, None, None),  # bias, mask, start and end of key ranges
            out_dtype=q.dtype,
            normalize_output=True,
            return_residuals=residuals,
            use_stable_softmax=True,
            rescale_threshold=1.0,
            config=forward_module.Config(block_q=BLOCK_Q, block_kv=BLOCK_KV, num_stages=2),
            **options,
        )

    if residuals:

        def with_residuals(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
            out, (maximum, total) = forward(q, k, v, True)
            return out, maximum + jnp.log(total)

        return forbid_gradients("tokamax_mosaic_gpu", "is differentiated without residuals only", with_residuals)

    @jax.custom_vjp
    def run(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        out: jax.Array = forward(q, k, v, False)[0]
        return out

    def run_forward(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        out, statistics = forward(q, k, v, True)
        return out, (q, k, v, statistics, out)

    def run_backward(saved: Any, d_out: jax.Array) -> Any:
        config = backward_module.Config(
            block_q_dkv=BACKWARD_BLOCK,
            block_kv_dkv=BACKWARD_BLOCK,
            block_q_dq=BACKWARD_BLOCK,
            block_kv_dq=BACKWARD_BLOCK,
        )
        q, k, v, statistics, out = saved
        return backward_module.flash_attention_vjp_kernel(
            *(q, k, v, statistics, out, d_out), *(None, None, None, None), ds_dtype=None, config=config, **options
        )[:3]

    run.defvjp(run_forward, run_backward)
    return lambda q, k, v: (run(q, k, v), None)


def _load_tokamax_module(name: str) -> ModuleType:
    return importlib.import_module(f"{_TOKAMAX_MODULES}_{name}")


def _find_limit(causal: bool | None, q_length: int, kv_length: int, head_dim: int) -> str | None:
    if causal is None:
        return ONLY_CAUSAL
    if head_dim % 64 or head_dim > 128:
        return f"is given depths of 64 and 128 only; H is {head_dim}"
    if q_length % (2 * BLOCK_Q) or kv_length % BLOCK_KV:
        return f"needs lengths that are multiples of {BLOCK_KV}; T is {q_length} and S {kv_length}"
    return None


def _find_case_limit(library: str, case: Case) -> str | None:
    causal = find_causal_flag(build_case_mask(case))
    if library == "jax" and causal and case.phase == "train":
        return "has no backward pass with a mask"
    return _find_limit(causal, case.q_length, case.kv_length, case.head_dim)


def _explain_absence(library: str) -> str | None:
    if importlib.util.find_spec(library) is None:
        return f'{library} is not installed: pip install "attention-conformance[upstream]"'
    if library == "tokamax" and Version(jax.__version__) >= FIRST_UNSUPPORTED_JAX:
        return (
            f"tokamax 0.0.12 calls Mosaic GPU as jax before {FIRST_UNSUPPORTED_JAX} had it, "
            f"and this is {jax.__version__}"
        )
    if not runs_on("gpu") or get_compute_capability() != HOPPER:
        return "no Hopper GPU in this machine, and Mosaic GPU kernels run on no other"
    return None


def _build_implementation(library: str, what: str) -> Implementation:
    call = functools.partial(attention, library=library)
    name = f"{library}_mosaic_gpu"
    is_installed = importlib.util.find_spec(library) is not None
    return Implementation(
        name=name,
        call=call,
        description=f"{what}, for Hopper",
        unsupported=UNSUPPORTED[name],
        supports_case=functools.partial(_find_case_limit, library),
        arithmetic=Arithmetic(probabilities="input", scaled_q=library == "jax"),
        residuals=frozenset({"logsumexp"}),
        differentiable_residuals=frozenset(),
        gradients=frozenset({"dq", "dk", "dv"}),
        empty_rows="undefined",
        accelerator=Accelerator(
            platform="gpu", absent=_explain_absence(library), native=call if is_installed else None
        ),
    )


IMPLEMENTATIONS: tuple[Implementation, ...] = (
    _build_implementation("jax", "jax.experimental.pallas.ops.gpu.attention_mgpu"),
    _build_implementation("tokamax", "tokamax's Mosaic GPU kernels"),
)
