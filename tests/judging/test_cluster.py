"""A Dask cluster of two workers judges as this process does, also when a worker dies in the middle."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from conformance.judging import cluster
from conformance.records import ERROR, PASS, Record
from conformance.runs import COMPLETE, FAILED
from conformance.session.failures import CannotJudge
from conformance.session.remote_pools import build_conditions
from conformance.session.run_options import RunOptions
from conformance.session.session import ProgressDisplay, SessionResult, run_session, show_no_progress
from tests.process_helpers import COMMAND_TIMEOUT, kill_on_exit

pytestmark = pytest.mark.long
dask = pytest.importorskip("dask")
distributed = pytest.importorskip("distributed")

KERNEL = """
import os, signal

import jax.numpy as jnp
from jax.nn import softmax


def attention(q, k, v):
    x = jnp.einsum("btnh,bsnh->bnts", q, k) * q.shape[-1] ** -0.5
    return jnp.einsum("bnts,bsnh->btnh", softmax(x), v)


def wrong(q, k, v):
    return attention(q, k, v) * (1.01 if q.shape[1] == 1 else 1)


def killing(q, k, v):
    if q.shape[1] == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return attention(q, k, v)
"""
FEW = "train/f32/B1.T*.K1.*/full/*"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("cluster")
    (made / "kernel.py").write_text(KERNEL)
    return made


@pytest.fixture(autouse=True)
def _enter(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


@contextlib.contextmanager
def start(**options: Any) -> Iterator[Any]:
    options = {"n_workers": 2, "threads_per_worker": 1, "processes": True} | options
    # A job that kills its worker is given up at once: each restart of a worker takes seconds.
    with (
        dask.config.set({"distributed.scheduler.allowed-failures": 0}),
        distributed.LocalCluster(**options, dashboard_address=None) as started,
    ):
        yield started


@pytest.fixture(scope="module")
def workers() -> Iterator[Any]:
    with start() as started:
        yield started


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
        RunOptions(implementations=(f"{file}:{name}",), cluster=address, **values),
        show_progress=show,
        executor=executor,
    )


def strip(records: Sequence[Record]) -> dict[tuple[str, ...], dict[str, Any]]:
    """Return the fields of each record, by its key, without those that say where and how fast it was judged."""
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for record in records:
        fields = dataclasses.asdict(record)
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


def test_records_are_those_of_a_run_without_a_cluster(workers: Any) -> None:
    there, here = judge("wrong", workers.scheduler_address), judge_here("wrong")
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

    def __init__(self, started: Any) -> None:
        self._started, self.killed = started, 0

    def advance(self, judged: Sequence[Record]) -> None:
        if not self.killed:
            with distributed.Client(self._started.scheduler_address, set_as_default=False) as client:
                self.killed = next(iter(client.run(os.getpid).values()))
            os.kill(self.killed, signal.SIGKILL)


def test_jobs_of_a_worker_that_is_killed_in_the_middle_are_judged_elsewhere(workers: Any) -> None:
    display = KillsOneWorker(workers)

    @contextlib.contextmanager
    def show(total: int, finished: Sequence[Sequence[Record]]) -> Iterator[ProgressDisplay]:
        yield display

    # With fail_fast each job is a task of its own, so that some are left when the worker dies.
    there = judge("attention", workers.scheduler_address, show_progress=show, fail_fast=True)
    assert display.killed
    assert there.how == COMPLETE, there.reason
    assert not differ(there.records, judge_here("attention").records)


def test_a_job_that_kills_its_worker_each_time_is_an_error_and_the_others_are_judged(workers: Any) -> None:
    result = judge("killing", workers.scheduler_address, in_process=True)
    assert result.how == COMPLETE, result.reason
    verdicts = {(".T1." in record.case, record.verdict) for record in result.records}
    assert verdicts == {(True, ERROR), (False, PASS)}


def test_an_edited_kernel_is_judged_as_it_is(workers: Any, folder: Path) -> None:
    edited = folder / "edited.py"
    codes = []
    for text in (KERNEL, KERNEL.replace("** -0.5", "** -0.4")):
        edited.write_text(text)
        codes.append(judge("attention", workers.scheduler_address, file="edited.py").exit_code)
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


def test_a_worker_that_differs_is_named_before_anything_is_judged(workers: Any) -> None:
    conditions = build_conditions(("kernel.py:attention",))
    other = dataclasses.replace(conditions, facts={**conditions.facts, "jax": "0.0.1"})
    with pytest.raises(cluster.ClusterError, match=r"worker tcp://.* jax is .* 0\.0\.1"):
        cluster.connect(workers.scheduler_address, other)
    with pytest.raises(cluster.ClusterError, match=r"worker tcp://.*/no/such/folder"):
        cluster.connect(workers.scheduler_address, dataclasses.replace(conditions, folder="/no/such/folder"))


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
    for address in ("tcp://127.0.0.1:1", "scheduler.json"):
        with pytest.raises(CannotJudge, match=address):
            judge("attention", address)


def test_objects_cannot_be_judged_elsewhere() -> None:
    with pytest.raises(CannotJudge, match="jobs"):
        RunOptions(implementations=("dot_product",), cluster="tcp://127.0.0.1:1", jobs=2)


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


def test_the_commands_of_the_how_to_page_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kernel.py").write_text(KERNEL)
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "cluster.md").read_text()
    scheduler, worker, run = (
        block for block in re.findall(r"```sh\n(.*?)```", page, flags=re.DOTALL) if not block.startswith(("pip", "#!"))
    )
    environ = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    with contextlib.ExitStack() as stack:
        for command in (scheduler.replace("scheduler ", "scheduler --port=0 --no-dashboard ", 1), worker):
            stack.enter_context(
                kill_on_exit(
                    subprocess.Popen(
                        ["bash", "-c", f"exec {command}"],
                        env=environ,
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL,
                        text=True,
                        start_new_session=True,
                    )
                )
            )
            deadline = time.monotonic() + COMMAND_TIMEOUT
            while not (tmp_path / "scheduler.json").is_file() and time.monotonic() < deadline:
                time.sleep(0.1)
        few = f"{run.strip()} --cases='{FEW}' --check=forward"
        done = subprocess.run(
            ["bash", "-c", few], env=environ, capture_output=True, text=True, timeout=COMMAND_TIMEOUT, check=False
        )
    assert done.returncode == 0, done.stderr
    assert "CPU worker" in done.stderr
    assert (tmp_path / "report.html").is_file()
