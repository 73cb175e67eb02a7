"""Calls with one operand or none: they are what they say, and each can be asked in several forms."""

from __future__ import annotations

import pytest

from cases.case import parse
from cases.operands import REMOVABLE
from conformance.asking.few_operands import CALLS, forms_of

RICH = parse("train/f32/B2.T128.S128.N4.K2.H16.V48/causal/seg/softcap30/sinks/biashead/scale0.3/normal/s0")


@pytest.mark.parametrize("name", CALLS)
def test_a_call_has_one_operand_or_none_in_every_form(name: str) -> None:
    forms = list(forms_of(RICH, CALLS[name]))
    assert [parse(case.id) for case in forms] == forms
    for case in forms:
        given = [operand.field for operand in REMOVABLE if getattr(case, operand.field) != operand.absent]
        assert len(given) <= 1
        assert case.mask == CALLS[name]["mask"]


@pytest.mark.parametrize("name", CALLS)
def test_heads_in_groups_and_sixteen_bits_come_first_and_whole_blocks_last(name: str) -> None:
    first, *_, last = forms_of(RICH, CALLS[name])
    assert (first.dtype, last.dtype) == ("bf16", "f32")
    assert first.num_q_heads > first.num_kv_heads
    assert last.num_q_heads == last.num_kv_heads
    assert last.q_length == 1 or (last.q_length, last.kv_length) == (128, 128)
