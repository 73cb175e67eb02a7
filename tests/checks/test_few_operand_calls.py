"""Tests of calls with few operands: each has the stated operands, in several variants."""

from __future__ import annotations

import pytest

from cases.case_id import parse_case_id
from cases.operand_registry import REMOVABLE
from conformance.checks.few_operand_calls import CALLS, iter_variants

COMBINED = parse_case_id("train/f32/B2.T128.S128.N4.K2.H16.V48/causal/seg/softcap30/sinks/biashead/scale0.3/normal/s0")


@pytest.mark.parametrize("name", CALLS)
def test_a_call_has_the_operands_that_it_says_and_no_others_in_every_form(name: str) -> None:
    forms = list(iter_variants(COMBINED, CALLS[name]))
    assert [parse_case_id(case.id) for case in forms] == forms
    for case in forms:
        given = {o.field: getattr(case, o.field) for o in REMOVABLE if getattr(case, o.field) != o.absent}
        assert given == {o.field: CALLS[name][o.field] for o in REMOVABLE if o.field in CALLS[name]}
        assert len(given) <= 3
        assert case.mask == CALLS[name]["mask"]


def test_no_two_calls_have_the_same_operands_under_the_same_mask() -> None:
    said = [tuple(sorted(call.items())) for call in CALLS.values()]
    assert len(set(said)) == len(said)


@pytest.mark.parametrize("name", CALLS)
def test_heads_in_groups_and_sixteen_bits_come_first_and_whole_blocks_last(name: str) -> None:
    first, *_, last = iter_variants(COMBINED, CALLS[name])
    assert (first.dtype, last.dtype) == ("bf16", "f32")
    if "num_q_heads" not in CALLS[name]:
        grouped = CALLS[name].get("grouped", True)
        assert (first.num_q_heads > first.num_kv_heads) == grouped
        assert (last.num_q_heads == last.num_kv_heads) == grouped
    assert last.q_length == 1 or (last.q_length % 128, last.kv_length % 128) == (0, 0)
    assert first.q_length <= last.q_length < first.q_length + 128
