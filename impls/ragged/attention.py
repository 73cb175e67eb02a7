"""Decode attention over a padded cache: the public calls, the validation of operands, and the choice of a back end."""

from __future__ import annotations

import functools
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from cases.masks import Full, Mask
from impls import softmax_merge
from impls.contract.implementation import validate_mask, validate_operands
from impls.explicit_sharding import accept_explicit_sharding
from impls.jax_compat import Interpret, resolve_interpret
from impls.pallas_gpu.mosaic_decode import TILE_KEYS
from impls.pallas_gpu.triton_tiles import MIN_TILE
from impls.ragged import ragged_gpu, ragged_mosaic, ragged_portable, ragged_tpu
from impls.ragged.ragged_plan import Operands, RaggedPlan, flatten_queries, lower_lengths, restore_queries
from impls.softmax_merge import Part

Backend = Literal["portable", "tpu", "gpu", "mosaic"]
DEFAULT_BLOCKS = {"portable": 256, "tpu": 512, "gpu": 64, "mosaic": TILE_KEYS}
"""Default number of keys per block, by back end.

On a TPU, 512 keys of depth 128 are 128 KiB in bf16. To fetch them takes longer than to start a step. With 1,024 and
2,048 keys, fewer heads fit a step; by the compiler's schedule the time per key is the same within 3% on v6e and 7x. On
a GPU, 64 keys are what Triton pipelines in shared memory: reasoned, not measured.
"""

UNSUPPORTED = {
    "train": "decode attention passes no gradient",
    "segment_ids": "sequences of a cache are batch rows",
    "bias": "takes no bias",
    "dense": "queries see one run of keys",
    "dense_head": "queries see one run of keys",
    "dense_batch": "queries see one run of keys",
    "indexer": "queries see one run of keys",
    "bidirectional": "queries see one run of keys",
    "balanced": "queries are consecutive tokens",
}


class BackendOptions(NamedTuple):
    """Options of a call that select and configure its back end."""

    backend: Backend
    block_kv: int
    num_splits: int | None
    interpret: Interpret


@accept_explicit_sharding
def compute_parts(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K V"],
    *,
    mask: Mask = Full(),
    lengths: Any = None,
    positions: Any = None,
    segment_ids: Any = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    bias: Any = None,
    scale: float | None = None,
    backend: Backend = "portable",
    block_kv: int | None = None,
    num_splits: int | None = None,
    interpret: Interpret = None,
) -> Part:
    """Attend from a few query tokens to a padded cache, without normalising (docs/contract.md, section 4).

    `out / sum` is attention over the keys that exist, and parts over disjoint sets of keys merge with
    `impls.softmax_merge`: for example a prompt's cache with the cache of the generated tokens, or the shares of a cache
    on several devices. Blocks that hold no key that a query sees are neither fetched nor computed.

    Query token `t` of batch row `b` is at position `positions[b] + t`, and sees key `j` if `j < lengths[b]` and `mask`
    allows it at that position.

    Other operands are those of the contract (docs/contract.md, section 1); there are no segment ids and no bias.

    Args:
      q: queries `[B, T, N, H]`, T of 1 or a few: draft tokens, or a chunk of a prompt.
      mask: Causal, Window, Chunked, Lengths, Full and their conjunctions; OwnWindow with Lengths.
      lengths: int32 `[B]`, number of keys that exist, 0 to S; by default S. If traced, it is clipped to 0 to S.
      positions: int32 `[B]`, position of the first query among the keys; by default 0, so that an offset of the mask is
        the position. For a window that moves with each sequence, pass `lengths - T`; an OwnWindow mask implies it.
      sinks: `[N]`, an additional logit in the sum of each query head; give them to only one of the parts of a merge.
      backend: `"portable"` JAX, or a Pallas kernel for `"tpu"` or `"gpu"`. `"mosaic"` is a GPU kernel for Hopper only,
        which no chip has measured.
      block_kv: keys per block, by default `DEFAULT_BLOCKS`; always 64 with `"mosaic"`.
      num_splits: number of GPU programs that share the keys of a sequence; by default as many as fill the GPU.
      interpret: as `pallas_call` takes it; by default true unless the process runs on the back end's platform.

    Returns:
      f32 `out [B, T, N, V]`, `max [B, T, N, 1]`, `sum [B, T, N, 1]`; zero, -inf and zero where there is no key.

    Raises:
      ValueError: an operand, the mask or an option is invalid; the message names it.
      NotImplementedError: an operand that is refused, another mask or dtype, too many query tokens for the back end, or
        differentiation.
    """
    chosen = BackendOptions(*_check_options(backend, block_kv, num_splits), interpret=interpret)
    validate_operands(q, k, v, soft_cap=soft_cap, sinks=sinks, scale=scale)
    _refuse_unsupported(q, k, v, segment_ids, bias, chosen)
    batch, q_length, num_q_heads, head_dim = q.shape
    kv_length, num_kv_heads = k.shape[1:3]
    validate_mask(mask, batch, num_q_heads, q_length, kv_length, offers=("own_window",))
    formula, own_lengths, own_positions = lower_lengths(mask, batch, kv_length)
    given = _check_vector("lengths", lengths, batch, highest=kv_length)
    moved = _check_vector("positions", positions, batch, highest=None)
    plan = RaggedPlan(
        mask=formula,
        q_length=q_length,
        group=num_q_heads // num_kv_heads,
        kv_length=kv_length,
        scale=1 / math.sqrt(head_dim) if scale is None else float(scale),
        soft_cap=None if soft_cap is None else float(soft_cap),
    )
    whole_lengths = jnp.broadcast_to(jnp.asarray(own_lengths), (batch,))
    last_positions = jnp.broadcast_to(jnp.asarray(own_positions), (batch,))
    operands = Operands(
        q=flatten_queries(jnp.asarray(q), num_kv_heads),
        k=jnp.asarray(k),
        v=jnp.asarray(v),
        lengths=whole_lengths if given is None else jnp.minimum(given, whole_lengths),
        positions=last_positions if moved is None else moved + last_positions,
    )
    part = restore_queries(_attend(plan, chosen, operands), q_length)
    return part if sinks is None else softmax_merge.merge([part, softmax_merge.build_sink_part(jnp.asarray(sinks))])


@accept_explicit_sharding
def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K V"],
    *,
    mask: Mask = Full(),
    lengths: Any = None,
    positions: Any = None,
    segment_ids: Any = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    bias: Any = None,
    scale: float | None = None,
    save_residuals: bool = False,
    backend: Backend = "portable",
    block_kv: int | None = None,
    num_splits: int | None = None,
    interpret: Interpret = None,
) -> Any:
    """Compute softmax attention of a few query tokens over a padded cache: `compute_parts`, normalised.

    Arguments and exceptions are those of `compute_parts`, results those of the contract (docs/contract.md, section 1).

    Raises:
      ValueError: as for `compute_parts`.
      NotImplementedError: as for `compute_parts`.
    """
    validate_operands(q, k, v, sinks=sinks)  # `compute_parts` gets no sinks, since `max_logits` excludes them
    part = compute_parts(
        q,
        k,
        v,
        mask=mask,
        lengths=lengths,
        positions=positions,
        segment_ids=segment_ids,
        soft_cap=soft_cap,
        bias=bias,
        scale=scale,
        backend=backend,
        block_kv=block_kv,
        num_splits=num_splits,
        interpret=interpret,
    )
    every = part if sinks is None else softmax_merge.merge([part, softmax_merge.build_sink_part(jnp.asarray(sinks))])
    found = softmax_merge.normalise(every)
    out = found.out.astype(q.dtype)
    if not save_residuals:
        return out
    return out, {"logsumexp": found.logsumexp.swapaxes(1, 2), "max_logits": part.max[..., 0].swapaxes(1, 2)}


def _check_options(backend: Backend, block_kv: int | None, num_splits: int | None) -> tuple[Backend, int, int | None]:
    if backend not in DEFAULT_BLOCKS:
        raise ValueError(f"backend must be one of {', '.join(DEFAULT_BLOCKS)}, got {backend!r}")
    block = DEFAULT_BLOCKS[backend] if block_kv is None else block_kv
    step = {"portable": 1, "tpu": ragged_tpu.SUBLANES, "gpu": MIN_TILE, "mosaic": TILE_KEYS}[backend]
    if block <= 0 or block % step:
        raise ValueError(f"block_kv must be a positive multiple of {step} for backend {backend!r}, got {block}")
    if backend == "gpu" and block & (block - 1):
        raise ValueError(f"block_kv must be a power of two for backend 'gpu', got {block}")
    if backend == "mosaic" and block != TILE_KEYS:
        raise ValueError(f"block_kv must be {TILE_KEYS} for backend 'mosaic', got {block}")
    if num_splits is not None and num_splits <= 0:
        raise ValueError(f"num_splits must be positive or None (automatic), got {num_splits}")
    return backend, block, num_splits


def _refuse_unsupported(q: Any, k: Any, v: Any, segment_ids: Any, bias: Any, options: BackendOptions) -> None:
    """Raise `NotImplementedError` for operands that the back end does not support."""
    for name, operand in (("segment_ids", segment_ids), ("bias", bias)):
        if operand is not None:
            raise NotImplementedError(f"ragged does not support {name}: {UNSUPPORTED[name]}")
    dtypes = ("float32", "bfloat16") if options.backend == "tpu" else ("float32", "bfloat16", "float16")
    if str(q.dtype) not in dtypes:
        raise NotImplementedError(
            f"ragged does not support q, k and v in {q.dtype} with backend {options.backend!r}, "
            f"only in {', '.join(dtypes)}"
        )
    if options.backend != "portable" and not isinstance(q.shape[0], int):
        raise NotImplementedError(
            f"ragged does not support a batch size that is left open (jax.export) with backend {options.backend!r}, "
            f"whose steps are listed for each sequence: export for one batch size, or take backend='portable'"
        )
    if options.backend == "mosaic":
        interpret = resolve_interpret(options.interpret, "gpu")
        limit = ragged_mosaic.find_misfit(interpret, q.dtype, q.shape[3], v.shape[3], k.shape[1])
        if limit is not None:
            raise NotImplementedError(f"ragged does not support backend='mosaic' for {limit}; take backend='gpu'")
    if options.backend == "tpu":
        rows = q.shape[1] * q.shape[2] // k.shape[2]
        if rows > ragged_tpu.MAX_ROWS:
            raise NotImplementedError(
                f"ragged does not support {rows} rows (query tokens times query heads a key/value head) with backend "
                f"'tpu', at most {ragged_tpu.MAX_ROWS}: cut the queries in chunks"
            )


def _check_vector(name: str, values: Any, batch: int, *, highest: int | None) -> jax.Array | None:
    """Convert lengths or positions to int32 `[B]`, and check their values if they are not traced."""
    if values is None:
        return None
    if np.shape(values) != (batch,):
        raise ValueError(f"{name} must have shape {(batch,)}, one a batch row, got {np.shape(values)}")
    array = jnp.asarray(values)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(f"{name} must be integers, got {array.dtype}")
    if highest is not None and not isinstance(array, jax.core.Tracer):
        known = np.asarray(array)
        if known.min() < 0 or known.max() > highest:
            raise ValueError(f"{name} must be in 0..{highest}, the size of the cache, got {known.tolist()}")
    return array.astype(jnp.int32)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _run_backend(plan: RaggedPlan, options: BackendOptions, operands: Operands) -> Part:
    if options.backend == "portable":
        return ragged_portable.attend(plan, operands, block_kv=options.block_kv)
    interpret = resolve_interpret(options.interpret, "gpu" if options.backend == "mosaic" else options.backend)
    if options.backend == "mosaic":
        return ragged_mosaic.attend(plan, operands, num_splits=options.num_splits, interpret=interpret)
    if options.backend == "tpu":
        return ragged_tpu.attend(plan, operands, block_kv=options.block_kv, interpret=interpret)
    return ragged_gpu.attend(
        plan, operands, block_kv=options.block_kv, num_splits=options.num_splits, interpret=bool(interpret)
    )


@_run_backend.defjvp
def _refuse_derivative(plan: RaggedPlan, options: BackendOptions, primals: Any, tangents: Any) -> Any:
    raise NotImplementedError(f"ragged does not support train: {UNSUPPORTED['train']}")


# Jitted so that calls outside `jit` compile once for each plan, not once for each call.
_attend = jax.jit(_run_backend, static_argnums=(0, 1))
