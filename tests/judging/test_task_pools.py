"""Pools over executors: how many tasks are in flight, what is cancelled, what a broken or different process says."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import multiprocessing
import os
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest

from conformance.judging import remote_call
from conformance.judging.remote_call import Conditions, WorkerMismatch
from conformance.judging.task_pools import ExecutorFailed, ExecutorPool, WorkerGroup, build_pool
from conformance.session.remote_pools import build_conditions

HERE = build_conditions(())


class GivenUpError(Exception):
    """Stands for the error by which a cluster gives up a task that killed its workers."""


def double(number: int) -> int:
    return 2 * number


def end_process(number: int) -> int:
    os._exit(1)


def give_up_odd(numbers: tuple[int, ...]) -> tuple[int, ...]:
    if any(number % 2 for number in numbers):
        raise GivenUpError
    return numbers


def run(pool: ExecutorPool, tasks: Iterable[object], do: object, **options: object) -> list[object]:
    results: list[object] = []
    defaults = {
        "on_result": lambda task, result: results.append(result),
        "split": lambda task: (task,),
        "on_lost": lambda task: results.append(("lost", task)),
    }
    pool.run_tasks(tasks, do, **(defaults | options))  # type: ignore[arg-type] # of several types
    return results


def build_thread_pool(executor: concurrent.futures.Executor, conditions: Conditions = HERE) -> ExecutorPool:
    pool = build_pool(executor, conditions, workers=1)
    assert isinstance(pool, ExecutorPool)
    return pool


def test_all_tasks_run_once() -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        assert set(run(build_thread_pool(executor), range(9), double)) == set(range(0, 18, 2))


class CountsSubmissions(concurrent.futures.Executor):
    """An executor without processes: tasks wait until the test ends them."""

    def __init__(self) -> None:
        self.waiting: list[concurrent.futures.Future[int]] = []

    def submit(self, *call: object, **options: object) -> concurrent.futures.Future[int]:  # type: ignore[override] # of any type
        future: concurrent.futures.Future[int] = concurrent.futures.Future()
        self.waiting.append(future)
        if len(self.waiting) == 1:
            future.set_result(0)
        return future


def test_few_tasks_are_in_flight_and_an_exception_cancels_those_that_have_not_begun() -> None:
    executor = CountsSubmissions()

    def stop(task: object, result: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(build_thread_pool(executor), range(1000), double, on_result=stop)
    assert len(executor.waiting) < 10
    assert all(future.cancelled() for future in executor.waiting[1:])


def test_a_task_that_is_given_up_is_split_and_only_its_bad_part_is_lost() -> None:
    with concurrent.futures.ThreadPoolExecutor(2) as executor:
        pool = dataclasses.replace(build_thread_pool(executor), losses=(GivenUpError,))
        results = run(pool, [(2, 3), (4, 6)], give_up_odd, split=lambda task: ((number,) for number in task))
    assert set(results) == {(4, 6), (2,), ("lost", (3,))}


def test_tasks_of_a_platform_go_to_its_workers_and_to_all_others_without_any() -> None:
    with (
        concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="base") as base,
        concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="gpu") as gpu,
    ):
        groups = {"": WorkerGroup(base, HERE, lambda: 1), "gpu": WorkerGroup(gpu, HERE, lambda: 1)}
        results = run(ExecutorPool(groups), ["", "gpu", "tpu"], name_thread, find_platform=lambda task: task)
    assert sorted(map(str, results)) == ["base for ", "base for tpu", "gpu for gpu"]


def name_thread(platform: str) -> str:
    return f"{threading.current_thread().name.partition('_')[0]} for {platform}"


def test_a_broken_executor_is_an_error_that_says_how_to_find_the_job() -> None:
    context = multiprocessing.get_context("spawn")
    with (
        concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as executor,
        pytest.raises(ExecutorFailed, match="--jobs"),
    ):
        run(build_thread_pool(executor), [1], end_process)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"facts": {**HERE.facts, "jax": "0.0.1"}}, "jax"),
        ({"facts": {**HERE.facts, f"{remote_call.SOURCE_OF}kernel.py:f": "abc"}}, "kernel.py:f"),
        ({"folder": "/no/such/folder"}, "/no/such/folder"),
    ],
)
def test_a_process_that_differs_judges_nothing_and_says_who_and_what(change: dict[str, object], named: str) -> None:
    conditions = dataclasses.replace(HERE, run="other", **change)  # type: ignore[arg-type] # of several types
    with concurrent.futures.ThreadPoolExecutor(1) as executor, pytest.raises(WorkerMismatch, match=named) as caught:
        run(build_thread_pool(executor, conditions), [1], double)
    assert str(os.getpid()) in str(caught.value)


def test_the_commit_and_what_another_platform_has_may_differ() -> None:
    facts = {**HERE.facts, "commit": "other", "backend": "gpu"}
    assert remote_call.describe_mismatch(HERE, facts, "w")
    assert not remote_call.describe_mismatch(dataclasses.replace(HERE, ignored=frozenset({"backend"})), facts, "w")


def test_the_folder_of_the_process_is_as_before(tmp_path: Path) -> None:
    before = Path.cwd()
    conditions = dataclasses.replace(HERE, run="elsewhere", folder=str(tmp_path))
    assert remote_call.call_remotely(remote_call.pack_call(find_folder, 0), conditions) == str(tmp_path)
    assert Path.cwd() == before


def find_folder(argument: int) -> str:
    return os.getcwd()


def test_a_new_run_drops_what_the_last_one_left(monkeypatch: pytest.MonkeyPatch) -> None:
    dropped: list[int] = []
    monkeypatch.setattr(remote_call, "_on_new_run", [lambda: dropped.append(1)])
    for run_id in ("a", "a", "b"):
        remote_call.call_remotely(remote_call.pack_call(double, 1), dataclasses.replace(HERE, run=run_id))
    assert len(dropped) == 2
