"""No kernel of ours is slower than its recorded static cycles, for the compiler that is installed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from conformance import cli
from conformance.accelerators.targets import CompileTarget, list_targets
from conformance.cost.commands import cycles
from conformance.cost.static import cycle_baselines
from conformance.cost.static.cycle_baselines import GPU_BASELINES, TPU_BASELINES, CycleBaseline

COMPILERS = {"tpu": "libtpu", "gpu": "nvidia-cuda-nvcc"}


def recorded(kernel: CycleBaseline, target: str) -> cycle_baselines.Figures:
    """What is recorded, or a skipped test that says why nothing is."""
    if (reason := cycles.explain_unavailable(kernel.platform)) is not None:
        pytest.skip(reason)
    found = cycle_baselines.read_baselines().get(compiler := cycle_baselines.get_compiler_version(kernel.platform))
    if found is None:
        pytest.skip(f"nothing is recorded of {compiler}: {cycles.NEW_FIGURES}")
    return found[cycle_baselines.format_key(kernel, target)]


@pytest.mark.parametrize("target", list_targets("tpu"), ids=lambda target: target.name)
@pytest.mark.parametrize("kernel", TPU_BASELINES, ids=lambda one: f"{one.implementation}-{one.case.split('/')[2]}")
def test_no_kernel_is_slower_than_recorded(kernel: CycleBaseline, target: CompileTarget) -> None:
    kept = recorded(kernel, target.name)
    assert kept
    assert cycle_baselines.list_regressions(kept, cycles.measure_baseline(kernel, target)) == []


@pytest.mark.nightly
@pytest.mark.parametrize("target", list_targets("gpu"), ids=lambda target: target.name)
@pytest.mark.parametrize("kernel", GPU_BASELINES, ids=lambda one: f"{one.implementation}-{one.case.split('/')[2]}")
def test_no_gpu_kernel_issues_more_than_recorded(kernel: CycleBaseline, target: CompileTarget) -> None:
    if not kernel.asks(target.name):
        pytest.skip(f"{kernel.implementation} is not for {target.name}")
    kept = recorded(kernel, target.name)
    assert kept
    assert cycle_baselines.list_regressions(kept, cycles.measure_baseline(kernel, target)) == []


@pytest.mark.parametrize(("baselines", "platform"), [(TPU_BASELINES, "tpu"), (GPU_BASELINES, "gpu")])
def test_what_is_recorded_is_what_the_baselines_ask(baselines: Sequence[CycleBaseline], platform: str) -> None:
    targets = [target.name for target in list_targets(platform)]
    keys = {cycle_baselines.format_key(one, target) for one in baselines for target in targets if one.asks(target)}
    table = {
        name: figures
        for name, figures in cycle_baselines.read_baselines().items()
        if name.startswith(COMPILERS[platform])
    }
    assert table
    assert all(set(figures) == keys for figures in table.values())


def test_of_a_gpu_kernel_the_bound_and_what_is_issued_count() -> None:
    told = {"pair_cycles": 9.0, "masked_pair_cycles": 9.0, "issue_cycles": 5.0, "masked_issue_cycles": 7.0}
    figures = {f"dq.{name}": value for name, value in {**told, "tensor_cycles": 9.0, "registers": 168.0}.items()}
    assert cycle_baselines.select_estimates(figures) == {f"dq.{name}": value for name, value in told.items()}
    assert cycle_baselines.list_regressions({"dq.issue_cycles": 45.3}, {"dq.issue_cycles": 47.9}) == [
        "dq.issue_cycles is 47.9, 5.7% more than the recorded 45.3"
    ]


def test_of_each_kernel_its_call_counts_or_else_its_block() -> None:
    figures = {"a.full_block_cycles": 9.0, "a.call_cycles": 90.0, "b.full_block_cycles": 5.0, "compile_seconds": 1.0}
    assert cycle_baselines.select_estimates(figures) == {"a.call_cycles": 90.0, "b.full_block_cycles": 5.0}


def test_slower_is_more_than_five_percent_or_gone() -> None:
    kept = {"a.call_cycles": 1000.0, "b.call_cycles": 1000.0, "c.call_cycles": 7.0}
    assert cycle_baselines.list_regressions(kept, {"a.call_cycles": 1050.0, "b.call_cycles": 1051.0}) == [
        "c.call_cycles is no longer known, and was 7",
        "b.call_cycles is 1,051, 5.1% more than the recorded 1,000",
    ]


def test_new_figures_leave_those_of_other_compilers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cycles.json"
    monkeypatch.setattr(cycle_baselines, "get_compiler_version", lambda platform: "old")
    cycle_baselines.write_baselines({"x": {"a": 1.0}}, path)
    monkeypatch.setattr(cycle_baselines, "get_compiler_version", lambda platform: "new")
    cycle_baselines.write_baselines({"x": {"a": 2.0}}, path)
    cycle_baselines.write_baselines({"y": {"a": 3.0}}, path)
    assert cycle_baselines.read_baselines(path) == {"old": {"x": {"a": 1.0}}, "new": {"x": {"a": 2.0}, "y": {"a": 3.0}}}
    # A compiler gives kernels in any order, and the file is the same.
    cycle_baselines.write_baselines({"z": {"a": 1.0, "b": 2.0}}, path)
    before = path.read_text()
    cycle_baselines.write_baselines({"z": {"b": 2.0, "a": 1.0}}, path)
    assert path.read_text() == before
    path.write_text("{}")
    with pytest.raises(ValueError, match="schema"):
        cycle_baselines.read_baselines(path)


def test_where_there_is_no_compiler_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cycles, "explain_unavailable", lambda platform: "no compiler here")
    assert cli.main(cli.build_parser().parse_args(["cycles"])) == 2
    assert "error: no compiler here" in capsys.readouterr().err
