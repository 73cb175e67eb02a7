"""Splash attention of tokamax (OpenXLA), a fork of the one that JAX ships, with a fused backward pass only.

Layout `[N, T, H]` without a batch axis: the adapter maps over the batch. One key/value head goes to its MQA kernel,
whose k and v have no head axis, the others to its MHA kernel, which takes groups. One mask holds for all heads; from
one that is known at run time only, a kernel is made for each batch row. The kernel has no scale: `q * scale` is
computed in f32 and rounded to q's dtype, as its callers do. It works in base 2 by default, for which it multiplies q by
`log2(e)` rounded to q's dtype. Its residuals are natural, carry no gradient, and `max_logits` includes the sink.

The module is private to tokamax, so the extra `upstream` pins the version that this was written for, 0.0.12.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from cases.case import Case
from cases.masks import Indexer, Mask, leaves
from conformance.contract import Accelerator, Arithmetic, Implementation
from impls.upstream.mask_flags import case_mask
from impls.upstream.refusals import forward_only, refuse, refuse_because
from impls.upstream.splash_masks import BLOCK, lazy_mask, whole_blocks
from impls.versions import default_products, interpret_or, runs_on

NAME = "tokamax_splash_tpu"
UNSUPPORTED = {"bias": "takes no bias", "dense_head": "takes one mask for all heads"}
ABSENT = 'tokamax is not installed: pip install "attention-conformance[upstream]"'
_DQ_ARRAYS = 3  # In which dq is summed under a mask known at run time; else there is one for each key block.
_PACKAGE = "tokamax._src.ops.experimental.tpu.splash_attention"


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    mask: Mask,
    segment_ids: tuple[jax.Array, jax.Array] | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    bias: Any = None,
    scale: float | None = None,
    save_residuals: bool = False,
    interpret: Any = None,
) -> Any:
    """The canonical call (`conformance.contract`).

    Args:
      q: Queries.
      k: Keys.
      v: Values.
      mask: Any mask that is the same for all heads, and known at run time only or the same for the whole batch.
      segment_ids: Ids of q and kv.
      soft_cap: Cap of the logits.
      sinks: One logit a query head.
      bias: Refused.
      scale: Factor of the logits.
      save_residuals: Return the logsumexp and the largest logits too.
      interpret: As in `pallas_call`; by default true unless the process runs on a TPU.

    Raises:
      ImportError: tokamax is not installed.
    """
    refuse(
        NAME,
        UNSUPPORTED,
        q,
        k,
        v,
        mask=mask,
        segment_ids=segment_ids,
        soft_cap=soft_cap,
        sinks=sinks,
        bias=bias,
        scale=scale,
    )
    q_length, num_q_heads, kv_length, num_kv_heads = *q.shape[1:3], *k.shape[1:3]
    refuse_because(NAME, _limit(mask, q_length, kv_length))
    options: dict[str, Any] = {
        "is_mqa": num_kv_heads == 1,
        "soft_cap": None if soft_cap is None else float(soft_cap),
        "save_residuals": save_residuals,
        "interpret": interpret_or(interpret, "tpu"),
    }
    factor = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    q, k, v = (x.transpose(0, 2, 1, 3) for x in ((q.astype(jnp.float32) * factor).astype(q.dtype), k, v))
    if num_kv_heads == 1:
        k, v = k[:, 0], v[:, 0]
    ids = None if segment_ids is None else _module("base").SegmentIds(*segment_ids)
    if _at_run_time(mask):
        seen = jnp.broadcast_to(jnp.asarray(mask.dense(q_length, kv_length))[:, 0], (len(q), q_length, kv_length))
        row: Callable[..., Any] = functools.partial(_selected, **options)
        run: Callable[..., Any] = jax.vmap(row, in_axes=(0, 0, 0, 0, 0, None))
        if options["interpret"] is True and (reason := _in_place(num_q_heads // num_kv_heads, kv_length)):
            run = forward_only(NAME, reason, run)
        result = run(seen, q, k, v, ids, sinks)
    else:
        kernel = _kernel(mask, q_length, kv_length, **options)
        result = jax.vmap(kernel, in_axes=(0, 0, 0, 0, None))(q, k, v, ids, sinks)
    if not save_residuals:
        return result.transpose(0, 2, 1, 3)
    return result[0].transpose(0, 2, 1, 3), result[1]


@functools.lru_cache(maxsize=256)
def _kernel(mask: Mask, q_length: int, kv_length: int, *, is_mqa: bool, **options: Any) -> Callable[..., Any]:
    """A kernel for one mask and shape. Cached: it holds the processed mask, and jit knows it by identity."""
    library = _module("splash_attention_kernel")
    make = library.make_splash_mqa_single_device if is_mqa else library.make_splash_mha_single_device
    allowed = lazy_mask(_module("splash_attention_mask"), mask, (q_length, kv_length))
    # Called while tracing, the arrays of the kernel must still be arrays: the next trace gets them from the cache.
    with jax.ensure_compile_time_eval():
        kernel: Callable[..., Any] = make(allowed, **_made(library, **options))
    return kernel


def _selected(
    seen: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, ids: Any, sinks: Any, *, is_mqa: bool, **options: Any
) -> Any:
    """One batch row under a mask `[T, S]` that may be traced; the kernel for it always sums dq in three arrays."""
    library = _module("splash_attention_kernel")
    make = library.make_dynamic_splash_mqa if is_mqa else library.make_dynamic_splash_mha
    return make(seen, **_made(library, **options))(q, k, v, ids, sinks)


def _made(library: ModuleType, *, soft_cap: float | None, save_residuals: bool, interpret: Any) -> dict[str, Any]:
    """What kernels of both kinds are made with: the default configuration with these options."""
    config = library.SplashConfig.get_default()
    config = dataclasses.replace(config, attn_logits_soft_cap=soft_cap, interpret=interpret)
    return {"config": config, "save_residuals": save_residuals}


def _module(name: str) -> ModuleType:
    """A module of its kernel, imported when a call needs it: it takes seconds."""
    return importlib.import_module(f"{_PACKAGE}.{name}")


def _at_run_time(mask: Mask) -> bool:
    return any(isinstance(leaf, Indexer) for leaf in leaves(mask))


def _limits(case: Case) -> str | None:
    mask = case_mask(case)
    reason = _limit(mask, case.q_length, case.kv_length)
    if reason is None and case.phase == "train" and _at_run_time(mask) and not runs_on("tpu"):
        return _in_place(case.num_q_heads // case.num_kv_heads, case.kv_length)
    return reason


def _in_place(group: int, kv_length: int) -> str | None:
    """Why gradients under a mask known at run time say nothing in the fast interpreter, or None if they do.

    There an operand that shares its array with a result does not see what was written to the result. The TPU
    interpreter (`InterpretParams`) and a TPU show it.
    """
    if group == 1 and kv_length // BLOCK <= _DQ_ARRAYS:
        return None
    return "sums gradients in place under a mask known at run time, which needs a TPU: the fast interpreter cannot"


def _limit(mask: Mask, q_length: int, kv_length: int) -> str | None:
    if reason := whole_blocks(q_length, kv_length):
        return reason
    if not (_at_run_time(mask) or mask.is_computed) and mask.dense(q_length, kv_length).shape[0] > 1:
        return "takes one mask for the whole batch, not one for each batch row (dense_batch, lengths)"
    return None


_INSTALLED = importlib.util.find_spec("tokamax") is not None

IMPLEMENTATIONS: tuple[Implementation, ...] = (
    Implementation(
        name=NAME,
        call=attention,
        description="splash attention of tokamax, backward in one fused kernel",
        unsupported=UNSUPPORTED,
        supports_case=_limits,
        arithmetic=Arithmetic(products=default_products(), scaled_q=True),
        residuals=frozenset({"logsumexp", "max_logits"}),
        differentiable_residuals=frozenset(),
        gradients=frozenset({"dq", "dk", "dv", "dsinks"}),
        empty_rows="undefined",
        accelerator=Accelerator(
            platform="tpu",
            interpreted=not runs_on("tpu"),
            absent=None if _INSTALLED else ABSENT,
            under_interpreter=(lambda parameters: functools.partial(attention, interpret=parameters))
            if _INSTALLED
            else None,
            native=functools.partial(attention, interpret=False) if _INSTALLED else None,
        ),
    ),
)
