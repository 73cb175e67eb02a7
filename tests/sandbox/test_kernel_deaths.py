"""Test that each death of a kernel's process is one error record, of the case in which it happened."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance.checks import CHECKS_BY_NAME
from conformance.execution.implementation_registry import ImplementationNotFound
from conformance.judging.job import Job
from conformance.judging.run_plan import plan_run
from conformance.judging.runner import Runner
from conformance.judging.settings import Settings
from conformance.sandbox import kernel_process
from conformance.sandbox.kernel_options import KernelOptions
from conformance.sandbox.kernel_process import KernelProcess, ProcessLost
from reports import records

# It dies in every third program that it is traced for, whichever check runs, and in calls that are begun ahead too.
KERNEL = """
import os
from tests.kernels import naive
from conformance import declare

CALLS = []

@declare(behind_mask="finite")
def dies(q, k, v, *, causal=False):
    CALLS.append(1)
    if len(CALLS) % 3 == {rest}:
        os._exit(7)
    return naive.attention(q, k, v, causal=causal)
"""
CASES = "train/f32/*.T1.*"
CHECKS = ("forward", "residuals", "gradients", "gradients_lse")


@pytest.mark.parametrize("rest", [1, 2, 0])
def test_there_are_as_many_error_records_as_deaths(rest: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kernel.py").write_text(KERNEL.format(rest=rest))
    monkeypatch.chdir(tmp_path)
    died: list[str] = []
    describe_end = kernel_process._RunningProcess._describe_end

    def count(running: kernel_process._RunningProcess) -> str:
        died.append(describe_end(running))
        return died[-1]

    monkeypatch.setattr(kernel_process._RunningProcess, "_describe_end", count)
    try:
        implementation = KernelOptions().find("kernel.py:dies")
    except ImplementationNotFound as error:
        pytest.fail(str(error))
    jobs = plan_run([implementation], level="quick", query=CASES, checks=[CHECKS_BY_NAME[name] for name in CHECKS]).jobs
    runner = Runner(Settings())
    found = [(job, runner.judge(job)) for job in jobs]
    errors = [(job, record) for job, judged in found for record in judged if record.verdict == records.ERROR]
    assert died
    assert len(errors) == len(died)
    assert all(record.case == job.case.id and "exit code 7" in record.reason for job, record in errors)


def test_a_death_that_is_noticed_ahead_is_told_once() -> None:
    process = KernelProcess("kernel.py:absent", None, kernel_process.Limits())
    process._lost = ProcessLost("it died")
    with pytest.raises(ProcessLost, match="it died"):
        process.settle()
    process.settle()


def test_a_death_in_what_no_check_asks_for_is_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a case that does not discriminate: no check runs on it, after its calls were begun."""
    (tmp_path / "kernel.py").write_text(KERNEL.format(rest=1))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("conformance.judging.discrimination.find_weakest_null", lambda margins: ("zeros", 0.0))
    implementation = KernelOptions().find("kernel.py:dies")
    (job, *_) = plan_run([implementation], level="quick", query=CASES, checks=[CHECKS_BY_NAME["forward"]]).jobs
    found = Runner(Settings()).judge(Job(job.implementation, job.case, job.checks))
    assert [record.verdict for record in found] == [records.UNJUDGED, records.ERROR]
    assert "exit code 7" in found[1].reason
