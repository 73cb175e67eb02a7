"""Findings name every fault of a kernel and nothing else, also for kernels that the method was not fitted to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from conformance import cli
from reports.causes import root_causes
from reports.causes.finding import BEHIND_MASK, CHECK, Finding
from reports.records import Record, read_runs
from tests.reports.causes.faults import recorded_faults
from tests.reports.causes.faults.faulty_kernels import FIVE, TEN, Fault, FaultyKernel

EVERY = (*TEN, *FIVE)


def is_named_by(finding: Finding, fault: Fault) -> bool:
    """Return whether a finding names a fault: what is wrong, and exactly the levels that it needs."""
    if finding.kind != fault.kind:
        return False
    if fault.kind in (BEHIND_MASK, CHECK):
        return fault.kind == BEHIND_MASK or fault.result in finding.checks
    named = [frozenset(level.name for level in levels) for levels in (finding.levels or (), *finding.others)]
    return fault.result in finding.results and fault.levels in named


def has_one_finding_for_each_fault(kernel: FaultyKernel, records: Sequence[Record], probes: Sequence[Record]) -> bool:
    """Return whether findings and faults match one to one."""
    found = root_causes.find_root_causes(records, probes)
    left = list(kernel.faults)
    for finding in found:
        fault = next((one for one in left if is_named_by(finding, one)), None)
        if fault is None:
            return False
        left.remove(fault)
    return not left


@pytest.mark.parametrize("kernel", EVERY, ids=lambda kernel: kernel.name)
def test_every_fault_is_a_finding_and_nothing_else_is(kernel: FaultyKernel) -> None:
    assert has_one_finding_for_each_fault(kernel, *recorded_faults.load_records()[kernel.name])


@pytest.mark.nightly
@pytest.mark.parametrize("kernel", EVERY, ids=lambda kernel: kernel.name)
def test_a_new_run_finds_the_same(kernel: FaultyKernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("kernel.py").write_text(kernel.source)
    options = ("--jobs=1", "--json=run.jsonl", "--confirm-seconds=60", "--diagnose-seconds=0")
    assert cli.main(cli.build_parser().parse_args(["run", "--impl=kernel.py:attention", *options])) == 1
    (recorded,) = read_runs(Path("run.jsonl"))
    assert has_one_finding_for_each_fault(kernel, recorded.records, recorded.probes)
