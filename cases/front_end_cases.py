"""Cases fed by a model's front end: few, since each compiles a program of its own."""

from __future__ import annotations

from typing import Any

from cases.case import Case
from cases.grid import Supports

# Between them the first two have every step. The first is that of models that norm queries and keys, the second that of
# models with interleaved rotary, a norm after it, and one projection for k and v. The others are of no model: they have
# these steps once more, so that what is wrong in one of them shows in two cases. They have one norm each, since another
# would undo what is wrong in the first.
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
# (B, T, S, N, K, H, mask), of which the first that is supported is taken. In the first, positions do not start at zero.
# The others suit implementations that support less.
_SIZES = (
    (2, 40, 72, 4, 2, 32, "causal-o32"),
    (1, 64, 64, 4, 2, 64, "causal"),
    (1, 64, 64, 2, 2, 64, "causal"),
    (1, 128, 128, 4, 2, 64, "causal"),
    (1, 128, 128, 2, 2, 64, "causal"),
    (1, 128, 128, 2, 2, 128, "full"),
)
# Of steps that turn a third of the dimensions.
_THIRDS = ((2, 40, 72, 4, 2, 48, "causal-o32"), (1, 64, 64, 4, 2, 96, "causal"), (1, 128, 128, 2, 2, 96, "causal"))


def select_front_end_cases(level: str, seed: int, supports: Supports = lambda case: None) -> tuple[Case, ...]:
    """The cases at `level`: four at `quick`, one for each step and in bf16 too from `standard` on; with gradients."""
    wanted = [(steps, "f32") for steps in _QUICK]
    if level != "quick":
        wanted += [*((steps, "f32") for steps in _MORE), *((steps, "bf16") for steps in _QUICK)]
    found = []
    for steps, dtype in wanted:
        alternatives = (dtype, "bf16" if dtype == "f32" else "f32")
        cases = (_build_case(steps, other, seed, *sizes) for other in alternatives for sizes in _list_sizes(steps))
        found.append(next((case for case in cases if supports(case) is None), None))
    return tuple(dict.fromkeys(case for case in found if case is not None))


def _list_sizes(steps: str) -> tuple[tuple[int, int, int, int, int, int, str], ...]:
    return _THIRDS if "decoupled" in steps else _SIZES


def _build_case(steps: str, dtype: str, seed: int, b: int, t: int, s: int, n: int, k: int, h: int, mask: str) -> Case:
    sizes: dict[str, Any] = {"batch": b, "q_length": t, "kv_length": s, "num_q_heads": n, "num_kv_heads": k}
    return Case(**sizes, dtype=dtype, head_dim=h, v_head_dim=h, mask=mask, front_end=steps, seed=seed)
