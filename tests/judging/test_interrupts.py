"""An interrupt that a kernel or JAX swallows still ends the run."""

from __future__ import annotations

import contextlib
import signal
import sys

import pytest

from conformance.judging import interrupts


def swallows() -> None:
    with contextlib.suppress(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_an_interrupt_that_is_swallowed_is_raised_again() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with interrupts.remembered():
            interrupts.check()
            swallows()
            with pytest.raises(KeyboardInterrupt):
                interrupts.check()
        interrupts.check()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


class Dropping:
    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


def test_an_interrupt_that_python_drops_is_raised_again_and_nothing_is_printed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    printed: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", printed.append)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with interrupts.remembered():
            Dropping()
            with pytest.raises(KeyboardInterrupt):
                interrupts.check()
        assert not printed
        Dropping()
        assert printed  # nobody remembers it
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_handler_of_somebody_else_is_left_alone() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupts.remembered():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_what_ends_a_job_or_a_session_stops_a_run_as_ctrl_c_does(number: signal.Signals) -> None:
    assert signal.getsignal(number) == signal.SIG_DFL
    with interrupts.remembered():
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()
    assert signal.getsignal(number) == signal.SIG_DFL


def test_what_is_ignored_at_the_end_of_a_run_is_heard_again_after_it() -> None:
    with interrupts.remembered():
        interrupts.ignore()
        signal.raise_signal(signal.SIGTERM)
        interrupts.check()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_what_is_held_is_done_whole_and_the_signal_comes_afterwards() -> None:
    done = []

    def whole() -> None:
        with interrupts.held():
            signal.raise_signal(signal.SIGTERM)
            done.append("all of it")

    with interrupts.remembered():
        with pytest.raises(KeyboardInterrupt):
            whole()
        assert done
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)  # the handler is back
