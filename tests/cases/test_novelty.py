"""Novelty: what a case combines, beside which code numbers it stands, and what is worth judging next."""

from __future__ import annotations

import dataclasses

from cases.case import Case
from cases.case_space.code_numbers import NO_CODE_NUMBERS, CodeNumbers
from cases.case_space.novelty import Novelty, find_marks, find_number_marks, pair_marks


def test_code_numbers_give_lengths_at_below_and_above_them_and_their_multiples() -> None:
    numbers = CodeNumbers(integers=(100, 16))
    assert {99, 100, 101, 199, 200, 201, 299, 300, 301, 15, 16, 17} <= set(numbers.lengths)
    assert numbers.exact == (16, 32, 48, 100, 112, 200, 300)
    assert {1601, 1700, 1616} <= set(numbers.far)
    assert numbers.list_counts(20) == (15, 16, 17)
    assert list(numbers.lengths) == sorted(numbers.lengths)
    assert (numbers.describe_size(200), numbers.describe_size(17), numbers.describe_size(18)) == ("2*100", "16+1", "")


def test_levels_are_below_at_and_above_a_number() -> None:
    assert {40.0, 79.2, 80.0, 80.8, 160.0} == set(CodeNumbers(floats=(80.0,)).levels)
    assert CodeNumbers(floats=(1e30,)).levels == ()


def test_code_numbers_are_told_with_where_they_stand() -> None:
    numbers = CodeNumbers(integers=(128, 64), floats=(80.0,), in_source=frozenset({128.0, 80.0}))
    assert numbers.format_numbers() == "128, 80 (source); 64 (program)"
    assert NO_CODE_NUMBERS.format_numbers() == "none"
    assert not NO_CODE_NUMBERS


def test_a_case_stands_beside_the_code_numbers_that_its_sizes_are_next_to() -> None:
    case = Case(kv_length=257, q_length=40, soft_cap=50.0)
    assert find_number_marks(case, CodeNumbers(integers=(128,), floats=(50.0,))) == {"S 2*128+1", "soft_cap 50"}


def test_what_was_not_met_is_worth_more() -> None:
    plain, other = Case(), Case(mask="causal", dtype="bf16", sinks=True)
    novelty = Novelty([plain], NO_CODE_NUMBERS)
    assert novelty.count_new(plain) == 0
    assert novelty.count_new(other) == len(pair_marks(find_marks(other)) - pair_marks(find_marks(plain)))
    assert novelty.find_best([plain, other]) == other
    assert novelty.beyond == 0
    novelty.add_case(other)
    assert novelty.count_new(other) == 0
    assert novelty.beyond == len(pair_marks(find_marks(other)) - pair_marks(find_marks(plain)))


def test_a_code_number_is_worth_another_case_with_another_mask() -> None:
    case = Case(kv_length=384)
    novelty = Novelty([case, dataclasses.replace(case, mask="causal")], CodeNumbers(integers=(384,)))
    first = novelty.count_new(case)
    novelty.add_case(case)
    assert novelty.count_new(case) == 0
    assert 0 < novelty.count_new(dataclasses.replace(case, mask="causal")) < first
