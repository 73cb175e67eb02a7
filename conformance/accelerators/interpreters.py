"""Configure JAX's simulating interpreters of TPU and Mosaic GPU kernels, and read the races and errors they report.

The check `interpreter` runs kernels in these interpreters. They simulate memories, copies and cores, or warpgroups and
barriers. So they detect faults that the fast interpreter (`interpret=True`) cannot: reads of unwritten memory, accesses
out of bounds, and races.

JAX has no public interface that reports races. jax 0.10.2 prints races, and jax 0.12 logs them, some by the root
logger. Both versions also set a flag, but only for the last kernel.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import logging
import re
import sys
from collections.abc import Iterator
from typing import Any

import jax

SEEDS = 3
"""Number of orders of the grid in which a TPU kernel is run.

A fault that is invisible in one of two orders shows in half of the runs. A fault that is invisible in one of 24 orders
shows in nearly all runs.
"""

_PRIVATE = "jax._src.pallas.mosaic.interpret"
_PRIVATE_GPU = "jax._src.pallas.mosaic_gpu.interpret"
_CORES = 2
_RACE = re.compile(r"RACE DETECTED\n(?:[ ]{2}.*\n?)+")
_RACE_ACCESS = re.compile(r"^ {2}((?:read|write) of .*?)$", re.MULTILINE)
_RAISED_ERROR = re.compile(r"^(\w+(?:Error|Exception)): (.*)$", re.MULTILINE)


def list_seeds(platform: str | None) -> range:
    """List the seeds to run a platform's kernels with: `SEEDS` on TPUs, one on GPUs, where the order is fixed."""
    return range(1 if platform == "gpu" else SEEDS)


def build_parameters(seed: int, platform: str | None = "tpu") -> Any:
    """Build strict interpreter parameters: fresh memory is NaN, races are detected, out-of-bounds reads raise.

    Args:
      seed: seed of the random order in which the parallel dimensions of a TPU kernel's grid run on two cores.
    """
    kind: Any = _load_tpu().InterpretParams
    options: dict[str, Any] = {
        "detect_races": True,
        "out_of_bounds_reads": "raise",
        "uninitialized_memory": "nan",
    }
    if platform == "gpu":
        kind = importlib.import_module(f"{_PRIVATE_GPU}.params").InterpretGPUParams
    else:
        options |= {"num_cores_or_threads": _CORES, "random_seed": seed}
    if "on_race" in {field.name for field in dataclasses.fields(kind)}:
        options["on_race"] = "warn"  # from jax 0.12 on, the first race raises by default and hides its wrong results
    return kind(**options)


@contextlib.contextmanager
def capture_races() -> Iterator[list[str]]:
    """Collect the races that occur within this context, one line for each race.

    The list is filled when the context ends. The interpreters are reset before and after, since a kernel that raises
    leaves its state behind.
    """
    found: list[str] = []
    printed = io.StringIO()
    _reset_interpreters()
    try:
        with (
            _redirect_logger(f"{_PRIVATE}.race_detection_state", _build_race_handler(printed)),
            _redirect_logger(None, _build_race_handler(printed)),
            _redirect_logger(
                "jax._src.callback", logging.NullHandler()
            ),  # this logger repeats the traceback of an exception that JAX also raises
            contextlib.redirect_stdout(printed),
        ):
            yield found
    finally:
        text = printed.getvalue()
        found += [_format_race(race) for race in _RACE.findall(text)]
        if not found and _has_race_flag():
            found.append("two accesses that the interpreter does not describe")
        _reset_interpreters()
        if rest := _RACE.sub("", text).strip("\n"):  # print the kernel's own output, which was captured too
            print(rest, file=sys.stdout)


def _build_race_handler(stream: io.StringIO) -> logging.Handler:
    """Build a log handler that writes race reports to `stream`, and drops all other messages."""
    handler = logging.StreamHandler(stream)
    handler.addFilter(lambda record: "RACE DETECTED" in record.getMessage())
    return handler


@contextlib.contextmanager
def _redirect_logger(name: str | None, handler: logging.Handler) -> Iterator[None]:
    """Send a logger's messages only to `handler` within this context; the name None means the root logger."""
    logger = logging.getLogger(name)
    propagates, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagates


def format_interpreter_error(error: BaseException) -> str:
    """Format an error of the interpreter as one line.

    JAX wraps an error raised inside a callback. If the text contains such an inner error, the inner error is returned.
    Otherwise the line is the type and the first line of the message.
    """
    text = str(error)
    if raised := _RAISED_ERROR.findall(text):
        name, words = raised[-1]
        return f"{name}: {words}"
    first = text.strip().split("\n")[0]
    return f"{type(error).__name__}: {first}"


def _load_tpu() -> Any:
    """Import Pallas for TPUs when it is needed: the import takes a fifth of a second."""
    return importlib.import_module("jax.experimental.pallas.tpu")


def _reset_interpreters() -> None:
    """Reset the interpreters and discard a failed kernel's pending effects; else JAX would raise its error again."""
    _load_tpu().reset_tpu_interpret_mode_state()
    if (gpu := sys.modules.get(f"{_PRIVATE_GPU}.gpu_callbacks")) is not None:
        gpu.reset_gpu_interpret_mode_state()
    with contextlib.suppress(Exception):  # the barrier repeats a failed kernel's error, which the caller already has
        jax.effects_barrier()
    importlib.import_module("jax._src.dispatch").runtime_tokens.clear()  # a failed barrier leaves the tokens


def _format_race(race: str) -> str:
    """Format one race report as one line that names the two accesses."""
    return " and ".join(_RACE_ACCESS.findall(race)) or race.strip().replace("\n", " ")


def _has_race_flag() -> bool:
    """Check the interpreters' own flags, which are set if the last kernel had a race."""
    states = (
        getattr(importlib.import_module(f"{_PRIVATE}.interpret_pallas_call"), "races", None),
        getattr(sys.modules.get(f"{_PRIVATE_GPU}.gpu_callbacks"), "_races", None),
    )
    return any(getattr(state, "races_found", False) for state in states)
