"""Declare decode attention to the harness, one implementation for each back end."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np

from cases import mask_spec
from cases.case import Case
from cases.masks import Mask
from impls import softmax_merge
from impls.contract.declarations import Arithmetic
from impls.contract.implementation import Accelerator, Implementation
from impls.jax_compat import get_device_kind, runs_on
from impls.pallas_gpu.mosaic_tiles import NO_HOPPER, find_device_limit
from impls.ragged import ragged_tpu
from impls.ragged.attention import UNSUPPORTED, Backend, attention, compute_parts
from impls.ragged.ragged_mosaic import find_cache_limit
from impls.ragged.ragged_plan import lower_lengths

# Blocks are small, so that a cache of 200 keys has several. Their sizes differ, so that lengths fall before, at and
# after the ends of blocks.
_JUDGED_SIZES: dict[Backend, dict[str, Any]] = {
    "portable": {"block_kv": 48},
    "tpu": {"block_kv": 64},
    "gpu": {"block_kv": 32, "num_splits": 3},
    "mosaic": {"num_splits": 2},
}
_VARIANTS: dict[Backend, dict[str, dict[str, Any]]] = {
    "portable": {"one_block": {"block_kv": 1024}, "blocks_of_7": {"block_kv": 7}},
    "tpu": {"default_block": {}, "blocks_of_128": {"block_kv": 128}},
    "gpu": {"default_splits": {}, "one_split": {"num_splits": 1}, "blocks_of_16": {"block_kv": 16, "num_splits": 2}},
    "mosaic": {"default_splits": {}, "one_split": {"num_splits": 1}},
}
_REFUSED_DTYPES: dict[Backend, dict[str, str]] = {
    "tpu": {"f16": "the matrix unit multiplies no float16"},
    "mosaic": {"f32": "multiplies bf16 and f16 only"},
}
_DESCRIPTIONS: dict[Backend, str] = {
    "portable": "in plain JAX, a loop as long as the longest sequence",
    "tpu": "in Pallas for TPU, a step for each block that holds a key",
    "gpu": "in Pallas for GPU (Triton), keys split over programs and merged",
    "mosaic": "in Pallas for Hopper GPUs (Mosaic), keys split over programs and merged",
}


def lower_mask(
    mask: Mask, batch: int, num_q_heads: int, q_length: int, kv_length: int
) -> tuple[Mapping[str, Hashable], Mapping[str, np.ndarray]]:
    """Lower a mask: lengths and positions become arrays, the rest stays a static mask."""
    formula, lengths, positions = lower_lengths(mask, batch, kv_length)
    return {"mask": formula}, {"lengths": lengths, "positions": positions}


def build_implementation(name: str, *, backend: Backend) -> Implementation:
    """Declare decode attention on `backend`, under `name`; interpreted unless the process runs on its platform."""
    options: dict[str, Any] = {"backend": backend, **_JUDGED_SIZES[backend]}
    call = functools.partial(attention, **options)
    refused = UNSUPPORTED | _REFUSED_DTYPES.get(backend, {})
    return Implementation(
        name=name,
        call=call,
        description=f"decode attention over a padded cache {_DESCRIPTIONS[backend]}",
        unsupported=refused,
        offers=frozenset({"own_window"}),
        supports_case=functools.partial(_find_case_limit, backend),
        arithmetic=Arithmetic(probabilities="input"),
        differentiable_residuals=frozenset(),
        gradients=frozenset(),
        empty_rows="zero",
        behind_mask="any",
        validates=True,
        lower_mask=lower_mask,
        accelerator=_build_accelerator(backend),
        variants={
            variant: functools.partial(attention, backend=backend, **changed)
            for variant, changed in _VARIANTS[backend].items()
        },
        memory="linear",
        parts=functools.partial(compute_parts, **options),
        merge=softmax_merge.merge,
    )


def _build_accelerator(backend: Backend) -> Accelerator:
    if backend == "portable":
        return Accelerator()
    if backend == "mosaic":
        return Accelerator(
            platform="gpu",
            absent=None if find_device_limit(get_device_kind("gpu")) is None else NO_HOPPER,
            native=functools.partial(attention, backend=backend, interpret=False),
            under_interpreter=functools.partial(_interpret_with, backend),
        )
    return Accelerator(
        platform=backend,
        interpreted=not runs_on(backend),
        native=functools.partial(attention, backend=backend, interpret=False),
        under_interpreter=functools.partial(_interpret_with, backend) if backend == "tpu" else None,
    )


def _interpret_with(backend: Backend, parameters: Any) -> Any:
    return functools.partial(attention, backend=backend, **_JUDGED_SIZES[backend], interpret=parameters)


def refuse_mixed_windows(case: Case) -> str | None:
    """Return why a window that moves with each sequence does not combine with the case's other masks, or None."""
    kinds = {kind for group in mask_spec.parse_mask_spec(case.mask) for kind, _ in group}
    mixed = "own" in kinds and kinds - {"own", "lengths"}
    return "own_window: combined with another mask than lengths" if mixed else None


def _find_case_limit(backend: Backend, case: Case) -> str | None:
    if (reason := refuse_mixed_windows(case)) is not None or backend not in ("tpu", "mosaic"):
        return reason
    if backend == "mosaic":
        return find_cache_limit(case.head_dim, case.v_head_dim, case.kv_length)
    rows = case.q_length * case.num_q_heads // case.num_kv_heads
    if rows <= ragged_tpu.MAX_ROWS:
        return None
    return f"{rows} rows (query tokens times query heads a key/value head), at most {ragged_tpu.MAX_ROWS} fit VMEM"


IMPLEMENTATIONS: tuple[Implementation, ...] = (
    build_implementation("ragged", backend="portable"),
    build_implementation("ragged_tpu", backend="tpu"),
    build_implementation("ragged_gpu", backend="gpu"),
    build_implementation("ragged_gpu_mosaic", backend="mosaic"),
)
