"""Signals that stop the pytest gate: with and without pytest-xdist it ends with a verdict, a page and 128+n.

`KeyboardInterrupt` in the main process of pytest-xdist can come while that handles an event of a worker, and workers
that get Ctrl-C themselves are events too: both end in an internal error. So there a signal is only recorded, and stops
the loop where it waits for events. Workers begin with signals blocked, until they listen.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
import time
from collections.abc import Generator, Iterator
from typing import Any

import pytest

from conformance import interrupts
from conformance.fork_server import forked_process
from conformance.judging import exit_guard
from conformance.sandbox import scratch_folder

PLUGIN_NAME = "attention-conformance-stopping"
_POLL_SECONDS = 0.2


class StopSignals:
    """Listens to signals from before any `conftest.py` is imported until pytest returns its exit code."""

    def __init__(self) -> None:
        self._listening = contextlib.ExitStack()
        self._is_asked = False
        self._is_worker = False
        self._gateways: list[Any] = []
        self._errors = 2

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_load_initial_conftests(self, early_config: pytest.Config) -> Generator[None]:
        """Listen, if this run is to judge."""
        given = early_config.known_args_namespace
        asked = given.file_or_dir or early_config.getini("testpaths")
        if exit_guard.is_requested(asked, given.impl, given.conformance_cases):
            self._is_asked = True
            self._errors = os.dup(2)  # pytest captures the usual one
            self._listening.enter_context(interrupts.record_signals())
        return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        """Have a worker of pytest-xdist end at once: its signals have been blocked until here.

        Not by the environment: what a test of another session starts has the variables of that session's worker.
        """
        self._is_worker = hasattr(config, "workerinput")
        if self._is_asked and self._is_worker:
            interrupts.set_early_exit(_leave_worker)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, interrupts.STOP_SIGNALS)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_cmdline_main(self) -> Generator[None, int, int]:
        """Have the exit code name the signal."""
        if not self._is_asked:
            return (yield)
        try:
            code = yield
            return interrupts.resolve_exit_code(code)
        finally:
            self._listening.close()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionstart(self, session: pytest.Session) -> Generator[None]:
        """Start workers that no signal ends before they can say so."""
        if not self._is_asked or _find_dsession(session.config) is None:
            return (yield)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, interrupts.STOP_SIGNALS)
        try:
            return (yield)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_newgateway(self, gateway: Any) -> None:
        """Know the workers, and start no more of them once a signal has arrived."""
        self._gateways.append(gateway)
        if interrupts.get_received_signal() is not None:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """End the process at once if a signal arrives in the block, which loads JAX: nothing is judged yet."""
        if not self._is_asked or self._is_worker:
            yield
            return
        interrupts.set_early_exit(self._leave)
        try:
            yield
        finally:
            interrupts.set_early_exit(None)

    def _leave(self) -> None:
        os.write(self._errors, f"error: {interrupts.describe_signal()} before anything was judged\n".encode())
        forked_process.end_server()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection(self, session: pytest.Session) -> Generator[None, object, object]:
        """Stop collecting."""
        if not self._is_asked or _find_dsession(session.config) is not None:
            return (yield)
        with interrupts.raise_on_signal():
            interrupts.raise_if_stopped()
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, object, object]:
        """Stop running tests."""
        if not self._is_asked:
            return (yield)
        if (dsession := _find_dsession(session.config)) is not None:
            with _interrupt_queue(dsession):
                return (yield)
        with interrupts.raise_on_signal():
            interrupts.raise_if_stopped()
            return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        """Have what follows written whole."""
        if self._is_asked:
            interrupts.stop_raising()

    @pytest.hookimpl(tryfirst=True)
    def pytest_keyboard_interrupt(self) -> None:
        """Have the workers end too, which may not have got the signal."""
        for gateway in self._gateways:
            # execnet ends its processes by itself, some seconds later.
            process = getattr(getattr(gateway, "_io", None), "popen", None)
            if process is not None and process.poll() is None:
                with contextlib.suppress(OSError):
                    process.send_signal(signal.SIGTERM)

    def pytest_unconfigure(self) -> None:
        """Say what stopped the run, where pytest has no summary to say it in."""
        if self._is_asked and interrupts.get_received_signal() is not None and not self._is_worker:
            sys.stderr.write(f"attention conformance: {interrupts.describe_signal()}\n")
            scratch_folder.remove_abandoned_folders()  # of workers that pytest-xdist has killed


def leave_on_signals(config: pytest.Config) -> contextlib.AbstractContextManager[None]:
    """Within the block, which loads JAX, a signal ends the process at once."""
    stopping: StopSignals | None = config.pluginmanager.get_plugin(PLUGIN_NAME)
    return stopping.loading() if stopping is not None else contextlib.nullcontext()


def _leave_worker() -> None:
    """End a worker that has nothing to tell yet, with the processes of kernels that it has started."""
    if (kernels := sys.modules.get("conformance.sandbox.kernel_process")) is not None:
        kernels.end_all_processes()
    forked_process.end_server()


def _find_dsession(config: pytest.Config) -> Any:
    """The plugin by which pytest-xdist hands out tests, none if this process runs them."""
    return config.pluginmanager.get_plugin("dsession")


@contextlib.contextmanager
def _interrupt_queue(dsession: Any) -> Iterator[None]:
    """Raise `KeyboardInterrupt` out of the queue of events once a signal has arrived, and nowhere else."""
    events: queue.Queue[Any] = dsession.queue
    take = events.get

    def take_or_stop(block: bool = True, timeout: float | None = None) -> Any:
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            if interrupts.get_received_signal() is not None:
                raise KeyboardInterrupt
            left = _POLL_SECONDS if until is None else min(_POLL_SECONDS, until - time.monotonic())
            try:
                return take(block, max(left, 0.0))
            except queue.Empty:
                if not block or (until is not None and time.monotonic() >= until):
                    raise

    vars(events)["get"] = take_or_stop
    try:
        yield
    finally:
        del vars(events)["get"]
