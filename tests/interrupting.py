"""A command that is interrupted as a terminal does it: Ctrl-C reaches every process of its group."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys

GRACE = 60  # seconds to write down what there is, on a machine that does other things too


@dataclasses.dataclass(frozen=True)
class Interrupted:
    """What a command left and said; its processes are those of `group`."""

    returncode: int
    out: str
    err: str
    group: int


def interrupted(*command: str, traced: int) -> Interrupted:
    """Python with these arguments, interrupted after `traced` lines of stderr that say so and no more."""
    # Tests that run in the background inherit an ignored SIGINT, and so would the command: it must be as in a terminal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        signal.signal(signal.SIGINT, before)
        assert process.stderr is not None
        seen = 0
        while seen < traced:
            seen += process.stderr.readline() == "traced\n"
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=GRACE)
    return Interrupted(process.returncode, out, err, process.pid)
