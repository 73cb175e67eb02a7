"""A run reports what its failures have in common, confirms it by further cases, and shrinks it on request."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from conformance import cli
from conformance.follow_up import confirmation, shrinker
from conformance.follow_up.confirmation import Prober
from reports import records
from reports.records import PROBE_SCHEMA, read_runs
from tests.process_helpers import restore_signal_handlers

KERNEL = """
from conformance import declare
from tests.kernels import naive

@declare(behind_mask="finite")
def wrong(q, k, v, *, causal=False, soft_cap=None, sinks=None):
    return naive.attention(q, k, v, causal=causal, soft_cap=soft_cap)

@declare(behind_mask="finite")
def raising(q, k, v):
    raise ValueError("nothing is as it should be")

@declare(behind_mask="finite")
def right(q, k, v, *, causal=False, soft_cap=None, sinks=None):
    return naive.attention(q, k, v, causal=causal, soft_cap=soft_cap, sinks=sinks)
"""
WHAT = ("--check=forward", "--cases=train/f32/*", "--jobs=1")
NARROW = ("--check=forward", "--cases=train/f32/*T1.*", "--jobs=1")
SINKS = "train/f32/B1.T128.S128.N2.K2.H64.V64/full/sinksedge/normal/s0"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("kernels")
    (made / "kernel.py").write_text(KERNEL)
    return made


@pytest.fixture(autouse=True)
def there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def run(*arguments: str) -> int:
    words = ["run", "--in-process", "--diagnose-seconds=0", *arguments]
    return cli.main(cli.build_parser().parse_args(words))


def probes(path: str) -> list[dict[str, Any]]:
    """Read the records that confirm findings, without those that evaluate a finding in float64."""
    found = [line for line in map(json.loads, Path(path).read_text().splitlines()) if line["schema"] == PROBE_SCHEMA]
    return [line for line in found if line["record"]["check"] != "algorithm"]


@pytest.mark.long
def test_a_finding_is_confirmed_and_what_confirms_it_is_not_counted(capsys: pytest.CaptureFixture[str]) -> None:
    # By default that is a share of a run of some seconds, which a slowed machine may not do it in.
    said = ("--json=confirmed.jsonl", "--markdown=confirmed.markdown", "--confirm-seconds=60")
    assert run("--impl=kernel.py:wrong", *WHAT, *said) == 1
    told = capsys.readouterr()
    for text in (told.out, Path("confirmed.markdown").read_text()):
        assert "kernel.py:wrong (cpu): out is wrong with sinks" in text
        assert "confirmed: this case fails, and the same without sinksedge passes" in text
        assert SINKS in text
    assert f"--case={SINKS} --check=forward --in-process --shrink" in told.out
    assert re.search(r"\d+ further cases? judged in \d+ s, confirming 1 of 1 finding", told.err)
    assert [line["record"]["case"] for line in probes("confirmed.jsonl")] == [SINKS]

    assert run("--impl=kernel.py:wrong", *WHAT, "--json=plain.jsonl", "--confirm-seconds=0") == 1
    assert "confirmed" not in capsys.readouterr().out
    assert probes("plain.jsonl") == []
    counted = [[record.key for record in records.read_jsonl(Path(name))] for name in ("confirmed.jsonl", "plain.jsonl")]
    assert counted[0] == counted[1]

    report = cli.build_parser().parse_args(["report", "confirmed.jsonl", "plain.jsonl", "--report=page.html"])
    assert cli.main(report) == 0
    page = Path("page.html").read_text()
    assert "confirmed: this case fails, and the same without sinksedge passes" in page
    assert f"of {len(counted[0]):,} records" in page


def test_a_kernel_that_is_right_costs_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*arguments: Any) -> None:
        raise AssertionError("nothing is red")

    monkeypatch.setattr(confirmation, "confirm_findings", never)
    monkeypatch.setattr(shrinker, "shrink_findings", never)
    assert run("--impl=kernel.py:right", *NARROW, "--shrink") == 0


def test_a_single_case_is_shrunk(capsys: pytest.CaptureFixture[str]) -> None:
    case = "train/f32/B1.T16.S16.N2.K2.H16.V16/causal/softcap30/sinks/normal/s0"
    assert run("--impl=kernel.py:wrong", f"--case={case}", "--check=forward", "--shrink", "--json=small.jsonl") == 1
    out = capsys.readouterr().out
    assert "smallest of finding 1: train/f32/B1.T1.S1.N1.K1.H1.V1/full/sinks/normal/s0 (" in out
    command = "run --impl=kernel.py:wrong --case=train/f32/B1.T1.S1.N1.K1.H1.V1/full/sinks/normal/s0 --check=forward"
    assert command in out
    (recorded,) = read_runs(Path("small.jsonl"))
    assert [record.case for record in recorded.records] == [case]
    assert recorded.is_complete


@pytest.mark.long
def test_a_signal_while_findings_are_confirmed_costs_nothing_that_was_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    pressed = []

    def press(*arguments: Any) -> None:
        pressed.append(arguments)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Prober, "confirm", press)
    with restore_signal_handlers():
        assert run("--impl=kernel.py:wrong", *WHAT, "--json=stopped.jsonl", "--diagnose-seconds=5") == 130
    assert len(pressed) == 1
    (recorded,) = read_runs(Path("stopped.jsonl"))
    assert recorded.is_complete
    assert recorded.probes == ()


def test_time_is_not_negative(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--impl=kernel.py:wrong", "--confirm-seconds=-1") == 2
    assert "--confirm-seconds must not be negative, got -1" in capsys.readouterr().err


@pytest.mark.long
def test_a_wrong_kernel_is_compared_with_planted_bugs_in_the_run_and_in_later_reports(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = ("--json=compared.jsonl", "--markdown=compared.markdown", "--confirm-seconds=0", "--diagnose-seconds=300")
    assert run("--impl=kernel.py:wrong", "--impl=kernel.py:right", *NARROW, *said) == 1
    told = capsys.readouterr()
    assert "kernel.py:right compared" not in told.err
    assert "kernel.py:wrong compared with planted bugs on " in told.err
    cli.main(cli.build_parser().parse_args(["report", "compared.jsonl", "--report=compared.html"]))
    for text in (told.out, Path("compared.markdown").read_text(), Path("compared.html").read_text()):
        assert "the planted bug sinks-ignored" in text
    assert {line["record"]["check"] for line in probes("compared.jsonl")} > {"forward", "gradients"}
    assert {record.check for record in records.read_jsonl(Path("compared.jsonl"))} == {"forward"}


def test_what_only_raises_is_compared_with_no_bug(capsys: pytest.CaptureFixture[str]) -> None:
    said = ("--check=forward", "--cases=train/f32/*T1.*", "--jobs=1", "--diagnose-seconds=5")
    assert run("--impl=kernel.py:raising", *said) == 1
    told = capsys.readouterr()
    assert "planted bug" not in told.out + told.err
