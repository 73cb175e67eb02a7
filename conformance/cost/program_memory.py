"""Measure the memory of a compiled program from its HLO text: live intermediate values, and the VMEM of its kernels.

The compiler's own number (`temp_size_in_bytes`) is the HBM that it adds for temporaries. On TPUs this is often zero
although the program has temporaries. XLA keeps some temporaries in VMEM, which is 128 MiB on some generations. It puts
others in the buffers of results that are not written yet. With larger operands, the same program needs HBM for these
temporaries. So this module counts all values that are live at once, in any memory.

A value is live from the instruction that computes the value to the last instruction that reads it, in the order of the
schedule. Operands, constants and results do not count. A value that is copied from one memory to another counts once,
even if it is copied in slices.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

_DTYPE_BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "bf16": 2, "f16": 2, "token": 0}
_BITS_IN_NAME = re.compile(r"[a-z]+(\d+)")
_INSTRUCTION_START = re.compile(r"\n\s+(?:ROOT )?%(?=\S+ = )")
_ARRAY = re.compile(r"([a-z]+\d*[a-z0-9]*)\[([\d,]*)\](?:\{([^{}]*)\})?")
_OPCODE = re.compile(r"\s*([a-z][a-z0-9-]*)\((.*)$", re.DOTALL)
_OPERAND = re.compile(r"%([^\s,()]+)")
_TILE = re.compile(r"T\(([\d,]+)\)")
_ALIASING = re.compile(r"output_to_operand_aliasing=\{(.*?)\)\}")
_ALIASED_PAIR = re.compile(r"\{(\d*)\}: \((\d+),")
# Opcodes of instructions whose result is a view of existing buffers, so that they need no new buffer.
_VIEWS = frozenset(
    {"bitcast", "get-tuple-element", "tuple", "copy-done", "slice-done", "async-done", "optimization-barrier", "while"}
)
_UNCOUNTED = frozenset({"parameter", "constant"})
# Asynchronous copies. Their result is a tuple: the operand, its copy or slice in another memory, and a flag.
_COPY_STARTS = frozenset({"copy-start", "slice-start"})
# A custom call that joins slices which are already adjacent in memory.
_CONCATENATION = 'custom_call_target="ConcatBitcast"'

# These patterns find a Pallas kernel in the text of a compiled program, and the sizes of its scoped VMEM. VMEM is XLA's
# memory space 1.
_PALLAS_KERNEL = 'custom_call_target="tpu_custom_call"'
_SCOPED_MEMORY = re.compile(r'"used_scoped_memory_configs":\[([^\]]*)\]')
_VMEM_SIZE = re.compile(r'"memory_space":"1","offset":"\d+","size":"(\d+)"')


def measure_program_memory(program: str) -> dict[str, float]:
    """Measure `live_bytes` and `vmem_bytes` by a compiled program's HLO text, except numbers that the text lacks."""
    sizes = {"live_bytes": measure_live_bytes(program), "vmem_bytes": measure_vmem_bytes(program)}
    return {name: float(size) for name, size in sizes.items() if size is not None}


def measure_vmem_bytes(program: str) -> int | None:
    """Measure the largest scoped VMEM (blocks, scratch, stack) of one Pallas kernel, in bytes.

    The largest kernel counts, since the kernels of a program run one after the other. VMEM of XLA itself does not
    count. Return None if the program has no Pallas kernel, or its text does not contain their sizes.
    """
    kernels = program.split(_PALLAS_KERNEL)[1:]  # an instruction may take several lines
    used = [match for text in kernels if (match := _SCOPED_MEMORY.search(text))]
    return max((sum(map(int, _VMEM_SIZE.findall(match[1]))) for match in used), default=None)


@dataclasses.dataclass(frozen=True)
class _Instruction:
    """One HLO instruction of the schedule."""

    name: str
    opcode: str
    sizes: tuple[int, ...]  # bytes of the result; one number for each array if the result is a tuple
    operands: tuple[str, ...]
    # Pairs (index of an array of the result, index of the operand whose buffer that array reuses).
    shared: tuple[tuple[int, int], ...]
    put_together: bool  # whether the result joins operands that are already adjacent in memory, without copying them
    index: int | None  # for a get-tuple-element, the index of the tuple's element; otherwise None


def measure_live_bytes(program: str) -> int | None:
    """Measure the most bytes of intermediate values live at once; None if instructions are not in scheduled order."""
    if "is_scheduled=true" not in program.split("\n", 1)[0]:
        return None
    schedule = list(_iter_instructions(program))
    if not schedule:
        return None
    places: dict[str, list[frozenset[str]]] = {}  # by name of a value: for each of its arrays, possible buffers
    sizes: dict[str, int] = {}
    last: dict[str, int] = {}
    results: frozenset[str] = frozenset()
    for number, line in enumerate(schedule):
        places[line.name] = _assign_buffers(line, places, sizes)
        read = frozenset[str]().union(*(buffers for name in line.operands for buffers in places.get(name, [])))
        for buffer in read.union(*places[line.name]):
            last[buffer] = number
        results = frozenset[str]().union(*places[line.name])  # the last line is the root, whose buffers are the results
    at_once = most = 0
    begins = {f"{line.name}.{i}": n for n, line in enumerate(schedule) for i in range(len(line.sizes))}
    changes = [0] * (len(schedule) + 1)
    for buffer, size in sizes.items():
        if buffer not in results:
            changes[begins[buffer]] += size
            changes[last[buffer] + 1] -= size
    for change in changes:
        at_once += change
        most = max(most, at_once)
    return most


def _assign_buffers(
    line: _Instruction, places: dict[str, list[frozenset[str]]], sizes: dict[str, int]
) -> list[frozenset[str]]:
    """Find the buffers that may hold each array of an instruction's result, and add new buffers to `sizes`.

    Args:
      places: by name of an earlier value, the possible buffers of each of its arrays.
      sizes: by name of a buffer, its bytes.
    """
    given = [places.get(name, []) for name in line.operands]
    if line.opcode in _UNCOUNTED:
        return [frozenset() for _ in line.sizes]
    if line.opcode == "get-tuple-element" and line.index is not None:
        return given[0][line.index : line.index + 1]
    if line.opcode in _VIEWS:
        return [buffers for one in given for buffers in one][: len(line.sizes)]
    if line.put_together:
        return [frozenset[str]().union(*(buffers for one in given for buffers in one))]
    found = []
    in_place = dict(line.shared)
    for i, size in enumerate(line.sizes):
        if line.opcode in _COPY_STARTS:
            found.append(frozenset[str]().union(*given[0]) if i < 2 else frozenset())
        elif i in in_place:
            found.append(frozenset[str]().union(*given[in_place[i]]))
        else:
            sizes[f"{line.name}.{i}"] = size
            found.append(frozenset({f"{line.name}.{i}"}))
    return found


def _iter_instructions(program: str) -> Iterator[_Instruction]:
    """Yield the instructions of the program's entry computation; an instruction may take several lines of text."""
    _, _, entry = program.partition("\nENTRY ")
    body, _, _ = entry.partition("\n}\n")
    for text in _INSTRUCTION_START.split(body)[1:]:
        name, _, rest = text.partition(" = ")
        yield _parse_instruction(name, rest)


def _parse_instruction(name: str, text: str) -> _Instruction:
    """Parse an HLO instruction from its name and the text after `%name = `."""
    shape, rest = _split_shape(text)
    match = _OPCODE.match(rest)
    opcode, tail = (match[1], match[2]) if match else ("", "")
    operands = tail[: tail.index(")")] if ")" in tail else tail
    index = re.search(r"index=(\d+)", tail) if opcode == "get-tuple-element" else None
    shared = _ALIASING.search(tail)
    pairs = _ALIASED_PAIR.findall(shared[1]) if shared else []
    return _Instruction(
        name=name,
        opcode=opcode,
        sizes=tuple(_measure_array(*array) for array in _ARRAY.findall(shape)),
        operands=tuple(_OPERAND.findall(operands)),
        shared=tuple((int(result or 0), int(operand)) for result, operand in pairs),
        put_together=_CONCATENATION in tail,
        index=int(index[1]) if index else None,
    )


def _split_shape(text: str) -> tuple[str, str]:
    """Split the text of an instruction into its shape (one array, or a tuple in parentheses) and the remaining text."""
    if not text.startswith("("):
        shape, _, rest = text.partition(" ")
        return shape, rest
    depth = 0
    for i, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return text[: i + 1], text[i + 1 :]
    return text, ""


def _measure_array(dtype: str, dims: str, layout: str) -> int:
    """Compute the bytes of an array, including the padding of its innermost dimensions to the layout's tiles.

    Args:
      dtype: dtype in HLO text, such as `bf16`.
      dims: lengths of the axes, separated by commas.
      layout: the layout in HLO text, such as `1,0:T(8,128)`.
    """
    shape = [int(n) for n in dims.split(",") if n]
    order, _, tiling = layout.partition(":")
    inner_first = [int(n) for n in order.split(",") if n]
    if len(inner_first) == len(shape):
        shape = [shape[axis] for axis in reversed(inner_first)]
    if shape and (match := _TILE.search(tiling)):
        tile = [int(n) for n in match[1].split(",")]
        for place, length in enumerate(reversed(tile), start=1):
            if place <= len(shape):
                shape[-place] = -(-shape[-place] // length) * length
    bits = _BITS_IN_NAME.match(dtype)
    width = _DTYPE_BYTES.get(dtype, int(bits[1]) / 8 if bits else 0)
    return math.ceil(math.prod(shape) * width)
