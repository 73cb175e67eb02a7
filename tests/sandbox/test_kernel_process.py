"""Test that whatever a kernel does in its process reaches the judge as one sentence."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from cases.case import Case
from cases.operand_values import draw_cotangent, draw_problem
from conformance.checks import CHECKS, CHECKS_BY_NAME
from conformance.execution import implementation_registry, kernel_errors
from conformance.execution.executor import Executor
from conformance.fork_server import forked_process
from conformance.judging import run_plan
from conformance.judging.job import Job
from conformance.judging.runner import Runner
from conformance.judging.settings import Settings
from conformance.sandbox import kernel_process, sandboxed_executor, supervisor
from conformance.sandbox.kernel_options import KernelOptions
from conformance.sandbox.kernel_process import KernelProcess, Limits, ProcessLost
from conformance.sandbox.policy import SandboxPolicy
from impls.contract.implementation import Implementation
from reports import records
from tests.process_helpers import kill_on_exit, wait_until

CASE = Case(q_length=16, kv_length=16, head_dim=16, v_head_dim=16)
HERE = Path(__file__).parent
LIMITS = Limits(timeout=60.0, memory=4 * 2**30)
SANDBOX = SandboxPolicy(variables=("LINGERS",))


Find = Callable[..., Implementation]


def create_process(implementation: Implementation) -> KernelProcess:
    """Create the process of a kernel that does not exist."""
    assert isinstance(implementation.call, sandboxed_executor.KernelProxy)
    return implementation.call.process


@pytest.fixture
def find() -> Iterator[Find]:
    """Return a function that loads a kernel of this folder; its process ends with the test."""
    found: list[Implementation] = []

    def kernel(name: str, limits: Limits = LIMITS) -> Implementation:
        found.append(
            sandboxed_executor.load_sandboxed(f"{HERE}/misbehaving_kernels.py:{name}", None, limits, sandbox=SANDBOX)
        )
        return found[-1]

    yield kernel
    for implementation in found:
        create_process(implementation).end()


def get_message(implementation: Implementation) -> str:
    """Return the message about a kernel that gives no result."""
    with pytest.raises((Exception, ProcessLost)) as raised:
        sandboxed_executor.create_executor(implementation).forward(draw_problem(CASE))
    return f"{raised.type.__name__}: {raised.value}"


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("dies", "ProcessLost: the kernel's process ended by itself, with exit code 0"),
        ("crashes", "ProcessLost: the kernel's process died of SIGSEGV (it printed: about to crash)"),
        ("closes", "ProcessLost: the kernel's process"),
        ("writes", "PermissionError: [Errno 13] Permission denied"),
        ("writes_to_shared_memory", "PermissionError: [Errno 13] Permission denied"),
        ("writes_to_a_device", "OddError: written"),
        ("writes_to_a_console", "PermissionError: [Errno 13] Permission denied"),
        ("sets_the_clock", "PermissionError: [Errno 1] Operation not permitted"),
        ("switches_jit_off", "ProcessLost: the kernel has replaced jax.jit (jax_disable_jit) in its process"),
        ("connects", "PermissionError: [Errno 1] Operation not permitted"),
        ("connects_among_files", "PermissionError: [Errno 1] Operation not permitted"),
        ("limits_the_judge", "PermissionError: [Errno 1] Operation not permitted"),
        ("kills", "PermissionError: [Errno 1] Operation not permitted"),
        ("looks", "PermissionError: [Errno 13] Permission denied"),
        ("reads_arguments", "PermissionError: [Errno 13] Permission denied"),
        ("replaces", "ProcessLost: the kernel has replaced jax.vjp in its process"),
        (
            "replaces_a_method",
            "ProcessLost: the kernel has replaced conformance.execution.executor.Executor.jit in its process",
        ),
        ("exits", "SystemExit: 0"),
        ("raises", "OddError: q is odd"),
        ("lies", "WrongReturn: the call must return out alone"),
    ],
)
def test_what_it_does_there_is_told_in_a_sentence(find: Find, name: str, sentence: str) -> None:
    implementation = find(name)
    if sentence.startswith("PermissionError") and create_process(implementation).handshake.confined != "confined":
        pytest.skip(create_process(implementation).handshake.confined)
    assert get_message(implementation).startswith(sentence)
    assert not (HERE / "written.txt").exists()


def test_what_was_begun_is_what_it_gives_when_it_is_asked(find: Find) -> None:
    implementation, problem, other = find("plain"), draw_problem(CASE), draw_problem(dataclasses.replace(CASE, seed=1))
    here = Executor(implementation_registry.find_implementation(f"{HERE}/misbehaving_kernels.py:plain"))
    apart = sandboxed_executor.create_executor(implementation)
    process = create_process(implementation)
    cotangent = draw_cotangent(CASE)
    plain = dataclasses.replace(cotangent, logsumexp=None)
    for _ in range(2):  # also when the first answers are known
        apart.begin_forward(problem)
        apart.begin_gradients(problem, plain)
        apart.begin_forward(other)
    assert len(process._pending) == 6
    for case in (other, problem, problem):  # in another order, and once more than begun
        assert np.array_equal(apart.forward(case).values["out"], here.forward(case).values["out"])
    got, expected = apart.gradients(problem, plain).values, here.gradients(problem, plain).values
    assert all(np.array_equal(got[name], expected[name]) for name in expected)
    assert len(process._pending) == 2


def test_operands_that_the_pipe_does_not_hold_are_not_begun_beside_others(find: Find) -> None:
    implementation = find("plain")
    case = Case(q_length=256, kv_length=256, head_dim=1024, v_head_dim=1024)
    large = draw_problem(case)
    apart = sandboxed_executor.create_executor(implementation)
    apart.begin_forward(large)
    apart.begin_forward(draw_problem(dataclasses.replace(CASE, seed=2)))
    apart.begin_gradients(large, dataclasses.replace(draw_cotangent(case), logsumexp=None))
    assert len(create_process(implementation)._pending) == 1
    assert apart.forward(large).values["out"].shape == large.q.shape


@pytest.mark.parametrize(
    ("name", "sentence"), [("dies", "ProcessLost: the kernel's process ended"), ("raises", "OddError: ")]
)
def test_what_goes_wrong_with_what_was_begun_is_told_when_it_is_asked(find: Find, name: str, sentence: str) -> None:
    implementation, problem = find(name), draw_problem(CASE)
    apart = sandboxed_executor.create_executor(implementation)
    apart.begin_forward(problem)
    with pytest.raises((Exception, ProcessLost)) as raised:
        apart.forward(problem)
    assert f"{raised.type.__name__}: {raised.value}".startswith(sentence)


@pytest.mark.long
def test_a_call_that_hangs_is_ended_and_what_it_printed_is_shown(find: Find) -> None:
    sentence = get_message(find("hangs", dataclasses.replace(LIMITS, timeout=4.0)))
    assert sentence == "CallTimeout: the call did not return within 4 s (--timeout) (it printed: waiting for ever)"


@pytest.mark.long
def test_a_call_that_takes_too_much_memory_is_ended(find: Find) -> None:
    sentence = get_message(find("grows", dataclasses.replace(LIMITS, memory=3 * 2**29)))
    assert "1.5 GiB are allowed (--memory)" in sentence


def test_an_error_has_its_place_in_the_users_code_and_what_was_printed_before_it(find: Find) -> None:
    (record,) = Runner(Settings()).run([Job(find("raises"), CASE, (CHECKS_BY_NAME["forward"],))])
    assert record.verdict == records.ERROR
    assert re.search(r"OddError: q is odd \(.*kernels\.py:\d+: raise OddError", record.reason)
    assert record.reason.endswith("(it printed: q has arrived)")


def test_each_answer_has_all_that_was_printed_for_it_and_nothing_else(find: Find) -> None:
    apart, problem = sandboxed_executor.create_executor(find("raises")), draw_problem(CASE)
    for _ in range(50):
        with pytest.raises(ValueError, match="q is odd") as raised:
            apart.forward(problem)
        assert kernel_errors.describe_kernel_error(raised.value).endswith("(it printed: q has arrived)")


def test_a_process_ends_when_nobody_refers_to_its_kernel() -> None:
    implementation = sandboxed_executor.load_sandboxed(f"{HERE}/misbehaving_kernels.py:plain", None, LIMITS)
    process = create_process(implementation)._running[0]._process
    assert process.wait(0) is None
    del implementation
    gc.collect()
    assert process.wait(0) is not None


def list_left_behind(seconds: str) -> list[str]:
    """List the processes that have this as last argument: those that sleep for so many seconds."""
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if place.read_bytes().endswith(f"\0{seconds}\0".encode()):
                found.append(place.parent.name)
    return found


@pytest.mark.skipif(not supervisor.IS_AVAILABLE, reason="only Linux gives orphans to who asks for them")
def test_what_a_kernel_started_and_let_go_of_ends_with_it(find: Find, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = f"1000.{os.getpid()}"
    monkeypatch.setenv("LINGERS", seconds)
    lingers = find("lingers")
    sandboxed_executor.create_executor(lingers).forward(draw_problem(CASE))
    assert list_left_behind(seconds)
    create_process(lingers).end()
    assert not list_left_behind(seconds)
    assert (
        get_message(find("lingers_and_dies")) == "ProcessLost: the kernel's process ended by itself, with exit code 3"
    )
    assert not list_left_behind(seconds)


@pytest.mark.long
@pytest.mark.skipif(not supervisor.IS_AVAILABLE, reason="only Linux gives orphans to who asks for them")
def test_what_starts_another_and_ends_over_and_over_ends_with_its_kernel(
    find: Find, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = f"3000.{os.getpid()}"
    monkeypatch.setenv("LINGERS", number)
    chains = find("chains")
    # On a slow machine there may be more processes than a kernel may have, which ends them too.
    with contextlib.suppress(ProcessLost):
        sandboxed_executor.create_executor(chains).forward(draw_problem(CASE))
    create_process(chains).end()
    assert not any(
        list_left_behind(number) for _ in range(10)
    )  # a process that is just starting another is not seen at once


@pytest.mark.long
@pytest.mark.skipif(not supervisor.IS_AVAILABLE, reason="only Linux gives orphans to who asks for them")
def test_what_a_kernel_started_ends_with_a_judge_that_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = f"2000.{os.getpid()}"
    case = "train/f32/B1.T16.S16.N2.K2.H16.V16/full/normal/s0"
    command = [
        sys.executable,
        "-m",
        "conformance",
        "run",
        f"--impl={HERE}/misbehaving_kernels.py:lingers",
        f"--case={case}",
    ]
    command.append("--sandbox-env=LINGERS")
    environment = {**os.environ, "LINGERS": seconds}
    judge = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, text=True, start_new_session=True)
    with kill_on_exit(judge):
        wait_until(lambda: list_left_behind(seconds), judge)
        judge.kill()
    wait_until(lambda: not list_left_behind(seconds))


def test_output_without_end_costs_nothing(find: Find) -> None:
    assert sandboxed_executor.create_executor(find("floods")).forward(draw_problem(CASE)).values["out"].shape == (
        1,
        16,
        2,
        16,
    )


def test_a_process_that_was_lost_is_one_error_of_one_case(find: Find) -> None:
    implementation = find("dies")
    jobs = [Job(implementation, dataclasses.replace(CASE, seed=seed), tuple(CHECKS[:4])) for seed in (0, 1)]
    found = Runner(Settings()).run(jobs)
    assert [(record.verdict, record.case) for record in found] == [(records.ERROR, job.case.id) for job in jobs]
    assert "ended by itself, with exit code 0; no further check of this case was run" in found[0].reason


def test_the_judge_does_not_import_the_kernel_and_declares_nothing_for_it(find: Find) -> None:
    before = set(sys.modules)
    implementation = find("plain")
    assert not [name for name in set(sys.modules) - before if name.rpartition(".")[2] == "misbehaving_kernels"]
    here = implementation_registry.find_implementation(f"{HERE}/misbehaving_kernels.py:plain")
    for field in (
        "unsupported",
        "arithmetic",
        "residuals",
        "gradients",
        "empty_rows",
        "offers",
        "refuses_by_signature",
    ):
        assert getattr(implementation, field) == getattr(here, field), field
    for mask in ("full", "causal", "dense-d40"):
        case = dataclasses.replace(CASE, mask=mask)
        assert implementation.supports(case) == here.supports(case)
    with pytest.raises(RuntimeError, match="in a process of its own"):
        implementation.call(1, 2, 3)


@pytest.mark.long
def test_an_implementation_that_says_by_a_function_what_it_supports_is_asked_there() -> None:
    found = sandboxed_executor.load_sandboxed(f"{HERE}/declared_kernel.py:IMPLEMENTATION", None, LIMITS)
    try:
        assert found.supports(CASE) is None
        assert found.supports(dataclasses.replace(CASE, seed=7)) is None, "it is not told which values a case has"
        assert found.supports(dataclasses.replace(CASE, head_dim=32)) == "head_dim 32 is too large"
        assert list(found.variants) == ["other"]
        jobs = run_plan.plan_case(
            found, CASE, [CHECKS_BY_NAME["forward"], CHECKS_BY_NAME["invariance"], CHECKS_BY_NAME["parts"]]
        ).jobs
        judged = Runner(Settings()).run(jobs)
        assert {record.verdict for record in judged if record.observable == "out"} == {records.PASS}
        assert [r.verdict for r in judged if r.observable == "out.other"] == [records.FAIL]
    finally:
        create_process(found).end()


@pytest.mark.parametrize(
    "check",
    [
        *("program", "front_end", "poison"),
        *(pytest.param(check, marks=pytest.mark.nightly) for check in ("transforms", "calls", "sharding", "forms")),
    ],
)
def test_what_is_found_is_what_is_found_in_the_judges_process(check: str) -> None:
    name = f"{HERE.parent}/kernels/naive.py:attention"
    here, there = (KernelOptions(in_process=apart).find(name) for apart in (True, False))
    planned = run_plan.plan_run([here], level="quick", checks=[CHECKS_BY_NAME[check]]).jobs
    case = next(job.case for job in planned if check != "forms" or job.case.scale is not None)
    both = []
    for implementation in (here, there):
        found = Runner(Settings()).run(run_plan.plan_case(implementation, case, [CHECKS_BY_NAME[check]]).jobs)
        both.append([msgspec.structs.replace(record, seconds=0.0) for record in found])
    create_process(there).end()
    assert both[0] == both[1]
    assert both[0]


@pytest.mark.parametrize("name", ["nothing_here", "right_there"])
def test_a_kernel_that_does_not_load_is_one_line(name: str, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("raise RuntimeError('line one\\nline two')\n")
    source = (
        f"{HERE}/misbehaving_kernels.py:nothing_here" if name == "nothing_here" else f"{tmp_path}/broken.py:attention"
    )
    with pytest.raises(implementation_registry.ImplementationNotFound) as raised:
        KernelOptions().find(source)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("what", ["raise BrokenPipeError('gone')", "os._exit(0)"])
def test_what_cannot_say_what_it_supports_is_an_error_of_the_case(what: str, tmp_path: Path) -> None:
    (tmp_path / "mute.py").write_text(
        "import dataclasses, os\n"
        "from tests.sandbox import declared_kernel\n"
        f"def supports(case):\n    {what}\n"
        "attention = dataclasses.replace(declared_kernel.IMPLEMENTATION, supports_case=supports)\n"
    )
    found = KernelOptions().find(f"{tmp_path}/mute.py:attention")
    with pytest.raises(implementation_registry.ImplementationNotFound, match="cannot say whether it supports"):
        run_plan.plan_case(found, CASE)
    (record,) = Runner(Settings()).run([Job(found, CASE, (CHECKS_BY_NAME["forward"],))])
    create_process(found).end()
    assert (record.check, record.verdict) == ("support", records.ERROR)


def test_what_is_supported_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "once.py").write_text(
        "import dataclasses\n"
        "from tests.sandbox import declared_kernel\n"
        "asked = []\n"
        "def supports(case):\n    asked.append(case)\n    return 'no more' if len(asked) > 1 else None\n"
        "attention = dataclasses.replace(declared_kernel.IMPLEMENTATION, supports_case=supports)\n"
    )
    found = KernelOptions().find(f"{tmp_path}/once.py:attention")
    get_message = [found.supports(case) for case in (CASE, CASE, dataclasses.replace(CASE, batch=CASE.batch + 1))]
    create_process(found).end()
    assert get_message == [None, None, "no more"]


@pytest.mark.long
def test_a_folder_of_any_depth_is_removed(find: Find) -> None:
    implementation = find("digs")
    (running,) = create_process(implementation)._running
    with contextlib.suppress(ProcessLost):  # more nested folders than are measured
        sandboxed_executor.create_executor(implementation).forward(draw_problem(CASE))
    create_process(implementation).end()
    assert not Path(running._scratch.path).exists()


def test_what_a_kernel_forks_does_not_answer_for_it(find: Find) -> None:
    implementation, problem = find("forks"), draw_problem(CASE)
    apart = sandboxed_executor.create_executor(implementation)
    expected = sandboxed_executor.create_executor(find("plain")).forward(problem).values["out"]
    for _ in range(2):
        assert np.array_equal(apart.forward(problem).values["out"], expected)


@pytest.mark.long
def test_a_kernel_that_does_not_read_is_too_slow(find: Find) -> None:
    apart = sandboxed_executor.create_executor(find("answers_ahead", Limits(timeout=3.0, memory=LIMITS.memory)))
    large = draw_problem(Case(q_length=256, kv_length=256, head_dim=1024, v_head_dim=1024))
    apart.forward(draw_problem(CASE))
    with pytest.raises(kernel_process.CallTimeout, match="does not read"):
        apart.forward(large)


@pytest.mark.long
def test_a_process_that_never_begins_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    forked_process._disconnect()
    forked_process.start_server()
    _, server = forked_process._started_servers[-1]
    server.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(kernel_process, "_MIN_LOAD_SECONDS", 1.0)
    monkeypatch.setattr(kernel_process, "_END_SECONDS", 0.1)
    with pytest.raises(implementation_registry.ImplementationNotFound, match="did not return within 1 s"):
        sandboxed_executor.load_sandboxed(
            f"{HERE}/misbehaving_kernels.py:plain", None, Limits(timeout=1.0, memory=2**40)
        )
    forked_process._disconnect()
    server.kill()


def test_a_file_of_a_package_that_imports_beside_itself_is_told_how_to_be_named(tmp_path: Path) -> None:
    (tmp_path / "flash.py").write_text("from .other import attention\n")
    with pytest.raises(implementation_registry.ImplementationNotFound, match="a module of a package goes by its name"):
        KernelOptions().find(f"{tmp_path}/flash.py:attention")


def test_a_kernel_that_reads_arguments_as_it_is_imported_gets_none(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import argparse\nfrom tests.sandbox.misbehaving_kernels import right as attention\n"
        "argparse.ArgumentParser().parse_args()\n"
    )
    create_process(KernelOptions().find(f"{tmp_path}/script.py:attention")).end()
