"""Cases of a sequence that is computed piece by piece: chunks of a prompt, then single tokens.

The cache has the length of the whole sequence from the start, and more of it is filled with every piece. The last key
is never filled, so that the end of the cache is not that of the sequence.
"""

from __future__ import annotations

import dataclasses

from cases.case import Case
from cases.grid import Supports

LENGTH = 40
PIECES = ((0, 18), (18, 36), (36, 37), (38, 39))
"""First query, and one past the last, of each piece; what is left out was computed by somebody else."""

# Masks that say what a token sees when it is the last there is; a chunk ends where the first token is decoded.
_MASKS = ("causal", "window-l9-r0", "chunked-12")
_HEADS = ((4, 2), (2, 2))


def piece(case: Case, start: int, stop: int) -> Case:
    """The case of the queries `start` to `stop - 1` alone, at their positions."""
    return dataclasses.replace(
        case,
        phase="decode" if stop - start == 1 else "prefill",
        q_length=stop - start,
        mask=f"{case.mask}-o{start}" if start else case.mask,
    )


def decoded_cases(seed: int = 0, supports: Supports = lambda case: None) -> tuple[Case, ...]:
    """One case for each mask, of those whose pieces are all supported."""
    return tuple(case for mask in _MASKS if (case := _case(mask, seed, supports)) is not None)


def _case(mask: str, seed: int, supports: Supports) -> Case | None:
    for num_q_heads, num_kv_heads in _HEADS:
        case = Case(
            phase="prefill",
            batch=2,
            q_length=LENGTH,
            kv_length=LENGTH,
            num_q_heads=num_q_heads,
            num_kv_heads=num_kv_heads,
            mask=mask,
            seed=seed,
        )
        if all(supports(part) is None for part in (case, *(piece(case, *at) for at in PIECES))):
            return case
    return None
