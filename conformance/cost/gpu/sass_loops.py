"""Loops of a GPU kernel's machine code, as NVIDIA's disassembler `nvdisasm` prints it.

A kernel of attention spends its time in loops over blocks that multiply matrices. Nothing else is assumed of it: code
is cut at branches and labels, loops are found by their back edges, and of a loop the ways from its begin to its end
are looked at that multiply the most. A loop within, that multiplies nothing, is a wait: a way around it is taken
where there is one.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from conformance.cost.gpu import tensor_core_products
from conformance.cost.gpu.tensor_core_products import MatrixProduct

_SECTION = re.compile(r"\s*\.section\s+\.text\.([\w.$]+)")
_LABEL = re.compile(r"(\.L_\w+):")
_LINE = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*)")
_TARGET = re.compile(r"`\((\.L_\w+)\)")
_JUMPS = ("BRA", "JMP", "CALL")
_ENDS = ("EXIT", "RET", "BRX", "JMX", "KILL")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction of a warp.

    Attributes:
      opcode: with its modifiers, "HMMA.16816.F32.BF16".
      operands: their text.
      predicate: under which it acts; empty if always. It takes its turn either way.
      labels: those that stand before it.
      product: what it multiplies on the tensor cores, if it does.
    """

    opcode: str
    operands: str = ""
    predicate: str = ""
    labels: tuple[str, ...] = ()
    product: MatrixProduct | None = None

    @functools.cached_property
    def name(self) -> str:
        """The opcode without modifiers."""
        return self.opcode.partition(".")[0]

    @functools.cached_property
    def target(self) -> str | None:
        """The label that it may jump to."""
        found = _TARGET.search(self.operands) if self.name in _JUMPS else None
        return found[1] if found else None

    @property
    def falls_through(self) -> bool:
        """Whether the next instruction may follow."""
        if self.name in _ENDS:
            return bool(self.predicate)
        # Of a conditional jump, the condition is a predicate or stands before the target.
        return self.name not in ("BRA", "JMP") or bool(self.predicate) or not self.operands.lstrip().startswith("`")


PathWork = tuple[float, float]
"""Of a way: products of all its threads, and instructions."""


@dataclasses.dataclass(frozen=True)
class Loop:
    """An innermost loop that multiplies matrices: what one turn of a warp runs.

    Attributes:
      cheapest: the shortest way from begin to end, of those that multiply the most.
      dearest: the longest of these.
      idle: the shortest way of a warp whose products another one asks for.
    """

    shortest: tuple[Instruction, ...]
    longest: tuple[Instruction, ...]
    idle: tuple[Instruction, ...]


def parse_sass(text: str) -> dict[str, tuple[Instruction, ...]]:
    """The instructions of each function, by its name, in what `nvdisasm --print-code` printed."""
    found: dict[str, list[Instruction]] = {}
    here: list[Instruction] | None = None
    labels: list[str] = []
    constants: dict[str, int] = {}
    for line in text.splitlines():
        if section := _SECTION.match(line):
            here, labels, constants = found.setdefault(section[1], []), [], {}
        elif here is not None and (label := _LABEL.match(line)):
            labels.append(label[1])
        elif here is not None and (parts := _LINE.match(line)):
            predicate, opcode, operands = parts[1] or "", parts[2], parts[3].strip()
            tensor_core_products.note_constant(constants, opcode, operands)
            product = tensor_core_products.parse_product(opcode, operands, constants)
            here.append(Instruction(opcode, operands, predicate, tuple(labels), product))
            labels = []
    return {name: tuple(code) for name, code in found.items() if code}


def find_loops(code: Sequence[Instruction]) -> list[Loop]:
    """The innermost loops that multiply matrices, in order."""
    blocks = _split_blocks(code)
    follow = _find_edges(code, blocks)
    order = _order_blocks(follow)
    bodies = _find_natural_loops(follow, order)
    multiplies = {at for at in order if any(i.product for i in code[blocks[at].start : blocks[at].stop])}
    tensor = {head: body for head, body in bodies.items() if body & multiplies}
    innermost = {
        head: body
        for head, body in tensor.items()
        if not any(other != head and other in body and tensor[other] < body for other in tensor)
    }
    found = []
    for head, body in sorted(innermost.items(), key=lambda entry: blocks[entry[0]].start):
        waits = [inner for start, inner in bodies.items() if start in body and start != head and inner < body]
        graph = _LoopPaths(code, blocks, follow, order, head, frozenset(body))
        for wait in waits:
            graph = graph.avoid(wait)
        found.append(Loop(graph.best(-1, 1), graph.best(1, 1), graph.best(-1, 0)))
    return found


def _split_blocks(code: Sequence[Instruction]) -> list[range]:
    """The code cut where something may jump to, and after what may jump."""
    starts = {0} | {at for at, one in enumerate(code) if one.labels}
    starts |= {at + 1 for at, one in enumerate(code) if one.target or not one.falls_through or one.name in _ENDS}
    cuts = sorted(start for start in starts if start < len(code))
    return [range(start, stop) for start, stop in zip(cuts, [*cuts[1:], len(code)], strict=True)]


def _find_edges(code: Sequence[Instruction], blocks: Sequence[range]) -> list[tuple[int, ...]]:
    """The blocks that may follow each block."""
    at_label = {label: number for number, block in enumerate(blocks) for label in code[block.start].labels}
    found = []
    for number, block in enumerate(blocks):
        last = code[block.stop - 1]
        following = [number + 1] if last.falls_through and number + 1 < len(blocks) else []
        if last.target in at_label:
            following.append(at_label[last.target])
        found.append(tuple(dict.fromkeys(following)))
    return found


def _order_blocks(follow: Sequence[Sequence[int]]) -> list[int]:
    """Blocks that can be reached from the first one, each before those that follow it but for back edges."""
    seen, done = {0}, list[int]()
    stack = [(0, iter(follow[0]))]
    while stack:
        at, rest = stack[-1]
        after = next((other for other in rest if other not in seen), None)
        if after is None:
            done.append(at)
            stack.pop()
        else:
            seen.add(after)
            stack.append((after, iter(follow[after])))
    return done[::-1]


def _find_natural_loops(follow: Sequence[Sequence[int]], order: Sequence[int]) -> dict[int, set[int]]:
    """The blocks of each loop by its first block: every way into it goes through that one."""
    before: dict[int, list[int]] = {at: [] for at in order}
    for at in order:
        for after in follow[at]:
            before[after].append(at)
    # A block's dominators: itself, and those of all blocks before it.
    above = {at: set(order) for at in order}
    above[order[0]] = {order[0]}
    changed = True
    while changed:
        changed = False
        for at in order[1:]:
            new = {at} | set.intersection(*(above[other] for other in before[at]))
            changed, above[at] = changed or new != above[at], new
    found: dict[int, set[int]] = {}
    for at in order:
        for head in follow[at]:
            if head in above[at]:
                body, todo = found.setdefault(head, {head}), [at]
                while todo:
                    if (block := todo.pop()) not in body:
                        body.add(block)
                        todo += before[block]
    return found


@dataclasses.dataclass(frozen=True)
class _LoopPaths:
    """The ways through a loop from its first block back to it."""

    code: Sequence[Instruction]
    blocks: Sequence[range]
    follow: Sequence[Sequence[int]]
    order: Sequence[int]
    head: int
    body: frozenset[int]

    def avoid(self, wait: Iterable[int]) -> _LoopPaths:
        """The same without these blocks, unless no way that multiplies as much is left."""
        other = dataclasses.replace(self, body=self.body - frozenset(wait))
        most, left = (_count_multiplications(ways.best(-1, 1)) for ways in (self, other))
        return other if left >= most else self

    def best(self, longer: int, multiplying: int) -> tuple[Instruction, ...]:
        """Of the ways that multiply the most, or of all (0), the longest or the shortest (-1); none if there is none.

        Back edges of loops within are left out, so that these count once.
        """
        place = {at: number for number, at in enumerate(self.order)}
        found: dict[int, tuple[PathWork, tuple[int, ...]]] = {self.head: (self._weigh(self.head, longer), (self.head,))}
        ends: list[tuple[PathWork, tuple[int, ...]]] = []
        for at in sorted(self.body, key=place.__getitem__):
            if at not in found:
                continue
            (work, count), way = found[at]
            if self.head in self.follow[at]:
                ends.append(found[at])
            for after in self.follow[at]:
                if after in self.body and place[after] > place[at]:
                    more, longer_by = self._weigh(after, longer)
                    new = ((work + more) * multiplying, count + longer_by)
                    if after not in found or new > found[after][0]:
                        found[after] = (new, (*way, after))
        if not ends:
            return ()
        return tuple(i for at in max(ends, key=lambda end: end[0])[1] for i in self._instructions(at))

    def _weigh(self, at: int, longer: int) -> PathWork:
        inside = self._instructions(at)
        return _count_multiplications(inside), longer * len(inside)

    def _instructions(self, at: int) -> Sequence[Instruction]:
        return self.code[self.blocks[at].start : self.blocks[at].stop]


def _count_multiplications(code: Iterable[Instruction]) -> float:
    return sum(i.product.multiplications for i in code if i.product)


def iter_kernels_with_loops(functions: Mapping[str, Sequence[Instruction]]) -> Iterator[tuple[str, list[Loop]]]:
    """Each function that has loops which multiply matrices, with these."""
    for name, code in functions.items():
        if any(i.product for i in code) and (found := find_loops(code)):
            yield name, found
