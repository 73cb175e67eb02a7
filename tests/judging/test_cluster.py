"""A Dask cluster of two workers judges as this process does, also when a worker dies in the middle."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import multiprocessing
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from conformance.judging import cluster, task_pools
from conformance.session.failures import CannotJudge
from conformance.session.job_judging import ProgressDisplay, show_no_progress
from conformance.session.remote_pools import build_conditions
from conformance.session.resolved_run import Caller
from conformance.session.run_result import SessionResult
from conformance.session.run_spec import RunSpec
from conformance.session.session import run_session
from reports.records import COMPLETE, ERROR, FAILED, PASS, Record, read_jsonl
from tests.bank.__main__ import main as measure_bank
from tests.commands.kernel_folder import run_cli
from tests.process_helpers import COMMAND_TIMEOUT, kill_on_exit, wait_until

pytestmark = pytest.mark.long
dask = pytest.importorskip("dask")
distributed = pytest.importorskip("distributed")

KERNEL = """
import os, signal

import jax.numpy as jnp
from jax.nn import softmax


def attention(q, k, v):
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    x = jnp.einsum("btnh,bsnh->bnts", q, k) * q.shape[-1] ** -0.5
    return jnp.einsum("bnts,bsnh->btnh", softmax(x), v)


def wrong(q, k, v):
    return attention(q, k, v) * (1.01 if q.shape[1] == 1 else 1)


def killing(q, k, v):
    if q.shape[1] == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return attention(q, k, v)
"""
ROOT = Path(__file__).parents[2]
FEW = "train/f32/B1.T*.K1.*/full/*"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("cluster")
    (made / "kernel.py").write_text(KERNEL)
    return made


@pytest.fixture(autouse=True)
def _wait_long(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Enter the folder, and let connections take as long as a busy machine needs."""
    monkeypatch.chdir(folder)
    for module, name in (
        (cluster, "_CONNECT_SECONDS"),
        (cluster, "_WORKER_SECONDS"),
        (task_pools, "_NO_WORKER_SECONDS"),
    ):
        monkeypatch.setattr(module, name, COMMAND_TIMEOUT)
    with dask.config.set({"distributed.comm.timeouts.connect": COMMAND_TIMEOUT}):
        yield


SETTINGS = {
    "DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT": f"{COMMAND_TIMEOUT}s",
    "DASK_DISTRIBUTED__COMM__TIMEOUTS__TCP": f"{COMMAND_TIMEOUT}s",
    "DASK_DISTRIBUTED__SCHEDULER__WORKER_TTL": f"{COMMAND_TIMEOUT}s",
    # A job that kills its worker is given up at once: each restart of a worker takes seconds.
    "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "0",
}
"""Settings of the scheduler and the workers, for a busy machine."""


@functools.cache
def read_commands() -> tuple[str, str, str]:
    """Return the commands of the how-to page: start the scheduler, start two workers, judge."""
    page = (ROOT / "docs" / "how-to" / "cluster.md").read_text()
    blocks = [block.strip() for block in re.findall(r"```sh[^\n]*\n(.*?)```", page, flags=re.DOTALL)]
    scheduler, workers, judging = (block for block in blocks if block.startswith(("dask", "python")))
    return scheduler, workers, judging


def build_environ() -> dict[str, str]:
    return os.environ | SETTINGS | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


@contextlib.contextmanager
def start_command(command: str, folder: Path, log: Path) -> Iterator[subprocess.Popen[str]]:
    """Run a `dask` command of the page in a folder until the block ends; its output goes to a file."""
    assert command.startswith("dask ")
    with (
        log.open("w") as output,
        kill_on_exit(
            subprocess.Popen(
                [sys.executable, "-m", *shlex.split(command)],
                cwd=folder,
                env=build_environ(),
                stdout=output,
                stderr=output,
                text=True,
                start_new_session=True,
            )
        ) as process,
    ):
        yield process


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    """Start a scheduler and two workers once, as the how-to page says, and return the address of the scheduler."""
    scheduler, workers, _ = read_commands()
    file, log = folder / "scheduler.json", folder / "scheduler.log"
    private = scheduler.replace("scheduler ", "scheduler --host=127.0.0.1 --port=0 --no-dashboard ", 1)
    with start_command(private, folder, log) as first:
        wait_until(lambda: file.is_file() and file.read_text().rstrip().endswith("}"), first, COMMAND_TIMEOUT)
        found = json.loads(file.read_text())["address"]
        with start_command(workers, folder, folder / "workers.log"):
            yield found


def wait_for_workers(address: str) -> None:
    """Wait until both workers are there."""
    with distributed.Client(address, set_as_default=False, timeout=COMMAND_TIMEOUT) as client:
        client.wait_for_workers(2, timeout=COMMAND_TIMEOUT)


def judge(name: str, address: str | None = None, **options: Any) -> SessionResult:
    show = options.pop("show_progress", show_no_progress)
    executor, file = options.pop("executor", None), options.pop("file", "kernel.py")
    values: dict[str, Any] = {
        "cases": FEW,
        "checks": ("forward",),
        "confirm_seconds": 0.0,
        "diagnose_seconds": 0.0,
    } | options
    return run_session(
        RunSpec(implementations=(f"{file}:{name}",), cluster=address, **values),
        Caller(executor=executor),
        show_progress=show,
    )


def strip(records: Sequence[Record]) -> dict[tuple[str, ...], dict[str, Any]]:
    """Return the fields of each record, by its key, without those that say where and how fast it was judged."""
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for record in records:
        fields = msgspec.structs.asdict(record)
        del fields["host"], fields["seconds"]
        fields["figures"] = {name: value for name, value in record.figures.items() if "seconds" not in name}
        found[record.key] = fields
    assert len(found) == len(records)
    return found


def differ(one: Sequence[Record], other: Sequence[Record]) -> dict[tuple[str, ...], Any]:
    """Return, by key, the fields in which two lists of records differ; empty if they are equal."""
    first, second = strip(one), strip(other)
    pairs = {key: (first.get(key, {}), second.get(key, {})) for key in {*first, *second}}
    return {
        key: {name: (a.get(name), b.get(name)) for name in {*a, *b} if a.get(name) != b.get(name)}
        for key, (a, b) in pairs.items()
        if a != b
    }


@functools.cache
def judge_here(name: str) -> SessionResult:
    """Judge in worker processes of this machine. They start as a cluster's do, with one thread for NumPy's products.

    Products of this process may use several threads, which sum in another order.
    """
    return judge(name, jobs=2)


def test_records_are_those_of_a_run_without_a_cluster(address: str) -> None:
    there, here = judge("wrong", address), judge_here("wrong")
    assert there.how == COMPLETE, there.reason
    assert not differ(there.records, here.records)
    assert there.exit_code == here.exit_code
    assert all(record.host for record in there.records)
    assert any(socket.gethostname() in note for note in there.info.notes)
    assert there.recorded.run is not None
    assert here.recorded.run is not None
    assert there.recorded.run.provenance("kernel.py:wrong") == here.recorded.run.provenance("kernel.py:wrong")


class KillsOneWorker:
    """A progress display that kills a worker as soon as the first job is judged."""

    def __init__(self, address: str) -> None:
        self._address, self.killed = address, 0

    def advance(self, judged: Sequence[Record]) -> None:
        if not self.killed:
            with distributed.Client(self._address, set_as_default=False) as client:
                self.killed = next(iter(client.run(os.getpid).values()))
            os.kill(self.killed, signal.SIGKILL)


def test_jobs_of_a_worker_that_is_killed_in_the_middle_are_judged_elsewhere(address: str) -> None:
    display = KillsOneWorker(address)

    @contextlib.contextmanager
    def show(total: int, finished: Sequence[Sequence[Record]]) -> Iterator[ProgressDisplay]:
        yield display

    # With fail_fast each job is a task of its own, so that some are left when the worker dies.
    there = judge("attention", address, show_progress=show, fail_fast=True)
    assert display.killed
    assert there.how == COMPLETE, there.reason
    assert not differ(there.records, judge_here("attention").records)


def test_a_job_that_kills_its_worker_each_time_is_an_error_and_the_others_are_judged(address: str) -> None:
    result = judge("killing", address, in_process=True)
    assert result.how == COMPLETE, result.reason
    verdicts = {(".T1." in record.case, record.verdict) for record in result.records}
    assert verdicts == {(True, ERROR), (False, PASS)}


def test_an_edited_kernel_is_judged_as_it_is(address: str, folder: Path) -> None:
    edited = folder / "edited.py"
    codes = []
    for text in (KERNEL, KERNEL.replace("** -0.5", "** -0.4")):
        edited.write_text(text)
        codes.append(judge("attention", address, file="edited.py").exit_code)
    assert codes == [0, 1]


def test_an_edited_kernel_that_a_worker_has_imported_is_refused(folder: Path) -> None:
    edited = folder / "imported.py"
    results = []
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        for text in (KERNEL, KERNEL.replace("** -0.5", "** -0.4")):
            edited.write_text(text)
            results.append(judge("attention", executor=executor, file="imported.py", in_process=True))
    assert [result.how for result in results] == [COMPLETE, FAILED]
    assert "restart the worker" in results[1].reason


def test_a_worker_that_differs_is_named_before_anything_is_judged(address: str) -> None:
    conditions = build_conditions(("kernel.py:attention",))
    other = dataclasses.replace(conditions, facts={**conditions.facts, "jax": "0.0.1"})
    with pytest.raises(cluster.ClusterError, match=r"worker tcp://.* jax is .* 0\.0\.1"):
        cluster.connect(address, other)
    with pytest.raises(cluster.ClusterError, match=r"worker tcp://.*/no/such/folder"):
        cluster.connect(address, dataclasses.replace(conditions, folder="/no/such/folder"))


@pytest.mark.parametrize(
    ("resources", "named"),
    [
        ([{"GPU": 1}], "GPU.*CPU"),
        ([{"GPU": 1, "CPU": 1}], "GPU"),
        ([{"GPU": 1}, {}], "--resources=CPU=1"),
        ([{"GPU": 1}, {"CPU": 1}], "to take jobs for gpu"),
    ],
)
def test_resources_that_mislead_are_refused(resources: list[dict[str, int]], named: str) -> None:
    specification = {
        number: {"cls": distributed.Worker, "options": {"nthreads": 1, "resources": each}}
        for number, each in enumerate(resources)
    }
    scheduler = {"cls": distributed.Scheduler, "options": {"dashboard_address": ":0", "port": 0}}
    with (
        distributed.SpecCluster(workers=specification, scheduler=scheduler) as started,
        pytest.raises(cluster.ClusterError, match=named),
    ):
        cluster.connect(started.scheduler_address, build_conditions(()))


def test_a_cluster_that_is_not_there_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_CONNECT_SECONDS", 1)
    for address in ("tcp://127.0.0.1:1", "missing.json"):
        with pytest.raises(CannotJudge, match=address):
            judge("attention", address)


def test_objects_cannot_be_judged_elsewhere() -> None:
    with pytest.raises(CannotJudge, match="jobs"):
        RunSpec(implementations=("dot_product",), cluster="tcp://127.0.0.1:1", jobs=2)


def test_an_executor_of_spawned_processes_judges_as_this_process_does() -> None:
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as executor:
        there = judge("wrong", executor=executor)
    assert there.how == COMPLETE, there.reason
    assert not differ(there.records, judge_here("wrong").records)


def test_an_executor_that_breaks_keeps_what_was_judged() -> None:
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as executor:
        result = judge("killing", executor=executor, in_process=True, fail_fast=True)
    assert (result.how, result.exit_code) == (FAILED, 2)
    assert "--jobs" in result.reason


def test_the_commands_of_the_how_to_page_work(address: str, folder: Path) -> None:
    wait_for_workers(address)
    _, _, judging = read_commands()
    done = subprocess.run(
        ["bash", "-c", f"{judging} --cases='{FEW}' --check=forward"],
        cwd=folder,
        env=build_environ(),
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "2 CPU workers" in done.stderr
    assert (folder / "report.html").is_file()


def test_explore_draws_the_same_cases_as_without_a_cluster(address: str, folder: Path) -> None:
    words = ("explore", "--impl=kernel.py:attention", "--profile=ci", "--examples=3", "--cases=train/f32")
    assert run_cli(*words, f"--cluster={address}", "--json=there.jsonl") == 0
    assert run_cli(*words, "--json=here.jsonl") == 0
    there, here = (read_jsonl(folder / name) for name in ("there.jsonl", "here.jsonl"))
    assert all(record.host for record in there)
    assert not any(record.host for record in here)
    assert {record.case for record in there} == {record.case for record in here}
    assert {record.key: record.verdict for record in there} == {record.key: record.verdict for record in here}


def test_the_bank_examines_planted_bugs_on_the_workers(
    address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)  # the bank is found from there, on the workers too
    assert measure_bank(["--bug=returns-zeros", "--level=smoke", f"--cluster={address}"]) == 0
    assert "returns-zeros" in capsys.readouterr().out
