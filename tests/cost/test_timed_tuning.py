"""Tuning by time: only times decide, the table has provenance, and kernels read it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import msgspec
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from cases.case import Case
from cases.case_id import parse_case_id
from conformance import cli
from conformance.cost.timing import matmul_ceiling, timed_tuning
from conformance.cost.timing.interleaved_timing import TimingLimits
from conformance.cost.timing.sampling import compare_pairs
from conformance.execution import implementation_registry
from conformance.truth import tolerances
from impls import flash_gpu
from impls.block_flash import block_sizes
from impls.contract import tunable
from impls.contract.implementation import Implementation
from impls.contract.tunable import ParameterSettings, TableEntry, Tunable, TuningParameter
from impls.dot_product import attention
from impls.flash_gpu import block_sizes as gpu_block_sizes
from impls.flash_gpu import pallas_backends
from impls.flash_gpu.block_sizes import KERNELS, BlockSizes, Kernel, Ring, parse_settings
from impls.jax_compat import runs_on
from reports.records import ERROR
from reports.records.measurement import AGREES, DIFFERS, FORWARD, Measurement

_ORDER = ("forward", "dkv", "dq")
CASE = "train/f32/B1.T16.S16.N2.K2.H16.V16/causal/normal/s0"
ENTRY = TableEntry(
    device="cpu", key={"min_length": 1024}, settings={"blocks": {"block_q": 64}}, provenance={"jax": "1"}
)


def timing(seconds: Mapping[str, float], spread: float = 0.0) -> tuple[timed_tuning.TimeCandidates, list[list[str]]]:
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
                speed=compare_pairs(samples[names[0]], samples[name]),
                error=None,
            )
            for name in names
        }

    return times, stages


def test_the_slower_half_drops_out_and_the_setting_in_force_stays_as_baseline() -> None:
    seconds = {"now": 4.0, "a": 5.0, "b": 3.0, "c": 9.0, "d": 8.0, "e": 2.0, "f": 7.0, "g": 6.0, "h": 10.0}
    times, stages = timing(seconds)
    chosen, found = timed_tuning.halve_candidates(list(seconds), "now", times, TimingLimits(rounds=20))
    assert chosen == "e"
    assert stages == [list(seconds), ["now", "e", "b", "a", "g"], ["now", "e", "b", "a"]]
    assert set(found) == set(seconds)
    assert len(found["c"].samples) == 3
    assert len(found["g"].samples) == 6
    assert len(found["e"].samples) == 20


def test_the_fastest_of_the_last_must_be_faster_beyond_the_spread_or_the_next_is_taken() -> None:
    """One finalist's moment of noise does not keep a setting in force that another one beats."""
    times, _ = timing({"now": 4.0, "a": 2.0, "b": 2.5})

    def noisy(names: Sequence[str], rounds: int, limit: float) -> dict[str, Measurement]:
        found = times(names, rounds, limit)
        row = found["a"]
        assert row.speed is not None
        return {**found, "a": msgspec.structs.replace(row, speed=row.speed._replace(lower=0.9))}

    assert timed_tuning.halve_candidates(["now", "a", "b"], "now", noisy, TimingLimits(rounds=9))[0] == "b"


def test_what_is_no_faster_replaces_nothing() -> None:
    times, _ = timing({"now": 4.0, "a": 4.0, "b": 5.0})
    assert timed_tuning.halve_candidates(["now", "a", "b"], "now", times, TimingLimits(rounds=9))[0] == "now"
    times, _ = timing({"now": 4.0, "a": 3.99}, spread=0.05)  # faster on average, within the spread
    assert timed_tuning.halve_candidates(["now", "a"], "now", times, TimingLimits(rounds=9))[0] == "now"


def test_a_setting_in_force_that_does_not_run_is_replaced() -> None:
    times, _ = timing({"a": 4.0, "b": 3.0})
    assert timed_tuning.halve_candidates(["a", "b"], "now", times, TimingLimits(rounds=9))[0] == "b"
    assert timed_tuning.halve_candidates([], "now", times, TimingLimits(rounds=9))[0] == "now"


def test_tables_are_read_merged_and_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    assert tunable.read_table(path) == ()
    other = dataclasses.replace(ENTRY, device="another")
    newer = dataclasses.replace(ENTRY, settings={"blocks": {"block_q": 256}})
    tunable.write_table(path, tunable.merge_entries([ENTRY, other], [newer]))
    assert tunable.read_table(path) == (other, newer)
    path.write_text(json.dumps({"schema": "x", "entries": []}))
    with pytest.raises(ValueError, match=r"table\.json is not a table of tuned settings: its schema is 'x'"):
        tunable.read_table(path)
    path.write_text("[]")
    with pytest.raises(ValueError, match="is not a table"):
        tunable.read_table(path)


def toy(table: Path, seen: list[Any]) -> Implementation:
    """Plain attention with a parameter: one setting is wrong, one does not compile, the others are all the same."""

    def call(settings: ParameterSettings) -> Callable[..., Any]:
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
        parameters=(TuningParameter(name="block", phase=FORWARD, candidates=candidates),),
        settings=lambda case: {"block": {"size": 1}},
        call=call,
        key=lambda case: {"max_depth": case.head_dim},
        cases=lambda: (parse_case_id(CASE),),
        table=table,
    )
    return Implementation(name="toy", call=attention, tunable=declared)


def test_what_does_not_compile_or_is_wrong_is_shown_and_never_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmul_ceiling, "_SIDE_ON_CPU", 16)
    seen: list[Any] = []
    implementation = toy(tmp_path / "t.json", seen)
    assert implementation.tunable is not None
    tuned = timed_tuning.tune_by_time(
        implementation,
        implementation.tunable,
        parse_case_id(CASE),
        TimingLimits(rounds=3),
        tolerances.load_default_tolerances(),
        parameters=implementation.tunable.parameters,
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
        return cli.main(cli.build_parser().parse_args(arguments))
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else -1


def test_the_command_fills_the_table_with_provenance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """block_flash itself, with few candidates: what is chosen is for the machine to say, how it is kept is not."""
    monkeypatch.setattr(matmul_ceiling, "_SIDE_ON_CPU", 16)
    monkeypatch.setattr(block_sizes, "_BLOCK_LENGTHS", (16, 32))
    monkeypatch.chdir(tmp_path)
    case = "train/f32/B1.T32.S32.N1.K1.H16.V16/causal/normal/s0"
    assert run("tune", "--impl=block_flash", f"--case={case}", "--runs=3", "--out=t.json", "--report=t.html") == 0
    (entry,) = tunable.read_table(tmp_path / "t.json")
    assert entry.device == "cpu"
    assert entry.key == {"min_length": 32}
    assert set(entry.settings["blocks"]) == {"block_q", "block_kv"}
    assert entry.provenance["how"].endswith(f" --case={case} --seconds=600")
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
        (["--impl=block_flash", "--parameter=warps"], "no tuning parameter 'warps': known are blocks"),
        pytest.param(
            ["--impl=flash_gpu"],
            "no GPU in this machine",
            marks=pytest.mark.skipif(runs_on("gpu"), reason="where there is a GPU, it would be tuned"),
        ),
        (["--impl=block_flash", "--case=x"], "'x' is not a case id"),
        (["--impl=block_flash", "--out=absent/t.json"], "--out=absent/t.json cannot be written"),
    ],
)
def test_what_cannot_be_tuned_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("tune", *arguments) == 2
    assert message in capsys.readouterr().err


def test_block_flash_takes_what_was_measured_for_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {1024: {"block_q": 64, "block_kv": 256}, 4096: {"block_q": 256, "block_kv": 512}}
    entries = [
        dataclasses.replace(ENTRY, key={"min_length": length}, settings={"blocks": blocks})
        for length, blocks in (*sizes.items(), (32, {"block_q": 8, "block_kv": 8}))
    ]
    monkeypatch.setattr(block_sizes, "_ENTRIES", (*entries, dataclasses.replace(ENTRY, device="another chip")))
    assert block_sizes.look_up(1000, 9000) == block_sizes.DEFAULT_SIZES  # short calls keep several blocks
    assert block_sizes.look_up(1024, 2048) == sizes[1024]
    assert block_sizes.look_up(16384, 4096) == sizes[4096]


@pytest.mark.parametrize("name", ["block_flash", "flash_gpu"])
def test_kernels_declare_what_may_be_tuned(name: str) -> None:
    """Every candidate has the shape of the setting in force, and the tables that are kept can be read."""
    declared = implementation_registry.find_implementation(name).tunable
    assert declared is not None
    assert declared.table is not None
    tunable.read_table(declared.table)
    for case in declared.cases():
        assert parse_case_id(case.id) == case
        settings = declared.settings(case)
        assert set(settings) == {one.name for one in declared.parameters}
        for parameter in declared.parameters:
            with on_a("NVIDIA A100-SXM4-80GB"):
                candidates = [dict(candidate) for candidate in parameter.candidates(case)]
            if parameter.name.startswith("mosaic_"):
                assert not candidates  # which are for Hopper
                continue
            assert len(candidates) > 3
            assert all(set(candidate) == set(settings[parameter.name]) for candidate in candidates)
            assert len({tuple(candidate.items()) for candidate in candidates}) == len(candidates)
            declared.call({**settings, parameter.name: candidates[-1]})


def on_a(kind: str) -> contextlib.AbstractContextManager[None]:
    """Tracing for a GPU of this kind."""
    device = AbstractDevice(device_kind=kind, platform="gpu", num_cores=132)
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


def ring_of(setting: Mapping[str, Any]) -> Ring:
    return Ring(**setting)


def rings(kind: str, case: Case) -> dict[str, list[Ring]]:
    """The rings that are tried on a GPU of this kind, beside Triton's kernel, by parameter."""
    declared = implementation_registry.find_implementation("flash_gpu").tunable
    assert declared is not None
    with on_a(kind):
        tried = {one.name: list(one.candidates(case)) for one in declared.parameters if one.name.startswith("mosaic_")}
    return {name: [ring for setting in found if (ring := ring_of(setting)).preferred] for name, found in tried.items()}


def causal(dtype: str, depth: int, **changes: Any) -> Case:
    sizes = {"q_length": 4096, "kv_length": 4096, "head_dim": depth, "v_head_dim": depth, "mask": "causal"}
    return Case(dtype=dtype, **{**sizes, **changes})


def test_rings_are_tried_where_mosaic_serves_the_case_and_they_fit() -> None:
    deep = rings("NVIDIA H200", causal("bf16", 128))
    late = [ring for ring in deep["mosaic_forward"] if not ring.early_copies]
    # Each with turns or not, and with several tiles a program or not.
    assert [(ring.block, ring.num_stages) for ring in late] == [(64, 2), (64, 3), (64, 4), (128, 2)] * 4
    assert len(set(deep["mosaic_forward"])) == len(deep["mosaic_forward"])
    assert any(ring.num_q_stages == 2 and ring.block == 128 for ring in deep["mosaic_forward"])
    assert [(ring.block, ring.num_stages) for ring in deep["mosaic_dkv"]] == [(64, 2), (64, 3), (64, 4), (128, 2)]
    segmented = rings("NVIDIA H200", causal("bf16", 128, segments="seg"))  # which take shared memory
    assert {ring.block for ring in segmented["mosaic_forward"] if not ring.early_copies} == {64}
    for name, found in rings("NVIDIA H100 80GB HBM3", causal("f16", 64)).items():
        kernel: Kernel = name.removeprefix("mosaic_")  # type: ignore[assignment] # one of them, by the parameter's name
        assert (128, 2) in [(ring.block, ring.num_stages) for ring in found]
        assert all(
            pallas_backends.find_misfit(kernel, ring, 64, 64, segmented=False, dead_keys=False) is None
            for ring in found
        )
    deepest = rings("NVIDIA H200", causal("bf16", 256))
    assert all(deepest.values())
    assert {(ring.num_stages, ring.num_v_stages) for ring in deepest["mosaic_dq"]} == {(2, 1)}  # nothing else fits
    assert all(rings("NVIDIA H200", causal("bf16", 192, v_head_dim=128)).values())
    assert not any(rings("NVIDIA H200", causal("bf16", 320)).values())
    for kind, case in (
        ("NVIDIA A100-SXM4-80GB", causal("bf16", 64)),
        ("NVIDIA B200", causal("bf16", 64)),
        ("NVIDIA H200", causal("f32", 64)),
        ("NVIDIA H200", causal("bf16", 64, bias="biashead")),
        ("NVIDIA H200", causal("bf16", 64, q_length=64, kv_length=64, mask="dense-d40")),
    ):
        assert not any(rings(kind, case).values())


class Timer:
    """Stands in for a GPU: a program's time is the sum over its kernels, and some give wrong results."""

    def __init__(self, wrong: Callable[[BlockSizes], bool]) -> None:
        self.wrong = wrong

    def enter(self, implementation: Implementation, drawn: Any, phase: str, compiled: Any) -> Any:
        sizes = implementation.call.keywords["block_sizes"]  # type: ignore[attr-defined] # a partial
        return SimpleNamespace(sizes=sizes, finding=SimpleNamespace(agrees=not self.wrong(sizes)))

    def take_turns(self, entrants: Mapping[str, Any], drawn: Any, phase: str, limits: TimingLimits, **_: Any) -> Any:
        seconds = {name: self.seconds(entrant.sizes, phase) for name, entrant in entrants.items()}
        times, _stages = timing(seconds)
        found = times(list(entrants), limits.rounds, limits.seconds)
        outcome = {True: AGREES, False: DIFFERS}
        return [
            msgspec.structs.replace(row, outcome=outcome[entrants[name].finding.agrees]) for name, row in found.items()
        ], False

    @staticmethod
    def seconds(sizes: BlockSizes, phase: str) -> float:
        kernels: tuple[Kernel, ...] = ("forward",) if phase == FORWARD else KERNELS
        return sum(map(functools.partial(Timer.of_kernel, sizes), kernels))

    @staticmethod
    def of_kernel(sizes: BlockSizes, kernel: Kernel) -> float:
        ring, tiles = sizes.ring(kernel), getattr(sizes, kernel)
        if ring.preferred:
            return {"forward": 1.0, "dq": 1.0, "dkv": 9.0}[kernel] - 0.1 * ring.num_stages
        return 4.0 - tiles.block_kv / 128


def drawn_as(case: Case, tolerances: Any) -> Any:
    return SimpleNamespace(case=case, problem=None, cotangent=None)


def tuned(
    monkeypatch: pytest.MonkeyPatch, wrong: Callable[[BlockSizes], bool]
) -> tuple[timed_tuning.TuningResult, BlockSizes]:
    """What tuning `flash_gpu` on a Hopper GPU comes to, by the times of `Timer`."""
    timer = Timer(wrong)
    monkeypatch.setattr(timed_tuning, "compile_program", lambda *asked: None)
    monkeypatch.setattr(timed_tuning, "prepare_entrant", timer.enter)
    monkeypatch.setattr(timed_tuning, "time_entrants", timer.take_turns)
    monkeypatch.setattr(timed_tuning, "DrawnCase", SimpleNamespace(of=drawn_as))
    implementation = implementation_registry.find_implementation("flash_gpu")
    declared = implementation.tunable
    assert declared is not None
    with on_a("NVIDIA H100 PCIe"):
        found = timed_tuning.tune_by_time(
            implementation,
            declared,
            causal("bf16", 64),
            TimingLimits(rounds=9),
            tolerances.load_default_tolerances(),
            parameters=declared.parameters,
        )
    return found, parse_settings(found.settings)


def test_a_mosaic_kernel_is_preferred_where_it_is_right_and_faster_than_the_tuned_triton_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, sizes = tuned(monkeypatch, wrong=lambda sizes: False)
    assert [choice.parameter for choice in found.choices] == [f"{m}{k}" for m in ("", "mosaic_") for k in _ORDER]
    assert {tiles.block_kv for tiles in (sizes.forward, sizes.dq, sizes.dkv)} == {128}  # timed without Mosaic's
    assert sizes.mosaic_forward == Ring(block=64, num_stages=4, preferred=True)
    assert sizes.mosaic_dq.preferred
    assert not sizes.mosaic_dkv.preferred


@pytest.mark.long
def test_a_mosaic_kernel_with_wrong_results_is_never_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    found, sizes = tuned(monkeypatch, wrong=lambda sizes: sizes.mosaic_forward.preferred)
    assert not sizes.mosaic_forward.preferred
    assert sizes.mosaic_dq.preferred
    rows = next(choice for choice in found.choices if choice.parameter == "mosaic_forward").measurements
    assert {row.outcome for row in rows if "preferred=True" in row.implementation} == {DIFFERS}


@pytest.mark.long
def test_the_table_decides_which_back_end_computes_a_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What tuning writes is what the call takes on that kind of GPU, and on no other."""
    found, _ = tuned(monkeypatch, wrong=lambda sizes: False)
    settings = {name: dict(setting) for name, setting in found.settings.items()}
    provenance = {"date": "2026-01-01", "jax": "0.10.2"}
    key = {"max_depth": 64, "max_itemsize": 2}
    entry = TableEntry(device="NVIDIA H200", key=key, settings=settings, provenance=provenance)
    tunable.write_table(tmp_path / "t.json", [entry])
    monkeypatch.setattr(gpu_block_sizes, "MEASURED_TABLE", tmp_path / "t.json")
    monkeypatch.setattr(
        gpu_block_sizes, "TABLE", (*gpu_block_sizes._load_measured(), *gpu_block_sizes._REASONED_ENTRIES)
    )
    x = jax.ShapeDtypeStruct((1, 128, 1, 64), "bfloat16")
    loss = jax.grad(lambda q, k, v: flash_gpu.attention(q, k, v, interpret=False).astype("float32").sum(), (0, 1, 2))
    for kind, mosaic in (("NVIDIA H200", 2), ("NVIDIA H100 80GB HBM3", 0)):
        jax.clear_caches()
        with on_a(kind):
            text = str(jax.make_jaxpr(loss)(x, x, x))
        names = ["forward", "dq", "dkv"]
        assert sum(f"flash_gpu_mosaic_{name}" in text for name in names) == mosaic
