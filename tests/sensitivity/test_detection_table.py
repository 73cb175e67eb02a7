"""Test how detection power is measured: examinations, their table, and the command."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from conformance import cli
from conformance.checks import CHECKS, CHECKS_BY_NAME
from conformance.judging import run_plan
from conformance.sensitivity import detection_table
from impls.contract.implementation import Implementation
from reports.detection_section import build_detection as section
from reports.records import FAIL
from tests.bank import PlantedBug, detection_results
from tests.bank.__main__ import main
from tests.bank.examination import (
    Detection,
    Examination,
    compute_check_powers,
    examine,
    iter_red_records,
    order_jobs_for_bug,
)
from tests.bank.planted_bug import BankError, load_bank
from tests.bank.resolution import Resolution
from tests.planted.computing import gaming, laws

ZEROS = next(bug for bug in gaming.BUGS if bug.name == "returns-zeros")
TWICE = (ZEROS, ZEROS)
CLIPPED = next(bug for bug in laws.BUGS if bug.name == "cotangent-clipped-at-64")
BANK = (ZEROS,)
ELSEWHERE = (dataclasses.replace(ZEROS, name="needs-a-compiler", unmeasurable=lambda: "no compiler here"),)


def build_examination(bug: str, *checks: str) -> Examination:
    detections = {check: Detection("out", "train/...", "fail", 12.3456) for check in checks}
    return Examination(
        bug=bug, family="f", kind="k", reference="r", shows=("out",), detections=detections, judged=2, planned=9,
        seconds={check.name: 1.0 for check in CHECKS},
    )  # fmt: skip


def test_the_order_of_jobs_loses_none() -> None:
    jobs = order_jobs_for_bug(CLIPPED, "quick")
    assert len({job.id for job in jobs}) == len(jobs)
    # It supports everything that needs no special algorithm, declares nothing, and is for no accelerator.
    elsewhere = {"interpreter", "compiles", "dropout", "tangents", "batch_invariance", "index_scores"}
    assert {check.name for job in jobs for check in job.checks} == set(CHECKS_BY_NAME) - elsewhere


def test_a_bug_is_looked_for_first_where_it_was_seen() -> None:
    job = next(job for job in reversed(order_jobs_for_bug(ZEROS, "quick")) if job.is_on_grid)
    seen = {"residuals": Detection("logsumexp", job.case.id, FAIL, 1.0)}
    red = next(iter_red_records(ZEROS, "quick", seen))
    assert (red.check, red.case) == ("residuals", job.case.id)
    assert next(iter_red_records(ZEROS, "quick")).case != job.case.id


def test_a_bug_that_is_not_where_it_was_seen_is_found_all_the_same() -> None:
    # `aliasing` does not see it: zeros share no memory with the operands.
    seen = {"aliasing": Detection("q", "train/...", FAIL, None)}
    assert next(iter_red_records(ZEROS, "quick", seen)) is not None


def test_a_gross_bug_is_seen_by_many_checks_at_once() -> None:
    found = examine(ZEROS, "quick")
    assert {"forward", "residuals", "gradients"} & set(found.detections)
    assert not found.survives
    assert found.judged < found.planned


def test_a_check_that_sees_a_bug_alone_is_needed() -> None:
    found = compute_check_powers(
        [build_examination("a", "forward"), build_examination("b", "forward", "poison"), build_examination("c")]
    )
    by_name = {power.check: power for power in found}
    assert by_name["forward"].detected == 2
    assert by_name["forward"].alone == ("a",)
    assert by_name["poison"].alone == ()
    assert [power.check for power in found] == [check.name for check in CHECKS]


def test_the_table_is_strict_json_that_reads_back_and_shows(tmp_path: Path) -> None:
    resolutions = [
        Resolution("scale", "f32", "out", 2.5e-6, 42.0, "train/..."),
        Resolution("scale", "bf16", "out", None, None, ""),
    ]
    infinite = build_examination("b", "forward")
    infinite = dataclasses.replace(infinite, detections={"forward": Detection("out", "c", "fail", float("inf"))})
    table = detection_results.build_table(
        [build_examination("a", "poison"), infinite, build_examination("c")],
        resolutions,
        level="quick",
        environment={"jax": "1"},
    )
    detection_results.save_table(table, tmp_path / "detection.json")
    assert detection_table.load_table(tmp_path / "detection.json") == json.loads(json.dumps(table))
    shown = section(table)
    assert shown is not None
    assert [bug["bug"] for bug in shown.survivors] == ["c"]
    assert "linearity" in shown.idle
    assert shown.resolution["scale", "out"]["f32"]["roundoffs"] == 42.0


def test_nothing_measured_is_no_section(tmp_path: Path) -> None:
    assert detection_table.load_table(tmp_path / "none.json") is None
    assert section(None) is None
    (tmp_path / "other.json").write_text('{"schema": "other"}')
    with pytest.raises(ValueError, match="schema 'other'"):
        detection_table.load_table(tmp_path / "other.json")


@pytest.mark.parametrize(
    ("bank", "message"),
    [
        ("nowhere", "is incomplete"),
        ("no.such.module:BANK", "ModuleNotFoundError"),
        ("tests.sensitivity.test_detection_table:ZEROS", "must be a sequence"),
        ("tests.sensitivity.test_detection_table:TWICE", "returns-zeros occurs twice"),
    ],
)
def test_a_bank_that_cannot_be_used_says_why(bank: str, message: str) -> None:
    with pytest.raises(BankError, match=message):
        load_bank(bank)


def test_a_bug_must_say_what_it_is() -> None:
    def build() -> Implementation:
        raise AssertionError

    with pytest.raises(ValueError, match="lower-case words"):
        PlantedBug(name="Two words", family="f", kind="k", reference="r", shows=("out",), build=build)
    with pytest.raises(ValueError, match="reference must not be empty"):
        PlantedBug(name="a", family="f", kind="k", reference="", shows=("out",), build=build)


def run_command(*arguments: str) -> int:
    return cli.main(cli.build_parser().parse_args(list(arguments)))


@pytest.mark.long
def test_the_command_shows_which_checks_see_a_bug(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    bank = "tests.sensitivity.test_detection_table:BANK"
    assert main([f"--bank={bank}", "--bug=returns-zeros", "--jobs=1", f"--report={page}"]) == 0
    printed = capsys.readouterr().out
    assert "gaming: returns-zeros" in printed
    assert "1 of 1 planted bugs are seen" in printed
    assert "returns-zeros" in page.read_text()


def test_what_this_machine_cannot_measure_is_named_and_is_no_success(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                "--bank=tests.sensitivity.test_detection_table:ELSEWHERE",
                "--bug=needs-a-compiler",
                "--jobs=1",
            ]
        )
        == 2
    )
    printed = capsys.readouterr().out
    assert "not measured here: needs-a-compiler (never measured at this level): no compiler here" in printed
    assert "0 of 0 planted bugs are seen" in printed


def test_the_last_figures_of_a_bug_stand_where_it_cannot_be_measured() -> None:
    measured = [build_examination("a", "compiles"), build_examination("b", "forward")]
    table = detection_results.build_table(measured, [], level="quick", environment={})
    (kept,) = detection_results.parse_examinations(table, {"a"})
    again = detection_results.build_table([kept, measured[1]], [], level="quick", environment={})
    assert again["bugs"] == table["bugs"]
    assert [row["alone"] for row in again["checks"]] == [row["alone"] for row in table["checks"]]
    assert detection_results.parse_examinations(None, {"a"}) == []


def test_at_smoke_bugs_are_judged_as_a_run_does_and_the_first_red_is_timed() -> None:
    planned = run_plan.plan_run([ZEROS.build()], level="smoke").jobs
    assert [job.id for job in order_jobs_for_bug(ZEROS, "smoke")] == [job.id for job in planned]
    found = examine(ZEROS, "smoke")
    assert found.detections
    assert found.planned == len(planned)
    assert found.first_red is not None
    assert found.first_red > 0


def test_a_part_joins_what_was_measured_before_at_what_it_cost() -> None:
    before = detection_results.build_table([build_examination("a", "forward")], [], level="quick", environment={})
    before["checks"][0]["seconds"], before["resolution"] = 3.0, [{"observable": "out"}]
    both = [*detection_results.parse_examinations(before, {"a"}), build_examination("b", "residuals")]
    table = detection_results.merge_tables(
        detection_results.build_table(both, [], level="quick", environment={}), before
    )
    assert [row["bug"] for row in table["bugs"]] == ["a", "b"]
    cost = {row["check"]: row["seconds"] for row in table["checks"]}
    assert cost["forward"] == 3.0 + 1.0
    assert table["resolution"] == [{"observable": "out"}]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--bank=nowhere"], "bank 'nowhere' is incomplete"),
        (["--bug=no-such-bug"], "has no bug 'no-such-bug'"),
        (["--bug=returns-zero"], "did you mean 'returns-zeros'?"),
        (["--jobs=-1"], "--jobs must be at least 1, got -1"),
        (["--bug=returns-zeros", "--new"], "cannot be combined with --bug"),
        (["--bug=returns-zeros", "--save", "--level=deep"], "measure the whole bank"),
        (["--save", "--level=smoke"], "give it without --level=smoke"),
    ],
)
def test_what_cannot_be_measured_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [([], "nothing to calibrate by"), (["no-such-file.jsonl"], "no-such-file.jsonl cannot be read")],
)
def test_what_cannot_be_calibrated_is_one_line(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("calibrate", f"--out={tmp_path / 'out.json'}", *arguments) == 2
    assert message in capsys.readouterr().err
