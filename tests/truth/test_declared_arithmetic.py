"""Bounds of declared arithmetic: correct kernels stay within the limit, and other errors exceed it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import numpy as np
import pytest

from cases.case_id import parse_case_id
from cases.operand_values import draw_cotangent, draw_problem
from conformance.checks import CHECKS_BY_NAME
from conformance.judging.job import Job
from conformance.judging.runner import Runner
from conformance.judging.settings import Settings
from conformance.mutation.bugs.precision import cut_to_tf32, in_tf32
from conformance.truth.rounding_bounds import Expectation, compute_expectation
from conformance.truth.roundoff import UNIT_ROUNDOFF, Roundoff, compute_walk_steps
from impls.contract.declarations import Arithmetic
from impls.contract.implementation import Implementation
from reports.records import FAIL, PASS, Record

TF32_CASES = (
    "train/f32/B1.T128.S128.N2.K2.H64.V64/full/normal/s0",
    "train/f32/B2.T40.S56.N4.K2.H16.V24/causal-o16/sinks/normal/s1",
    "train/f32/B1.T128.S128.N2.K2.H16.V48/causal_or_spans-16-42-64-125/softcap30/sinks/bias/scale0.3/ties/s0",
    "train/f32/B1.T100.S200.N2.K1.H32.V32/window-l9-r3/cancel/s4",
    "train/f32/B1.T128.S128.N2.K2.H32.V32/chunked-43/segpad/softcap2/biashead/dominant/s0",
)
SIXTEEN_BITS = "train/bf16/B1.T40.S56.N4.K1.H16.V24/causal-o16/normal/s1"
Kernel = Callable[[], Implementation]


def judge(kernel: Implementation, case: str) -> dict[str, Record]:
    checks = tuple(CHECKS_BY_NAME[name] for name in ("forward", "residuals", "gradients"))
    found = Runner(Settings()).judge(Job(kernel, parse_case_id(case), checks))
    return {f"{record.check}.{record.observable}": record for record in found}


@pytest.mark.parametrize("case", TF32_CASES)
@pytest.mark.parametrize(
    "kernel", [lambda: in_tf32("nearest"), lambda: in_tf32("cut", read=cut_to_tf32)], ids=["nearest", "cut"]
)
def test_kernels_in_tf32_pass_where_they_declare_it(kernel: Kernel, case: str) -> None:
    assert {record.verdict for record in judge(kernel(), case).values()} == {PASS}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.long if n else ()) for n, case in enumerate(TF32_CASES)]
)
def test_an_output_two_percent_too_large_is_more_than_tf32_explains(case: str) -> None:
    assert judge(in_tf32("wrong", out=1.02), case)["forward.out"].verdict == FAIL


def test_kernels_in_tf32_fail_where_they_do_not_declare_it_and_the_declaration_is_named() -> None:
    undeclared = dataclasses.replace(in_tf32("silent"), arithmetic=Arithmetic())
    record = judge(undeclared, TF32_CASES[0])["forward.out"]
    assert (record.verdict, record.remedy) == (FAIL, 'products="tf32"')


def expected(arithmetic: Arithmetic, case: str = SIXTEEN_BITS) -> Expectation:
    return compute_expectation(draw_problem(parse_case_id(case)), arithmetic, [draw_cotangent(parse_case_id(case))])


def widened(arithmetic: Arithmetic, case: str = SIXTEEN_BITS) -> set[str]:
    """Observables whose bounds grow by the declaration; none may shrink."""
    found = set()
    plain, declared = expected(Arithmetic(), case), expected(arithmetic, case)
    for before, after in ((plain.forward, declared.forward), (plain.gradients[0], declared.gradients[0])):
        for name, bounded in before.items():
            assert (after[name].bound >= bounded.bound).all(), name
            np.testing.assert_array_equal(after[name].bound == 0, bounded.bound == 0)  # what must be zero must be zero
            if (after[name].bound > bounded.bound).any():
                found.add(name)
    return found


@pytest.mark.parametrize(
    ("declared", "observables"),
    [
        ({"group_sums": "input"}, {"dk", "dv"}),
        ({"block_sums": 16}, {"out", "dq", "dk", "dv"}),
        ({"block_sums": 64}, set()),  # one block of keys, and one of queries
        ({"softmax": "input"}, {"out", "logsumexp", "max_logits", "dq", "dk", "dv"}),
    ],
)
def test_a_declaration_widens_what_it_is_about(declared: dict[str, object], observables: set[str]) -> None:
    arithmetic = dataclasses.replace(Arithmetic(), **declared)  # type: ignore[arg-type]
    assert widened(arithmetic) == observables
    assert widened(arithmetic, SIXTEEN_BITS.replace("bf16", "f32")) == set()


def test_sums_over_heads_need_a_group() -> None:
    assert widened(Arithmetic(group_sums="input"), SIXTEEN_BITS.replace("K1", "K4")) == set()


def test_partial_sums_round_as_those_of_f32_do() -> None:
    problem = draw_problem(parse_case_id(SIXTEEN_BITS))
    u = Roundoff.of(Arithmetic(group_sums="input", block_sums=16), problem)
    assert u.bound_head_sums(1) == u.bound_block_sums(16) == 0
    assert u.bound_head_sums(8) == u.bound_block_sums(17) == UNIT_ROUNDOFF["bf16"]
    assert u.bound_block_sums(16 * 64) == UNIT_ROUNDOFF["bf16"] * compute_walk_steps(64) == 2 * UNIT_ROUNDOFF["bf16"]


def test_a_block_of_no_keys_is_refused() -> None:
    with pytest.raises(ValueError, match="block_sums must be a whole number of keys or queries, at least 1, got 0"):
        Arithmetic(block_sums=0)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("distribution", ["normal", "ties", "knee"])
def test_a_softmax_in_the_operands_dtype_is_no_blank_cheque(dtype: str, distribution: str) -> None:
    """The mean of v, and gradients that are doubled, are further off than such a softmax explains."""
    cap = "/softcap2" if distribution == "knee" else ""
    case = parse_case_id(f"train/{dtype}/B1.T64.S200.N2.K1.H64.V64/causal-o136{cap}/{distribution}/s0")
    problem, cotangent = draw_problem(case), draw_cotangent(case)
    found = compute_expectation(problem, Arithmetic(softmax="input", group_sums="input"), [cotangent])
    out = found.forward["out"]
    mean = problem.values.mean(axis=1, keepdims=True).repeat(problem.q.shape[2], axis=2)
    limit = 4.0
    assert (np.abs(mean - out.value) / out.bound).max() > 1.5 * limit
    for name in ("dq", "dk", "dv"):
        bounded = found.gradients[0][name]
        assert (np.abs(bounded.value) / bounded.bound).max() > 1.5 * limit, name


def test_the_low_bits_are_cut_off() -> None:
    x = np.float32(1 + 2.0**-10 + 2.0**-11)
    assert float(jax.jit(cut_to_tf32)(x)) == 1 + 2.0**-10
