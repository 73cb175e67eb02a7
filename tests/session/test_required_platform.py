"""Test which implementations `--require-platform` judges on a machine with a GPU, which the tests simulate."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from conformance.execution import implementation_registry
from conformance.execution.plain_functions import build_implementation
from conformance.session.failures import CannotJudge
from conformance.session.required_platform import select_native
from conformance.session.resolved_run import resolve_run
from conformance.session.run_spec import RunSpec
from impls.contract.implementation import Accelerator, Implementation
from tests.kernels import naive
from tests.process_helpers import COMMAND_TIMEOUT

PORTABLE = Accelerator()
OURS = Accelerator(platform="gpu")
INTERPRETED = Accelerator(platform="gpu", interpreted=True)
ABSENT = Accelerator(platform="gpu", absent="its library is not installed")
OF_TPU = Accelerator(platform="tpu", interpreted=True)
ABSENT_TPU = Accelerator(platform="tpu", absent="needs a TPU")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


def build(name: str, accelerator: Accelerator) -> Implementation:
    return dataclasses.replace(build_implementation(naive.attention, name), accelerator=accelerator)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("accelerator", "platform", "is_kept"),
    [
        (PORTABLE, "gpu", True),
        (OURS, "gpu", True),
        (ABSENT, "gpu", True),  # its record says what is missing
        (INTERPRETED, "gpu", False),
        (OF_TPU, "gpu", False),
        (ABSENT_TPU, "gpu", False),
        (PORTABLE, "cpu", False),
        (OF_TPU, "tpu", False),
    ],
)
def test_what_runs_natively_is_kept(accelerator: Accelerator, platform: str, is_kept: bool) -> None:
    selection = select_native([build("one", accelerator)], platform)
    assert bool(selection.kept) is is_kept
    assert bool(selection.describe()) is not is_kept


@pytest.mark.usefixtures("gpu")
def test_what_is_left_out_is_counted_and_named_with_the_reason() -> None:
    given = [build("plain", PORTABLE), build("splash", OF_TPU), build("slow", INTERPRETED), build("other", ABSENT_TPU)]
    line = select_native(given, "gpu").describe()
    for part in ("--require-platform=gpu", "3 of 4", "written for tpu: splash, other", "interpreted here: slow"):
        assert part in line
    assert "plain" not in line


def test_machines_of_a_cluster_may_have_the_platform() -> None:
    given = [build("ours", INTERPRETED), build("plain", PORTABLE), build("splash", OF_TPU)]
    names = [one.name for one in select_native(given, "gpu", judged_elsewhere=True).kept]
    assert names == ["ours", "plain"]


# Implementations say at import whether they are interpreted, so a new process pretends before it imports them.
ON_A_GPU = """
import json

import jax

jax.devices()
jax.default_backend = lambda: "gpu"
from conformance.session.run_spec import RunSpec
from conformance.session.planned_run import plan_jobs
from conformance.session.resolved_run import resolve_run

planned = plan_jobs(resolve_run(RunSpec(judge_all=True, level="smoke", require_platform="gpu")))
kept = {one.name: one.accelerator.platform for one in planned.resolved.implementations}
print(json.dumps([kept, sorted({job.implementation.name for job in planned.jobs}), planned.notes]))
"""


def test_every_implementation_of_ours_is_judged_on_the_gpu_or_named_as_left_out() -> None:
    words = [sys.executable, "-c", ON_A_GPU]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=COMMAND_TIMEOUT)
    assert done.returncode == 0, done.stderr
    kept, planned, notes = json.loads(done.stdout.splitlines()[-1])
    assert set(planned) <= set(kept)
    assert {"flash_gpu", "flash_gpu_mosaic", "ragged_gpu", "paged_gpu", "dot_product", "jax_nn_cudnn"} <= set(kept)
    assert "tpu" not in kept.values()
    (note,) = notes
    left_out = set(implementation_registry.list_implementations()) - set(kept)
    assert left_out
    assert all(name in note for name in left_out)


def test_a_machine_without_the_platform_judges_nothing_and_says_so_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = RunSpec(implementations=("dot_product", "splash_tpu"), require_platform="gpu")
    with pytest.raises(CannotJudge) as raised:
        resolve_run(options)
    for part in ("--require-platform=gpu", "JAX computes on cpu here: dot_product", "written for tpu: splash_tpu"):
        assert part in str(raised.value)
