"""Check the arguments of the Python calls, with errors that name the argument and the remedy."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cases.case import Case, CaseIdError, parse_case_id
from conformance.checks import CHECKS_BY_NAME
from conformance.execution.plain_functions import Declarations
from conformance.judging.run_levels import LEVELS

_DECLARATIONS = tuple(Declarations.__annotations__)


def suggest(name: object, known: Iterable[str]) -> str:
    """Return `: did you mean ...?` for a misspelt name, or the known names if none is alike."""
    names = list(known)
    alike = difflib.get_close_matches(str(name), names, n=2, cutoff=0.6)
    return f": did you mean {' or '.join(map(repr, alike))}?" if alike else f": known are {', '.join(names)}"


def reject_unknown_keywords(keywords: Mapping[str, Any], function: Any) -> None:
    """Raise `TypeError` for keywords that neither `function` has nor `conformance.declare`."""
    own = [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    ]
    for name in keywords:
        if name not in _DECLARATIONS:
            hint = suggest(name, [*own, *_DECLARATIONS])
            raise TypeError(f"{function.__name__}() has no argument {name!r}{hint}")


def check_level(level: object, known: Sequence[str] = LEVELS) -> None:
    """Raise `ValueError` for a level that is none of the known ones."""
    if level not in known:
        raise ValueError(f"level={level!r} is no level{suggest(level, known)}")


def check_names(checks: str | Sequence[str]) -> tuple[str, ...]:
    """Return the names of checks as a tuple. Raises `ValueError` for a check that does not exist."""
    names = (checks,) if isinstance(checks, str) else tuple(checks)
    for name in names:
        if name not in CHECKS_BY_NAME:
            raise ValueError(f"checks={name!r} is no check{suggest(name, CHECKS_BY_NAME)}")
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
