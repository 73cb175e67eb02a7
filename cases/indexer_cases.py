"""Define the models of cases for lightning indexers (`cases.lightning_mask`)."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from cases.case import Case
from cases.covering_model import Axis, Lengths, Model

# Scores of `levels` are beyond the largest float16.
_VALUES = Axis("distribution", ("normal", "small", "levels", "heavy", "ties", "dominant", "cancel"), cheap=True)
_DTYPES = Axis("dtype", ("f32", "bf16", "f16"))


def _are_compatible(levels: Mapping[str, Any]) -> bool:
    """Return False for a causal indexer of fewer queries than keys: how it aligns them is not asked."""
    lengths = levels.get("lengths")
    return lengths is None or not levels.get("causal") or lengths.q == lengths.kv


def _assemble(levels: Mapping[str, Any], seed: int) -> Case:
    lengths, (batch, heads) = levels["lengths"], levels["heads"]
    return Case(
        phase=lengths.phase,
        q_length=lengths.q,
        kv_length=lengths.kv,
        batch=batch,
        num_q_heads=heads,
        num_kv_heads=1,
        head_dim=levels["depth"] + 1,
        v_head_dim=16,
        mask=f"lightning-{levels['topk']}{'-causal' if levels['causal'] else ''}",
        distribution=levels["distribution"],
        dtype=levels["dtype"],
        seed=seed,
    )


def _build_model(lengths: tuple[Lengths, ...], topk: tuple[int, ...]) -> Model:
    return Model(
        (
            Axis("lengths", lengths),
            Axis("topk", topk),
            Axis("causal", (False, True)),
            _VALUES,
            # (batch, heads)
            Axis("heads", ((1, 4), (2, 2), (3, 1), (1, 8))),
            Axis("depth", (64, 32, 15)),
            _DTYPES,
        ),
        _are_compatible,
        _assemble,
        strongest=3,
    )


@functools.cache
def build_indexer_models() -> tuple[Model, Model]:
    """Build the models of features and of sizes."""
    small = (
        Lengths("prefill", 72, 72),
        Lengths("prefill", 24, 130),
        Lengths("decode", 1, 200),
        Lengths("prefill", 9, 9),
    )
    large = (Lengths("prefill", 300, 300), Lengths("prefill", 5, 1030), Lengths("decode", 1, 2049))
    return _build_model(small, (8, 1, 33, 300)), _build_model(large, (16, 128, 600))
