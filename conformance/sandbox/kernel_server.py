"""Run a kernel in its own process: confine the process, load the kernel, execute requests and send back results.

The fork server runs `serve` in a new process. The judge's first request has the flags of XLA, the second names the
kernel to load, and all later ones are calls of the kernel.
"""

from __future__ import annotations

import dataclasses
import importlib
import operator
import pkgutil
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

import conformance.executor_tasks
from conformance import environment, program_cache
from conformance.execution import implementation_registry
from conformance.execution.executor import Executor
from conformance.sandbox import compilation_cache, confinement, declaration_codec, policy, supervisor
from conformance.sandbox.policy import SandboxPolicy
from conformance.sandbox.private_copy import load_private_copy

REQUEST_LENGTH = struct.Struct("<Q")


@dataclasses.dataclass(frozen=True)
class LoadRequest:
    """The request to load a kernel."""

    name: str
    products: str | None
    problem: str | None
    path: tuple[str, ...]
    scratch: str
    sandbox: SandboxPolicy


@dataclasses.dataclass(frozen=True)
class CallRequest:
    """The request to call a function of this project with an executor of the kernel."""

    options: tuple[tuple[str, bool | int], ...]  # options of the compiler
    variant: str  # the name of one of the implementation's variants; empty for the implementation itself
    generation: int  # a number that distinguishes executors with the same options. Each compiles its own programs.
    function: Callable[..., Any]  # a function of `conformance.executor_tasks`, or of another module of this project
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    # For a plain function: declarations by name that replace its own (`Implementation.redeclare`).
    declared: tuple[tuple[str, Any], ...] = ()

    def is_same(self, other: CallRequest) -> bool:
        """Tell whether the other request is the same call with identical objects as arguments."""
        own, others = (dataclasses.replace(one, arguments=(), keywords={}) for one in (self, other))
        arguments = len(self.arguments) == len(other.arguments) and all(
            map(operator.is_, self.arguments, other.arguments)
        )
        return own == others and arguments and not (self.keywords or other.keywords)


def serve(requests: int, answers: int, status: int, scratch: str, memory: int) -> None:
    """Load the kernel that is requested and answer requests, until the judge closes the pipe of requests.

    This process forks: the child runs the kernel, and the parent supervises the child. The parent writes the limit that
    was exceeded to the descriptor `status`. The kernel's processes together may hold `memory` bytes of memory and
    files; zero means no limit.
    """
    supervisor.start_supervised((requests, answers), status, scratch, memory)
    confinement.die_with_parent()
    answering = load_private_copy("conformance.sandbox.answering")
    xla_flags: str | None = answering.read_request(requests)
    load_request: LoadRequest = answering.read_request(requests)
    sys.path[:] = load_request.path
    trees = policy.find_source_trees(load_request.name, load_request.path)
    readable = list(_find_readable(load_request, trees))
    listable = [*trees, *map(Path, load_request.sandbox.read)]
    isolation = confinement.confine_process([Path(load_request.scratch)], readable, listable, (requests, answers))
    answering.send_value(answers, isolation)
    try:
        environment.start_backends(xla_flags)
        del xla_flags  # the kernel can read the variables in its callers' frames
        _import_request_functions()
        snapshot = answering.tamper_check.take_snapshot()
        files = answering.file_watcher.FileWatcher(load_request.scratch)
        get_executor, handshake = _load_kernel(load_request)
        loaded = {"opened": files.report(), "installed": files.list_installed_modules()}
    except BaseException as error:  # the kernel's import may raise anything; the judge reports it
        answering.send_error(answers, error)
        return
    answering.send_value(answers, {"returned": handshake, "replaced": [], "files": loaded})

    def run(request: CallRequest) -> Any:
        return request.function(get_executor(request), *request.arguments, **request.keywords)

    answering.answer_requests(requests, answers, run, snapshot, files)


def _find_readable(load_request: LoadRequest, trees: Iterable[Path]) -> Iterator[Path]:
    """Yield the paths that this kernel may read: its sources, those of `--sandbox-read`, and cached programs."""
    hidden = [Path(name) for name in load_request.sandbox.hidden]
    for tree in trees:
        yield from policy.find_readable_sources(tree, hidden)
    for place in load_request.sandbox.read:
        yield from policy.find_readable_entries(Path(place), hidden)
    programs = compilation_cache.find_linked_programs(load_request.scratch)
    if programs is not None:
        yield from {program.resolve().parent for program in programs.iterdir() if program.is_symlink()}


def _import_request_functions() -> None:
    """Import the functions that requests call, before the kernel can replace any of them."""
    for module in pkgutil.iter_modules(conformance.executor_tasks.__path__):
        importlib.import_module(f"{conformance.executor_tasks.__name__}.{module.name}")


def _load_kernel(load_request: LoadRequest) -> tuple[Callable[[CallRequest], Executor], dict[str, Any]]:
    """Import the kernel; return its handshake, and a function that finds or creates the executor for a request."""
    implementation = implementation_registry.find_implementation(
        load_request.name,
        products=load_request.products,  # type: ignore[arg-type] # checked before
        problem=load_request.problem,
    )
    executors: dict[Any, Executor] = {}

    def get_executor(request: CallRequest) -> Executor:
        key = (request.options, request.variant, request.generation, request.declared)
        if key not in executors:
            declared = implementation
            if request.declared and implementation.redeclare is not None:
                declared = implementation.redeclare(dict(request.declared))
            plain = Executor(declared, dict(request.options))
            executors[key] = plain.variant(request.variant) if request.variant else plain
            for old in [one for one in executors if 0 < one[2] < request.generation]:
                del executors[old]  # of fresh executors, only the newest is still used
        return executors[key]

    programs = compilation_cache.find_linked_programs(load_request.scratch)
    if programs is not None and jax.default_backend() == "cpu":
        program_cache.use_cache_folder(programs)
    place = {"backend": jax.default_backend(), "count": len(jax.devices())}
    return get_executor, {"declared": declaration_codec.serialize_declarations(implementation), **place}
