"""Strategies: what they draw is valid, reaches every part of the case space, and shrinks to the plainest case."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, find, given, seed, settings
from hypothesis.strategies import SearchStrategy

from cases import mask_spec
from cases.case import FEATURES, Case
from cases.case_fields import DISTRIBUTIONS, PHASES
from cases.case_id import matches_query, parse_case_id
from cases.case_space.alternatives import NothingToDraw, build_space
from cases.case_space.case_strategies import LONGEST, draw_cases
from cases.moba_mask import depends_on_data
from cases.operand_values import draw_problem
from cases.optional_operands.bias_operand import BIASES
from cases.optional_operands.segment_ids_operand import SEGMENTS
from cases.storage_forms.form_registry import FORMS
from cases.storage_forms.stored_cases import find_refusal

SETTINGS = settings(derandomize=True, deadline=None, max_examples=100, database=None)
PLAINEST = "train/f32/B1.T1.S1.N1.K1.H8.V8/full/normal/s0"


def drawn(batches: int, strategy: SearchStrategy[Case]) -> list[Case]:
    """Nine cases a batch: below ten Hypothesis draws each afresh, without variations of what it has drawn."""
    found: list[Case] = []
    for batch in range(batches):

        @seed(batch)
        @settings(
            SETTINGS,
            max_examples=9,
            derandomize=False,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(strategy)
        def collect(case: Case) -> None:
            found.append(case)

        collect()
    return found


def smallest(condition: Callable[[Case], bool]) -> str:
    return find(draw_cases(), condition, settings=settings(SETTINGS, max_examples=3000)).id


@SETTINGS
@given(draw_cases())
def test_a_drawn_case_is_valid_and_its_mask_fits_its_lengths(case: Case) -> None:
    assert parse_case_id(case.id) == case
    assert set(case.features) <= set(FEATURES)
    mask = mask_spec.build_mask(case.mask, case.batch, case.num_q_heads, case.q_length, case.kv_length, case.seed)
    mask.check_lengths(case.q_length, case.kv_length)
    if depends_on_data(mask):
        return
    dense = mask.dense(case.q_length, case.kv_length)
    assert dense.shape[0] in (1, case.batch)
    assert dense.shape[1] in (1, case.num_q_heads)
    assert dense.shape[2:] == (case.q_length, case.kv_length)


@SETTINGS
@given(draw_cases())
def test_sizes_stay_within_what_is_quickly_judged(case: Case) -> None:
    assert 1 <= case.q_length <= LONGEST
    assert 1 <= case.kv_length <= LONGEST
    assert 8 <= case.head_dim <= 136
    assert 8 <= case.v_head_dim <= 136
    pairs = case.q_length * case.kv_length
    assert case.batch * case.num_q_heads * pairs <= max(pairs, 150_000)
    if case.phase == "decode":
        assert case.q_length == 1
    if case.phase == "prefill":
        assert case.q_length <= case.kv_length


@settings(SETTINGS, max_examples=25)
@given(draw_cases())
def test_operands_can_be_drawn_for_a_drawn_case(case: Case) -> None:
    problem = draw_problem(case)
    assert problem.q.shape == (case.batch, case.q_length, case.num_q_heads, case.head_dim)
    assert problem.v.shape == (case.batch, case.kv_length, case.num_kv_heads, case.v_head_dim)


@pytest.mark.long
def test_every_part_of_the_space_is_reached() -> None:
    found = drawn(50, draw_cases())
    features = {feature for case in found for feature in case.features}
    # Forms are drawn only for those who take no others, below; cases with dropout have a check of their own.
    of_forms = {*FORMS, "tree", "placed", "later_pages", "packed_segments", "q_fp8", "q_descale"}
    of_forms |= {"kv_sequence_scales", "kv_mxfp8", "kv_nvfp4", "kv_channel_scales"}
    assert features == set(FEATURES) - of_forms - {"dropout"}
    for field, values in (("distribution", DISTRIBUTIONS), ("segments", SEGMENTS), ("bias", BIASES)):
        assert set(values) <= {getattr(case, field) for case in found}
    for part in ("_and_", "_or_", "-o-", "inf"):
        assert any(part in case.mask for case in found), part
    assert any(max(case.q_length, case.kv_length) > 300 for case in found)


@pytest.mark.long
def test_the_smallest_case_is_the_plainest() -> None:
    assert smallest(lambda case: True) == PLAINEST


@pytest.mark.long
@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        (lambda case: case.phase == "decode", "decode/f32/B1.T1.S1.N1.K1.H8.V8/full/normal/s0"),
        (lambda case: case.dtype == "f16", "train/f16/B1.T1.S1.N1.K1.H8.V8/full/normal/s0"),
        (lambda case: case.sinks, "train/f32/B1.T1.S1.N1.K1.H8.V8/full/sinks/normal/s0"),
        (lambda case: case.kv_length > 16, "train/f32/B1.T17.S17.N1.K1.H8.V8/full/normal/s0"),
        (lambda case: case.num_q_heads > case.num_kv_heads, "train/f32/B1.T1.S1.N2.K1.H8.V8/full/normal/s0"),
        (lambda case: case.mask.startswith("causal"), "train/f32/B1.T1.S1.N1.K1.H8.V8/causal/normal/s0"),
        (lambda case: case.distribution == "knee", "train/f32/B1.T1.S1.N1.K1.H8.V8/full/softcap30/knee/s0"),
    ],
)
def test_a_condition_shrinks_to_the_plainest_case_that_has_it(condition: Callable[[Case], bool], expected: str) -> None:
    assert smallest(condition) == expected


@pytest.mark.parametrize("phase", PHASES)
def test_phases_can_be_chosen(phase: str) -> None:
    assert {case.phase for case in drawn(1, draw_cases(phases=(phase,)))} == {phase}


def only(query: str) -> Callable[[Case], str | None]:
    return lambda case: None if matches_query(query, case.id) else "does not match"


@pytest.mark.long
@pytest.mark.parametrize(
    "query",
    ["train/bf16/*/causal", "*/densehead-d*/softcap*", "decode", "prefill/f16", "*/segpad", "*/scale*", "*/knee/*"],
)
def test_what_is_not_supported_is_hardly_ever_drawn(query: str) -> None:
    asked: list[bool] = []

    def supports(case: Case) -> str | None:
        reason = only(query)(case)
        asked.append(reason is None)
        return reason

    strategy = draw_cases(supports)
    asked.clear()
    found = drawn(4, strategy)
    assert all(matches_query(query, case.id) for case in found)
    assert sum(asked) >= len(asked) / 4


def test_lengths_and_depths_come_in_the_blocks_that_are_supported() -> None:
    def blocked(case: Case) -> str | None:
        if case.q_length % 128 or case.kv_length % 128 or case.head_dim % 64 or case.v_head_dim != case.head_dim:
            return "needs whole blocks"
        return None

    within = build_space(blocked)
    assert (within.length_step, within.depth_step, within.v_head_dim) == (128, 64, (False,))
    assert within.phases == ("train", "prefill")
    found = drawn(4, draw_cases(blocked))
    assert {case.kv_length for case in found} > {128, 256}


def test_a_space_with_nothing_in_it_says_why() -> None:
    with pytest.raises(NothingToDraw, match="no luck"):
        draw_cases(lambda case: "no luck")
    with pytest.raises(NothingToDraw, match="no phase to draw from"):
        draw_cases(phases=())


@pytest.mark.long
@pytest.mark.parametrize("kind", FORMS)
def test_stored_cases_are_drawn_for_those_who_take_no_others(kind: str) -> None:
    found = drawn(30, draw_cases(lambda case: find_refusal(case, kind)))
    assert {case.storage is not None for case in found} == {True}
    assert {kind} <= {feature for case in found for feature in case.features}
    assert all(parse_case_id(case.id) == case for case in found)
