"""Build the cases of the check `ensemble`: plain and long, so that errors of one sign add up."""

from __future__ import annotations

from cases.case import Case
from cases.grid import Supports

# (T, S, N, K, mask). The first supported line is used. Eight blocks of 64 keys, and a group of eight query heads, show
# whether a sum is rounded at every step. Without a mask the softmax is flat, and all terms of a sum have similar size.
# The later lines suit implementations that need more key/value heads, T = S, or a causal mask.
_SIZES = (
    (128, 512, 8, 1, "full"),
    (128, 512, 8, 2, "full"),
    (128, 512, 2, 2, "full"),
    (512, 512, 2, 2, "full"),
    (512, 512, 2, 1, "causal"),
    (512, 512, 2, 2, "causal"),
    (512, 512, 2, 2, "moba-64-8"),
)


# Cases in which a kernel may take another code path: a window with heads that share keys, one query over a cache, and
# gradients of keys that are summed over more than eight blocks of 64 or 128 queries.
_OTHER_PATHS = (
    ("train", 512, 512, 4, 2, "window-l80-r0"),
    ("decode", 1, 1024, 32, 4, "full"),
    ("train", 1152, 256, 2, 2, "full"),
)


def select_ensemble_cases(seed: int, supports: Supports = lambda case: None) -> tuple[Case, ...]:
    """Select the plain cases and three more in bf16: one with a window, one of decoding and one with many queries.

    Unsupported cases are left out.
    """
    elsewhere = (_build_case(where[0], "bf16", seed, *where[1:]) for where in _OTHER_PATHS)
    return (*select_plain_cases(seed, supports), *(case for case in elsewhere if supports(case) is None))


def select_plain_cases(seed: int, supports: Supports = lambda case: None) -> tuple[Case, ...]:
    """Select one case in bf16 and one in f16, with gradients where those are supported.

    Head depth 64 makes the scale a power of two, so rounding `q * scale` causes no error.
    """
    found = []
    for dtype in ("bf16", "f16"):
        cases = (_build_case(phase, dtype, seed, *sizes) for phase in ("train", "prefill") for sizes in _SIZES)
        found.append(next((case for case in cases if supports(case) is None), None))
    return tuple(case for case in found if case is not None)


def _build_case(phase: str, dtype: str, seed: int, t: int, s: int, n: int, k: int, mask: str) -> Case:
    """Build the case with these sizes."""
    return Case(phase=phase, dtype=dtype, q_length=t, kv_length=s, num_q_heads=n, num_kv_heads=k, mask=mask, seed=seed)
