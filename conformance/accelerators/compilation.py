"""Compiling for an accelerator that is not there, by its real compiler: what it says, and what it costs."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import itertools
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxlib.mlir import ir

from conformance import environment, program_cache
from conformance.accelerators import targets
from conformance.accelerators.gpus import GPUS
from conformance.accelerators.targets import CompileTarget
from conformance.accelerators.tpus import TPUS
from conformance.cost.gpu import gpu_figures
from conformance.cost.program_memory import measure_live_bytes
from conformance.cost.tpu import pallas_calls, tpu_figures

_MAX_REASON = 400
# What the compiler of Mosaic GPU kernels says of an error.
_MOSAIC_ERROR = re.compile(r"error: (.+)")
# What emitters make of a kernel, its assembler text among it: from jaxlib 0.11 on they leave it out unless asked.
_DUMP_OPTIONS = {"xla_dump_emitter_re": ".*"}
_compilation_counter = itertools.count()
# An instruction in a message, with its operands and attributes: hundreds of characters, of which the name suffices.
_INSTRUCTION = re.compile(r"(%\S+) = .*? metadata=\{[^}]*\}")
# How the text of a compiled program says what a Pallas kernel takes of VMEM, which is XLA's memory space 1.
_PALLAS_KERNEL = 'custom_call_target="tpu_custom_call"'
_SCOPED_MEMORY = re.compile(r'"used_scoped_memory_configs":\[([^\]]*)\]')
_VMEM_SIZE = re.compile(r'"memory_space":"1","offset":"\d+","size":"(\d+)"')


class NoCompiler(Exception):  # noqa: N818 -- a statement, as the message is
    """The compiler is missing here, or does not know the target; the message says which."""


class CallRefused(Exception):  # noqa: N818 -- likewise
    """The implementation itself declines the call for this target; the message is its reason."""


class CompileError(Exception):
    """The program does not compile; the message is what the compiler says first."""


def compile_for(
    target: CompileTarget, function: Any, operands: tuple[Any, ...], depths: tuple[int, int] | None = None
) -> Mapping[str, float]:
    """Compile a program for one chip of `target`, and give its figures.

    Args:
      target: what to compile for.
      function: a jitted function.
      operands: its operands, arrays or anything with a shape and a dtype, in any tree.
      depths: of keys and of values, if it is attention: by them pairs of a GPU kernel's loops are told.

    Returns:
      `compile_seconds` (tracing and lowering included); `argument_bytes`, `output_bytes` and `code_bytes` in HBM;
      `temporary_bytes`, the HBM that the compiler adds for temporaries, zero if it finds room for them elsewhere;
      `live_bytes` of them at once, wherever they are (`conformance.cost.program_memory`); `vmem_bytes` of the
      program's kernels on a TPU; `shared_bytes`, `registers` and `spilled_bytes` on a GPU, where it is told, and of
      each kernel the cycles that its instructions take at least (`conformance.cost.gpu.gpu_figures`); on a TPU the
      cycles of each kernel's parts and of its call (`conformance.cost.tpu.tpu_figures`).

    Raises:
      NoCompiler: if this machine cannot compile for the target.
      Refused: if the function raises `NotImplementedError` while it is traced.
      CompileError: if it does not trace, lower or compile.
    """
    sharding = _build_sharding(target)
    placed = jax.tree.map(functools.partial(_place_operand, sharding), operands)
    start = time.perf_counter()
    with _trace_on_sharding(sharding):
        try:
            traced = function.trace(*placed)
        except NotImplementedError as error:
            raise CallRefused(format_first_line(error)) from error
        except Exception as error:  # whatever the implementation raises is the finding
            raise CompileError(format_first_line(error)) from error
        try:
            lowered = traced.lower()
            with program_cache.bypass_cache(), tempfile.TemporaryDirectory() as folder:
                compiled, said = _compile_lowered(lowered, target, folder)
                seconds = time.perf_counter() - start
                told = _measure_kernels(traced, lowered, compiled, target, Path(folder), said, depths)
        except CompileError:
            raise
        except Exception as error:  # the compiler's errors are of many types
            raise CompileError(format_first_line(error)) from error
    return {"compile_seconds": round(seconds, 3), **_measure_memory(compiled), **told}


def trace_for_chip(target: CompileTarget) -> contextlib.AbstractContextManager[None]:
    """What is traced in this context is traced for `target`. Raises `NoCompiler` if this machine knows none such."""
    return _trace_on_sharding(_build_sharding(target))


@contextlib.contextmanager
def _trace_on_sharding(sharding: NamedSharding) -> Iterator[None]:
    """Without x64, under which kernels do not lower, and with the chip named, which some ask for while they lower."""
    with jax.enable_x64(False), jax.sharding.use_abstract_mesh(sharding.mesh.abstract_mesh):
        yield


def _compile_lowered(lowered: Any, target: CompileTarget, folder: str) -> tuple[Any, list[str]]:
    """The program compiled, and the lines that the compiler of its Mosaic GPU kernels printed.

    Raises:
      CompileError: if it does not compile, and the compiler's own words are printed only.
    """
    options = _build_options(target, folder)
    if target.toolchain.platform != "gpu" or not _rename_mosaic_kernels(lowered.compiler_ir("stablehlo")):
        return lowered.compile(compiler_options=options), []
    failed = None
    with _capture_output() as said, _set_variables(gpu_figures.VERBOSE_VARIABLES):
        try:
            compiled = lowered.compile(compiler_options=options)
        except Exception as error:
            failed = error
    if failed is None:
        return compiled, said
    words = [match[1] for line in said if (match := _MOSAIC_ERROR.search(line))]
    raise CompileError(f"{format_first_line(failed)}{': ' + words[0] if words else ''}") from failed


def _build_options(target: CompileTarget, folder: str) -> dict[str, str] | None:
    """Options of the compiler. Where it does not otherwise say what its kernels take, it writes that into `folder`."""
    toolchain = target.toolchain
    if toolchain.platform == "tpu":
        _remove_folder(environment.find_schedule_folder())
    if toolchain.platform == "gpu":
        return {**toolchain.options, "xla_dump_to": folder, **_DUMP_OPTIONS}
    return toolchain.options or None


def _remove_folder(folder: Path | None) -> None:
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def _measure_kernels(
    traced: Any,
    lowered: Any,
    compiled: Any,
    target: CompileTarget,
    folder: Path,
    said: list[str],
    depths: tuple[int, int] | None,
) -> dict[str, float]:
    """What the kernels of a GPU's program take, or the cycles of a TPU's."""
    if target.toolchain.platform == "tpu":
        schedules = environment.find_schedule_folder()
        tpu = next((tpu for tpu in TPUS if tpu.name == target.name), None)
        if schedules is None or tpu is None:
            return {}
        calls = pallas_calls.find_pallas_calls(traced.jaxpr)
        found = tpu_figures.compute_tpu_figures(schedules, calls, compiled.as_text() or "", tpu)
        _remove_folder(schedules)
        return found
    toolkit = target.toolchain.programs and target.toolchain.programs()
    gpu = next((gpu for gpu in GPUS if gpu.name == target.name), None)
    if toolkit is None or gpu is None:
        return {}
    shared = gpu_figures.measure_mosaic_shared_bytes(lowered.compiler_ir("stablehlo"))
    programs = gpu_figures.NvidiaTools(toolkit / "bin/ptxas", targets.find_disassembler())
    return gpu_figures.compute_gpu_figures(folder, said, shared, programs, gpu, depths)


def _rename_mosaic_kernels(module: Any) -> bool:
    """Give the program's Mosaic GPU kernels names that no other has; whether there are any.

    The compiler keeps such kernels in the process, by the hash that comes with them. So for a second architecture it
    would give out what it made for the first, even if that uses instructions which the second lacks. It would also not
    print its figures again.
    """
    kernels = list(gpu_figures.iter_mosaic_kernels(module))
    for operation, entries in kernels:
        name = hashlib.sha256(
            f"{next(_compilation_counter)}".encode() + entries[gpu_figures.KERNEL_HASH].value_bytes
        ).digest()
        entries[gpu_figures.KERNEL_HASH] = ir.StringAttr.get(name, context=module.context)
        operation.attributes["mhlo.backend_config"] = ir.DictAttr.get(entries, context=module.context)
    return bool(kernels)


@contextlib.contextmanager
def _capture_output() -> Iterator[list[str]]:
    """The lines that the process prints in the meantime, its libraries included, which keep some of it in buffers."""
    lines: list[str] = []
    flush = ctypes.CDLL(None).fflush
    flush(None)
    kept = {stream: os.dup(stream) for stream in (1, 2)}
    with tempfile.TemporaryFile() as file:
        for stream in kept:
            os.dup2(file.fileno(), stream)
        try:
            yield lines
        finally:
            flush(None)
            for stream, original in kept.items():
                os.dup2(original, stream)
                os.close(original)
            file.seek(0)
            lines += file.read().decode(errors="replace").splitlines()


@contextlib.contextmanager
def _set_variables(values: Mapping[str, str]) -> Iterator[None]:
    """Environment variables for a moment; those that are set already stay as they are."""
    set_here = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(set_here)
    try:
        yield
    finally:
        for name in set_here:
            os.environ.pop(name, None)


def _place_operand(sharding: NamedSharding, x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)  # type: ignore[no-untyped-call] # untyped upstream


def _measure_memory(compiled: Any) -> dict[str, float]:
    found: dict[str, float] = {}
    analysis = compiled.memory_analysis()
    if analysis is not None:
        found |= {
            "temporary_bytes": float(analysis.temp_size_in_bytes),
            "argument_bytes": float(analysis.argument_size_in_bytes),
            "output_bytes": float(analysis.output_size_in_bytes),
            "code_bytes": float(analysis.generated_code_size_in_bytes),
        }
    program = compiled.as_text() or ""
    for name, size in (("live_bytes", measure_live_bytes(program)), ("vmem_bytes", measure_vmem_bytes(program))):
        if size is not None:
            found[name] = float(size)
    return found


def measure_vmem_bytes(program: str) -> int | None:
    """The most scoped VMEM (blocks, scratch, stack) that one Pallas kernel takes, in the text of a compiled program.

    The kernels of a program run one after the other. What XLA itself keeps in VMEM, small operands for one, is not in
    it. None if there is no kernel or the text does not say.
    """
    kernels = program.split(_PALLAS_KERNEL)[1:]  # an instruction may run over several lines
    used = [match for text in kernels if (match := _SCOPED_MEMORY.search(text))]
    return max((sum(map(int, _VMEM_SIZE.findall(match[1]))) for match in used), default=None)


def format_first_line(error: BaseException) -> str:
    """What an error says first, on one line: a line that ends in a colon with the next, instructions by their name."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    words = ""
    for line in lines:
        words = f"{words} {line}".strip()
        if not words.endswith(":"):
            break
    words = _INSTRUCTION.sub(r"\1", words) or "no message"
    words = words if len(words) <= _MAX_REASON else words[: _MAX_REASON - 1] + "…"
    return f"{type(error).__name__}: {words}"


@functools.cache
def _build_sharding(target: CompileTarget) -> NamedSharding:
    """Everything on one chip of the target. Kept: a topology is made once in a process.

    Raises:
      NoCompiler: if the compiler is missing or does not know the target.
    """
    toolchain = target.toolchain
    if (reason := toolchain.missing) is not None:
        raise NoCompiler(reason)
    # In a process that has the accelerator, the library is loaded already, and must keep asking what the machine has.
    with _set_variables({} if jax.default_backend() == toolchain.platform else toolchain.environment):
        try:
            topology = topologies.get_topology_desc(platform=toolchain.topologies, **target.topology)
        except Exception as error:  # of many types, from a library that is loaded here
            raise NoCompiler(
                f"{toolchain.modules[0]} describes no {target.name}: {format_first_line(error)}"
            ) from error
    mesh = Mesh(np.array(topology.devices[:1]), ("chip",))
    return NamedSharding(mesh, PartitionSpec())  # type: ignore[no-untyped-call] # untyped upstream
