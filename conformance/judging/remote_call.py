"""Call functions in processes that an executor started, such as the workers of a cluster.

`call_remotely` is what the executor runs. It prepares the process as a process of this project's own would be: XLA's
flags are set before JAX is imported, and the names of our packages are claimed. So this module imports neither JAX nor
a check, and the function and its argument travel as bytes, which are unpickled after that.

Then it compares the process with the one that sends the work: the versions of this project, of JAX and of NumPy, and
the source of each kernel. A process that differs raises `WorkerMismatch`, so that no record is made under other
conditions than its run says.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from conformance import environment, packages

_ONE_AT_A_TIME = threading.Lock()
"""Held during a call. Compiled programs and the current folder belong to the whole process, whatever its threads."""
SOURCE_OF = "source of "
"""The prefix of the name of a kernel's digest among the facts of a process."""
_XLA_FLAGS = "XLA_FLAGS"
# Facts that a reader wants and that do not decide a verdict: an installed copy has no commit.
_NOT_COMPARED = frozenset({"commit"})


class WorkerMismatch(Exception):
    """A process is not as the one that sends it work; the message is one line that names it and the difference."""


@dataclasses.dataclass(frozen=True)
class Conditions:
    """The conditions under which a process may judge for a run."""

    run: str  # the id of the run. What a process keeps from one call to the next is dropped when another run begins.
    folder: str  # the current folder of the process that sends the work. Kernels and settings are found in it.
    # Versions, flags and digests of sources by name, as they are in the process that sends the work.
    facts: Mapping[str, str]
    kernels: tuple[str, ...] = ()  # names of the kernels whose sources are among the facts
    ignored: frozenset[str] = frozenset()  # names of facts in which the process may differ


@dataclasses.dataclass
class _ProcessState:
    """The run that this process judges for, and whether it was compared with the process that sends the work."""

    run: str = ""
    compared: Conditions | None = None


_state = _ProcessState()
_on_new_run: list[Callable[[], None]] = []


def call_at_new_run(drop: Callable[[], None]) -> None:
    """Register a function that drops what a process keeps from one call to the next, such as loaded kernels."""
    _on_new_run.append(drop)


def pack_call(function: Callable[[Any], Any], argument: Any) -> bytes:
    """Return a function and its argument as bytes. Both are pickled, the function by its name."""
    return pickle.dumps((function, argument))


def call_remotely(packed: bytes, conditions: Conditions) -> Any:
    """Return what the packed function returns. Raises `WorkerMismatch` if this process may not judge for the run."""
    with _ONE_AT_A_TIME, _enter_folder(conditions.folder):
        _prepare(conditions)
        if _state.run != conditions.run:
            _drop_last_run()
            _state.run = conditions.run
        if _state.compared != conditions:
            _compare(conditions)
            _state.compared = conditions
        function, argument = pickle.loads(packed)
        return function(argument)


def describe_process(conditions: Conditions) -> dict[str, str]:
    """Return the facts of this process by name. Raises `WorkerMismatch` if it cannot judge at all."""
    with _ONE_AT_A_TIME, _enter_folder(conditions.folder):
        _prepare(conditions)
        return describe_here(conditions.kernels)


def describe_here(kernels: tuple[str, ...]) -> dict[str, str]:
    """Return versions, flags and devices of this process, and digests of this project's and the kernels' sources."""
    from conformance.execution import source_digests  # imported late: these load JAX
    from conformance.judging import provenance

    facts = environment.describe_environment() | provenance.describe_project()
    return facts | {f"{SOURCE_OF}{name}": " ".join(source_digests.describe_source(name)).strip() for name in kernels}


def describe_mismatch(conditions: Conditions, found: Mapping[str, str], worker: str) -> str:
    """Return one line that names a worker and what differs there; empty if it may judge for the run."""
    ignored = conditions.ignored | _NOT_COMPARED
    differences = [
        f"{name} is {found.get(name) or 'unknown'} there and {wanted or 'unknown'} here"
        for name, wanted in conditions.facts.items()
        if name not in ignored and found.get(name) != wanted
    ]
    if not differences:
        return ""
    return (
        f"worker {worker} differs from this process: {'; '.join(differences)}. Workers need the same versions, the "
        "same flags and the same files at the same place; restart a worker that began before a change"
    )


def drop_run() -> None:
    """End the kernels' processes and forget the run, unless this process is busy."""
    if _ONE_AT_A_TIME.acquire(blocking=False):
        try:
            _drop_last_run()
        finally:
            _ONE_AT_A_TIME.release()


def name_process() -> str:
    """Return a name of this process for messages: its host and its process id."""
    return f"{socket.gethostname()} (process {os.getpid()})"


def _compare(conditions: Conditions) -> None:
    if problem := describe_mismatch(conditions, describe_here(conditions.kernels), name_process()):
        raise WorkerMismatch(problem)


def _prepare(conditions: Conditions) -> None:
    """Prepare this process for judging, under the sender's XLA flags if XLA has not read any here yet."""
    if "jax" not in sys.modules:
        if _XLA_FLAGS in conditions.ignored:  # another platform, which has flags of its own
            environment.prepare_environment()
        elif flags := conditions.facts.get(_XLA_FLAGS):
            os.environ[_XLA_FLAGS] = flags
            environment.prepare_environment()
        else:  # the sender imported JAX before this project could set flags
            os.environ.pop(_XLA_FLAGS, None)
    try:
        packages.claim_names()
    except packages.NameTaken as error:
        raise WorkerMismatch(f"worker {name_process()} cannot judge: {error}") from error
    if reason := environment.find_disabled_jit():
        raise WorkerMismatch(f"worker {name_process()} cannot judge: {reason}")


@contextlib.contextmanager
def _enter_folder(folder: str) -> Any:
    """Make `folder` the current folder in the block. Raises `WorkerMismatch` if it does not exist here."""
    before = os.getcwd()
    try:
        os.chdir(folder)
    except OSError as error:
        raise WorkerMismatch(
            f"worker {name_process()} has no folder {folder} ({error.strerror}): kernels must be at the same place on "
            "every worker, on a shared file system or in the same image"
        ) from error
    try:
        yield
    finally:
        os.chdir(before)


def _drop_last_run() -> None:
    _state.run, _state.compared = "", None
    for drop in _on_new_run:
        drop()
