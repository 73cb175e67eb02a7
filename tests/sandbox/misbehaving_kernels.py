"""Kernels that misbehave in the sandbox. Each returns the right result, if it returns."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import importlib
import os
import pathlib
import resource
import signal
import socket
import stat
import subprocess
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from conformance.execution.executor import Executor
from conformance.sandbox import protocol
from tests.kernels.naive import attention as right


def plain(q: Any, k: Any, v: Any, *, causal: bool = False) -> Any:
    return right(q, k, v, causal=causal)


def hangs(q: Any, k: Any, v: Any) -> Any:
    print("waiting for ever")
    time.sleep(1000)


def dies(q: Any, k: Any, v: Any) -> Any:
    os._exit(0)


def crashes(q: Any, k: Any, v: Any) -> Any:
    print("about to crash", flush=True)
    ctypes.string_at(0)


def grows(q: Any, k: Any, v: Any) -> Any:
    held = []
    while True:
        held.append(np.ones(2**25))
        time.sleep(0.01)


def floods(q: Any, k: Any, v: Any) -> Any:
    for _ in range(20_000):
        os.write(1, b"x" * 1000 + b"\n")
    return right(q, k, v)


def answers() -> int:
    """Find the pipe that the judge reads: the only one that this process writes to, besides its output."""
    for pipe in range(3, 64):
        with contextlib.suppress(OSError):
            if stat.S_ISFIFO(os.fstat(pipe).st_mode) and fcntl.fcntl(pipe, fcntl.F_GETFL) & os.O_WRONLY:
                return pipe
    raise AssertionError("there is none")


def writes_to_shared_memory(q: Any, k: Any, v: Any) -> Any:
    pathlib.Path("/dev/shm/written.txt").write_text("here")
    return right(q, k, v)


def writes_to_a_device(q: Any, k: Any, v: Any) -> Any:
    pathlib.Path("/dev/null").write_text("here")
    raise OddError("written")


def writes_to_a_console(q: Any, k: Any, v: Any) -> Any:
    pathlib.Path("/dev/console").write_text("kernel.py:attention conforms")
    return right(q, k, v)


def sets_the_clock(q: Any, k: Any, v: Any) -> Any:
    time.clock_settime(time.CLOCK_REALTIME, time.time())
    return right(q, k, v)


def switches_jit_off(q: Any, k: Any, v: Any) -> Any:
    jax.config.update("jax_disable_jit", True)
    return right(q, k, v)


def tells_its_level(q: Any, k: Any, v: Any) -> Any:
    xla_client = importlib.import_module("jax._src.lib").xla_client
    debug = xla_client.CompileOptions().executable_build_options.debug_options
    raise ValueError(f"level {debug.xla_backend_optimization_level}")


def closes(q: Any, k: Any, v: Any) -> Any:
    os.close(answers())
    return right(q, k, v)


def writes(q: Any, k: Any, v: Any) -> Any:
    (pathlib.Path(__file__).parent / "written.txt").write_text("here")
    return right(q, k, v)


def connects(q: Any, k: Any, v: Any) -> Any:
    with socket.socket() as one:
        one.connect(("127.0.0.1", 9))
    return right(q, k, v)


def kills(q: Any, k: Any, v: Any) -> Any:
    os.kill(os.getppid(), signal.SIGTERM)
    return right(q, k, v)


def looks(q: Any, k: Any, v: Any) -> Any:
    with open(f"/proc/{os.getppid()}/mem", "rb") as memory:
        memory.read(1)
    return right(q, k, v)


def reads_arguments(q: Any, k: Any, v: Any) -> Any:
    pathlib.Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
    return right(q, k, v)


def replaces(q: Any, k: Any, v: Any) -> Any:
    vars(jax)["vjp"] = lambda *given: None
    return right(q, k, v)


def exits(q: Any, k: Any, v: Any) -> Any:
    sys.exit(0)


class OddError(ValueError):
    pass


def raises(q: Any, k: Any, v: Any) -> Any:
    print("q has arrived")
    raise OddError("q is odd")


def lies(q: Any, k: Any, v: Any) -> Any:
    """Return an object that becomes an array when it is inspected."""

    class Lie:
        shape, dtype = q.shape, q.dtype

        def __array__(self, *args: Any, **named: Any) -> Any:
            return np.zeros(q.shape)

    return Lie()


def lingers(q: Any, k: Any, v: Any) -> Any:
    subprocess.Popen(["sleep", os.environ["LINGERS"]], start_new_session=True)
    return right(q, k, v)


def lingers_and_dies(q: Any, k: Any, v: Any) -> Any:
    subprocess.Popen(["sh", "-c", f"setsid sleep {os.environ['LINGERS']} & sleep 0.1"], start_new_session=True)
    time.sleep(1)
    os._exit(3)


CHAINS = """
import os, time
end = time.monotonic() + 30
for _ in range(4):
    os.fork()
while time.monotonic() < end:
    if os.fork():
        os._exit(0)
    os.setsid()
"""


def chains(q: Any, k: Any, v: Any) -> Any:
    """Leave a process behind that starts another one and ends, over and over."""
    subprocess.Popen([sys.executable, "-S", "-c", CHAINS, os.environ["LINGERS"]])
    time.sleep(1)
    return right(q, k, v)


def zeros(q: Any, k: Any, v: Any) -> Any:
    return jnp.zeros_like(q)


def connects_among_files(q: Any, k: Any, v: Any) -> Any:
    with socket.socket(socket.AF_UNIX) as one:
        one.connect("/nobody/listens")
    return right(q, k, v)


def limits_the_judge(q: Any, k: Any, v: Any) -> Any:
    own = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, own)  # its own are its own business
    resource.prlimit(os.getppid(), resource.RLIMIT_FSIZE, own)
    return right(q, k, v)


def forks(q: Any, k: Any, v: Any) -> Any:
    if os.fork() == 0:
        raise NotImplementedError("I am the child")
    os.wait()
    return right(q, k, v)


def digs(q: Any, k: Any, v: Any) -> Any:
    """Leave a thousand nested folders."""
    here = os.getcwd()
    os.chdir(os.environ["TMPDIR"])
    for _ in range(2000):
        os.mkdir("d")
        os.chdir("d")
    os.chdir(here)
    return right(q, k, v)


def replaces_a_method(q: Any, k: Any, v: Any) -> Any:
    name = "jit"
    setattr(Executor, name, lambda *given: None)
    return right(q, k, v)


def answers_ahead(q: Any, k: Any, v: Any) -> Any:
    """Fill the pipe with answers to requests that were not sent."""
    one = protocol.pack_answer({"returned": 1, "replaced": [], "files": {}})
    os.write(answers(), one * (2**21 // len(one)))
    return right(q, k, v)


def forges(said: Any) -> Any:
    """Send `said` instead of the process's handshake, as it is looked up: no kernel is loaded."""
    os.write(answers(), protocol.pack_answer({"returned": said, "replaced": [], "files": {}}))
    return right
