"""What is added to the logits of a case, or bends them by formula: bias, slopes of ALiBi, scores.

All of it is as large as the logits' own spread, so that it matters and that they do.
"""

from __future__ import annotations

import numpy as np

from cases import score_functions
from cases.case import Case
from cases.counter_rng import draw_normal
from cases.score_functions import Score

# Which axes of `[B, N, T, S]` a bias goes along; it is 1 long on the others.
_BIAS_AXES = {
    "bias": "BNTS",
    "biashead": "NTS",
    "biaskey": "BS",
    "biasbatch": "BTS",
    "biaspair": "TS",
    "biasslope": "NS",
    "biasinf": "BTS",
}
# A bias that is a mask: of ten keys one is hidden by minus infinity, and one as people write it who fear infinities.
_HIDDEN = {3: -np.inf, 7: -1e9}


def draw_bias(case: Case, spread: float, dtype: np.dtype) -> np.ndarray | None:
    """Bias for logits of this spread; `biaskey` comes in the operands' `dtype`, the others in f32."""
    if case.bias is None:
        return None
    sizes = {"B": case.batch, "N": case.num_q_heads, "T": case.q_length, "S": case.kv_length}
    shape = tuple(size if axis in _BIAS_AXES[case.bias] else 1 for axis, size in sizes.items())
    values = draw_normal(case.seed, "bias", shape) * max(1.0, spread / 2)
    if case.bias == "biasinf":
        for key, hidden in _HIDDEN.items():
            values[..., key::10] = hidden
    return values.astype(dtype if case.bias == "biaskey" else np.float32)


# By how much the logit of the furthest key falls, in the first head and in the one past the last.
_FALLS = (6.0, 1.5)


def draw_alibi_slopes(case: Case, spread: float) -> np.ndarray | None:
    """Less from head to head, and no powers of two; so steep that the furthest key still has a visible weight."""
    if not case.alibi:
        return None
    heads = np.arange(case.num_q_heads) / case.num_q_heads
    falls = _FALLS[0] * (_FALLS[1] / _FALLS[0]) ** heads * 2 ** (draw_normal(case.seed, "alibi", heads.shape) / 8)
    return (falls * max(1.0, spread / 2) / max(case.q_length, case.kv_length)).astype(np.float32)


def build_case_score(case: Case, spread: float) -> Score | None:
    """The score by formula, the same for every seed: calls that are mapped over share it."""
    if case.score is None:
        return None
    sizes = {"num_q_heads": case.num_q_heads, "q_length": case.q_length, "kv_length": case.kv_length}
    return score_functions.build_score(case.score, spread=spread, **sizes)
