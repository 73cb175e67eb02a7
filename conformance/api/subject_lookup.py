"""Turn what a caller passes, such as a function or a name, into what a session judges."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from conformance.api.sandboxing import export_function
from conformance.execution.plain_functions import build_implementation
from conformance.sandbox.kernel_options import KernelOptions
from conformance.sandbox.sandboxed_executor import is_sandboxed
from conformance.session.project_lookup import find_implementation
from impls.contract.declarations import Declarations, redeclare, unwrap_partial
from impls.contract.implementation import Implementation
from reports.printable_text import make_printable


@dataclasses.dataclass(frozen=True)
class JudgedSubject:
    """An implementation to judge, and how reports and code name it."""

    implementation: Implementation
    expression: str  # how code in the caller's namespace names what was passed
    is_sandboxed: bool


@contextlib.contextmanager
def load_subject(
    function: Any, name: str | None, declarations: Declarations, kernels: KernelOptions
) -> Iterator[JudgedSubject]:
    """Build the implementation that a caller passes, and keep its sandbox's files until the block ends.

    Args:
      function: a function, an `Implementation`, or a name as `--impl` takes it.
      name: how reports name it; None for the name that it has.
      declarations: those that replace its own. Only a function takes any (`argument_checks.check_declarations`).
      kernels: whether it runs in this process or in a sandbox, and under which limits.

    Raises:
      TypeError: if it cannot be judged as attention, or cannot be sent to a sandbox.
      ValueError: if a declaration has a value that does not exist.
      CannotJudge: if there is no implementation of that name.
    """
    label = name if name is not None else describe_function(function)
    if isinstance(function, str):
        found = find_implementation(function, kernels)
        found = found if name is None else dataclasses.replace(found, name=name)
        yield JudgedSubject(found, repr(function), is_sandboxed(found))
        return
    if isinstance(function, Implementation):
        if not kernels.in_process:
            raise TypeError(
                "sandbox=True takes a function or a name: an Implementation is made of several functions. Put it in a "
                "module, and give its name, such as 'my_kernels:IMPLEMENTATION'"
            )
        found = function if name is None else dataclasses.replace(function, name=name)
        yield JudgedSubject(found, describe_function(function), is_sandboxed=False)
        return
    declared = redeclare(function, declarations) if declarations else function
    here = build_implementation(declared, label)  # also for a sandbox: a wrong signature is said at once
    if kernels.in_process:
        yield JudgedSubject(here, describe_expression(label), is_sandboxed=False)
        return
    with export_function(function, label, declarations) as place:
        policy = dataclasses.replace(kernels.sandbox, read=(*kernels.sandbox.read, *place.readable))
        found = find_implementation(place.name, dataclasses.replace(kernels, sandbox=policy))
        yield JudgedSubject(dataclasses.replace(found, name=label), describe_expression(label), is_sandboxed=True)


def describe_function(function: Any) -> str:
    """Return a name for what a caller passes: that of the function, or of the class of an object."""
    if isinstance(function, str):
        return make_printable(function)
    if isinstance(function, Implementation):
        return function.name
    function = unwrap_partial(function)
    name = getattr(function, "__name__", None) or type(function).__name__
    return make_printable(str(name))


def describe_function_with_module(function: Any) -> str:
    """Return a name for what a caller passes that differs between modules: `module:function`."""
    if isinstance(function, str | Implementation):
        return describe_function(function)
    function = unwrap_partial(function)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return make_printable(f"{getattr(function, '__module__', None) or 'unknown'}:{name}")


def describe_expression(label: str) -> str:
    """Return how code names a function: by its name, or as `function` where its name is none of Python."""
    return label if label.isidentifier() else "function"
