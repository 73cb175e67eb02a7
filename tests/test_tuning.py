"""Tuning: the choice follows from times alone, the table is data with its provenance, and kernels read it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from cases.case import Case, parse
from conformance import cli, registry, tolerances, tunable
from conformance.bench import ceiling, tuning
from conformance.bench.measurements import AGREES, DIFFERS, FORWARD, Measurement
from conformance.bench.sampling import paired
from conformance.bench.side_by_side import Limits
from conformance.contract import Implementation
from conformance.records import ERROR
from conformance.tunable import Entry, Knob, Settings, Tunable
from impls.block_flash import block_sizes
from impls.dot_product import attention

CASE = "train/f32/B1.T16.S16.N2.K2.H16.V16/causal/normal/s0"
ENTRY = Entry(device="cpu", key={"min_length": 1024}, settings={"blocks": {"block_q": 64}}, provenance={"jax": "1"})


def timing(seconds: Mapping[str, float], spread: float = 0.0) -> tuple[tuning.Times, list[list[str]]]:
    """Times that are known beforehand, the first of each stage as the baseline; and who took part in each stage."""
    stages: list[list[str]] = []

    def times(names: Sequence[str], rounds: int, limit: float) -> dict[str, Measurement]:
        stages.append(list(names))
        samples = {
            name: tuple(seconds[name] * (1 + spread * (round % 3 - 1) * (n + 1)) for round in range(rounds))
            for n, name in enumerate(names)
        }
        return {
            name: Measurement(
                implementation=name,
                platform="cpu",
                device="cpu",
                case=CASE,
                phase=FORWARD,
                outcome=AGREES,
                samples=samples[name],
                speed=paired(samples[names[0]], samples[name]),
            )
            for name in names
        }

    return times, stages


def test_the_slower_half_drops_out_and_the_setting_in_force_stays_as_baseline():
    seconds = {"now": 4.0, "a": 5.0, "b": 3.0, "c": 9.0, "d": 8.0, "e": 2.0, "f": 7.0, "g": 6.0, "h": 10.0}
    times, stages = timing(seconds)
    chosen, found = tuning.halve(list(seconds), "now", times, Limits(rounds=20))
    assert chosen == "e"
    assert stages == [list(seconds), ["now", "e", "b", "a", "g"], ["now", "e", "b", "a"]]
    assert set(found) == set(seconds)
    assert len(found["c"].samples) == 3
    assert len(found["g"].samples) == 6
    assert len(found["e"].samples) == 20


def test_the_fastest_of_the_last_must_be_faster_beyond_the_spread_or_the_next_is_taken():
    """One finalist's moment of noise does not keep a setting in force that another one beats."""
    times, _ = timing({"now": 4.0, "a": 2.0, "b": 2.5})

    def noisy(names: Sequence[str], rounds: int, limit: float) -> dict[str, Measurement]:
        found = times(names, rounds, limit)
        row = found["a"]
        assert row.speed is not None
        return found | {"a": dataclasses.replace(row, speed=row.speed._replace(lower=0.9))}

    assert tuning.halve(["now", "a", "b"], "now", noisy, Limits(rounds=9))[0] == "b"


def test_what_is_no_faster_replaces_nothing():
    times, _ = timing({"now": 4.0, "a": 4.0, "b": 5.0})
    assert tuning.halve(["now", "a", "b"], "now", times, Limits(rounds=9))[0] == "now"
    times, _ = timing({"now": 4.0, "a": 3.99}, spread=0.05)  # faster on average, within the spread
    assert tuning.halve(["now", "a"], "now", times, Limits(rounds=9))[0] == "now"


def test_a_setting_in_force_that_does_not_run_is_replaced():
    times, _ = timing({"a": 4.0, "b": 3.0})
    assert tuning.halve(["a", "b"], "now", times, Limits(rounds=9))[0] == "b"
    assert tuning.halve([], "now", times, Limits(rounds=9))[0] == "now"


def test_tables_are_read_merged_and_refused(tmp_path: Path):
    path = tmp_path / "table.json"
    assert tunable.read(path) == ()
    other = dataclasses.replace(ENTRY, device="another")
    newer = dataclasses.replace(ENTRY, settings={"blocks": {"block_q": 256}})
    tunable.write(path, tunable.merged([ENTRY, other], [newer]))
    assert tunable.read(path) == (other, newer)
    path.write_text(json.dumps({"schema": "x", "entries": []}))
    with pytest.raises(ValueError, match=r"table\.json is not a table of tuned settings: its schema is 'x'"):
        tunable.read(path)
    path.write_text("[]")
    with pytest.raises(ValueError, match="is not a table"):
        tunable.read(path)


def toy(table: Path, seen: list[Any]) -> Implementation:
    """Plain attention with a knob: one setting is wrong, one does not compile, the others are all the same."""

    def call(settings: Settings) -> Callable[..., Any]:
        block = settings["block"]["size"]
        seen.append(block)

        def attend(**options: Any) -> Any:
            if block == 4:
                raise ValueError("shared memory: 1 MB asked for, 0.2 MB there")
            return attention(**options) * (1.5 if block == 3 else 1)

        return attend

    def candidates(case: Case) -> list[dict[str, int]]:
        return [{"size": size} for size in (1, 2, 3, 4)]

    declared = Tunable(
        knobs=(Knob(name="block", phase=FORWARD, candidates=candidates),),
        settings=lambda case: {"block": {"size": 1}},
        call=call,
        key=lambda case: {"max_depth": case.head_dim},
        cases=lambda: (parse(CASE),),
        table=table,
    )
    return Implementation(name="toy", call=attention, tunable=declared)


def test_what_does_not_compile_or_is_wrong_is_shown_and_never_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ceiling, "_SIDE_ON_CPU", 16)
    seen: list[Any] = []
    implementation = toy(tmp_path / "t.json", seen)
    assert implementation.tunable is not None
    tuned = tuning.tune(
        implementation,
        implementation.tunable,
        parse(CASE),
        Limits(rounds=3),
        tolerances.default(),
        knobs=implementation.tunable.knobs,
    )
    rows = {row.implementation: row for row in tuned.choices[0].measurements}
    assert seen == [1, 2, 3, 4]  # the one in force is tried once
    assert rows["toy block size=3"].outcome == DIFFERS
    assert rows["toy block size=4"].outcome == ERROR
    assert "shared memory" in rows["toy block size=4"].reason
    assert tuned.settings["block"]["size"] in (1, 2)
    assert {rows[f"toy block size={size}"].baseline for size in (1, 2)} == {"toy block size=1"}


def run(*arguments: str) -> int:
    try:
        return cli.main(cli.parser().parse_args(arguments))
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else -1


def test_the_command_fills_the_table_with_provenance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """block_flash itself, with few candidates: what is chosen is for the machine to say, how it is kept is not."""
    monkeypatch.setattr(ceiling, "_SIDE_ON_CPU", 16)
    monkeypatch.setattr(block_sizes, "_SIDES", (16, 32))
    monkeypatch.chdir(tmp_path)
    case = "train/f32/B1.T32.S32.N1.K1.H16.V16/causal/normal/s0"
    assert run("tune", "--impl=block_flash", f"--case={case}", "--runs=3", "--out=t.json", "--report=t.html") == 0
    (entry,) = tunable.read(tmp_path / "t.json")
    assert entry.device == "cpu"
    assert entry.key == {"min_length": 32}
    assert set(entry.settings["blocks"]) == {"block_q", "block_kv"}
    assert entry.provenance["case"] == case
    assert set(entry.provenance) == {"case", "date", "jax", "how", "knobs"}
    assert "of 5 settings" in entry.provenance["knobs"]["blocks"]
    said = capsys.readouterr().out
    assert "block_flash blocks block_q=16 block_kv=32" in said
    assert "1 entries written to t.json" in said
    assert "block_q=16" in (tmp_path / "t.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--impl=dot_product"], "dot_product declares nothing to tune"),
        (["--impl=block_flash", "--knob=warps"], "no knob 'warps': known are blocks"),
        (["--impl=flash_gpu"], "no GPU in this machine"),
        (["--impl=block_flash", "--case=x"], "'x' is not a case id"),
        (["--impl=block_flash", "--out=absent/t.json"], "--out=absent/t.json cannot be written"),
    ],
)
def test_what_cannot_be_tuned_is_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert run("tune", *arguments) == 2
    assert message in capsys.readouterr().err


def test_block_flash_takes_what_was_measured_for_its_length(monkeypatch: pytest.MonkeyPatch):
    sizes = {1024: {"block_q": 64, "block_kv": 256}, 4096: {"block_q": 256, "block_kv": 512}}
    entries = [
        dataclasses.replace(ENTRY, key={"min_length": length}, settings={"blocks": blocks})
        for length, blocks in (*sizes.items(), (32, {"block_q": 8, "block_kv": 8}))
    ]
    monkeypatch.setattr(block_sizes, "_ENTRIES", (*entries, dataclasses.replace(ENTRY, device="another chip")))
    assert block_sizes.look_up(1000, 9000) == block_sizes.PLAIN  # short calls keep several blocks
    assert block_sizes.look_up(1024, 2048) == sizes[1024]
    assert block_sizes.look_up(16384, 4096) == sizes[4096]


@pytest.mark.parametrize("name", ["block_flash", "flash_gpu"])
def test_kernels_declare_what_may_be_tuned(name: str):
    """Every candidate has the shape of the setting in force, and the tables that are kept can be read."""
    declared = registry.find(name).tunable
    assert declared is not None
    tunable.read(declared.table)
    for case in declared.cases():
        assert parse(case.id) == case
        settings = declared.settings(case)
        assert set(settings) == {knob.name for knob in declared.knobs}
        for knob in declared.knobs:
            candidates = [dict(candidate) for candidate in knob.candidates(case)]
            assert len(candidates) > 3
            assert all(set(candidate) == set(settings[knob.name]) for candidate in candidates)
            assert len({tuple(candidate.items()) for candidate in candidates}) == len(candidates)
            declared.call({**settings, knob.name: candidates[-1]})
