"""Timing side by side: statistics with a fake clock, operations counted from the mask, wrong results marked."""

from __future__ import annotations

import functools
import json
import math
import signal
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from cases.case import Case
from cases.case_id import parse_case_id
from cases.operand_values import draw_problem
from conformance import cli, environment, interrupts
from conformance.cost.timing import attention_flops, matmul_ceiling
from conformance.cost.timing.agreement import choose_rows
from conformance.cost.timing.interleaved_timing import ComparisonResult, TimingLimits, compare_all
from conformance.truth import tolerances
from impls.contract.declarations import Arithmetic
from impls.contract.implementation import Accelerator, Implementation
from impls.dot_product import attention
from reports import speed_page, speed_section
from reports.records import (
    ERROR,
    UNJUDGED,
    UNSUPPORTED,
    RunInfo,
    has_measurements,
    read_measurements,
    write_measurements,
)
from reports.records.measurement import AGREES, BACKWARD, DIFFERS, FORWARD, Measurement, Quartiles, merge_measurements
from tests.process_helpers import restore_signal_handlers
from tests.reports.report_samples import render_html

CASE = "train/f32/B1.T16.S16.N2.K1.H16.V16/causal/normal/s0"


@pytest.mark.parametrize(
    "case_id",
    [
        CASE,
        "train/f32/B2.T24.S40.N4.K2.H16.V8/window-l7-r3_and_causal/normal/s0",
        "train/f32/B2.T24.S40.N4.K2.H16.V8/densehead-d40/seg/normal/s0",
        "train/f32/B2.T24.S24.N2.K2.H16.V16/lengths-20-9/normal/s1",
        "train/f32/B1.T8.S24.N2.K2.H16.V16/full/normal/s1",
    ],
)
def test_pairs_are_those_that_the_mask_allows(case_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_flops, "_PAIRS_AT_A_TIME", 100)  # several steps, the last one short
    problem = draw_problem(parse_case_id(case_id))
    batch, q_length, num_q_heads, _ = problem.q.shape
    full = np.broadcast_to(problem.allowed, (batch, num_q_heads, q_length, problem.k.shape[1]))
    assert attention_flops.count_allowed_pairs(problem) == full.sum()


def test_operations_are_counted_from_pairs() -> None:
    case = Case(head_dim=64, v_head_dim=64)
    assert attention_flops.count_flops(10, case, FORWARD) == 10 * 4 * 64
    assert attention_flops.count_flops(10, case, BACKWARD) == 3.5 * attention_flops.count_flops(10, case, FORWARD)
    wide = Case(head_dim=64, v_head_dim=128)
    assert attention_flops.count_flops(1, wide, FORWARD) == 2 * (64 + 128)
    assert attention_flops.count_flops(1, wide, BACKWARD) == 2 * (4 * 64 + 3 * 128)


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_default_cases_suit_the_device(platform: str) -> None:
    cases = attention_flops.list_default_cases(platform)
    assert {case.dtype for case in cases} == {"f32" if platform == "cpu" else "bf16"}
    assert {case.head_dim for case in cases} == {64, 128}
    assert max(case.q_length for case in cases) == (4096 if platform == "cpu" else 16384)
    assert all(parse_case_id(case.id) == case for case in cases)


def test_rows_to_look_at_are_few_and_hold_the_ends() -> None:
    for case in (
        *attention_flops.list_default_cases("gpu"),
        *attention_flops.list_default_cases("cpu"),
        Case(q_length=1),
        Case(q_length=2),
    ):
        rows = choose_rows(case)
        assert rows[0] == 0
        assert rows[-1] == case.q_length - 1
        assert (np.diff(rows) > 0).all()
        assert len(rows) <= 32


def wrong(*operands: Any, fault: str, **options: Any) -> Any:
    """The plain attention with a fault."""
    k, v = options["k"], options["v"]
    if fault == "scale":
        return attention(**{**options, "v": v * 1.01})
    if fault == "gradient":
        return attention(**{**options, "k": k + 0.5 * (jax.lax.stop_gradient(k) - k)})
    if fault == "last row":
        return attention(**options).at[:, -1].set(jnp.nan)
    if fault == "shape":
        return attention(**options)[:, :-1]
    raise AssertionError(fault)


def plain(name: str, **changes: Any) -> Implementation:
    return Implementation(name=name, call=changes.pop("call", attention), **changes)


def raises(**options: Any) -> Any:
    raise ValueError("no\nkernel")


def declines(**options: Any) -> Any:
    raise NotImplementedError("not on Tuesdays")


@pytest.fixture(autouse=True)
def product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products that take no time, in tests."""
    monkeypatch.setattr(matmul_ceiling, "_SIDE_ON_CPU", 16)


@functools.cache
def compared() -> ComparisonResult:
    """One comparison with everything that can happen to an implementation."""
    implementations = [
        plain("absent", accelerator=Accelerator(absent="no such machine", platform="gpu")),
        plain("scaled", call=functools.partial(wrong, fault="scale")),
        plain("good"),
        plain("last row", call=functools.partial(wrong, fault="last row")),
        plain("half dk", call=functools.partial(wrong, fault="gradient")),
        plain("raises", call=raises),
        plain("declines", call=declines),
        plain("no causal", unsupported={"causal": "takes no mask"}),
        plain("forward only", gradients=frozenset()),
        plain("one row short", call=functools.partial(wrong, fault="shape")),
        plain("interpreted", accelerator=Accelerator(platform="tpu", interpreted=True)),
    ]
    comparisons = [(parse_case_id(CASE), FORWARD), (parse_case_id(CASE), BACKWARD)]
    return compare_all(implementations, comparisons, TimingLimits(rounds=3), tolerances.load_default_tolerances())


@functools.cache
def rows(phase: str) -> dict[str, Measurement]:
    return {row.implementation: row for row in compared().measurements if row.phase == phase}


@pytest.mark.long
def test_what_is_wrong_is_said_beside_its_speed(product: None) -> None:
    forward, backward = rows(FORWARD), rows(BACKWARD)
    assert {name: row.outcome for name, row in forward.items()} == {
        "absent": UNJUDGED,
        "scaled": DIFFERS,
        "good": AGREES,
        "last row": DIFFERS,
        "half dk": AGREES,  # its forward pass is right
        "raises": ERROR,
        "declines": UNSUPPORTED,
        "no causal": UNSUPPORTED,
        "forward only": AGREES,
        "one row short": DIFFERS,
        "interpreted": UNJUDGED,
    }
    for phase in (forward, backward):
        assert phase["one row short"].outcome == DIFFERS
        assert phase["one row short"].reason.endswith("out has shape [1, 15, 2, 16], must be [1, 16, 2, 16]")
    assert backward["half dk"].outcome == DIFFERS
    assert "dk is off by" in backward["half dk"].reason
    assert backward["forward only"].outcome == UNSUPPORTED
    assert math.isinf(forward["last row"].error or 0)
    assert "out is off by" in forward["scaled"].reason
    assert forward["good"].error is not None
    assert forward["good"].error < 1


def test_reasons_are_those_that_were_given(product: None) -> None:
    forward = rows(FORWARD)
    assert forward["absent"].reason == "no such machine"
    assert forward["absent"].platform == "gpu"
    assert forward["raises"].reason.startswith("ValueError: no (")
    assert "test_interleaved_timing.py:" in forward["raises"].reason
    assert "not on Tuesdays" in forward["declines"].reason
    assert forward["no causal"].reason == "causal: takes no mask"
    assert "no TPU in this machine" in forward["interpreted"].reason


def test_the_baseline_is_the_first_that_runs_and_is_right(product: None) -> None:
    """The absent one cannot be it, and a wrong result must not be."""
    forward = rows(FORWARD)
    timed = [row for row in forward.values() if row.samples]
    assert {row.baseline for row in timed} == {"good"}
    assert forward["good"].speed == Quartiles(1, 1, 1)
    assert {len(row.samples) for row in timed} == {3}
    assert forward["good"].flops == 2 * (16 * 17 // 2) * 2 * (16 + 16)
    seconds, ceiling, reached = (forward["good"].seconds, forward["good"].ceiling, forward["good"].flops_per_second)
    assert seconds is not None
    assert ceiling is not None
    assert reached is not None
    assert reached == forward["good"].flops / seconds.median
    assert len({row.ceiling for row in timed}) == 1
    assert forward["good"].of_ceiling == reached / ceiling
    assert forward["good"].memory["peak"] > forward["good"].memory["temporary"] >= 0


def test_measurements_come_back_as_they_were(tmp_path: Path, product: None) -> None:
    path = tmp_path / "m.jsonl"
    write_measurements(path, compared().measurements)
    assert read_measurements(path) == compared().measurements
    assert has_measurements(path)
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)
    path.write_text(path.read_text() + '{"schema": "other"}\n')
    with pytest.raises(ValueError, match=r"m\.jsonl:23 is not a measurement: .*'other'"):
        read_measurements(path)


def test_the_later_of_two_measurements_counts(product: None) -> None:
    old = rows(FORWARD)["good"]
    new = msgspec.structs.replace(old, samples=(1.0,))
    assert merge_measurements([old, rows(BACKWARD)["good"]], [new]) == [new, rows(BACKWARD)["good"]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"outcome": "fine"}, "is none of agrees"), ({"phase": "back"}, "phase 'back'"), ({"samples": ()}, "0 samples")],
)
def test_what_no_measurement_can_be_is_refused(changes: dict[str, Any], message: str, product: None) -> None:
    with pytest.raises(ValueError, match=message):
        msgspec.structs.replace(rows(FORWARD)["good"], **changes)


def test_the_report_has_a_section_and_never_calls_a_wrong_result_the_least(product: None) -> None:
    info = RunInfo(command="bench", level="bench", environment={"jax": "x"}, tolerances=[])
    quick = msgspec.structs.replace(rows(FORWARD)["scaled"], samples=(1e-9,) * 3)
    found = [quick if row is rows(FORWARD)["scaled"] else row for row in compared().measurements]
    page = speed_page.render_speed_page(found, info)
    assert speed_section.build_speed_panels(found)[0].fastest in ("good", "forward only", "half dk")
    for text in ("differs", "no such machine", "not on Tuesdays", "ValueError: no", "ceiling"):
        assert text in page
    assert 'id="speed"' in render_html([], info, found)
    assert "Nothing in this run was timed" in render_html([], info)
    hostile = msgspec.structs.replace(rows(FORWARD)["raises"], reason="<script>alert(1)</script>")
    assert "<script>" not in speed_page.render_speed_page([hostile], info)


def run(*arguments: str) -> int:
    try:
        return cli.main(cli.build_parser().parse_args(arguments))
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else -1


def test_the_command_prints_writes_and_merges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["bench", "--impl=dot_product,jax_nn_cudnn", f"--case={CASE}", "--phase=forward", "--runs=3"]
    assert run(*arguments, "--report=speed.html") == 0
    said = capsys.readouterr()
    assert "1 (baseline)" in said.out
    assert "jax_nn_cudnn: cuDNN attention needs an NVIDIA GPU" in said.out
    assert "These timings say little" in said.err  # this process compiles fast, for tests
    assert "jax_nn_cudnn" in (tmp_path / "speed.html").read_text()
    assert [row.outcome for row in read_measurements(tmp_path / "speed.jsonl")] == [AGREES, UNJUDGED]
    assert run("report", "speed.jsonl", "--report=all.html") == 0
    assert "dot_product" in (tmp_path / "all.html").read_text()


KERNELS = """
import os, sys
from tests.kernels import naive

def short(q, k, v, *, causal=False):
    return naive.attention(q, k, v, causal=causal)[:, :-1]

def raises(q, k, v, *, causal=False):
    raise ValueError("no way")

def exits(q, k, v, *, causal=False):
    sys.exit(0)

def ends(q, k, v, *, causal=False):
    os._exit(0)
"""


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("short", 1, "kernel.py:short: out has shape [1, 15, 2, 16], must be [1, 16, 2, 16]"),
        ("raises", 1, "kernel.py:raises: ValueError: no way (kernel.py:9: raise ValueError("),
        ("exits", 1, "kernel.py:exits: SystemExit: 0 (kernel.py:12: sys.exit(0))"),
        ("ends", 2, "kernel.py:ends cannot be timed: the kernel's process ended by itself, with exit code 0"),
    ],
)
def test_a_kernel_that_cannot_be_timed_is_one_clear_line(
    name: str,
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    product: None,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kernel.py").write_text(KERNELS)
    arguments = ["bench", f"--impl=kernel.py:{name}", f"--case={CASE}", "--runs=2", "--phase=forward"]
    assert cli.main(cli.build_parser().parse_args(arguments)) == code
    printed = capsys.readouterr()
    assert said in printed.out.replace("\n", " ") + printed.err
    assert ("differs" in printed.out) == (name == "short")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to time"),
        (["--impl=nope"], "unknown implementation 'nope'"),
        (["--impl=dot_product", "--runs=0"], "--runs must be at least 1"),
        (["--impl=dot_product", "--seconds=0"], "--seconds must be positive"),
        (["--impl=dot_product", "--cases=train/f99"], "no default case matches"),
        (["--impl=dot_product", f"--case={CASE}", "--cases=train"], "cannot be combined with --cases"),
        (["--impl=dot_product", "--case=x"], "'x' is not a case id"),
    ],
)
def test_what_cannot_be_timed_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("bench", *arguments) == 2
    assert message in capsys.readouterr().err


def test_exit_codes_tell_wrong_results_and_nothing_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kernels.py").write_text("def zero(q, k, v, *, causal=False):\n    return q * 0\n")
    options = [f"--case={CASE}", "--phase=forward", "--runs=3"]
    assert run("bench", "--impl=kernels.py:zero", *[o.replace("K1", "K2") for o in options]) == 1
    assert "differs" in capsys.readouterr().out
    assert run("bench", "--impl=jax_nn_cudnn", *options) == 2


def test_timing_runs_under_everybodys_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.modules", {})
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    environment.prepare_environment(timing=True)
    assert environment.find_timing_distortion() is None
    environment.prepare_environment()
    assert "--xla_backend_optimization_level=0" in (environment.find_timing_distortion() or "")


def test_declared_arithmetic_is_what_results_are_held_to(product: None) -> None:
    """Products rounded to bf16 differ from what an exact implementation returns, and agree if they are declared."""

    def rounded(*, q: Any, k: Any, v: Any, **options: Any) -> Any:
        q, k, v = (x.astype(jnp.bfloat16).astype(jnp.float32) for x in (q, k, v))
        return attention(q=q, k=k, v=v, **options)

    undeclared = plain("undeclared", call=rounded)
    declared = plain("declared", call=rounded, arithmetic=Arithmetic(products="bf16"))
    found = compare_all(
        [undeclared, declared],
        [(parse_case_id(CASE), FORWARD)],
        TimingLimits(rounds=3),
        tolerances.load_default_tolerances(),
    )
    assert [row.outcome for row in found.measurements] == [DIFFERS, AGREES]


def test_ctrl_c_keeps_the_comparisons_that_are_done() -> None:
    def stop(text: str) -> None:
        if BACKWARD in text:
            raise KeyboardInterrupt

    comparisons = [(parse_case_id(CASE), FORWARD), (parse_case_id(CASE), BACKWARD)]
    found = compare_all(
        [plain("good")], comparisons, TimingLimits(rounds=3), tolerances.load_default_tolerances(), on_step=stop
    )
    assert found.interrupted
    assert [(row.phase, row.outcome) for row in found.measurements] == [(FORWARD, AGREES)]


def test_ctrl_c_waits_for_what_must_not_be_cut_in_two() -> None:
    """The block goes on to its end, the interrupt comes after it, and the handler is as it was."""
    done = []

    def press() -> None:
        with interrupts.delay_signals():
            signal.raise_signal(signal.SIGINT)
            done.append("the rest")

    with restore_signal_handlers():
        before = signal.getsignal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            press()
        assert done == ["the rest"]
        assert signal.getsignal(signal.SIGINT) is before
        with interrupts.delay_signals():
            done.append("nobody pressed anything")
