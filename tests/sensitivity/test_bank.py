"""Test that the gate sees every planted bug as the bug declares, and needs every check."""

from __future__ import annotations

from typing import Any

import pytest

from conformance.checks import CHECKS
from conformance.judging import run_plan, runner, settings
from conformance.mutation.kernels.blockwise import implementation
from conformance.mutation.kernels.steps import BlockSteps
from conformance.sensitivity import detection_table
from impls.contract.implementation import Implementation
from reports.records import RED
from tests.bank import PlantedBug
from tests.bank.examination import iter_red_records, shows_as_declared
from tests.bank.planted_bug import load_bank
from tests.kernels import pallas_flash
from tests.planted.bank import BANK, SEEN
from tests.planted.features import caches, tangents
from tests.planted.planting import flex, latent, moba, page_writes, ring_cache, served
from tests.sensitivity.nightly_bugs import sample_by_kind

# Of the short jobs, one in so many must pass on the correct kernel; at night more of them.
_CORRECT_STRIDES = [90, pytest.param(10, marks=pytest.mark.nightly)]
_SEEN_AT_QUICK = 0.95


@pytest.mark.parametrize("bug", sample_by_kind(BANK))
def test_a_planted_bug_dies_by_what_it_shows(bug: PlantedBug) -> None:
    if (reason := bug.unmeasurable()) is not None:
        pytest.skip(reason)
    seen: set[str] = set()
    for red in iter_red_records(bug, "quick", SEEN.get(bug.name)):
        if shows_as_declared(bug, red):
            return
        seen.add(f"{red.check}/{red.observable}")
    pytest.fail(f"survives the quick grid, or dies by {sorted(seen)} only and not by {bug.shows}")


def test_the_bank_is_large_and_names_its_sources() -> None:
    assert len(load_bank("tests.planted.bank:BANK")) >= 150
    assert len({bug.kind for bug in BANK}) >= 80


CORRECT = {
    "blockwise": implementation(BlockSteps(), "correct"),
    "tpu": pallas_flash.build_pallas_implementation("correct"),
    "moba": moba.implementation("correct", moba.correct()),
    "moba-block-sparse": moba.implementation("correct", moba.block_sparse()),
    "caches": caches.implementation("correct"),
    "paged": served.paged("correct"),
    "scaled": served.scaled("correct"),
    "whole": served.whole("correct"),
    "writing": page_writes.writing("correct"),
    "packed": served.packed("correct"),
    "functions": flex.implementation("correct"),
    "latent": latent.dense_latent("correct"),
    "latent-pages": latent.paged_latent("correct"),
    "ring": ring_cache.build_implementation("correct"),
    "tangents": tangents.correct(),
}


def _choose_marks(name: str) -> list[pytest.MarkDecorator]:
    """Mark tests that take a second and more."""
    slow = ("blockwise", "writing", "functions", "moba-block-sparse", "packed")
    return [pytest.mark.long] if name in slow else []


@pytest.mark.parametrize("stride", _CORRECT_STRIDES)
@pytest.mark.parametrize(
    "kernel", [pytest.param(one, id=name, marks=_choose_marks(name)) for name, one in CORRECT.items()]
)
def test_a_kernel_without_a_bug_passes(kernel: Implementation, stride: int) -> None:
    jobs = [job for job in run_plan.plan_run([kernel], level="quick").jobs if job.short][::stride]
    found = runner.Runner(settings.Settings()).run(jobs)
    assert [record for record in found if record.verdict in RED] == []
    assert any(record.ratio is not None for record in found)


@pytest.fixture
def measured() -> dict[str, Any]:
    table = detection_table.load_table()
    assert table is not None, "measure it: python -m tests.bank --save"
    return table


def test_what_was_measured_is_this_bank_and_these_checks(measured: dict[str, Any]) -> None:
    again = "measure again: python -m tests.bank --save"
    assert {row["bug"] for row in measured["bugs"]} == {bug.name for bug in BANK}, again
    assert [row["check"] for row in measured["checks"]] == [check.name for check in CHECKS], again


def test_nearly_every_bug_is_seen_at_quick(measured: dict[str, Any]) -> None:
    assert measured["level"] == "quick"
    seen = sum(bool(row["kills"]) for row in measured["bugs"])
    assert seen >= _SEEN_AT_QUICK * len(measured["bugs"])


def test_every_check_is_needed(measured: dict[str, Any]) -> None:
    # What `branches` finds fails in cases that it adds, which the bank does not judge (tests/checks/test_branches.py).
    # JAX transposes a wrong tangent, so that gradients are wrong too; one with a transpose of its own fails elsewhere.
    # Bugs that `batch_invariance` finds are in tests/checks/test_batch_invariance.py: measuring one takes hours. The
    # bank has no indexers: bugs that `index_scores` finds are in tests/checks/test_index_scores.py.
    known = ["branches", "tangents", "batch_invariance", "index_scores"]
    assert [row["check"] for row in measured["checks"] if not row["alone"]] == known
