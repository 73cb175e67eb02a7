"""Test the gate where a worker died, with platform words of -k, and beside plugins that warn."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

import pytest

from conformance.execution import implementation_registry
from conformance.gate import keyword_selection
from conformance.judging.job import Job
from conformance.judging.run_plan import plan_run
from impls.contract.implementation import Accelerator
from reports.records import INTERRUPTED, read_runs
from tests.gate.gate_repository import KERNEL, Repository, create_repository, run_gate


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    return create_repository(tmp_path, monkeypatch)


# It runs in pytest's own process, and only the first worker that calls it dies.
CRASHES = """
import os
from pathlib import Path
from typing import Literal

@declare(behind_mask="finite")
def crashes(q, k, v, *, causal=False):
    if "PYTEST_XDIST_WORKER" in os.environ and not Path("crashed").exists():
        Path("crashed").touch()
        os._exit(9)
    return naive.attention(q, k, v, causal=causal)
"""


@pytest.mark.long
def test_a_job_whose_worker_died_is_missing_and_resumed(repository: Repository) -> None:
    (repository.path / "kernel.py").write_text(KERNEL + CRASHES)
    words = ("--conformance-cases=train/f32/*.T1.*", "--conformance-in-process", "-n", "2")
    result = run_gate(repository, *words, "--conformance-json=r.jsonl", name="crashes")
    assert result.ret == 2
    (found,) = read_runs(repository.path / "r.jsonl")
    assert found.end is not None
    assert found.end.how == INTERRUPTED
    assert "have no records" in found.end.reason
    before = len(found.done)
    assert run_gate(repository, *words, "--conformance-resume=r.jsonl", name="crashes").ret == 0
    (found,) = read_runs(repository.path / "r.jsonl")
    assert found.is_complete
    assert len(found.done) > before


def build_job(platform: Literal["tpu", "gpu"] | None, *, interpreted: bool, name: str) -> Job:
    (job, *_) = plan_run(
        [implementation_registry.find_implementation("dot_product")], level="quick", query="train/f32/*.T1.*"
    ).jobs
    accelerator = Accelerator(platform=platform, interpreted=interpreted) if platform else Accelerator()
    return dataclasses.replace(
        job, implementation=dataclasses.replace(job.implementation, name=name, accelerator=accelerator)
    )


@pytest.mark.parametrize(
    ("expression", "platform", "interpreted", "name", "is_chosen"),
    [
        ("gpu", "tpu", True, "splash", False),
        ("tpu", "tpu", True, "splash", True),
        ("gpu", "gpu", True, "flash", True),
        ("tpu", "gpu", False, "flash", False),
        ("gpu", None, False, "plain", True),
        ("cpu", None, False, "plain", False),
        ("gpu-interpret and splash", "tpu", True, "splash", True),
        ("not gpu", "tpu", True, "splash", True),
    ],
)
def test_a_platform_word_is_what_the_kernel_is_for(
    expression: str,
    platform: Literal["tpu", "gpu"] | None,
    interpreted: bool,
    name: str,
    is_chosen: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(keyword_selection, "find_platform", lambda _: "gpu-interpret" if interpreted else "gpu")
    job = build_job(platform, interpreted=interpreted, name=name)
    shown = f"test_conforms[{name}-gpu{'-interpret' if interpreted else ''}-{job.case.id}]"
    assert bool(keyword_selection.select_checks(expression, job, [shown])) is is_chosen
