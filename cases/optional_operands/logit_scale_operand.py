"""The operand `logit_scale`: a learned factor of the logits for each query head, beside the fixed scale.

Cosine attention and attention with normalised queries and keys learn a temperature for each head: Swin v2
(arXiv:2111.09883, equation 2), ViT-22B (arXiv:2302.05442, section 2.1), query-key normalisation (arXiv:2010.04245).

    x_ij = logit_scale_n * scale * <q_i, k_j>, before the bias and the soft cap

The logit scale does not replace the scale: both multiply the product of query and key. A model whose temperature is the
only factor passes `scale=1`. The gradient of the logit scale is `sum_{b,i,j} dx_ij * scale * <q_i, k_j>`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from cases.case_fields import CallOperands, CaseFields
from cases.counter_rng import draw_normal
from cases.operand import OptionalOperand
from cases.operand_validation import CallSizes, validate_per_query_head

# The factors of head 0 and, by extrapolation, of head N (one past the last). Between them, heads differ visibly, and no
# softmax is nearly uniform or nearly one-hot.
_FIRST, _PAST_LAST = 0.6, 1.8


def _draw(case: CaseFields, problem: CallOperands, spread: float) -> np.ndarray:
    """Draw factors `[N]` that grow from head to head; none is a power of two, so that each product rounds."""
    heads = np.arange(case.num_q_heads) / case.num_q_heads
    noise = 2 ** (draw_normal(case.seed, "logit_scale", heads.shape) / 8)
    return (_FIRST * (_PAST_LAST / _FIRST) ** heads * noise).astype(np.float32)


def _validate(name: str, value: Any, sizes: CallSizes, dtypes: Collection[str]) -> None:
    validate_per_query_head(name, value, sizes, dtypes, one="factor")


def _compute_factor(problem: CallOperands) -> np.ndarray:
    assert problem.logit_scale is not None
    return problem.logit_scale.astype(np.float64)


def _build_null(problem: CallOperands) -> np.ndarray:
    return np.ones(problem.q.shape[2], np.float32)


OPERAND = OptionalOperand(
    name="logit_scale",
    arrays=(("N",),),
    gradient="dlogit_scale",
    field="logit_scale",
    form="logitscale",
    levels=(True,),
    description="one learned factor of the logits for each query head",
    words="a logit scale",
    opt_in=True,
    combined_level=True,
    special=1.0,
    is_absence_ignored=True,
    has_own_cases=True,
    vmap="logit_scale",
    calls={
        "tempered": {"mask": "causal", "logit_scale": True},
        "tempered_scaled": {"mask": "full", "logit_scale": True, "scale": 1.0},
        "tempered_token": {"phase": "decode", "mask": "full", "logit_scale": True, "q_length": 1, "kv_length": 72},
    },
    decoding=({"mask": "causal", "logit_scale": True},),
    draw=_draw,
    validate=_validate,
    null=_build_null,
    factor=_compute_factor,
)
