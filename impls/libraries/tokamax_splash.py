"""Adapter of tokamax's splash attention (OpenXLA), a fork of JAX's with a fused backward pass only.

The library's kernels take the layout `[N, T, H]` without a batch axis, so the adapter maps over the batch. It uses the
MQA kernel, whose k and v have no head axis, for a single key/value head, and otherwise the MHA kernel, which supports
groups. All heads share one mask. For a traced mask the adapter builds a kernel for each batch row. The kernels have no
scale, so the adapter computes `q * scale` in f32 and rounds it to q's dtype, as the library's callers do. By default
the kernels work in base 2: they multiply q by `log2(e)` rounded to q's dtype. Their residuals are natural logarithms
and logits, and carry no gradient; `max_logits` includes the sink.

The module is private to tokamax, so the extra `upstream` pins the version that this adapter was written for, 0.0.12.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import math
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
from packaging.version import Version

from cases.case import Case
from cases.case_id import parse_case_id
from cases.masks import Indexer, Mask, iter_leaves
from impls.contract.declarations import Arithmetic
from impls.contract.implementation import Accelerator, Implementation
from impls.contract.tunable import ParameterSettings, Setting, Traffic, Tunable, TuningParameter
from impls.jax_compat import Interpret, get_default_products, resolve_interpret, runs_on
from impls.libraries.adapter_refusals import forbid_gradients, refuse_because, refuse_unsupported
from impls.libraries.mask_flags import build_case_mask
from impls.libraries.splash_masks import BLOCK, build_library_mask, find_length_limit

NAME = "tokamax_splash_tpu"
READS_ALIASED_WRITES = Version(jax.__version__) >= Version("0.11.2")
"""Whether an operand sees writes to the result that shares its array, in JAX's fast interpreter."""
UNSUPPORTED = {"bias": "takes no bias", "dense_head": "takes one mask for all heads"}
ABSENT = 'tokamax is not installed: pip install "attention-conformance[upstream]"'
_DQ_ARRAYS = 3  # Number of arrays in which dq is summed under a traced mask. Under other masks: one per key block.
_MAX_NARROW_PARTS = 4  # If dq has at most this many parts, one per key block, they have q's dtype; else f32.
_PACKAGE = "tokamax._src.ops.experimental.tpu.splash_attention"


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
    config: Any = None,
    interpret: Interpret = None,
) -> Any:
    """Implement the canonical call (`impls.contract.implementation`).

    The operands are those of `impls.contract`.

    Args:
      mask: Any mask that is the same for all heads. A static mask must also be the same for the whole batch.
      config: Block sizes, a `SplashConfig`; by default the library's default.
      interpret: As for `pallas_call`; by default true unless the process runs on a TPU.

    Raises:
      ImportError: tokamax is not installed.
    """
    others = {"segment_ids": segment_ids, "soft_cap": soft_cap, "sinks": sinks, "bias": bias, "scale": scale}
    refuse_unsupported(NAME, UNSUPPORTED, (q, k, v), mask, **others)
    q_length, num_q_heads, kv_length, num_kv_heads = *q.shape[1:3], *k.shape[1:3]
    refuse_because(NAME, _find_limit(mask, q_length, kv_length))
    options: dict[str, Any] = {
        "is_mqa": num_kv_heads == 1,
        "soft_cap": None if soft_cap is None else float(soft_cap),
        "save_residuals": save_residuals,
        "config": config,
        "interpret": resolve_interpret(interpret, "tpu"),
    }
    factor = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    q, k, v = (x.transpose(0, 2, 1, 3) for x in ((q.astype(jnp.float32) * factor).astype(q.dtype), k, v))
    if num_kv_heads == 1:
        k, v = k[:, 0], v[:, 0]
    ids = None if segment_ids is None else _load_module("base").SegmentIds(*segment_ids)
    if _is_known_at_run_time(mask):
        seen = jnp.broadcast_to(jnp.asarray(mask.dense(q_length, kv_length))[:, 0], (len(q), q_length, kv_length))
        row: Callable[..., Any] = functools.partial(_attend_selected, **options)
        run: Callable[..., Any] = jax.vmap(row, in_axes=(0, 0, 0, 0, 0, None))
        if options["interpret"] is True and (reason := _find_in_place_limit(num_q_heads // num_kv_heads, kv_length)):
            run = forbid_gradients(NAME, reason, run)
        result = run(seen, q, k, v, ids, sinks)
    else:
        kernel = _build_kernel(mask, q_length, kv_length, **options)
        result = jax.vmap(kernel, in_axes=(0, 0, 0, 0, None))(q, k, v, ids, sinks)
    if not save_residuals:
        return result.transpose(0, 2, 1, 3)
    return result[0].transpose(0, 2, 1, 3), result[1]


@functools.lru_cache(maxsize=256)
def _build_kernel(mask: Mask, q_length: int, kv_length: int, *, is_mqa: bool, **options: Any) -> Callable[..., Any]:
    """Build a kernel for one mask and shape. Cached, since it holds the processed mask and jit compares by identity."""
    library = _load_module("splash_attention_kernel")
    make = library.make_splash_mqa_single_device if is_mqa else library.make_splash_mha_single_device
    allowed = build_library_mask(_load_module("splash_attention_mask"), mask, (q_length, kv_length))
    # The kernel's arrays must not be tracers, even if built while tracing: later traces get them from the cache.
    with jax.ensure_compile_time_eval():
        kernel: Callable[..., Any] = make(allowed, **_build_options(library, **options))
    return kernel


def _attend_selected(
    seen: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, ids: Any, sinks: Any, *, is_mqa: bool, **options: Any
) -> Any:
    """Attend in one batch row under a mask `[T, S]` that may be traced. Its kernel always sums dq in three arrays."""
    library = _load_module("splash_attention_kernel")
    make = library.make_dynamic_splash_mqa if is_mqa else library.make_dynamic_splash_mha
    return make(seen, **_build_options(library, **options))(q, k, v, ids, sinks)


def _build_options(
    library: ModuleType, *, soft_cap: float | None, save_residuals: bool, config: Any, interpret: Interpret
) -> dict[str, Any]:
    """Build the options of both kinds of kernels: a config with soft cap and interpreter, and the residuals."""
    config = dataclasses.replace(
        config or library.SplashConfig.get_default(), attn_logits_soft_cap=soft_cap, interpret=interpret
    )
    return {"config": config, "save_residuals": save_residuals}


def _load_module(name: str) -> ModuleType:
    """Load a module of the library when a call needs it: importing takes seconds."""
    return importlib.import_module(f"{_PACKAGE}.{name}")


def _is_known_at_run_time(mask: Mask) -> bool:
    return any(isinstance(leaf, Indexer) for leaf in iter_leaves(mask))


def _find_case_limit(case: Case) -> str | None:
    mask = build_case_mask(case)
    reason = _find_limit(mask, case.q_length, case.kv_length)
    if reason is None and case.phase == "train" and _is_known_at_run_time(mask) and not runs_on("tpu"):
        return _find_in_place_limit(case.num_q_heads // case.num_kv_heads, case.kv_length)
    return reason


def _find_in_place_limit(group: int, kv_length: int) -> str | None:
    """Return why gradients under a traced mask are meaningless in the fast interpreter, or None if they are not.

    The kernel sums dq in an operand that shares its array with a result. On a TPU and in the TPU interpreter
    (`InterpretParams`) the operand sees writes to the result. In the fast interpreter that depends on the version.
    """
    if READS_ALIASED_WRITES or (group == 1 and kv_length // BLOCK <= _DQ_ARRAYS):
        return None
    return "sums gradients in place under a mask known at run time, which needs a TPU, or jax 0.11.2 to interpret it"


def _find_limit(mask: Mask, q_length: int, kv_length: int) -> str | None:
    if reason := find_length_limit(q_length, kv_length):
        return reason
    if not (_is_known_at_run_time(mask) or mask.is_computed) and mask.dense(q_length, kv_length).shape[0] > 1:
        return "takes one mask for the whole batch, not one for each batch row (dense_batch, lengths)"
    return None


def _build_tunable() -> Tunable:
    """Describe to the tuner the blocks of both kernels, and whether dq has three arrays or one per key block."""

    def call(settings: ParameterSettings, **options: Any) -> Callable[..., Any]:
        forward, fused = settings["forward"], settings["fused"]
        config = _load_module("splash_attention_kernel").SplashConfig(
            block_q=forward["q"],
            block_kv=forward["kv"],
            block_kv_compute=forward["kv_compute"],
            block_q_dkv=fused["q"],
            block_kv_dkv=fused["kv"],
            block_kv_dkv_compute=fused["kv_compute"],
            dq_reduction_steps=fused["dq_arrays"] or None,
        )
        return functools.partial(attention, config=config, **options)

    def candidates(case: Case, rows: tuple[Setting, ...]) -> Iterator[Setting]:
        return (row for row in rows if case.q_length % row["q"] == 0 and case.kv_length % row["kv"] == 0)

    return Tunable(
        parameters=(
            TuningParameter(
                name="forward",
                phase="forward",
                candidates=functools.partial(candidates, rows=_FORWARD_CANDIDATES),
                kernel="residuals",  # end of the kernel's name with residuals, which gradients need
            ),
            TuningParameter(
                name="fused",
                phase="forward+backward",
                candidates=functools.partial(candidates, rows=_FUSED_CANDIDATES),
                kernel="_dkv_no_residuals",
                traffic=_estimate_traffic,
            ),
        ),
        settings=lambda case: {"forward": _DEFAULT_BLOCKS, "fused": {**_DEFAULT_BLOCKS, "dq_arrays": 0}},
        call=call,
        native=functools.partial(call, interpret=False),
        key=lambda case: {"kv_length": case.kv_length},
        cases=lambda: (parse_case_id("train/bf16/B1.T8192.S8192.N1.K1.H128.V128/causal/normal/s0"),),
    )


def _estimate_traffic(case: Case, setting: Setting) -> Traffic:
    """Estimate the HBM traffic of dq: its parts are read, and their sum is written. Three arrays are first cleared."""
    itemsize = 4 if case.dtype == "f32" else 2
    elements = case.batch * case.num_q_heads * case.q_length * case.head_dim
    if setting["dq_arrays"]:
        return Traffic(beside=(2 * _DQ_ARRAYS + 1) * elements * itemsize)
    parts = case.kv_length // setting["kv"]
    return Traffic(beside=elements * (parts * (itemsize if parts <= _MAX_NARROW_PARTS else 4) + itemsize))


def _build_blocks(q: int, kv: int, kv_compute: int) -> dict[str, int]:
    return {"q": q, "kv": kv, "kv_compute": kv_compute}


_DEFAULT_BLOCKS = _build_blocks(128, 128, 128)
_FORWARD_CANDIDATES = (
    _build_blocks(512, 512, 512),
    _build_blocks(1024, 1024, 512),
    _build_blocks(1024, 1024, 1024),
    _build_blocks(1024, 2048, 512),
    _build_blocks(2048, 2048, 512),
)
_FUSED_CANDIDATES = (
    {**_build_blocks(1024, 1024, 1024), "dq_arrays": 0},
    {**_build_blocks(1024, 1024, 1024), "dq_arrays": _DQ_ARRAYS},
    {**_build_blocks(2048, 2048, 512), "dq_arrays": _DQ_ARRAYS},
)
_IS_INSTALLED = importlib.util.find_spec("tokamax") is not None

IMPLEMENTATIONS: tuple[Implementation, ...] = (
    Implementation(
        name=NAME,
        call=attention,
        description="splash attention of tokamax, backward in one fused kernel",
        unsupported=UNSUPPORTED,
        supports_case=_find_case_limit,
        arithmetic=Arithmetic(products=get_default_products(), scaled_q=True),
        residuals=frozenset({"logsumexp", "max_logits"}),
        differentiable_residuals=frozenset(),
        gradients=frozenset({"dq", "dk", "dv", "dsinks"}),
        empty_rows="undefined",
        accelerator=Accelerator(
            platform="tpu",
            interpreted=not runs_on("tpu"),
            absent=None if _IS_INSTALLED else ABSENT,
            under_interpreter=(lambda parameters: functools.partial(attention, interpret=parameters))
            if _IS_INSTALLED
            else None,
            native=functools.partial(attention, interpret=False) if _IS_INSTALLED else None,
        ),
        tunable=_build_tunable(),
    ),
)
