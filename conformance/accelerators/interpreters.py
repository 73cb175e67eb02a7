"""JAX's interpreters of TPU and of Mosaic GPU kernels: parameters, races they report, what they say when they stop.

They simulate memories, copies and cores, or warpgroups and barriers, and so see what the fast interpreter
(`interpret=True`) cannot: memory that nothing wrote, reads and writes out of bounds, and cores that race. Where races
are reported is not public: jax 0.10.2 prints them, jax 0.12 logs them (some by the root logger), and both keep a flag
for the last kernel alone.
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
"""Orders of the grid that a TPU kernel is run in: a wrong order of two shows in half, one of 24 in nearly all."""

_PRIVATE = "jax._src.pallas.mosaic.interpret"
_PRIVATE_GPU = "jax._src.pallas.mosaic_gpu.interpret"
_CORES = 2
_RACE = re.compile(r"RACE DETECTED\n(?:[ ]{2}.*\n?)+")
_RACE_ACCESS = re.compile(r"^ {2}((?:read|write) of .*?)$", re.MULTILINE)
_RAISED_ERROR = re.compile(r"^(\w+(?:Error|Exception)): (.*)$", re.MULTILINE)


def list_seeds(platform: str | None) -> range:
    """The seeds that kernels for `platform` are run with: programs of a GPU run one after the other, in one order."""
    return range(1 if platform == "gpu" else SEEDS)


def build_parameters(seed: int, platform: str | None = "tpu") -> Any:
    """Strict parameters: NaN in fresh memory, races detected, out-of-bounds reads raise; on TPUs two cores.

    Args:
      seed: of the order in which the parallel dimensions of a TPU's grid are run.
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
        options["on_race"] = "warn"  # from jax 0.12 on the first one raises by default, and hides what comes of it
    return kind(**options)


@contextlib.contextmanager
def capture_races() -> Iterator[list[str]]:
    """A list of what races within the context, one line each, filled when it ends.

    The interpreter starts and ends afresh: after an error its state would be that of the kernel that failed.
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
            ),  # tracebacks of what the caller gets as an exception
            contextlib.redirect_stdout(printed),
        ):
            yield found
    finally:
        text = printed.getvalue()
        found += [_format_race(race) for race in _RACE.findall(text)]
        if not found and _has_race_flag():
            found.append("two accesses, of which nothing more is said")
        _reset_interpreters()
        if rest := _RACE.sub("", text).strip("\n"):  # what the kernel itself printed
            print(rest, file=sys.stdout)


def _build_race_handler(stream: io.StringIO) -> logging.Handler:
    """A handler that writes races to the stream, and nothing else."""
    handler = logging.StreamHandler(stream)
    handler.addFilter(lambda record: "RACE DETECTED" in record.getMessage())
    return handler


@contextlib.contextmanager
def _redirect_logger(name: str | None, handler: logging.Handler) -> Iterator[None]:
    """What the logger says goes to `handler`, and not to the loggers above it. None is the root logger."""
    logger = logging.getLogger(name)
    propagates, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagates


def format_interpreter_error(error: BaseException) -> str:
    """The interpreter's own error, which reaches the caller wrapped in that of a callback; else the first line."""
    text = str(error)
    if raised := _RAISED_ERROR.findall(text):
        name, words = raised[-1]
        return f"{name}: {words}"
    first = text.strip().split("\n")[0]
    return f"{type(error).__name__}: {first}"


def _load_tpu() -> Any:
    """Loaded when it is asked for: a process that interprets nothing starts a fifth of a second sooner without it."""
    return importlib.import_module("jax.experimental.pallas.tpu")


def _reset_interpreters() -> None:
    """Forget the kernel that ran, and the effects of one that failed, whose error JAX would raise again and again."""
    _load_tpu().reset_tpu_interpret_mode_state()
    if (gpu := sys.modules.get(f"{_PRIVATE_GPU}.gpu_callbacks")) is not None:
        gpu.reset_gpu_interpret_mode_state()
    with contextlib.suppress(Exception):  # of a kernel that failed, whose error has been told
        jax.effects_barrier()  # type: ignore[no-untyped-call] # untyped upstream
    importlib.import_module("jax._src.dispatch").runtime_tokens.clear()  # which a failed barrier leaves as they were


def _format_race(race: str) -> str:
    return " and ".join(_RACE_ACCESS.findall(race)) or race.strip().replace("\n", " ")


def _has_race_flag() -> bool:
    """Whether the last kernel raced, by the interpreter's own flag."""
    states = (
        getattr(importlib.import_module(f"{_PRIVATE}.interpret_pallas_call"), "races", None),
        getattr(sys.modules.get(f"{_PRIVATE_GPU}.gpu_callbacks"), "_races", None),
    )
    return any(getattr(state, "races_found", False) for state in states)
