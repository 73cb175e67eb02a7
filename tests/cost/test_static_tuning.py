"""Static tuning: chooses by given cycles, never a refused candidate, and the same each time."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import pytest

from cases.case_id import parse_case_id
from cases.masks import Causal, Full, Mask, Window
from conformance import cli
from conformance.accelerators import compilation
from conformance.accelerators.targets import list_targets
from conformance.accelerators.tpus import TPUS
from conformance.cost.commands import cycle_comparison, cycles, static_tune, tune
from conformance.cost.static import cycle_baselines, static_tuning
from conformance.cost.timing.timed_tuning import ParameterChoice, TuningResult
from conformance.execution import implementation_registry
from impls.contract import tunable
from impls.splash_tpu import splash_tuning
from impls.splash_tpu.splash_plan import Blocks, BlockSizes, Depths
from reports.records.measurement import AGREES, Measurement

CASE = parse_case_id("train/bf16/B1.T2048.S2048.N1.K1.H128.V128/causal/normal/s0")
V6E = next(target for target in list_targets("tpu") if target.name == "v6e")
BYTES_A_CYCLE = next(tpu.bytes_a_cycle for tpu in TPUS if tpu.name == "v6e")


FUSED = {"cycles": 6000.0, "floor": 100.0}
"""Made-up figures of the fused kernel, whatever its blocks."""


def cost(sizes: BlockSizes) -> dict[str, float]:
    """Made-up cycles of each kernel: the fewest for long blocks of queries in the forward, for short parts in dq."""
    told = {"a_forward.call": 4000.0 - sizes.forward.q}
    if sizes.fused_backward:
        told |= {"a_dq_dkv.call": FUSED["cycles"], "a_dq_dkv.hbm_floor": FUSED["floor"]}
    else:
        told |= {"a_dq.call": 4000.0 + sizes.dq.part, "a_dkv.call": 4000.0 + sizes.dkv.q / 100}
    return {f"{figure}_cycles": value for figure, value in told.items()}


def compiled(executor: Any, problem: Any, target: Any, *, gradients: bool = True) -> static_tuning.CompileResult:
    """What stands in for the compiler: it refuses long blocks of keys in dkv, with whatever they come."""
    sizes: BlockSizes = executor.native.implementation.call.keywords["block_sizes"]
    told = "refused: no room" if sizes.dkv.kv == 1024 and not sizes.fused_backward else cost(sizes)
    return told if gradients or isinstance(told, str) else {name: told[name] for name in told if "forward" in name}


@pytest.fixture
def no_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    """No compiler is asked, and no table is there."""
    monkeypatch.setattr(compilation, "trace_for_chip", lambda target: contextlib.nullcontext())
    monkeypatch.setattr(splash_tuning, "_ENTRIES", ())


def choose(*names: str) -> dict[str, static_tuning.StaticChoice]:
    implementation = implementation_registry.find_implementation("splash_tpu")
    declared = implementation.tunable
    assert declared is not None
    parameters = [one for one in declared.parameters if not names or one.name in names]
    found = static_tuning.tune_statically(implementation, declared, CASE, V6E, compiled, parameters=parameters)
    return {choice.parameter: choice for choice in found}


@pytest.mark.usefixtures("no_chip")
def test_each_kernel_gets_what_takes_it_the_fewest_cycles() -> None:
    found = choose()
    assert found["forward"].setting["q"] == 2048
    assert found["dq"].setting["part"] == 256
    assert found["dkv"].setting == found["dkv"].before  # less than 3% fewer is nothing
    refused = [one for one in found["dkv"].estimates if one.cycles is None]
    assert {one.setting["kv"] for one in refused} == {1024}
    assert {one.reason for one in refused} == {"refused: no room"}
    # What dkv refuses, the others may take.
    assert all(one.cycles is not None for one in found["forward"].estimates)
    assert choose() == found


@pytest.mark.usefixtures("no_chip")
@pytest.mark.parametrize(
    ("cycles", "floor", "fused"),
    [
        (3000.0, 100.0, 1),
        (6000.0, 100.0, 0),  # fewer than 8,517, but not with what crosses beside it
        (3000.0, 9000.0, 0),  # its call is never shorter than all that crosses in it
        (4300.0, 100.0, 0),  # 3% shorter, which says nothing
    ],
)
def test_one_kernel_is_taken_for_two_where_all_of_it_is_far_shorter(
    cycles: float, floor: float, fused: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FUSED, "cycles", cycles)
    monkeypatch.setitem(FUSED, "floor", floor)
    (choice,) = choose("backward").values()
    assert choice.setting == {"fused": fused}
    separate, other = choice.estimates
    assert round(separate.whole, 2) == 8517.12  # dq has the part that is in force
    # dq is cleared in f32, read, and written in bf16; each of four key blocks waits for one of its four blocks.
    crossing = 2048 * 128 * (4 + 4 + 2) + 4 * 512 * 128 * 4
    assert other.beside == crossing / BYTES_A_CYCLE


@pytest.mark.usefixtures("no_chip")
def test_dq_that_comes_and_goes_counts_towards_the_least_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten pairs of blocks are computed, of four by four; the whole of dq counts in the floor of the blocks already."""
    monkeypatch.setitem(FUSED, "floor", 9000.0)
    (choice,) = choose("fused").values()
    crossing = 2 * (10 * 512 * 128 * 4 - 2048 * 128 * 4)
    assert choice.estimates[0].cycles == 9000 + crossing / BYTES_A_CYCLE


@pytest.mark.usefixtures("no_chip")
def test_the_command_shows_candidates_and_keeps_the_choice_with_its_provenance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cycles, "explain_unavailable", lambda platform="tpu": None)
    monkeypatch.setattr(static_tune, "_compile_call", compiled)
    monkeypatch.setattr(cycle_baselines, "get_compiler_version", lambda platform="tpu": "libtpu 1")
    path = tmp_path / "t.json"
    arguments = ["tune", "--static", "--impl=splash_tpu", "--target=v6e", f"--case={CASE.id}", f"--out={path}"]
    assert cli.main(cli.build_parser().parse_args(arguments)) == 0
    (entry,) = tunable.read_table(path)
    assert (entry.device, entry.key["span"], entry.settings["forward"]["q"]) == ("TPU v6 lite", 2048, 2048)
    assert entry.provenance["compiler"] == "libtpu 1"
    assert entry.provenance["knobs"]["dkv"].endswith("of 4 settings, 2 refused")
    assert entry.settings["backward"] == {"fused": 0}
    assert "6,000 cycles and" in entry.provenance["knobs"]["fused"]
    kept = entry.provenance["static cycles"]
    assert kept["forward"]["forward q=2048 kv=2048 kv_compute=512 part=512"] == 1952
    assert set(kept) == {"forward", "dq", "dkv", "fused"}  # of kernels, not of the choice among them
    said = capsys.readouterr().out
    assert "no chip has confirmed" in said
    assert "v6e dkv q=1024 kv=1024 kv_compute=512 part=512: refused: no room" in said
    assert f"v6e takes forward q=2048 kv=2048 kv_compute=512 part=512, {CASE.id}" in said
    # One kernel by itself: no gradients are compiled, and what was said of the others stays.
    monkeypatch.setattr(splash_tuning, "_ENTRIES", (entry,))
    monkeypatch.setattr(splash_tuning, "get_device_kind", lambda platform: entry.device)
    assert cli.main(cli.build_parser().parse_args([*arguments, "--parameter=forward"])) == 0
    (again,) = tunable.read_table(path)
    assert again.settings == entry.settings
    assert again.provenance["knobs"].keys() == entry.provenance["knobs"].keys()
    assert again.provenance["how"].endswith(" --parameter=forward")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--impl=splash_tpu"], "there is no TPU to time splash_tpu on: add --static"),
        (["--impl=block_flash", "--static"], "block_flash declares nothing that schedules can tune"),
        (["--impl=splash_tpu", "--static", "--target=v9"], "no TPU is called v9: known are v4"),
    ],
)
def test_what_cannot_be_tuned_so_is_refused(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cycles, "explain_unavailable", lambda platform="tpu": None)
    assert cli.main(cli.build_parser().parse_args(["tune", *arguments])) == 2
    assert message in capsys.readouterr().err


def entry(span: int, q: int, fused: int = 0, **key: int) -> tunable.TableEntry:
    sizes = {"itemsize": 2, "head_dim": 128, "head_dim_v": 128, "kv_length": 8192, "span": span, **key}
    blocks = {"q": q, "kv": 1024, "kv_compute": 512}
    settings = {
        **dict.fromkeys(splash_tuning.KERNEL_PARAMETERS, blocks),
        "fused": {**blocks, "part": 128},
        "backward": {"fused": fused},
    }
    return tunable.TableEntry(device="chip", key=sizes, settings=settings, provenance={"case": "x"})


@pytest.mark.parametrize(
    ("mask", "length", "depth", "itemsize", "plain", "q"),
    [
        (Causal(), 8192, 128, 2, True, 1024),
        (Causal(), 2048, 64, 2, True, 256),  # nearer to the window in what a query sees
        (Window(1023, 0), 32768, 128, 2, True, 256),
        (Window(1023, 0) & Causal(), 32768, 128, 2, True, 256),
        (Full(), 32768, 256, 2, True, 128),
        (Causal(), 8192, 512, 2, True, 512),  # deeper than anything tuned: the plain default
        (Causal(), 8192, 128, 4, True, 512),
        (Causal(), 8192, 256, 2, False, 128),
    ],
)
def test_a_call_takes_what_was_chosen_for_the_likest(
    mask: Mask, length: int, depth: int, itemsize: int, plain: bool, q: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = (entry(8192, 1024), entry(1024, 256), entry(8192, 128, head_dim=256, head_dim_v=256))
    monkeypatch.setattr(splash_tuning, "_ENTRIES", entries)
    monkeypatch.setattr(splash_tuning, "get_device_kind", lambda platform: "chip")
    found = splash_tuning.look_up(mask, length, Depths(depth, depth, itemsize), plain=plain)
    assert found.forward.q == q
    monkeypatch.setattr(splash_tuning, "get_device_kind", lambda platform: "")
    assert splash_tuning.look_up(mask, length, Depths(depth, depth, itemsize), plain=plain) == BlockSizes()


def test_what_does_not_fit_is_left_at_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stored mask takes VMEM that nothing was tuned with."""
    monkeypatch.setattr(splash_tuning, "_ENTRIES", (entry(8192, 2048),))
    monkeypatch.setattr(splash_tuning, "get_device_kind", lambda platform: "chip")
    depths = Depths(128, 128, 2)
    assert splash_tuning.look_up(Causal(), 8192, depths, plain=False).dkv == Blocks()


@pytest.mark.parametrize(
    ("mask", "depth", "itemsize", "plain", "kind", "fused", "part"),
    [
        (Causal(), 128, 2, True, "chip", True, 128),  # blocks of its own
        (Window(1023, 0), 128, 2, True, "chip", False, 512),
        (Causal(), 128, 2, False, "chip", True, 512),  # with segments or a stored mask these do not fit
        (Causal(), 64, 2, False, "chip", True, 128),
        (Causal(), 128, 4, True, "chip", False, 512),  # nothing was tuned in f32
        (Causal(), 128, 2, True, "other chip", False, 512),
        (Causal(), 128, 2, True, "", True, 512),  # interpreted, as on a chip
        (Window(1023, 0), 128, 2, True, "", False, 512),
        (Causal(), 128, 4, True, "", False, 512),
    ],
)
def test_the_backward_is_fused_where_the_table_says_so(
    mask: Mask,
    depth: int,
    itemsize: int,
    plain: bool,
    kind: str,
    fused: bool,
    part: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shallow = entry(8192, 512, fused=1, head_dim=64, head_dim_v=64)
    monkeypatch.setattr(splash_tuning, "_ENTRIES", (entry(8192, 1024, fused=1), entry(1024, 256), shallow))
    monkeypatch.setattr(splash_tuning, "get_device_kind", lambda platform: kind)
    found = splash_tuning.look_up(mask, 8192, Depths(depth, depth, itemsize), plain=plain)
    assert (found.fused_backward, found.dkv.part) == (fused, part)


def test_the_table_is_whole() -> None:
    """Every entry is for a chip that is known, says which figures it rests on, and holds sizes that a kernel takes."""
    entries = tunable.read_table(splash_tuning.TABLE)
    assert {one.device for one in entries} == {tpu.kind for tpu in TPUS}
    for one in entries:
        assert set(one.settings) == {*splash_tuning.KERNEL_PARAMETERS, "backward"}
        assert [Blocks(**one.settings[kernel]) for kernel in splash_tuning.KERNEL_PARAMETERS]
        assert one.settings["backward"] in [way for way, _ in splash_tuning.BACKWARD_CHOICES]
        assert one.provenance["compiler"].startswith("libtpu ")
        of_splash = implementation_registry.find_implementation("splash_tpu").tunable
        assert of_splash is not None
        assert one.key == dict(of_splash.key(parse_case_id(one.provenance["case"])))
    assert json.loads(splash_tuning.TABLE.read_text())["entries"] == [
        dataclasses.asdict(one) for one in sorted(entries, key=lambda one: one.place)
    ]


@pytest.mark.usefixtures("no_chip")
def test_kernels_stand_side_by_side_each_at_its_best_blocks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cycles, "explain_unavailable", lambda platform="tpu": None)
    monkeypatch.setattr(cycle_comparison, "_compile_call", compiled)
    asked = ["cycles", "--target=v6e", f"--case={CASE.id}"]
    asked += [f"--parameter={name}" for name in ("forward", "dkv", "fused", "backward")]
    asked += ["--impl=splash_tpu", "--impl=splash_tpu_fused"]
    assert cli.main(cli.build_parser().parse_args(asked)) == 0
    rows = [line.split(" | ")[1:] for line in capsys.readouterr().out.splitlines() if line.startswith("| train")]
    assert rows == [
        ["`splash_tpu`", "forward", "2.0 at 2048, 2048, 512, 512 |"],
        ["`splash_tpu`", "dkv", "4.0 at 512, 512, 512, 512 |"],
        ["`splash_tpu`", "fused", "6.0 + 3.4 at 1024, 2048, 512, 512 |"],
        ["`splash_tpu`", "backward", "8.5 at fused=0 |"],
        ["`splash_tpu_fused`", "all kernels", "9.5 |"],  # it has nothing to choose
    ]
    assert cli.main(cli.build_parser().parse_args(["cycles", f"--case={CASE.id}"])) == 2
    assert "--case compares implementations: name them by --impl" in capsys.readouterr().err


def test_the_order_of_static_cycles_is_held_against_the_clock() -> None:
    static = {"a": 100.0, "b": 103.0, "c": 200.0, "d": 300.0}
    seconds = {"a": 1.0, "b": 0.5, "c": 3.0, "d": 2.0}
    # a and b are alike by schedule, d was faster than c.
    assert "put 4 of 5 pairs of candidates in the order of the clock" in static_tuning.describe_rank_agreement(
        static, seconds
    )
    assert static_tuning.describe_rank_agreement(static, {"a": 1.0, "b": 0.5}) == ""
    assert static_tuning.describe_rank_agreement({}, seconds) == ""


def test_tuning_on_a_chip_says_how_well_the_static_order_held(tmp_path: Path) -> None:
    implementation = implementation_registry.find_implementation("block_flash")
    declared = implementation.tunable
    assert declared is not None
    case = parse_case_id("train/f32/B1.T64.S64.N1.K1.H16.V16/causal/normal/s0")
    names = ["forward block_q=16", "forward block_q=32"]
    kept = tunable.TableEntry(
        device=jax.devices()[0].device_kind,
        key=declared.key(case),
        settings={},
        provenance={"static cycles": {"forward": {names[0]: 100.0, names[1]: 200.0}}},
    )
    tunable.write_table(tmp_path / "table.json", [kept])
    declared = dataclasses.replace(declared, table=tmp_path / "table.json")
    static = tune._read_static_cycles(declared, case)
    assert static == kept.provenance["static cycles"]
    rows = [
        Measurement(
            implementation=f"block_flash {name}",
            platform="cpu",
            device="",
            case=case.id,
            phase="forward",
            outcome=AGREES,
            jax="",
            samples=(seconds,) * 5,
            speed=None,
            error=None,
        )
        for name, seconds in zip(names, (2.0, 1.0), strict=True)
    ]
    choice = ParameterChoice("forward", {"block_q": 32}, {"block_q": 32}, rows)
    assert "put 0 of 1 pairs of candidates" in tune._describe_static_order(choice, static)
    entry = tune._build_entry(
        implementation, declared, TuningResult(case, {}, (choice,)), static, ["--parameter=forward"]
    )
    assert entry.provenance["how"].endswith(" --parameter=forward")
    assert entry.provenance["static cycles"] == static
    assert "put 0 of 1" in entry.provenance["static order"]["forward"]
