"""GitHub gets annotations, at the line that raised; nobody else does."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance import cli

CASE = "train/f32/B1.T16.S16.N2.K2.H16.V16/causal/normal/s0"
RIGHT = """\
from tests.kernels import naive
from conformance import declare

@declare(behind_mask="finite")
def attention(q, k, v, *, causal=False):
    return naive.attention(q, k, v, causal=causal)
"""
RAISING = f"{RIGHT}".replace(
    "return naive", "raise ValueError('100%: (kernel.py:1: from tests)\\n::warning::x') # naive"
)


def run(*arguments: str) -> int:
    return cli.main(cli.build_parser().parse_args(arguments))


def judge(*options: str) -> int:
    return run("run", "--impl=src/kernel.py:attention", f"--case={CASE}", "--check=forward", *options)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file of a kernel, in a folder below the checkout."""
    (tmp_path / "repository" / "src").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "repository")
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path))
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    found = tmp_path / "repository" / "src" / "kernel.py"
    found.write_text(RIGHT)
    return found


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().out.splitlines() if line.lstrip().startswith("::")]


def test_what_raises_is_annotated_at_its_line_from_the_top_of_the_repository(
    source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert judge() == 0
    assert lines(capsys) == []
    source.write_text(RAISING)
    assert judge() == 1
    (line,) = lines(capsys)
    where = (
        "::error file=repository/src/kernel.py,line=6,title=src/kernel.py%3Aattention (cpu)%3A raises ValueError%3A "
    )
    assert line.startswith(where)
    told = f"explains 1 failure in 1 case, of forward%0Asmallest: {CASE}%0AValueError: 100%25: "
    assert line.partition("::")[2].partition("::")[2].startswith(told)


def test_an_operand_that_got_nothing_is_annotated(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source.write_text(RIGHT.replace("causal=False)", "causal=False, window_size=None)"))
    assert judge() == 1
    (line,) = lines(capsys)
    title = "src/kernel.py%3Aattention (cpu)%3A never called%3A `window_size` (is it `window`?)"
    assert line.startswith(f"::error title={title}::")


def test_a_line_that_is_not_checked_out_is_no_place(
    source: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source.write_text(RAISING)
    monkeypatch.setenv("GITHUB_WORKSPACE", str(source.parent.parent.parent / "elsewhere"))
    assert judge() == 1
    (line,) = lines(capsys)
    assert line.startswith("::error title=")


@pytest.mark.parametrize("value", [None, "", "false"])
def test_nothing_is_annotated_outside_of_github(
    source: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    if value is None:
        monkeypatch.delenv("GITHUB_ACTIONS")
    else:
        monkeypatch.setenv("GITHUB_ACTIONS", value)
    assert judge("--json=before.jsonl") == 0
    source.write_text(RAISING)
    assert judge("--json=after.jsonl", "--baseline=before.jsonl") == 1
    assert run("compare", "before.jsonl", "after.jsonl") == 1
    assert lines(capsys) == []


def test_a_comparison_is_annotated_and_a_run_with_a_baseline_says_each_thing_once(
    source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert judge("--json=before.jsonl") == 0
    source.write_text(RAISING)
    assert lines(capsys) == []
    assert judge("--json=after.jsonl", "--baseline=before.jsonl") == 1
    said = lines(capsys)
    titles = [line.partition("title=")[2].partition("::")[0] for line in said]
    assert [title.partition(" ValueError")[0] for title in titles] == [
        "src/kernel.py%3Aattention (cpu)%3A raises",
        "src/kernel.py%3Aattention (cpu)%3A forward gone",
    ]
    assert run("compare", "before.jsonl", "after.jsonl") == 1
    compared = lines(capsys)
    assert len(compared) == 2
    assert ",line=6,title=new%3A src/kernel.py%3Aattention (cpu)%3A raises ValueError%3A " in compared[0]
    assert run("compare", "after.jsonl", "before.jsonl") == 0
    assert lines(capsys) == []
