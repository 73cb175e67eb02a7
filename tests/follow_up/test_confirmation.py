"""Test that suspicions are confirmed or refuted by cases beside those of a run, within the time."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest

from cases.case_id import parse_case_id
from conformance import declare
from conformance.checks import CHECKS_BY_NAME
from conformance.execution.plain_functions import build_implementation
from conformance.follow_up import confirmation
from conformance.follow_up.confirmation import Prober, Suspicion
from conformance.follow_up.probe_budget import ProbeBudget
from conformance.judging.job import Job
from conformance.judging.runner import Runner
from conformance.judging.settings import Settings
from impls.contract.implementation import Implementation
from reports.causes import root_causes
from reports.causes.case_levels import FIELD_GROUPS
from reports.causes.finding import Share
from reports.records import FAIL, PASS, Record
from tests.kernels import naive

BASE = "train/f32/B1.T128.S128.N2.K2.H64.V64/full/normal/s0"
FAILING = "train/f32/B2.T48.S72.N4.K2.H16.V16/causal-o24/softcap30/sinks/bias/normal/s0"


@declare(behind_mask="finite")
def ignore_sinks(q: Any, k: Any, v: Any, *, causal: Any = False, mask: Any = None, soft_cap: Any = None,
                  sinks: Any = None, bias: Any = None) -> Any:  # fmt: skip
    """Ignore sinks."""
    return naive.attention(q, k, v, causal=causal, mask=mask, soft_cap=soft_cap, bias=bias)


@declare(behind_mask="finite")
def cap_before_bias(q: Any, k: Any, v: Any, *, causal: Any = False, mask: Any = None, soft_cap: Any = None,
                           sinks: Any = None, bias: Any = None) -> Any:  # fmt: skip
    """Apply the soft cap before the bias."""
    wrong = soft_cap is not None and bias is not None
    return naive.attention(
        q, k, v * 2 if wrong else v, causal=causal, mask=mask, soft_cap=soft_cap, bias=bias, sinks=sinks
    )


@declare(behind_mask="finite")
def fail_for_groups_with_cap(q: Any, k: Any, v: Any, *, causal: Any = False, mask: Any = None, soft_cap: Any = None,
                       sinks: Any = None, bias: Any = None) -> Any:  # fmt: skip
    """Be wrong with grouped heads and a soft cap."""
    wrong = soft_cap is not None and q.shape[2] > k.shape[2]
    return naive.attention(
        q, k, v * 2 if wrong else v, causal=causal, mask=mask, soft_cap=soft_cap, bias=bias, sinks=sinks
    )


def run_probes(
    function: Callable[..., Any], *levels: tuple[str, ...], seconds: float = math.inf, **more: Any
) -> dict[str, str]:
    """Return the cases that were judged, with what came of them."""
    heard: list[Record] = []
    prober = Prober(
        ProbeBudget(Runner(Settings()), math.inf), [build_implementation(function, "it")], seconds, heard.extend
    )
    suspicion: dict[str, Any] = {"implementation": "it", "check": "forward", "failing": FAILING, "levels": levels}
    prober.confirm(Suspicion(**{"counters": tuple({} for _ in levels)} | suspicion | more))
    assert prober.judged == len({record.case for record in heard})
    return {record.case: record.verdict for record in heard}


def test_a_plain_case_with_the_level_fails_and_the_same_without_passes() -> None:
    assert run_probes(ignore_sinks, ("sinks",)) == {BASE.replace("full/", "full/sinks/"): FAIL, BASE: PASS}


def test_of_two_levels_each_is_taken_away() -> None:
    plain, cap, bias = (BASE.replace("full", f"full/{parts}") for parts in ("softcap30/bias", "softcap30", "bias"))
    found = run_probes(cap_before_bias, ("soft_cap",), ("bias",))
    assert found == {plain: FAIL, bias: PASS, cap: PASS}


def test_where_the_plain_case_passes_the_failing_one_is_judged_without_the_level() -> None:
    found = run_probes(fail_for_groups_with_cap, ("soft_cap",))
    assert found == {BASE.replace("full", "full/softcap30"): PASS, FAILING.replace("/softcap30", ""): PASS}


def test_what_a_plain_case_has_anyway_is_taken_from_it_by_a_counter() -> None:
    with_scale = BASE.replace("full", "full/sinks/scale0.3")
    found = run_probes(ignore_sinks_and_scale, ("sinks",), ("scale",), counters=({}, {"scale": 0.3}))
    assert found[with_scale] == FAIL  # so the scale is not the cause


@declare(behind_mask="finite")
def ignore_sinks_and_scale(q: Any, k: Any, v: Any, *, sinks: Any = None, scale: Any = None) -> Any:
    """Ignore sinks and the scale."""
    return naive.attention(q, k, v, scale=scale)


def test_other_suspicions_are_told_apart() -> None:
    found = run_probes(ignore_sinks, ("sinks",), others=(("soft_cap",),), examples=({"kv_length": 160},))
    assert found[BASE.replace("full", "full/softcap30")] == PASS
    assert found[BASE.replace("S128", "S160")] == PASS


@pytest.mark.parametrize(
    "changes", [{"seconds": 0}, {"check": "transforms"}, {"implementation": "another"}], ids=lambda x: str(*x)
)
def test_nothing_is_judged_that_there_is_no_time_for_or_that_cannot_be_asked(changes: dict[str, Any]) -> None:
    assert len(run_probes(ignore_sinks, ("sinks",), **changes)) <= (1 if "seconds" in changes else 0)


def test_what_is_known_is_not_judged_again() -> None:
    heard: list[Record] = []
    prober = Prober(
        ProbeBudget(Runner(Settings()), math.inf), [build_implementation(ignore_sinks, "it")], math.inf, heard.extend
    )
    suspicion = Suspicion(
        implementation="it", check="forward", failing=FAILING, levels=(("sinks",),), counters=({},)
    )  # fmt: skip
    prober.confirm(suspicion)
    before = prober.judged
    prober.confirm(suspicion)
    assert prober.judged == before == 2


@declare(behind_mask="finite")
def fail_for_three_levels(q: Any, k: Any, v: Any, *, causal: Any = False, mask: Any = None, soft_cap: Any = None,
                          sinks: Any = None, bias: Any = None) -> Any:  # fmt: skip
    """Be wrong with grouped heads, sinks and a bias together."""
    wrong = sinks is not None and bias is not None and q.shape[2] > k.shape[2]
    return naive.attention(
        q, k, v * 2 if wrong else v, causal=causal, mask=mask, soft_cap=soft_cap, bias=bias, sinks=sinks
    )


def test_a_failing_case_is_judged_without_each_of_its_features_and_what_it_needs_is_named() -> None:
    heard: list[Record] = []
    implementation = build_implementation(fail_for_three_levels, "it")
    runner = Runner(Settings())
    prober = Prober(ProbeBudget(runner, math.inf), [implementation], math.inf, heard.extend)
    prober.isolate("it", "forward", FAILING, FIELD_GROUPS)
    passing = {record.case for record in heard if record.verdict == PASS}
    parts = FAILING.split("/")
    assert passing == {
        "/".join(part for part in parts if part != "sinks"),
        "/".join(part for part in parts if part != "bias"),
        FAILING.replace("N4.K2", "N2.K2"),
    }
    # No pair of features explains the failure, and one failing case among others that pass.
    failing = [record for record in run_case(runner, implementation, FAILING) if record.verdict == FAIL]
    plain = run_case(runner, implementation, BASE)
    (finding,) = root_causes.find_root_causes([*failing, *plain], heard)
    assert finding.levels is not None
    assert {level.name for level in finding.levels} == {"sinks", "bias", "groups"}
    assert set(finding.without) == passing
    assert (finding.inside, finding.outside) == (Share(1, 1), Share(0, 1))
    assert "1 of 1 finding" in confirmation._describe_confirmed([finding])
    assert "none of 1 finding" in confirmation._describe_confirmed([dataclasses.replace(finding, without=())])


def run_case(runner: Runner, implementation: Implementation, case: str) -> list[Record]:
    return list(runner.stream(Job(implementation, parse_case_id(case), (CHECKS_BY_NAME["forward"],))))
