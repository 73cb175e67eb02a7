"""Open the pool of processes that judge for this one: a Dask cluster, or an executor that the caller gives."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import secrets
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from conformance.judging import cluster
from conformance.judging.remote_call import Conditions, describe_here
from conformance.judging.task_pools import TaskPool, build_pool
from conformance.session.failures import CannotJudge
from conformance.session.run_spec import RunSpec
from impls.contract.implementation import Implementation


@dataclasses.dataclass(frozen=True)
class RemotePool:
    """Processes that judge for this one, with facts about their environment and notes for the run record."""

    pool: TaskPool
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()
    close: Callable[[], None] = lambda: None


def open_pool(
    options: RunSpec,
    implementations: Iterable[Implementation],
    executor: concurrent.futures.Executor | None,
    *,
    is_given: bool,
) -> RemotePool:
    """Open the cluster that the options name, or the executor of the caller.

    `is_given` says that the implementations are objects of the caller, which other processes cannot find by name.
    Raises `CannotJudge`, with a message of one line, if the cluster or executor cannot judge for this process.
    """
    if is_given:
        raise CannotJudge("other processes find implementations by name: give names in the options, not objects")
    if executor is not None and options.cluster is not None:
        raise CannotJudge("an executor and a cluster contradict each other: give one of them")
    names = tuple(dict.fromkeys(each.name for each in implementations))
    if executor is not None:
        return RemotePool(build_pool(executor, build_conditions(names), options.jobs))
    assert options.cluster is not None
    return open_cluster(options.cluster, names)


def open_cluster(address: str, names: tuple[str, ...] = ()) -> RemotePool:
    """Connect to a Dask cluster whose workers judge the named implementations. Raises `CannotJudge`."""
    try:
        found = cluster.connect(address, build_conditions(names))
    except cluster.ClusterError as error:
        raise CannotJudge(str(error)) from error
    return RemotePool(found.pool, found.environment, (found.description,), found.close)


def build_conditions(names: tuple[str, ...]) -> Conditions:
    """Build the conditions under which another process may judge the named implementations for this one."""
    return Conditions(secrets.token_hex(4), str(Path.cwd()), describe_here(names), names)
