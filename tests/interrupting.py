"""A command that is interrupted as a terminal does it: Ctrl-C reaches every process of its group."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

GRACE = 60  # seconds to write down what there is, on a machine that does other things too


@dataclasses.dataclass(frozen=True)
class Interrupted:
    """What a command left and said; its processes are those of `group`."""

    returncode: int
    out: str
    err: str
    group: int


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """What is started within is interrupted by SIGINT, as in a terminal.

    Tests that run in the background inherit an ignored SIGINT, and so would what they start.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def interrupted(*command: str, traced: int) -> Interrupted:
    """Python with these arguments, interrupted after `traced` lines of stderr that say so and no more."""
    arguments = [sys.executable, *command]
    with interruptible():
        process = subprocess.Popen(
            arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
    with process:
        assert process.stderr is not None
        seen = 0
        while seen < traced:
            line = process.stderr.readline()
            assert line, "the command ended before it was interrupted"
            seen += line == "traced\n"
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=GRACE)
    return Interrupted(process.returncode, out, err, process.pid)
