"""No TPU kernel of ours gets slower unseen, by its schedule: what is recorded holds for the compiler that is here."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance import cli
from conformance.accelerators import speed_bar
from conformance.accelerators.speed_bar import BARS, Bar
from conformance.accelerators.targets import CompileTarget, targets_of
from conformance.commands import cycles


def recorded(bar: Bar, target: str) -> speed_bar.Figures:
    """What is recorded, or a skipped test that says why nothing is."""
    if (reason := cycles.why_not()) is not None:
        pytest.skip(reason)
    found = speed_bar.read().get(speed_bar.compiler())
    if found is None:
        pytest.skip(f"nothing is recorded of {speed_bar.compiler()}: {cycles.NEW_FIGURES}")
    return found[speed_bar.key(bar, target)]


@pytest.mark.parametrize("target", targets_of("tpu"), ids=lambda target: target.name)
@pytest.mark.parametrize("bar", BARS, ids=lambda bar: f"{bar.implementation}-{bar.case.split('/')[2]}")
def test_no_kernel_is_slower_than_recorded(bar: Bar, target: CompileTarget) -> None:
    kept = recorded(bar, target.name)
    assert kept
    assert speed_bar.slower(kept, cycles.measured(bar, target)) == []


def test_what_is_recorded_is_what_the_bar_asks() -> None:
    keys = {speed_bar.key(bar, target.name) for bar in BARS for target in targets_of("tpu")}
    table = speed_bar.read()
    assert table
    assert all(set(figures) == keys for figures in table.values())


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
    monkeypatch.setattr(speed_bar, "compiler", lambda: "old")
    speed_bar.write({"x": {"a": 1.0}}, path)
    monkeypatch.setattr(speed_bar, "compiler", lambda: "new")
    speed_bar.write({"x": {"a": 2.0}}, path)
    speed_bar.write({"y": {"a": 3.0}}, path)
    assert speed_bar.read(path) == {"old": {"x": {"a": 1.0}}, "new": {"x": {"a": 2.0}, "y": {"a": 3.0}}}
    path.write_text("{}")
    with pytest.raises(ValueError, match="schema"):
        speed_bar.read(path)


def test_where_there_is_no_compiler_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cycles, "why_not", lambda: "no compiler here")
    assert cli.main(cli.parser().parse_args(["cycles"])) == 2
    assert "error: no compiler here" in capsys.readouterr().err
