"""A server's life: prompts in chunks, then token by token, while sequences end and others take their pages.

The whole is one case in which every sequence is a prompt. Its life is a list of steps. At each step some requests have
a few queries each, the cache is written up to the last of them, and pages of requests that have ended are written
anew. What a page held before is still behind the length of the one that took it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from cases.case import Case
from cases.counter_rng import draw_integers
from cases.grid import Supports
from cases.masks import Lengths, OwnWindow, list_conjuncts
from cases.operand_values import Problem
from cases.quantization import PAGES_HOLD
from cases.storage_forms import storage_layout
from cases.storage_forms.storage_layout import NOBODY, Request

LENGTHS = (37, 24, 33, 16)
"""Tokens of each request."""
STEPS: tuple[tuple[tuple[int, int, int], ...], ...] = (
    ((0, 0, 13),),  # request, first query, one past the last
    ((0, 13, 26), (1, 0, 9)),
    ((1, 9, 22), (0, 26, 27)),
    ((0, 27, 28), (1, 22, 23), (2, 0, 10)),
    ((1, 23, 24), (2, 10, 23), (0, 28, 29)),
    # The second one has ended: the fourth takes its pages, and its row of the tables.
    ((0, 29, 30), (3, 0, 12), (2, 23, 32)),
    ((0, 30, 37), (3, 12, 15), (2, 32, 33)),
    ((3, 15, 16),),
)
_MAX_QUERIES = 13  # queries of a request in a step
_BUCKET = 32  # packed queries of a step, with padding
_MAX_SEQS = 4
_MASKS = ("inf", "7")
_PAGE = 8
_FORMS: tuple[dict[str, Any], ...] = (
    {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 32, "v_head_dim": 32},
    {"num_q_heads": 2, "num_kv_heads": 2},
    {"num_q_heads": 2, "num_kv_heads": 2, "head_dim": 128, "v_head_dim": 128, "dtype": "bf16"},
    {"num_q_heads": 4, "num_kv_heads": 1, "head_dim": 80, "v_head_dim": 64, "scale": 0.144, "storage": "latent"},
    {"num_q_heads": 16, "num_kv_heads": 1, "head_dim": 576, "v_head_dim": 512, "scale": 0.072, "storage": "latent"},
)


def build_traces(seed: int = 0, supports: Supports = lambda case: None) -> tuple[Case, ...]:
    """One case without a window and one with, in the first form that is supported, of each sort of pages."""
    found = []
    for cache, left in itertools.product(PAGES_HOLD, _MASKS):
        forms = (form for form in _FORMS if cache is None or "storage" not in form)
        cases = (
            _build_case(left, page, seed, {**form, "kv_cache": cache}) for form in forms for page in (_PAGE, 16, 32)
        )
        found.append(next((case for case in cases if supports(case) is None), None))
    return tuple(case for case in found if case is not None)


def _build_case(left: str, page: int, seed: int, form: dict[str, Any]) -> Case:
    ends = "-".join(map(str, LENGTHS))
    pages = form.get("storage", "paged")
    return dataclasses.replace(
        Case(
            phase="prefill",
            batch=len(LENGTHS),
            q_length=max(LENGTHS),
            kv_length=max(LENGTHS),
            mask=f"own-l{left}-{ends}",
            seed=seed,
        ),
        **{**form, "storage": f"{pages}{page}-q{ends}"},
    )


@dataclasses.dataclass(frozen=True)
class Step:
    """A step: its problem, and which queries of the whole it has, `(row, start, stop)` for each of its requests."""

    problem: Problem
    queries: tuple[tuple[int, int, int], ...]

    def remaining(self, row: int, stop: int) -> int:
        """How many tokens the sequence `row` has from `stop` on."""
        return LENGTHS[row] - stop


def iter_steps(case: Case, whole: Problem) -> Iterator[Step]:
    """The life of `whole`, the problem of one of `lives`; all steps have the same shapes."""
    assert whole.storage is not None
    size = whole.storage.held.shape[1]
    left = next(mask.left for mask in list_conjuncts(whole.mask) if isinstance(mask, OwnWindow))
    last = {row: stop for step in STEPS for row, _, stop in step}
    width = -(-max(LENGTHS) // size) + 1
    pool = 3 * width + 2
    # The pages that are taken first are those that were given back last.
    free = np.argsort(draw_integers(case.seed, "life", (pool,), 2**32), kind="stable").tolist()
    held = np.full((pool, size), NOBODY, np.int32)
    pages: dict[int, tuple[int, ...]] = {}
    for step in STEPS:
        requests = []
        for row, start, stop in step:
            own = pages.get(row, ())
            own = (*own, *(free.pop() for _ in range(-(-stop // size) - len(own))))
            pages[row] = own
            request = Request(row=row, queries=stop - start, keys=stop, pages=own)
            storage_layout.place_keys(held, request, case.kv_length, start)
            requests.append(request)
        yield Step(_build_step(case, whole, step, tuple(requests), held.copy(), width, left), step)
        for row, _, stop in step:
            if stop == last[row]:
                free.extend(pages.pop(row))


def _build_step(
    case: Case,
    whole: Problem,
    step: tuple[tuple[int, int, int], ...],
    requests: tuple[Request, ...],
    held: np.ndarray,
    width: int,
    left: int | None,
) -> Problem:
    """The problem of one step: the queries of each request are the last of `_MOST`."""
    assert whole.storage is not None
    q = np.zeros((case.batch, _MAX_QUERIES, *whole.q.shape[2:]), whole.q.dtype)
    ends = [0] * case.batch
    for row, start, stop in step:
        first = case.q_length - LENGTHS[row]  # where its first token is
        q[row, _MAX_QUERIES - (stop - start) :] = whole.q[row, first + start : first + stop]
        ends[row] = stop
    stored = storage_layout.build_paged(
        requests,
        (case.batch, _MAX_QUERIES, case.kv_length),
        held,
        max_seqs=_MAX_SEQS,
        total_q=_BUCKET,
        pages_per_seq=width,
        seed=case.seed,
        kind=whole.storage.kind,
    )
    mask = OwnWindow(left, tuple(n - _MAX_QUERIES for n in ends)) & Lengths(tuple(ends))
    return dataclasses.replace(whole, q=q, mask=mask, storage=stored)
