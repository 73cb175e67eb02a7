"""Select cases with sequences so long that indices overflow small integers and lose precision in 16-bit floats.

Each case is long on one axis and short on the other. With blocks of 64 or 128, the index of a query block exceeds int8
and uint8. Query positions exceed int16 and uint16. Key positions are too large for bf16 and f16, which cannot represent
each one exactly.

The number of keys is limited: kernels that unroll their loop over keys would compile for minutes with more. One
decoding case has 33,024 keys (`cases.size_model`).

The edge of the window lies at the far end of the long axis. So an off-by-one error in a position there hides or exposes
a key.

Further cases have more batch rows, heads, or rows of stored queries (tokens times heads) than 65,535, the most blocks
that CUDA launches along the second and the third axis of a grid. They have few queries and few keys.
"""

from __future__ import annotations

from typing import Any

from cases.case import Case
from cases.grid import Supports

# Queries are 129 blocks of 512, 516 of 128 and 1,032 of 64; keys are 9, 36 and 72.
_QUERIES, _KEYS = 66_048, 4_608
# By how many elements the window is shorter than the long axis. Each of the last rows sees one key fewer than the row
# before it, but every row still sees a key. Likewise, each of the last keys is hidden from one more row.
_SHORT_OF = 124
# The first supported case of each line is used. The short axis has 128 elements, or 512 for kernels with blocks of 512.
# A causal mask stands in for the window where windows are unsupported.
_LINES = (
    tuple((_QUERIES, thin, mask) for mask in (f"window-l{_QUERIES - _SHORT_OF}-r0", "causal") for thin in (128, 512)),
    (
        *((thin, _KEYS, f"window-l3-r{_KEYS - _SHORT_OF}") for thin in (128, 512)),
        *((thin, _KEYS, f"causal-o{_KEYS - thin}") for thin in (128, 512)),
    ),
)
_DEPTHS = (16, 64, 128)
# Batch rows or heads.
_MANY = 66_048


def select_long_sequence_cases(seed: int = 0, supports: Supports = lambda case: None) -> tuple[Case, ...]:
    """Select one case with many queries and few keys, and one with few queries and many keys."""
    found = []
    for line in _LINES:
        cases = (_build_case(*sizes, depth, seed) for sizes in line for depth in _DEPTHS)
        found.append(next((case for case in cases if supports(case) is None), None))
    return tuple(case for case in found if case is not None)


def select_wide_cases(seed: int = 0, supports: Supports = lambda case: None) -> tuple[Case, ...]:
    """Select cases with many batch rows, many heads, and many packed or paged queries."""
    stored: dict[str, Any] = {"phase": "prefill", "batch": _MANY // 128, "q_length": 8, "kv_length": 8}
    stored |= {"num_q_heads": 16, "num_kv_heads": 2, "head_dim": 16, "v_head_dim": 16, "mask": "causal", "seed": seed}
    found = [Case(**stored, storage=storage) for storage in ("packed", "paged8")]
    for many in ({"batch": _MANY}, {"num_q_heads": _MANY, "num_kv_heads": _MANY}):
        sizes: dict[str, Any] = {"batch": 1, "num_q_heads": 1, "num_kv_heads": 1, **many}
        found.append(
            Case(phase="decode", q_length=1, kv_length=8, head_dim=16, v_head_dim=16, mask="full", seed=seed, **sizes)
        )
    return tuple(case for case in found if supports(case) is None)


def _build_case(q_length: int, kv_length: int, mask: str, depth: int, seed: int) -> Case:
    """Build the case with these sizes."""
    return Case(
        phase="train",
        dtype="f32",
        q_length=q_length,
        kv_length=kv_length,
        num_q_heads=1,
        num_kv_heads=1,
        head_dim=depth,
        v_head_dim=depth,
        mask=mask,
        seed=seed,
    )
