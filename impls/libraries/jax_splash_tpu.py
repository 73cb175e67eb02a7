"""Adapter of `jax.experimental.pallas.ops.tpu.splash_attention`.

The library's kernels take the layout `[N, T, H]` without a batch axis, so the adapter maps over the batch. For grouped
heads it maps MQA kernels over the key/value heads. With a mask per head it uses the MHA kernel, which supports groups
too. The kernels have no scale, so the adapter computes `q * scale` in f32 and rounds it to q's dtype, as the library's
callers do. The logsumexp is a natural logarithm and includes the sink. With `save_residuals` the kernels cannot be
differentiated.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_mask
from jaxtyping import Array, Float, Int

from cases.case import Case
from cases.case_id import parse_case_id
from cases.masks import Mask
from impls.contract.declarations import Arithmetic
from impls.contract.implementation import Accelerator, Implementation
from impls.contract.tunable import ParameterSettings, Setting, Traffic, Tunable, TuningParameter, report_no_traffic
from impls.jax_compat import Interpret, get_default_products, resolve_interpret, runs_on
from impls.libraries.adapter_refusals import refuse_because, refuse_unsupported
from impls.libraries.mask_flags import build_case_mask
from impls.libraries.splash_masks import BLOCK, build_library_mask, find_length_limit

BlockSizes = splash.BlockSizes
_COMPILED_BLOCK = 512  # The default of `impls.splash_tpu`. The library's default, the smallest blocks, is slow.
UNSUPPORTED = {"bias": "takes no bias", "indexer": "takes masks that are known when its kernel is made"}


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K V"],
    *,
    mask: Mask,
    segment_ids: tuple[Int[Array, "B T"], Int[Array, "B S"]] | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    bias: Any = None,
    scale: float | None = None,
    save_residuals: bool = False,
    fused_backward: bool = False,
    largest_block: int = BLOCK,
    block_sizes: BlockSizes | None = None,
    interpret: Interpret = None,
) -> Any:
    """Implement the canonical call (`impls.contract.implementation`).

    The operands are those of `impls.contract`.

    Args:
      mask: Any mask that is the same for the whole batch.
      fused_backward: Use one kernel for all gradients, instead of one for dq and one for dk and dv.
      largest_block: Length of blocks, or the largest power of two below it that divides the length.
      block_sizes: Block sizes of each of the library's kernels, in place of `largest_block`.
      interpret: As for `pallas_call`; by default true unless the process runs on a TPU.
    """
    others = {"segment_ids": segment_ids, "soft_cap": soft_cap, "sinks": sinks, "bias": bias, "scale": scale}
    refuse_unsupported(_get_name(fused_backward), UNSUPPORTED, (q, k, v), mask, **others)
    batch, q_length, num_q_heads, head_dim = q.shape
    kv_length, num_kv_heads = k.shape[1:3]
    group = num_q_heads // num_kv_heads
    refuse_because(_get_name(fused_backward), _find_limit(mask, q_length, kv_length))
    factor = 1 / math.sqrt(head_dim) if scale is None else scale
    q = (q.astype(jnp.float32) * factor).astype(q.dtype)

    by_head = not mask.is_computed and mask.dense(q_length, kv_length).shape[1] > 1
    in_groups = group > 1 and not by_head
    kernel: Callable[..., Any] = _build_kernel(
        mask,
        q_length,
        kv_length,
        group if in_groups else num_q_heads,
        is_mqa=in_groups,
        soft_cap=None if soft_cap is None else float(soft_cap),
        save_residuals=save_residuals,
        block_sizes=block_sizes
        or _build_uniform_sizes(q_length, kv_length, largest_block, fused_backward=fused_backward),
        interpret=resolve_interpret(interpret, "tpu"),
    )
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    if in_groups:
        kernel = jax.vmap(kernel, in_axes=(0, 0, 0, None, 0))
        q = q.reshape(batch, num_kv_heads, group, q_length, head_dim)
        sinks = None if sinks is None else sinks.reshape(num_kv_heads, group)
    ids = None if segment_ids is None else splash.SegmentIds(*segment_ids)
    result = jax.vmap(kernel, in_axes=(0, 0, 0, 0, None))(q, k, v, ids, sinks)
    out, logsumexp = (result[0], result[1][0]) if save_residuals else (result, None)
    out = out.reshape(batch, num_q_heads, q_length, -1).transpose(0, 2, 1, 3)
    if logsumexp is None:
        return out
    return out, {"logsumexp": logsumexp.reshape(batch, num_q_heads, q_length)}


@functools.lru_cache(maxsize=256)
def _build_kernel(
    mask: Mask,
    q_length: int,
    kv_length: int,
    num_heads: int,
    *,
    is_mqa: bool,
    soft_cap: float | None,
    save_residuals: bool,
    block_sizes: BlockSizes,
    interpret: Interpret,
) -> Callable[..., Any]:
    """Build a kernel for one mask and shape. Cached, since it holds the processed mask and jit compares by identity."""
    make = splash.make_splash_mqa_single_device if is_mqa else splash.make_splash_mha_single_device
    # The kernel's arrays must not be tracers, even if built while tracing: later traces get them from the cache.
    with jax.ensure_compile_time_eval():
        kernel: Callable[..., Any] = make(
            splash_mask.MultiHeadMask(_build_head_masks(mask, q_length, kv_length, num_heads)),
            block_sizes=block_sizes,
            save_residuals=save_residuals,
            attn_logits_soft_cap=soft_cap,
            interpret=interpret,
        )
    return kernel


def _build_uniform_sizes(q_length: int, kv_length: int, largest: int, *, fused_backward: bool) -> BlockSizes:
    """Build the same blocks for every kernel: `largest`, or the largest power of two below it that divides a length."""
    q, kv = (math.gcd(length, largest) for length in (q_length, kv_length))
    return BlockSizes(
        block_q=q,
        block_kv=kv,
        block_q_dkv=q,
        block_kv_dkv=kv,
        block_q_dq=None if fused_backward else q,
        block_kv_dq=None if fused_backward else kv,
        use_fused_bwd_kernel=fused_backward,
    )


def _build_head_masks(mask: Mask, q_length: int, kv_length: int, num_heads: int) -> list[splash_mask.Mask]:
    shape = (q_length, kv_length)
    if mask.is_computed:
        return [build_library_mask(splash_mask, mask, shape)] * num_heads
    dense = mask.dense(q_length, kv_length)
    return [splash_mask.NumpyMask(head) for head in np.broadcast_to(dense[0], (num_heads, *shape))]


def _find_case_limit(case: Case) -> str | None:
    return _find_limit(build_case_mask(case), case.q_length, case.kv_length)


def _find_limit(mask: Mask, q_length: int, kv_length: int) -> str | None:
    if reason := find_length_limit(q_length, kv_length):
        return reason
    if not mask.is_computed and mask.dense(q_length, kv_length).shape[0] > 1:
        return "takes one mask for the whole batch, not one for each batch row (dense_batch, lengths)"
    return None


def _build_tunable(attention: Callable[..., Any]) -> Tunable:
    """Describe to the tuner the blocks of each kernel, and whether the backward pass is one kernel or two."""

    def call(settings: ParameterSettings, **options: Any) -> Callable[..., Any]:
        is_fused = settings["backward"]["fused"] == 1
        forward, dq, dkv = (settings[name] for name in ("forward", "dq", "fused" if is_fused else "dkv"))
        sizes = BlockSizes(
            block_q=forward["q"],
            block_kv=forward["kv"],
            block_kv_compute=forward["kv_compute"],
            block_q_dq=None if is_fused else dq["q"],
            block_kv_dq=None if is_fused else dq["kv"],
            block_q_dkv=dkv["q"],
            block_kv_dkv=dkv["kv"],
            block_kv_dkv_compute=dkv["kv_compute"],
            use_fused_bwd_kernel=is_fused,
        )
        return functools.partial(attention, block_sizes=sizes, **options)

    def candidates(case: Case) -> Iterator[Setting]:
        for q, kv, compute in _CANDIDATES:
            if case.q_length % q == 0 and case.kv_length % kv == 0:
                yield {"q": q, "kv": kv, "kv_compute": compute}

    def settings(case: Case) -> ParameterSettings:
        q, kv = (math.gcd(length, _COMPILED_BLOCK) for length in (case.q_length, case.kv_length))
        return {
            **{name: {"q": q, "kv": kv, "kv_compute": kv} for name in _KERNEL_SUFFIXES},
            "backward": _BACKWARD_CHOICES[0][0],
        }

    def build_parameter(name: str) -> TuningParameter:
        return TuningParameter(
            name=name,
            phase="forward" if name == "forward" else "forward+backward",
            candidates=candidates,
            kernel=_KERNEL_SUFFIXES[name],
            given=next(({"backward": way} for way, names in _BACKWARD_CHOICES if name in names), {}),
            traffic=_estimate_traffic if name == "fused" else report_no_traffic,
        )

    backward = TuningParameter(
        name="backward",
        phase="forward+backward",
        candidates=lambda case: tuple(way for way, _ in _BACKWARD_CHOICES),
        ways=_BACKWARD_CHOICES,
    )
    return Tunable(
        parameters=(*map(build_parameter, _KERNEL_SUFFIXES), backward),
        settings=settings,
        call=call,
        native=functools.partial(call, interpret=False),
        key=lambda case: {"kv_length": case.kv_length},
        cases=lambda: (parse_case_id("train/bf16/B1.T8192.S8192.N1.K1.H128.V128/causal/normal/s0"),),
    )


def _estimate_traffic(case: Case, setting: Setting) -> Traffic:
    """Estimate the HBM traffic of dq: the fused kernel writes one part per key block, and XLA then sums the parts."""
    whole = case.batch * case.num_q_heads * case.q_length * case.head_dim * (4 if case.dtype == "f32" else 2)
    return Traffic(beside=(case.kv_length // setting["kv"] + 1) * whole)


_KERNEL_SUFFIXES = {  # end of each kernel's name, by which the tuner finds it
    "forward": "residuals",
    "dq": "_dq_no_residuals",
    "dkv": "_dkv_no_residuals",
    "fused": "_dkv_no_residuals",
}
_BACKWARD_CHOICES = (({"fused": 0}, ("dq", "dkv")), ({"fused": 1}, ("fused",)))
_CANDIDATES = ((512, 512, 512), (1024, 1024, 512), (1024, 1024, 1024), (1024, 2048, 512), (2048, 2048, 512))


def _get_name(fused_backward: bool) -> str:
    return "jax_splash_tpu_fused" if fused_backward else "jax_splash_tpu"


def _build_implementation(fused_backward: bool) -> Implementation:
    kernels = "one fused kernel" if fused_backward else "separate kernels for dq and for dk, dv"
    return Implementation(
        name=_get_name(fused_backward),
        call=functools.partial(attention, fused_backward=fused_backward),
        description=f"jax.experimental.pallas.ops.tpu.splash_attention, backward in {kernels}",
        unsupported=UNSUPPORTED,
        supports_case=_find_case_limit,
        arithmetic=Arithmetic(products=get_default_products(), scaled_q=True),
        residuals=frozenset({"logsumexp"}),
        differentiable_residuals=frozenset(),
        gradients=frozenset({"dq", "dk", "dv", "dsinks"}),
        empty_rows="undefined",
        accelerator=Accelerator(
            platform="tpu",
            interpreted=not runs_on("tpu"),
            under_interpreter=lambda parameters: functools.partial(
                attention, fused_backward=fused_backward, interpret=parameters
            ),
            native=functools.partial(
                attention, fused_backward=fused_backward, largest_block=_COMPILED_BLOCK, interpret=False
            ),
        ),
        tunable=None if fused_backward else _build_tunable(attention),
    )


IMPLEMENTATIONS: tuple[Implementation, ...] = (_build_implementation(False), _build_implementation(True))
