"""Load the function that is to be adapted, and read from its signature which parameter each operand probably is."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cases.parameter_names import find_operand
from conformance.adaptation import modules
from conformance.adaptation.modules import CannotAdapt

_QUERIES = ("q", "query", "queries", "inputs_q", "query_states", "xq", "q_proj", "Q")
_KEYS = ("k", "key", "keys", "inputs_k", "key_states", "xk", "k_proj", "K")
_TAKEN = (
    *("attention", "call", "result", "out", "jax", "jnp", "declare", "q", "k", "v", "shape", "causal", "window"),
    *("kv_lengths", "mask", "segment_ids", "soft_cap", "sinks", "bias", "scale", "alibi_slopes", "save_residuals"),
)  # names that an adapter defines
_VALUES = ("v", "value", "values", "inputs_v", "value_states", "xv", "v_proj", "V")


@dataclasses.dataclass(frozen=True)
class Target:
    """A function to adapt, and how an adapter names it.

    Attributes:
      function: the function.
      name: the name by which users know it, such as `package.module:function`.
      imports: the lines of an adapter that import it; empty if nothing can import it.
      expression: what the adapter writes to call it, such as `flash_attention`.
      parameters: its parameters by name, in order.
      operands: the names of the parameters that take queries, keys and values.
      roles: the operand of the contract that each other parameter probably is.
      bound: values that the user gave to parameters, as code.
      folder: the folder of the function's file; empty for a module.
      has_options: whether it takes `**options`.
    """

    function: Callable[..., Any]
    name: str
    imports: tuple[str, ...]
    expression: str
    parameters: Mapping[str, inspect.Parameter]
    operands: tuple[str, str, str]
    roles: Mapping[str, str]
    bound: Mapping[str, str] = dataclasses.field(default_factory=dict)
    folder: str = ""
    has_options: bool = False

    def find_parameters(self, operand: str) -> list[str]:
        """Return the parameters that probably are this operand, without those to which the user gave a value."""
        return [name for name, role in self.roles.items() if role == operand and name not in self.bound]

    def is_required(self, parameter: str) -> bool:
        """Return whether a parameter has no default."""
        return self.parameters[parameter].default is inspect.Parameter.empty

    def get_default(self, parameter: str) -> Any:
        """Return the default of a parameter; None if it has none."""
        default = self.parameters[parameter].default
        return None if default is inspect.Parameter.empty else default

    @property
    def takes_operands_first(self) -> bool:
        """Whether queries, keys and values are its first three parameters, in this order."""
        first = [p for p in self.parameters.values() if p.kind is not p.KEYWORD_ONLY][:3]
        return [p.name for p in first] == list(self.operands)

    def find_type(self, parameter: str, name: str) -> Any:
        """Return the class of this name that the annotation of a parameter, or the function's module, has; or None."""
        hint = self.parameters[parameter].annotation
        for kind in (hint, *typing.get_args(hint)):
            if inspect.isclass(kind) and kind.__name__ == name:
                return kind
        module = importlib.import_module(inspect.unwrap(self.function).__module__)
        found = getattr(module, name, None)
        return found if inspect.isclass(found) else None


def load_target(name: str, bound: Mapping[str, str] | None = None) -> Target:
    """Load `module:function` or `file.py:function`.

    Args:
      name: the name of the function, as `--impl` takes it.
      bound: values of parameters as code, such as `{"implementation": "'xla'"}`.

    Raises:
      CannotAdapt: if there is no such function, or if it takes no queries, keys and values.
    """
    from conformance.execution.implementation_registry import ImplementationNotFound, load_attribute

    source, _, attribute = name.rpartition(":")
    try:
        function = load_attribute(name)
    except ImplementationNotFound as error:
        raise CannotAdapt(str(error)) from error
    first, _, rest = attribute.partition(".")
    alias = f"library_{first}" if first in _TAKEN else first
    folder = str(Path(source).resolve().parent) if source.endswith(".py") else ""
    source = Path(source).stem if folder else source
    if folder and (not source.isidentifier() or source in sys.stdlib_module_names):
        raise CannotAdapt(f"{source}.py cannot be imported by this name: rename it")
    imports: tuple[str, ...] = (f"from {source} import {first}" + ("" if alias == first else f" as {alias}"),)
    expression = f"{alias}.{rest}" if rest else alias
    if modules.is_module(function):
        definition = modules.define_module_call(function, name, imports, expression)
        space: dict[str, Any] = {}
        exec("\n".join(definition), space)
        function, imports, expression = space["call_module"], definition, "call_module"
    return dataclasses.replace(build_target(function, name, imports, expression, bound), folder=folder)


def build_target(
    function: Any, name: str, imports: tuple[str, ...], expression: str, bound: Mapping[str, str] | None = None
) -> Target:
    """Read the signature of a function. Raises `CannotAdapt` if it cannot take queries, keys and values."""
    if not callable(function):
        raise CannotAdapt(f"{name} is no function, but a {type(function).__name__}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise CannotAdapt(f"{name} has no signature that can be read: {error}") from error
    parameters = {p.name: p for p in signature.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    if unknown := [one for one in bound or {} if one not in parameters]:
        raise CannotAdapt(f"{name} has no parameter {unknown[0]!r}: it has {', '.join(parameters) or 'none'}")
    operands = _find_operands(parameters, name)
    others = {one for one in parameters if one not in operands}
    roles = {one: role for one in parameters if one in others and (role := find_operand(one))}
    has_options = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    target = Target(function, name, imports, expression, parameters, operands, roles, dict(bound or {}))
    return dataclasses.replace(target, has_options=has_options)


def _find_operands(parameters: Mapping[str, inspect.Parameter], name: str) -> tuple[str, str, str]:
    """Find the parameters that take queries, keys and values: by name, or else the first three."""
    found = [next((one for one in names if one in parameters), None) for names in (_QUERIES, _KEYS, _VALUES)]
    if None not in found:
        return typing.cast(tuple[str, str, str], tuple(found))
    first = [p.name for p in parameters.values() if p.kind is not p.KEYWORD_ONLY][:3]
    if len(first) < 3:
        named = ", ".join(parameters) or "no parameter by name"
        raise CannotAdapt(
            f"{name} takes no queries, keys and values that could be found: it has {named}. An attention function has "
            "parameters q, k and v, or query, key and value. Wrap it, as docs/how-to/other-layout.md shows"
        )
    return first[0], first[1], first[2]
