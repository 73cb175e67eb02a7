"""Measure programs compiled for absent chips: memory, static cycles of TPU kernels, cycle bounds of GPU kernels.

`CostObserver` is the `ProgramObserver` of this package (`conformance.accelerators.program_observers`). The core calls
it for each program that the check `compiles` compiles, and stores the measurements in records.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from conformance import environment
from conformance.accelerators.gpus import GPUS
from conformance.accelerators.program_observers import CompilerRequests, ObservedProgram
from conformance.accelerators.targets import CompileTarget, find_disassembler
from conformance.accelerators.tpus import TPUS
from conformance.cost.gpu import gpu_figures
from conformance.cost.program_memory import measure_program_memory
from conformance.cost.tpu import pallas_calls, tpu_figures

# From jaxlib 0.11 on, XLA writes the PTX of an emitter only if this pattern matches the emitter's name.
_DUMP_OPTIONS = {"xla_dump_emitter_re": ".*"}


class CostObserver:
    """Measures every program that is compiled for an absent chip."""

    def prepare(self, target: CompileTarget, folder: Path) -> CompilerRequests:
        """Prepare for a compilation: remove schedules of earlier TPU programs, or request the PTX of GPU programs."""
        if target.toolchain.platform == "tpu":
            _remove_schedules()
        if target.toolchain.platform != "gpu":
            return CompilerRequests()
        return CompilerRequests({"xla_dump_to": str(folder), **_DUMP_OPTIONS}, gpu_figures.VERBOSE_VARIABLES)

    def measure(self, program: ObservedProgram) -> dict[str, float]:
        """Return measurements of a program by name: of its memory, and of its kernels."""
        memory = measure_program_memory(program.compiled.as_text() or "")
        measure_kernels = _measure_tpu if program.target.toolchain.platform == "tpu" else _measure_gpu
        return memory | measure_kernels(program)


OBSERVER = CostObserver()


def _remove_schedules() -> None:
    """Remove the schedules that libtpu has written in this process; do nothing if it writes none."""
    if (folder := environment.find_schedule_folder()) is not None:
        shutil.rmtree(folder, ignore_errors=True)


def _measure_tpu(program: ObservedProgram) -> dict[str, float]:
    """Estimate the cycles of a TPU program's kernels; empty if libtpu writes no schedules in this process."""
    schedules = environment.find_schedule_folder()
    tpu = next((tpu for tpu in TPUS if tpu.name == program.target.name), None)
    if schedules is None or tpu is None:
        return {}
    calls = pallas_calls.find_pallas_calls(program.traced.jaxpr)
    figures = tpu_figures.compute_tpu_figures(schedules, calls, program.compiled.as_text() or "", tpu)
    _remove_schedules()
    return figures


def _measure_gpu(program: ObservedProgram) -> dict[str, float]:
    """Measure the registers, shared memory and cycle bounds of a GPU program's kernels; empty without `ptxas`."""
    toolchain = program.target.toolchain
    toolkit = toolchain.programs and toolchain.programs()
    gpu = next((gpu for gpu in GPUS if gpu.name == program.target.name), None)
    if toolkit is None or gpu is None:
        return {}
    shared = gpu_figures.measure_mosaic_shared_bytes(program.lowered.compiler_ir("stablehlo"))
    tools = gpu_figures.NvidiaTools(toolkit / "bin/ptxas", find_disassembler())
    return gpu_figures.compute_gpu_figures(program.folder, program.printed, shared, tools, gpu, program.depths)
