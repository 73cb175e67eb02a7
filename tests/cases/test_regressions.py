"""Named regressions: each is a case that tells right from wrong, and the kernels of this project pass it.

A case that does not tell them apart has a record of its own, with a verdict that is not a pass.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

import pytest
from _pytest.mark import ParameterSet

from cases.case_id import parse_case_id
from cases.regressions import REGRESSIONS, Regression, find_regression
from conformance.check_api.scopes import GRID
from conformance.checks import CHECKS
from conformance.execution import implementation_registry
from conformance.judging.job import Job
from conformance.judging.runner import Runner
from conformance.judging.settings import Settings
from reports import records

CHECKED = tuple(check for check in CHECKS if check.scope is GRID)
PUBLISHED = re.compile(r"[\w.-]+/[\w.-]+(#\d+|@[0-9a-f]{7,40})|arXiv:\d{4}\.\d{5}")


def test_there_are_enough_and_no_two_are_the_same() -> None:
    assert len(REGRESSIONS) >= 60
    for values in ([r.name for r in REGRESSIONS], [r.case.id for r in REGRESSIONS]):
        assert len(set(values)) == len(values)


def test_each_says_what_it_is() -> None:
    for regression in REGRESSIONS:
        assert parse_case_id(regression.case.id) == regression.case
        assert find_regression(regression.case.id) is regression
        assert PUBLISHED.fullmatch(regression.reference), regression.name
        assert re.fullmatch(r"[a-z0-9-]+\.[a-z0-9-]+", regression.kind), regression.name
        assert regression.shows


def test_other_cases_are_no_regressions() -> None:
    assert find_regression("train/f32/B1.T64.S64.N2.K2.H32.V32/causal/normal/s12345") is None


def test_a_name_that_a_list_could_not_show_is_refused() -> None:
    with pytest.raises(ValueError, match="lower-case words with hyphens, got 'Two words'"):
        Regression(name="Two words", case=REGRESSIONS[0].case, kind="a.b", reference="a/b#1", shows="it")


@pytest.fixture(scope="module")
def runner() -> Runner:
    """One runner for all, which lets go of compiled programs as it goes along."""
    return Runner(Settings())


def _asked() -> Iterator[ParameterSet]:
    """Each regression and kernel: for the bank the two kernels in turn, and what is left at night."""
    for number, (regression, name) in enumerate(itertools.product(REGRESSIONS, ("dot_product", "block_flash"))):
        mark = pytest.mark.bank if (number // 2 + number) % 2 else pytest.mark.nightly
        yield pytest.param(regression, name, id=f"{regression.name}-{name}", marks=mark)


@pytest.mark.parametrize(("regression", "name"), list(_asked()))
def test_kernels_of_this_project_pass(regression: Regression, name: str, runner: Runner) -> None:
    found = runner.judge(Job(implementation_registry.find_implementation(name), regression.case, CHECKED))
    wrong = {(r.check, r.observable): r.reason for r in found if r.verdict not in {records.PASS, records.UNSUPPORTED}}
    assert wrong == {}
    assert any(r.verdict == records.PASS for r in found)
