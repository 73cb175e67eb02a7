"""Declare flash attention for GPUs to the harness, as four implementations: default, tf32, Mosaic GPU and packed."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp

from cases import mask_spec
from cases.case import Case
from cases.masks import Full
from cases.operand_values import DTYPES
from impls.contract.declarations import Arithmetic
from impls.contract.implementation import Accelerator, Implementation
from impls.flash_gpu.attention import UNSUPPORTED, Products, attention
from impls.flash_gpu.block_sizes import KERNELS, BlockSizes, Ring, Tiles, look_up
from impls.flash_gpu.flash_gpu_packed import packed_attention
from impls.flash_gpu.flash_gpu_tuning import build_tunable
from impls.flash_gpu.pallas_backends import find_call_limit, find_misfit, fit_ring
from impls.flash_gpu.tile_schedule import has_dead_keys
from impls.jax_compat import get_device_kind, runs_on
from impls.pallas_gpu.mosaic_tiles import NO_HOPPER


def build_uniform_sizes(block_q: int, block_kv: int) -> BlockSizes:
    """Build block sizes with the same tiles in every kernel."""
    tiles = Tiles(block_q=block_q, block_kv=block_kv)
    return BlockSizes(forward=tiles, dq=tiles, dkv=tiles)


# Small, so that the usual cases of 100 to 400 tokens have several blocks along both axes.
INTERPRETED_SIZES = BlockSizes(
    forward=Tiles(block_q=64, block_kv=64),
    dq=Tiles(block_q=64, block_kv=64),
    dkv=Tiles(block_q=64, block_kv=64),
)
_VARIANT_BLOCKS = ((32, 32), (16, 128))
# Even smaller, so that packed sequences begin and end inside blocks. The kernels have different tile sizes, so that a
# kernel fails if it uses the tile sizes of another kernel.
_INTERPRETED_PACKED_SIZES = BlockSizes(
    forward=Tiles(block_q=16, block_kv=32),
    dq=Tiles(block_q=32, block_kv=16),
    dkv=Tiles(block_q=16, block_kv=16),
)
_LONGER_RING = Ring(block=64, num_stages=3)
_VARIANT_RINGS = dataclasses.replace(
    INTERPRETED_SIZES, mosaic_forward=_LONGER_RING, mosaic_dq=_LONGER_RING, mosaic_dkv=_LONGER_RING
)
_VARIANT_SCHEDULES = {
    "ping_pong": Ring(ping_pong=True),
    "persistent": Ring(persistent=True),
    "ping_pong_persistent": Ring(ping_pong=True, persistent=True),
}
_MOSAIC_UNSUPPORTED = {
    **UNSUPPORTED,
    "f32": "multiplies bf16 and f16 only",
    "bias": "takes no bias",
    **dict.fromkeys(("dense", "dense_batch", "dense_head"), "takes masks that are formulas, no arrays"),
}


def build_implementation(
    name: str, *, products: Products = "exact", block_sizes: BlockSizes | None = None, on_gpu: bool | None = None
) -> Implementation:
    """Declare flash attention with these products and tiles, interpreted unless the process runs on a GPU."""
    on_gpu = runs_on("gpu") if on_gpu is None else on_gpu
    sizes = INTERPRETED_SIZES if block_sizes is None and not on_gpu else block_sizes
    call = functools.partial(attention, products=products)
    return Implementation(
        name=name,
        call=functools.partial(call, block_sizes=sizes),
        description=f"flash attention for GPUs in Pallas (Triton; Mosaic where measured), {products} products of f32",
        unsupported=UNSUPPORTED,
        offers=frozenset({"dropout"}),
        dropout_mask="places",
        arithmetic=Arithmetic(products="tf32" if products == "tf32" and on_gpu else "exact", probabilities="input"),
        variants={
            f"blocks_{q}_{kv}": functools.partial(call, block_sizes=build_uniform_sizes(q, kv))
            for q, kv in _VARIANT_BLOCKS
        },
        accelerator=Accelerator(
            platform="gpu",
            interpreted=not on_gpu,
            native=functools.partial(call, interpret=False),
        ),
        tunable=build_tunable(call),
        **_get_common_declarations(),
    )


def build_mosaic_implementation(name: str) -> Implementation:
    """Declare the Mosaic GPU kernels: run on a Hopper GPU, elsewhere only compiled and run by JAX's interpreter."""
    call = functools.partial(attention, backend="mosaic")
    limit = find_call_limit(get_device_kind("gpu"), jnp.bfloat16, Full(), biased=False)
    return Implementation(
        name=name,
        call=call,
        description="flash_gpu with backend='mosaic': Mosaic GPU on Hopper, up to depth 256",
        unsupported=_MOSAIC_UNSUPPORTED,
        supports_case=_find_misfit,
        arithmetic=Arithmetic(probabilities="input"),
        variants={
            "rings_of_3": functools.partial(call, block_sizes=_VARIANT_RINGS),
            **{
                variant: functools.partial(
                    call, block_sizes=dataclasses.replace(INTERPRETED_SIZES, mosaic_forward=ring)
                )
                for variant, ring in _VARIANT_SCHEDULES.items()
            },
        },
        accelerator=Accelerator(
            platform="gpu",
            absent=None if limit is None else NO_HOPPER,
            native=functools.partial(call, interpret=False),
            under_interpreter=lambda parameters: functools.partial(call, interpret=parameters),
        ),
        **_get_common_declarations(),
    )


def build_packed_implementation(
    name: str, *, block_sizes: BlockSizes | None = None, on_gpu: bool | None = None
) -> Implementation:
    """Declare flash attention over packed sequences with these tiles, interpreted unless the process runs on a GPU."""
    on_gpu = runs_on("gpu") if on_gpu is None else on_gpu
    sizes = _INTERPRETED_PACKED_SIZES if block_sizes is None and not on_gpu else block_sizes
    return Implementation(
        name=name,
        call=functools.partial(packed_attention, block_sizes=sizes),
        description="flash attention for GPUs in Pallas (Triton) over packed sequences, by their borders",
        arithmetic=Arithmetic(probabilities="input"),
        gradients=frozenset({"dq", "dk", "dv", "dsinks"}),
        storage="packed",
        refuses_by_signature=True,
        accelerator=Accelerator(
            platform="gpu",
            interpreted=not on_gpu,
            native=functools.partial(packed_attention, interpret=False),
        ),
        variants={
            "default_blocks": packed_attention,
            **{
                f"blocks_{q}_{kv}": functools.partial(packed_attention, block_sizes=build_uniform_sizes(q, kv))
                for q, kv in _VARIANT_BLOCKS
            },
        },
        **{**_get_common_declarations(), "validates": False},
    )


def _get_common_declarations() -> dict[str, Any]:
    return {
        "empty_rows": "zero",
        "behind_mask": "any",
        "validates": True,
        "memory": "linear",
        "checkpoint_names": ("out", "logsumexp"),
    }


def _find_misfit(case: Case) -> str | None:
    depths = case.head_dim, case.v_head_dim
    full_mask = case.mask == "full" and case.segments is None
    sizes = look_up(get_device_kind("gpu"), max(depths), DTYPES[case.dtype].itemsize, full_mask=full_mask).sizes
    mask = mask_spec.build_mask(case.mask, case.batch, case.num_q_heads, case.q_length, case.kv_length, case.seed)
    dead = case.segments is not None or has_dead_keys(mask, case.q_length, case.kv_length)
    needs: dict[str, bool] = {"segmented": case.segments is not None, "dead_keys": dead}
    kernels = KERNELS if case.phase == "train" else KERNELS[:1]
    rings = {kernel: fit_ring(kernel, sizes.ring(kernel), depths=depths, **needs) for kernel in kernels}
    misfits = (find_misfit(kernel, ring, *depths, **needs) for kernel, ring in rings.items())
    return next((misfit for misfit in misfits if misfit is not None), None)


IMPLEMENTATIONS: tuple[Implementation, ...] = (
    build_implementation("flash_gpu"),
    build_implementation("flash_gpu_tf32", products="tf32"),
    build_mosaic_implementation("flash_gpu_mosaic"),
    build_packed_implementation("flash_gpu_packed"),
)
