"""Test the order of past runs, which files are one run, and what changed from one to the next."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from conformance.judging import run_history
from conformance.judging.run_history import PastRun, RunPiece
from conformance.records import PASS, Record
from conformance.runs import Kernel, PlannedJob, RecordedRun, Run

JOBS = tuple(PlannedJob("kernel", f"case{number}", ("forward",)) for number in range(3))


def build_run(day: int, **changed: Any) -> Run:
    values: dict[str, Any] = {
        "started": f"2026-01-{day:02d}T00:00:00+00:00",
        "command": "run",
        "level": "quick",
        "seeds": (0,),
        "environment": {"jax": "0.10.2", "commit": "aaa", "source of attention-conformance": "1"},
        "kernels": {"kernel": Kernel(source="abc", declared={"softmax": "exact", "memory": "linear"})},
        "jobs": JOBS,
    }
    return Run(**values | changed)


def build_piece(name: str, of: Run | None) -> RunPiece:
    return RunPiece(Path(f"{name}.jsonl"), 0, of, 0)


def list_names(found: list[PastRun]) -> list[list[str]]:
    return [[piece.path.stem for piece in one.pieces] for one in found]


def test_runs_are_in_the_order_in_which_they_began_and_those_that_do_not_say_come_first() -> None:
    later = build_piece("later", build_run(2, started="2026-01-02T01:00:00+02:00"))  # the 1st in UTC
    naive = build_piece("naive", build_run(3, started="2026-01-03T00:00:00"))
    given = [
        [build_piece("4", build_run(4))],
        [naive],
        [later],
        [build_piece("2", build_run(2))],
        [build_piece("old", None)],
    ]
    assert list_names(run_history.order_runs(given)) == [["old"], ["later"], ["2"], ["naive"], ["4"]]


def test_shards_that_were_cut_from_the_same_jobs_are_one_run() -> None:
    shards = [[build_piece(f"{day}-{k}", build_run(day, shard=f"{k}/2"))] for day in (1, 2) for k in (1, 2)]
    assert list_names(run_history.order_runs(shards)) == [["1-1", "1-2"], ["2-1", "2-2"]]
    # The second run lacks a shard; the third begins with the shard that the second has.
    lacking = [
        shards[0],
        shards[1],
        shards[2],
        [build_piece("3-1", build_run(3, shard="1/2"))],
        [build_piece("3-2", build_run(3, shard="2/2"))],
    ]
    assert list_names(run_history.order_runs(lacking)) == [["1-1", "1-2"], ["2-1"], ["3-1", "3-2"]]


@pytest.mark.parametrize(
    "other",
    [
        {"environment": {"jax": "0.11.0"}},
        {"level": "standard"},
        {"seeds": (1,)},
        {"narrowed": "--check=forward"},
        {"jobs": JOBS[:2]},
        {"shard": "2/3"},
        {"shard": ""},
    ],
)
def test_what_was_not_planned_alike_is_another_run(other: dict[str, Any]) -> None:
    given = [
        [build_piece("1", build_run(1, shard="1/2"))],
        [build_piece("2", build_run(1, **{"shard": "2/2"} | other))],
    ]
    assert len(run_history.order_runs(given)) == 2


def test_what_is_given_together_is_one_run() -> None:
    assert list_names(
        run_history.order_runs([[build_piece("2", build_run(2)), build_piece("1", build_run(1))], []])
    ) == [["2", "1"]]


def test_a_time_that_is_none_is_named() -> None:
    with pytest.raises(ValueError, match=r"1\.jsonl does not say when its run began: 'today' is not a time"):
        run_history.order_runs([[build_piece("1", build_run(1, started="today"))]])


def find_changed_names(**other: Any) -> list[run_history.Change]:
    one, two = (run_history.order_runs([[build_piece("x", of)]])[0] for of in (build_run(1), build_run(2, **other)))
    return run_history.find_changes(one, two, "kernel")


def test_what_changed_between_two_runs_is_named_with_its_values() -> None:
    assert find_changed_names() == []
    both = {"environment": {"jax": "0.11.0", "commit": "bbb", "source of attention-conformance": "2"}}
    assert find_changed_names(**both, level="deep") == [
        ("level", "quick", "deep"),
        ("commit", "aaa", "bbb"),  # it says the same as the digest of the source
        ("jax", "0.10.2", "0.11.0"),
    ]
    assert find_changed_names(narrowed="--check=forward") == [("narrowed", "none", "--check=forward")]
    declared = {"softmax": "base2", "memory": "linear"}
    assert find_changed_names(kernels={"kernel": Kernel(source="abd", declared=declared)}) == [
        ("declared softmax", "exact", "base2"),
        ("source", "abc", "abd"),
    ]
    assert find_changed_names(tolerances=({"limit": 4.0},)) == [("limits", "", "")]


def test_of_long_values_the_words_that_differ_are_told() -> None:
    one, two = (build_run(1, environment={"XLA_FLAGS": f"{'--same=true ' * 9}--a={number}"}) for number in (1, 2))
    first, second = (run_history.order_runs([[build_piece("x", of)]])[0] for of in (one, two))
    assert run_history.find_changes(first, second, "kernel") == [("XLA_FLAGS", "--a=1", "--a=2")]
    assert run_history.find_changes(first, run_history.order_runs([[build_piece("x", None)]])[0], "kernel") == []


def test_two_copies_of_a_run_are_known_by_what_is_in_them() -> None:
    record = Record(implementation="k", platform="cpu", case="c", check="f", observable="out", verdict=PASS)
    recorded = RecordedRun(source="a", run=build_run(1), done={0: (record,)})
    (one,) = run_history.list_pieces(Path("a"), [recorded])
    (copy,) = run_history.list_pieces(Path("b"), [dataclasses.replace(recorded, source="b")])
    (other,) = run_history.list_pieces(Path("c"), [dataclasses.replace(recorded, done={})])
    assert one.identity == copy.identity != other.identity
