"""Implement `list` and `explain`: list implementations, cases, checks and so on, and describe a case."""

from __future__ import annotations

import argparse

import numpy as np
from rich.console import Console
from rich.table import Table

from cases import size_model
from cases.case import FEATURES, Case
from cases.case_id import matches_query
from cases.grid import build_grid
from cases.name_suggestions import suggest_query
from cases.named_problems import PROBLEMS
from cases.regressions import REGRESSIONS
from conformance.check_api.scopes import ImplementationGrids
from conformance.checks import CHECKS
from conformance.commands import argument_lookup
from conformance.commands.bound_terms import explain_bounds
from conformance.commands.case_description import explain_case
from conformance.execution import implementation_registry
from conformance.judging.run_plan import plan_run
from conformance.session import project_lookup, run_spec
from conformance.session.failures import CannotJudge
from impls.contract.implementation import Implementation


def list_entries(arguments: argparse.Namespace) -> int:
    """List implementations, cases, checks, features, regressions or named problems."""
    console = Console(soft_wrap=True)
    for option in ("impl", "level", "cases", "seed"):
        if arguments.what != "cases" and getattr(arguments, option) is not None:
            raise CannotJudge(f"--{option} goes with `list cases`, not with `list {arguments.what}`")
    if arguments.what == "cases":
        for case in _select_cases(arguments):
            print(case.id)
        return 0
    if arguments.what == "regressions":
        for named in REGRESSIONS:
            print(f"{named.name}: {named.shows} ({named.reference})\n  {named.case.id}")
        return 0
    if arguments.what == "problems":
        for problem in PROBLEMS:
            print(f"{problem.name}: {problem.about} ({problem.task})\n  {problem.takes}")
        return 0
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column(arguments.what.rstrip("s"), no_wrap=True)
    table.add_column("what it is")
    if arguments.what == "checks":
        table.add_column("runs on")
    for row in _list_descriptions(arguments.what):
        table.add_row(*row)
    console.print(table)
    return 0


def _select_cases(arguments: argparse.Namespace) -> list[Case]:
    level, seed = arguments.level or "quick", arguments.seed or 0
    run_spec.reject_bad_seed(seed)
    if level == "smoke":
        smoke = plan_run(
            [project_lookup.find_implementation(arguments.impl or "dot_product")], level=level, seeds=(seed,)
        )
        found = dict.fromkeys(job.case for job in smoke.jobs if job.is_on_grid)
    elif arguments.impl is None:
        found = dict.fromkeys((*build_grid(level, seed).cases, *build_grid(level, seed, model=size_model.MODEL).cases))
    else:
        asked = ImplementationGrids(project_lookup.find_implementation(arguments.impl), level, seed)
        found = dict.fromkeys(case for grid in asked.all_grids for case in grid.cases)
    chosen = [case for case in found if arguments.cases is None or matches_query(arguments.cases, case.id)]
    if not chosen:
        closest = suggest_query(arguments.cases or "*", (case.id for case in found))
        raise CannotJudge(f"no case of the {level} grid matches {arguments.cases or '*'!r}{closest}")
    return chosen


def _list_descriptions(what: str) -> list[tuple[str, ...]]:
    if what == "checks":
        return [(check.name, check.about, check.scope.about) for check in CHECKS]
    if what == "features":
        return list(FEATURES.items())
    return [
        (name, _describe_implementation(project_lookup.find_implementation(name)))
        for name in implementation_registry.list_implementations()
    ]


def _describe_implementation(implementation: Implementation) -> str:
    if implementation.accelerator.absent is None:
        return implementation.description
    return f"{implementation.description}; not on this machine: {implementation.accelerator.absent}"


def explain(arguments: argparse.Namespace) -> int:
    """Print the description of a case, or with `--impl` the errors of an implementation and the terms of its bounds."""
    case, tolerances = project_lookup.parse_case(arguments.case), project_lookup.load_project_settings().tolerances
    if arguments.impl is None:
        print(explain_case(case, tolerances))
    else:
        with np.errstate(all="ignore"):  # a wrong kernel may return any values
            text = explain_bounds(
                project_lookup.find_implementation(arguments.impl, argument_lookup.build_kernel_options(arguments)),
                case,
                tolerances,
            )
        print(text)
    return 0
