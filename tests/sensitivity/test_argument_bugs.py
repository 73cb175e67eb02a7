"""Test that planted bugs of arguments, values, precision and state are wrong where their witnesses look.

The grid has no such cases. A witness is a question (`tests.planted.planting.witness`): checks of the gate on a case, on
another problem than the case draws, or checks that the gate does not have. The kernel without the bug must pass the
same question.
"""

from __future__ import annotations

import functools

import pytest

from cases.case_id import parse_case_id
from conformance.check_api.judgement import Judgement
from conformance.execution.plain_functions import build_implementation
from impls.contract.implementation import Implementation, structured_mask
from reports.records import ERROR, FAIL, PASS
from tests.bank import PlantedBug
from tests.kernels import naive
from tests.planted.beyond import (
    argument_bugs,
    borders,
    derivatives,
    precision,
    precision_backward,
    segment_ids,
    state,
    values,
)
from tests.planted.planting import blockwise, plain
from tests.planted.planting.steps import BlockSteps
from tests.planted.planting.witness import asked
from tests.sensitivity.argument_witnesses import WITNESSES

MODULES = (argument_bugs, segment_ids, values, precision, precision_backward, state, derivatives, borders)
BUGS: tuple[PlantedBug, ...] = tuple(bug for module in MODULES for bug in module.BUGS)
# A case with every operand, on which bugs that only calls and transformations show are right.
WITH_EVERYTHING = "train/f32/B2.T48.S48.N4.K2.H16.V16/causal/seg/softcap30/sinks/bias/normal/s1"
# Each lacks what the other has. A bug whose condition both cases have is a bug of values or of calls.
PLAIN_CASES = (
    "train/f32/B1.T48.S48.N2.K2.H16.V16/full/normal/s1",
    "prefill/bf16/B1.T48.S48.N2.K2.H16.V16/full/normal/s1",
)
# A side of a window that is too wide is made open before a kernel gets it (docs/contract.md, section 3).
OUT_OF_REACH = {"window-borders-wrap-in-int32"}
BLOCKWISE = {"pivot-raised-too-late", "pivot-over-hidden-logits"}


@functools.cache
def build_correct(kind: str) -> Implementation:
    """Return the kernel in which the bugs are planted, without any."""
    if kind == "plain":
        return plain.implementation("correct")
    if kind == "backward":
        return plain.implementation("correct", back=plain.BackwardSteps())
    if kind == "blockwise":
        return blockwise.implementation(BlockSteps(), "correct")
    return build_implementation(naive.attention, "correct")


def find_bases(bug: PlantedBug) -> list[str]:
    """Return the kinds of kernel in which the bug is planted."""
    if bug.name in BLOCKWISE:
        return ["blockwise"]
    return ["plain", "backward"] if bug.build().lower_mask is structured_mask else ["naive"]


def shows(bug: PlantedBug, judgement: Judgement) -> bool:
    """Tell whether a judgement is red in an observable that the bug declares."""
    if judgement.verdict == ERROR:
        return "error" in bug.shows
    observable = judgement.observable
    return judgement.verdict == FAIL and bool({observable, observable.partition(".")[0]} & set(bug.shows))


def test_every_bug_has_a_witness() -> None:
    assert {bug.name for bug in BUGS} == set(WITNESSES)
    assert len({bug.name for bug in BUGS}) == len(BUGS) >= 85


@pytest.mark.nightly
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_wrong_where_its_witness_looks(bug: PlantedBug) -> None:
    if (reason := bug.unmeasurable()) is not None:
        pytest.skip(reason)
    found = WITNESSES[bug.name](bug.build())
    seen = any(shows(bug, judgement) for judgement in found)
    assert seen == (bug.name not in OUT_OF_REACH), [(j.observable, j.verdict, j.ratio) for j in found]


@pytest.mark.nightly
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_the_kernel_without_the_bug_is_right_there(bug: PlantedBug) -> None:
    for kind in find_bases(bug):
        found = WITNESSES[bug.name](build_correct(kind))
        assert [(j.observable, j.verdict, j.reason) for j in found if j.verdict in (FAIL, ERROR)] == []
        assert any(judgement.verdict == PASS for judgement in found)


@pytest.mark.nightly
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_right_where_its_condition_is_absent(bug: PlantedBug) -> None:
    absent = [case for case in PLAIN_CASES if not bug.trigger(parse_case_id(case))]
    for case in absent[:1]:
        found = asked(case)(bug.build())
        assert [(j.observable, j.verdict, j.reason) for j in found if j.verdict in (FAIL, ERROR)] == []


@pytest.mark.nightly
@pytest.mark.parametrize("bug", [*state.BUGS, *derivatives.BUGS], ids=lambda bug: bug.name)
def test_a_bug_of_calls_and_transformations_is_right_in_a_plain_call(bug: PlantedBug) -> None:
    found = asked(WITH_EVERYTHING)(bug.build())
    assert [(j.observable, j.verdict, j.reason) for j in found if j.verdict in (FAIL, ERROR)] == []
