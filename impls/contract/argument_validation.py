"""Validate the arguments of a Python call by the annotations of its parameters.

It is our own code for what libraries lack: msgspec takes no union of a function and text, beartype looks at one random
item of a sequence, and neither takes a NumPy number for a number.
"""

from __future__ import annotations

import functools
import inspect
import re
import reprlib
import types
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, Literal, TypeVar, Union, Unpack, get_args, get_origin, get_type_hints

import numpy as np

from cases.name_suggestions import suggest_name, suggest_or_list

_Target = TypeVar("_Target", bound=Callable[..., Any])
_WIDER: Mapping[Any, type] = {frozenset: Set, tuple: Sequence}


def validate_arguments(target: _Target) -> _Target:
    """Decorate a function or dataclass to check its arguments; NumPy scalars become Python numbers."""
    function: Any = target.__init__ if isinstance(target, type) else target  # type: ignore[misc] # that of the class
    parameters = [name for name, p in inspect.signature(function).parameters.items() if p.kind is not p.VAR_KEYWORD]

    @functools.wraps(function)
    def validated(*args: Any, **named: Any) -> Any:
        __tracebackhide__ = True
        given = check_arguments(target, dict(zip(parameters, args, strict=False)) | named)
        positional = [given[name] for name in parameters[: len(args)]]
        return function(*positional, *args[len(positional) :], **{name: given[name] for name in named})

    if isinstance(target, type):
        target.__init__ = validated  # type: ignore[misc] # decorated as a function is
        return target
    return validated  # type: ignore[return-value] # has the signature of the target


def check_arguments(target: Callable[..., Any], given: Mapping[str, Any], **names: type) -> dict[str, Any]:
    """Return arguments by name, NumPy scalars as Python numbers. Raise unless each fits its annotation.

    Args:
      names: types in its annotations that its module imports for type checkers only.

    Raises:
      TypeError: for an argument of a wrong kind, and for a name that is no argument.
      ValueError: for a value that is none of the choices of a `Literal`.
    """
    __tracebackhide__ = True
    hints = _read_hints(target, **names)
    found = dict(given)
    for name in given:
        if name not in hints and not (name == "self" and _is_method(target)):
            raise TypeError(f"{target.__qualname__}() has no argument {name!r}{suggest_or_list(name, hints)}")
        if (hint := hints.get(name, Any)) is Any:
            continue
        found[name] = value = _convert_scalar(given[name])
        if _fits(value, hint):
            continue
        shown = " ".join(reprlib.repr(given[name]).split())
        choices = _list_choices(hint)
        closest = suggest_name(value, filter(_is_text, choices)) if _is_text(value) else ""
        message = f"{target.__qualname__}(): {name} must be {_describe(hint)}, got {shown}{closest}"
        raise ValueError(message) if choices else TypeError(message)
    return found


@functools.cache
def _read_hints(target: Callable[..., Any], **names: type) -> dict[str, Any]:
    """Return the annotations of arguments by name, with those of an unpacked `TypedDict` in its place."""
    hints: dict[str, Any] = {}
    for name, hint in get_type_hints(target, localns=names).items():
        if get_origin(hint) is Unpack:
            hints |= get_type_hints(get_args(hint)[0])
        elif name != "return":
            hints[name] = hint
    return hints


def _is_method(target: Callable[..., Any]) -> bool:
    """Return whether the first argument of a target is the object that it belongs to."""
    return isinstance(target, type) or next(iter(inspect.signature(target).parameters), "") == "self"


def _convert_scalar(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _fits(value: Any, hint: Any) -> bool:
    """Return whether a value is what an annotation names.

    An int is a float, a set a frozenset and a list a tuple. A bool is no number, and text no sequence.
    """
    value, kind, parts = _convert_scalar(value), get_origin(hint) or hint, get_args(hint)
    kind = _WIDER.get(kind, kind)
    if kind in (Union, types.UnionType):
        return any(_fits(value, part) for part in parts)
    if kind is Literal:
        return any(type(value) is type(part) and value == part for part in parts)
    if kind in (int, float):
        return isinstance(value, (int, kind)) and not isinstance(value, bool)
    if kind in (Any, Callable):
        return kind is Any or callable(value)
    if not isinstance(value, kind) or not parts or not isinstance(value, Iterable):
        return isinstance(value, kind)
    if isinstance(value, Mapping):
        return len(parts) == 2 and all(_fits(key, parts[0]) and _fits(x, parts[1]) for key, x in value.items())
    return not isinstance(value, str | bytes) and all(_fits(x, parts[0]) for x in value)


def _list_choices(hint: Any) -> tuple[Any, ...]:
    """Return the values that a `Literal`, or one in a union, allows."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    is_union = get_origin(hint) in (Union, types.UnionType)
    return tuple(x for part in get_args(hint) for x in _list_choices(part)) if is_union else ()


def _describe(hint: Any) -> str:
    """Return an annotation in words, such as `'exact' or 'tf32'` and `int or Sequence[int]`."""
    kind, parts = get_origin(hint), get_args(hint)
    if kind in (Union, types.UnionType):
        return " or ".join(map(_describe, parts))
    if kind is Literal:
        return " or ".join(map(repr, parts))
    if kind is Callable:
        return "a function"
    return "None" if hint is types.NoneType else re.sub(r"(\w+\.)+", "", inspect.formatannotation(hint))
