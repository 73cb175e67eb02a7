"""Handle signals that stop the pytest gate, such as Ctrl-C.

A gate that gets signal n still prints a verdict, writes its page and ends with exit code 128 + n, with and without
pytest-xdist. In the main process of pytest-xdist, `KeyboardInterrupt` could be raised while an event of a worker is
handled, and workers that get Ctrl-C themselves send events too. Both would end pytest with an internal error. So this
process only records the signal, and stops its main loop where the loop waits for events. Workers start with signals
blocked until they can handle them.
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

from conformance import interrupts, temporary_folders
from conformance.fork_server import forked_process
from conformance.gate import gate_options

PLUGIN_NAME = "attention-conformance-stopping"
_POLL_SECONDS = 0.2


class StopSignals:
    """A pytest plugin that handles stop signals, from before any `conftest.py` is imported until pytest's exit code."""

    def __init__(self) -> None:
        self._listening = contextlib.ExitStack()
        self._is_judging = False
        self._is_worker = False
        self._gateways: list[Any] = []
        self._errors = 2

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_load_initial_conftests(
        self, early_config: pytest.Config, parser: pytest.Parser, args: list[str]
    ) -> Generator[None]:
        """Start recording signals, if this run of pytest judges kernels."""
        if gate_options.is_requested(early_config, args):
            self._is_judging = True
            self._errors = os.dup(2)  # pytest captures descriptor 2
            self._listening.enter_context(interrupts.record_signals())
        yield
        if self._is_judging and not gate_options.is_requested(early_config, args, parser=parser):
            self._is_judging = False  # `--impl` is an option of a `conftest.py`
            self._listening.close()

    @pytest.hookimpl(tryfirst=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        """Let a signal end a worker of pytest-xdist at once. Its signals have been blocked since its start.

        Environment variables cannot tell whether this is a worker: a pytest run that a test starts inherits the
        variables of the test's worker.
        """
        self._is_worker = hasattr(config, "workerinput")
        if self._is_judging and self._is_worker:
            interrupts.set_early_exit(_leave_worker)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, interrupts.STOP_SIGNALS)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_cmdline_main(self) -> Generator[None, int, int]:
        """Return the exit code 128 + n if signal n stopped the run."""
        if not self._is_judging:
            return (yield)
        try:
            code = yield
            return interrupts.resolve_exit_code(code)
        finally:
            self._listening.close()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionstart(self, session: pytest.Session) -> Generator[None]:
        """Block signals while pytest-xdist starts its workers, so that none is ended before it handles signals."""
        if not self._is_judging or _find_dsession(session.config) is None:
            return (yield)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, interrupts.STOP_SIGNALS)
        try:
            return (yield)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_newgateway(self, gateway: Any) -> None:
        """Remember the worker's connection, to end the worker later. Start no further one after a signal."""
        self._gateways.append(gateway)
        if interrupts.get_received_signal() is not None:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """End the process at once if a signal arrives within the block, which loads JAX before anything is judged."""
        if not self._is_judging or self._is_worker:
            yield
            return
        interrupts.set_early_exit(self._leave)
        try:
            yield
        finally:
            interrupts.set_early_exit(None)

    def _leave(self) -> None:
        """Print that nothing was judged, and end the fork server."""
        os.write(self._errors, f"error: {interrupts.describe_signal()} before anything was judged\n".encode())
        forked_process.end_server()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection(self, session: pytest.Session) -> Generator[None, object, object]:
        """Let a signal stop the collection of tests."""
        if not self._is_judging or _find_dsession(session.config) is not None:
            return (yield)
        with interrupts.raise_on_signal():
            interrupts.raise_if_stopped()
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, object, object]:
        """Let a signal stop the running of tests."""
        if not self._is_judging:
            return (yield)
        if (dsession := _find_dsession(session.config)) is not None:
            with _interrupt_queue(dsession):
                return (yield)
        with interrupts.raise_on_signal():
            interrupts.raise_if_stopped()
            return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        """Raise no further exception on signals, so that the run can write its results."""
        if self._is_judging:
            interrupts.stop_raising()

    @pytest.hookimpl(tryfirst=True)
    def pytest_keyboard_interrupt(self) -> None:
        """End the workers of pytest-xdist too, since only this process may have received the signal."""
        for gateway in self._gateways:
            # execnet, which runs the workers, would end them too, but seconds later.
            process = getattr(getattr(gateway, "_io", None), "popen", None)
            if process is not None and process.poll() is None:
                with contextlib.suppress(OSError):
                    process.send_signal(signal.SIGTERM)

    def pytest_unconfigure(self) -> None:
        """Print which signal stopped the run, since pytest may print no summary."""
        if self._is_judging and interrupts.get_received_signal() is not None and not self._is_worker:
            sys.stderr.write(f"attention conformance: {interrupts.describe_signal()}\n")
            temporary_folders.remove_abandoned_folders()  # left by workers that pytest-xdist killed


def leave_on_signals(config: pytest.Config) -> contextlib.AbstractContextManager[None]:
    """Return a context in which a signal ends the process at once. It is used while JAX is loaded."""
    plugin: StopSignals | None = config.pluginmanager.get_plugin(PLUGIN_NAME)
    return plugin.loading() if plugin is not None else contextlib.nullcontext()


def _leave_worker() -> None:
    """End what a worker of pytest-xdist has started: the kernels' processes and the fork server."""
    if (kernel_processes := sys.modules.get("conformance.sandbox.kernel_process")) is not None:
        kernel_processes.end_all_processes()
    forked_process.end_server()


def _find_dsession(config: pytest.Config) -> Any:
    """Return pytest-xdist's plugin that distributes tests to workers; None if this process runs the tests itself."""
    return config.pluginmanager.get_plugin("dsession")


@contextlib.contextmanager
def _interrupt_queue(dsession: Any) -> Iterator[None]:
    """After a signal, raise `KeyboardInterrupt` where pytest-xdist waits for its queue of events, and only there."""
    events: queue.Queue[Any] = dsession.queue
    get_event = events.get

    def get_event_or_stop(block: bool = True, timeout: float | None = None) -> Any:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            if interrupts.get_received_signal() is not None:
                raise KeyboardInterrupt
            seconds = _POLL_SECONDS if deadline is None else min(_POLL_SECONDS, deadline - time.monotonic())
            try:
                return get_event(block, max(seconds, 0.0))
            except queue.Empty:
                if not block or (deadline is not None and time.monotonic() >= deadline):
                    raise

    vars(events)["get"] = get_event_or_stop
    try:
        yield
    finally:
        del vars(events)["get"]
