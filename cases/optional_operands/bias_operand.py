"""The operand `bias`: numbers, broadcastable to `[B, N, T, S]`, that are added to the scaled logits."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import numpy as np

from cases.case_fields import CallOperands, CaseFields
from cases.counter_rng import draw_normal
from cases.operand import OptionalOperand
from cases.operand_validation import CallSizes, validate_array, validate_dtype

# For each kind of bias, the axes of `[B, N, T, S]` along which it varies. Its length along the other axes is 1.
_AXES = {
    "bias": "BNTS",
    "biashead": "NTS",
    "biaskey": "BS",
    "biasbatch": "BTS",
    "biaspair": "TS",
    "biasslope": "NS",
    "biasinf": "BTS",
    "biasfirst": "BTS",
}
BIASES = tuple(_AXES)
"""The kinds of bias that a case id can name."""
HIDING = ("biasinf", "biasfirst")
"""The kinds of bias that hide keys, as a mask does. They leave a key to each query that sees one without the bias."""
# Of every ten keys, `biasinf` hides key 3 with minus infinity, and key 7 with the finite number that some models use in
# place of infinity.
_HIDDEN_OF_TEN = {3: -np.inf, 7: -1e9}
# `biasfirst` hides as many keys at the beginning: a whole block of most kernels. Of fewer keys, it hides half.
_FIRST_KEYS = 128


def _draw(case: CaseFields, problem: CallOperands, spread: float) -> np.ndarray:
    """Draw a bias as large as the logits' standard deviation, f32 except for `biaskey`, which has q's dtype."""
    assert case.bias is not None
    sizes = {"B": case.batch, "N": case.num_q_heads, "T": case.q_length, "S": case.kv_length}
    shape = tuple(size if axis in _AXES[case.bias] else 1 for axis, size in sizes.items())
    values = draw_normal(case.seed, "bias", shape) * max(1.0, spread / 2)
    if case.bias in HIDING:
        values = np.where(_select_hidden(case, problem), _build_hidden(case), values)
    return values.astype(problem.q.dtype if case.bias == "biaskey" else np.float32)


def _build_hidden(case: CaseFields) -> np.ndarray:
    """Build the entries `[S]` that a bias of `HIDING` may have; NaN at keys that it does not hide."""
    entries = np.full(case.kv_length, np.nan)
    if case.bias == "biasfirst":
        entries[: min(_FIRST_KEYS, case.kv_length // 2)] = -np.inf
    else:
        for key, hidden in _HIDDEN_OF_TEN.items():
            entries[key::10] = hidden
    return entries


def _select_hidden(case: CaseFields, problem: CallOperands) -> np.ndarray:
    """Select the pairs that a bias of `HIDING` hides, `[B, 1, T, S]`: none in rows that would have no key left."""
    hides = ~np.isnan(_build_hidden(case))
    allowed = problem.allowed
    emptied = allowed.any(axis=-1) & ~(allowed & ~hides).any(axis=-1)  # [b, n, T]
    kept = np.broadcast_to(emptied.any(axis=1), (case.batch, case.q_length))
    return (hides & ~kept[..., None])[:, None]


def _validate(name: str, value: Any, sizes: CallSizes, dtypes: Collection[str]) -> None:
    validate_array(name, value)
    full = (sizes.batch, sizes.num_q_heads, sizes.q_length, sizes.kv_length)
    if np.ndim(value) != 4 or not all(n in (1, m) for n, m in zip(np.shape(value), full, strict=True)):
        raise ValueError(f"{name} must have 4 axes broadcastable to {full}, got shape {np.shape(value)}")
    validate_dtype(name, value, dtypes)


def _compute_term(problem: CallOperands) -> np.ndarray:
    assert problem.bias is not None
    return problem.bias.astype(np.float64)


def _build_null(problem: CallOperands) -> np.ndarray:
    return np.zeros((1, 1, 1, problem.k.shape[1]), np.float32)


def _iter_traits(kind: str) -> Iterator[str]:
    """Yield phrases for the properties of a kind of bias that a fault may depend on."""
    for axis, what in (("T", "queries"), ("N", "heads")):
        if axis not in _AXES[kind]:
            yield f"a bias that is the same for all {what}"
    if kind in HIDING:
        yield "a bias that hides keys"


OPERAND = OptionalOperand(
    name="bias",
    arrays=(("B", "N", "T", "S"),),
    broadcasts=True,
    gradient="dbias",
    field="bias",
    form="bias",
    levels=BIASES,
    description="additive bias",
    words="a bias",
    traits={kind: tuple(_iter_traits(kind)) for kind in BIASES},
    # `biasinf` is in the grid of sizes. With both here, so many cases had a bias that faults were named worse.
    grid_levels=("bias", "biashead", "biaskey", "biasfirst"),
    combined_level="biashead",
    special=0.0,
    vmap="kv",
    draw=_draw,
    validate=_validate,
    null=_build_null,
    term=_compute_term,
)
