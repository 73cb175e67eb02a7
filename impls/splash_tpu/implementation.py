"""Declare splash attention to the harness, one implementation for each choice of block sizes and precision."""

from __future__ import annotations

import functools
from typing import Any

from impls.contract.declarations import Arithmetic
from impls.contract.implementation import Accelerator, Implementation
from impls.jax_compat import runs_on
from impls.splash_tpu.attention import UNSUPPORTED, attention
from impls.splash_tpu.splash_packed import packed_attention
from impls.splash_tpu.splash_plan import BlockSizes, Layouts, Precision
from impls.splash_tpu.splash_tuning import build_tunable

# Small blocks, so that lengths of a few hundred have several. None: fused backward pass as in the table.
_JUDGED_SIZES = BlockSizes.uniform(128, 128, fused_backward=None)
_SEQUENCE_MINOR = Layouts("sequence_minor", "sequence_minor", "sequence_minor")
_VARIANTS: dict[str, dict[str, Any]] = {
    "fused": {"block_sizes": BlockSizes.uniform(128, 128, fused_backward=True)},
    "default_blocks": {"block_sizes": BlockSizes()},
    "unequal_blocks": {"block_sizes": BlockSizes.uniform(256, 128)},
    "computed_in_parts": {"block_sizes": BlockSizes.uniform(256, 256, 128, part=128)},
    "sequence_minor": {
        "block_sizes": _JUDGED_SIZES,
        "layouts": _SEQUENCE_MINOR,
    },
}

_PACKED_VARIANTS = ("fused", "default_blocks", "unequal_blocks", "computed_in_parts")


def build_implementation(
    name: str, *, block_sizes: BlockSizes = _JUDGED_SIZES, precision: Precision = "exact"
) -> Implementation:
    """Declare splash attention with these block sizes, under `name`."""
    backward = "one fused kernel" if block_sizes.fused_backward else "one kernel, or two for dq and for dk, dv"
    call = functools.partial(attention, block_sizes=block_sizes, precision=precision)
    # The check that compiles for TPUs uses the default sizes, not the small ones.
    default_sizes = BlockSizes(fused_backward=True) if block_sizes.fused_backward else None
    return Implementation(
        name=name,
        call=call,
        description=f"block-sparse flash attention in Pallas for TPU, backward in {backward}",
        unsupported=UNSUPPORTED,
        offers=frozenset({"dropout"}),
        dropout_mask="places",
        arithmetic=Arithmetic(products=precision),
        gradients=frozenset({"dq", "dk", "dv", "dsinks"}),
        empty_rows="zero",
        behind_mask="any",
        validates=True,
        accelerator=Accelerator(
            platform="tpu",
            interpreted=not runs_on("tpu"),
            native=functools.partial(call, block_sizes=default_sizes, interpret=False),
            under_interpreter=lambda parameters: functools.partial(call, interpret=parameters),
        ),
        variants={variant: functools.partial(attention, **options) for variant, options in _VARIANTS.items()},
        memory="linear",
        checkpoint_names=("splash_residuals",),
        tunable=None
        if block_sizes.fused_backward
        else build_tunable(functools.partial(attention, precision=precision)),
    )


def build_packed_implementation(name: str, *, block_sizes: BlockSizes = _JUDGED_SIZES) -> Implementation:
    """Declare splash attention over packed sequences with these block sizes, under `name`."""
    call = functools.partial(packed_attention, block_sizes=block_sizes)
    return Implementation(
        name=name,
        call=call,
        description="block-sparse flash attention in Pallas for TPU over packed sequences, by their borders",
        unsupported={"f16": UNSUPPORTED["f16"]},
        gradients=frozenset({"dq", "dk", "dv", "dsinks"}),
        empty_rows="zero",
        behind_mask="any",
        storage="packed",
        refuses_by_signature=True,
        accelerator=Accelerator(
            platform="tpu",
            interpreted=not runs_on("tpu"),
            native=functools.partial(packed_attention, interpret=False),
            under_interpreter=lambda parameters: functools.partial(call, interpret=parameters),
        ),
        variants={
            variant: functools.partial(packed_attention, block_sizes=_VARIANTS[variant]["block_sizes"])
            for variant in _PACKED_VARIANTS
        },
        memory="linear",
        checkpoint_names=("splash_residuals",),
    )


IMPLEMENTATIONS: tuple[Implementation, ...] = (
    build_implementation("splash_tpu"),
    build_implementation("splash_tpu_fused", block_sizes=BlockSizes.uniform(128, 128, fused_backward=True)),
    build_packed_implementation("splash_tpu_packed"),
)
