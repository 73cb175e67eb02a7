"""Declare paged attention to the harness, one implementation for each back end and kind of pages."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

from cases.case import Case
from cases.storage_forms.paged_form import (
    BLOCK_FEATURES,
    CHANNEL_FEATURES,
    COMPUTED_FEATURES,
    SCALED_FEATURES,
    SEQUENCE_FEATURES,
    WHOLE_FEATURES,
    WRITTEN_FEATURES,
)
from impls.contract.declarations import Arithmetic
from impls.contract.implementation import Accelerator, Implementation
from impls.jax_compat import get_device_kind, runs_on
from impls.paged.attention import Backend, attention
from impls.paged.page_copies import side_by_side
from impls.paged.paged_latent import latent_attention
from impls.paged.paged_update import attention_with_update, latent_attention_with_update
from impls.paged.quantized_pages import attend_quantized
from impls.pallas_gpu.mosaic_decode import find_shape_limit
from impls.pallas_gpu.mosaic_tiles import NO_HOPPER, find_device_limit

# Tiles and blocks are small and of different sizes, so that prompts have several tiles, and sequences end before, at
# and after the ends of blocks.
_JUDGED_SIZES: dict[str, Any] = {"block_q": 8, "block_kv": 48}
# On a GPU, blocks begin and end within pages. There are so many programs that long sequences have several shares.
_JUDGED_SIZES_BY_BACKEND: dict[Backend, dict[str, Any]] = {
    "portable": _JUDGED_SIZES,
    "tpu": _JUDGED_SIZES,
    "gpu": {"block_q": 8, "block_kv": 32, "num_programs": 40},
    "mosaic": {"num_programs": 40},
}
# Few, since an interpreter also takes time for programs without keys.
_INTERPRETED_PROGRAMS = 3
# With 16 rows at a time, a unit of computation holds some of a query's heads, or the heads of several queries.
_JUDGED_LATENT_SIZES: dict[Backend, dict[str, Any]] = {
    "portable": _JUDGED_SIZES,
    "tpu": {**_JUDGED_SIZES, "block_rows": 16},
}
_VARIANTS: dict[Backend, dict[str, dict[str, Any]]] = {
    "portable": {
        "default_blocks": {},
        "single_pages": {"block_q": 1, "block_kv": 1},
        "blocks_of_7": {"block_q": 7, "block_kv": 64},
    },
    "tpu": {"default_blocks": {}, "single_pages": {"block_q": 1, "block_kv": 1}},
    "gpu": {"default_blocks": {}, "one_program": {"block_q": 3, "block_kv": 16, "num_programs": 1}},
    "mosaic": {"default_programs": {}, "one_program": {"num_programs": 1}},
}
_DESCRIPTIONS: dict[Backend, str] = {
    "portable": "in plain JAX",
    "tpu": "in Pallas for TPU, pages copied ahead",
    "gpu": "in Pallas for GPU (Triton), keys shared by programs and merged",
    "mosaic": "in Pallas for Hopper GPUs (Mosaic), keys shared by programs and merged",
}


_FURTHER = frozenset({"placed", "tree", "later_pages", "alibi_slopes", "score_mod", "logit_scale"})
"""Features of masks and operands that all kernels but the Mosaic GPU kernel support."""


def build_implementation(name: str, *, backend: Backend = "portable") -> Implementation:
    """Declare paged attention on `backend`, under `name`; interpreted unless the process runs on its platform."""
    return Implementation(
        name=name,
        call=functools.partial(attention, backend=backend, **_JUDGED_SIZES_BY_BACKEND[backend]),
        description=f"attention over a cache in pages, {_DESCRIPTIONS[backend]}, prompts and single tokens in one call",
        unsupported={"f16": "the matrix unit multiplies no float16"} if backend == "tpu" else {},
        offers=frozenset() if backend == "mosaic" else _FURTHER,
        arithmetic=Arithmetic(probabilities="input"),
        differentiable_residuals=frozenset(),
        gradients=frozenset(),
        empty_rows="zero",
        behind_mask="any",
        storage="paged",
        refuses_by_signature=True,
        memory="linear" if backend in ("gpu", "mosaic") else None,
        accelerator=_build_accelerator(backend),
        variants={
            variant: functools.partial(attention, backend=backend, **changed)
            for variant, changed in _VARIANTS[backend].items()
        },
    )


def build_mosaic_implementation(name: str) -> Implementation:
    """Declare the Mosaic GPU kernel: run on a Hopper GPU, elsewhere only compiled and run by JAX's interpreter."""
    call = functools.partial(attention, backend="mosaic")
    return dataclasses.replace(
        build_implementation(name, backend="mosaic"),
        unsupported={"f32": "multiplies bf16 and f16 only"},
        supports_case=_find_mosaic_limit,
        accelerator=Accelerator(
            platform="gpu",
            absent=None if find_device_limit(get_device_kind("gpu")) is None else NO_HOPPER,
            native=functools.partial(call, interpret=False),
            under_interpreter=lambda parameters: functools.partial(
                call, num_programs=_INTERPRETED_PROGRAMS, interpret=parameters
            ),
        ),
    )


def _build_quantized_mosaic_implementation(name: str) -> Implementation:
    """Declare the Mosaic GPU kernel for pages with one scale for all, under `name`."""
    return dataclasses.replace(
        build_mosaic_implementation(name),
        description="attention over int8 or fp8 pages with one scale for all, in Pallas for Hopper GPUs (Mosaic)",
        offers=WHOLE_FEATURES,
        supports_case=lambda case: _refuse_unscaled(case) or _find_mosaic_limit(case),
    )


def _find_mosaic_limit(case: Case) -> str | None:
    if case.stored is None or case.stored.size is None:
        return None
    # By default a tile has as many queries as fit, so no case has too many rows.
    return find_shape_limit(case.head_dim, case.v_head_dim, case.stored.size)


def _build_update_implementation(name: str, *, backend: Literal["portable", "tpu"] = "portable") -> Implementation:
    """Declare paged attention on `backend` that writes the new keys and values into pages first, in plain JAX."""
    return dataclasses.replace(
        build_implementation(name, backend=backend),
        call=functools.partial(attention_with_update, backend=backend, **_JUDGED_SIZES),
        description=f"attention over a cache in pages, {_DESCRIPTIONS[backend]}, new keys and values written first",
        writes_pages=True,
        accelerator=_build_accelerator(backend, attention_with_update),
        variants={
            variant: functools.partial(attention_with_update, backend=backend, **changed)
            for variant, changed in _VARIANTS[backend].items()
        },
    )


def _build_scaled_update_implementation(name: str) -> Implementation:
    """Declare the same for int8 and fp8 pages, by given and by computed scales; `paged_update` covers other pages."""
    return dataclasses.replace(
        _build_update_implementation(name),
        description="attention over int8 or fp8 pages in plain JAX, new keys and values quantised into them first",
        offers=WRITTEN_FEATURES | COMPUTED_FEATURES | {"q_fp8"},
        supports_case=_refuse_unscaled,
    )


def _build_quantized_implementation(name: str) -> Implementation:
    """Declare paged attention in plain JAX for quantised pages; implementations without scales cover other pages."""
    return dataclasses.replace(
        build_implementation(name),
        call=functools.partial(attend_quantized, **_JUDGED_SIZES),
        description=f"attention over quantised pages, {_DESCRIPTIONS['portable']}",
        offers=SCALED_FEATURES
        | WHOLE_FEATURES
        | SEQUENCE_FEATURES
        | BLOCK_FEATURES
        | CHANNEL_FEATURES
        | {"q_fp8", "q_descale"},
        supports_case=_refuse_unscaled,
        variants={
            variant: functools.partial(attend_quantized, **changed)
            for variant, changed in _VARIANTS["portable"].items()
        },
    )


def _build_quantized_gpu_implementation(name: str) -> Implementation:
    """Declare the GPU kernel for pages with scales; implementations without them cover the other pages."""
    return dataclasses.replace(
        build_implementation(name, backend="gpu"),
        description=f"attention over int8 or fp8 pages with scales, {_DESCRIPTIONS['gpu']}",
        offers=SCALED_FEATURES | WHOLE_FEATURES | {"q_fp8"},
        supports_case=_refuse_unscaled,
    )


def _refuse_unscaled(case: Case) -> str | None:
    return None if case.kv_cache else "k_scales: pages without scales, which are those of paged"


def build_quantized_tpu_implementation(name: str) -> Implementation:
    """Declare the TPU kernel for pages with scales, under `name`; other pages are declared unsupported."""
    return dataclasses.replace(
        build_implementation(name, backend="tpu"),
        call=functools.partial(_attend_with_scales, backend="tpu", **_JUDGED_SIZES),
        description="attention over int8 or fp8 pages with scales, in Pallas for TPU",
        offers=SCALED_FEATURES | WHOLE_FEATURES | {"q_fp8"},
        supports_case=_refuse_unscaled,
        accelerator=_build_accelerator("tpu", _attend_with_scales),
        variants={
            variant: functools.partial(_attend_with_scales, backend="tpu", **changed)
            for variant, changed in _VARIANTS["tpu"].items()
        },
    )


def _attend_with_scales(
    q: Any,
    k_pages: Any,
    v_pages: Any,
    *,
    k_scales: Any = None,
    v_scales: Any = None,
    out_dtype: Any = None,  # named, so that the judge finds it in the signature
    **options: Any,
) -> Any:
    """Implement the contract's call: convert its scales to the kernel's layout, in which servers store them."""
    options |= {"out_dtype": out_dtype}
    if k_scales is None:
        return attention(q, k_pages, v_pages, **options)
    return attention(q, k_pages, v_pages, page_scales=side_by_side(k_scales, v_scales), **options)


def _build_accelerator(
    backend: Backend, call: Callable[..., Any] = attention, judged: dict[str, Any] = _JUDGED_SIZES
) -> Accelerator:
    if backend == "portable" or backend == "mosaic":  # Mosaic has a declaration of its own
        return Accelerator()
    return Accelerator(
        platform=backend,
        interpreted=not runs_on(backend),
        native=functools.partial(call, backend=backend, interpret=False),
        under_interpreter=functools.partial(_interpret_with, call, judged) if backend == "tpu" else None,
    )


def _interpret_with(call: Callable[..., Any], judged: dict[str, Any], parameters: Any) -> Any:
    return functools.partial(call, backend="tpu", **judged, interpret=parameters)


def build_latent_implementation(name: str, *, backend: Literal["portable", "tpu"] = "portable") -> Implementation:
    """Declare latent attention over pages on `backend`, under `name`."""
    judged = _JUDGED_LATENT_SIZES[backend]
    return dataclasses.replace(
        build_implementation(name, backend=backend),
        call=functools.partial(latent_attention, backend=backend, **judged),
        description=f"latent attention in its absorbed form over latents in pages, {_DESCRIPTIONS[backend]}",
        storage="latent_pages",
        offers=frozenset(),
        memory="linear" if backend == "portable" else None,
        accelerator=_build_accelerator(backend, latent_attention, judged),
        variants={
            variant: functools.partial(latent_attention, backend=backend, **changed)
            for variant, changed in _VARIANTS[backend].items()
        },
    )


def _build_quantized_latent_implementation(name: str) -> Implementation:
    """Declare latent attention in plain JAX for latents with scales; `paged_latent` covers the others."""
    return dataclasses.replace(
        build_latent_implementation(name),
        description="latent attention over int8 or fp8 latents in pages, with scales, in plain JAX",
        offers=SCALED_FEATURES | WHOLE_FEATURES,
        supports_case=_refuse_unscaled,
    )


def _build_latent_update_implementation(name: str) -> Implementation:
    """Declare latent attention in plain JAX that writes the new latents into pages first."""
    return dataclasses.replace(
        build_latent_implementation(name),
        call=functools.partial(latent_attention_with_update, **_JUDGED_SIZES),
        description="latent attention over latents in pages, in plain JAX, new latents written into the pages first",
        writes_pages=True,
        variants={
            variant: functools.partial(latent_attention_with_update, **changed)
            for variant, changed in _VARIANTS["portable"].items()
        },
    )


IMPLEMENTATIONS: tuple[Implementation, ...] = (
    # Its products have one shape in all calls: tiles begin with a query of a sequence, and blocks with its key 0.
    dataclasses.replace(build_implementation("paged"), batch_invariant=True),
    build_implementation("paged_tpu", backend="tpu"),
    build_implementation("paged_gpu", backend="gpu"),
    build_mosaic_implementation("paged_gpu_mosaic"),
    _build_update_implementation("paged_update"),
    _build_update_implementation("paged_update_tpu", backend="tpu"),
    build_latent_implementation("paged_latent"),
    _build_latent_update_implementation("paged_latent_update"),
    build_latent_implementation("paged_latent_tpu", backend="tpu"),
    _build_quantized_implementation("paged_quantized"),
    _build_scaled_update_implementation("paged_update_quantized"),
    _build_quantized_latent_implementation("paged_latent_quantized"),
    build_quantized_tpu_implementation("paged_quantized_tpu"),
    _build_quantized_gpu_implementation("paged_quantized_gpu"),
    _build_quantized_mosaic_implementation("paged_quantized_gpu_mosaic"),
)
