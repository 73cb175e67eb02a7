"""Test that a kernel sees the same in each process that judges a failure again, except what XLA read."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cases.case import Case
from cases.operand_values import draw_problem
from conformance import served_run
from conformance.execution.executor import Executor
from conformance.sandbox import kernel_process, sandboxed_executor
from conformance.sandbox.kernel_options import KernelOptions
from conformance.truth import disk_cache

CASE = Case(q_length=16, kv_length=16, head_dim=16, v_head_dim=16)
HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    """End all processes after the test."""
    yield
    kernel_process.end_all_processes()


def executors(name: str) -> tuple[Executor, Executor]:
    """Create executors of the kernel, under the first flags and under JAX's own."""
    first = sandboxed_executor.create_executor(KernelOptions().find(name))
    second = first.with_default_flags()
    assert second is not None
    return first, second


def read_report(executor: Executor) -> str:
    """Return what the kernel reports, by the exception that it raises."""
    with pytest.raises(ValueError, match=r".") as raised:
        executor.forward(draw_problem(CASE))
    return str(raised.value)


def find_differences(executor: Executor, seen: dict[str, dict[str, str]]) -> list[tuple[str, str, str, str]]:
    """Return what the kernel sees differently in this process: when, what, the earlier value, and the new one."""
    found = json.loads(read_report(executor))
    return [
        (when, item, seen[when][item], x) for when in seen for item, x in found[when].items() if x != seen[when][item]
    ]


def test_a_kernel_is_judged_again_under_the_flags_that_its_users_have() -> None:
    first, second = executors(f"{HERE}/misbehaving_kernels.py:tells_its_level")
    found = [read_report(executor) for executor in (first, second, first.create_fresh(), second.create_fresh())]
    assert found == ["level 0", "level 3", "level 0", "level 3"]


@pytest.mark.skipif(sys.platform != "linux", reason="it looks at /proc, which only Linux has")
def test_what_a_kernel_sees_is_the_same_when_it_is_judged_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(disk_cache.CACHE_VARIABLE, str(tmp_path))  # programs are cached, and the cache is empty
    first, second = executors(f"{HERE}/visibility_probe.py:attention")
    seen = json.loads(read_report(first))
    assert "programs" in seen["as it is loaded"]["scratch"]
    assert find_differences(second, seen) == []
    for executor in (first, second, second, first):
        assert find_differences(executor.create_fresh(), seen) == []


def test_what_an_earlier_run_left_is_not_there_when_a_kernel_is_judged_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(disk_cache.CACHE_VARIABLE, str(tmp_path))
    first, second = executors(f"{HERE}/visibility_probe.py:attention")
    place = first._process._cache_folder  # type: ignore[attr-defined] # only the sandbox has it
    place.mkdir(parents=True)
    (place / f"jit_call-{'0' * 64}-cache").write_text("a program")
    kernel_process.end_all_processes()
    monkeypatch.setenv(served_run.START_VARIABLE, "inf")
    with_program = json.loads(read_report(first))["as it is loaded"]["scratch"]
    assert "jit_call" in with_program
    for executor in (second, first.create_fresh(), second.create_fresh()):
        assert "jit_call" not in json.loads(read_report(executor))["as it is loaded"]["scratch"]
