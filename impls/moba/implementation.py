"""Declare mixture of block attention (MoBA) as implementations to judge: block-sparse, in Pallas for TPU, and dense."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal

from cases import mask_spec
from cases.case import Case
from impls.contract.declarations import Arithmetic
from impls.contract.implementation import Accelerator, Implementation
from impls.jax_compat import runs_on
from impls.moba import moba_dense, moba_sparse

_UNSUPPORTED = {"segment_ids": "whether the mean of a chunk takes in other segments is not defined"}
_VARIANT_ROWS = (16, 64)
_ANY_ACCELERATOR = Accelerator()


def _refuse_other_masks(case: Case) -> str | None:
    kind, *others = mask_spec.parse_mask_spec(case.mask)[0]
    if kind[0] != "moba":
        return f"{mask_spec.list_mask_features(case.mask)[0]}: only MoBA masks"
    return "moba: not combined with another mask" if others or "_or_" in case.mask else None


def _build_implementation(
    name: str,
    call: Callable[..., Any],
    description: str,
    *,
    variants: Mapping[str, Callable[..., Any]],
    memory: Literal["linear"] | None = None,
    checkpoint_names: tuple[str, ...] = (),
    refused: Mapping[str, str] = MappingProxyType({}),
    accelerator: Accelerator = _ANY_ACCELERATOR,
) -> Implementation:
    return Implementation(
        name=name,
        call=call,
        description=description,
        offers=frozenset({"moba"}),
        unsupported={**_UNSUPPORTED, **refused},
        supports_case=_refuse_other_masks,
        arithmetic=Arithmetic(probabilities="input"),
        empty_rows="zero",
        behind_mask="any",
        validates=True,
        variants=variants,
        memory=memory,
        checkpoint_names=checkpoint_names,
        accelerator=accelerator,
    )


def _bind_tpu_call(**options: Any) -> Callable[..., Any]:
    return functools.partial(moba_sparse.attention, backend="tpu", **options)


def _interpret_with(parameters: Any) -> Callable[..., Any]:
    return _bind_tpu_call(keys_together=128, interpret=parameters)


IMPLEMENTATIONS: tuple[Implementation, ...] = (
    _build_implementation(
        "moba",
        moba_sparse.attention,
        "mixture of block attention, block-sparse by the chunks that queries choose, any backend",
        variants={f"rows_{n}": functools.partial(moba_sparse.attention, most_rows=n) for n in _VARIANT_ROWS},
        memory="linear",
        checkpoint_names=("out", "logsumexp"),
    ),
    _build_implementation(
        "moba_tpu",
        _bind_tpu_call(keys_together=128),  # below the default, so that chunks above 128 keys take several steps
        "mixture of block attention in Pallas for TPU, a grid step for each block of queries that took a chunk",
        variants={"default_keys": _bind_tpu_call(), "rows_16": _bind_tpu_call(keys_together=128, most_rows=16)},
        memory="linear",
        checkpoint_names=("out", "logsumexp"),
        refused={"bias": "the kernels take none", "f16": "the matrix unit multiplies no float16"},
        accelerator=Accelerator(
            platform="tpu",
            interpreted=not runs_on("tpu"),
            native=_bind_tpu_call(interpret=False),
            under_interpreter=_interpret_with,
        ),
    ),
    _build_implementation(
        "moba_dense",
        moba_dense.attention,
        "mixture of block attention as a mask over all logits, any backend",
        variants={"block_sparse": moba_sparse.attention},
    ),
)
