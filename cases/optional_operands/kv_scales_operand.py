"""The operand `kv_scales`: the scales by which a kernel multiplies the quantised `k` and `v` of a cache.

Quantising a tensor gives both its low-precision numbers and its scales. So this module has no `draw`:
`cases.operand_values.draw_problem` draws numbers and scales together.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from cases.case_fields import CallOperands
from cases.operand import OptionalOperand
from cases.operand_validation import CallSizes, validate_array, validate_pair
from cases.quantization import KV_CACHES, READ_CACHES, WHOLE_CACHES, WRITTEN_CACHES


def _validate(name: str, value: Any, sizes: CallSizes, dtypes: Collection[str]) -> None:
    validate_pair(name, value)
    full = (sizes.batch, sizes.kv_length, sizes.num_kv_heads)
    for side, scales in zip(("k", "v"), value, strict=True):
        validate_array(f"{name} of {side}", scales)
        fits = np.ndim(scales) == 3 and all(n in (1, m) for n, m in zip(np.shape(scales), full, strict=True))
        if not fits or np.shape(scales)[2] != sizes.num_kv_heads:
            raise ValueError(
                f"{name} of {side} must be [batch or 1, length or 1, heads] of {full}, got {np.shape(scales)}"
            )


def _build_null(problem: CallOperands) -> Any:
    """Build scales that are all 1; None if the problem has no scales."""
    return None if problem.kv_scales is None else tuple(np.ones_like(scales) for scales in problem.kv_scales)


OPERAND = OptionalOperand(
    name="kv_scales",
    arrays=(("B", "S", "K"), ("B", "S", "K")),
    broadcasts=True,
    field="kv_cache",
    form="kvKIND-BY",
    levels=(*KV_CACHES, *WHOLE_CACHES, *WRITTEN_CACHES),
    stored_levels=READ_CACHES,
    words="a quantised cache",
    grid_levels=KV_CACHES,
    special=1.0,
    is_rare=True,
    opt_in=True,
    vmap="kv",
    decoding=({"mask": "causal", "kv_cache": "kvint8-token"}, {"mask": "window-l9-r0", "kv_cache": "kvfp8-head"}),
    validate=_validate,
    null=_build_null,
)
