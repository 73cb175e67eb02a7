"""Flash attention for GPUs over packed sequences: the public call, and the operations before the kernels."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from cases.masks import Full
from impls.flash_gpu.attention import Products, attend
from impls.flash_gpu.block_sizes import BlockSizes, look_up_packed
from impls.flash_gpu.packed_visits import compute_ranges
from impls.flash_gpu.tile_schedule import FlashGpuPlan, Operands
from impls.jax_compat import Interpret, get_device_kind, resolve_interpret
from impls.packed_sequences import Side, build_tables, check_packed_operands, resolve_window
from impls.varying_axes import find_varying_axes, mark_varying


def packed_attention(
    q: Float[Array, "total_q N H"],
    k: Float[Array, "total_kv K H"],
    v: Float[Array, "total_kv K V"],
    *,
    cu_q_lens: Int[Array, " borders"],
    cu_kv_lens: Int[Array, " borders"],
    num_seqs: Int[Array, "1"],
    causal: bool = False,
    window: tuple[Side, Side] | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    scale: float | None = None,
    save_residuals: bool = False,
    block_sizes: BlockSizes | None = None,
    products: Products = "exact",
    interpret: Interpret = None,
) -> Any:
    """Compute softmax attention of concatenated sequences on a GPU (docs/contract.md, section 8).

    Query `i` of a sequence has the position `kv_len - q_len + i`. The kernels are the Triton kernels of
    `impls.flash_gpu.attention`. Blocks without a query and a key of the same sequence are skipped: the work grows with
    the sequences, not with the square of the total length. Memory is linear in the lengths.

    q, k, v and sinks are differentiable in reverse mode. So is `logsumexp`; `max_logits` has gradient zero. The
    residuals of the backward pass are tagged `"out"` and `"logsumexp"` for `jax.checkpoint` policies.

    The operands and results are those of packed calls in the contract (docs/contract.md, section 8).

    Args:
      block_sizes: Triton's tiles and launch parameters of each kernel, by default those of
        `block_sizes.PACKED_TABLE`. Tiles are clipped to the lengths.
      products: how f32 operands multiply on the GPU, exactly or rounded to tf32.
      interpret: run in Pallas's interpreter, by default wherever the process does not compute on a GPU.

    Raises:
      ValueError: an operand or an option is invalid; the message names it.
      NotImplementedError: a second derivative was requested.
    """
    check_packed_operands(q, k, v, sinks, soft_cap, scale)
    tables = build_tables(cu_q_lens, cu_kv_lens, num_seqs)
    if products not in ("exact", "tf32"):
        raise ValueError(f"products must be 'exact' or 'tf32', got {products!r}")
    (q_length, num_q_heads, head_dim), (kv_length, num_kv_heads, v_head_dim) = q.shape, v.shape
    depth = max(head_dim, v_head_dim)
    sizes = look_up_packed(get_device_kind("gpu"), depth, q.dtype.itemsize) if block_sizes is None else block_sizes
    plan = FlashGpuPlan(
        mask=Full(),
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        q_length=q_length,
        kv_length=kv_length,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        scale=1 / math.sqrt(head_dim) if scale is None else float(scale),
        soft_cap=None if soft_cap is None else float(soft_cap),
        segmented=False,
        packed=True,
        exact=products == "exact",
        sizes=sizes.cut_to(q_length, kv_length),
        interpret=bool(resolve_interpret(interpret, "gpu")),
    )
    ranges = compute_ranges(tables, resolve_window(causal, window), q_length)
    q, k, v = (jnp.asarray(x)[None] for x in (q, k, v))
    operands = Operands(q, k, v, None, None if sinks is None else jnp.asarray(sinks), None, ranges)
    outputs = attend(plan, mark_varying(operands, find_varying_axes(operands)))
    if not save_residuals:
        return outputs.out[0]
    return outputs.out[0], {"logsumexp": outputs.logsumexp[0].T, "max_logits": outputs.max_logits[0].T}
