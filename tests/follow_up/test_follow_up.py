"""The follow-up of a red run takes a tenth of its time, or 15 seconds if that is more, however slow the kernel is."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from cases.case_id import parse_case_id
from conformance.checks import CHECKS_BY_NAME
from conformance.follow_up import exact_probes, follow_up
from conformance.follow_up.probe_budget import ProbeBudget
from conformance.judging.job import Job
from conformance.judging.journal import Journal
from conformance.judging.runner import Runner
from conformance.judging.settings import Settings
from conformance.sandbox.kernel_options import KernelOptions
from impls.contract.implementation import Implementation
from reports.records import BEYOND_ROUNDING, DECLARATIONS_TRIED, FAIL, PASS, Record, Run
from tests.kernels import naive

# Right but for sinks, and one of them slow where there is no causal mask, as in the plainest case.
KERNEL = """
import time
from conformance import declare
from tests.kernels import naive

@declare(behind_mask="finite")
def attention(q, k, v, *, causal=False, sinks=None):
    if not causal:
        time.sleep(60)
    return naive.attention(q, k, v, causal=causal)

@declare(behind_mask="finite")
def quick(q, k, v, *, causal=False, sinks=None):
    return naive.attention(q, k, v, causal=causal)
"""
CAUSAL = "train/f32/B1.T16.S16.N2.K2.H16.V16/causal/{}normal/s0"
FORWARD = (CHECKS_BY_NAME["forward"],)


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Implementation:
    monkeypatch.chdir(tmp_path)
    Path("kernel.py").write_text(KERNEL)
    return KernelOptions().find("kernel.py:attention")


def judged(kernel: Implementation, runner: Runner) -> tuple[Journal, list[Record]]:
    """Judge three cases, and return their journal and records."""
    journal = Journal(
        [], Run(started="", command="run", level="quick", seeds=(), tolerances=(), kernels={}, resumed=())
    )
    for parts in ("", "sinks/", "sinks/"):
        journal.add_records(runner.judge(Job(kernel, parse_case_id(CAUSAL.format(parts)), FORWARD)))
    return journal, list(journal.recorded.records)


def test_a_probe_that_takes_longer_than_there_is_time_is_cut_off(slow: Implementation) -> None:
    runner = Runner(Settings(), confirmed=0)
    journal, found = judged(slow, runner)
    assert {record.verdict for record in found} == {PASS, FAIL}
    seconds = follow_up.FollowUpSeconds(confirm=2.0, diagnose=0.0)
    follow_up.follow_up(journal, [slow], runner, seconds, spent=20.0, say=print)  # a call would sleep for a minute
    assert not [record for record in journal.recorded.probes if "/full/" in record.case]
    # The kernel was ended where it was, and is there again.
    (again,) = runner.judge(Job(slow, parse_case_id(CAUSAL.format("")), FORWARD))
    assert again.verdict == PASS


def test_a_run_confirms_what_it_found_without_being_told_to(slow: Implementation) -> None:
    quick, runner = KernelOptions().find("kernel.py:quick"), Runner(Settings(), confirmed=0)
    journal, _ = judged(quick, runner)
    follow_up.follow_up(journal, [quick], runner, follow_up.FollowUpSeconds(), spent=3000.0, say=print)
    assert {record.verdict for record in journal.recorded.probes} >= {PASS, FAIL}


def test_the_plainest_case_of_a_finding_is_evaluated_in_float64(slow: Implementation) -> None:
    quick, runner = KernelOptions().find("kernel.py:quick"), Runner(Settings(), confirmed=0)
    journal, _ = judged(quick, runner)
    exact_probes.evaluate_findings(journal, [quick], ProbeBudget(runner, 60.0))
    found = {record.observable: record for record in journal.recorded.probes}
    assert {record.case for record in found.values()} == {CAUSAL.format("sinks/")}
    assert (found["out"].verdict, found["out"].figures[BEYOND_ROUNDING]) == (FAIL, 1.0)
    evaluated = len(journal.recorded.probes)
    exact_probes.evaluate_findings(journal, [quick], ProbeBudget(runner, 60.0))
    assert len(journal.recorded.probes) == evaluated


def test_what_a_slow_kernel_took_before_it_will_take_again() -> None:
    asked: list[str] = []

    class Asked(Runner):
        def judge(self, job: Job) -> list[Record]:
            asked.append(job.case.id)
            return []

    def took(case: str, seconds: float) -> Record:
        return Record(implementation="naive", platform="cpu", case=case, check="forward", observable="out",
                      verdict=PASS, seconds=seconds)  # fmt: skip

    kernel = KernelOptions(in_process=True).find(f"{naive.__name__}:attention")
    known = [
        msgspec.structs.replace(one, implementation=kernel.name)
        for one in (took(CAUSAL.format(""), 3.0), took(CAUSAL.format("sinks/"), 1.0))
    ]
    allowance = ProbeBudget(Asked(Settings()), 2.0, known)
    job = Job(kernel, parse_case_id(CAUSAL.format("")), FORWARD)
    assert allowance.judge(job) is None
    assert (asked, allowance.declined) == ([], True)
    assert ProbeBudget(Asked(Settings()), 4.0, known).judge(job) == []
    assert asked == [job.case.id]


def test_the_time_of_judging_a_failure_again_is_not_expected_of_a_probe() -> None:
    class Silent(Runner):
        def judge(self, job: Job) -> list[Record]:
            return []

    kernel = KernelOptions(in_process=True).find(f"{naive.__name__}:attention")
    record = Record(implementation=kernel.name, platform="cpu", case=CAUSAL.format(""), check="forward",
                    observable="out", verdict=PASS, seconds=1.0)  # fmt: skip
    again = msgspec.structs.replace(
        record, case=CAUSAL.format("sinks/"), verdict=FAIL, seconds=30.0, figures={DECLARATIONS_TRIED: 1.0}
    )
    job = Job(kernel, parse_case_id(CAUSAL.format("")), FORWARD)
    assert ProbeBudget(Silent(Settings()), 4.0, [record, again]).judge(job) == []
    assert ProbeBudget(Silent(Settings()), 4.0, [again]).judge(job) is None


def test_what_starting_took_once_is_not_multiplied_by_the_length_of_the_next_probe() -> None:
    class Starting(Runner):
        def judge(self, job: Job) -> list[Record]:
            return []

    kernel = KernelOptions(in_process=True).find(f"{naive.__name__}:attention")
    short, long = (parse_case_id(CAUSAL.format("").replace("16", size)) for size in ("16", "256"))
    known = [
        Record(implementation=kernel.name, platform="cpu", case=case.id, check="forward", observable="out",
               verdict=PASS, seconds=seconds) for case, seconds in ((short, 0.001), (long, 0.5))
    ]  # fmt: skip
    allowance = ProbeBudget(Starting(Settings()), 5.0, known)
    allowance._expected_seconds, allowance._used_seconds, allowance._probes = 0.001, 0.3, 1
    assert allowance.judge(Job(kernel, long, FORWARD)) == []


@pytest.mark.parametrize(("spent", "most"), [(0.1, 15.0), (60.0, 15.0), (150.0, 15.0), (3600.0, 360.0)])
def test_both_together_take_a_tenth_and_no_less_than_15_seconds(spent: float, most: float) -> None:
    assert 0.9 * most < follow_up.compute_allowed_seconds(spent) < most
