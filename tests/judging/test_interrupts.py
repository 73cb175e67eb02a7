"""An interrupt that a kernel or JAX swallows still ends the run."""

from __future__ import annotations

import contextlib
import signal

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


def test_a_handler_of_somebody_else_is_left_alone() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupts.remembered():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
