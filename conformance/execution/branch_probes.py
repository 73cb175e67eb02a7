"""Record which branches of a kernel's own source run, and between which values their conditions decide.

While branches are recorded, the code of the kernel's functions is replaced by a copy of the same source in which each
condition calls a probe. The probe notes the condition's outcome and returns its value. The copy is compiled from the
syntax tree. So this works the same in every version of Python, costs nothing in other code, and has the operands of a
comparison at hand. Afterwards every function has its own code again.

Conditions are the tests of `if`, `while`, conditional expressions and comprehensions, and each operand of `and` and
`or` in them. Of other `and` and `or`, all operands but the last are conditions. So is whether a `for` loop's body runs.
There are none in `assert`, `match` and `except`, outside of functions, on a line marked `pragma: no cover`, and on
traced values: JAX traces both sides of `cond` and the body of `pl.when`.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import dataclasses
import gc
import linecache
import operator
import os
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from conformance.execution.kernel_constants import iter_kernel_functions
from conformance.execution.source_digests import parse_source

_OPERATORS: Mapping[type[ast.cmpop], tuple[str, Callable[[Any, Any], Any]]] = {
    ast.Eq: ("==", operator.eq),
    ast.NotEq: ("!=", operator.ne),
    ast.Lt: ("<", operator.lt),
    ast.LtE: ("<=", operator.le),
    ast.Gt: (">", operator.gt),
    ast.GtE: (">=", operator.ge),
    ast.Is: ("is", operator.is_),
    ast.IsNot: ("is not", operator.is_not),
    ast.In: ("in", lambda left, right: left in right),
    ast.NotIn: ("not in", lambda left, right: left not in right),
}
_COMPARE = dict(_OPERATORS.values())
_TEST, _COMPARISON, _LOOP, _BODY = (f"__conformance_{name}__" for name in ("test", "comparison", "loop", "body"))
_INSTALLED = ("site-packages", "dist-packages")
_NO_COVER = "pragma: no cover"
_MAX_OPERANDS = 8
"""The most pairs of operands of a condition that are noted in one call."""
_MAX_ELEMENTS = 64
"""The most elements of a container that are noted."""
_MAX_TEXT = 60

Plain = int | float | str | tuple[Any, ...] | None
"""A noted value: a number, text, the name of a dtype, a tuple of these, None, or the name of any other type."""


@dataclasses.dataclass(frozen=True)
class Condition:
    """A condition in the source of a kernel.

    Attributes:
      file: the path of the file.
      line: the number of the line on which it begins.
      text: its source, shortened.
      is_loop: whether it is a `for` loop, whose outcome is whether its body runs.
      raises: for the outcomes False and True, whether the statement that follows only raises an exception.
      numbers: the integers in it.
    """

    file: str
    line: int
    text: str
    is_loop: bool
    raises: tuple[bool, bool]
    numbers: tuple[int, ...]


@dataclasses.dataclass
class Observation:
    """The outcomes of a condition in one call, and operators with the operands that were compared."""

    outcomes: set[bool] = dataclasses.field(default_factory=set)
    operands: list[tuple[str, Plain, Plain]] = dataclasses.field(default_factory=list)


class Recording:
    """The conditions of a kernel, and what was seen of them since `clear`.

    Attributes:
      conditions: all conditions in the functions of the kernel's files.
      seen: what was seen, by the condition's index.
      table_keys: the keys of whole numbers, as tuples, of tables among the globals of the kernel's modules.
    """

    def __init__(self) -> None:
        """Begin without conditions."""
        self.conditions: list[Condition] = []
        self.seen: dict[int, Observation] = {}
        self.table_keys: tuple[tuple[int, ...], ...] = ()

    def clear(self) -> None:
        """Forget what was seen."""
        self.seen = {}

    def note(self, index: int, outcome: bool, operands: tuple[str, Plain, Plain] | None = None) -> None:
        """Note the outcome of a condition."""
        seen = self.seen.setdefault(index, Observation())
        seen.outcomes.add(outcome)
        if operands is not None and len(seen.operands) < _MAX_OPERANDS and operands not in seen.operands:
            seen.operands.append(operands)

    def test(self, index: int, value: Any) -> Any:
        """Note whether `value` is true, and return it."""
        plain = simplify(value)
        self.note(index, bool(value), ("!=", plain, 0) if isinstance(plain, int | float) else None)
        return value

    def compare(self, index: int, symbol: str, left: Any, right: Any) -> Any:
        """Compare two values, note the outcome, and return it."""
        result = _COMPARE[symbol](left, right)
        self.note(index, bool(result), (symbol, simplify(left), simplify(right, is_container="in" in symbol)))
        return result

    def loop(self, index: int, iterable: Any) -> Any:
        """Note that a loop begins, and return what it runs over."""
        self.note(index, False)
        return iterable

    def body(self, index: int) -> None:
        """Note that the body of a loop runs."""
        self.note(index, True)


def simplify(value: Any, *, is_container: bool = False) -> Plain:
    """Return the part of a value that can be kept without keeping arrays or tracers alive."""
    if isinstance(value, bool | np.bool_):
        return int(value)
    if isinstance(value, int | np.integer):
        return int(value)
    if isinstance(value, float | np.floating):
        return float(value)
    if isinstance(value, str):
        return value[:_MAX_TEXT]
    if isinstance(value, np.dtype) or type(value).__name__ == "_ScalarMeta":
        return str(np.dtype(value))
    if isinstance(value, tuple | list) or (is_container and isinstance(value, set | frozenset | Mapping)):
        elements = list(value) if len(value) <= _MAX_ELEMENTS else []
        return tuple(simplify(element) for element in elements)
    return None if value is None else f"<{type(value).__name__}>"


@contextlib.contextmanager
def record_branches(call: Callable[..., Any], packages: Sequence[str] = ()) -> Iterator[Recording]:
    """Record the branches of a kernel within the block.

    Args:
      call: the kernel. The files below the folder of its first function are read, as far as their functions are loaded.
      packages: names of packages whose functions are recorded too.
    """
    recording = Recording()
    own: dict[Key, types.CodeType] = {}
    probed: dict[Key, types.CodeType] = {}
    belongs = _find_kernel_files(call, packages)
    functions = _list_functions()
    files = set(filter(belongs, {function.__code__.co_filename for function in functions}))
    recording.table_keys = _list_table_keys(f.__globals__ for f in functions if f.__code__.co_filename in files)
    for path in sorted(files):
        with contextlib.suppress(OSError, SyntaxError, ValueError):  # no source, or none of this version of Python
            _probe_file(path, recording.conditions, own, probed)
    probes = {_TEST: recording.test, _COMPARISON: recording.compare, _LOOP: recording.loop, _BODY: recording.body}
    vars(builtins).update(probes)
    try:
        _replace_code(own, probed)
        yield recording
    finally:
        _replace_code(probed, own)
        for name in probes:
            delattr(builtins, name)


Key = tuple[str, str, int]
"""The identity of code: its file, its qualified name and its first line."""


def _get_key(code: types.CodeType) -> Key:
    return code.co_filename, code.co_qualname, code.co_firstlineno


def _list_functions() -> list[types.FunctionType]:
    """List all functions that exist, also those that `gc.freeze` hides from the collector."""
    is_frozen = gc.get_freeze_count() > 0
    if is_frozen:
        gc.unfreeze()
    found = [x for x in gc.get_objects() if type(x) is types.FunctionType]
    if is_frozen:
        gc.freeze()
    return found


def _replace_code(old: Mapping[Key, types.CodeType], new: Mapping[Key, types.CodeType]) -> None:
    """Give each function that has a code of `old` the code of the same key of `new`."""
    for function in _list_functions():
        code = function.__code__
        known = old.get(key := _get_key(code))
        # A file that was edited after it was imported, or rewritten as by pytest, has other code.
        if known is not None and known.co_code == code.co_code and known.co_freevars == new[key].co_freevars:
            function.__code__ = new[key]


def _find_kernel_files(call: Callable[..., Any], packages: Sequence[str]) -> Callable[[str], bool]:
    """Return a function that tells whether a file belongs to the kernel or to one of the packages."""
    first = next((f for f in iter_kernel_functions(call) if Path(f.__code__.co_filename).is_file()), None)
    file = None if first is None else Path(first.__code__.co_filename).resolve()
    folders = [] if file is None or file.parent.name in _INSTALLED else [file.parent]
    for package in packages:
        folders += [Path(place).resolve() for place in _list_package_folders(package)]

    def is_kernel_file(name: str) -> bool:
        if first is not None and name == first.__code__.co_filename:
            return True
        if not os.path.isabs(name):  # code of a string, whose name may be that of a file elsewhere
            return False
        path = Path(name).resolve()
        return any(
            path.is_relative_to(folder) and not {*_INSTALLED} & {*path.relative_to(folder).parts} for folder in folders
        )

    return is_kernel_file


def _list_table_keys(modules_of_functions: Iterable[dict[str, Any]]) -> tuple[tuple[int, ...], ...]:
    """List the keys of whole numbers in dictionaries and sets that modules hold."""
    modules = {id(names): names for names in modules_of_functions}
    tables = [x for names in modules.values() for x in names.values() if isinstance(x, Mapping | set | frozenset)]
    keys = [key if isinstance(key, tuple) else (key,) for table in tables for key in list(table)[:_MAX_ELEMENTS]]
    return tuple(dict.fromkeys(key for key in keys if key and all(type(number) is int for number in key)))


def _list_package_folders(package: str) -> list[str]:
    """List the folders of an imported package, or the file of an imported module; empty if it is not imported."""
    module = sys.modules.get(package)
    if module is None:
        return []
    return list(getattr(module, "__path__", [])) or [str(getattr(module, "__file__", "") or "")]


def _probe_file(
    path: str, conditions: list[Condition], own: dict[Key, types.CodeType], probed: dict[Key, types.CodeType]
) -> None:
    """Compile a file without and with probes, and add its conditions and the code of its functions."""
    lines = linecache.getlines(path)
    source = "".join(lines)
    if not source:
        raise OSError(f"{path} has no source")
    plain = compile(source, path, "exec", dont_inherit=True)
    inserter = _ProbeInserter(path, lines, len(conditions))
    tree = ast.fix_missing_locations(inserter.visit(parse_source(source, path)))
    pairs = [(plain, compile(tree, path, "exec", dont_inherit=True))]
    for before, after in pairs:  # the list grows by the code within
        pairs += zip(_list_inner_code(before), _list_inner_code(after), strict=True)
    own |= {_get_key(before): before for before, _ in pairs}
    probed |= {_get_key(before): after for before, after in pairs}
    conditions += inserter.conditions


def _list_inner_code(code: types.CodeType) -> list[types.CodeType]:
    return [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]


class _ProbeInserter(ast.NodeTransformer):
    """Insert probes into the functions of a syntax tree, and list their conditions."""

    def __init__(self, path: str, lines: Sequence[str], first: int) -> None:
        """Begin a file, whose first condition has the index `first`."""
        self.conditions: list[Condition] = []
        self._path, self._lines, self._first = path, lines, first
        self._depth = 0

    def _visit_function(self, node: Any) -> Any:
        self._depth += 1
        node.body = [self.visit(each) for each in node.body] if isinstance(node.body, list) else self.visit(node.body)
        self._depth -= 1
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        """Visit a function."""
        return self._visit_function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> Any:
        """Visit an asynchronous function."""
        return self._visit_function(node)

    def visit_Lambda(self, node: ast.Lambda) -> Any:
        """Visit a function without a name."""
        return self._visit_function(node)

    def visit_If(self, node: ast.If) -> Any:
        """Probe the condition, and visit both bodies."""
        raises = _raises(node.orelse), _raises(node.body)
        node.test = self._probe(node.test, raises)
        node.body, node.orelse = ([self.visit(each) for each in body] for body in (node.body, node.orelse))
        return node

    def visit_IfExp(self, node: ast.IfExp) -> Any:
        """Probe the condition, and visit both values."""
        node.test = self._probe(node.test)
        node.body, node.orelse = self.visit(node.body), self.visit(node.orelse)
        return node

    def visit_While(self, node: ast.While) -> Any:
        """Probe the condition, and visit the bodies."""
        node.test = self._probe(node.test)
        node.body, node.orelse = ([self.visit(each) for each in body] for body in (node.body, node.orelse))
        return node

    def visit_comprehension(self, node: ast.comprehension) -> Any:
        """Probe the conditions of a comprehension."""
        node.iter = self.visit(node.iter)
        node.ifs = [self._probe(test) for test in node.ifs]
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> Any:
        """Probe the operands of `and` and `or` that decide; the last one is only a value."""
        *others, last = node.values
        node.values = [*(self._probe(value) for value in others), self.visit(last)]
        return node

    def visit_For(self, node: ast.For) -> Any:
        """Probe whether the body runs."""
        index = self._add(node, self._get_text(node).partition("\n")[0], is_loop=True)
        self.generic_visit(node)
        if index is not None:
            node.iter = _build_call(_LOOP, index, node.iter)
            node.body.insert(0, ast.copy_location(ast.Expr(_build_call(_BODY, index)), node.body[0]))
        return node

    def _probe(self, test: ast.expr, raises: tuple[bool, bool] = (False, False)) -> ast.expr:
        """Return a condition with a probe in place of each part that decides.

        Args:
          test: the condition. Its parts are visited.
          raises: for the outcomes False and True, whether an exception follows.
        """
        if isinstance(test, ast.BoolOp):
            # One false operand of `and` decides, and one true operand of `or`.
            others = (False, raises[1]) if isinstance(test.op, ast.Or) else (raises[0], False)
            *first, last = test.values
            test.values = [*(self._probe(value, others) for value in first), self._probe(last, raises)]
            return test
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            test.operand = self._probe(test.operand, (raises[1], raises[0]))
            return test
        if isinstance(test, ast.Constant):
            return test
        text = " ".join(self._get_text(test).split())
        numbers = tuple(
            abs(x.value) for x in ast.walk(test) if isinstance(x, ast.Constant) and type(x.value) is int and x.value
        )
        index = self._add(test, text, raises=raises, numbers=numbers)
        self.generic_visit(test)
        if index is None:
            return test
        if isinstance(test, ast.Compare) and len(test.ops) == 1:
            symbol = ast.Constant(_OPERATORS[type(test.ops[0])][0])
            return ast.copy_location(_build_call(_COMPARISON, index, symbol, test.left, test.comparators[0]), test)
        return ast.copy_location(_build_call(_TEST, index, test), test)

    def _get_text(self, node: Any) -> str:
        """Return the source of a node. Its columns count bytes."""
        lines = [line.encode() for line in self._lines[node.lineno - 1 : node.end_lineno]]
        lines[-1] = lines[-1][: node.end_col_offset]
        lines[0] = lines[0][node.col_offset :]
        return b"".join(lines).decode()

    def _add(
        self,
        node: Any,
        text: str,
        *,
        is_loop: bool = False,
        raises: tuple[bool, bool] = (False, False),
        numbers: tuple[int, ...] = (),
    ) -> int | None:
        """Add a condition and return its index; None if it is not recorded."""
        if not self._depth or text == "TYPE_CHECKING" or _NO_COVER in self._lines[node.lineno - 1]:
            return None
        text = text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 3]}..."
        self.conditions.append(Condition(self._path, node.lineno, text, is_loop, raises, numbers))
        return self._first + len(self.conditions) - 1


def _build_call(name: str, index: int, *values: ast.expr) -> ast.expr:
    return ast.Call(ast.Name(name, ast.Load()), [ast.Constant(index), *values], [])


def _raises(statements: Sequence[ast.stmt]) -> bool:
    """Tell whether the first statement raises an exception."""
    return bool(statements) and isinstance(statements[0], ast.Raise)
