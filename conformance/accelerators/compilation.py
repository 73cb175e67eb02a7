"""Compile a JAX program for an accelerator that this machine lacks, with the accelerator's real compiler.

`compile_for` takes a jitted function, its operands and a chip. It returns measurements of the compiled program, or
raises the reason why the program does not compile. The check `compiles` turns this outcome into its verdict. Optional
packages add further measurements by observers (`conformance.accelerators.program_observers`).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import itertools
import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxlib.mlir import ir

from conformance import program_cache
from conformance.accelerators.program_observers import CompilerRequests, ObservedProgram, load_observers
from conformance.accelerators.targets import CompileTarget
from conformance.temporary_folders import use_temporary_folder

_MAX_REASON = 400  # longest error message in a record, in characters
_KERNEL_HASH = "kernel_hash"  # MLIR attribute by which the compiler of Mosaic GPU kernels identifies a cached kernel
# Matches an error line that this compiler prints.
_MOSAIC_ERROR = re.compile(r"error: (.+)")
_compilation_counter = itertools.count()
# Matches an HLO instruction in an error message. Its operands and attributes take hundreds of characters, so messages
# keep only its name.
_INSTRUCTION = re.compile(r"(%\S+) = .*? metadata=\{[^}]*\}")


class NoCompiler(Exception):
    """This machine cannot compile for the target; the message says why."""


class CallRefused(Exception):
    """The implementation refuses the call for this target; the message is the reason that it gives."""


class CompileError(Exception):
    """The program does not compile; the message is the first line of the compiler's error."""


def compile_for(
    target: CompileTarget, function: Any, operands: tuple[Any, ...], depths: tuple[int, int] | None = None
) -> Mapping[str, float]:
    """Compile a program for one chip, and return measurements of the compiled program by name.

    Args:
      function: a jitted function.
      operands: the function's operands in any pytree: arrays, or other objects with a shape and a dtype.
      depths: the head dimensions of keys and of values (H, V), if the program is attention. Observers use them to count
        the pairs of a query and a key.

    Returns:
      measurements by name: `compile_seconds`, which includes tracing and lowering; `argument_bytes`, `output_bytes` and
      `code_bytes` in HBM; `temporary_bytes`, the HBM that the compiler adds for temporaries, which is zero if it finds
      room for them elsewhere; and the measurements of the observers.

    Raises:
      NoCompiler: if this machine cannot compile for the target.
      CallRefused: if the function raises `NotImplementedError` while it is traced.
      CompileError: if the function cannot be traced, lowered or compiled.
    """
    sharding = _build_sharding(target)
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), operands)
    observers = load_observers()
    start = time.perf_counter()
    with _trace_on_sharding(sharding):
        try:
            traced = function.trace(*placed)
        except NotImplementedError as error:
            raise CallRefused(format_first_line(error)) from error
        except Exception as error:  # the implementation may raise any type; it becomes the reason in the record
            raise CompileError(format_first_line(error)) from error
        try:
            lowered = traced.lower()
            with program_cache.bypass_cache(), use_temporary_folder("compiler") as temporary:
                folder = Path(temporary.path)
                requests = [observer.prepare(target, folder) for observer in observers]
                compiled, printed = _compile_lowered(lowered, target, requests)
                seconds = time.perf_counter() - start
                figures = _measure_memory(compiled)
                program = ObservedProgram(target, traced, lowered, compiled, folder, printed, depths)
                for observer in observers:
                    figures |= observer.measure(program)
        except CompileError:
            raise
        except Exception as error:  # the compiler's errors are of many types
            raise CompileError(format_first_line(error)) from error
    return {"compile_seconds": round(seconds, 3), **figures}


def trace_for_chip(target: CompileTarget) -> contextlib.AbstractContextManager[None]:
    """Return a context where JAX traces for one chip of `target`. Raises `NoCompiler` if its compiler is missing."""
    return _trace_on_sharding(_build_sharding(target))


@contextlib.contextmanager
def _trace_on_sharding(sharding: NamedSharding) -> Iterator[None]:
    """Make JAX trace for the chip of `sharding` within this context.

    x64 is off, since kernels do not lower under x64. The chip is the abstract mesh, since some kernels read the device
    kind from the mesh.
    """
    with jax.enable_x64(False), jax.sharding.use_abstract_mesh(sharding.mesh.abstract_mesh):
        yield


def _compile_lowered(
    lowered: Any, target: CompileTarget, requests: Sequence[CompilerRequests]
) -> tuple[Any, list[str]]:
    """Compile a lowered program; also return the lines that the compiler of its Mosaic GPU kernels printed.

    That compiler prints its error instead of raising it. So its output is captured, and the printed error is added to
    the message.

    Raises:
      CompileError: if a program with Mosaic GPU kernels does not compile.
    """
    options = dict(target.toolchain.options)
    variables: dict[str, str] = {}
    for request in requests:
        options |= request.options
        variables |= request.variables
    if target.toolchain.platform != "gpu" or not _rename_mosaic_kernels(lowered.compiler_ir("stablehlo")):
        return lowered.compile(compiler_options=options or None), []
    failed = None
    with _capture_output() as printed, _set_variables(variables):
        try:
            compiled = lowered.compile(compiler_options=options)
        except Exception as error:
            failed = error
    if failed is None:
        return compiled, printed
    words = [match[1] for line in printed if (match := _MOSAIC_ERROR.search(line))]
    raise CompileError(f"{format_first_line(failed)}{': ' + words[0] if words else ''}") from failed


def _rename_mosaic_kernels(module: Any) -> bool:
    """Give each Mosaic GPU kernel of the program a unique hash; return whether the program has such kernels.

    The compiler caches these kernels in the process by a hash in the module. The hash does not depend on the
    architecture. So for a second GPU the compiler would return the code that it compiled for the first GPU. The second
    GPU may lack instructions of that code. The compiler would also not print the kernel's registers and spills again.
    """
    kernels = list(iter_mosaic_kernels(module))
    for operation, entries in kernels:
        name = hashlib.sha256(f"{next(_compilation_counter)}".encode() + entries[_KERNEL_HASH].value_bytes).digest()
        entries[_KERNEL_HASH] = ir.StringAttr.get(name, context=module.context)
        operation.attributes["mhlo.backend_config"] = ir.DictAttr.get(entries, context=module.context)
    return bool(kernels)


def iter_mosaic_kernels(module: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield each call of a Mosaic GPU kernel in a lowered module, as (operation, its backend configuration)."""
    found = []

    def look(operation: ir.Operation) -> ir.WalkResult:
        config: Any = operation.attributes.get("mhlo.backend_config", None)
        if isinstance(config, ir.DictAttr) and _KERNEL_HASH in config:
            found.append((operation, {config[at].name: config[at].attr for at in range(len(config))}))
        return ir.WalkResult.ADVANCE

    module.operation.walk(look)
    yield from found


@contextlib.contextmanager
def _capture_output() -> Iterator[list[str]]:
    """Capture the lines that the process prints within this context, including the output of its C libraries.

    C libraries buffer their output, so the buffers are flushed before and after. The list is filled when the context
    ends.
    """
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
    """Set environment variables within this context; a variable that the user has set keeps its value."""
    set_here = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(set_here)
    try:
        yield
    finally:
        for name in set_here:
            os.environ.pop(name, None)


def _measure_memory(compiled: Any) -> dict[str, float]:
    """Return the sizes that the compiler reports for a compiled program, in bytes, by name."""
    analysis = compiled.memory_analysis()
    if analysis is None:
        return {}
    return {
        "temporary_bytes": float(analysis.temp_size_in_bytes),
        "argument_bytes": float(analysis.argument_size_in_bytes),
        "output_bytes": float(analysis.output_size_in_bytes),
        "code_bytes": float(analysis.generated_code_size_in_bytes),
    }


def format_first_line(error: BaseException) -> str:
    """Format an exception as one line: its type and the first line of its message.

    If that line ends in a colon, the next line is appended. HLO instructions are shortened to their names.
    """
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
    """Build the sharding that places every array on one chip of the target.

    The result is cached, so that each topology is created once per process.

    Raises:
      NoCompiler: if the compiler is missing or does not know the target.
    """
    toolchain = target.toolchain
    if (reason := toolchain.missing) is not None:
        raise NoCompiler(reason)
    # If this machine has the accelerator, its library is loaded already, and the environment must stay as it is.
    with _set_variables({} if jax.default_backend() == toolchain.platform else toolchain.environment):
        try:
            topology = topologies.get_topology_desc(platform=toolchain.topologies, **target.topology)
        except Exception as error:  # this loads the compiler's library, which may raise any type
            raise NoCompiler(
                f"{toolchain.modules[0]} does not know the chip {target.name}: {format_first_line(error)}"
            ) from error
    mesh = Mesh(np.array(topology.devices[:1]), ("chip",))
    return NamedSharding(mesh, PartitionSpec())
