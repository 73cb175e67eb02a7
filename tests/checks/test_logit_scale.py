"""The gate on kernels with a logit scale: right ones pass, and those without one are shown as unsupported."""

from __future__ import annotations

import pytest

from cases.case import Case
from conformance.check_api.scopes import ImplementationGrids
from conformance.checks import CHECKS as ALL_CHECKS
from conformance.execution.implementation_registry import find_implementation
from conformance.execution.plain_functions import build_implementation
from conformance.judging import run_plan, runner, settings
from reports.records import PASS, RED
from tests.kernels import naive, tempered

CHECKS = ("forward", "residuals", "gradients", "arguments", "limits", "errors")
PLAIN = Case(logit_scale=True)
COMBINED = Case(
    mask="causal", q_length=40, kv_length=40, num_q_heads=4, soft_cap=30.0, bias="biashead", logit_scale=True
)


@pytest.mark.parametrize("case", [PLAIN, COMBINED], ids=str)
@pytest.mark.parametrize("name", ["dot_product", "tempered"])
def test_a_right_kernel_passes(name: str, case: Case) -> None:
    kernel = build_implementation(tempered.attention, name) if name == "tempered" else find_implementation(name)
    checks = [check for check in ALL_CHECKS if check.name in CHECKS]
    found = runner.Runner(settings.Settings()).run(run_plan.plan_case(kernel, case, checks).jobs)
    assert [record for record in found if record.verdict in RED] == []
    passed = {record.observable for record in found if record.verdict == PASS}
    assert {"out", "dlogit_scale", "effect_of_logit_scale"} <= passed


def test_a_kernel_without_one_is_shown_as_unsupported_and_its_cases_stay() -> None:
    lacks, has = build_implementation(naive.attention, "naive"), build_implementation(tempered.attention, "tempered")
    assert "no parameter 'logit_scale'" in (lacks.supports(PLAIN) or "")
    assert has.supports(PLAIN) is None
    before, after = (ImplementationGrids(kernel, "quick", 0) for kernel in (lacks, has))
    assert before.grid.cases == after.grid.cases
    assert before.grid.combined == after.grid.combined
    assert before.sizes.cases == after.sizes.cases
    assert before.operand_grids == ()
    assert [case for case in before.declined if case.logit_scale] == [PLAIN]
    assert not any(case.logit_scale for case in after.declined)
