"""No stop signal is lost, whether it is swallowed, dropped, too early or too late."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from conformance import interrupts
from tests.process_helpers import restore_signal_handlers

PATIENCE = 60.0


@pytest.fixture(autouse=True)
def usual_handlers() -> Iterator[None]:
    """Install the handlers that a terminal's processes have, since the tests may run in the background."""
    with restore_signal_handlers():
        yield
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def swallow(number: signal.Signals = signal.SIGINT) -> None:
    with contextlib.suppress(KeyboardInterrupt):
        signal.raise_signal(number)


def test_a_signal_that_is_swallowed_is_raised_at_the_next_check() -> None:
    with interrupts.record_signals(), interrupts.raise_on_signal():
        interrupts.raise_if_stopped()
        swallow()
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                interrupts.raise_if_stopped()


def test_a_signal_that_is_swallowed_is_raised_again_without_a_check() -> None:
    def work() -> None:
        with interrupts.raise_on_signal():
            swallow()
            until = time.monotonic() + PATIENCE
            while time.monotonic() < until:
                time.sleep(0.01)

    with interrupts.record_signals(), pytest.raises(KeyboardInterrupt):
        work()


class Dropping:
    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


def test_a_signal_that_python_drops_is_raised_at_the_next_check_and_nothing_is_printed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    printed: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", printed.append)
    with interrupts.record_signals(), interrupts.raise_on_signal():
        Dropping()
        with pytest.raises(KeyboardInterrupt):
            interrupts.raise_if_stopped()
    assert not printed
    Dropping()
    assert printed  # nobody listens


def test_a_signal_before_there_is_anything_to_stop_is_raised_once_there_is() -> None:
    with interrupts.record_signals():
        signal.raise_signal(signal.SIGTERM)
        interrupts.raise_if_stopped()
        with interrupts.raise_on_signal(), pytest.raises(KeyboardInterrupt):
            interrupts.raise_if_stopped()


@pytest.mark.parametrize("number", interrupts.STOP_SIGNALS, ids=lambda number: number.name)
def test_the_exit_code_names_the_first_signal(number: signal.Signals) -> None:
    with interrupts.record_signals():
        assert interrupts.resolve_exit_code(1) == 1
        with interrupts.end_on_signal():
            signal.raise_signal(number)
        signal.raise_signal(signal.SIGHUP)
        assert interrupts.get_received_signal() is number
        assert interrupts.resolve_exit_code(1) == 128 + number
        assert number.name in interrupts.describe_signal()


def test_a_signal_that_comes_last_of_all_is_told_by_the_exit_code() -> None:
    with interrupts.record_signals():
        with interrupts.raise_on_signal():
            pass
        signal.raise_signal(signal.SIGTERM)
        assert interrupts.resolve_exit_code(0) == 143


def test_a_second_signal_does_not_cut_off_what_handles_the_first() -> None:
    written = []
    with interrupts.record_signals(), interrupts.raise_on_signal():
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            signal.raise_signal(signal.SIGTERM)
            written.append("all of it")
    assert written


def test_what_is_recorded_only_goes_on() -> None:
    with interrupts.record_signals(), interrupts.raise_on_signal():
        interrupts.stop_raising()
        signal.raise_signal(signal.SIGTERM)
        interrupts.raise_if_stopped()
        assert interrupts.get_received_signal() is signal.SIGTERM


def test_a_handler_of_somebody_else_is_left_alone() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interrupts.record_signals():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_what_is_held_is_done_whole_and_the_signal_comes_afterwards() -> None:
    done = []

    def whole() -> None:
        with interrupts.delay_signals():
            signal.raise_signal(signal.SIGTERM)
            done.append("all of it")

    with interrupts.record_signals(), interrupts.raise_on_signal(), pytest.raises(KeyboardInterrupt):
        whole()
    with pytest.raises(KeyboardInterrupt):  # also where nobody listens
        whole()
    assert done == ["all of it"] * 2


def test_other_threads_are_never_stopped() -> None:
    ended = []

    def work() -> None:
        with interrupts.delay_signals():
            interrupts.raise_if_stopped()
        ended.append("all of it")

    with interrupts.record_signals(), interrupts.end_on_signal():
        swallow()
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert ended
