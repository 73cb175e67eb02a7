"""How many blocks a kernel was asked about, by the lengths on which it was judged."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

from cases.case import Case, parse_case_id
from conformance.check_api.scopes import GRID
from conformance.checks import CHECKS
from conformance.contract import Implementation
from conformance.records import JUDGED, Record

ENOUGH_BLOCKS = 3
"""Blocks each way in which an online softmax begins, goes on and ends."""
# Of blocks, as kernels have them.
_USUAL_BLOCK_LENGTHS = (64, 128, 256, 512, 1024)
_NUMBER_WORDS = {1: "one", 2: "two"}
_GRID_CHECKS = frozenset(check.name for check in CHECKS if check.scope is GRID)


def describe_few_blocks(implementation: Implementation, found: Iterable[Record]) -> str:
    """What lengths leave unasked, in words: `"one block of 128 queries"`; empty if there are blocks enough.

    A block is what divides all lengths that were judged on the grid, and the usual lengths of blocks that the
    implementation takes, where it says which. A single query is no block.
    """
    theirs = [record for record in found if record.implementation == implementation.name]
    return describe_block_counts(find_block_lengths(implementation, _list_judged_cases(theirs)), theirs)


def describe_block_counts(usual: Sequence[int], found: Iterable[Record]) -> str:
    """The same, from the usual lengths that an implementation takes and the records of it."""
    cases = _list_judged_cases(found)
    axes = {
        "queries": {case.q_length for case in cases if case.q_length > 1},
        "keys": {case.kv_length for case in cases if case.kv_length > 1},
    }
    words = []
    for name, lengths in axes.items():
        block = math.gcd(*lengths, *usual)
        if lengths and (count := max(lengths) // block) < ENOUGH_BLOCKS:
            words.append(f"{_NUMBER_WORDS[count]} block{'s' if count > 1 else ''} of {block} {name}")
    return " and ".join(words)


def find_block_lengths(implementation: Implementation, cases: Iterable[Case]) -> list[int]:
    """Lengths of blocks that the implementation takes as a sequence's, if it declares that it does not take others.

    They are tried on the first of `cases` by id that has more than one query.
    """
    whole = next((case for case in sorted(cases, key=lambda case: case.id) if case.q_length > 1), None)
    if whole is None or whole.storage is not None:  # of packed sequences none is a whole number of blocks
        return []
    square = [dataclasses.replace(whole, q_length=n, kv_length=n, mask="full") for n in _USUAL_BLOCK_LENGTHS]
    taken = [case.q_length for case in square if implementation.supports(case) is None]
    return taken if len(taken) < len(square) else []


def _list_judged_cases(found: Iterable[Record]) -> list[Case]:
    judged = {record.case for record in found if record.check in _GRID_CHECKS and record.verdict in JUDGED}
    return [parse_case_id(case) for case in sorted(judged)]
