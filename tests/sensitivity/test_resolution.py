"""Test the resolution of the gate: ten times the smallest error is seen, a tenth of it is not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

import pytest

from cases.case import Case
from cases.case_id import parse_case_id
from cases.operand_values import Cotangent, draw_cotangent, draw_problem
from conformance.truth import tolerances
from conformance.truth.comparison import compare
from conformance.truth.rounding_bounds import compute_expectation
from conformance.truth.roundoff import UNIT_ROUNDOFF
from impls.contract.declarations import Arithmetic
from tests.bank import resolution
from tests.bank.resolution import SCALE, Resolution, measure_resolutions

FEW = {
    "f32": [
        "train/f32/B1.T48.S40.N2.K2.H16.V48/full/huge/s0",
        "train/f32/B1.T40.S60.N4.K2.H16.V16/causal/sinks/bias/heavy/s0",
    ],
    "bf16": ["train/bf16/B1.T40.S60.N4.K2.H16.V16/causal/sinks/bias/heavy/s0"],
    "f16": ["train/f16/B1.T40.S60.N4.K2.H16.V16/causal/seg/softcap2/knee/s0"],
}


def select_few_cases(dtype: str) -> list[Case]:
    return [parse_case_id(case) for case in FEW[dtype]]


def index_by_name(found: Sequence[Resolution]) -> dict[tuple[str, str, str], Resolution]:
    return {(x.dtype, x.perturbation, x.observable): x for x in found}


@pytest.fixture(scope="module")
def resolved() -> dict[tuple[str, str, str], Resolution]:
    return index_by_name(measure_resolutions(cases=select_few_cases, ensemble=False))


@pytest.mark.long
def test_a_scale_error_of_30_roundoffs_is_seen_in_f32() -> None:
    found = index_by_name(measure_resolutions(dtypes=["f32"]))
    # Without residuals, the gradient shows it.
    for observable in ("logsumexp", "max_logits", "dv"):
        roundoffs = found["f32", SCALE, observable].roundoffs
        assert roundoffs is not None
        assert roundoffs < 30


def test_every_error_is_seen_by_what_it_concerns(resolved: dict[tuple[str, str, str], Resolution]) -> None:
    for dtype in FEW:
        for perturbation, observable in (
            ("gradient dq", "dq"),
            ("gradient dk", "dk"),
            ("gradient dv", "dv"),
            ("one element of out", "out"),
            ("probability of one key", "out"),
            ("scale", "out"),
        ):
            found = resolved[dtype, perturbation, observable]
            assert found.smallest is not None
            assert found.roundoffs == found.smallest / UNIT_ROUNDOFF[dtype]
            # A gradient that is off by a tenth is always seen, in any dtype.
            assert found.smallest < 0.1
            assert found.case in FEW[dtype]
    assert ("bf16", "scale", "dsinks") in resolved
    assert ("bf16", "scale", "dbias") in resolved


def test_ten_times_the_smallest_is_seen_and_a_tenth_of_it_is_not(
    resolved: dict[tuple[str, str, str], Resolution],
) -> None:
    table = tolerances.load_default_tolerances()
    seen: dict[tuple[str, str, str], list[tuple[bool, bool]]] = {}
    for case in [case for dtype in FEW for case in select_few_cases(dtype)]:
        for perturbation in resolution._iter_perturbations(case, table):
            for observable in perturbation.observables:
                key = (case.dtype, perturbation.name, observable)
                if (smallest := resolved[key].smallest) is not None:
                    above, below = perturbation.seen(10 * smallest), perturbation.seen(smallest / 10)
                    seen.setdefault(key, []).append((above[observable], below[observable]))
    assert seen.keys() == {key for key, found in resolved.items() if found.smallest is not None}
    for key, pairs in seen.items():
        assert any(above for above, _ in pairs), key
        assert not any(below for _, below in pairs), key


@pytest.mark.parametrize("dtype", list(FEW))
def test_what_is_perturbed_is_right_before(dtype: str) -> None:
    for case in select_few_cases(dtype):
        problem, cotangent = draw_problem(case), Cotangent("random", draw_cotangent(case).out)
        expected = compute_expectation(problem, Arithmetic(), [cotangent])
        values = resolution._round_values(resolution._Attention.of(problem, cotangent)(0.0, 0.0), problem)
        for name, bounded in {**expected.forward, **expected.gradients[0]}.items():
            assert compare(values[name], bounded).ratio < 3


@pytest.mark.long
def test_the_ensemble_sees_a_hundred_times_smaller_gradient_errors_in_bf16() -> None:
    [case] = select_few_cases("bf16")
    found = index_by_name(measure_resolutions(dtypes=["bf16"], cases=lambda dtype: [case]))
    by_element, by_bias = found["bf16", "gradient dq", "dq"], found["bf16", "gradient dq", "dq.bias"]
    assert by_element.smallest is not None
    assert by_bias.smallest is not None
    assert 100 * by_bias.smallest < by_element.smallest


def test_an_error_that_nothing_shows_is_said() -> None:
    table = tolerances.override_limits(tolerances.load_default_tolerances(), {"bf16.dq": 1e9}, "test")
    found = index_by_name(measure_resolutions(table, dtypes=["bf16"], cases=select_few_cases, ensemble=False))
    assert found["bf16", "gradient dq", "dq"] == Resolution("gradient dq", "bf16", "dq", None, None, "")


def test_the_default_cases_are_a_dozen_or_so_of_every_dtype() -> None:
    for dtype in FEW:
        cases = resolution.select_default_cases(dtype)
        assert 12 <= len(cases) <= 25
        assert {(case.dtype, case.phase) for case in cases} == {(dtype, "train")}
        assert any(case.sinks for case in cases)
        assert cases == resolution.select_default_cases(dtype)


def test_resolutions_are_json(resolved: dict[tuple[str, str, str], Resolution]) -> None:
    for found in resolved.values():
        assert Resolution(**json.loads(json.dumps(asdict(found), allow_nan=False))) == found
