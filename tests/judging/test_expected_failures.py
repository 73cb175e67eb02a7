"""Test that suggested entries match every failure and little else, and wait for a reason."""

from __future__ import annotations

import itertools
import tomllib
from pathlib import Path
from typing import Any

import pytest

from cases.case_id import matches_query
from conformance.judging import settings
from conformance.judging.expected_failures import (
    find_pattern,
    format_toml,
    suggest_entries,
    suggest_entries_by_cause,
)
from reports.records import ERROR, FAIL, PASS, Record

PARTS = itertools.product(("f32", "bf16"), ("T64.S64", "T100.S64"), ("causal", "full"), ("softcap30/", "sinks/", ""))
CASES = [f"train/{d}/B1.{s}.N2.K2.H64.V64/{m}/{o}normal/s0" for d, s, m, o in PARTS]


def build_record(case: str, verdict: str = PASS, **changed: Any) -> Record:
    values: dict[str, Any] = {"implementation": "kernel", "platform": "cpu", "check": "forward", "observable": "out"}
    return Record(case=case, verdict=verdict, **values | changed)


def build_failing(part: str) -> list[Record]:
    return [build_record(case, FAIL if part in case else PASS) for case in CASES]


@pytest.mark.parametrize("part", ["bf16", "/causal", "softcap30", "T100", "T100.S64.N2.K2.H64.V64/causal"])
def test_one_pattern_says_what_the_failures_have_in_common(part: str) -> None:
    found = build_failing(part)
    (entry,) = suggest_entries(found)
    assert not entry.some
    assert entry.failures == sum(one.verdict == FAIL for one in found)
    assert all(matches_query(entry.case, one.case) == (one.verdict == FAIL) for one in found)


def test_what_no_pattern_parts_from_passes_is_some_of_them() -> None:
    wrong = {CASES[0], CASES[-1]}
    (entry,) = suggest_entries([build_record(case, ERROR if case in wrong else PASS) for case in CASES])
    assert entry.some
    assert entry.failures == 2
    assert all(matches_query(entry.case, case) for case in wrong)


def test_a_single_failure_is_named_alone() -> None:
    only = find_pattern(frozenset({CASES[3]}), set(CASES) - {CASES[3]})
    assert [case for case in CASES if matches_query(only, case)] == [CASES[3]]


def test_where_all_fails_there_is_nothing_to_tell_apart() -> None:
    (entry,) = suggest_entries([build_record(case, FAIL) for case in CASES])
    assert entry.case == "*"
    assert "case =" not in format_toml(entry)


def test_results_and_checks_that_fail_together_are_one_entry() -> None:
    found = build_failing("bf16")
    more = [build_record(one.case, one.verdict, check="primal", observable="out") for one in found]
    more += [build_record(one.case, one.verdict, observable="logsumexp") for one in found]
    more += [build_record(one.case, one.verdict, check="primal", observable="logsumexp") for one in found]
    (entry,) = suggest_entries([*found, *more])
    assert entry.check == ("forward", "primal")
    assert entry.observable == ("logsumexp", "out")


def test_an_entry_waits_for_its_reason_and_then_settles_what_it_was_written_for(tmp_path: Path) -> None:
    found = [
        *build_failing("causal"),
        *(build_record(case, FAIL, check="poison", observable="dq[0].nan") for case in CASES[:3]),
    ]
    text = "".join(format_toml(entry) for entry in suggest_entries(found))
    assert len(tomllib.loads(text)["tool"]["attention_conformance"]["expected_failures"]) == 2
    (tmp_path / "pyproject.toml").write_text(text)
    with pytest.raises(settings.SettingsError, match="needs a reason"):
        settings.load_settings(tmp_path)
    (tmp_path / "pyproject.toml").write_text(text.replace('reason = ""', 'reason = "known"'))
    loaded = settings.load_settings(tmp_path)
    settled = [loaded.mark_expected_failures(one, "0.10.2") for one in found]
    assert {one.verdict for one in settled} == {PASS, "expected-fail"}
    assert loaded.find_stale_entries(settled, "0.10.2") == []


def test_many_results_of_one_cause_are_matched_by_few_patterns() -> None:
    parts = [f"dq.part{number}" for number in range(30)]
    wrong = [build_record(CASES[0], FAIL, observable=name) for name in (*parts, "out.vmap", "dk[0]")]
    right = [build_record(CASES[0], observable=name) for name in ("dv", "out.scan", "dq.other")]
    (entry,) = suggest_entries_by_cause([*wrong, *right], [("dq is wrong", "", wrong)])
    assert entry.observable == ("dq.*", "out.vmap", "dk[[]0]")
    assert (entry.failures, entry.passes, entry.some) == (32, 1, True)
