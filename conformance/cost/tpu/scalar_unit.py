"""Simulate the scalar unit of a TPU core, to count how often each bundle of a kernel's schedule runs.

A kernel's loops and conditions depend on scalars: the position in the grid, and the lists of blocks that the mask
leaves. If these lists are known, the scalar instructions of a schedule (`conformance.cost.tpu.tpu_schedule`) can be
run. They determine which branches are taken. Vector instructions are not run; they only take their cycles.

A value that is read from unknown memory is unknown, and so is everything computed from it. If a branch depends on an
unknown value, the simulation raises `UnknownPath`. `tpu_figures` uses the resulting cycles as the estimate of a call.
"""

from __future__ import annotations

import collections
import dataclasses
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

MAX_INSTRUCTIONS = 8_000_000
"""Largest number of scalar instructions in a simulation; they take some seconds in Python.

This is enough for tens of thousands of steps of a grid.
"""


class UnknownPath(Exception):
    """The path of the kernel cannot be determined; the message says why."""


@dataclasses.dataclass(frozen=True)
class ScheduleRun:
    """Result of simulating a schedule; `entries` counts by bundle how often a basic block began there."""

    cycles: int
    entries: Mapping[int, int]


@dataclasses.dataclass(frozen=True)
class ScalarInstruction:
    """A scalar instruction of a TPU schedule."""

    result: str  # name of the instruction's result; empty if it has none
    code: str
    given: tuple[str, ...]  # texts of the operands: names, numbers, and addresses in memory
    # Name of the predicate under which the instruction acts, with `!` in front if the predicate must be false; empty if
    # the instruction always acts.
    condition: str = ""
    # Name of the value that the result takes if the condition does not hold; empty if there is none.
    otherwise: str = ""


_BRANCH, _LOAD, _STORE, _PHI, _SELECT = "sbr.rel", "sld", "sst", "sphi", "scalar_select"
_COPY = re.compile(r"dma\.\w+_to_smem")
_SLOT_TEXT = re.compile(
    r"(?:%(?P<result>\w+) = )?(?P<code>(?:[sp][a-z]|dma|int_to_ptr|inlined)[\w.]*)(?P<rest>.*)", re.S
)
_COMMENT = re.compile(r"/\*.*?\*/", re.S)
_CONDITION = re.compile(r"\((!?)%(\w+)(?:, %(\w+))?\)")
_TARGET = re.compile(r"target bundleno = (\d+)")
_ARGUMENT_TEXT = re.compile(r"\[smem:\[[^\]]*\]\]|\[[^\]]*\]|!?%\w+|(?<![\w.])-?\d+\b")
_NAME = re.compile(r"%(\w+)")
_SYMBOL = re.compile(r"#\w+")
# An operand may be followed by the name of the allocation that it points into, which is no operand.
_ALLOCATION = re.compile(r"(?<=\w) \[#\w+\]")
_ARGUMENT = re.compile(r"index: (\d+), kind: input")
_VALUE, _ADDRESS, _CORE = "operand", "address of operand", "/* core id */"


def parse_instructions(slots: str) -> tuple[ScalarInstruction, ...]:
    """Parse the scalar instructions in the text of one bundle, in order; other instructions are left out."""
    found = (_parse_instruction(slot) for slot in slots.split(" ;; "))
    return tuple(instruction for instruction in found if instruction is not None)


def _parse_instruction(text: str) -> ScalarInstruction | None:
    """Parse the text of one slot of a bundle; None if the slot has no scalar instruction."""
    slot = _SLOT_TEXT.match(_COMMENT.sub("", text).strip(" {}\n"))
    if slot is None:
        return None
    result, code, rest = slot["result"] or "", slot["code"], slot["rest"]
    if _CORE in text:
        return ScalarInstruction(result, _CORE, ())
    if code.startswith("inlined"):
        number = _ARGUMENT.search(text)
        return number and ScalarInstruction(result, _VALUE if "<no memory space>" in text else _ADDRESS, (number[1],))
    condition = _CONDITION.search(rest)
    asked, otherwise = (condition[1] + condition[2], condition[3] or "") if condition else ("", "")
    rest = _ALLOCATION.sub("", rest.replace(condition[0], "", 1) if condition else rest)
    target = _TARGET.search(rest)
    given = (target[1],) if target else tuple(_ARGUMENT_TEXT.findall(rest))
    return ScalarInstruction(result, code, given, asked, otherwise)


def run_schedule(bundles: Sequence[str], lists: Mapping[int, Sequence[int]], delay: int, core: int = 0) -> ScheduleRun:
    """Simulate a schedule from its first bundle to its last, and count the bundles that run.

    Args:
      lists: by index of a known scalar operand, its words in the order in which they lie in scalar memory.
      delay: number of delay slots: bundles after a branch that run whether or not the branch is taken.
      core: index of the simulated core among the cores that share the call.

    Raises:
      UnknownPath: if a branch depends on an unknown value, or more than `MAX_INSTRUCTIONS` instructions run.
    """
    machine = _ScalarMachine(_select_needed([parse_instructions(text) for text in bundles]), lists, core)
    cycles, at, done, entries = 0, 0, 0, collections.Counter[int]()
    blocks: dict[int, _Block] = {}
    while at < len(bundles):
        block = blocks.get(at) or blocks.setdefault(at, machine.block(at, delay))
        entries[at] += 1
        cycles += block.length
        done += 1 + len(block.work)
        if done > MAX_INSTRUCTIONS:
            raise UnknownPath(f"the kernel runs more than {MAX_INSTRUCTIONS} scalar instructions")
        for work in block.work:
            work()
        at = block.target if block.taken() else at + block.length
    return ScheduleRun(cycles, entries)


def _select_needed(bundles: Sequence[Sequence[ScalarInstruction]]) -> list[list[ScalarInstruction]]:
    """Select for each bundle the instructions that branches depend on, directly or through other instructions.

    Phi instructions are sorted to the front of their bundle, since they merge values before the bundle runs.
    """
    every = [one for bundle in bundles for one in bundle]
    by_result = {one.result: one for one in every if one.result}
    stores = [one for one in every if one.code == _STORE]
    kept = [one for one in every if one.code == _BRANCH or _COPY.fullmatch(one.code)]
    wanted = {id(one) for one in kept}
    while kept:
        one = kept.pop()
        names = [*_NAME.findall(" ".join(one.given)), one.condition.removeprefix("!"), one.otherwise]
        found = [by_result[name] for name in names if name in by_result]
        if one.code == _LOAD:
            found += [store for store in stores if not _cannot_alias(store.given[0], one.given[0])]
        kept += [other for other in found if id(other) not in wanted]
        wanted |= set(map(id, found))
    return [
        sorted((one for one in bundle if id(one) in wanted), key=lambda one: one.code != _PHI) for bundle in bundles
    ]


def _cannot_alias(stored: str, loaded: str) -> bool:
    """Check whether a load certainly does not read the address of a store.

    Addresses with different symbols are disjoint. A spilled value is loaded only by its symbol, so an address without a
    symbol does not read it.
    """
    stores, loads = _SYMBOL.findall(stored), _SYMBOL.findall(loaded)
    if stores and loads:
        return stores != loads
    return bool(stores) and stores[0].endswith("_spill")


@dataclasses.dataclass(frozen=True)
class _Block:
    """A basic block: the bundles up to a branch and its delay slots."""

    length: int
    work: tuple[Callable[[], None], ...]
    target: int
    taken: Callable[[], bool]


@dataclasses.dataclass(frozen=True)
class _OperandAddress:
    """The address of an operand outside scalar memory, represented by the operand's index.

    Before a copy, instructions convert the address. The result still points to the same operand.
    """

    operand: int


def _to_signed(x: int) -> int:
    """Wrap an integer to the range of signed 32-bit integers."""
    return (x + 2**31) % 2**32 - 2**31


def _to_unsigned(x: int) -> int:
    """Wrap an integer to the range of unsigned 32-bit integers."""
    return x % 2**32


_FUNCTIONS: dict[str, Callable[..., int]] = {
    "sadd": lambda a, b: _to_signed(a + b),
    "ssub": lambda a, b: _to_signed(a - b),
    "smul": lambda a, b: _to_signed(a * b),
    "sand": lambda a, b: _to_signed(a & b),
    "sor": lambda a, b: _to_signed(a | b),
    "sxor": lambda a, b: _to_signed(a ^ b),
    "sshll": lambda a, b: _to_signed(a << b),
    "sshrl": lambda a, b: _to_signed(_to_unsigned(a) >> b),
    "sshra": lambda a, b: a >> b,
    "por": lambda a, b: a | b,
    "pand": lambda a, b: a & b,
    "pnand": lambda a, b: 1 - (a & b),
    "pnor": lambda a, b: 1 - (a | b),
    "pxor": lambda a, b: a ^ b,
    "pneg": lambda a: 1 - a,
    "pmov": lambda a: a,
    "smov": lambda a: a,
    "int_to_ptr": lambda a: a,
    "scalar_lea": lambda a, b: _to_signed(a + b),
}
# Sizes of copies are given in granules. Their size depends on the generation; this is the largest, in words of 4 bytes.
_WORDS_PER_GRANULE = 512 // 4
_ADDRESS_KEEPING = frozenset({"sshll", "sand", "smov", "int_to_ptr"})
_RESOLVABLE = "[resolvable"


def _get_function(code: str) -> Callable[..., int] | None:
    """Return the function of integers that an opcode computes; None if the opcode is not known."""
    name, *kind = code.split(".")
    read = _to_unsigned if "u32" in kind else _to_signed
    if name in ("smin", "smax"):
        chosen = min if name == "smin" else max
        return lambda a, b: chosen(a, b, key=read)
    if name == "scmp":
        compare = getattr(operator, kind[0])
        return lambda a, b: int(compare(read(a), read(b)))
    return _FUNCTIONS.get(name)


class _ScalarMachine:
    """The state of a simulated scalar unit: values by name, and scalar memory. None stands for an unknown value.

    Each instruction is translated once into a Python function that changes this state. Loops call the function often.
    """

    def __init__(
        self, bundles: Sequence[Sequence[ScalarInstruction]], lists: Mapping[int, Sequence[int]], core: int
    ) -> None:
        self.bundles, self.lists, self.core = bundles, lists, core
        self.values: dict[str, Any] = collections.defaultdict(lambda: None)
        self.memory: dict[int, Any] = {}
        self.symbols: dict[str, int] = {}
        self.clock = 0
        self.kept_at: dict[str, int] = collections.defaultdict(int)
        self.meeting = {
            name for bundle in bundles for one in bundle if one.code == _PHI for name in _NAME.findall(str(one.given))
        }

    def block(self, start: int, delay: int) -> _Block:
        """Translate the basic block that starts at bundle `start`; `delay` is the number of delay slots."""
        for at in range(start, len(self.bundles)):
            branch = next((one for one in self.bundles[at] if one.code == _BRANCH), None)
            if branch is not None:
                work = self.works(range(start, min(at + 1 + delay, len(self.bundles))))
                return _Block(at + 1 + delay - start, work, int(branch.given[0]), self.holds(branch.condition))
        return _Block(len(self.bundles) - start, self.works(range(start, len(self.bundles))), 0, lambda: False)

    def works(self, part: range) -> tuple[Callable[[], None], ...]:
        """Translate the instructions of the bundles in `part` into functions, except branches."""
        return tuple(self.work(one) for at in part for one in self.bundles[at] if one.code != _BRANCH)

    def holds(self, condition: str) -> Callable[[], bool]:
        """Translate a condition into a function that evaluates it, or raises `UnknownPath` for an unknown predicate."""
        values, name, asked = self.values, condition.removeprefix("!"), not condition.startswith("!")

        def found() -> bool:
            known = values[name]
            if known is None:
                raise UnknownPath(f"a condition depends on {name}, which is not known")
            return bool(known) is asked

        return found if condition else lambda: True

    def work(self, one: ScalarInstruction) -> Callable[[], None]:
        """Translate an instruction with its condition into a function that performs it."""
        act = self.act(one)
        if not one.condition:
            return act
        holds, values = self.holds(one.condition), self.values

        def conditionally() -> None:
            if one.result and values[one.condition.removeprefix("!")] is None:
                self.keep(one.result, None)
            elif holds():
                act()
            elif one.otherwise:
                self.keep(one.result, values[one.otherwise])

        return conditionally

    def act(self, one: ScalarInstruction) -> Callable[[], None]:
        """Translate an instruction into a function that performs it, without regard to its condition."""
        if one.code == _STORE:
            place, value = self.place(one.given[0]), self.value(one.given[1])
            return lambda: self.store(place(), [value()])
        if _COPY.fullmatch(one.code):
            source, size, to = map(self.value, one.given[:3])
            return lambda: self.copy(source(), size(), to())
        found, result = self.found(one), one.result
        if result in self.meeting:
            return lambda: self.keep(result, found())
        values = self.values

        def act() -> None:
            values[result] = found()

        return act

    def found(self, one: ScalarInstruction) -> Callable[[], Any]:
        """Translate an instruction into a function that returns its result; None stands for an unknown result."""
        if one.code in (_VALUE, _ADDRESS):
            number = int(one.given[0])
            known = int(self.lists[number][0]) if one.code == _VALUE and number in self.lists else None
            return lambda: _OperandAddress(number) if one.code == _ADDRESS else known
        if one.code == _CORE:
            return lambda: self.core
        if one.code == _LOAD:
            place, memory = self.place(one.given[0]), self.memory

            def loaded() -> Any:
                at = place()
                return None if at is None else memory.get(at)

            return loaded
        if one.code == _PHI:
            names = _NAME.findall(" ".join(one.given))
            return lambda: self.values[max(names, key=self.kept_at.__getitem__)]
        given = [self.value(text) for text in one.given if not text.startswith(_RESOLVABLE)]
        if one.code == _SELECT:
            which, left, right = given
            return lambda: None if which() is None else left() if which() else right()
        function, still_there = _get_function(one.code), one.code.split(".")[0] in _ADDRESS_KEEPING

        def computed() -> Any:
            known = [value() for value in given]
            if function is None or None in known:
                return None
            if isinstance(known[0], _OperandAddress):
                return known[0] if still_there else None
            return function(*known) if all(isinstance(value, int) for value in known) else None

        return computed

    def value(self, text: str) -> Callable[[], Any]:
        """Translate an operand (a name, a number or an address) into a function that returns its value."""
        values, name = self.values, text.lstrip("!%")
        if text.startswith("%"):
            return lambda: values[name]
        if text.startswith("!"):
            return lambda: None if values[name] is None else 1 - values[name]
        if text.startswith("["):
            return self.place(text)
        number = _to_signed(int(text))
        return lambda: number

    def place(self, text: str) -> Callable[[], int | None]:
        """Translate an address in scalar memory, a sum of terms, into a function that returns it; None if unknown."""
        fixed, names = 0, []
        for term in text.replace("[smem:", "").strip("[]").split(" + "):
            if term.startswith("#"):
                # Each symbol gets its own range of addresses, which is as large as any core's scalar memory.
                fixed += self.symbols.setdefault(term, (len(self.symbols) + 1) << 18)
            elif term.startswith("%"):
                names.append(term[1:])
            else:
                fixed += int(term.removeprefix("$"), 0)
        values = self.values

        def found() -> int | None:
            known = [values[name] for name in names]
            return fixed + sum(known) if all(isinstance(value, int) for value in known) else None

        return found

    def keep(self, name: str, value: Any) -> None:
        """Set a value by name, and record the time: a phi instruction takes the newest of its operands."""
        self.clock += 1
        self.kept_at[name] = self.clock
        self.values[name] = value

    def store(self, at: int | None, words: Sequence[Any]) -> None:
        """Store words in scalar memory from address `at` on. Raises `UnknownPath` if the address is unknown."""
        if at is None:
            raise UnknownPath("a value is stored at an unknown address")
        self.memory.update(zip(range(at, at + len(words)), words, strict=True))

    def copy(self, source: Any, granules: Any, to: Any) -> None:
        """Copy an operand to address `to` of scalar memory; if the operand is not known, the memory becomes unknown.

        Raises:
          UnknownPath: if the address or the size is unknown.
        """
        if to is None or granules is None:
            raise UnknownPath("an operand is copied to an unknown address")
        known = isinstance(source, _OperandAddress) and source.operand in self.lists
        words = (
            [int(word) for word in self.lists[source.operand]] if known else [None] * (granules * _WORDS_PER_GRANULE)
        )
        self.store(to, words)
