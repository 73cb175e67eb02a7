"""The disk cache returns what would be computed, as long as no input and no code changes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cases.case_id import parse_case_id
from cases.operand_values import draw_problem
from conformance.truth import disk_cache
from impls.contract.declarations import Arithmetic

CASE = parse_case_id("train/bf16/B2.T40.S48.N4.K2.H16.V24/causal-o8/seg/sinks/normal/s0")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(disk_cache.CACHE_VARIABLE, str(tmp_path))
    return tmp_path


def _computed(times: list[int]) -> dict[str, float]:
    times.append(1)
    return {"one": 1.0, "two": float("inf")}


def test_numbers_are_computed_once(folder: Path) -> None:
    times: list[int] = []
    found = [disk_cache.compute_cached(("margins", draw_problem(CASE)), lambda: _computed(times)) for _ in range(3)]
    assert found == [{"one": 1.0, "two": float("inf")}] * 3
    assert len(times) == 1


def test_whatever_differs_is_computed_anew(folder: Path) -> None:
    times: list[int] = []
    problem = draw_problem(CASE)
    moved = problem.q.copy()
    moved[-1, -1, -1, -1] *= 2
    asked = [
        problem,
        dataclasses.replace(problem, q=moved),
        dataclasses.replace(problem, q=problem.q.astype(np.float32)),
        dataclasses.replace(problem, k=problem.k[:, ::-1]),
        problem.without("sinks"),
        draw_problem(dataclasses.replace(CASE, mask="causal-o7")),
    ]
    for one in asked:
        disk_cache.compute_cached((one, Arithmetic()), lambda: _computed(times))
    disk_cache.compute_cached((problem, Arithmetic(scaled_q=True)), lambda: _computed(times))
    assert len(times) == len(asked) + 1


def test_other_code_finds_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times: list[int] = []
    disk_cache.compute_cached("one", lambda: _computed(times))
    monkeypatch.setattr(disk_cache, "_hash_code", lambda: "other code")
    disk_cache.compute_cached("one", lambda: _computed(times))
    assert len(times) == 2


@pytest.mark.parametrize("harm", ["cut", "another", "list", "emptied"])
def test_what_a_disk_has_spoilt_is_computed_anew(folder: Path, harm: str) -> None:
    times: list[int] = []
    disk_cache.compute_cached("one", lambda: _computed(times))
    (entry,) = folder.iterdir()
    stored = entry.read_bytes()
    other = json.dumps({"name": "another", "numbers": {"one": 2.0}}).encode()
    entry.write_bytes({"cut": stored[: len(stored) // 2], "another": other, "list": b"[1]", "emptied": b""}[harm])
    assert disk_cache.compute_cached("one", lambda: _computed(times))["one"] == 1
    assert len(times) == 2


@pytest.mark.parametrize("name", ["", "/dev/null/nowhere"])
def test_nothing_needs_to_be_kept(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(disk_cache.CACHE_VARIABLE, name)
    times: list[int] = []
    assert [disk_cache.compute_cached("one", lambda: _computed(times)) for _ in range(2)] == [_computed([])] * 2
    assert len(times) == 2


@pytest.fixture
def paused() -> Iterator[None]:
    with disk_cache.disable_cache():
        yield


def test_cases_of_one_time_are_not_kept(folder: Path, paused: None) -> None:
    disk_cache.compute_cached("one", lambda: _computed([]))
    assert list(folder.iterdir()) == []


def test_what_is_not_known_to_the_bit_is_refused(folder: Path) -> None:
    with pytest.raises(TypeError, match="object cannot be hashed"):
        disk_cache.compute_cached(object(), lambda: _computed([]))


def test_the_folder_stays_within_its_size(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk_cache.compute_cached("old", lambda: _computed([]))
    monkeypatch.setattr(disk_cache, "_MAX_ENTRIES", 0)
    disk_cache._remove_oldest.cache_clear()
    disk_cache.compute_cached("new", lambda: _computed([]))
    assert len(list(folder.iterdir())) == 1
