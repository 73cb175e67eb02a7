"""A session runs from plain Python, in the caller's process, and gives records, findings and the exit code."""

from __future__ import annotations

import signal
import warnings
from pathlib import Path

import jax
import pytest

from conformance import interrupts
from conformance.execution.plain_functions import build_implementation
from conformance.session.failures import CannotJudge, RunStopped
from conformance.session.job_judging import ProgressDisplay, show_no_progress
from conformance.session.planned_run import describe_plan, load_resumed, plan_jobs
from conformance.session.resolved_run import Caller, resolve_run
from conformance.session.run_result import compare_with_baseline
from conformance.session.run_spec import RunSpec, build_spec, parse_shard, read_query
from conformance.session.session import run_planned, run_session
from reports.records import COMPLETE, FAIL, INTERRUPTED, PASS, Record, read_runs, serialize_job, serialize_run
from tests.kernels import naive
from tests.process_helpers import restore_signal_handlers

CASE = "train/f32/B1.T16.S16.N2.K2.H16.V16/causal/normal/s0"
FEW = RunSpec(implementations=("given",), cases="train/f32/*.T1.*", checks=("forward",))


def right(q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool = False) -> jax.Array:
    return naive.attention(q, k, v, causal=causal)


def wrong(q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool = False) -> jax.Array:
    return 1.01 * naive.attention(q, k, v, causal=causal)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def declare(function: object, name: str) -> Caller:
    return Caller(implementations=[build_implementation(function, name)])  # type: ignore[arg-type]


def test_a_function_is_judged_in_the_callers_process() -> None:
    options = RunSpec(implementations=("right",), case=CASE, checks=("forward",))
    result = run_session(options, declare(right, "right"))
    assert (result.how, result.exit_code) == (COMPLETE, 0)
    assert {(record.implementation, record.check, record.verdict) for record in result.records} == {
        ("right", "forward", PASS)
    }
    assert list(result.findings) == []
    assert result.recorded.run is not None
    assert result.recorded.run.level == "one case"


def test_a_wrong_function_gives_findings_files_and_exit_code_1(folder: Path) -> None:
    options = RunSpec(
        implementations=("wrong",), case=CASE, checks=("forward",), json="r.jsonl", report="page.html", command="mine"
    )
    result = run_session(options, declare(wrong, "wrong"))
    assert result.exit_code == 1
    assert [each.finding.smallest.case for each in result.findings] == [CASE]
    (recorded,) = read_runs(folder / "r.jsonl")
    assert recorded.is_complete
    assert [record.verdict for record in recorded.records] == [FAIL]
    assert recorded.run is not None
    assert recorded.run.command == "mine"
    assert "page.html" in {path.name for path in folder.iterdir()}


def test_who_watches_the_progress_may_stop_the_run() -> None:
    seen = []

    class Stops:
        def advance(self, judged: list[Record]) -> None:
            seen.append(judged)
            raise RunStopped("that is enough")

    class Shows:
        def __enter__(self) -> ProgressDisplay:
            return Stops()  # type: ignore[return-value]

        def __exit__(self, *_: object) -> None:
            return None

    result = run_session(FEW, declare(right, "given"), show_progress=lambda total, finished: Shows())
    assert (result.how, result.reason, result.exit_code) == (INTERRUPTED, "that is enough", 2)
    assert len(seen) == 1
    assert {record.case for record in result.records} == {record.case for record in seen[0]}


def test_a_signal_stops_the_run_and_is_its_exit_code() -> None:
    def show(total: int, finished: object) -> object:
        signal.raise_signal(signal.SIGTERM)
        return show_no_progress(total, ())

    with restore_signal_handlers():
        before = signal.getsignal(signal.SIGTERM)
        result = run_session(FEW, declare(right, "given"), show_progress=show)  # type: ignore[arg-type]
        assert signal.getsignal(signal.SIGTERM) == before
    assert (result.how, result.exit_code) == (INTERRUPTED, 143)
    assert "SIGTERM" in result.reason


def test_a_stopped_run_is_continued_and_compared(folder: Path) -> None:
    options = RunSpec(**{**vars(FEW), "json": "r.jsonl"})
    whole = run_session(options, declare(right, "given"))
    (recorded,) = read_runs(folder / "r.jsonl")
    assert recorded.run is not None
    assert len(recorded.done) > 1
    number, found = next(iter(recorded.done.items()))
    (folder / "r.jsonl").write_text(serialize_run(recorded.run) + "\n" + serialize_job(number, found))
    (folder / "before.jsonl").write_text((folder / "r.jsonl").read_text())
    values = {**vars(FEW), "resume": "r.jsonl", "baseline": "before.jsonl"}
    planned = load_resumed(plan_jobs(resolve_run(RunSpec(**values), declare(right, "given"))))
    assert planned.finished == {number: found}
    assert len(planned.notes) == 1
    with interrupts.record_signals():
        result = compare_with_baseline(planned.resolved, run_planned(planned))
    assert {r.key: r.verdict for r in result.records} == {r.key: r.verdict for r in whole.records}
    assert result.comparison is not None
    assert (result.exit_code, list(result.comparison.regressions)) == (0, [])


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({}, ("--impl",)),
        ({"implementations": ("a",), "judge_all": True}, ("--all", "--impl")),
        ({"implementations": ("a",), "case": CASE, "level": "quick"}, ("--case", "--level")),
        ({"implementations": ("a",), "problem": "x", "regressions": True}, ("--problem", "--regressions")),
        ({"implementations": ("a",), "full_size": True}, ("--full-size", "--problem")),
        ({"implementations": ("a",), "pullback": "plain"}, ("--pullback", "--case")),
        ({"implementations": ("a",), "jobs": 0}, ("--jobs", "got 0")),
        ({"implementations": ("a",), "jobs": 10**20}, ("--jobs", f"got {10**20}", "at most")),
        ({"implementations": ("a",), "in_process": True, "timeout": 5.0}, ("--timeout=5", "--in-process")),
        ({"implementations": ("a",), "in_process": True, "memory": 2.0}, ("--memory=2", "--in-process")),
        ({"implementations": ("a",), "seeds": (2**64,)}, ("--seed", "2**64")),
        ({"implementations": ("a",), "timeout": float("inf")}, ("--timeout", "finite")),
        ({"implementations": ("a",), "confirm_seconds": -1.0}, ("--confirm-seconds", "got -1")),
        ({"implementations": ("a",), "report": ""}, ("--report", "empty")),
        ({"implementations": ("a",), "checks": ("forward", "")}, ("--check ", "empty")),
        ({"implementations": ("",), "option_prefix": ""}, ("name ", "empty")),
        (
            {"implementations": ("a",), "sandbox_read": ("",), "option_prefix": "--conformance-"},
            ("--conformance-sandbox-read ", "empty"),
        ),
    ],
)
def test_options_that_no_run_can_have_are_refused(values: dict[str, object], named: tuple[str, ...]) -> None:
    with pytest.raises(CannotJudge) as raised:
        RunSpec(**values)  # type: ignore[arg-type] # values of several types
    assert all(name in str(raised.value) for name in named)


def test_messages_spell_options_as_the_caller_does() -> None:
    with pytest.raises(CannotJudge, match="--conformance-memory must be more than zero"):
        RunSpec(implementations=("a",), memory=0.0, option_prefix="--conformance-")
    named = RunSpec(implementations=("a",), option_prefix="--conformance-").spell("implementations")
    assert named == "--conformance-impl"


def test_a_query_of_a_run_record_gives_the_same_options() -> None:
    options = RunSpec(implementations=("a", "b"), checks=("forward",), seeds=(3,), timeout=2.5, cases="train/*")
    assert build_spec(read_query(options.build_query(), "")) == options


@pytest.mark.parametrize("text", ["", "1", "0/2", "3/2", "-1/2", "a/b", "1/2/3", "1/10000", "1/99999999999999999999"])
def test_what_is_no_shard_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no shard such as 2/3"):
        parse_shard(text)
    assert parse_shard("2/3") == (2, 3)


def test_the_plan_says_what_is_judged_and_about_how_long_it_takes() -> None:
    planned = plan_jobs(resolve_run(RunSpec(implementations=("dot_product",), level="smoke", jobs=2)))
    line = describe_plan(planned)
    for word in ("dot_product", "smoke", f"{len(planned.jobs):,} jobs", "2 processes", "about "):
        assert word in line


def test_numpy_does_not_warn_of_what_a_wrong_kernel_returns() -> None:
    def huge(q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool = False) -> jax.Array:
        return naive.attention(q, k, v, causal=causal) / 0.0 * jax.numpy.where(q[..., :1] > 0, 1e38, jax.numpy.nan)

    options = RunSpec(implementations=("huge",), case=CASE, checks=("forward", "gradients", "linearity", "poison"))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", category=RuntimeWarning)
        result = run_session(options, declare(huge, "huge"))
    assert result.exit_code == 1
    # NaN that queries attend to does stay visible.
    wrong = [record for record in result.records if record.observable != "out.visible"]
    assert {record.verdict for record in wrong} == {FAIL}
