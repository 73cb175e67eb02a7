"""Further results are judged: the largest logit of each head, and weights before and after dropout."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from cases.case_id import parse_case_id
from cases.operand_registry import FURTHER_RESULTS, RESIDUALS
from cases.operand_values import draw_problem
from conformance import declare
from conformance.check_api.judgement import select_subchecks
from conformance.check_api.subject import Subject
from conformance.checks.forward import judge_further as judge_results
from conformance.execution.executor import Executor
from conformance.execution.plain_functions import build_implementation
from conformance.judging import run_plan
from conformance.truth import oracle
from conformance.truth.declared_formulas import compute_declared_expectation
from conformance.truth.rounding_bounds import Expectation
from conformance.truth.tolerances import load_default_tolerances
from impls import dot_product
from impls.block_flash.block_flash_packed import packed_attention
from impls.contract.declarations import Arithmetic, EmptyRows, Formulas
from impls.contract.implementation import Implementation
from reports.records import ERROR, FAIL, PASS, UNJUDGED, Record
from tests.checks.test_checks import DROPPED, judge
from tests.kernels import naive
from tests.planted.features.further_results import BUGS
from tests.planted.planting.further import Results, build

FULL = "train/{}/B2.T24.S32.N4.K2.H16.V32/causal-o8/softcap2/sinks/bias/normal/s1"
PLAIN = "train/f32/B2.T24.S32.N4.K2.H16.V32/causal-o8/normal/s1"
PADDED = "train/f32/B2.T24.S24.N2.K2.H16.V16/lengths-0-9/normal/s0"
BY_NAME = {bug.name: bug for bug in BUGS}

# Where bugs are seen that `residuals` does not show: the check, its subcheck, and the case.
_CALLS: tuple[str, str | None, str] = ("calls", "own_maxima", FULL.format("f32"))
_DROPOUT: tuple[str, str | None, str] = ("dropout", "results", DROPPED)
SEEN_BY = {
    "head-maximum-of-all-calls": _CALLS,
    "head-maximum-from-zero": _CALLS,
    "head-maximum-over-mapped-calls": ("transforms", "vmap", FULL.format("f32")),
    "weights-after-dropout": _DROPOUT,
    "dropped-weights-without-the-factor": _DROPOUT,
}


def judge_further(
    implementation: Implementation | Callable[..., Any], seen: tuple[str, str | None, str]
) -> list[Record]:
    """Return the records of one subcheck, or of a whole check, that are about further results."""
    check, subcheck, case = seen
    with select_subchecks(None if subcheck is None else {subcheck}):
        found = judge(implementation, case, check)
    return [record for record in found if record.observable.split(".")[0] in FURTHER_RESULTS]


def expect(case: str) -> Expectation:
    problem = draw_problem(parse_case_id(case))
    return compute_declared_expectation(problem, Arithmetic(), Formulas(), further=FURTHER_RESULTS)


def test_the_oracle_reduces_its_rows_and_returns_its_weights() -> None:
    problem, found = draw_problem(parse_case_id(FULL.format("f32"))), expect(FULL.format("f32")).forward
    exact = oracle.compute_forward(problem)
    assert np.array_equal(found["head_max_logits"].value, exact.max_logits.max(axis=(0, 2)))
    assert np.array_equal(found["weights"].value, oracle.compute_weights(problem))
    assert problem.sinks is not None
    sums = 1 - np.exp(problem.sinks[:, None] - exact.logsumexp)
    assert found["weights"].value.sum(axis=-1) == pytest.approx(sums, rel=1e-12)  # float64, 1e-16 a term
    hidden = ~np.broadcast_to(problem.allowed, found["weights"].value.shape)
    assert not found["weights"].value[hidden].any()
    assert not found["weights"].bound[hidden].any()
    assert (found["weights"].bound[~hidden] > 0).all()


def test_dropped_weights_are_zero_or_weights_with_the_factor() -> None:
    problem = draw_problem(parse_case_id(DROPPED))
    kept = np.random.default_rng(0).random((2, 2, 24, 32)) >= 0.25
    problem = dataclasses.replace(problem, kept_pairs=kept)
    found = compute_declared_expectation(problem, Arithmetic(), Formulas(), further=FURTHER_RESULTS).forward
    assert found["dropped_weights"].value == pytest.approx(np.where(kept, found["weights"].value / 0.75, 0), rel=1e-15)
    assert not found["dropped_weights"].bound[~kept].any()


def test_rows_that_see_nothing_take_no_part() -> None:
    some, none = expect(PADDED), expect(PADDED.replace("lengths-0-9", "lengths-0-0"))
    assert np.isfinite(some.forward["head_max_logits"].value).all()
    assert np.isneginf(none.forward["head_max_logits"].value).all()
    assert not none.forward["head_max_logits"].bound.any()


def test_nothing_further_is_computed_unasked() -> None:
    problem = draw_problem(parse_case_id(PLAIN))
    found = compute_declared_expectation(problem, Arithmetic(), Formulas()).forward
    assert set(found) == {"out", *RESIDUALS}


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("results", [True, False], ids=["planted", "dot_product"])
def test_correct_kernels_pass(dtype: str, results: bool) -> None:
    kernel = build("correct", Results()) if results else dot_product.IMPLEMENTATIONS[0]
    found = judge_further(kernel, ("residuals", None, FULL.format(dtype)))
    assert {record.observable: record.verdict for record in found} == dict.fromkeys(FURTHER_RESULTS, PASS)


@pytest.mark.parametrize("seen", sorted(set(SEEN_BY.values())), ids=lambda seen: seen[0])
def test_correct_kernels_pass_elsewhere(seen: tuple[str, str | None, str]) -> None:
    found = judge_further(build("correct", Results()), seen)
    assert {record.observable.split(".")[0] for record in found} == set(FURTHER_RESULTS)
    assert {record.verdict for record in found} == {PASS}


@pytest.mark.parametrize("name", BY_NAME)
def test_a_wrong_kernel_fails_where_it_is_wrong(name: str) -> None:
    bug = BY_NAME[name]
    case = FULL.format("bf16" if name.endswith("operands-dtype") else "f32")
    found = judge_further(bug.build(), SEEN_BY.get(name, ("residuals", None, case)))
    assert {record.observable.split(".")[0] for record in found if record.verdict == FAIL} == set(bug.shows)


@declare(behind_mask="finite", empty_rows="zero")
def returns_maxima(
    q: Any, k: Any, v: Any, *, causal: bool = False, mask: Any = None, save_residuals: Any = False
) -> Any:
    out, residuals = naive.attention(q, k, v, causal=causal, mask=mask, save_residuals=True)
    residuals["head_max_logits"] = residuals["max_logits"].max(axis=(0, 2))
    return (out, residuals) if save_residuals else out


def test_a_function_offers_what_it_returns_and_gets_no_other_cases() -> None:
    without = build_implementation(declare(behind_mask="finite", empty_rows="zero")(naive.attention), "without")
    found = build_implementation(returns_maxima, "returns_maxima")
    assert found.residuals | found.further_results == {"logsumexp", "max_logits", "head_max_logits"}
    assert found.further_results == {"head_max_logits"}
    assert without.further_results == frozenset()
    case = parse_case_id(PLAIN)
    jobs = [run_plan.plan_case(each, case).jobs for each in (found, without)]
    assert [[check.name for check in job.checks] for job in jobs[0]] == [
        [check.name for check in job.checks] for job in jobs[1]
    ]


@pytest.mark.parametrize(("empty_rows", "judged"), [("zero", True), ("undefined", False)])
def test_a_head_without_rows_has_the_maximum_of_an_empty_row(empty_rows: EmptyRows, judged: bool) -> None:
    assert [record.verdict for record in judge_further(returns_maxima, ("residuals", None, PADDED))] == [PASS]
    implementation = dataclasses.replace(build_implementation(returns_maxima, "kernel"), empty_rows=empty_rows)
    case = parse_case_id(PADDED.replace("lengths-0-9", "lengths-0-0"))
    subject = Subject(Executor(implementation), case, load_default_tolerances())
    assert subject.find_judged_further("head_max_logits", subject.problem).tolist() == [judged, judged]
    (found,) = judge_results(subject, subject.problem, subject.expectation, subject.residuals.further)
    assert found.verdict == (PASS if judged else UNJUDGED)


def test_weights_in_the_operands_dtype_are_declared() -> None:
    def kernel(q: Any, k: Any, v: Any, *, causal: bool = False, save_residuals: bool = False) -> Any:
        group = q.shape[2] // k.shape[2]
        keys = jnp.repeat(k, group, axis=2).astype(jnp.float32)
        ok = naive.build_mask(q, k, causal, None, None, None)
        x = jnp.einsum("btnh,bsnh->bnts", q.astype(jnp.float32), keys, precision="highest") * q.shape[-1] ** -0.5
        x = jnp.where(ok, x, -1e30)
        e = jnp.exp(x - x.max(axis=-1, keepdims=True))
        weights = (e / e.sum(axis=-1, keepdims=True)).astype(q.dtype)
        out = naive.attention(q, k, v, causal=causal)
        return (out, {"weights": weights}) if save_residuals else out

    case = "train/bf16/B2.T24.S24.N2.K2.H16.V16/causal/normal/s0"
    (wrong,) = judge_further(declare(behind_mask="finite")(kernel), ("residuals", None, case))
    assert (wrong.verdict, "dtype is bfloat16" in wrong.reason) == (FAIL, True)
    (right,) = judge_further(declare(behind_mask="finite", residuals="input")(kernel), ("residuals", None, case))
    assert right.verdict == PASS


def test_what_is_returned_undeclared_is_an_error() -> None:
    silent = dataclasses.replace(dot_product.IMPLEMENTATIONS[0], further_results=frozenset())
    found = judge(silent, PLAIN, "independence")
    assert {record.verdict for record in found} == {ERROR}
    assert "'dropped_weights' is unknown" in found[0].reason


def test_what_is_declared_and_missing_fails() -> None:
    missing = dataclasses.replace(dot_product.build_implementation("missing"), further_results=frozenset({"weights"}))
    (found,) = judge_further(missing, ("residuals", None, PLAIN))
    assert (found.verdict, "without 'weights'" in found.reason) == (FAIL, True)


def test_stored_calls_return_maxima_and_no_weights() -> None:
    @declare(empty_rows="zero", behind_mask="finite")
    def packed(
        q: Any, k: Any, v: Any, *, cu_q_lens: Any, cu_kv_lens: Any, num_seqs: Any, save_residuals: bool = False
    ) -> Any:
        tables = {"cu_q_lens": cu_q_lens, "cu_kv_lens": cu_kv_lens, "num_seqs": num_seqs}
        out, residuals = packed_attention(q, k, v, **tables, save_residuals=True)
        real = jnp.arange(q.shape[0]) < cu_q_lens[num_seqs[0]]
        top = jnp.where(real[:, None], residuals["max_logits"], -jnp.inf).max(axis=0)
        return (out, {**residuals, "head_max_logits": top}) if save_residuals else out

    implementation = build_implementation(packed, "packed")
    assert implementation.further_results == {"head_max_logits"}
    case = next(job.case for job in run_plan.plan_run([implementation], level="quick").jobs if job.is_on_grid)
    (found,) = judge_further(implementation, ("residuals", None, case.id))
    assert found.verdict == PASS
    with pytest.raises(ValueError, match="'weights' has no shape for a packed call"):
        dataclasses.replace(implementation, further_results=frozenset({"weights"}))
    with pytest.raises(ValueError, match="writes pages has no further_results"):
        Implementation(
            name="w", call=packed, storage="paged", writes_pages=True, further_results=frozenset({"head_max_logits"})
        )
