"""Count the blocks of queries and keys on which a kernel was judged, from the lengths of its judged cases.

A kernel may treat its first, middle and last block differently. Reports name kernels that were judged on too few.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

from cases.case import Case
from cases.case_id import parse_case_id
from conformance.check_api.scopes import GRID
from conformance.checks import CHECKS
from impls.contract.implementation import Implementation
from reports.records import JUDGED, Record

ENOUGH_BLOCKS = 3
"""The number of blocks that shows how an online softmax begins, goes on and ends; for queries and for keys."""
# Numbers of queries or keys that kernels commonly put in one block.
_USUAL_BLOCK_LENGTHS = (64, 128, 256, 512, 1024)
_NUMBER_WORDS = {1: "one", 2: "two"}
_GRID_CHECKS = frozenset(check.name for check in CHECKS if check.scope is GRID)


def describe_block_counts(block_lengths: Sequence[int], records: Iterable[Record]) -> str:
    """Name the too few blocks that a kernel was judged on, as in `"one block of 128 queries"`; empty if enough.

    The kernel's real block length is unknown. It is taken to be the largest number that divides all judged lengths of
    the grid, and `block_lengths`, which the kernel accepts. Lengths of one query or one key are ignored.
    """
    cases = _list_judged_cases(records)
    axes = {
        "queries": {case.q_length for case in cases if case.q_length > 1},
        "keys": {case.kv_length for case in cases if case.kv_length > 1},
    }
    words = []
    for name, lengths in axes.items():
        block = math.gcd(*lengths, *block_lengths)
        if lengths and (count := max(lengths) // block) < ENOUGH_BLOCKS:
            words.append(f"{_NUMBER_WORDS[count]} block{'s' if count > 1 else ''} of {block} {name}")
    return " and ".join(words)


def find_block_lengths(implementation: Implementation, cases: Iterable[Case]) -> list[int]:
    """Find which usual block lengths the implementation accepts as sequence lengths; empty if it accepts all.

    Each length replaces those of one example: the first of `cases`, by id, with more than one query.
    """
    example = next((case for case in sorted(cases, key=lambda case: case.id) if case.q_length > 1), None)
    if example is None or example.storage is not None:  # packed sequences may have any length
        return []
    candidates = [dataclasses.replace(example, q_length=n, kv_length=n, mask="full") for n in _USUAL_BLOCK_LENGTHS]
    accepted = [case.q_length for case in candidates if implementation.supports(case) is None]
    return accepted if len(accepted) < len(candidates) else []


def _list_judged_cases(records: Iterable[Record]) -> list[Case]:
    """List the cases of the grid that the records judge."""
    judged = {record.case for record in records if record.check in _GRID_CHECKS and record.verdict in JUDGED}
    return [parse_case_id(case) for case in sorted(judged)]
