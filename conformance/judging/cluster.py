"""Judge on the workers of a Dask cluster (docs/how-to/cluster.md).

Kernels for an accelerator go to workers that declare its resource, `GPU` or `TPU`. Without such workers they are judged
as on a machine without the accelerator. All others go to workers of this process's platform, which then declare
theirs too (`CPU=1`). Nothing is uploaded: workers find the kernel, `pyproject.toml` and the current folder where this
process has them. A worker must have this process's versions of Python, JAX, NumPy and this project, its `XLA_FLAGS`,
and the same source of each kernel. `connect` compares them, and a worker that joins later is compared before its first
job. Dask gives up a job that lost four workers (`distributed.scheduler.allowed-failures`). Such a job is tried once
more with no other job in flight, and if that fails too it has an `error` record.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from conformance.judging.remote_call import Conditions, describe_mismatch, describe_process, drop_run
from conformance.judging.task_pools import ExecutorPool, WorkerGroup

_CONNECT_SECONDS = 30
_WORKER_SECONDS = 60  # how long to wait for the first worker: a batch system may start it a little later
_ACCELERATORS = ("gpu", "tpu")
_PLATFORMS = ("cpu", *_ACCELERATORS)
# Facts in which the workers of another platform differ from this process. The run record has theirs (`environment`).
_FACTS_OF_PLATFORM = ("backend", "devices", "XLA_FLAGS", "system", "libtpu")
_INSTALL = 'pip install "attention-conformance[cluster]"'


class ClusterError(Exception):
    """A cluster cannot be used; the message is one line that says why, and names the worker if one is the cause."""


@dataclasses.dataclass(frozen=True)
class Cluster:
    """A connection to a Dask cluster whose workers can judge for this process."""

    pool: ExecutorPool  # runs tasks on the workers
    # Facts for the run record: the devices and flags of workers on another platform, by platform.
    environment: Mapping[str, str]
    description: str  # one line that says how many workers there are, and where
    close: Callable[[], None]  # ends the connection, and the kernels' processes on the workers


def connect(address: str, conditions: Conditions) -> Cluster:
    """Connect to a cluster, and compare its workers with this process by `conditions`.

    `address` is the scheduler's, such as `tcp://host:8786`, or the path of its scheduler file. Raises `ClusterError` if
    the cluster cannot be reached, has no worker, or has a worker that cannot judge.
    """
    client = _open_client(address)
    try:
        return _inspect(client, address, conditions)
    except BaseException:  # Ctrl-C too: the connection is closed
        client.close(timeout=_CONNECT_SECONDS)
        raise


def _open_client(address: str) -> Any:
    try:
        import distributed  # imported late: it is optional, and takes a second
    except ImportError as error:
        raise ClusterError(f"--cluster needs dask.distributed ({error}): {_INSTALL}") from error
    # A closed connection is logged on several levels of Dask; the user gets one line from here.
    for name in ("distributed.client", "distributed.core", "distributed.comm"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    is_address = "://" in address or not (address.endswith(".json") or Path(address).is_file())
    if not is_address and not Path(address).is_file():
        raise ClusterError(f"--cluster={address}: there is no such scheduler file (`dask scheduler --scheduler-file`)")
    place = {"address": address} if is_address else {"scheduler_file": address}
    try:
        client = distributed.Client(**place, timeout=_CONNECT_SECONDS, set_as_default=False)
    except (OSError, ValueError) as error:  # a timeout is an OSError
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ClusterError(
            f"--cluster={address}: no scheduler answers ({reason}); give tcp://HOST:PORT as `dask scheduler` prints it"
        ) from error
    return client


def _inspect(client: Any, address: str, conditions: Conditions) -> Cluster:
    """Compare the workers of a cluster with this process, and build the pool."""
    try:
        client.wait_for_workers(1, timeout=_WORKER_SECONDS)
    except (TimeoutError, concurrent.futures.TimeoutError) as error:
        raise ClusterError(
            f"--cluster={address}: the scheduler has no worker after {_WORKER_SECONDS} s; start some with "
            f"`dask worker {address} --nthreads=1 --nworkers=N`"
        ) from error
    base = conditions.facts["backend"]
    workers = _list_workers(client)
    platforms = {worker: _find_platform(worker, info, base) for worker, info in workers.items()}
    _reject_ambiguous(platforms, workers, base)
    elsewhere = dataclasses.replace(conditions, ignored=frozenset(_FACTS_OF_PLATFORM))
    its_conditions = {worker: conditions if platforms[worker] == base else elsewhere for worker in workers}
    found: dict[str, Any] = {}
    for one in (conditions, elsewhere):
        if these := [worker for worker in workers if its_conditions[worker] is one]:
            found |= client.run(describe_process, one, workers=these, on_error="return")
    for worker, facts in found.items():
        where = f"{worker} ({workers[worker].get('name', '')})"
        if isinstance(facts, BaseException):
            raise ClusterError(f"worker {where} cannot judge: {_describe_error(facts)}")
        if facts["backend"] != platforms[worker]:
            raise ClusterError(
                f"worker {where} computes on {facts['backend']}, and is to take jobs for {platforms[worker]}: correct "
                "its --resources, or JAX's installation or JAX_PLATFORMS there"
            )
        if problem := describe_mismatch(its_conditions[worker], facts, where):
            raise ClusterError(problem)
    groups = {"": _build_group(client, base, conditions, is_declared=any(_declares(i, base) for i in workers.values()))}
    for platform in _ACCELERATORS:
        if platform != base and platform in platforms.values():
            groups[platform] = _build_group(client, platform, elsewhere, is_declared=True)
    import distributed

    def close() -> None:
        if client.status == "running":
            client.run(drop_run, on_error="ignore")
        client.close(timeout=_CONNECT_SECONDS)

    return Cluster(
        ExecutorPool(groups, losses=(distributed.KilledWorker,)),
        _describe_groups(found, platforms, base),
        _describe_workers(workers, platforms),
        close,
    )


def _list_workers(client: Any) -> dict[str, dict[str, Any]]:
    """Return what the scheduler knows of each worker, by address."""
    if client.status != "running":
        return {}
    found: dict[str, dict[str, Any]] = client.scheduler_info(n_workers=-1)["workers"]
    return found


def _declares(info: Mapping[str, Any], platform: str) -> bool:
    return bool(info.get("resources", {}).get(platform.upper()))


def _find_platform(worker: str, info: Mapping[str, Any], base: str) -> str:
    """Return the platform whose jobs a worker takes, by its declared resources; `base` if it declares none."""
    declared = [platform for platform in _PLATFORMS if _declares(info, platform)]
    if len(declared) > 1:
        names = " and ".join(platform.upper() for platform in declared)
        raise ClusterError(f"worker {worker} declares {names}: JAX computes on one platform, so declare one")
    return declared[0] if declared else base


def _reject_ambiguous(platforms: Mapping[str, str], workers: Mapping[str, Mapping[str, Any]], base: str) -> None:
    """Raise `ClusterError` if Dask could give jobs to workers of the wrong platform, or has no worker for them."""
    if base not in platforms.values():
        others = " and ".join(sorted({platform.upper() for platform in platforms.values()}))
        raise ClusterError(
            f"all workers declare {others}, and this process computes on {base.upper()}: start a worker without "
            f"an accelerator (--resources={base.upper()}=1), or run this command on a machine with one"
        )
    undeclared = [worker for worker, platform in platforms.items() if not _declares(workers[worker], platform)]
    if undeclared and len(set(platforms.values())) > 1:
        raise ClusterError(
            f"worker {undeclared[0]} declares no platform while others do: start it with --resources={base.upper()}=1, "
            "so that it gets no job for them and they get none of its jobs"
        )


def _build_group(client: Any, platform: str, conditions: Conditions, *, is_declared: bool) -> WorkerGroup:
    """Build the group of the workers of a platform. If they declare it, each of their jobs takes one unit of it."""
    resources = {platform.upper(): 1} if is_declared else None

    def count_workers() -> int:
        return sum(not is_declared or _declares(info, platform) for info in _list_workers(client).values())

    return WorkerGroup(client.get_executor(pure=False, resources=resources), conditions, count_workers)


def _describe_groups(found: Mapping[str, Mapping[str, str]], platforms: Mapping[str, str], base: str) -> dict[str, str]:
    """Describe the workers of other platforms for the run record: their systems, devices and flags."""
    described: dict[str, list[str]] = {}
    for worker, facts in found.items():
        if platforms[worker] != base:
            text = ", ".join(f"{name} {facts[name]}" for name in _FACTS_OF_PLATFORM if name != "backend")
            described.setdefault(f"{platforms[worker]} workers", []).append(text)
    return {name: "; ".join(sorted(set(texts))) for name, texts in sorted(described.items())}


def _describe_workers(workers: Mapping[str, Mapping[str, Any]], platforms: Mapping[str, str]) -> str:
    counts = [f"{sum(x == p for x in platforms.values())} {p.upper()}" for p in _PLATFORMS if p in platforms.values()]
    hosts: Sequence[str] = sorted({str(info.get("host", worker)) for worker, info in workers.items()})
    shown = ", ".join(hosts[:8]) + (f" and {len(hosts) - 8} more" if len(hosts) > 8 else "")
    return f"judging on {' and '.join(counts)} worker{'s' if len(workers) > 1 else ''} of a cluster, on {shown}"


def _describe_error(error: BaseException) -> str:
    """Describe in one line why a worker could not answer."""
    text = " ".join(str(error).split())
    if isinstance(error, ImportError):
        return f"{text}; install attention-conformance there, in the version that this process has"
    return text if type(error).__name__ == "WorkerMismatch" else f"{type(error).__name__}: {text}"
