"""Serialize the declarations of an implementation in its process, and rebuild an implementation from them in the judge.

How a field travels follows from its type. The rebuilt implementation has all declarations. Its functions are proxies,
which call the kernel's process.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any, get_args, get_origin, get_type_hints

from cases.case import Case
from conformance.execution.executor import Executor
from conformance.execution.plain_support import PlainSupport
from conformance.sandbox.handshake import MAX_TEXT
from impls.contract.implementation import Implementation
from reports.printable_text import make_printable

# Fields of `Implementation` that only its own process needs. The judge has a proxy for `call`.
_KEPT = ("call", "lower_mask", "redeclare", "tunable")


def serialize_declarations(implementation: Implementation) -> dict[str, Any]:
    """Return the declarations of an implementation as plain data: numbers, strings, lists and dicts."""
    return {
        name: _serialize(getattr(implementation, name), hint)
        for name, hint in _read_hints(Implementation).items()
        if name not in _KEPT
    }


def _serialize(value: Any, hint: Any) -> Any:
    """Return a value as plain data. Of a function, only its presence is known elsewhere."""
    kind, parts = get_origin(hint), get_args(hint)
    if kind is Mapping:
        return {name: _serialize(item, parts[1]) for name, item in value.items()}
    if _is_function(hint) and not isinstance(value, PlainSupport):
        return value is not None  # also for a proxy, which is a dataclass
    if dataclasses.is_dataclass(value):
        return {name: _serialize(getattr(value, name), part) for name, part in _read_hints(type(value)).items()}
    if kind in (frozenset, Collection):
        return sorted(value)
    return list(value) if kind is tuple else value


def parse_declarations(
    declared: Mapping[str, Any], call: Callable[..., Any], query_support: Callable[[Case], str | None]
) -> Implementation:
    """Return an implementation with these declarations.

    Args:
      declared: data of the kernel's process, as `serialize_declarations` returns them. The kernel may forge them.
      call: the function that replaces each function of the kernel.
      query_support: asks the kernel's process whether the kernel supports a case. Used if the kernel has a function
        for this.

    Raises:
      KeyError: if a declaration is missing.
      TypeError: if a declaration has a value of a wrong type.
      ValueError: if a declaration has a value that no implementation may declare.
    """
    hints = {name: hint for name, hint in _read_hints(Implementation).items() if name not in _KEPT}
    fields = {name: _parse(declared[name], hint, call) for name, hint in hints.items()}
    names = [
        name
        for field in ("variants", "checkpoint_names", "conventions", "unasked", "open_questions")
        for name in fields[field]
    ]
    if unprintable := [name for name in names if not (isinstance(name, str) and name.isprintable())]:
        raise ValueError(f"names must be text that shows as it is, got {unprintable[0]!r}")
    if isinstance(plain := declared["supports_case"], Mapping):
        support: PlainSupport = _parse(plain, PlainSupport, call)
        others, scales = (tuple(map(make_printable, names)) for names in (support.others, support.scales))
        fields["supports_case"] = dataclasses.replace(support, others=others, scales=scales)
    elif plain:
        fields["supports_case"] = query_support
    found = Implementation(call=call, **fields)
    return dataclasses.replace(
        found,
        description=make_printable(found.description[:MAX_TEXT]),
        unsupported={feature: make_printable(reason[:MAX_TEXT]) for feature, reason in found.unsupported.items()},
    )


def _parse(data: Any, hint: Any, call: Callable[..., Any]) -> Any:
    """Return the value that plain data stand for; `call` stands for every function."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        hints = _read_hints(hint)
        return hint(**{name: _parse(item, hints[name], call) for name, item in dict(data).items()})
    kind, parts = get_origin(hint), get_args(hint)
    if kind is Mapping and isinstance(data, Mapping):
        return {name: _parse(item, parts[1], call) for name, item in data.items()}
    if _is_function(hint):
        return call if data else None
    return kind(data) if kind in (frozenset, tuple) else data


def _read_hints(kind: Any) -> dict[str, Any]:
    """Return the types of the fields of a dataclass by name."""
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _is_function(hint: Any) -> bool:
    """Return whether a type is that of functions, or of functions and None."""
    return Callable in (get_origin(part) for part in (hint, *get_args(hint)))


def evaluate_support(executor: Executor, case: Case) -> str | None:
    """Return, in the kernel's process, why its `supports_case` declines a case; None if it is supported."""
    supports_case = executor.implementation.supports_case
    return None if supports_case is None else supports_case(case)
