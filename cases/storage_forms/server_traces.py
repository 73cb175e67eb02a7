"""Build traces of a server: requests are prefilled in chunks and decoded token by token, and new ones replace old ones.

A whole trace is one case in which every request is a prompt, and its results are the expected ones. The steps of a
trace are calls. In each call, some requests have a few queries, and their cache holds their keys up to the last query.
A new request takes the memory of one that ended. The memory keeps the old keys where the new request has written none.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from cases.case import Case
from cases.grid import Supports
from cases.masks import Lengths, OwnWindow, list_conjuncts
from cases.operand_values import Problem
from cases.quantization import split_level
from cases.storage_forms.form_cases import TraceStep, load_all_form_cases, load_form_cases
from cases.storage_forms.form_registry import FORMS
from cases.storage_forms.storage_layout import Storage

LENGTHS = (37, 24, 33, 16)
"""The number of tokens of each request of a trace."""
STEPS: tuple[TraceStep, ...] = (
    ((0, 0, 13),),
    ((0, 13, 26), (1, 0, 9)),
    ((1, 9, 22), (0, 26, 27)),
    ((0, 27, 28), (1, 22, 23), (2, 0, 10)),
    ((1, 23, 24), (2, 10, 23), (0, 28, 29)),
    # Request 1 has ended. Request 3 takes its memory, and its row of the tables.
    ((0, 29, 30), (3, 0, 12), (2, 23, 32)),
    ((0, 30, 37), (3, 12, 15), (2, 32, 33)),
    ((3, 15, 16),),
)
_MAX_QUERIES = 13  # the most queries that a request has in a step, and T of each step's problem


def build_traces(seed: int = 0, supports: Supports = lambda case: None) -> tuple[Case, ...]:
    """Build whole traces: one case per storage form, cache format and window, the first that `supports` accepts."""
    found = []
    for form, cases in load_all_form_cases().items():
        for cache, left in itertools.product(cases.caches, cases.trace_windows):
            candidates = (
                _build_case(form, left, size, seed, {**fields, **split_level(cache)})
                for fields in cases.trace_fields
                for size in cases.trace_sizes
            )
            found.append(next((case for case in candidates if supports(case) is None), None))
    return tuple(case for case in found if case is not None)


def _build_case(form: str, left: str, size: int, seed: int, fields: Mapping[str, Any]) -> Case:
    ends = "-".join(map(str, LENGTHS))
    return dataclasses.replace(
        Case(
            phase="prefill",
            batch=len(LENGTHS),
            q_length=max(LENGTHS),
            kv_length=max(LENGTHS),
            mask=f"own-l{left}-{ends}",
            seed=seed,
        ),
        **{**fields, "storage": FORMS[form].format(size, LENGTHS)},
    )


@dataclasses.dataclass(frozen=True)
class Step:
    """One call of a trace; `queries` has `(request, start, stop)` of the tokens whose results each request computes."""

    problem: Problem
    queries: TraceStep

    def count_remaining(self, row: int, stop: int) -> int:
        """Return how many tokens of the request `row` are left after its token `stop - 1`."""
        return LENGTHS[row] - stop


def iter_steps(case: Case, whole: Problem) -> Iterator[Step]:
    """Yield the steps of a trace, given its case from `build_traces`. All steps have the same shapes."""
    assert whole.storage is not None
    window = next(mask for mask in list_conjuncts(whole.mask) if isinstance(mask, OwnWindow))
    iter_layouts = load_form_cases(whole.storage.form).iter_trace_layouts
    assert iter_layouts is not None
    sizes = (case.batch, _MAX_QUERIES, case.kv_length)
    for step, storage in zip(STEPS, iter_layouts(case, STEPS, sizes), strict=True):
        yield Step(_build_problem(case, whole, step, storage, window), step)


def _build_problem(case: Case, whole: Problem, step: TraceStep, storage: Storage, window: OwnWindow) -> Problem:
    """Build the problem of a step, with T = `_MAX_QUERIES`; a request with fewer queries has the last ones."""
    q = np.zeros((case.batch, _MAX_QUERIES, *whole.q.shape[2:]), whole.q.dtype)
    ends = [0] * case.batch
    for row, start, stop in step:
        first = case.q_length - LENGTHS[row]  # the index along T of the request's first token, in `whole`
        q[row, _MAX_QUERIES - (stop - start) :] = whole.q[row, first + start : first + stop]
        ends[row] = stop
    own = dataclasses.replace(window, positions=tuple(n - _MAX_QUERIES for n in ends))
    return dataclasses.replace(whole, q=q, mask=own & Lengths(tuple(ends)), storage=storage)
