"""Check the arguments of the Python calls, with errors that name the argument and the remedy."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from cases.case import Case, CaseIdError, parse_case_id
from conformance.checks import CHECKS_BY_NAME
from conformance.contract import Implementation
from conformance.execution.plain_functions import Declarations, declare
from conformance.judging.run_levels import LEVELS
from conformance.name_suggestions import suggest_or_list

_DECLARATIONS = tuple(Declarations.__annotations__)


def check_declarations(declarations: Declarations, caller: Callable[..., Any], kernel: object = None) -> None:
    """Check the declarations that a call was given as keywords.

    Args:
      declarations: the keywords that are no arguments of the call itself.
      caller: the function that was called.
      kernel: the function that declarations are for. An `Implementation`, and a name, have their own.

    Raises:
      TypeError: for a keyword that is no declaration, and for a kernel that has its own declarations.
      ValueError: for a declaration with a value that it cannot have.
    """
    if not declarations:
        return
    signature = inspect.signature(caller)
    own = [name for name, parameter in signature.parameters.items() if parameter.kind is parameter.KEYWORD_ONLY]
    for name in declarations:
        if name not in _DECLARATIONS:
            hint = suggest_or_list(name, [*own, *_DECLARATIONS])
            raise TypeError(f"{caller.__name__}() has no argument {name!r}{hint}")
    names = ", ".join(declarations)
    if isinstance(kernel, Implementation):
        raise TypeError(f"{names}: an Implementation has its own declarations; change them by dataclasses.replace")
    if isinstance(kernel, str):
        raise TypeError(f"{names}: declarations go with a function: import it, or decorate it with conformance.declare")
    declare(**declarations)


def check_level(level: object, known: Sequence[str] = LEVELS) -> None:
    """Raise `ValueError` for a level that is none of the known ones."""
    if level not in known:
        raise ValueError(f"level={level!r} is no level{suggest_or_list(level, known)}")


def check_names(checks: str | Sequence[str]) -> tuple[str, ...]:
    """Return the names of checks as a tuple. Raises `ValueError` for a check that does not exist."""
    names = (checks,) if isinstance(checks, str) else tuple(checks)
    for name in names:
        if name not in CHECKS_BY_NAME:
            raise ValueError(f"checks={name!r} is no check{suggest_or_list(name, CHECKS_BY_NAME)}")
    return names


def list_seeds(seeds: int | Sequence[int]) -> tuple[int, ...]:
    """Return seeds as a tuple. Raises `TypeError` for what is no whole number."""
    found = (seeds,) if isinstance(seeds, int) else tuple(seeds)
    for seed in found:
        if not isinstance(seed, int) or isinstance(seed, bool):
            raise TypeError(f"seeds={seed!r} is no whole number: give an int, or a sequence of them")
    return found


def parse_case_argument(case: object) -> Case:
    """Parse the id of a case. Raises `TypeError` for what is no text, and `ValueError` for an id that no case has."""
    if not isinstance(case, str):
        raise TypeError(f"case must be the id of a case, such as one of conformance.cases(), got {case!r}")
    try:
        return parse_case_id(case)
    except CaseIdError as error:
        raise ValueError(f"case={case!r}: {error}") from error
