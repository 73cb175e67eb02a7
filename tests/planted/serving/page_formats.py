"""Bugs of pages with scales of sequences and of blocks and with zero points, in two styles of kernels."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from cases.storage_forms.paged_form import BLOCK_FEATURES, CHANNEL_FEATURES, SEQUENCE_FEATURES
from conformance.mutation.kernels.triggers import both, has
from tests.planted.planting import stored_bug
from tests.planted.planting.scaled_pages import ScaleSteps, build_at_once, build_by_page

Array = jax.Array
_BY_SEQUENCE = has("paged", "kv_sequence_scales")
OFFERED = SEQUENCE_FEATURES | BLOCK_FEATURES | CHANNEL_FEATURES | {"q_descale"}
"""The features of the correct kernels."""
_MXFP8, _NVFP4 = has("paged", "kv_mxfp8"), has("paged", "kv_nvfp4")
_BY_CHANNEL = has("paged", "kv_channel_scales")
_bug = functools.partial(stored_bug.bug, family="paged", shows="out logsumexp max_logits")
_sequence_bug = functools.partial(_bug, build=functools.partial(build_at_once, features=OFFERED), trigger=_BY_SEQUENCE)
_sequence_bug_by_page = functools.partial(
    _bug, build=functools.partial(build_by_page, features=OFFERED), trigger=_BY_SEQUENCE
)
_block_bug = functools.partial(_bug, build=functools.partial(build_at_once, features=OFFERED))
_block_bug_by_page = functools.partial(_bug, build=functools.partial(build_by_page, features=OFFERED))


def _double_exponents(scales: Array) -> Array:
    """Read bits of float8_e8m0fnu with a bias of 126 in place of 127."""
    return scales.astype(jnp.float32) * (2.0 if scales.dtype == jnp.float8_e8m0fnu else 1.0)


def _read_as_fraction(scales: Array) -> Array:
    """Read bits of float8_e8m0fnu as float8_e4m3fn."""
    if scales.dtype != jnp.float8_e8m0fnu:
        return scales.astype(jnp.float32)
    return jax.lax.bitcast_convert_type(scales, jnp.float8_e4m3fn).astype(jnp.float32)


def _shift_blocks(scales: Array) -> Array:
    return jnp.roll(scales.astype(jnp.float32), 1, axis=-1)


def _flush_subnormal(x: Array) -> Array:
    """The one subnormal number of fp4, 1/2, becomes zero."""
    wide = x.astype(jnp.float32)
    return jnp.where(jnp.abs(wide) < 1, 0, wide) if x.dtype == jnp.float4_e2m1fn else wide


def _read_signed(x: Array) -> Array:
    wide = x.astype(jnp.float32)
    return jnp.where(wide > 127, wide - 256, wide) if x.dtype == jnp.uint8 else wide


def _by_query_head(scales: Array, group: int) -> Array:
    """Scales of key/value heads found by the number of the query head."""
    return scales[jnp.arange(group * len(scales)) % len(scales)]


BUGS = (
    _sequence_bug(
        "page-descale-of-the-first-sequence",
        ScaleSteps(sequence=lambda sequence: jnp.zeros_like(sequence)),
        kind="kvscale.batch0",
        reference="inferred from vllm-project/flash-attention#176, all rows folded onto the first",
        trigger=both(_BY_SEQUENCE, lambda case: case.batch > 1),
    ),
    _sequence_bug_by_page(
        "page-descale-of-the-next-sequence-by-page",
        ScaleSteps(sequence=lambda sequence: sequence + 1),
        kind="kvscale.batch",
        reference="inferred from tables that begin with a total",
    ),
    _sequence_bug(
        "page-descale-by-query-head",
        ScaleSteps(heads=_by_query_head),
        kind="gqa.packgqa-descale",
        reference="rocm-libraries PR 11189",
        trigger=both(_BY_SEQUENCE, has("gqa")),
    ),
    _sequence_bug_by_page(
        "page-descale-of-the-first-head-by-page",
        ScaleSteps(heads=lambda scales, group: jnp.broadcast_to(scales[:1], group * len(scales))),
        kind="kvscale.per-head",
        reference="sgl-kernel-xpu PR 252",
        trigger=both(_BY_SEQUENCE, lambda case: case.num_kv_heads > 1),
    ),
    _sequence_bug(
        "page-descale-of-queries-forgotten",
        ScaleSteps(descales=lambda k, v, q: (k, v, jnp.ones_like(q))),
        kind="kvscale.dropped",
        reference="inferred from flashinfer-ai/flashinfer#1023",
        trigger=both(_BY_SEQUENCE, has("q_descale")),
    ),
    _sequence_bug_by_page(
        "page-descale-of-keys-for-values-by-page",
        ScaleSteps(descales=lambda k, v, q: (k, k, q)),
        kind="kvscale.k-for-v",
        reference="sgl-project/sglang#26852",
        shows="out",
    ),
    _block_bug(
        "page-block-scale-of-the-neighbour",
        ScaleSteps(blocks=_shift_blocks),
        kind="kvscale.block",
        reference="inferred from scales of blocks that a kernel loads in a layout of its own",
        trigger=_MXFP8,
    ),
    _block_bug_by_page(
        "page-block-scale-of-the-neighbour-by-page",
        ScaleSteps(blocks=_shift_blocks),
        kind="kvscale.block",
        reference="inferred from scales of blocks that a kernel loads in a layout of its own",
        trigger=_NVFP4,
    ),
    _block_bug(
        "page-block-exponents-with-a-bias-of-126",
        ScaleSteps(blocks=_double_exponents),
        kind="kvscale.exponent",
        reference="inferred: the bias of float8_e8m0fnu is 127, and that of other fp8 dtypes is another",
        trigger=_MXFP8,
    ),
    _block_bug_by_page(
        "page-block-exponents-read-as-e4m3-by-page",
        ScaleSteps(blocks=_read_as_fraction),
        kind="kvscale.exponent",
        reference="inferred from kernels for nvfp4, whose scales are float8_e4m3fn",
        trigger=_MXFP8,
    ),
    _block_bug(
        "page-block-scales-interleaved",
        ScaleSteps(spread=lambda scales, size: jnp.tile(scales, size)),
        kind="kvscale.block",
        reference="vllm-project/vllm#50085, scales written in another order than they are read",
        trigger=_NVFP4,
    ),
    _block_bug(
        "page-global-scale-of-keys-forgotten",
        ScaleSteps(globals=lambda k, v: (1.0, v)),
        kind="kvscale.dropped",
        reference="inferred from flashinfer-ai/flashinfer#1023",
        trigger=_NVFP4,
    ),
    _block_bug_by_page(
        "page-global-scale-of-values-twice-by-page",
        ScaleSteps(globals=lambda k, v: (k, v * v)),
        kind="kvscale.twice",
        reference="vllm-project/vllm#48016",
        shows="out",
        trigger=_NVFP4,
    ),
    _block_bug(
        "page-fp4-without-its-subnormal",
        ScaleSteps(numbers=_flush_subnormal),
        kind="kvbits.subnormal",
        reference="inferred from fp4 that is decoded by its exponent alone",
        trigger=_NVFP4,
    ),
    _block_bug(
        "page-zero-points-subtracted",
        ScaleSteps(zeros=lambda zeros, scales: -zeros),
        kind="kvscale.zero",
        reference="inferred: other formats read a number as (stored - zero) * scale",
        trigger=_BY_CHANNEL,
    ),
    _block_bug_by_page(
        "page-zero-points-scaled-by-page",
        ScaleSteps(zeros=lambda zeros, scales: zeros * scales),
        kind="kvscale.zero",
        reference="inferred: other formats add the zero point before they multiply",
        trigger=_BY_CHANNEL,
    ),
    _block_bug(
        "page-channel-scales-of-the-page-before",
        ScaleSteps(of_page=lambda page: page - 1),
        kind="kvscale.page",
        reference="inferred from groups of tokens that are counted from one",
        trigger=_BY_CHANNEL,
    ),
    _block_bug_by_page(
        "page-of-uint8-with-a-sign-by-page",
        ScaleSteps(numbers=_read_signed),
        kind="kvbits.sign",
        reference="inferred from caches of int8",
        trigger=_BY_CHANNEL,
    ),
)
