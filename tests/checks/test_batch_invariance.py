"""Tests of the check `batch_invariance`: a correct kernel passes, and planted bugs fail by their bits alone."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from cases.batch_cases import find_obstacle, list_shared_calls, select_batch_cases, share_case, share_problem
from cases.case_id import parse_case_id
from cases.operand_values import draw_problem
from conformance import declare
from conformance.check_api.scopes import BATCHED, ImplementationGrids
from conformance.checks import CHECKS_BY_NAME
from conformance.execution import implementation_registry
from conformance.judging import run_plan
from conformance.judging.runner import Runner
from conformance.judging.settings import Settings
from impls.contract.implementation import Implementation
from reports.records import FAIL, PASS, Record
from tests.bank import PlantedBug
from tests.planted.planting import invariant
from tests.planted.serving.batch_invariance import BUGS

PROMPT = "prefill/f32/B3.T12.S12.N2.K1.H16.V16/causal/normal/s0"
TOKEN = "decode/f32/B3.T1.S600.N2.K1.H16.V16/lengths-400-90-600/normal/s0"
PAGES = "prefill/f32/B3.T20.S40.N2.K1.H16.V16/own-linf-30-19-40/paged8-q20-9-20/normal/s0"
TOKENS = "decode/f32/B20.T1.S95.N2.K1.H16.V16/own-linf-{}/paged8/normal/s0".format(
    "-".join(str(76 + n) for n in range(20))
)
# A case on which each bug shows, and the calls in which it does.
SHOWN = {
    "splits-by-batch-size": (TOKENS.replace("own-linf", "lengths").replace("/paged8", ""), {"alone", "two"}),
    "splits-by-all-tokens": (TOKENS, {"alone", "two", "seven"}),
    "splits-by-the-longest-sequence": (TOKEN, {"alone"}),
    "blocks-by-batch-size": (TOKENS.replace("own-linf", "lengths").replace("/paged8", ""), {"alone", "two"}),
    "pages-added-by-index": (PAGES, {"pages"}),
    "padding-in-the-maximum": (TOKEN, {"padded"}),
    "another-order-for-one-sequence": (TOKEN, {"alone"}),
    "chunks-merged-by-logsumexp": (PROMPT, {"chunk5"}),
}


def judge(implementation: Implementation, case: str) -> dict[str, Record]:
    """Return the records of the check by observable."""
    planned = run_plan.plan_case(implementation, parse_case_id(case), [CHECKS_BY_NAME["batch_invariance"]])
    return {record.observable: record for record in Runner(Settings(), confirmed=0).run(planned.jobs)}


def list_failing_calls(found: dict[str, Record]) -> set[str]:
    assert found
    assert {record.verdict for record in found.values()} <= {PASS, FAIL}
    return {name.split(".")[1] for name, record in found.items() if record.verdict == FAIL}


def test_every_bug_has_a_case() -> None:
    assert set(SHOWN) == {bug.name for bug in BUGS}


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_bug_fails_and_the_kernel_without_it_passes(bug: PlantedBug) -> None:
    case, calls = SHOWN[bug.name]
    assert list_failing_calls(judge(bug.build(), case)) >= calls
    correct = invariant.paged if "/paged" in case else invariant.dense
    assert list_failing_calls(judge(correct("correct"), case)) == set()


def test_without_the_declaration_a_note_says_what_differs() -> None:
    bug = next(bug for bug in BUGS if bug.name == "another-order-for-one-sequence")
    declared = judge(bug.build(), TOKEN)
    found = judge(dataclasses.replace(bug.build(), batch_invariant=False), TOKEN)
    assert list_failing_calls(found) == set()
    assert declared["out.alone"].reason.startswith("bits of out of sequence 0 differ when it is alone and not one of 3")
    assert declared["out.alone"].reason in found["out.alone"].reason
    assert found["out.alone"].figures["differing_elements"] > 0


def test_our_paged_kernel_keeps_what_it_declares() -> None:
    paged = implementation_registry.find_implementation("paged")
    assert paged.batch_invariant
    assert list_failing_calls(judge(paged, PAGES)) == set()


def test_only_the_declaration_brings_cases_at_quick() -> None:
    kernel = invariant.dense("kernel")
    silent = dataclasses.replace(kernel, batch_invariant=False)
    assert BATCHED.cases(ImplementationGrids(silent, "quick", 0)) == ()
    assert len(BATCHED.cases(ImplementationGrids(silent, "standard", 0))) == 1
    split = dataclasses.replace(kernel, batch_invariant=(4096,))
    cases, more = (BATCHED.cases(ImplementationGrids(one, "quick", 0)) for one in (kernel, split))
    assert max(case.kv_length for case in more) > 4096 > max(case.kv_length for case in cases)


@pytest.mark.parametrize("form", [None, "packed", "paged", "latent", "latent_pages", "ring"])
def test_shared_calls_keep_the_operands_of_each_sequence(form: str | None) -> None:
    for case in select_batch_cases(form):
        assert find_obstacle(case) is None
        whole = draw_problem(case)
        for call in list_shared_calls(case):
            shared, queries = share_case(case, call)
            problem = share_problem(case, whole, call)
            assert parse_case_id(shared.id) == shared
            for n, row in enumerate(call.rows):
                keys = slice(0, shared.kv_lengths[n])
                np.testing.assert_array_equal(problem.q[n], whole.q[row, queries])
                np.testing.assert_array_equal(problem.k[n, keys], whole.k[row, keys])
                pairs = np.broadcast_to(problem.allowed, (len(call.rows), 1, *problem.allowed.shape[2:]))[n, 0]
                expected = np.broadcast_to(whole.allowed, (case.batch, 1, *whole.allowed.shape[2:]))[row, 0, queries]
                assert pairs.sum() == expected.sum()


@pytest.mark.parametrize("wrong", [(), (0, 1024)])
def test_a_wrong_declaration_is_refused(wrong: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="batch_invariant"):
        declare(batch_invariant=wrong)
    with pytest.raises(TypeError, match="batch_invariant"):
        declare(batch_invariant="yes")  # type: ignore[arg-type] # wrong on purpose
