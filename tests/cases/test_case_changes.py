"""Tests of changes of single numbers of a case: the result is valid, cheap, and has the number."""

from __future__ import annotations

import dataclasses

import hypothesis
from hypothesis import strategies as st

from cases.case import Case
from cases.case_space.case_changes import change_number, list_numbers, list_properties, reduce_case
from cases.case_space.case_strategies import draw_cases

_CASES = draw_cases()


@hypothesis.given(case=_CASES, data=st.data(), value=st.integers(1, 140_000))
@hypothesis.settings(max_examples=60, deadline=None)
def test_a_changed_case_has_the_number_and_is_cheap(case: Case, data: st.DataObject, value: int) -> None:
    name = data.draw(st.sampled_from(sorted(list_numbers(case))))
    changed = change_number(case, name, value)
    if changed is not None:
        assert list_numbers(changed).get(name, value) == value or name.startswith("mask")
        assert changed.batch * changed.num_q_heads * changed.q_length * changed.kv_length <= 2**21 or (
            name.startswith("mask") or name in ("soft_cap", "scale")
        )


def test_a_long_case_keeps_its_last_sequence_full() -> None:
    case = Case(batch=2, kv_length=64, q_length=1, phase="decode", mask="lengths-21-64")
    changed = change_number(case, "S", 5000)
    assert changed is not None
    assert changed.mask == "lengths-21-5000"


def test_the_last_query_stays_at_the_last_key() -> None:
    case = Case(q_length=32, kv_length=96, mask="causal-o64")
    changed = change_number(case, "S", 100)
    assert changed is not None
    assert changed.mask == "causal-o68"


@hypothesis.given(case=_CASES)
@hypothesis.settings(max_examples=30, deadline=None)
def test_reducing_a_case_ends(case: Case) -> None:
    for _ in range(100):
        plainer = next(iter(reduce_case(case)), None)
        if plainer is None:
            break
        case = plainer
    assert next(iter(reduce_case(case)), None) is None


def test_properties_include_each_dtype_mask_and_operand() -> None:
    changed = set(list_properties(Case(), lambda case: None))
    assert dataclasses.replace(Case(), dtype="f16") in changed
    assert dataclasses.replace(Case(), soft_cap=30.0) in changed
    assert any(case.mask == "causal" for case in changed)
    assert any(case.phase == "decode" for case in changed)
