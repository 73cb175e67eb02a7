"""Cases that are long and thin: which there are for whom, and that each tells right from wrong."""

from __future__ import annotations

import dataclasses

import pytest

from cases.case import Case
from cases.case_id import parse_case_id
from cases.long_sequence_cases import select_long_sequence_cases, select_wide_cases
from cases.operand_values import draw_problem
from conformance.check_api.scopes import GRID, ImplementationGrids
from conformance.check_api.subject import Subject
from conformance.execution import implementation_registry
from conformance.execution.executor import Executor
from conformance.judging.discrimination import REQUIRED_MARGIN, compute_margins, find_weakest_null
from conformance.truth.tolerances import load_default_tolerances


def test_places_and_blocks_go_beyond_what_small_types_count() -> None:
    queries, keys = select_long_sequence_cases()
    assert queries.q_length > 2**15, "places beyond int16"
    assert queries.q_length // 128 > 2**8, "blocks beyond uint8"
    assert keys.kv_length > 2**12, "places beyond f16, by more than one"
    assert (queries.kv_length, keys.q_length) == (128, 128)
    assert [parse_case_id(case.id) for case in (queries, keys)] == [queries, keys]


def test_no_row_is_empty_and_the_border_lies_at_the_far_end() -> None:
    queries, keys = select_long_sequence_cases()
    for case in (queries, keys):
        seen = draw_problem(case).allowed[0, 0]
        assert seen.any(axis=1).all()
        far = seen[-100:] if case is queries else seen[:, -100:]
        assert 0 < far.sum() < far.size


def test_other_kernels_are_asked_of_other_depths_lengths_and_masks() -> None:
    def usual(case: Case) -> str | None:
        fits = case.head_dim % 128 == case.q_length % 512 == case.kv_length % 512 == 0 and "window" not in case.mask
        return None if fits else "only multiples"

    found = select_long_sequence_cases(3, usual)
    assert [(case.q_length, case.kv_length, case.head_dim, case.seed) for case in found] == [
        (66048, 512, 128, 3),
        (512, 4608, 128, 3),
    ]
    assert [case.mask for case in found] == ["causal", "causal-o4096"]
    assert select_long_sequence_cases(0, lambda case: "nothing") == ()


def test_they_are_asked_from_standard_on() -> None:
    implementation = implementation_registry.find_implementation("dot_product")
    asked = ImplementationGrids(implementation, "quick", 0)
    large = {*select_long_sequence_cases(), *select_wide_cases(0, implementation.supports)}
    assert not large & set(GRID.cases(asked))
    assert large <= set(GRID.cases(dataclasses.replace(asked, level="standard")))


@pytest.mark.parametrize(("name", "form"), [("paged", "paged"), ("block_flash_packed", "packed")])
def test_stored_queries_are_more_than_the_blocks_of_a_launch_from_standard_on(name: str, form: str) -> None:
    implementation = implementation_registry.find_implementation(name)
    (case,) = select_wide_cases(0, implementation.supports)
    assert case.stored is not None
    assert case.stored.form == form
    assert case.batch * case.q_length * case.num_q_heads > 2**16
    assert case in GRID.cases(ImplementationGrids(implementation, "standard", 0))


def test_an_interpreted_kernel_is_not_asked_of_very_many_rows_and_heads() -> None:
    rows, heads = (case for case in select_wide_cases() if case.storage is None)
    assert min(rows.batch, heads.num_q_heads) > 2**16, "more than the blocks of a launch"
    implementation = implementation_registry.find_implementation("flash_gpu")
    assert implementation.supports(rows) is implementation.supports(heads) is None
    assert not {rows, heads} & set(GRID.cases(ImplementationGrids(implementation, "standard", 0)))


@pytest.mark.long
@pytest.mark.parametrize("case", [*select_long_sequence_cases(), *select_wide_cases()], ids=lambda case: case.id)
def test_each_discriminates(case: Case) -> None:
    null, margin = find_weakest_null(
        compute_margins(
            Subject(
                Executor(implementation_registry.find_implementation("dot_product")), case, load_default_tolerances()
            )
        )
    )
    assert margin >= REQUIRED_MARGIN, null
