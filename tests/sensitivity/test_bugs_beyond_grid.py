"""Test that bugs beyond the grid show on their witness, and nowhere else."""

from __future__ import annotations

from types import ModuleType

import pytest

from cases.case import Case
from cases.case_id import parse_case_id
from conformance.checks import CHECKS_BY_NAME
from conformance.judging import run_plan, runner, settings
from impls.contract.implementation import Implementation
from reports.records import PASS, RED, Record
from tests.bank import PlantedBug
from tests.bank.examination import shows_as_declared
from tests.planted.beyond import fast_paths, long_caches, long_sequences, sizes, whole_blocks

_MODULES = (whole_blocks, fast_paths, long_caches, long_sequences, sizes)
BUGS = tuple(bug for module in _MODULES for bug in module.BUGS)
WITNESSES = {name: case for module in _MODULES for name, case in module.WITNESSES.items()}
# A kernel without a bug, by the module whose bugs are planted in it, and the cases that show these.
CORRECT = [(module, case) for module in _MODULES for case in sorted(set(module.WITNESSES.values()))]
# Ordinary cases. At least one of them does not trigger the bug.
ORDINARY = (
    "train/f32/B2.T40.S50.N2.K2.H16.V16/full/normal/s0",
    "train/bf16/B1.T64.S64.N2.K1.H16.V16/causal/softcap30/sinks/normal/s0",
)
_CHECKS = ("forward", "residuals", "gradients", "gradients_lse")


def judge_case(implementation: Implementation, case: Case) -> list[Record]:
    planned = run_plan.plan_case(implementation, case, [CHECKS_BY_NAME[name] for name in _CHECKS])
    return list(runner.Runner(settings.Settings()).run(planned.jobs))


def test_each_bug_has_a_witness_and_a_name_of_its_own() -> None:
    assert sorted(WITNESSES) == sorted(bug.name for bug in BUGS)


@pytest.mark.nightly
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_bug_shows_on_its_witness(bug: PlantedBug) -> None:
    case = parse_case_id(WITNESSES[bug.name])
    assert bug.trigger(case)
    red = [record for record in judge_case(bug.build(), case) if record.verdict in RED]
    assert any(shows_as_declared(bug, record) for record in red)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("module", "case"), CORRECT, ids=lambda value: value if isinstance(value, str) else value.__name__.split(".")[-1]
)
def test_the_kernel_without_it_passes_there(module: ModuleType, case: str) -> None:
    found = judge_case(module.CORRECT, parse_case_id(case))
    assert [record for record in found if record.verdict in RED] == []
    assert any(record.verdict == PASS for record in found)


@pytest.mark.nightly
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_bug_does_not_show_elsewhere(bug: PlantedBug) -> None:
    elsewhere = [case for case in map(parse_case_id, ORDINARY) if not bug.trigger(case)]
    assert elsewhere
    found = [record for case in elsewhere for record in judge_case(bug.build(), case)]
    assert [record for record in found if record.verdict in RED] == []
