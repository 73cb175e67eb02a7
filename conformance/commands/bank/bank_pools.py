"""Open the pool of processes that examine planted bugs: worker processes of this machine, or a Dask cluster."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator

from conformance.judging.task_pools import LocalPool, TaskPool
from conformance.session.failures import CannotJudge
from conformance.session.remote_pools import open_cluster


@contextlib.contextmanager
def open_bank_pool(arguments: argparse.Namespace) -> Iterator[TaskPool]:
    """Open the pool that `--cluster` or `--jobs` names, and close it after the block. Raises `CannotJudge`."""
    if arguments.cluster is None:
        yield LocalPool(arguments.jobs or os.cpu_count() or 1)
        return
    if arguments.jobs is not None:
        raise CannotJudge("--cluster and --jobs contradict each other: the cluster has its own number of workers")
    remote = open_cluster(arguments.cluster)
    try:
        yield remote.pool
    finally:
        remote.close()
