"""Measure the kernels of a compiled GPU program: registers, spills, shared memory, and a lower bound on cycles.

XLA writes the PTX of its own kernels and of Triton kernels to a folder. The compiler of Mosaic GPU kernels prints its
PTX. This module assembles the PTX again with NVIDIA's `ptxas --verbose`, which reports a kernel's registers and spills.
It disassembles the result with `nvdisasm`, and computes bounds from the machine code (`sass_loops`,
`gpu_cycle_bounds`). `CostObserver` adds the measurements to records.
"""

from __future__ import annotations

import dataclasses
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxlib.mlir import ir

from conformance.accelerators.compilation import iter_mosaic_kernels
from conformance.accelerators.gpus import Gpu
from conformance.cost.gpu import gpu_cycle_bounds, sass_loops

# Make the compiler of Mosaic GPU kernels print each kernel's PTX, and the output of `ptxas --verbose`.
VERBOSE_VARIABLES = {"MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_PTX": "1"}
_MODULE = "module"
_LAUNCH, _FUNCTION = "gpu.launch", "func.func"
# Suffix of the names of Mosaic GPU kernels; the names of their functions on the GPU continue with `_kernel`.
_MOSAIC_SUFFIX = "_mosaic_gpu"
_LAUNCH_LINE = re.compile(r"(?:([\w.$]+) grid: .*)?shared_memory: (\d+) bytes")
_ENTRY_LINE = re.compile(r"Compiling entry function '([^']+)'")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SPILLED_BYTES = re.compile(r"(\d+) bytes spill stores")
_PTX_START = ".version "  # the first line of PTX within printed lines begins with this directive
_PTXAS_LINE = "ptxas "
_ENTRY = re.compile(r"\.entry\s+([\w.$]+)\s*\(.*?\)\s*((?:\.\w+[^{\n]*\n)*)", re.DOTALL)
_THREADS_DIRECTIVE = re.compile(r"\.(?:req|max)ntid\s+(\d+)(?:,\s*(\d+))?(?:,\s*(\d+))?")


@dataclasses.dataclass(frozen=True)
class NvidiaTools:
    """Paths of NVIDIA's assembler and disassembler."""

    ptxas: Path
    nvdisasm: Path | None


def compute_gpu_figures(
    folder: Path,
    said: Sequence[str],
    shared: Mapping[str, int],
    programs: NvidiaTools,
    gpu: Gpu,
    depths: tuple[int, int] | None,
) -> dict[str, float]:
    """Measure a GPU program: maxima over all its kernels, and each kernel with matrix products.

    Args:
      folder: the folder that XLA wrote PTX and launches to.
      said: lines that were printed while the program was compiled.
      shared: by name of a Mosaic GPU kernel of the program, its shared memory in bytes.
      depths: head dims of keys and of values, if the program is attention; else None.

    Returns:
      numbers by name; numbers that are not known are missing. `shared_bytes` of a block, and `registers` and
      `spilled_bytes` of a thread, are maxima over all kernels. Each kernel that has a loop with matrix products has the
      same numbers as `<kernel>.<name>`, its `occupancy`, and its bounds (`conformance.cost.gpu.gpu_cycle_bounds`).
    """
    launched = [found for text in folder.glob("*.thunk_sequence.txt") for found in _parse_launches(text.read_text())]
    lines, kernels = list(said), list[tuple[str, dict[str, float]]]()
    for source in list_ptx_files(folder, said):
        heard, code = _assemble(source, programs, gpu.architecture)
        lines += heard
        kernels += _iter_kernel_figures(source.read_text(), heard, code, dict(launched) | dict(shared), gpu, depths)
    found = {
        "shared_bytes": [*shared.values(), *(size for _, size in launched)],
        "registers": list(_iter_numbers(_REGISTERS, lines)),
        "spilled_bytes": list(_iter_numbers(_SPILLED_BYTES, lines)),
    }
    most = {name: float(max(sizes)) for name, sizes in found.items() if sizes}
    return most | {f"{name}.{figure}": value for name, told in _number_names(kernels) for figure, value in told.items()}


def _number_names(kernels: Iterable[tuple[str, dict[str, float]]]) -> Iterator[tuple[str, dict[str, float]]]:
    """Make kernel names unique (`<name>_2` for a second one); kernels of equal name and measurements count once."""
    known: dict[str, list[dict[str, float]]] = {}
    for name, told in kernels:
        alike = known.setdefault(name, [])
        if told not in alike:
            alike.append(told)
            yield (name if len(alike) == 1 else f"{name}_{len(alike)}"), told


def list_ptx_files(folder: Path, said: Sequence[str]) -> list[Path]:
    """Write the PTX in the printed lines to files in the folder, then list all PTX files in the folder."""
    texts: list[list[str]] = []
    inside = False
    for line in said:
        if line.startswith(_PTX_START):
            texts.append([])
        inside = line.startswith(_PTX_START) or (inside and not line.startswith(_PTXAS_LINE))
        if inside:
            texts[-1].append(line)
    for number, text in enumerate(texts):
        (folder / f"printed-{number}.ptx").write_text("\n".join(text) + "\n")
    return sorted(folder.glob("*.ptx"))


def _parse_launches(text: str) -> list[tuple[str, int]]:
    """Parse the kernel launches in XLA's dump of thunks, as pairs (kernel's name or empty, shared memory in bytes)."""
    return [(found[1] or "", int(found[2])) for found in map(_LAUNCH_LINE.search, text.splitlines()) if found]


def _iter_numbers(pattern: re.Pattern[str], lines: Iterable[str]) -> Iterator[int]:
    """Yield the number (the pattern's first group) from each line that the pattern matches."""
    return (int(match[1]) for line in lines if (match := pattern.search(line)))


def _assemble(source: Path, programs: NvidiaTools, architecture: str) -> tuple[list[str], str]:
    """Assemble a PTX file; return the assembler's output lines and the disassembly.

    The disassembly is empty if there is no disassembler, if assembling failed, or if the PTX has no matrix products.
    """
    binary = source.with_suffix(".cubin")
    command = [str(programs.ptxas), "--verbose", f"--gpu-name={architecture}", f"--output-file={binary}", str(source)]
    heard = subprocess.run(command, capture_output=True, text=True, check=False).stderr.splitlines()
    if programs.nvdisasm is None or not binary.exists() or "mma" not in source.read_text():
        return heard, ""
    command = [str(programs.nvdisasm), "--print-code", str(binary)]
    return heard, subprocess.run(command, capture_output=True, text=True, check=False).stdout


def _iter_kernel_figures(
    text: str,
    heard: Sequence[str],
    code: str,
    shared: Mapping[str, int],
    gpu: Gpu,
    depths: tuple[int, int] | None,
) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield the name and measurements of each kernel whose loops contain matrix products.

    `text` is a PTX file, `heard` has the output lines of `ptxas --verbose` for the file, and `code` is its disassembly.
    """
    threads = {name: _count_threads(rest) for name, rest in _ENTRY.findall(text)}
    for name, loops in sass_loops.iter_kernels_with_loops(sass_loops.parse_sass(code)):
        plain = name.removesuffix("_kernel").removesuffix(_MOSAIC_SUFFIX) if _MOSAIC_SUFFIX in name else name
        own = _select_kernel_lines(name, heard)
        told = {
            figure: float(next(_iter_numbers(pattern, own)))
            for figure, pattern in (("registers", _REGISTERS), ("spilled_bytes", _SPILLED_BYTES))
        }
        if size := shared.get(name, shared.get(plain)):
            told["shared_bytes"] = float(size)
        if count := threads.get(name):
            told["occupancy"] = gpu_cycle_bounds.compute_occupancy(
                gpu, threads=count, registers=told["registers"], shared_bytes=told.get("shared_bytes", 0.0)
            )
            if depths is not None:
                told |= gpu_cycle_bounds.compute_kernel_figures(loops, gpu, -(-count // 32), depths)
        yield plain.replace(".", "_"), told


def _count_threads(directives: str) -> int:
    """Return the number of threads per block from the PTX directives of a kernel; 0 if they do not contain it."""
    found = _THREADS_DIRECTIVE.search(directives)
    sizes = [int(size) for size in found.groups() if size] if found else [0]
    return sizes[0] * (sizes[1] if len(sizes) > 1 else 1) * (sizes[2] if len(sizes) > 2 else 1)


def _select_kernel_lines(kernel: str, heard: Sequence[str]) -> list[str]:
    """Select the lines of the output of `ptxas --verbose` that belong to one kernel."""
    own: list[str] = []
    current = ""
    for line in heard:
        if found := _ENTRY_LINE.search(line):
            current = found[1]
        elif current == kernel:
            own.append(line)
    return own


def measure_mosaic_shared_bytes(module: Any) -> dict[str, int]:
    """Read the shared memory in bytes that each Mosaic GPU kernel of a lowered module requests, by name of the kernel.

    The shared memory is the last operand of the kernel's `gpu.launch`, a constant. Kernels without such a constant are
    left out.
    """
    sizes: dict[str, int] = {}
    last: list[int] = []

    def look(operation: ir.Operation) -> ir.WalkResult:
        # The walk is in post-order, so it visits the launch inside a function before the function itself.
        if operation.name.endswith(_LAUNCH):
            constant: Any = operation.operands[len(operation.operands) - 1].owner
            if "value" in constant.attributes:
                last.append(int(constant.attributes["value"].value))
        elif operation.name.endswith(_FUNCTION) and last:
            name = str(operation.attributes["sym_name"].value).removesuffix(_MOSAIC_SUFFIX)  # type: ignore[attr-defined]
            sizes[name] = max(sizes.get(name, 0), last.pop())
        return ir.WalkResult.ADVANCE

    for _, config in iter_mosaic_kernels(module):
        with module.context as context:
            context.allow_unregistered_dialects, before = True, context.allow_unregistered_dialects
            context.load_all_available_dialects()
            parsed = ir.Module.parse(config[_MODULE].value_bytes, context)
            parsed.operation.walk(look, ir.WalkOrder.POST_ORDER)
            context.allow_unregistered_dialects = before
    return sizes
