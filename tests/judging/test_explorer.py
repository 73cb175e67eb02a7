"""Test that exploring finds and shrinks a rare bug, leaves a right kernel alone, and keeps its time."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cases.case import Case
from cases.case_id import matches_query, parse_case_id
from cases.case_space.alternatives import NothingToDraw
from cases.case_space.code_numbers import NO_CODE_NUMBERS, CodeNumbers
from conformance import cli, declare
from conformance.execution import implementation_registry
from conformance.execution.plain_functions import build_implementation
from conformance.judging import explorer
from conformance.judging.explorer import Budget, Exploration, JudgedCase, build_budget, compute_plainness
from conformance.judging.job import Job
from conformance.judging.runner import Runner
from conformance.judging.settings import ExpectedFailure, Settings
from reports import records
from tests.kernels import naive
from tests.process_helpers import interrupt_command

REPLAY = "python -m conformance run --impl=kernel.py:{name} --case={case} --check={check}"


@declare(behind_mask="finite")
def compute_right(q: Any, k: Any, v: Any, *, causal: bool = False) -> Any:
    """Compute attention without a fault."""
    return naive.attention(q, k, v, causal=causal)


@declare(behind_mask="finite")
def fail_for_tail_and_cap(q: Any, k: Any, v: Any, *, causal: bool = False, soft_cap: Any = None) -> Any:
    """Be wrong by 1% with a soft cap and one key beyond a block of 64."""
    wrong = soft_cap is not None and k.shape[1] % 64 == 1
    return naive.attention(q, k, v * 1.01 if wrong else v, causal=causal, soft_cap=soft_cap)


@declare(behind_mask="finite")
def lose_window_side(q: Any, k: Any, v: Any, *, causal: bool = False, window: Any = None) -> Any:
    """Lose the right side of a window where T != S."""
    if window is not None and q.shape[1] != k.shape[1]:
        window = (window[0], None)
    return naive.attention(q, k, v, causal=causal, window=window)


@declare(behind_mask="finite")
def fail_for_groups_in_bf16(q: Any, k: Any, v: Any, *, sinks: Any = None) -> Any:
    """Give dk and dv of grouped heads to the first head only, in bf16."""
    if q.dtype == "bfloat16" and q.shape[2] > k.shape[2]:
        q = q[:, :, :1].repeat(q.shape[2], axis=2)
    return naive.attention(q, k, v, sinks=sinks)


def explore_kernel(
    function: Callable[..., Any],
    *,
    query: str | None = None,
    settings: Settings | None = None,
    code_numbers: CodeNumbers | None = None,
    **limits: Any,
) -> Exploration:
    limits = {"seconds": None, "examples": None, "seed": 0} | limits
    implementation = build_implementation(function, "it")
    return explorer.explore(
        implementation, settings or Settings(), Budget(**limits), query=query, code_numbers=code_numbers
    )


@declare(behind_mask="finite")
def fail_for_long_thirds(q: Any, k: Any, v: Any, *, causal: bool = False) -> Any:
    """Be wrong for more than 1000 keys in whole blocks of 192."""
    wrong = (k.shape[1] % 192 == 0) & (k.shape[1] > 1000)  # no branch, which would be searched first
    return naive.attention(q, k, v * (1.0 + 0.01 * wrong), causal=causal)


@declare(behind_mask="finite")
def fail_for_an_odd_cache(q: Any, k: Any, v: Any, *, causal: bool = False) -> Any:
    """Be wrong for one length alone."""
    return naive.attention(q, k, v * 1.01 if 3 * k.shape[1] == 2331 else v, causal=causal)


@pytest.mark.parametrize(
    ("function", "seed", "smallest"),
    [
        # These seeds meet the condition soon. A nightly test measures how many others do.
        pytest.param(
            *(fail_for_tail_and_cap, 6, "train/f32/B1.T65.S65.N1.K1.H8.V8/full/softcap30/normal/s0"),
            marks=pytest.mark.nightly,
        ),
        pytest.param(*(fail_for_groups_in_bf16, 0, "B1.T"), marks=pytest.mark.long),
        pytest.param(lose_window_side, 2, "/window-l", marks=pytest.mark.nightly),
    ],
)
def test_a_bug_in_a_rare_condition_is_found_and_shrunk(function: Callable[..., Any], seed: int, smallest: str) -> None:
    found = explore_kernel(function, examples=14, seed=seed)
    assert found.failing is not None
    assert smallest in found.failing.id
    case = found.failing
    assert case.q_length * case.kv_length <= 65 * 65
    assert case.batch == 1
    assert (case.head_dim, case.v_head_dim) == (8, 8)
    assert case.distribution == "normal"
    assert found.shrunk
    red = [record for record in found.records if record.verdict in records.RED]
    assert red
    assert {record.case for record in red} == {case.id}
    assert found.first is not None
    assert compute_plainness(case) <= compute_plainness(found.first)


def judge_by(monkeypatch: pytest.MonkeyPatch, is_wrong: Callable[[Job], bool]) -> None:
    """Let a condition decide about each job, instead of calls of the kernel."""

    def judge(self: Runner, job: Job) -> list[records.Record]:
        verdict = records.FAIL if is_wrong(job) else records.PASS
        fields: dict[str, Any] = {"implementation": "it", "platform": "cpu", "case": job.case.id, "observable": "out"}
        return [records.Record(**fields, check=check.name, verdict=verdict) for check in job.checks]

    monkeypatch.setattr(Runner, "judge", judge)


def test_what_was_wrong_and_is_right_when_asked_again_stays_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    # One check runs while a case shrinks.
    judge_by(monkeypatch, lambda job: len(job.checks) == 1 or job.case.kv_length > 64)
    found = explore_kernel(compute_right, examples=40)
    assert found.failing is not None
    assert found.failing.kv_length <= 64
    of_it = {record.verdict for record in found.records if record.case == found.failing.id}
    assert of_it == {records.FAIL, records.PASS}


@pytest.mark.nightly
@pytest.mark.parametrize(
    "function", [fail_for_tail_and_cap, fail_for_groups_in_bf16, lose_window_side, fail_for_long_thirds]
)
def test_most_seeds_find_it_in_eighty_cases(function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explorer, "_DEFAULT_SHRINK_SECONDS", 0.0)
    found = [explore_kernel(function, examples=80, seed=seed).failing for seed in range(3)]
    assert sum(failing is not None for failing in found) >= 2


def test_a_right_kernel_is_left_alone_and_what_was_reached_is_told() -> None:
    heard: list[JudgedCase] = []
    implementation = build_implementation(compute_right, "right")
    limits = Budget(seconds=None, examples=5, seed=0)
    found = explorer.explore(implementation, Settings(), limits, on_case=heard.append)
    assert found.failing is None
    assert found.judged + found.unjudged == 5 == len({seen.case for seen in heard})
    assert not any(seen.shrinking for seen in heard)
    assert {record.verdict for record in found.records} <= {records.PASS, records.UNSUPPORTED, records.UNJUDGED}
    assert found.reached["f32"] >= 1
    assert found.reached["soft_cap"] == 0  # the function has no such parameter, so none was drawn
    told = "\n".join(explorer.describe_exploration(found, limits.seed))
    assert f"explored {found.judged} cases" in told
    assert "from seed 0" in told
    assert "f32" in told


def test_a_constant_in_the_source_leads_to_the_lengths_at_which_it_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    judge_by(monkeypatch, lambda job: job.case.kv_length % 192 == 0 and job.case.kv_length > 1000)
    found = explore_kernel(fail_for_long_thirds, examples=24, seed=9)
    assert found.failing is not None
    assert found.failing.kv_length % 192 == 0
    assert found.failing.kv_length > 1000
    assert {192, 1000} <= found.code_numbers.in_source
    assert any(tried.startswith("S ") for tried in found.used)
    said = "\n".join(explorer.describe_exploration(found, 0))
    assert re.search(r"numbers in the code: .*192.* \(source\)", said)
    assert "tried around them: " in said


def test_a_branch_that_no_case_of_the_grids_reaches_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    judge_by(monkeypatch, lambda job: job.case.kv_length == 777)
    found = explore_kernel(fail_for_an_odd_cache, examples=3)
    assert found.failing is not None
    assert found.first is not None
    assert found.failing.kv_length == 777
    assert found.judged == 1
    assert found.shrunk
    assert compute_plainness(found.failing) <= compute_plainness(found.first)


@pytest.mark.nightly
def test_without_code_numbers_such_lengths_are_not_drawn() -> None:
    found = explore_kernel(fail_for_long_thirds, examples=24, seed=1, code_numbers=NO_CODE_NUMBERS)
    assert found.failing is None
    assert "numbers in the code: none" in "\n".join(explorer.describe_exploration(found, 0))


def test_what_the_grid_has_not_combined_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    judge_by(monkeypatch, lambda job: False)
    found = explore_kernel(compute_right, examples=4)
    assert found.beyond > 0
    assert f"{found.beyond} pairs of properties" in "\n".join(explorer.describe_exploration(found, 0))


def test_the_same_seed_draws_the_same_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    judge_by(monkeypatch, lambda job: False)

    def cases_of(seed: int) -> list[str]:
        return sorted({record.case for record in explore_kernel(compute_right, examples=5, seed=seed).records})

    assert cases_of(3) == cases_of(3)
    assert cases_of(3) != cases_of(4)


def test_only_cases_that_match_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    judge_by(monkeypatch, lambda job: False)
    found = explore_kernel(compute_right, examples=4, query="*/causal")
    assert found.judged
    assert all(matches_query("*/causal", record.case) for record in found.records)
    with pytest.raises(NothingToDraw, match="does not match train/f99"):
        explore_kernel(compute_right, examples=4, query="train/f99")


@pytest.mark.long
def test_a_query_that_is_hardly_ever_drawn_keeps_time_too() -> None:
    started = time.monotonic()
    found = explore_kernel(compute_right, seconds=1.0, query=Case().id)
    assert time.monotonic() - started < 20
    assert found.failing is None


@pytest.mark.long
def test_an_expected_failure_is_no_find_and_its_passing_neither() -> None:
    def settings(check: str) -> Settings:
        return Settings(expected_failures=(ExpectedFailure(implementation="it", reason="known", check=[check]),))

    @declare(behind_mask="finite")
    def wrong(q: Any, k: Any, v: Any) -> Any:
        return 1.01 * naive.attention(q, k, v)

    known = explore_kernel(wrong, examples=3, settings=settings("*"))
    assert known.failing is None
    assert {record.verdict for record in known.records} >= {records.EXPECTED_FAIL}
    assert explore_kernel(compute_right, examples=3, settings=settings("forward")).failing is None


@pytest.mark.long
def test_a_crash_is_a_find() -> None:
    def crashes(q: Any, k: Any, v: Any, *, scale: Any = None) -> Any:
        if scale is not None:
            raise RuntimeError("no such tile")
        return naive.attention(q, k, v)

    found = explore_kernel(declare(behind_mask="finite")(crashes), examples=20)
    assert found.failing is not None
    assert found.failing.scale is not None
    assert any("no such tile" in record.reason for record in found.records)


@pytest.mark.nightly
def test_time_is_kept_while_drawing() -> None:
    started = time.monotonic()
    found = explore_kernel(compute_right, seconds=2.0)
    assert time.monotonic() - started < 20  # a case that has begun is finished
    assert found.failing is None


def test_time_is_kept_while_shrinking(monkeypatch: pytest.MonkeyPatch) -> None:
    judge_by(monkeypatch, lambda job: job.case.q_length != job.case.kv_length)
    monkeypatch.setattr(explorer, "_DEFAULT_SHRINK_SECONDS", 0.0)
    found = explore_kernel(lose_window_side, examples=60)
    assert found.failing == found.first is not None
    assert not found.shrunk
    assert "stopped before the end" in explorer.describe_exploration(found, 0)[-1]


@pytest.mark.parametrize(("seconds", "expected"), [(None, 120), (10, 40), (60, 90), (200, 300)])
def test_shrinking_may_take_half_the_budget_again(seconds: float | None, expected: float) -> None:
    assert Budget(seconds=seconds, examples=1, seed=0).shrink_seconds == expected


def test_profiles() -> None:
    assert build_budget("ci") == Budget(seconds=None, examples=50, seed=0)
    assert build_budget("ci", examples=3, seed=4) == Budget(seconds=None, examples=3, seed=4)
    assert build_budget("explore", seed=4) == Budget(seconds=60.0, examples=None, seed=4)
    assert build_budget("explore").seed != build_budget("explore").seed
    with pytest.raises(ValueError, match="must limit the exploration"):
        Budget(seconds=None, examples=None, seed=0)


def test_the_plainest_case_comes_first() -> None:
    order = [
        "train/f32/B1.T1.S1.N1.K1.H8.V8/full/normal/s0",
        "train/f32/B1.T9.S9.N1.K1.H8.V8/full/normal/s0",
        "train/f32/B1.T1.S1.N1.K1.H8.V8/causal/normal/s0",
        "train/f32/B1.T1.S1.N1.K1.H8.V8/causal_and_window-l1-r1/sinks/normal/s0",
    ]
    assert sorted(map(parse_case_id, reversed(order)), key=compute_plainness) == [parse_case_id(text) for text in order]
    assert isinstance(compute_plainness(Case()), tuple)


KERNELS = """
import sys
from tests.kernels import naive
from conformance import declare

@declare(behind_mask="finite")
def right(q, k, v, *, causal=False):
    return naive.attention(q, k, v, causal=causal)

@declare(behind_mask="finite")
def wrong(q, k, v, *, causal=False):
    return (1.01 if causal else 1) * naive.attention(q, k, v, causal=causal)

@declare(behind_mask="finite")
def loud(q, k, v):
    print("traced", file=sys.stderr, flush=True)
    return naive.attention(q, k, v)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kernel.py").write_text(KERNELS)
    return tmp_path


def run_command(*arguments: str) -> int:
    try:
        return cli.main(cli.build_parser().parse_args(["explore", *arguments]))
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else -1


@pytest.mark.long
def test_the_command_finds_reports_and_says_how_to_replay(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(folder / "step.md"))
    assert run_command("--impl=kernel.py:wrong", "--profile=ci", "--json=r.jsonl", "--report=r.html") == 1
    said = capsys.readouterr()
    (smallest,) = {record.case for record in records.read_jsonl(folder / "r.jsonl") if record.verdict == records.FAIL}
    assert parse_case_id(smallest).mask == "causal"
    assert REPLAY.format(name="wrong", case=smallest, check="forward") in said.out
    assert f"smallest found: {smallest}" in said.out
    assert "does not conform" in said.out
    assert "seed 0" in said.err
    assert smallest in (folder / "r.html").read_text()
    assert "does not conform" in (folder / "step.md").read_text()
    assert re.search(r"^::error title=kernel\.py%3Awrong \(cpu\)%3A .* wrong.*::", said.out, re.MULTILINE)
    assert {path.name for path in folder.iterdir()} <= {"kernel.py", "__pycache__", "r.jsonl", "r.html", "step.md"}


@pytest.mark.long
def test_the_command_finds_nothing_wrong_in_a_right_kernel(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("--impl=kernel.py:right", "--seed=1", "--examples=4", "--seconds=300") == 0
    said = capsys.readouterr()
    assert "seed 1" in said.err
    assert "passes as far as checked (narrowed to 4 explored cases)" in " ".join(said.out.split())
    assert "explored 4 cases" in said.out
    assert "reached" in said.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: --impl"),
        (["--impl=nope"], "unknown implementation 'nope'"),
        (["--impl=kernel.py:right", "--cases=train/f99"], "there is no case to draw: does not match train/f99"),
        (["--impl=kernel.py:right", "--seconds=0"], "--seconds must be positive and finite, got 0"),
        (["--impl=kernel.py:right", "--seconds=inf"], "--seconds must be positive and finite, got inf"),
        (["--impl=kernel.py:right", "--examples=0"], "--examples must be positive and finite, got 0"),
        (["--impl=kernel.py:right", "--seed=-1"], "--seed must not be negative, got -1"),
        (["--impl=kernel.py:right", "--profile=slow"], "invalid choice: 'slow'"),
        (["--impl=kernel.py:right", "--report=absent/x.html"], "--report=absent/x.html cannot be written"),
        (["--impl=kernel.py:right", "--second=3"], "unrecognized arguments: --second=3"),
    ],
)
def test_what_cannot_be_done_is_one_clear_line(
    arguments: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(*arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    lines = [line for line in said.err.splitlines() if not line.startswith("seed ")]
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert message in lines[0]


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("--help") == 0
    said = capsys.readouterr().out
    for part in ("examples:", "profiles:", "exit codes: 0", "python -m conformance explore"):
        assert part in said


@pytest.mark.long
def test_an_interrupt_keeps_what_was_judged(folder: Path) -> None:
    command = ["-m", "conformance", "explore", "--impl=kernel.py:loud", "--in-process"]
    command += ["--seed=0", "--json=r.jsonl", "--seconds=300"]
    # The search for branches makes some of the traces, and each case some more: by then the first is judged.
    found = interrupt_command(*command, traced=60)
    assert found.returncode == 130
    assert "Traceback" not in found.out + found.err
    assert "Interrupted" in found.out
    assert records.read_jsonl(folder / "r.jsonl")


@pytest.mark.nightly
def test_implementations_of_this_project_can_be_explored() -> None:
    found = explorer.explore(
        implementation_registry.find_implementation("dot_product"), Settings(), Budget(seconds=None, examples=3, seed=0)
    )
    assert found.failing is None
