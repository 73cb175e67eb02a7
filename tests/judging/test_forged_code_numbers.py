"""Test that code numbers from a kernel's process are checked, since a kernel can forge them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from cases.case_space.code_numbers import CodeNumbers
from conformance import cli
from conformance.execution import implementation_registry
from conformance.judging import explorer
from conformance.sandbox.kernel_process import ProcessLost
from reports import records
from reports.records import FAILED, read_runs

KERNEL = """\
from conformance.execution import kernel_constants

class Forged:
    integers, floats, in_source = ["many"], [], frozenset()

kernel_constants.find_code_numbers = lambda implementation: Forged

def attention(q, k, v): return q
"""


def set_answer(monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    """Have the process of any kernel return this answer, or raise it."""

    def run(*arguments: Any) -> Any:
        if isinstance(answer, BaseException):
            raise answer
        return answer

    monkeypatch.setattr(
        explorer, "create_executor", lambda implementation: type("Process", (), {"run": staticmethod(run)})
    )


@pytest.mark.parametrize(
    "answer",
    [
        None,
        3,
        "code numbers",
        [],
        ([], []),
        ([3.5], [], []),
        (["3"], [], []),
        ([True], [], []),
        ([2], [], []),
        ([-128], [], []),
        ([2**60], [], []),
        ([128] * 1000, [], []),
        ([], [math.nan], []),
        ([], [math.inf], []),
        ([], [-1.0], []),
        ([], ["0.5"], []),
        ([], [0.5] * 1000, []),
        ([], [], [None]),
        ([], [], {"a": 1}),
        ProcessLost("the kernel's process was killed"),
        ValueError(),
        RecursionError("too deep"),
    ],
)
def test_forged_code_numbers_are_one_line(answer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    set_answer(monkeypatch, answer)
    with pytest.raises(explorer.InvalidCodeNumbers) as raised:
        explorer._request_code_numbers(implementation_registry.find_implementation("dot_product"))
    assert "dot_product" in str(raised.value)
    assert str(raised.value).isprintable()


def test_code_numbers_that_are_none_are_no_forgery(monkeypatch: pytest.MonkeyPatch) -> None:
    set_answer(monkeypatch, ([], [], []))
    assert not explorer._request_code_numbers(implementation_registry.find_implementation("dot_product"))
    set_answer(monkeypatch, ([128, 3], [0.25, 1e300], [3, 0.25]))
    found = explorer._request_code_numbers(implementation_registry.find_implementation("dot_product"))
    assert found == CodeNumbers((128, 3), (0.25, 1e300), frozenset({3, 0.25}))


def test_explore_ends_at_forged_code_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "forges.py").write_text(KERNEL)
    command = ["explore", "--impl=forges.py:attention", "--examples=1", "--seed=0", "--json=r.jsonl"]
    assert cli.main(cli.build_parser().parse_args(command)) == 2
    seed, line = capsys.readouterr().err.splitlines()
    assert seed == "seed 0"
    assert line.startswith("error: forges.py:attention ")
    assert "run" in line
    (recorded,) = read_runs(tmp_path / "r.jsonl")
    assert recorded.end is not None
    assert recorded.end.how == FAILED
    assert records.read_jsonl(tmp_path / "r.jsonl") == []
