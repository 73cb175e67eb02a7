"""Runs of the past: their order, which files are one run, and what changed from one to the next."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from conformance.judging import past
from conformance.judging.past import Past, Piece
from conformance.records import PASS, Record
from conformance.runs import Kernel, Planned, Recorded, Run

JOBS = tuple(Planned("kernel", f"case{number}", ("forward",)) for number in range(3))


def run(day: int, **changed: Any) -> Run:
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


def piece(name: str, of: Run | None) -> Piece:
    return Piece(Path(f"{name}.jsonl"), 0, of, 0)


def names(found: list[Past]) -> list[list[str]]:
    return [[piece.path.stem for piece in one.pieces] for one in found]


def test_runs_are_in_the_order_in_which_they_began_and_those_that_do_not_say_come_first() -> None:
    later = piece("later", run(2, started="2026-01-02T01:00:00+02:00"))  # the 1st in UTC
    naive = piece("naive", run(3, started="2026-01-03T00:00:00"))
    given = [[piece("4", run(4))], [naive], [later], [piece("2", run(2))], [piece("old", None)]]
    assert names(past.in_order(given)) == [["old"], ["later"], ["2"], ["naive"], ["4"]]


def test_shards_that_were_cut_from_the_same_jobs_are_one_run() -> None:
    shards = [[piece(f"{day}-{k}", run(day, shard=f"{k}/2"))] for day in (1, 2) for k in (1, 2)]
    assert names(past.in_order(shards)) == [["1-1", "1-2"], ["2-1", "2-2"]]
    # The second run lacks a shard; the third begins with the one that it has.
    lacking = [
        shards[0],
        shards[1],
        shards[2],
        [piece("3-1", run(3, shard="1/2"))],
        [piece("3-2", run(3, shard="2/2"))],
    ]
    assert names(past.in_order(lacking)) == [["1-1", "1-2"], ["2-1"], ["3-1", "3-2"]]


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
    given = [[piece("1", run(1, shard="1/2"))], [piece("2", run(1, **{"shard": "2/2"} | other))]]
    assert len(past.in_order(given)) == 2


def test_what_is_given_together_is_one_run() -> None:
    assert names(past.in_order([[piece("2", run(2)), piece("1", run(1))], []])) == [["2", "1"]]


def test_a_time_that_is_none_is_named() -> None:
    with pytest.raises(ValueError, match=r"1\.jsonl does not say when its run began: 'today' is no time"):
        past.in_order([[piece("1", run(1, started="today"))]])


def changed(**other: Any) -> list[past.Changed]:
    one, two = (past.in_order([[piece("x", of)]])[0] for of in (run(1), run(2, **other)))
    return past.changed(one, two, "kernel")


def test_what_changed_between_two_runs_is_named_with_its_values() -> None:
    assert changed() == []
    both = {"environment": {"jax": "0.11.0", "commit": "bbb", "source of attention-conformance": "2"}}
    assert changed(**both, level="deep") == [
        ("level", "quick", "deep"),
        ("commit", "aaa", "bbb"),  # which says what the digest of the same source says
        ("jax", "0.10.2", "0.11.0"),
    ]
    assert changed(narrowed="--check=forward") == [("narrowed", "none", "--check=forward")]
    declared = {"softmax": "base2", "memory": "linear"}
    assert changed(kernels={"kernel": Kernel(source="abd", declared=declared)}) == [
        ("declared softmax", "exact", "base2"),
        ("source", "abc", "abd"),
    ]
    assert changed(tolerances=({"limit": 4.0},)) == [("limits", "", "")]


def test_of_long_values_the_words_that_differ_are_told() -> None:
    one, two = (run(1, environment={"XLA_FLAGS": f"{'--same=true ' * 9}--a={number}"}) for number in (1, 2))
    first, second = (past.in_order([[piece("x", of)]])[0] for of in (one, two))
    assert past.changed(first, second, "kernel") == [("XLA_FLAGS", "--a=1", "--a=2")]
    assert past.changed(first, past.in_order([[piece("x", None)]])[0], "kernel") == []


def test_two_copies_of_a_run_are_known_by_what_is_in_them() -> None:
    record = Record(implementation="k", platform="cpu", case="c", check="f", observable="out", verdict=PASS)
    recorded = Recorded(source="a", run=run(1), done={0: (record,)})
    (one,) = past.pieces(Path("a"), [recorded])
    (copy,) = past.pieces(Path("b"), [dataclasses.replace(recorded, source="b")])
    (other,) = past.pieces(Path("c"), [dataclasses.replace(recorded, done={})])
    assert one.is_of == copy.is_of != other.is_of
