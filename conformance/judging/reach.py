"""How many blocks a kernel could be asked about, by the lengths that it takes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

from cases.case import Case
from conformance.contract import Implementation
from conformance.judging.job import Job

ENOUGH = 3
"""Blocks each way in which an online softmax begins, goes on and ends."""
# Of blocks, as kernels have them.
_USUAL = (64, 128, 256, 512, 1024)
_NUMBERS = ("no", "one", "two")


def few_blocks(implementation: Implementation, jobs: Iterable[Job]) -> str:
    """What lengths leave unasked, in words: `"one block of 128 queries"`; empty if there are blocks enough.

    A block is what divides all lengths that the cases of the grid have, and the usual lengths of blocks that the
    implementation takes. A single query is no block.
    """
    cases = [job.case for job in jobs if job.on_grid]
    taken = _usual_lengths(implementation, cases)
    axes = {
        "queries": {case.q_length for case in cases if case.q_length > 1},
        "keys": {case.kv_length for case in cases if case.kv_length > 1},
    }
    found = []
    for name, lengths in axes.items():
        block = math.gcd(*lengths, *taken)
        if lengths and (count := max(lengths) // block) < ENOUGH:
            found.append(f"{_NUMBERS[count]} block{'s' if count > 1 else ''} of {block} {name}")
    return " and ".join(found)


def _usual_lengths(implementation: Implementation, cases: Sequence[Case]) -> list[int]:
    """Lengths of blocks that the implementation takes as a sequence's, of queries and keys alike."""
    whole = next((case for case in cases if case.q_length > 1), None)
    if whole is None:
        return []
    square = (dataclasses.replace(whole, q_length=n, kv_length=n, mask="full") for n in _USUAL)
    return [case.q_length for case in square if implementation.supports(case) is None]
