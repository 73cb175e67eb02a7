"""How much memory a compiled program's intermediate values take at once, read off the text of the program.

The compiler's own figure (`temp_size_in_bytes`) counts what it adds in HBM. On TPUs that is often zero although there
are temporaries: XLA keeps some in VMEM, 128 MiB of it on some generations, and puts others where results will be
written. Beside larger operands the same program needs HBM for them, so what is live at once is counted here too,
wherever it is kept: each value from the instruction that makes it to the last that reads it, in the order of the
schedule, operands, constants and results left out. A value that is copied from one memory to another, whole or in
slices that are put together there, counts once.
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
# Instructions that give a name to what is there already, or to what is never freed.
_VIEWS = frozenset(
    {"bitcast", "get-tuple-element", "tuple", "copy-done", "slice-done", "async-done", "optimization-barrier", "while"}
)
_UNCOUNTED = frozenset({"parameter", "constant"})
# Results: the operand itself, it or a slice of it in another memory, and a flag.
_COPY_STARTS = frozenset({"copy-start", "slice-start"})
_CONCATENATION = 'custom_call_target="ConcatBitcast"'  # slices that lie one after the other already


@dataclasses.dataclass(frozen=True)
class _Instruction:
    """One line of the schedule; `sizes` are the bytes of its result, one for each array of a tuple."""

    name: str
    opcode: str
    sizes: tuple[int, ...]
    operands: tuple[str, ...]
    shared: tuple[tuple[int, int], ...]  # (number of the result, number of the operand in whose place it is)
    put_together: bool  # whether the result is its operands, one after the other
    index: int | None  # of a get-tuple-element


def measure_live_bytes(program: str) -> int | None:
    """The most bytes that intermediate values of a scheduled program take at once; none if it is not scheduled."""
    if "is_scheduled=true" not in program.split("\n", 1)[0]:
        return None
    schedule = list(_iter_instructions(program))
    if not schedule:
        return None
    places: dict[str, list[frozenset[str]]] = {}  # of each value: the buffers that each of its arrays may lie in
    sizes: dict[str, int] = {}
    last: dict[str, int] = {}
    results: frozenset[str] = frozenset()
    for number, line in enumerate(schedule):
        places[line.name] = _assign_buffers(line, places, sizes)
        read = frozenset[str]().union(*(buffers for name in line.operands for buffers in places.get(name, [])))
        for buffer in read.union(*places[line.name]):
            last[buffer] = number
        results = frozenset[str]().union(*places[line.name])  # in the end those of the last line, the root
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
    """Where the arrays of an instruction's result lie; new buffers are added to `sizes`."""
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
    """The instructions of the entry computation; an instruction may run over several lines."""
    _, _, entry = program.partition("\nENTRY ")
    body, _, _ = entry.partition("\n}\n")
    for text in _INSTRUCTION_START.split(body)[1:]:
        name, _, rest = text.partition(" = ")
        yield _parse_instruction(name, rest)


def _parse_instruction(name: str, text: str) -> _Instruction:
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
    """The shape in front of an instruction, a tuple in parentheses or one array, and the rest."""
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
    """Bytes of an array, its innermost dimensions padded to the tile of its layout."""
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
