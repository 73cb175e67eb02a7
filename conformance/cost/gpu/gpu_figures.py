"""What the kernels of a GPU program take of a multiprocessor, and the least cycles that they can take.

XLA leaves the assembler text of its own kernels, Triton's among them, in a folder. The compiler of Mosaic GPU kernels
prints it. `ptxas`, NVIDIA's assembler, says with `--verbose` how many registers a kernel has and how many it spills,
and `nvdisasm`, the disassembler, what instructions it became.
"""

from __future__ import annotations

import dataclasses
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxlib.mlir import ir

from conformance.accelerators.gpus import Gpu
from conformance.cost.gpu import gpu_cycle_bounds, sass_loops

# Makes the compiler of Mosaic GPU kernels print each, and what `ptxas --verbose` says of it.
VERBOSE_VARIABLES = {"MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_PTX": "1"}
KERNEL_HASH = "kernel_hash"
"""Under which a Mosaic GPU kernel comes with what it is known by to its compiler."""
_MODULE = "module"
_LAUNCH, _FUNCTION = "gpu.launch", "func.func"
_MOSAIC_SUFFIX = "_mosaic_gpu"  # ends the names of its kernels, and `_kernel`, where they are functions of the GPU
_LAUNCH_LINE = re.compile(r"(?:([\w.$]+) grid: .*)?shared_memory: (\d+) bytes")
_ENTRY_LINE = re.compile(r"Compiling entry function '([^']+)'")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SPILLED_BYTES = re.compile(r"(\d+) bytes spill stores")
_PTX_START = ".version "  # begins an assembler text among what is printed
_PTXAS_LINE = "ptxas "
_ENTRY = re.compile(r"\.entry\s+([\w.$]+)\s*\(.*?\)\s*((?:\.\w+[^{\n]*\n)*)", re.DOTALL)
_THREADS_DIRECTIVE = re.compile(r"\.(?:req|max)ntid\s+(\d+)(?:,\s*(\d+))?(?:,\s*(\d+))?")


@dataclasses.dataclass(frozen=True)
class NvidiaTools:
    """NVIDIA's programs: the assembler, and the disassembler if it is there."""

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
    """The most that one kernel of a program takes, and what each kernel that multiplies matrices takes.

    Args:
      folder: what XLA dumped.
      said: lines that were printed while it compiled.
      shared: shared memory of each Mosaic GPU kernel in the program, in bytes, by its name.
      programs: which take code apart and together.
      gpu: what it was compiled for.
      depths: of keys and of values, if the program is attention.

    Returns:
      `shared_bytes` of a program of the grid, `registers` of a thread and `spilled_bytes` of a thread, each where it is
      told. Of each kernel with a loop over products these by `<kernel>.<figure>`, its `occupancy`, and its bound
      (`conformance.cost.gpu.gpu_cycle_bounds`).
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
    """Kernels that differ, under names that differ: the second of a name is `<name>_2`."""
    known: dict[str, list[dict[str, float]]] = {}
    for name, told in kernels:
        alike = known.setdefault(name, [])
        if told not in alike:
            alike.append(told)
            yield (name if len(alike) == 1 else f"{name}_{len(alike)}"), told


def list_ptx_files(folder: Path, said: Sequence[str]) -> list[Path]:
    """Assembler texts: what XLA left in the folder, and what was printed, which is put there."""
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
    return [(found[1] or "", int(found[2])) for found in map(_LAUNCH_LINE.search, text.splitlines()) if found]


def _iter_numbers(pattern: re.Pattern[str], lines: Iterable[str]) -> Iterator[int]:
    return (int(match[1]) for line in lines if (match := pattern.search(line)))


def _assemble(source: Path, programs: NvidiaTools, architecture: str) -> tuple[list[str], str]:
    """What the assembler says of a text, and its instructions; none where they cannot be had."""
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
    """The kernels of a text that have loops over products, each with its figures."""
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
    """Of a block, as the directives of a kernel say; 0 if they do not."""
    found = _THREADS_DIRECTIVE.search(directives)
    sizes = [int(size) for size in found.groups() if size] if found else [0]
    return sizes[0] * (sizes[1] if len(sizes) > 1 else 1) * (sizes[2] if len(sizes) > 2 else 1)


def _select_kernel_lines(kernel: str, heard: Sequence[str]) -> list[str]:
    """The lines that the assembler says of one kernel."""
    own: list[str] = []
    current = ""
    for line in heard:
        if found := _ENTRY_LINE.search(line):
            current = found[1]
        elif current == kernel:
            own.append(line)
    return own


def iter_mosaic_kernels(module: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    """The calls of Mosaic GPU kernels in a lowered module, each with its configuration."""
    found = []

    def look(operation: ir.Operation) -> ir.WalkResult:
        config: Any = operation.attributes.get("mhlo.backend_config", None)
        if isinstance(config, ir.DictAttr) and KERNEL_HASH in config:
            found.append((operation, {config[at].name: config[at].attr for at in range(len(config))}))
        return ir.WalkResult.ADVANCE

    module.operation.walk(look)
    yield from found


def measure_mosaic_shared_bytes(module: Any) -> dict[str, int]:
    """The shared memory that each Mosaic GPU kernel of a lowered module asks for, by the kernel's name.

    It is the last operand of the kernel's launch, a constant. Empty if the kernels are not as this expects.
    """
    sizes: dict[str, int] = {}
    last: list[int] = []

    def look(operation: ir.Operation) -> ir.WalkResult:
        # A function comes after the launch in it.
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
