"""Sequences that go farther than small integers and 16-bit floats count: few cases, long one way and thin the other.

Blocks of queries are more than int8 and uint8 can number, in blocks of 64 and of 128, and their places go beyond int16.
Places of keys go beyond what bf16 and f16 tell apart. There are no more, since kernels that unroll their loop over keys
would compile for minutes; decoding has 33,024. The border of a window lies at the far end, so that a place which is off
by one there hides a key or shows one.
"""

from __future__ import annotations

from cases.case import Case
from cases.grid import Supports

# 65 blocks of 512, 260 of 128 and 520 of 64; 9, 36 and 72.
_QUERIES, _KEYS = 33_280, 4_608
# The last rows lose a key each, and none loses all; likewise the last keys.
_SHORT_OF = 124
# Of each line the first that is supported is taken: the other way thin, or as thin as blocks of 512 are; without
# windows the causal mask, from the first key or up to the last.
_LINES = (
    tuple((_QUERIES, thin, mask) for mask in (f"window-l{_QUERIES - _SHORT_OF}-r0", "causal") for thin in (128, 512)),
    (
        *((thin, _KEYS, f"window-l3-r{_KEYS - _SHORT_OF}") for thin in (128, 512)),
        *((thin, _KEYS, f"causal-o{_KEYS - thin}") for thin in (128, 512)),
    ),
)
_DEPTHS = (16, 64, 128)


def select_long_sequence_cases(seed: int = 0, supports: Supports = lambda case: None) -> tuple[Case, ...]:
    """Many queries by few keys, and few by many, as far as they are supported."""
    found = []
    for line in _LINES:
        cases = (_build_case(*sizes, depth, seed) for sizes in line for depth in _DEPTHS)
        found.append(next((case for case in cases if supports(case) is None), None))
    return tuple(case for case in found if case is not None)


def _build_case(q_length: int, kv_length: int, mask: str, depth: int, seed: int) -> Case:
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
