"""A minimal Pallas TPU flash attention, forward only, with options that plant TPU-specific bugs.

The grid is (batch and head, query block, key block). The last dimension is sequential; the running maximum, the running
sum and the accumulator are in VMEM scratch. It supports no mask and the causal mask. Lengths are multiples of 128, the
rows of a block.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from cases.case import FEATURES, Case
from cases.masks import Causal, Full, Mask
from impls.contract.declarations import Arithmetic
from impls.contract.implementation import Accelerator, Implementation

Dimension = Literal["parallel", "arbitrary"]

LANES = 128
_SUPPORTED = frozenset(
    {"f32", "bf16", "train", "prefill", "mha", "gqa", "mqa", "full", "causal", "v_head_dim", "scale"}
) | {"unequal_lengths"}
UNSUPPORTED = {feature: "is a small kernel" for feature in FEATURES if feature not in _SUPPORTED}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The options of the kernel; the defaults are correct.

    Attributes:
      block: the rows of a query block.
      clears: whether scratch is initialised before the first accumulation.
      semantics: the semantics of the three grid dimensions.
      reads_ahead: whether the next key block is an operand too, without a bound at the end.
      keys_outside: whether key blocks are the outer loop, with the running state in outputs that are revisited.
      counts: whether all programs write to one shared output.
      vmem_limit: the VMEM limit of the kernel, in bytes.
    """

    block: int = 128
    clears: bool = True
    semantics: tuple[Dimension, Dimension, Dimension] = ("parallel", "parallel", "arbitrary")
    reads_ahead: bool = False
    keys_outside: bool = False
    counts: bool = False
    vmem_limit: int | None = None


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    mask: Mask,
    segment_ids: Any = None,
    soft_cap: Any = None,
    sinks: Any = None,
    bias: Any = None,
    scale: float | None = None,
    save_residuals: bool = False,
    options: Options = Options(),
    interpret: Any = True,
) -> Any:
    """Compute the canonical call.

    Raises:
      NotImplementedError: for what the kernel does not support.
    """
    if not isinstance(mask, Full) and mask != Causal(0):
        raise NotImplementedError("masks other than causal")
    if any(x is not None for x in (segment_ids, soft_cap, sinks, bias)):
        raise NotImplementedError("optional operands")
    if q.dtype == jnp.float16:
        raise NotImplementedError("float16")
    if reason := _find_length_limit(q.shape[1], k.shape[1]):
        raise NotImplementedError(reason)
    factor = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    out = _run_kernel(q, k, v, factor, isinstance(mask, Causal), options, interpret)
    out = out.astype(q.dtype).transpose(0, 2, 1, 3)
    return (out, {}) if save_residuals else out


def _run_kernel(q: Any, k: Any, v: Any, factor: float, causal: bool, options: Options, interpret: Any) -> Any:
    """Call the Pallas kernel on operands with heads before lengths."""
    batch, heads, q_length, depth = q.shape
    _, kv_heads, kv_length, _ = k.shape
    v_depth = v.shape[3]
    q_blocks, kv_blocks, group = q_length // options.block, kv_length // LANES, heads // kv_heads
    order = (lambda b, j, i: (b, i, j)) if options.keys_outside else (lambda b, i, j: (b, i, j))

    def spec(rows: int, width: int, block: Callable[[Any, Any, Any], tuple[Any, ...]]) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, rows, width), lambda *grid: block(*order(*grid)))

    def of_q(b: Any, i: Any, j: Any) -> tuple[Any, ...]:
        return b // heads, b % heads, i, 0

    def of_kv(b: Any, i: Any, j: Any) -> tuple[Any, ...]:
        return b // heads, b % heads // group, j, 0

    def of_next(b: Any, i: Any, j: Any) -> tuple[Any, ...]:
        return b // heads, b % heads // group, j + 1, 0

    state = [(options.block, LANES), (options.block, LANES), (options.block, v_depth)]
    in_specs = [spec(options.block, depth, of_q), spec(LANES, depth, of_kv), spec(LANES, v_depth, of_kv)]
    out_specs = [spec(options.block, v_depth, of_q)]
    out_shape = [jax.ShapeDtypeStruct((batch, heads, q_length, v_depth), jnp.float32)]
    operands = [q, k, v]
    if options.reads_ahead:
        operands.append(k)
        in_specs.append(spec(LANES, depth, of_next))
    if options.counts:
        out_specs.append(spec(8, LANES, lambda b, i, j: (0, 0, 0, 0)))
        out_shape.append(jax.ShapeDtypeStruct((1, 1, 8, LANES), jnp.float32))
    if options.keys_outside:
        out_specs += [spec(*shape, of_q) for shape in state]
        out_shape += [jax.ShapeDtypeStruct((batch, heads, q_length, width), jnp.float32) for _, width in state]
    kernel = functools.partial(
        _kernel, factor=factor, causal=causal, kv_blocks=kv_blocks, options=options, inputs=len(operands)
    )
    grid = (batch * heads, kv_blocks, q_blocks) if options.keys_outside else (batch * heads, q_blocks, kv_blocks)
    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=out_shape,
        scratch_shapes=[] if options.keys_outside else [pltpu.VMEM(shape, jnp.float32) for shape in state],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=options.semantics, vmem_limit_bytes=options.vmem_limit
        ),
        interpret=interpret,
    )(*operands)[0]


def _kernel(*refs: Any, factor: float, causal: bool, kv_blocks: int, options: Options, inputs: int) -> None:
    """Process one key block of one query block."""
    q_ref, k_ref, v_ref, *ahead = refs[:inputs]
    out_ref = refs[inputs]
    largest, total, weighted = refs[-3:]
    outer, inner = pl.program_id(1), pl.program_id(2)
    i, j = (inner, outer) if options.keys_outside else (outer, inner)
    if options.clears:

        @pl.when(j == 0)
        def _() -> None:
            largest[...] = jnp.full(largest.shape, -1e30, jnp.float32)
            total[...] = jnp.zeros(total.shape, jnp.float32)
            weighted[...] = jnp.zeros(weighted.shape, jnp.float32)

    if options.counts:
        refs[inputs + 1][...] = jnp.ones((8, LANES), jnp.float32)
    x = jax.lax.dot_general(q_ref[...], k_ref[...], (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    x = x * factor
    if ahead:  # reads the next block, whose values are never used
        x = x + jnp.where(j == -1, jnp.max(ahead[0][...].astype(jnp.float32)), 0.0)
    if causal:
        row = i * options.block + jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
        column = j * LANES + jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
        x = jnp.where(column <= row, x, -1e30)
    before = largest[...][:, :1]
    now = jnp.maximum(before, jnp.max(x, axis=1, keepdims=True))
    p = jnp.exp(x - now)
    shrink = jnp.exp(before - now)
    largest[...] = jnp.broadcast_to(now, largest.shape)
    total[...] = total[...] * shrink + jnp.sum(p, axis=1, keepdims=True)
    v = v_ref[...]
    weighted[...] = weighted[...] * shrink + jnp.dot(p.astype(v.dtype), v, preferred_element_type=jnp.float32)

    @pl.when(j == kv_blocks - 1)
    def _() -> None:
        out_ref[...] = weighted[...] / total[...][:, :1]


def _find_length_limit(q_length: int, kv_length: int) -> str | None:
    if q_length % LANES or kv_length % LANES:
        return f"needs lengths that are multiples of {LANES}, its block; T is {q_length} and S {kv_length}"
    return None


def _find_limit(case: Case) -> str | None:
    if "_" in case.mask:
        return "takes no combined masks"
    return _find_length_limit(case.q_length, case.kv_length)


def build_pallas_implementation(name: str, **options: Any) -> Implementation:
    """Build the implementation, with `Options` by keyword."""
    call = functools.partial(attention, options=Options(**options))
    return Implementation(
        name=name,
        call=call,
        unsupported=UNSUPPORTED,
        supports_case=_find_limit,
        arithmetic=Arithmetic(),
        residuals=frozenset(),
        differentiable_residuals=frozenset(),
        gradients=frozenset(),
        behind_mask="finite",
        accelerator=Accelerator(
            platform="tpu",
            interpreted=True,
            under_interpreter=lambda parameters: functools.partial(call, interpret=parameters),
            native=functools.partial(call, interpret=False),
        ),
    )
