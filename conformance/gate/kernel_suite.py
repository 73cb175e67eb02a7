"""Describe the tests of one kernel in a user's test file, and plan them.

Test files import this module through `conformance.testing`, and every pytest run loads it, so it imports nothing heavy.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conformance.session.failures import CannotJudge
from conformance.session.run_options import RunOptions

if TYPE_CHECKING:
    from conformance.contract import Implementation
    from conformance.execution.plain_functions import Declarations
    from conformance.records import Record
    from conformance.session.session import Session

_ATTRIBUTE = "conformance_suite"


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class KernelSuite:
    """The tests that `conformance.testing.conformance_tests` was asked for.

    Attributes:
      kernel: a function, an `Implementation`, or the name of one as `--impl` takes it.
      options: what to judge, and where the kernel runs. Options of the command line replace these.
      name: what reports call the kernel.
      declarations: what `conformance.declare` would be given.
      sandbox: whether the kernel runs in a sandbox.
      line: the line of the test file that asks for the tests, counted from 0; None if it is not known.
    """

    kernel: Any
    options: RunOptions
    name: str
    declarations: Declarations
    sandbox: bool
    line: int | None = None


def mark_function(function: Callable[..., None], suite: KernelSuite) -> None:
    """Make a test function judge a kernel."""
    setattr(function, _ATTRIBUTE, suite)


def find_suite(function: object) -> KernelSuite | None:
    """Return the suite of a test function; None for any other function."""
    found = getattr(function, _ATTRIBUTE, None)
    return found if isinstance(found, KernelSuite) else None


def find_name(kernel: Any) -> str:
    """Return what reports call a kernel for which no name is given: `module:function`."""
    if isinstance(kernel, str):
        return kernel
    if isinstance(name := getattr(kernel, "name", None), str):  # an `Implementation`
        return name
    function = _unwrap(kernel)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{getattr(function, '__module__', None) or 'unknown'}:{name}"


def _unwrap(kernel: Any) -> Any:
    """Return the function inside nested `functools.partial` objects."""
    while isinstance(kernel, functools.partial):
        kernel = kernel.func
    return kernel


def plan_suite(
    suite: KernelSuite, given: RunOptions, *, folder: Path, format_repetition: Callable[[Record], str], is_worker: bool
) -> Session:
    """Plan the jobs of a suite.

    Args:
      suite: the tests that are asked for.
      given: the options of the command line.
      folder: where the project's settings are.
      format_repetition: returns the command that repeats a record.
      is_worker: whether another process reports the results.

    Raises:
      CannotJudge: in one line, if the kernel cannot be judged.
    """
    from conformance import environment, packages
    from conformance.session.process_setup import isolate_settings, prepare_process

    try:
        prepare_process()
    except packages.NameTaken as error:
        raise CannotJudge(str(error)) from error
    from conformance.session.session import Session  # imported late: it loads JAX

    is_sandboxed = suite.sandbox and not given.in_process
    if is_sandboxed:
        name, implementations = _find_importable_name(suite), []
    else:
        with isolate_settings():
            found = build_suite_implementation(suite)
        name, implementations = found.name, [found]
    options = dataclasses.replace(
        suite.options,
        implementations=(name,),
        level=given.level or suite.options.level,
        cases=suite.options.cases if given.cases is None else given.cases,
        seeds=given.seeds or suite.options.seeds,
        in_process=not is_sandboxed,
        timeout=given.timeout,
        memory=given.memory,
        sandbox_read=given.sandbox_read,
        sandbox_env=given.sandbox_env,
        require_sandbox=given.require_sandbox and is_sandboxed,
        shard=given.shard,
        confirm_seconds=given.confirm_seconds,
        diagnose_seconds=given.diagnose_seconds,
        command=given.command,
        query=given.query,
        selection=given.selection,
    )
    return Session(
        options,
        implementations=implementations,
        folder=folder,
        is_worker=is_worker,
        format_repetition=format_repetition,
        compiler_options={} if is_sandboxed else environment.build_fast_options(),
        writes_step_summary=False,
    )


def build_suite_implementation(suite: KernelSuite) -> Implementation:
    """Build the implementation of a suite, which runs in this process.

    Raises:
      CannotJudge: in one line, if it cannot be judged.
    """
    from conformance.contract import Implementation
    from conformance.execution import implementation_registry, kernel_errors
    from conformance.execution.plain_functions import build_implementation, redeclare

    kernel = suite.kernel
    try:
        if isinstance(kernel, str):
            kernel = implementation_registry.find_implementation(kernel)
        if isinstance(kernel, Implementation):
            return dataclasses.replace(kernel, name=suite.name)
        if suite.declarations:
            kernel = redeclare(kernel, suite.declarations)
        return build_implementation(kernel, suite.name)
    except implementation_registry.ImplementationNotFound as error:
        raise CannotJudge(str(error)) from error
    except Exception as error:  # its declarations are wrong, or reading its signature runs code that raises
        raise CannotJudge(f"{suite.name} cannot be judged: {kernel_errors.describe_kernel_error(error)}") from error


def _find_importable_name(suite: KernelSuite) -> str:
    """Return the name by which a sandbox can load the kernel: `module:attribute` or `file.py:attribute`.

    Raises:
      CannotJudge: if a process of its own cannot load it.
    """
    kernel = suite.kernel
    if isinstance(kernel, str):
        return kernel
    attribute, module = getattr(kernel, "__qualname__", ""), sys.modules.get(getattr(kernel, "__module__", None) or "")
    if module is None or not attribute or vars(module).get(attribute) is not kernel:
        raise CannotJudge(
            f"sandbox=True: {suite.name} is no function of a module that another process can import: give it a name "
            f"in its module, or leave out sandbox=True"
        )
    file = getattr(module, "__file__", None)
    return f"{os.path.relpath(file)}:{attribute}" if file else f"{module.__name__}:{attribute}"


def check_declarations(kernel: Any, declarations: Declarations, *, sandbox: bool) -> None:
    """Refuse declarations that `conformance.declare` does not take, or that cannot reach the kernel.

    Raises:
      TypeError: for an unknown argument, and for a kernel that declares by itself.
      ValueError: for a declaration with a value that it cannot have.
    """
    if not declarations:
        return
    import difflib

    from conformance.execution.plain_functions import declare

    known = list(inspect.signature(declare).parameters)
    for name in declarations:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"declarations are {', '.join(known)}"
            raise TypeError(f"conformance_tests has no argument {name!r}: {hint}")
    given = ", ".join(declarations)
    if isinstance(kernel, str) or not callable(kernel):
        raise TypeError(f"{given}: only a function can be given declarations, and this kernel has its own")
    if sandbox:
        raise TypeError(f"{given}: with sandbox=True, decorate the function with conformance.declare instead")
    declare(**declarations)


def to_tuple(values: str | int | Sequence[Any]) -> tuple[Any, ...]:
    """Return one value, or several, as a tuple."""
    return (values,) if isinstance(values, str | int) else tuple(values)
