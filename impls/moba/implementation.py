"""What both forms declare."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal

from cases import mask_spec
from cases.case import Case
from conformance.contract import Accelerator, Arithmetic, Implementation
from impls.moba import dense, sparse
from impls.versions import runs_on

_UNSUPPORTED = {"segment_ids": "whether the mean of a chunk takes in other segments is not defined"}
_OTHER_ROWS = (16, 64)
_ANY = Accelerator()


def _only_moba(case: Case) -> str | None:
    kind, *others = mask_spec.parse(case.mask)[0]
    if kind[0] != "moba":
        return f"{mask_spec.features(case.mask)[0]}: only MoBA masks"
    return "moba: not combined with another mask" if others or "_or_" in case.mask else None


def _implementation(
    name: str,
    call: Callable[..., Any],
    description: str,
    *,
    variants: Mapping[str, Callable[..., Any]],
    memory: Literal["linear"] | None = None,
    checkpoint_names: tuple[str, ...] = (),
    refused: Mapping[str, str] = MappingProxyType({}),
    accelerator: Accelerator = _ANY,
) -> Implementation:
    return Implementation(
        name=name,
        call=call,
        description=description,
        offers=frozenset({"moba"}),
        unsupported={**_UNSUPPORTED, **refused},
        supports_case=_only_moba,
        arithmetic=Arithmetic(probabilities="input"),
        empty_rows="zero",
        behind_mask="any",
        validates=True,
        variants=variants,
        memory=memory,
        checkpoint_names=checkpoint_names,
        accelerator=accelerator,
    )


def _on_a_tpu(**options: Any) -> Callable[..., Any]:
    return functools.partial(sparse.attention, backend="tpu", **options)


def _interpreted_by(parameters: Any) -> Callable[..., Any]:
    return _on_a_tpu(keys_together=128, interpret=parameters)


IMPLEMENTATIONS: tuple[Implementation, ...] = (
    _implementation(
        "moba",
        sparse.attention,
        "mixture of block attention, block-sparse by the chunks that queries choose, any backend",
        variants={f"rows_{n}": functools.partial(sparse.attention, most_rows=n) for n in _OTHER_ROWS},
        memory="linear",
        checkpoint_names=("out", "logsumexp"),
    ),
    _implementation(
        "moba_tpu",
        _on_a_tpu(keys_together=128),  # so that chunks of more keys are gone through in steps
        "mixture of block attention in Pallas for TPU, a grid step for each block of queries that took a chunk",
        variants={"default_keys": _on_a_tpu(), "rows_16": _on_a_tpu(keys_together=128, most_rows=16)},
        memory="linear",
        checkpoint_names=("out", "logsumexp"),
        refused={"bias": "the kernels take none", "f16": "the matrix unit multiplies no float16"},
        accelerator=Accelerator(
            platform="tpu",
            interpreted=not runs_on("tpu"),
            native=_on_a_tpu(interpret=False),
            under_interpreter=_interpreted_by,
        ),
    ),
    _implementation(
        "moba_dense",
        dense.attention,
        "mixture of block attention as a mask over all logits, any backend",
        variants={"block_sparse": sparse.attention},
    ),
)
