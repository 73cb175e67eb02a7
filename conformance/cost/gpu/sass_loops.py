"""Find the loops of a GPU kernel in its machine code (SASS), as NVIDIA's disassembler `nvdisasm` prints it.

`gpu_cycle_bounds` counts the instructions of these loops. The only assumption is that an attention kernel spends its
time in loops over blocks that multiply matrices. The code is split into basic blocks at branches and labels, and back
edges give the loops. For each loop, this module finds the shortest and the longest path through one iteration, among
the paths with the most matrix products. An inner loop without matrix products is taken for a wait, and paths go around
it if possible.
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
    """One SASS instruction of a warp."""

    opcode: str  # the opcode with its modifiers, such as `HMMA.16816.F32.BF16`
    operands: str = ""
    # The predicate under which the instruction acts; empty if it always acts. It is issued in both cases.
    predicate: str = ""
    labels: tuple[str, ...] = ()
    product: MatrixProduct | None = None

    @functools.cached_property
    def name(self) -> str:
        """The opcode without modifiers: `HMMA` for `HMMA.16816.F32.BF16`."""
        return self.opcode.partition(".")[0]

    @functools.cached_property
    def target(self) -> str | None:
        """The label that the instruction may jump to; None if it is no jump to a label."""
        found = _TARGET.search(self.operands) if self.name in _JUMPS else None
        return found[1] if found else None

    @property
    def falls_through(self) -> bool:
        """Whether execution may continue with the instruction that follows this one in the code."""
        if self.name in _ENDS:
            return bool(self.predicate)
        # A conditional jump has a predicate, or an operand in front of the target as its condition.
        return self.name not in ("BRA", "JMP") or bool(self.predicate) or not self.operands.lstrip().startswith("`")


PathWork = tuple[float, float]
"""Work by which paths are compared: (multiplications on the tensor cores, number of instructions, maybe negated)."""


@dataclasses.dataclass(frozen=True)
class Loop:
    """An innermost loop that multiplies matrices, as the instructions that a warp runs in one iteration."""

    # The shortest path from start to end, among the paths with the most matrix products.
    shortest: tuple[Instruction, ...]
    # The longest path from start to end, among the paths with the most matrix products.
    longest: tuple[Instruction, ...]
    # The shortest of all paths. A warp runs it while another warp issues the products of the whole block.
    idle: tuple[Instruction, ...]


def parse_sass(text: str) -> dict[str, tuple[Instruction, ...]]:
    """Parse the output of `nvdisasm --print-code`; return the instructions of each function, by its name."""
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
    """Find the innermost loops that multiply matrices, in the order of the code."""
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
    """Split the code into basic blocks, as ranges of instructions: at labels, and after jumps and ends."""
    starts = {0} | {at for at, one in enumerate(code) if one.labels}
    starts |= {at + 1 for at, one in enumerate(code) if one.target or not one.falls_through or one.name in _ENDS}
    cuts = sorted(start for start in starts if start < len(code))
    return [range(start, stop) for start, stop in zip(cuts, [*cuts[1:], len(code)], strict=True)]


def _find_edges(code: Sequence[Instruction], blocks: Sequence[range]) -> list[tuple[int, ...]]:
    """Find for each basic block the indices of the blocks that may follow it."""
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
    """List the reachable blocks in reverse post-order: each block before its successors, except along back edges."""
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
    """Find the natural loops: by index of a loop's head, the indices of its blocks. The head dominates all of them."""
    before: dict[int, list[int]] = {at: [] for at in order}
    for at in order:
        for after in follow[at]:
            before[after].append(at)
    # The dominators of a block are the block itself and the common dominators of its predecessors.
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
    """The paths through a loop from its head back to it."""

    code: Sequence[Instruction]
    blocks: Sequence[range]  # the basic blocks of the function, as ranges of instructions
    follow: Sequence[Sequence[int]]  # for each block, the indices of its successors
    order: Sequence[int]  # indices of reachable blocks in reverse post-order
    head: int
    body: frozenset[int]  # indices of the loop's blocks that a path may use

    def avoid(self, wait: Iterable[int]) -> _LoopPaths:
        """Return the paths that avoid the blocks in `wait`, or all paths if avoiding them loses matrix products."""
        other = dataclasses.replace(self, body=self.body - frozenset(wait))
        most, left = (_count_multiplications(ways.best(-1, 1)) for ways in (self, other))
        return other if left >= most else self

    def best(self, longer: int, multiplying: int) -> tuple[Instruction, ...]:
        """Return the instructions of the longest (`longer=1`) or shortest (`longer=-1`) path; empty if there is none.

        With `multiplying=1`, only paths with the most matrix products are considered. Back edges of inner loops are
        left out, so each inner loop counts once.
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
        """Return the multiplications of a block on the tensor cores, and its number of instructions times `longer`."""
        inside = self._instructions(at)
        return _count_multiplications(inside), longer * len(inside)

    def _instructions(self, at: int) -> Sequence[Instruction]:
        """Return the instructions of the basic block with index `at`."""
        return self.code[self.blocks[at].start : self.blocks[at].stop]


def _count_multiplications(code: Iterable[Instruction]) -> float:
    """Count the scalar multiplications that instructions do on the tensor cores."""
    return sum(i.product.multiplications for i in code if i.product)


def iter_kernels_with_loops(functions: Mapping[str, Sequence[Instruction]]) -> Iterator[tuple[str, list[Loop]]]:
    """Yield (name, loops) for each function that has loops with matrix products."""
    for name, code in functions.items():
        if any(i.product for i in code) and (found := find_loops(code)):
            yield name, found
