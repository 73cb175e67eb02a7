"""No kernel of ours gets slower unseen, by its code: what is recorded holds for the compiler that is here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from conformance import cli
from conformance.accelerators import speed_bar
from conformance.accelerators.speed_bar import BARS, GPU_BARS, Bar
from conformance.accelerators.targets import CompileTarget, targets_of
from conformance.commands import cycles

COMPILERS = {"tpu": "libtpu", "gpu": "nvidia-cuda-nvcc"}


def recorded(bar: Bar, target: str) -> speed_bar.Figures:
    """What is recorded, or a skipped test that says why nothing is."""
    if (reason := cycles.why_not(bar.platform)) is not None:
        pytest.skip(reason)
    found = speed_bar.read().get(compiler := speed_bar.compiler(bar.platform))
    if found is None:
        pytest.skip(f"nothing is recorded of {compiler}: {cycles.NEW_FIGURES}")
    return found[speed_bar.key(bar, target)]


@pytest.mark.parametrize("target", targets_of("tpu"), ids=lambda target: target.name)
@pytest.mark.parametrize("bar", BARS, ids=lambda bar: f"{bar.implementation}-{bar.case.split('/')[2]}")
def test_no_kernel_is_slower_than_recorded(bar: Bar, target: CompileTarget) -> None:
    kept = recorded(bar, target.name)
    assert kept
    assert speed_bar.slower(kept, cycles.measured(bar, target)) == []


@pytest.mark.nightly
@pytest.mark.parametrize("target", targets_of("gpu"), ids=lambda target: target.name)
@pytest.mark.parametrize("bar", GPU_BARS, ids=lambda bar: f"{bar.implementation}-{bar.case.split('/')[2]}")
def test_no_gpu_kernel_issues_more_than_recorded(bar: Bar, target: CompileTarget) -> None:
    if not bar.asks(target.name):
        pytest.skip(f"{bar.implementation} is not for {target.name}")
    kept = recorded(bar, target.name)
    assert kept
    assert speed_bar.slower(kept, cycles.measured(bar, target)) == []


@pytest.mark.parametrize(("bars", "platform"), [(BARS, "tpu"), (GPU_BARS, "gpu")])
def test_what_is_recorded_is_what_the_bar_asks(bars: Sequence[Bar], platform: str) -> None:
    targets = [target.name for target in targets_of(platform)]
    keys = {speed_bar.key(bar, target) for bar in bars for target in targets if bar.asks(target)}
    table = {name: figures for name, figures in speed_bar.read().items() if name.startswith(COMPILERS[platform])}
    assert table
    assert all(set(figures) == keys for figures in table.values())


def test_of_a_gpu_kernel_the_bound_and_what_is_issued_count() -> None:
    told = {"pair_cycles": 9.0, "masked_pair_cycles": 9.0, "issue_cycles": 5.0, "masked_issue_cycles": 7.0}
    figures = {f"dq.{name}": value for name, value in {**told, "tensor_cycles": 9.0, "registers": 168.0}.items()}
    assert speed_bar.estimates(figures) == {f"dq.{name}": value for name, value in told.items()}
    assert speed_bar.slower({"dq.issue_cycles": 45.3}, {"dq.issue_cycles": 47.9}) == [
        "dq.issue_cycles is 47.9, 5.7% more than the recorded 45.3"
    ]


def test_of_each_kernel_its_call_counts_or_else_its_block() -> None:
    figures = {"a.full_block_cycles": 9.0, "a.call_cycles": 90.0, "b.full_block_cycles": 5.0, "compile_seconds": 1.0}
    assert speed_bar.estimates(figures) == {"a.call_cycles": 90.0, "b.full_block_cycles": 5.0}


def test_slower_is_more_than_five_percent_or_gone() -> None:
    kept = {"a.call_cycles": 1000.0, "b.call_cycles": 1000.0, "c.call_cycles": 7.0}
    assert speed_bar.slower(kept, {"a.call_cycles": 1050.0, "b.call_cycles": 1051.0}) == [
        "c.call_cycles is no longer known, and was 7",
        "b.call_cycles is 1,051, 5.1% more than the recorded 1,000",
    ]


def test_new_figures_leave_those_of_other_compilers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cycles.json"
    monkeypatch.setattr(speed_bar, "compiler", lambda platform: "old")
    speed_bar.write({"x": {"a": 1.0}}, path)
    monkeypatch.setattr(speed_bar, "compiler", lambda platform: "new")
    speed_bar.write({"x": {"a": 2.0}}, path)
    speed_bar.write({"y": {"a": 3.0}}, path)
    assert speed_bar.read(path) == {"old": {"x": {"a": 1.0}}, "new": {"x": {"a": 2.0}, "y": {"a": 3.0}}}
    # A compiler gives kernels in any order, and the file is the same.
    speed_bar.write({"z": {"a": 1.0, "b": 2.0}}, path)
    before = path.read_text()
    speed_bar.write({"z": {"b": 2.0, "a": 1.0}}, path)
    assert path.read_text() == before
    path.write_text("{}")
    with pytest.raises(ValueError, match="schema"):
        speed_bar.read(path)


def test_where_there_is_no_compiler_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cycles, "why_not", lambda platform: "no compiler here")
    assert cli.main(cli.parser().parse_args(["cycles"])) == 2
    assert "error: no compiler here" in capsys.readouterr().err
