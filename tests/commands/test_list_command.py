"""`list cases` lists what a run judges. `explain --impl` shows the terms of a bound, and which an error resembles."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance import cli
from conformance.session.planned_run import plan_jobs
from conformance.session.resolved_run import resolve_run
from conformance.session.run_spec import RunSpec

CASE = "train/f32/B1.T64.S64.N2.K2.H32.V32/causal/normal/s0"
KERNELS = """
import jax.numpy as jnp
from tests.kernels import naive
from conformance import declare

@declare(behind_mask="finite")
def coarse(q, k, v, *, causal=False):
    short = lambda x: x.astype(jnp.bfloat16).astype(jnp.float32)
    return naive.attention(short(q), short(k), v, causal=causal)

@declare(behind_mask="finite")
def longer(q, k, v, *, causal=False):
    return 1.001 * naive.attention(q, k, v, causal=causal)

@declare(behind_mask="finite")
def raises(q, k, v, *, causal=False):
    raise ValueError("no such block")
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kernels.py").write_text(KERNELS)


def run(*arguments: str) -> int:
    """Run `explain`, and return its exit code."""
    return cli.main(cli.build_parser().parse_args(["explain", *arguments]))


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, str]:
    """Parse the output by result."""
    assert run(CASE, *arguments) == 0
    blocks = capsys.readouterr().out.split("\n\n")[1:]
    return {block.partition(":")[0]: block for block in blocks}


def test_the_terms_of_the_bound_are_told_for_each_result(capsys: pytest.CaptureFixture[str]) -> None:
    found = said(capsys, "--impl=dot_product")
    assert list(found) == ["out", "logsumexp", "max_logits", "dq", "dk", "dv"]
    for name, block in found.items():
        assert "%  rounding the products of f32 operands" in block, name
        assert "%  sums over keys" in block or name == "max_logits", name
        assert "fewer bits" not in block, name


def test_what_an_error_resembles_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    coarse = said(capsys, "--impl=kernels.py:coarse")["out"]
    assert "the error resembles" in coarse
    assert "resembles rounding the products of f32 operands" in coarse
    assert "as if that were done with fewer bits" in coarse
    assert "resembles" not in said(capsys, "--impl=kernels.py:longer")["out"]  # no rounding is always about the same


def test_what_cannot_be_asked_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert "raised" in said(capsys, "--impl=kernels.py:raises")["out"]
    assert run(CASE.replace("causal", "full/sinks"), "--impl=kernels.py:longer") == 2
    assert "does not support" in capsys.readouterr().err


def list_cases(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert cli.main(cli.build_parser().parse_args(["list", "cases", *arguments])) == 0
    return capsys.readouterr().out.splitlines()


def test_the_cases_of_smoke_are_those_that_a_run_judges(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--impl=kernels.py:longer", "--cases=train/f32", "--level=smoke")
    listed = list_cases(capsys, *words)
    spec = RunSpec(implementations=("kernels.py:longer",), cases="train/f32", level="smoke", in_process=True)
    jobs = plan_jobs(resolve_run(spec)).jobs
    assert listed == list(dict.fromkeys(job.case.id for job in jobs if job.is_on_grid))
    assert set(listed) < set(list_cases(capsys, *words, "--level=quick"))
