"""Compile an implementation on a case into one program that can be timed, and measure the program's memory.

`compile_program` takes an implementation and operands, and returns a `TimedProgram`. `interleaved_timing` runs it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from cases.operand_registry import GRADIENT_OF
from cases.operand_values import Problem
from conformance import interrupts
from conformance.execution.executor import Executor, pull_back
from impls.contract.implementation import Implementation
from reports.records.measurement import FORWARD


@dataclasses.dataclass(frozen=True)
class TimedProgram:
    """A compiled program with its operands on the device."""

    # Function that runs the program. It takes a cotangent of `out`, which a forward program ignores, and returns
    # results by name, on the device.
    call: Callable[[Any], Mapping[str, Any]]
    cotangent: Any  # cotangent of `out` for timed calls, on the device
    compile_seconds: float
    memory: Mapping[str, float]  # `temporary` and `peak` memory in bytes; empty if the compiler does not report them

    def run(self, calls: int) -> None:
        """Make `calls` successive calls, and return when the device has finished the last call."""
        for _ in range(calls):
            results = self.call(self.cotangent)
        jax.block_until_ready(results)

    def results(self, cotangent: np.ndarray) -> dict[str, np.ndarray]:
        """Run the program once with the given cotangent of `out`, and return its results by name, on the host."""
        found = self.call(jax.device_put(cotangent))
        return {name: np.asarray(x) for name, x in jax.device_get(dict(found)).items()}


def compile_program(
    implementation: Implementation, problem: Problem, cotangent: np.ndarray, phase: str
) -> TimedProgram:
    """Compile a call for the default device, with gradients if `phase` includes them. Raises what compiling raises.

    `cotangent` `[B, T, N, V]` has the operands' dtype. `phase` is one of `PHASES` in `reports.records.measurement`.
    """
    plain, arrays = Executor(implementation).bind(problem)
    arrays = jax.device_put(dict(arrays))
    on_device = jax.device_put(cotangent)

    def forward(arrays: Any) -> Any:
        return {"out": plain(arrays)}

    def forward_and_backward(arrays: Any, do: Any) -> Any:
        out, gradients = pull_back(plain, arrays, do)
        return {"out": out, **{GRADIENT_OF[name]: x for name, x in gradients.items()}}

    operands = (arrays,) if phase == FORWARD else (arrays, on_device)
    function = forward if phase == FORWARD else forward_and_backward
    started = time.perf_counter()
    with interrupts.delay_signals():
        compiled = jax.jit(function).lower(*operands).compile()
    seconds = time.perf_counter() - started

    def call(do: Any) -> Any:
        return compiled(arrays) if phase == FORWARD else compiled(arrays, do)

    return TimedProgram(call, on_device, round(seconds, 3), _measure_memory(compiled))


def _measure_memory(compiled: Any) -> dict[str, float]:
    analysis = compiled.memory_analysis()
    if analysis is None:
        return {}
    # All temporaries are in one arena, whose size is the largest size of values that are live at once. So the peak is
    # the sum of temporaries, operands and results. The compiler's own peak is not used: some compilers leave out the
    # temporaries.
    whole = analysis.argument_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    temporary = analysis.temp_size_in_bytes
    return {"temporary": float(temporary), "peak": float(whole + temporary)}


def measure_device_peak(work: Callable[[], None]) -> float | None:
    """Measure the peak memory of some work, as the allocator's high-water mark minus the bytes in use before the work.

    Returns:
      the bytes; None if the device does not report them. Also None if the work does not raise the high-water mark,
      since the mark cannot be reset.
    """
    device = jax.devices()[0]
    before = device.memory_stats()
    work()
    after = device.memory_stats()
    if not before or not after or "peak_bytes_in_use" not in after:
        return None
    if after["peak_bytes_in_use"] <= before["peak_bytes_in_use"]:
        return None
    return float(after["peak_bytes_in_use"] - before["bytes_in_use"])
