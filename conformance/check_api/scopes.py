"""Define scopes: which cases each check runs on.

A scope holds all that planning, running and measuring need to know: its cases, how expensive they are, and which call
replaces the kernel's own where its accelerator is missing. `SCOPES` lists them, the most revealing first.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from cases import feature_model, size_model
from cases.accelerator_cases import select_compiled_cases, select_interpreted_cases
from cases.case import Case
from cases.covering_model import Model
from cases.decoding_cases import select_decoding_cases
from cases.ensemble_cases import select_ensemble_cases
from cases.front_end_cases import select_front_end_cases
from cases.grid import Grid, build_grid
from cases.long_sequence_cases import select_long_sequence_cases
from cases.regressions import REGRESSIONS
from cases.storage_forms.form_cases import load_form_cases
from cases.storage_forms.server_traces import build_traces
from conformance.accelerators.targets import list_targets
from conformance.contract import Implementation


@dataclasses.dataclass(frozen=True)
class ImplementationGrids:
    """The covering grids of one implementation, at a level and with a base seed."""

    implementation: Implementation
    level: str
    seed: int

    @functools.cached_property
    def grid(self) -> Grid:
        """The covering grid over the features that the implementation supports."""
        return build_grid(self.level, self.seed, self.implementation.supports, self._models[0])

    @functools.cached_property
    def sizes(self) -> Grid:
        """The covering grid over the sizes that the implementation supports."""
        return build_grid(self.level, self.seed, self.implementation.supports, self._models[1])

    @property
    def _models(self) -> tuple[Model, Model]:
        return select_models(self.implementation)


def select_models(implementation: Implementation) -> tuple[Model, Model]:
    """Select the models of features and of sizes for the implementation's storage form."""
    if implementation.storage is None:
        return feature_model.MODEL, size_model.MODEL
    cases = load_form_cases(implementation.storage)
    if cases.find_models is None:
        return cases.models
    return cases.find_models(implementation.writes_pages, implementation.offers)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scope:
    """The cases that a check runs on.

    Attributes:
      name: its name in `list checks` and in messages.
      about: its cases in a few words.
      cases: lists the cases of one implementation, at a level and with a base seed.
      contains: whether a case belongs to the scope. A case that the user names gets the checks of all such scopes.
      accepts_any_case: whether a check that the user names may run on any supported case of this implementation.
      short: whether a case needs only a few programs.
      supported: whether its cases are supported. If not, the implementation must refuse them.
      seeded: whether operand values matter. If not, one seed is enough.
      without_accelerator: returns the call to judge where the implementation's accelerator is missing, or none if
        nothing can be judged there.
    """

    name: str
    about: str
    cases: Callable[[ImplementationGrids], tuple[Case, ...]]
    contains: Callable[[ImplementationGrids, Case], bool]
    accepts_any_case: Callable[[Implementation], bool] = lambda implementation: False
    short: bool = False
    supported: bool = True
    seeded: bool = True
    without_accelerator: Callable[[Implementation], Callable[..., Any] | None] | None = None


def _build_scope(
    name: str, about: str, cases: Callable[[ImplementationGrids], tuple[Case, ...]], **options: Any
) -> Scope:
    """Build a scope that contains exactly the cases that it lists."""
    return Scope(name=name, about=about, cases=cases, contains=lambda grids, case: case in cases(grids), **options)


def _list_grid_cases(grids: ImplementationGrids) -> tuple[Case, ...]:
    """List the supported cases of both grids.

    Beyond `quick`, very long sequences and the named regressions are added.
    """
    both = (*grids.grid.cases, *grids.sizes.cases)
    if grids.level == "quick":
        return tuple(dict.fromkeys(both))
    supports = grids.implementation.supports
    named = (regression.case for regression in REGRESSIONS if supports(regression.case) is None)
    return tuple(dict.fromkeys((*both, *select_long_sequence_cases(grids.seed, supports), *named)))


def _list_compiled_cases(grids: ImplementationGrids) -> tuple[Case, ...]:
    """List a few long cases for platforms that have a compiler here.

    An implementation that declares no native call gets one case, so that the report says so.
    """
    implementation = grids.implementation
    if not list_targets(implementation.accelerator.platform):
        return ()
    cases = select_compiled_cases(implementation.supports, sweep=grids.level == "deep")
    return cases if implementation.accelerator.native is not None else cases[:1]


def _list_interpreted_cases(grids: ImplementationGrids) -> tuple[Case, ...]:
    """List cases for kernels that JAX can interpret.

    A TPU kernel that declares no call for the interpreter gets one case, so that the report says so.
    """
    implementation = grids.implementation
    if not _has_interpreter(implementation):
        return ()
    cases = select_interpreted_cases(grids.seed, implementation.supports, implementation.accelerator.platform)
    return cases if implementation.accelerator.under_interpreter is not None else cases[:1]


def _has_interpreter(implementation: Implementation) -> bool:
    """Return whether JAX can interpret the kernel: TPU kernels, and GPU kernels that declare a call for it."""
    accelerator = implementation.accelerator
    return accelerator.platform == "tpu" or (
        accelerator.platform == "gpu" and accelerator.under_interpreter is not None
    )


def _accept_any(implementation: Implementation) -> bool:
    """Accept every case."""
    return True


GRID = Scope(
    name="grid",
    about="every case of the covering grids",
    cases=_list_grid_cases,
    contains=lambda grids, case: True,
    accepts_any_case=_accept_any,
    short=True,
)
RICH = _build_scope(
    "rich",
    "the case with every supported operand, and beyond quick a second one",
    lambda grids: grids.grid.rich,
    accepts_any_case=_accept_any,
)
BASE = _build_scope(
    "base", "the plainest supported case", lambda grids: grids.grid.singles[:1], accepts_any_case=_accept_any
)
DECODED = _build_scope(
    "decoded",
    "a sequence under each mask that can be decoded token by token, if all its pieces are supported",
    lambda grids: (
        *select_decoding_cases(grids.seed, grids.implementation.supports),
        *build_traces(grids.seed, grids.implementation.supports),
    ),
)
FRONT = Scope(
    name="front",
    about="cases whose operands come out of a model's front end",
    cases=lambda grids: select_front_end_cases(grids.level, grids.seed, grids.implementation.supports),
    contains=lambda grids, case: bool(case.steps),
)
ENSEMBLE = _build_scope(
    "ensemble",
    "one plain, long case in bf16 and one in f16; in bf16 one under a window, one of decoding and one of many queries",
    lambda grids: select_ensemble_cases(grids.seed, grids.implementation.supports),
)
INTERPRETED = _build_scope(
    "interpreted",
    "two cases of TPU kernels, one of Mosaic GPU kernels",
    _list_interpreted_cases,
    accepts_any_case=_has_interpreter,
    without_accelerator=lambda implementation: implementation.accelerator.under_interpreter,
)
COMPILED = _build_scope(
    "compiled",
    "a few long cases of kernels for a platform that has a compiler here",
    _list_compiled_cases,
    accepts_any_case=lambda implementation: bool(list_targets(implementation.accelerator.platform)),
    seeded=False,
    without_accelerator=lambda implementation: implementation.accelerator.native,
)
DECLINED = Scope(
    name="declined",
    about="one case for each feature that is not supported",
    cases=lambda grids: tuple(dict.fromkeys((*grids.grid.declined, *grids.sizes.declined))),
    contains=lambda grids, case: grids.implementation.supports(case) is not None,
    short=True,
    supported=False,
)
FEATURE = _build_scope(
    "feature",
    "one plain case for each supported argument and mask",
    lambda grids: grids.grid.singles[1:],
    accepts_any_case=_accept_any,
    short=True,
)

SCOPES = (GRID, RICH, BASE, DECODED, FRONT, ENSEMBLE, INTERPRETED, COMPILED, DECLINED, FEATURE)
"""All scopes, in the order in which jobs are planned and planted bugs are searched for."""
