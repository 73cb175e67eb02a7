"""Build the cases of the check `front_end`, whose operands come from a model's norms, rotary positions and scales.

They are few, since each compiles a program of its own.
"""

from __future__ import annotations

from typing import Any

from cases.case import Case
from cases.grid import Supports

# The first front end occurs in models that normalise queries and keys. The second occurs in models with interleaved
# rotary, a norm after it, and one projection for k and v. The other two occur in no model. They repeat the steps, so
# that a bug in one step shows in two cases. Each has one norm, since a second norm would hide a bug of the first.
_QUICK = (
    "rms-half-temperature",
    "interleaved-l2-prescale-shared",
    "rms-interleaved-half-prescale-temperature-shared",
    "half-l2",
)
_MORE = (
    "half",
    "interleaved",
    "partial",
    "sections",
    "rms-sections-prescale",
    "partial-rms",
    "temperature-l2-partial",
    "decoupled",
)
# (B, T, S, N, K, H, mask). The first supported line is used. In the first line, query positions do not start at zero.
# The other lines suit implementations that support less.
_SIZES = (
    (2, 40, 72, 4, 2, 32, "causal-o32"),
    (1, 64, 64, 4, 2, 64, "causal"),
    (1, 64, 64, 2, 2, 64, "causal"),
    (1, 128, 128, 4, 2, 64, "causal"),
    (1, 128, 128, 2, 2, 64, "causal"),
    (1, 128, 128, 2, 2, 128, "full"),
)
# Sizes for steps that rotate a third of the dimensions.
_THIRDS = ((2, 40, 72, 4, 2, 48, "causal-o32"), (1, 64, 64, 4, 2, 96, "causal"), (1, 128, 128, 2, 2, 96, "causal"))


def select_front_end_cases(level: str, seed: int, supports: Supports = lambda case: None) -> tuple[Case, ...]:
    """Select cases with gradients: four at `quick`. Higher levels add these in bf16, and eight more front ends."""
    wanted = [(steps, "f32") for steps in _QUICK]
    if level != "quick":
        wanted += [*((steps, "f32") for steps in _MORE), *((steps, "bf16") for steps in _QUICK)]
    found = []
    for steps, dtype in wanted:
        alternatives = (dtype, "bf16" if dtype == "f32" else "f32")
        cases = (
            _build_case(steps, other, seed, *sizes)
            for other in alternatives
            for sizes in (_THIRDS if "decoupled" in steps else _SIZES)
        )
        found.append(next((case for case in cases if supports(case) is None), None))
    return tuple(dict.fromkeys(case for case in found if case is not None))


def _build_case(steps: str, dtype: str, seed: int, b: int, t: int, s: int, n: int, k: int, h: int, mask: str) -> Case:
    """Build the case with these steps and sizes."""
    sizes: dict[str, Any] = {"batch": b, "q_length": t, "kv_length": s, "num_q_heads": n, "num_kv_heads": k}
    return Case(**sizes, dtype=dtype, head_dim=h, v_head_dim=h, mask=mask, front_end=steps, seed=seed)
