"""Findings name every fault of a kernel and nothing else: of kernels that the method was not made by."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from conformance import cli, runs
from conformance.records import Record
from reports.causes import root_causes
from reports.causes.finding import BEHIND_MASK, CHECK, Finding
from tests.reports.causes.faults import told
from tests.reports.causes.faults.faulty_kernels import FIVE, TEN, Fault, Faulty

EVERY = (*TEN, *FIVE)


def is_finding_of(finding: Finding, fault: Fault) -> bool:
    """Whether a finding says what the fault is: what is wrong, and since which levels and no other."""
    if finding.kind != fault.kind:
        return False
    if fault.kind in (BEHIND_MASK, CHECK):
        return fault.kind == BEHIND_MASK or fault.result in finding.checks
    said = [frozenset(level.name for level in levels) for levels in (finding.levels or (), *finding.others)]
    return fault.result in finding.results and fault.levels in said


def find_all_faults(kernel: Faulty, records: Sequence[Record], probes: Sequence[Record]) -> bool:
    """Whether each finding is of a fault of its own, and each fault has one."""
    found = root_causes.find_root_causes(records, probes)
    left = list(kernel.faults)
    for finding in found:
        fault = next((one for one in left if is_finding_of(finding, one)), None)
        if fault is None:
            return False
        left.remove(fault)
    return not left


@pytest.mark.parametrize("kernel", EVERY, ids=lambda kernel: kernel.name)
def test_every_fault_is_a_finding_and_nothing_else_is(kernel: Faulty) -> None:
    assert find_all_faults(kernel, *told.load()[kernel.name])


@pytest.mark.nightly
@pytest.mark.parametrize("kernel", EVERY, ids=lambda kernel: kernel.name)
def test_a_run_of_today_finds_the_same(kernel: Faulty, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("kernel.py").write_text(kernel.source)
    beside = ("--jobs=1", "--json=told.jsonl", "--confirm-seconds=60", "--diagnose-seconds=0")
    assert cli.main(cli.build_parser().parse_args(["run", "--impl=kernel.py:attention", *beside])) == 1
    (recorded,) = runs.read_runs(Path("told.jsonl"))
    assert find_all_faults(kernel, recorded.records, recorded.probes)
