"""What the kernels of a GPU program take of a multiprocessor: shared memory, registers, and what they spill of these.

XLA and the compiler of Mosaic GPU kernels each write down a part of it; `ptxas`, NVIDIA's assembler, says the rest with
`--verbose`.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxlib.mlir import ir

# Makes the compiler of Mosaic GPU kernels print what `ptxas --verbose` says of each.
VERBOSE = {"MOSAIC_GPU_DUMP_PTXAS": "1"}
HASH = "kernel_hash"
"""Under which a Mosaic GPU kernel comes with what it is known by to its compiler."""
_MODULE = "module"
_LAUNCH = "gpu.launch"
_SHARED = re.compile(r"shared_memory: (\d+) bytes")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SPILLED = re.compile(r"(\d+) bytes spill stores")


def figures(
    folder: Path, said: Iterable[str], shared: Sequence[int], ptxas: Path, architecture: str
) -> dict[str, float]:
    """The most that one kernel of a program takes.

    Args:
      folder: what XLA dumped.
      said: lines that were printed while it compiled.
      shared: shared memory of each Mosaic GPU kernel in the program, in bytes.
      ptxas: the assembler.
      architecture: as it names it.

    Returns:
      `shared_bytes` of a program of the grid, `registers` of a thread and `spilled_bytes` of a thread, each where it is
      told.
    """
    lines = [*said, *_assembled(folder, ptxas, architecture)]
    texts = [path.read_text() for path in folder.glob("*.thunk_sequence.txt")]
    found = {
        "shared_bytes": [*shared, *(size for text in texts for size in _numbers(_SHARED, text.splitlines()))],
        "registers": list(_numbers(_REGISTERS, lines)),
        "spilled_bytes": list(_numbers(_SPILLED, lines)),
    }
    return {name: float(max(sizes)) for name, sizes in found.items() if sizes}


def _numbers(pattern: re.Pattern[str], lines: Iterable[str]) -> Iterator[int]:
    return (int(match[1]) for line in lines if (match := pattern.search(line)))


def _assembled(folder: Path, ptxas: Path, architecture: str) -> Iterator[str]:
    """What the assembler says of XLA's own kernels, Triton's among them, which XLA does not repeat."""
    for path in sorted(folder.glob("*.ptx")):
        command = [str(ptxas), "--verbose", f"--gpu-name={architecture}", "--output-file=/dev/null", str(path)]
        yield from subprocess.run(command, capture_output=True, text=True, check=False).stderr.splitlines()


def mosaic_kernels(module: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    """The calls of Mosaic GPU kernels in a lowered module, each with its configuration."""
    found = []

    def look(operation: ir.Operation) -> ir.WalkResult:
        config: Any = operation.attributes.get("mhlo.backend_config", None)
        if isinstance(config, ir.DictAttr) and HASH in config:
            found.append((operation, {config[at].name: config[at].attr for at in range(len(config))}))
        return ir.WalkResult.ADVANCE

    module.operation.walk(look)
    yield from found


def mosaic_shared_bytes(module: Any) -> list[int]:
    """The shared memory that each Mosaic GPU kernel of a lowered module asks for.

    It is the last operand of the kernel's launch, a constant. Empty if the kernels are not as this expects.
    """
    sizes: list[int] = []

    def look(operation: ir.Operation) -> ir.WalkResult:
        if operation.name.endswith(_LAUNCH):
            constant: Any = operation.operands[len(operation.operands) - 1].owner
            if "value" in constant.attributes:
                sizes.append(int(constant.attributes["value"].value))
        return ir.WalkResult.ADVANCE

    for _, config in mosaic_kernels(module):
        with module.context as context:
            context.allow_unregistered_dialects, before = True, context.allow_unregistered_dialects
            context.load_all_available_dialects()
            ir.Module.parse(config[_MODULE].value_bytes, context).operation.walk(look)
            context.allow_unregistered_dialects = before
    return sizes
