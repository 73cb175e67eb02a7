"""The process in which a kernel runs: it does what it is asked, and answers with data.

It begins with two pipes. The first request says which kernel.
"""

from __future__ import annotations

import builtins
import dataclasses
import importlib
import operator
import os
import pkgutil
import struct
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

import conformance.driving
from conformance import program_cache
from conformance.calling import mishaps, registry
from conformance.calling.execution import Executor
from conformance.sandbox import (
    compilation_cache,
    confinement,
    declaration_codec,
    file_watcher,
    protocol,
    supervisor,
    tamper_check,
)

LENGTH = struct.Struct("<Q")


@dataclasses.dataclass(frozen=True)
class LoadRequest:
    """Which kernel, and what the process may do.

    Attributes:
      name: as `--impl` has it.
      products: what `--products` says.
      problem: what `--problem` says.
      path: where modules are looked for.
      scratch: the folder that may be written to.
    """

    name: str
    products: str | None
    problem: str | None
    path: tuple[str, ...]
    scratch: str


@dataclasses.dataclass(frozen=True)
class CallRequest:
    """What is asked: a function of an executor, and what it is given.

    Attributes:
      options: of the compiler.
      variant: which of the implementation's other calls, or "" for its own.
      generation: which of the executors that are alike; each compiles for itself.
      function: one of a module of ours.
      given: its arguments behind the executor.
      named: its keyword arguments.
    """

    options: tuple[tuple[str, bool | int], ...]
    variant: str
    generation: int
    function: Callable[..., Any]
    given: tuple[Any, ...]
    named: Mapping[str, Any]

    def is_same(self, other: CallRequest) -> bool:
        """Whether the other asks for the same: of the very objects that this one is given."""
        mine, others = (dataclasses.replace(order, given=(), named={}) for order in (self, other))
        given = len(self.given) == len(other.given) and all(map(operator.is_, self.given, other.given))
        return mine == others and given and not (self.named or other.named)


def serve(requests: int, answers: int) -> None:
    """Serve until the requests end, in a child: the process that was called stays above it."""
    supervisor.start_supervised((requests, answers))
    confinement.die_with_parent()
    load = protocol.unpack_request(_read(requests))
    sys.path[:] = load.path
    _send(answers, protocol.pack_answer(confinement.confine_process([Path(load.scratch)])))
    mine = os.getpid()
    try:
        before = _watched()
        files = file_watcher.FileWatcher(load.scratch)
        kernel, said = _loaded(load)
        loaded = {"opened": files.report(), "installed": files.installed_modules()}
    except BaseException as error:  # whatever an import raises, the judge hears of it
        _send(answers, protocol.pack_answer({"raised": _told(error)}))
        return
    _send(answers, protocol.pack_answer({"returned": said, "replaced": [], "files": loaded}))
    while True:
        request = _read(requests)
        if not request:
            return
        try:
            order = protocol.unpack_request(request)
            returned = order.function(kernel(order), *order.given, **order.named)
            replaced, opened = tamper_check.find_replaced(before), {"opened": files.report()}
            answer = protocol.pack_answer({"returned": returned, "replaced": replaced, "files": opened})
        except BaseException as error:  # a kernel may raise anything, SystemExit and KeyboardInterrupt too
            answer = protocol.pack_answer({"raised": _told(error), "files": {"opened": files.report()}})
        if os.getpid() != mine:
            os._exit(1)  # the kernel forked, and what it forked came back here: one process answers
        _send(answers, answer)


def _watched() -> tamper_check.NameSnapshot:
    """What no kernel may replace, all of it loaded before the kernel is."""
    for module in pkgutil.iter_modules(conformance.driving.__path__):
        importlib.import_module(f"{conformance.driving.__name__}.{module.name}")
    return tamper_check.take_snapshot()


def _loaded(load: LoadRequest) -> tuple[Callable[[CallRequest], Any], dict[str, Any]]:
    """What gives the executor that an order is for, and what the kernel declares."""
    implementation = registry.find(load.name, products=load.products, problem=load.problem)  # type: ignore[arg-type] # checked before
    executors: dict[Any, Executor] = {}

    def kernel(order: CallRequest) -> Executor:
        key = (order.options, order.variant, order.generation)
        if key not in executors:
            plain = Executor(implementation, dict(order.options))
            executors[key] = plain.variant(order.variant) if order.variant else plain
            for old in [one for one in executors if 0 < one[2] < order.generation]:
                del executors[old]  # asked once, and no more
        return executors[key]

    programs = compilation_cache.find_linked_programs(load.scratch)
    if programs is not None and jax.default_backend() == "cpu":
        program_cache.use(programs)
    place = {"backend": jax.default_backend(), "count": len(jax.devices())}
    return kernel, {"declared": declaration_codec.serialize_declarations(implementation), **place}


def _send(answers: int, answer: bytes) -> None:
    rest = memoryview(answer)
    while rest:
        rest = rest[os.write(answers, rest) :]


def _told(error: BaseException) -> dict[str, Any]:
    """An exception as data: its type, the built-in types that it is one of, its message, and what records say of it."""
    kinds = [kind.__name__ for kind in type(error).__mro__ if vars(builtins).get(kind.__name__) is kind]
    try:
        message = str(error)
    except BaseException as broken:  # an exception's own code may do anything
        message = f"(no message: {type(broken).__name__})"
    told = mishaps.told(error)
    return {"type": type(error).__name__, "kinds": kinds, "message": message[:100_000], "told": told}


def _read(requests: int) -> bytes:
    head = _exactly(requests, LENGTH.size)
    return _exactly(requests, LENGTH.unpack(head)[0]) if head else b""


def _exactly(pipe: int, count: int) -> bytes:
    parts, left = [], count
    while left:
        part = os.read(pipe, min(left, 2**20))
        if not part:
            return b""
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
