"""Calls that write pages: the grids, the rows of new tokens, and the pages before and after."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from cases import operand_values
from cases.case import Case
from cases.case_id import parse_case_id
from cases.grid import build_grid
from cases.operand_values import Problem
from cases.quantization import COMPUTED_CACHES, GIVEN_CACHES, SCALE_ERROR, UNIT_CACHES, find_largest
from cases.storage_forms import server_traces
from cases.storage_forms.page_writes import WRITE_FORMS, build_raw_operands, build_writing, find_slots, view_bits
from cases.storage_forms.paged_cases import find_models
from cases.storage_forms.paged_form import COMPUTED_FEATURES, WRITTEN_FEATURES
from cases.storage_forms.storage_layout import NOBODY, Storage
from cases.storage_forms.stored_cases import find_refusal

MIXED = parse_case_id("prefill/f32/B4.T13.S45.N4.K2.H16.V8/own-linf-45-32-33-9/paged16-q13-1-1-9/normal/s0")
SHARED = dataclasses.replace(MIXED, storage="shared16-q13-1-1-9")
GRIDS = [
    build_grid("quick", 0, lambda case: find_refusal(case, "paged", writes=True), model)
    for offers in (frozenset[str](), WRITTEN_FEATURES | COMPUTED_FEATURES)
    for model in find_models(True, offers)
]


def stored(case: Case) -> tuple[Problem, Storage]:
    problem = operand_values.draw_problem(case)
    assert problem.storage is not None
    return problem, problem.storage


def test_every_level_is_asked_of_a_call_that_writes() -> None:
    for made in GRIDS:
        assert made.declined == ()
        assert made.coverage.covered == made.coverage.feasible
        assert [case.id for case in made.cases if find_refusal(case, "paged", writes=True)] == []


def test_no_case_writes_a_page_that_sequences_share() -> None:
    shared = [case for made in GRIDS for case in made.cases if case.stored is not None and case.stored.shared]
    assert shared
    for case in {case.program: case for case in shared}.values():
        storage = stored(case)[1]
        where, size = find_slots(storage), storage.held.shape[1]
        owners = [
            set(storage.tables["page_indices"][b, : -(-storage.tables["kv_lens"][b] // size)].tolist())
            for b in range(case.batch)
        ]
        assert all(sum(page in pages for pages in owners) == 1 for page in where.page[where.there].tolist())


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (dataclasses.replace(SHARED, mask="own-linf-45-16-33-9"), "a page that sequences share would be written"),
        (dataclasses.replace(MIXED, mask="own-linf-45-32-0-9"), "more queries than keys"),
    ],
)
def test_what_no_server_writes_is_not_asked(case: Case, reason: str) -> None:
    assert reason in (find_refusal(case, "paged", writes=True) or "")
    assert find_refusal(case, "paged") is None


@pytest.mark.parametrize("case", [MIXED, SHARED], ids=str)
def test_tokens_are_the_last_keys_of_their_sequences(case: Case) -> None:
    _, storage = stored(case)
    where = find_slots(storage)
    keys = [
        b * case.kv_length + j
        for b, (q, n) in enumerate(zip(case.q_lengths, case.kv_lengths, strict=True))
        for j in range(n - q, n)
    ]
    assert where.key[where.there].tolist() == keys
    assert (storage.held[where.page, where.row][where.there] == where.key[where.there]).all()
    assert where.there.tolist() == (storage.q_rows != NOBODY).tolist()
    assert not where.there.all()  # there is padding, which goes nowhere


@pytest.mark.parametrize("finite", [False, True])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_pages_change_in_the_rows_of_new_tokens_alone(dtype: str, finite: bool) -> None:
    problem, storage = stored(dataclasses.replace(MIXED, dtype=dtype))
    what = build_writing(problem, 0, finite=finite)
    where = find_slots(storage)
    assert what.written.sum() == where.there.sum() == sum(MIXED.q_lengths)
    for name, pool, x in (("k", "k_pages", problem.k), ("v", "v_pages", problem.v)):
        changed = (view_bits(what.before[pool]) != view_bits(what.after[pool])).any(axis=(2, 3))
        assert (changed == what.written).all()
        dense = x.reshape(-1, *x.shape[2:])
        assert (what.after[pool][storage.held != NOBODY] == dense[storage.held[storage.held != NOBODY]]).all()
        nowhere = [what.before[pool][(storage.held == NOBODY) | what.written], what.tokens[name][~where.there]]
        assert all((np.isfinite(each.astype(np.float32)) == finite).all() for each in nowhere)
        # Rows that nobody owns differ, so that one that is moved shows.
        rows = view_bits(what.before[pool]).reshape(what.written.size, -1)
        assert len(np.unique(rows, axis=0)) == len(rows)


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("cache", [*GIVEN_CACHES, *UNIT_CACHES])
def test_every_right_rounding_stores_the_same_numbers(cache: str, dtype: str) -> None:
    problem, _ = stored(dataclasses.replace(MIXED, dtype=dtype, kv_cache=cache))
    assert problem.kv_scales is not None
    for name, x, scale in zip("kv", (problem.k, problem.v), problem.kv_scales, strict=True):
        raw, largest = build_raw_operands(problem)[name], find_largest(x.dtype)
        assert largest is not None
        assert raw.dtype == problem.q.dtype
        narrow = scale.astype(raw.dtype)
        quotients = {
            "exact": raw.astype(np.float64) / np.float64(scale),
            "narrow": raw / narrow,
            "reciprocal": raw * (raw.dtype.type(1) / narrow),
            "reciprocal in f32": raw.astype(np.float32) * (np.float32(1) / scale),
        }
        for about, quotient in quotients.items():
            clipped = np.clip(quotient.astype(np.float64), -largest, largest)
            rounded = (np.rint(clipped) if x.dtype == np.int8 else clipped).astype(x.dtype)
            assert (view_bits(rounded) == view_bits(x)).all(), about
        assert (np.abs(quotients["exact"]) > 1.05 * largest).mean() > 0.005
        assert (scale == 1) == cache.endswith("unit")


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("cache", COMPUTED_CACHES)
def test_scales_computed_with_roundings_store_the_same_numbers(cache: str, dtype: str) -> None:
    problem, _ = stored(dataclasses.replace(MIXED, dtype=dtype, kv_cache=cache))
    assert problem.kv_scales is not None
    for name, x, scales in zip("kv", (problem.k, problem.v), problem.kv_scales, strict=True):
        raw, largest = build_raw_operands(problem)[name].astype(np.float64), find_largest(x.dtype)
        assert largest is not None
        exact = np.abs(raw).max(axis=-1) / largest
        assert 0 < (exact == 0).mean() < 0.2
        assert (np.abs(exact - scales)[exact > 0] <= 2.0**-24 * exact[exact > 0]).all()
        for error in (-SCALE_ERROR, SCALE_ERROR):
            quotient = np.clip(raw / np.where(exact == 0, 1, exact * (1 + error))[..., None], -largest, largest)
            rounded = (np.rint(quotient) if x.dtype == np.int8 else quotient).astype(x.dtype)
            assert (view_bits(rounded) == view_bits(x)).all()


def test_a_life_writes_what_later_steps_read() -> None:
    case = server_traces.build_traces()[0]
    before = None
    for step in server_traces.iter_steps(case, operand_values.draw_problem(case)):
        what = build_writing(step.problem, 0, finite=False, before=before)
        storage = step.problem.storage
        assert storage is not None
        for name, x in zip(WRITE_FORMS["paged"].pools, (step.problem.k, step.problem.v), strict=True):
            for n, (row, _, stop) in enumerate(step.queries):
                j, size = np.arange(stop), storage.held.shape[1]
                assert (what.after[name][storage.tables["page_indices"][n, j // size], j % size] == x[row, :stop]).all()
        before = what.after
