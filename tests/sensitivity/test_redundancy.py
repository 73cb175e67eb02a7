"""Test the search for a second, independent case that sees a bug, and the file of results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cases.case import parse_case_id
from conformance import cli
from conformance.records import FAIL
from conformance.sensitivity import detection_table, redundancy
from conformance.sensitivity.examination import Kill
from conformance.sensitivity.redundancy import BugSightings, Sighting
from tests.planted.computing import gaming

ZEROS = next(bug for bug in gaming.BUGS if bug.name == "returns-zeros")
BANK = (ZEROS,)
_CASE = "train/f32/B1.T64.S64.N2.K2.H32.V32/causal/{}/s0"
_OTHER = "train/bf16/B1.T64.S64.N2.K2.H32.V32/causal/normal/s0"


def run_command(*arguments: str) -> int:
    return cli.main(cli.build_parser().parse_args(list(arguments)))


def build_kill(case: str) -> Kill:
    return Kill("out", case, FAIL, 9.0)


def test_cases_that_differ_in_values_alone_are_not_independent() -> None:
    values = {"forward": build_kill(_CASE.format("normal")), "residuals": build_kill(_CASE.format("dominant"))}
    found = redundancy.find_known_sightings("bug", values)
    assert (found.seen, found.whole) == ((Sighting("forward", "out", _CASE.format("normal")),), False)
    found = redundancy.find_known_sightings("bug", values | {"poison": build_kill(_OTHER)})
    assert found.seen[1:] == (Sighting("poison", "out", _OTHER),)
    assert found.whole


def test_a_second_case_is_of_another_program() -> None:
    first = _CASE.format("normal")
    found = redundancy.find_second_sighting(ZEROS, "quick", {"forward": build_kill(first)}, seconds=60)
    one, second = found.seen
    assert one.case == first
    assert parse_case_id(second.case).program != parse_case_id(first).program
    assert (found.whole, second.check) == (True, "forward")


def test_who_has_no_time_says_so() -> None:
    found = redundancy.find_second_sighting(ZEROS, "quick", {"forward": build_kill(_CASE.format("normal"))}, seconds=-1)
    assert (len(found.seen), found.whole) == (1, False)


def test_what_was_found_is_kept_for_its_level(tmp_path: Path) -> None:
    found = [
        BugSightings(bug="b", seen=(Sighting("forward", "out", _OTHER),), whole=True),
        BugSightings(
            bug="a", seen=(Sighting("forward", "out", _OTHER), Sighting("limits", "out.x", _OTHER)), whole=True
        ),
    ]
    redundancy.save_sightings(found, "quick", path := tmp_path / "redundancy.json")
    assert redundancy.load_sightings("quick", path) == found[::-1]
    assert (
        redundancy.load_sightings("standard", path) == redundancy.load_sightings("quick", tmp_path / "none.json") == []
    )
    path.write_text(json.dumps({"schema": "other"}))
    with pytest.raises(ValueError, match="has schema 'other', must be"):
        redundancy.load_sightings("quick", path)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create the table of one bug that one case saw, and a file for the results."""
    row = {"bug": ZEROS.name, "family": "f", "kind": "k", "reference": "r", "judged": 1, "planned": 2}
    row["kills"] = {"forward": ["out", 9.0, _CASE.format("normal")]}
    monkeypatch.setattr(detection_table, "load_table", lambda: {"level": "quick", "bugs": [row]})
    found = tmp_path / "redundancy.json"
    monkeypatch.setattr(redundancy, "load_sightings", lambda level: _load(level, found))
    monkeypatch.setattr(redundancy, "save_sightings", lambda each, level: _save(each, level, found))
    return found


_load, _save = redundancy.load_sightings, redundancy.save_sightings


def test_the_command_goes_on_where_it_stopped(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["sensitivity", "--twice", "--bank=tests.sensitivity.test_redundancy:BANK"]
    assert run_command(*asked, "--seconds=-1") == 1
    assert "one case (time ran out): returns-zeros, by forward out on train/f32/" in capsys.readouterr().out
    assert run_command(*asked, "--bug=returns-zeros") == 0
    assert "1 of 1 planted bugs are seen by two independent cases" in capsys.readouterr().out
    assert run_command(*asked) == 0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--save", "give it without --save"),
        ("--level=standard", "--twice begins with what one case saw at standard"),
        ("--bug=none", "the bank has no bug 'none'"),
    ],
)
def test_what_the_command_cannot_do_is_said_in_a_line(
    given: str, said: str, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("sensitivity", "--twice", "--bank=tests.sensitivity.test_redundancy:BANK", given) == 2
    assert said in capsys.readouterr().err
