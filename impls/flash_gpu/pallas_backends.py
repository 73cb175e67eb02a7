"""Choice of the Pallas back end, Triton or Mosaic GPU, for each kernel of a call.

Triton serves every call. Mosaic GPU serves Hopper, for bf16 and f16. By default a Mosaic kernel is chosen only if
tuning measured it on that kind of GPU, and found it correct and faster than Triton's.

Measurements are required because interpreters run neither `wgmma` nor TMA, and counts of machine instructions do not
include waits. On an H100 and an H200 the Mosaic kernels were correct and faster up to depth 128. No chip has run the
backward kernels beyond it, nor early copies. A ring that does not fit a call is replaced by a smaller one, which need
not have been measured.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any, Literal

import jax.numpy as jnp

from cases.masks import Dense, Full, Mask, iter_leaves
from impls.flash_gpu.block_sizes import KERNELS, RING_BLOCKS, BlockSizes, Kernel, Ring
from impls.flash_gpu.mosaic import backward_tiles
from impls.flash_gpu.mosaic import forward as mosaic_forward
from impls.flash_gpu.mosaic.mosaic_launch import KernelShape, count_shared_bytes, zeroes_dead_keys
from impls.flash_gpu.tile_schedule import FlashGpuPlan, Operands
from impls.jax_compat import get_device_kind
from impls.pallas_gpu.mosaic_tiles import (
    SHARED_MEMORY,
    find_compiler_limit,
    find_device_limit,
)

Backend = Literal["triton", "mosaic"]

MAX_MOSAIC_DEPTH = 256
"""Largest head depth of the Mosaic kernels: an f32 row for each of 64 queries takes half of a warpgroup's registers."""


def choose_mosaic_kernels(backend: Backend | None, plan: FlashGpuPlan, operands: Operands) -> frozenset[Kernel]:
    """Choose the kernels of the call that Mosaic GPU computes.

    If `backend` is None, Mosaic is chosen where its ring is preferred, the GPU is a Hopper and the call is supported.
    Raises `ValueError` for an unknown back end. Raises `NotImplementedError` if Mosaic is requested and does not
    support the call or the GPU.
    """
    if backend not in (None, "triton", "mosaic"):
        raise ValueError(f"backend must be 'triton', 'mosaic' or None (automatic), got {backend!r}")
    if backend == "triton" or (backend is None and plan.interpret):
        return frozenset()
    kind = None if plan.interpret else get_device_kind("gpu")
    reason = find_call_limit(
        kind, operands.q.dtype, plan.mask, biased=operands.bias is not None, drops=plan.dropout_rate is not None
    )
    found = {kernel for kernel in KERNELS if backend == "mosaic" or plan.sizes.ring(kernel).preferred}
    for kernel in sorted(found):
        ring = plan.sizes.ring(kernel)
        misfit = reason or find_misfit(
            kernel, ring, plan.head_dim, plan.v_head_dim, segmented=plan.segmented, dead_keys=plan.has_dead_keys
        )
        if misfit is None:
            continue
        if backend == "mosaic":
            raise NotImplementedError(
                f"flash_gpu does not support backend='mosaic' for {misfit}; take backend='triton' or None"
            )
        found.remove(kernel)
    return frozenset(found)


def find_call_limit(kind: str | None, dtype: Any, mask: Mask, *, biased: bool, drops: bool = False) -> str | None:
    """Return what Mosaic does not support about a call, or None. `kind` is JAX's device kind, None if interpreted."""
    if kind is not None and (reason := find_device_limit(kind)) is not None:
        return reason
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"q, k and v in {dtype}: it multiplies bfloat16 and float16"
    if biased:
        return "bias"
    if drops:
        return "dropout"
    if any(isinstance(leaf, Dense) for leaf in iter_leaves(mask)):
        return "masks that are arrays, only those that are formulas"
    return None if kind is None or isinstance(mask, Full) else find_compiler_limit()


def find_misfit(
    kernel: Kernel, ring: Ring, head_dim: int, v_head_dim: int, *, segmented: bool, dead_keys: bool = True
) -> str | None:
    """Return why a kernel with this ring does not fit a GPU at these head depths, or None if it fits.

    Keys that no query attends to (`dead_keys`) need an additional buffer, except at depths where they are zeroed before
    the kernel (`impls.flash_gpu.mosaic.mosaic_launch`).
    """
    depths = f"head depths {head_dim} and {v_head_dim}"
    if max(head_dim, v_head_dim) > MAX_MOSAIC_DEPTH:
        return f"{depths}, beyond {MAX_MOSAIC_DEPTH}"
    scratch = mosaic_forward.build_scratch if kernel == "forward" else backward_tiles.build_scratch
    shape = KernelShape.of(kernel, ring, head_dim, v_head_dim)
    dead_keys = dead_keys and not zeroes_dead_keys(head_dim, v_head_dim)
    need = count_shared_bytes(
        scratch(shape, jnp.bfloat16, segmented=segmented, dead_keys=dead_keys),
        reduces=kernel == "forward" or (kernel == "dq" and dead_keys),
    )
    if need > SHARED_MEMORY:
        return (
            f"{depths} with {ring.num_stages} tiles of {ring.block} in flight ({kernel}): they take {need} bytes of "
            f"shared memory, of which a block has {SHARED_MEMORY}"
        )
    return None


def fit_rings(plan: FlashGpuPlan) -> BlockSizes:
    """Replace rings of Mosaic kernels that do not fit this call by the largest ones that do.

    So tiles are chosen for each call: segment ids and keys that no query attends to take shared memory of their own.
    """
    sizes = plan.sizes
    fit = functools.partial(
        fit_ring, depths=(plan.head_dim, plan.v_head_dim), segmented=plan.segmented, dead_keys=plan.has_dead_keys
    )
    return dataclasses.replace(
        sizes,
        mosaic_forward=fit("forward", sizes.mosaic_forward),
        mosaic_dq=fit("dq", sizes.mosaic_dq),
        mosaic_dkv=fit("dkv", sizes.mosaic_dkv),
    )


def fit_ring(kernel: Kernel, ring: Ring, *, depths: tuple[int, int], segmented: bool, dead_keys: bool) -> Ring:
    """Return the ring, or the largest smaller one that fits; if none fits, the ring as it is.

    Fewer tiles in flight are tried first (of queries, one of values, then keys), and then smaller tiles. If tiles are
    half as large, twice as many may be in flight. A single tile of keys in flight, without turns, comes next, and early
    copies are tried last: they need fewer tiles.
    """
    for found in _iter_smaller_rings(kernel, ring):
        if find_misfit(kernel, found, *depths, segmented=segmented, dead_keys=dead_keys) is None:
            return found
    return ring


def _iter_smaller_rings(kernel: Kernel, ring: Ring) -> Iterator[Ring]:
    """Yield the ring, then smaller ones, in the order of `fit_ring`."""
    yield ring
    blocks = [size for size in reversed(RING_BLOCKS) if size <= ring.block]
    for early_copies in dict.fromkeys((ring.early_copies, kernel != "dkv")):
        sizes = [(block, n) for block in blocks for n in range(ring.num_stages * ring.block // block, 1, -1)]
        if early_copies:
            sizes += [(block, 1) for block in blocks]
        for block, num_stages in sizes:
            v_stages: list[int | None] = [None]
            if ring.num_v_stages is not None:
                v_stages = [min(ring.num_v_stages * ring.block // block, num_stages)]
            if early_copies and num_stages > 1:
                v_stages.append(num_stages - 1)
            for num_v_stages, num_q_stages in itertools.product(v_stages, range(ring.num_q_stages, 0, -1)):
                yield dataclasses.replace(
                    ring,
                    block=block,
                    num_stages=num_stages,
                    num_v_stages=num_v_stages,
                    num_q_stages=num_q_stages,
                    ping_pong=ring.ping_pong and num_stages > 1,
                    early_copies=early_copies,
                )
