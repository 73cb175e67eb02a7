"""Attention over a paged cache: the public call, the validation of its operands, and the choice of a back end."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int, Shaped

from impls import softmax_merge
from impls.contract.implementation import FLOATS
from impls.jax_compat import Interpret, resolve_interpret
from impls.paged import paged_gpu, paged_portable, paged_tpu
from impls.paged.page_copies import check_page_scales, choose_block_kv, choose_block_q
from impls.paged.paged_plan import Operands, PagedPlan, PageScales
from impls.pallas_gpu.mosaic_decode import TILE_KEYS, find_decode_limit
from impls.pallas_gpu.triton_tiles import MIN_TILE
from impls.softmax_merge import Part

Backend = Literal["portable", "tpu", "gpu", "mosaic"]
SCALED_DTYPES = ("int8", "float8_e4m3fn")
"""Dtypes of pages that need scales."""
BLOCK_Q = 32
"""Default queries per tile: the pages of a prompt are read once for this many of its queries."""
BLOCK_KV = 256
"""Default number of keys that are read together, in whole pages.

`BLOCK_Q` and `BLOCK_KV` are reasoned, not measured. On a TPU the defaults follow from its memory instead
(`impls.paged.page_copies`).
"""
BLOCK_KV_GPU = 64
"""Default number of keys that are read together on a GPU, even where a page ends between them.

It is the number that Triton pipelines in shared memory: reasoned, not measured.
"""


def attention(
    q: Shaped[Array, "total_q N H"],
    k_pages: Shaped[Array, "pages page_size K H"],
    v_pages: Shaped[Array, "pages page_size K V"],
    *,
    kv_lens: Int[Array, " max_seqs"],
    page_indices: Int[Array, "max_seqs pages_per_seq"],
    cu_q_lens: Int[Array, " max_seqs+1"],
    num_seqs: Int[Array, "1"],
    k_scales: Float32[Array, "pages page_size K"] | None = None,
    v_scales: Float32[Array, "pages page_size K"] | None = None,
    page_scales: Float32[Array, "pages page_size W"] | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    q_scale: float | None = None,
    out_dtype: Any = None,
    stored: tuple[PageScales, PageScales] | None = None,
    causal: bool = True,
    window: tuple[int | None, int | None] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    mask: Bool[Array, "total_q S"] | None = None,
    tree_mask: Bool[Array, "total_q W"] | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    alibi_slopes: Float32[Array, " N"] | None = None,
    score_mod: Callable[..., Any] | None = None,
    logit_scale: Float32[Array, " N"] | None = None,
    scale: float | None = None,
    save_residuals: bool = False,
    backend: Backend = "portable",
    block_q: int | None = None,
    block_kv: int | None = None,
    num_programs: int | None = None,
    interpret: Interpret = None,
) -> Any:
    """Compute softmax attention of packed queries over a paged cache (docs/contract.md, section 8).

    Query `i` of sequence `b` is at position `kv_lens[b] - q_len + i`, and key `j` is row `j % page_size` of page
    `page_indices[b, j // page_size]`.

    The operands and results are those of paged calls in the contract (docs/contract.md, section 8).

    The Mosaic GPU kernel takes no masks but causal ones and windows, and no ALiBi, score function or logit scale.

    Args:
      page_scales: only on a TPU, in place of `k_scales` and `v_scales`: both in one array, in the layout of
        `impls.paged.page_copies.side_by_side`, f32 `[pages, page_size, W]`.
      q_scale: the scale of queries in float8_e4m3fn, a number.
      out_dtype: the dtype of `out` for such queries, bfloat16 by default.
      stored: other scales of keys and of values, in plain JAX only (`impls.paged.quantized_pages` builds them).
      backend: `"portable"` JAX, or a Pallas kernel for `"tpu"` or `"gpu"`. `"mosaic"` is a GPU kernel for Hopper only,
        which no chip has measured.
      block_q: queries per tile; by default chosen for the back end.
      block_kv: keys that are read together, rounded up to whole pages; for a GPU a power of two of at least 16, and 64
        with `"mosaic"`.
      num_programs: number of GPU programs per key/value head, which share the keys of all sequences; by default as many
        as fill the GPU.
      interpret: as `pallas_call` takes it; by default true unless the process runs on the back end's platform.

    Raises:
      ValueError: an operand or an option is invalid; the message names it.
      NotImplementedError: differentiation, float16 on a TPU or functions of places that capture arrays there, scales in
        a layout that the back end does not read, with `"mosaic"` scales of tokens, or a GPU, dtype, depth or page size
        that it does not support.
    """
    q, scale = widen_queries(q, q_scale, scale, out_dtype)
    check_paged_operands(
        q,
        k_pages,
        v_pages,
        sinks,
        window,
        block_q,
        block_kv,
        scales=(k_scales, v_scales),
        page_scales=page_scales,
        of_all=(k_scale, v_scale),
        stored=stored,
    )
    check_tables(kv_lens, page_indices, cu_q_lens, num_seqs)
    left, right = (None, None) if window is None else window
    right = 0 if causal else right
    further = {"mask": mask, "tree_mask": tree_mask, "alibi_slopes": alibi_slopes, "logit_scale": logit_scale}
    _check_further(q, further)
    if stored is not None and backend != "portable":
        raise NotImplementedError(f"paged with backend={backend!r} does not support these scales: take 'portable'")
    if backend == "mosaic":
        _refuse_further(right, {**further, "mask_mod": mask_mod, "score_mod": score_mod})
    _check_backend(backend, block_kv, num_programs)
    if backend == "tpu":
        _refuse_captures(mask_mod, score_mod)
    page_size, num_kv_heads = k_pages.shape[1:3]
    _refuse_scales(backend, k_scales, page_scales, k_scale)
    if backend == "tpu":
        refuse_f16(q)
        columns = sum(0 if x is None else x.shape[1] for x in (mask, tree_mask))
        pairwise = any(x is not None for x in (mask_mod, score_mod, *further.values()))
        block_q = block_q or choose_block_q(*q.shape[:2], pairwise=pairwise, columns=columns)
        block_kv = block_kv or choose_block_kv(num_kv_heads, (q.shape[2], v_pages.shape[3]), q.dtype.itemsize)
    on_gpu = backend in ("gpu", "mosaic")
    if on_gpu:
        block_q = block_q or paged_gpu.choose_block_q(q.shape[0], len(kv_lens), q.shape[1] // num_kv_heads)
        block_kv = block_kv or BLOCK_KV_GPU
    block_q, block_kv = block_q or BLOCK_Q, block_kv or BLOCK_KV
    block_pages = -(-block_kv // page_size)
    if backend != "portable":  # products of one shape in all calls keep the portable kernel batch-invariant
        block_q, block_pages = min(block_q, q.shape[0]), min(block_pages, page_indices.shape[1])
    plan = PagedPlan(
        left=left,
        right=right,
        scale=(1 / math.sqrt(q.shape[2]) if scale is None else float(scale)) * (1.0 if k_scale is None else k_scale),
        soft_cap=None if soft_cap is None else float(soft_cap),
        block_q=block_q,
        block_pages=block_pages,
        block_keys=block_kv if on_gpu else 0,
        programs=num_programs,
        mask_mod=mask_mod,
        score_mod=score_mod,
    )
    resolved = resolve_interpret(interpret, "gpu" if on_gpu else backend)
    if backend == "mosaic":
        _refuse_mosaic(plan, resolved, q, k_pages, v_pages)
    tables = (jnp.asarray(x, jnp.int32) for x in (kv_lens, page_indices, cu_q_lens, num_seqs))
    scales = (None if x is None else jnp.asarray(x) for x in (k_scales, v_scales, page_scales))
    arrays = {name: jnp.asarray(x) for name, x in further.items() if x is not None}
    of_pages = (None, None) if stored is None else stored
    operands = Operands(
        jnp.asarray(q), jnp.asarray(k_pages), jnp.asarray(v_pages), *tables, *scales, *of_pages, **arrays
    )
    return compute_results(
        plan,
        backend,
        resolved,
        operands,
        sinks,
        save_residuals=save_residuals,
        v_scale=1.0 if v_scale is None else v_scale,
    )


def widen_queries(q: Any, q_scale: float | None, scale: float | None, out_dtype: Any) -> tuple[Any, float | None]:
    """Return queries in the dtype of `out`, which holds fp8 numbers exactly, and the scale of logits with theirs."""
    if q_scale is None:
        return q, scale
    if q.dtype != jnp.float8_e4m3fn:
        raise ValueError(f"q must be float8_e4m3fn with q_scale, got {q.dtype}")
    wide = jnp.asarray(q).astype(jnp.bfloat16 if out_dtype is None else out_dtype)
    return wide, (1 / math.sqrt(q.shape[2]) if scale is None else float(scale)) * q_scale


def compute_results(
    plan: PagedPlan,
    backend: Backend,
    interpret: Interpret,
    operands: Operands,
    sinks: Any,
    *,
    save_residuals: bool,
    v_scale: float = 1.0,
) -> Any:
    """Compute the results of the public call from validated operands; values are `v_scale` times the stored ones."""
    part = _attend(plan, backend, interpret, operands)
    if v_scale != 1.0:
        part = part._replace(out=part.out * jnp.float32(v_scale))
    every = part if sinks is None else softmax_merge.merge([part, softmax_merge.build_sink_part(jnp.asarray(sinks))])
    found = softmax_merge.normalise(every)
    out = found.out.astype(operands.q.dtype)
    if not save_residuals:
        return out
    return out, {"logsumexp": found.logsumexp, "max_logits": part.max[..., 0]}


def check_paged_operands(
    q: Any,
    k: Any,
    v: Any,
    sinks: Any,
    window: Any,
    *blocks: int | None,
    scales: tuple[Any, Any] = (None, None),
    page_scales: Any = None,
    of_all: tuple[Any, Any] = (None, None),
    stored: tuple[PageScales, PageScales] | None = None,
) -> None:
    """Raise `ValueError` if an operand or option of `attention` is invalid; the message names it. k and v are pages."""
    for name, x, axes in (
        ("q", q, "[total_q, heads, depth]"),
        ("k_pages", k, "[pages, page_size, heads, depth]"),
        ("v_pages", v, "[pages, page_size, heads, depth]"),
    ):
        if x.ndim != axes.count(",") + 1 or 0 in x.shape:
            raise ValueError(f"{name} must have the axes {axes}, none of them of size 0, got shape {x.shape}")
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(f"k_pages and v_pages must agree in pages, page size and heads, got {k.shape} and {v.shape}")
    if q.shape[2] != k.shape[3]:
        raise ValueError(f"k_pages has head_dim {k.shape[3]}, q has {q.shape[2]}: they must be equal")
    if q.shape[1] % k.shape[2]:
        raise ValueError(f"q has {q.shape[1]} heads, which must be a multiple of the {k.shape[2]} heads of the pages")
    if str(q.dtype) not in FLOATS:
        raise ValueError(f"q must have a dtype of {FLOATS}, got {q.dtype}: cast with astype")
    if stored is not None:  # validated where they were built
        pass
    elif any(x is not None for x in of_all):
        _check_stored_dtypes(k, v)
        _check_whole_scales(of_all, (*scales, page_scales))
    elif page_scales is not None:
        _check_stored_dtypes(k, v)
        check_page_scales(page_scales, k)
    elif any(x is not None for x in scales):
        _check_stored_dtypes(k, v)
        _check_scales(k, *scales)
    elif not q.dtype == k.dtype == v.dtype:
        also = "" if str(k.dtype) not in SCALED_DTYPES else ", or k_scales and v_scales, f32 [pages, page_size, heads]"
        raise ValueError(f"q and pages must have one dtype of {FLOATS}, got {q.dtype}, {k.dtype} and {v.dtype}{also}")
    check_options(q.shape[1], sinks, window, *blocks)


def _check_further(q: Any, further: Mapping[str, Any]) -> None:
    """Raise `ValueError` for a mask or an operand of heads of a wrong shape or dtype."""
    for name, x in further.items():
        if x is None:
            continue
        if name in ("mask", "tree_mask"):
            if x.ndim != 2 or x.shape[0] != q.shape[0] or 0 in x.shape or x.dtype != jnp.bool_:
                raise ValueError(f"{name} must be booleans [{q.shape[0]}, keys], got {x.dtype} {list(x.shape)}")
        elif x.shape != (q.shape[1],):
            raise ValueError(f"{name} must have shape {(q.shape[1],)}, one number a query head, got {x.shape}")


def _refuse_further(right: int | None, given: Mapping[str, Any]) -> None:
    """Raise `NotImplementedError` for a mask or operand that the Mosaic GPU kernel lacks."""
    refused = [name for name, x in given.items() if x is not None] + ["causal=False"] * (right != 0)
    if refused:
        raise NotImplementedError(f"paged supports {refused[0]} with backend='portable', 'gpu' and 'tpu' only")


def _refuse_captures(mask_mod: Callable[..., Any] | None, score_mod: Callable[..., Any] | None) -> None:
    """Raise `NotImplementedError` for a function of places that captures an array, which a TPU kernel cannot read."""
    sequence, place = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((), (8, 128)))
    score = jax.ShapeDtypeStruct(place.shape, jnp.float32)
    for name, function, operands, remedy in (
        ("mask_mod", mask_mod, (), "pass the array as mask"),
        ("score_mod", score_mod, (score,), "compute the score from places, or pass alibi_slopes or logit_scale"),
    ):
        if function is None:
            continue
        if any(jnp.ndim(x) for x in jax.make_jaxpr(function)(*operands, sequence, *[place] * 3).consts):
            raise NotImplementedError(f"paged on a TPU does not support a {name} that captures an array: {remedy}")


def _check_stored_dtypes(k: Any, v: Any) -> None:
    if not (k.dtype == v.dtype and str(k.dtype) in SCALED_DTYPES):
        raise ValueError(
            f"k_pages and v_pages must have one dtype of {SCALED_DTYPES} with scales, got {k.dtype} and {v.dtype}: "
            "quantise them, or leave k_scales and v_scales out"
        )


def _check_scales(k: Any, k_scales: Any, v_scales: Any) -> None:
    for name, x in (("k_scales", k_scales), ("v_scales", v_scales)):
        if x is None:
            raise ValueError(f"{name} must be given like the other scales, f32 {list(k.shape[:3])}, got none")
        if x.shape != k.shape[:3]:
            raise ValueError(
                f"{name} must have shape {k.shape[:3]}, one for each row of a page and head, got {x.shape}"
            )
        if x.dtype != jnp.float32:
            raise ValueError(f"{name} must be float32, got {x.dtype}: cast with astype")


def _check_whole_scales(of_all: tuple[Any, Any], others: tuple[Any, ...]) -> None:
    for name, x in zip(("k_scale", "v_scale"), of_all, strict=True):
        if not isinstance(x, int | float):
            raise ValueError(f"{name} must be a number that is known before tracing, like the other scale, got {x!r}")
    if any(x is not None for x in others):
        raise ValueError("k_scale and v_scale must be the only scales: leave out k_scales, v_scales and page_scales")


def check_options(num_q_heads: int, sinks: Any, window: Any, *blocks: int | None) -> None:
    """Raise `ValueError` if an option of a call over pages is invalid; the message names it."""
    if sinks is not None and sinks.shape != (num_q_heads,):
        raise ValueError(f"sinks must have shape {(num_q_heads,)}, one logit a query head, got {sinks.shape}")
    if window is not None and any(side is not None and side < 0 for side in window):
        raise ValueError(f"window must be (left, right), each at least 0 or None, got {window}")
    for name, size in zip(("block_q", "block_kv"), blocks, strict=True):
        if size is not None and size <= 0:
            raise ValueError(f"{name} must be positive, got {size}")


def refuse_f16(q: Any) -> None:
    """Raise `NotImplementedError` for float16 operands on a TPU."""
    if q.dtype == jnp.float16:
        raise NotImplementedError("paged on a TPU does not support f16: the matrix unit multiplies no float16")


def check_tables(kv_lens: Any, page_indices: Any, cu_q_lens: Any, num_seqs: Any) -> None:
    """Validate the tables of a call. Raises `ValueError`, which names a table of invalid shape or dtype."""
    most = kv_lens.shape[0]
    if page_indices.ndim != 2 or page_indices.shape[0] != most or 0 in page_indices.shape:
        raise ValueError(f"page_indices must have shape ({most}, pages_per_seq), got {page_indices.shape}")
    for name, x, shape in (
        ("kv_lens", kv_lens, (most,)),
        ("cu_q_lens", cu_q_lens, (most + 1,)),
        ("num_seqs", num_seqs, (1,)),
    ):
        if x.shape != shape:
            raise ValueError(f"{name} must have shape {shape}, got {x.shape}")
    for name, x in (("kv_lens", kv_lens), ("page_indices", page_indices), ("cu_q_lens", cu_q_lens)):
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise ValueError(f"{name} must be integers, got {x.dtype}")


def _check_backend(backend: Backend, block_kv: int | None, num_programs: int | None) -> None:
    if backend not in get_args(Backend):
        raise ValueError(f"backend must be one of {', '.join(get_args(Backend))}, got {backend!r}")
    if backend == "gpu" and block_kv is not None and (block_kv < MIN_TILE or block_kv & (block_kv - 1)):
        raise ValueError(f"block_kv must be a power of two of at least {MIN_TILE} on a GPU, got {block_kv}")
    if backend == "mosaic" and block_kv not in (None, TILE_KEYS):
        raise ValueError(f"block_kv must be {TILE_KEYS} for backend 'mosaic', got {block_kv}")
    if num_programs is not None and num_programs <= 0:
        raise ValueError(f"num_programs must be positive or None (automatic), got {num_programs}")


def _refuse_scales(backend: Backend, k_scales: Any, page_scales: Any, k_scale: Any) -> None:
    """Raise `NotImplementedError` for scales in a layout that the back end does not read."""
    if backend == "tpu" and k_scales is not None:
        raise NotImplementedError("paged on a TPU does not support k_scales: take page_scales=side_by_side(...)")
    if backend == "mosaic" and any(x is not None for x in (k_scales, page_scales)):
        raise NotImplementedError(
            "paged with backend='mosaic' does not support k_scales and page_scales: give k_scale and v_scale, one "
            "number for all, or take backend='portable'"
        )
    if backend in ("portable", "gpu") and page_scales is not None:
        raise NotImplementedError("paged supports page_scales on a TPU only: give k_scales and v_scales")


def _refuse_mosaic(plan: PagedPlan, interpret: Interpret, q: Any, k_pages: Any, v_pages: Any) -> None:
    """Raise `NotImplementedError` if the Mosaic GPU kernel does not support the call or the GPU."""
    page_size, num_kv_heads, depth = k_pages.shape[1:]
    rows = plan.block_q * min(q.shape[1] // num_kv_heads, paged_gpu.MAX_ROWS)
    limit = find_decode_limit(interpret, q.dtype, depth, v_pages.shape[3], page_size, rows)
    if limit is not None:
        raise NotImplementedError(f"paged does not support backend='mosaic' for {limit}; take backend='gpu'")


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _run_backend(plan: PagedPlan, backend: Backend, interpret: Interpret, operands: Operands) -> Part:
    if backend == "portable":
        return paged_portable.attend(plan, operands)
    if backend == "tpu":
        return paged_tpu.attend(plan, operands, interpret=interpret)
    return paged_gpu.attend(plan, operands, interpret=interpret, mosaic=backend == "mosaic")


@_run_backend.defjvp
def _refuse_derivative(plan: PagedPlan, backend: Backend, interpret: Interpret, primals: Any, tangents: Any) -> Any:
    raise NotImplementedError("paged does not support train: pages are read and pass no gradient")


# Jitted so that calls outside `jit` compile once for each plan, not once for each call.
_attend = jax.jit(_run_backend, static_argnums=(0, 1, 2))
