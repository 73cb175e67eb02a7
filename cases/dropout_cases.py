"""Select the cases of the check `dropout`: weights are dropped at several rates, with masks and other operands.

Lengths are multiples of the depth of values where that is possible. Which weights are dropped is seen with values that
are one in one coordinate, so `S / V` calls show all of them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from cases.case import Case
from cases.grid import Supports

_GROUPED: dict[str, Any] = {"batch": 2, "num_q_heads": 4, "num_kv_heads": 2}
# At a rate of 0.5, a dropped and a kept weight are alike in number, and so is their factor 2. So most rates are others.
_QUICK: tuple[dict[str, Any], ...] = (
    _GROUPED | {"dropout_rate": 0.25, "mask": "causal", "soft_cap": 2.0, "sinks": True, "bias": "bias"},
    {"batch": 2, "dtype": "bf16", "q_length": 256, "kv_length": 256, "dropout_rate": 0.1},
    {"q_length": 40, "kv_length": 168, "num_q_heads": 4, "num_kv_heads": 1, "mask": "window-l31-r0-o128"}
    | {"segments": "seg", "dropout_rate": 0.5, "v_head_dim": 48},
    {"dtype": "f16", "mask": "causal", "num_q_heads": 6, "bias": "biashead", "dropout_rate": 0.9},
    {"dtype": "bf16", "q_length": 256, "kv_length": 256, "dropout_rate": 0.001},
)
_MORE: tuple[dict[str, Any], ...] = (
    _GROUPED | {"dtype": "bf16", "dropout_rate": 0.3, "mask": "dense-d60", "sinks": True},
    _GROUPED | {"dtype": "f16", "dropout_rate": 0.75, "mask": "window-l40-r9", "soft_cap": 30.0},
    {"batch": 3, "dropout_rate": 0.2, "mask": "lengths-9-64-50", "distribution": "large", "scale": 0.3},
    _GROUPED | {"dtype": "bf16", "q_length": 320, "kv_length": 320, "dropout_rate": 0.05, "mask": "causal"},
)
# Without these, a case is plainer. They are left out in turn until the implementation supports the case.
_PLAINER: tuple[dict[str, Any], ...] = (
    {"sinks": False},
    {"soft_cap": None},
    {"bias": None},
    {"segments": None},
    {"v_head_dim": 64},
    {"num_kv_heads": None},
    {"mask": "causal"},
    {"mask": "full"},
    {"q_length": 128, "kv_length": 128},
    {"dtype": "f32"},
)
_SIZES: dict[str, Any] = {"q_length": 64, "kv_length": 64}


def select_dropout_cases(level: str, seed: int, supports: Supports = lambda case: None) -> tuple[Case, ...]:
    """Select five cases with gradients, and beyond `quick` four more; empty if the implementation drops no weights."""
    if supports(Case(dropout_rate=0.25)) is not None and supports(Case(dropout_rate=0.25, mask="causal")) is not None:
        return ()
    wanted = _QUICK if level == "quick" else (*_QUICK, *_MORE)
    cases = (
        next((each for each in _iter_plainer(changes, seed) if supports(each) is None), None) for changes in wanted
    )
    return tuple(dict.fromkeys(case for case in cases if case is not None))


def _iter_plainer(changes: dict[str, Any], seed: int) -> Iterator[Case]:
    """Yield the case with these changes, then plainer ones: first without one of its properties, then without two."""
    wanted = {**_SIZES, **changes}
    for count in range(len(_PLAINER) + 1):
        for left_out in itertools.combinations(_PLAINER, count):
            fields = {**wanted, **{name: value for one in left_out for name, value in one.items()}}
            if fields.get("num_kv_heads", 0) is None:
                fields["num_kv_heads"] = fields.get("num_q_heads", 2)
            fields = {"num_kv_heads": fields.get("num_q_heads", 2)} | fields
            if fields.get("mask") == "causal" and fields["q_length"] != fields["kv_length"]:
                fields["mask"] = f"causal-o{fields['kv_length'] - fields['q_length']}"
            yield dataclasses.replace(Case(seed=seed), **fields)
