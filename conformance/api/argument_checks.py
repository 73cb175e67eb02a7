"""Check what annotations do not say about the arguments of the Python calls: names of checks, ids, contradictions."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any, cast

from cases.case import Case, CaseIdError
from cases.case_id import parse_case_id
from cases.name_suggestions import suggest_or_list
from conformance.checks import CHECKS_BY_NAME
from conformance.session.run_spec import OPTIONS, CheckOptions, SuiteOptions
from impls.contract.declarations import Declarations, declare
from impls.contract.implementation import Implementation


def check_declarations(declarations: Declarations, kernel: object = None) -> None:
    """Check the declarations that a call was given as keywords.

    Args:
      kernel: the function that declarations are for. An `Implementation`, and a name, have their own.

    Raises:
      TypeError: for a kernel that has its own declarations.
      ValueError: for a declaration with a value that it cannot have.
    """
    if not declarations:
        return
    names = ", ".join(declarations)
    if isinstance(kernel, Implementation):
        raise TypeError(f"{names}: an Implementation has its own declarations; change them by dataclasses.replace")
    if isinstance(kernel, str):
        raise TypeError(f"{names}: declarations go with a function: import it, or decorate it with conformance.declare")
    declare(**declarations)


class SuiteArguments(SuiteOptions, Declarations, total=False):
    """The keyword arguments that `conformance_tests` takes: options of a suite, and declarations."""


class CheckArguments(CheckOptions, Declarations, total=False):
    """The keyword arguments that `check` and `assert_conforms` take: options of a run, and declarations."""


def select_declarations(options: Mapping[str, Any]) -> Declarations:
    """Return those of the `**options` of a call that `conformance.declare` takes."""
    return cast(Declarations, {name: x for name, x in options.items() if name in Declarations.__annotations__})


def read_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the `**options` of a call, except declarations, to fields of `RunSpec`.

    Raises:
      ValueError: for a check that does not exist.
    """
    fields = {each.python: field for field, each in OPTIONS.items()}
    found = {fields[name]: value for name, value in options.items() if name in CheckOptions.__annotations__}
    found = {field: os.fspath(value) if isinstance(value, os.PathLike) else value for field, value in found.items()}
    if "checks" in found:
        found["checks"] = check_names(found["checks"])
    if "seeds" in found:
        found["seeds"] = list_seeds(found["seeds"])
    return found


def check_names(checks: str | Collection[str]) -> tuple[str, ...]:
    """Return the names of checks as a tuple. Raises `ValueError` for a check that does not exist."""
    names = (checks,) if isinstance(checks, str) else tuple(sorted(checks) if isinstance(checks, Set) else checks)
    for name in names:
        if name not in CHECKS_BY_NAME:
            raise ValueError(f"checks={name!r} is no check{suggest_or_list(name, CHECKS_BY_NAME)}")
    return names


def list_seeds(seeds: int | Sequence[int]) -> tuple[int, ...]:
    """Return seeds as a tuple of Python numbers."""
    return (seeds,) if isinstance(seeds, int) else tuple(map(int, seeds))


def parse_case_argument(case: str) -> Case:
    """Parse the id of a case. Raises `ValueError` for an id that no case has."""
    try:
        return parse_case_id(case)
    except CaseIdError as error:
        raise ValueError(f"case={case!r}: {error}") from error
