"""What both forms declare."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

from cases import mask_spec
from cases.case import Case
from conformance.contract import Arithmetic, Implementation
from impls.moba import dense, sparse

_UNSUPPORTED = {"segment_ids": "whether the mean of a chunk takes in other segments is not defined"}
_OTHER_ROWS = (16, 64)


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
) -> Implementation:
    return Implementation(
        name=name,
        call=call,
        description=description,
        offers=frozenset({"moba"}),
        unsupported=_UNSUPPORTED,
        supports_case=_only_moba,
        arithmetic=Arithmetic(probabilities="input"),
        empty_rows="zero",
        behind_mask="any",
        validates=True,
        variants=variants,
        memory=memory,
        checkpoint_names=checkpoint_names,
    )


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
        "moba_dense",
        dense.attention,
        "mixture of block attention as a mask over all logits, any backend",
        variants={"block_sparse": sparse.attention},
    ),
)
