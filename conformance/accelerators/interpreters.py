"""Run JAX's simulating interpreters of TPU and Mosaic GPU kernels: set parameters, capture races, read errors.

These interpreters simulate memories, copies and cores, or warpgroups and barriers. So they see what the fast
interpreter (`interpret=True`) cannot: reads of memory that nothing wrote, accesses out of bounds, and races.

JAX has no public interface that reports races. jax 0.10.2 prints them, and jax 0.12 logs them (some by the root
logger). Both keep a flag for the last kernel only.
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
"""Number of grid orders that a TPU kernel is run in.

A fault that one of two orders hides shows in half of the runs; a fault that one of 24 orders hides, in nearly all.
"""

_PRIVATE = "jax._src.pallas.mosaic.interpret"
_PRIVATE_GPU = "jax._src.pallas.mosaic_gpu.interpret"
_CORES = 2
_RACE = re.compile(r"RACE DETECTED\n(?:[ ]{2}.*\n?)+")
_RACE_ACCESS = re.compile(r"^ {2}((?:read|write) of .*?)$", re.MULTILINE)
_RAISED_ERROR = re.compile(r"^(\w+(?:Error|Exception)): (.*)$", re.MULTILINE)


def list_seeds(platform: str | None) -> range:
    """List the seeds to run kernels of a platform with; one on GPUs, whose programs run in a fixed order."""
    return range(1 if platform == "gpu" else SEEDS)


def build_parameters(seed: int, platform: str | None = "tpu") -> Any:
    """Build strict interpreter parameters: fresh memory is NaN, races are detected, out-of-bounds reads raise.

    Args:
      seed: seed of the order in which the parallel dimensions of a TPU's grid run, on two cores.
      platform: `"tpu"` or `"gpu"`.
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
        options["on_race"] = "warn"  # since jax 0.12 the first race raises by default, which hides its effects
    return kind(**options)


@contextlib.contextmanager
def capture_races() -> Iterator[list[str]]:
    """Collect the races within this context, as one line each; the list is filled when the context ends.

    The interpreters are reset before and after, since an error leaves the state of the kernel that failed.
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
            ),  # logs the traceback of an exception that is raised too
            contextlib.redirect_stdout(printed),
        ):
            yield found
    finally:
        text = printed.getvalue()
        found += [_format_race(race) for race in _RACE.findall(text)]
        if not found and _has_race_flag():
            found.append("two accesses, of which nothing more is said")
        _reset_interpreters()
        if rest := _RACE.sub("", text).strip("\n"):  # the kernel's own output
            print(rest, file=sys.stdout)


def _build_race_handler(stream: io.StringIO) -> logging.Handler:
    """Build a log handler that writes only races to a stream."""
    handler = logging.StreamHandler(stream)
    handler.addFilter(lambda record: "RACE DETECTED" in record.getMessage())
    return handler


@contextlib.contextmanager
def _redirect_logger(name: str | None, handler: logging.Handler) -> Iterator[None]:
    """Send a logger's messages to `handler` only, not to its parents; None names the root logger."""
    logger = logging.getLogger(name)
    propagates, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagates


def format_interpreter_error(error: BaseException) -> str:
    """Format the interpreter's error in one line: the error inside a callback's error, otherwise the first line."""
    text = str(error)
    if raised := _RAISED_ERROR.findall(text):
        name, words = raised[-1]
        return f"{name}: {words}"
    first = text.strip().split("\n")[0]
    return f"{type(error).__name__}: {first}"


def _load_tpu() -> Any:
    """Import Pallas for TPUs late: it takes a fifth of a second, which only interpreting needs."""
    return importlib.import_module("jax.experimental.pallas.tpu")


def _reset_interpreters() -> None:
    """Reset the interpreters, and drop the effects of a failed kernel, whose error JAX would raise again."""
    _load_tpu().reset_tpu_interpret_mode_state()
    if (gpu := sys.modules.get(f"{_PRIVATE_GPU}.gpu_callbacks")) is not None:
        gpu.reset_gpu_interpret_mode_state()
    with contextlib.suppress(Exception):  # the error of a kernel that failed, which the caller already has
        jax.effects_barrier()  # type: ignore[no-untyped-call] # untyped upstream
    importlib.import_module("jax._src.dispatch").runtime_tokens.clear()  # a barrier that fails leaves them


def _format_race(race: str) -> str:
    """Format one race report as one line: its two accesses."""
    return " and ".join(_RACE_ACCESS.findall(race)) or race.strip().replace("\n", " ")


def _has_race_flag() -> bool:
    """Read the interpreters' own flags, which say whether the last kernel raced."""
    states = (
        getattr(importlib.import_module(f"{_PRIVATE}.interpret_pallas_call"), "races", None),
        getattr(sys.modules.get(f"{_PRIVATE_GPU}.gpu_callbacks"), "_races", None),
    )
    return any(getattr(state, "races_found", False) for state in states)
