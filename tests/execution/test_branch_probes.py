"""Tests of the recording of branches: every kind of condition, operands, and code that is as before afterwards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conformance.execution.branch_probes import Recording, record_branches
from conformance.extensions import load_attribute

_SOURCE = """
TABLE = {(64, 2): "a", 128: "b", "name": "c"}


def decide(x, y=None, *, flag=False):
    found = []
    if x == 1 and y is not None:
        found.append("and")
    elif not (x > 3 or flag):
        found.append("not or")
    size = y or 5
    found.append("small" if size < 10 else "large")
    found += [i for i in range(x) if i % 2]
    while x > 7:
        x -= 1
    for name in ("a", "b")[:x]:
        found.append(name)
    if x in (4, 9):
        found.append("in")
    if (rest := x % 3) and flag:
        found.append(rest)
    if x < 0:  # pragma: no cover
        found.append("never")
    if x > 100:
        raise ValueError("too large")
    return tuple(found), inner(x)()


def inner(x):
    def add():
        return x + 1 if x else 0

    return add
"""


@pytest.fixture
def decide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return the function of a module in a folder of its own."""
    (tmp_path / "decisions_of_a_kernel.py").write_text(_SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    found: Callable[..., Any] = load_attribute("decisions_of_a_kernel:decide")
    return found


def _list_outcomes(recording: Recording) -> dict[str, set[bool]]:
    return {recording.conditions[index].text: seen.outcomes for index, seen in recording.seen.items()}


def test_records_every_kind_of_condition(decide: Callable[..., Any]) -> None:
    with record_branches(decide) as recording:
        decide(1, 20)
    assert _list_outcomes(recording) == {
        "x == 1": {True},
        "y is not None": {True},
        "y": {True},
        "size < 10": {False},
        "i % 2": {False},
        "x > 7": {False},
        'for name in ("a", "b")[:x]:': {False, True},
        "x in (4, 9)": {False},
        "rest := x % 3": {True},
        "flag": {False},
        "x > 100": {False},
        "x": {True},
    }


def test_notes_the_operands_of_comparisons(decide: Callable[..., Any]) -> None:
    with record_branches(decide) as recording:
        decide(4)
    operands = {recording.conditions[index].text: seen.operands for index, seen in recording.seen.items()}
    assert operands["x == 1"] == [("==", 4, 1)]
    assert operands["x in (4, 9)"] == [("in", 4, (4, 9))]
    assert operands["i % 2"] == [("!=", 0, 0), ("!=", 1, 0)]
    assert set(recording.table_keys) == {(64, 2), (128,)}


def test_records_nothing_of_a_string_named_like_a_file_of_the_kernel(
    decide: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(decide.__code__.co_filename).parent)
    pasted: dict[str, Any] = {}
    exec(compile(_SOURCE, "decisions_of_a_kernel.py", "exec"), pasted)
    with record_branches(decide) as recording:
        pasted["decide"](1)
    assert {condition.file for condition in recording.conditions} == {decide.__code__.co_filename}
    assert not recording.seen


def test_says_which_outcome_raises(decide: Callable[..., Any]) -> None:
    with record_branches(decide) as recording:
        decide(1)
    raising = {condition.text: condition.raises for condition in recording.conditions if any(condition.raises)}
    assert raising == {"x > 100": (False, True)}


@pytest.mark.parametrize("arguments", [(1, 20), (2,), (8, 3), (4,), (0,)])
def test_recording_changes_no_result_and_no_code(decide: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    before, code = decide(*arguments, flag=True), decide.__code__
    with record_branches(decide) as recording:
        during = decide(*arguments, flag=True)
        kept = load_attribute("decisions_of_a_kernel:inner")(3)
    assert during == before
    assert decide.__code__ is code or decide.__code__ == code
    recording.clear()
    assert decide(*arguments, flag=True) == before
    assert kept() == 4  # a function that was made meanwhile has no probes left either
    assert not recording.seen


def test_records_nothing_of_other_folders(decide: Callable[..., Any]) -> None:
    with record_branches(decide) as recording:
        pass
    assert {Path(condition.file).name for condition in recording.conditions} == {"decisions_of_a_kernel.py"}
