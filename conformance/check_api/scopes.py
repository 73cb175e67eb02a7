"""Scopes: which cases a check is asked of.

A scope is a value that carries what planning, running and measuring need to know of it: its cases, whether its jobs are
short, and which call stands in where the accelerator is missing. They are listed in `SCOPES`, those first in which one
case catches most.
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
    """An implementation that is asked at a level of the grid, with a base seed."""

    implementation: Implementation
    level: str
    seed: int

    @functools.cached_property
    def grid(self) -> Grid:
        """The grid of what the implementation supports."""
        return build_grid(self.level, self.seed, self.implementation.supports, self._models[0])

    @functools.cached_property
    def sizes(self) -> Grid:
        """The grid of the sizes that the implementation supports."""
        return build_grid(self.level, self.seed, self.implementation.supports, self._models[1])

    @property
    def _models(self) -> tuple[Model, Model]:
        return select_models(self.implementation)


def select_models(implementation: Implementation) -> tuple[Model, Model]:
    """The models of features and of sizes: those of its storage, if it takes its operands stored."""
    if implementation.storage is None:
        return feature_model.MODEL, size_model.MODEL
    cases = load_form_cases(implementation.storage)
    if cases.find_models is None:
        return cases.models
    return cases.find_models(implementation.writes_pages, implementation.offers)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scope:
    """Which cases a check is asked of.

    Attributes:
      name: how `list checks` and messages name it.
      about: its cases in a few words.
      cases: those of one implementation, at a level and with a base seed.
      has: whether a case is one of them. One that is judged by itself is asked the checks of the scopes that have it.
      any_case: whether a check that is named may be asked of any supported case of this implementation.
      short: whether a case takes few programs.
      supported: whether its cases are supported; false where they are there to be refused.
      seeded: whether values matter; where they do not, one seed is enough.
      without_accelerator: gives the call that is judged where the implementation's accelerator is missing, if it has
        one; none where nothing can be judged there.
    """

    name: str
    about: str
    cases: Callable[[ImplementationGrids], tuple[Case, ...]]
    has: Callable[[ImplementationGrids, Case], bool]
    accepts_any_case: Callable[[Implementation], bool] = lambda implementation: False
    short: bool = False
    supported: bool = True
    seeded: bool = True
    without_accelerator: Callable[[Implementation], Callable[..., Any] | None] | None = None


def _build_scope(
    name: str, about: str, cases: Callable[[ImplementationGrids], tuple[Case, ...]], **facts: Any
) -> Scope:
    """A scope that has the cases it lists, and no others."""
    return Scope(name=name, about=about, cases=cases, has=lambda asked, case: case in cases(asked), **facts)


def _list_grid_cases(asked: ImplementationGrids) -> tuple[Case, ...]:
    """The rows of both grids; beyond `quick` what is long and thin, and the named regressions, as far as supported."""
    both = (*asked.grid.cases, *asked.sizes.cases)
    if asked.level == "quick":
        return tuple(dict.fromkeys(both))
    supports = asked.implementation.supports
    named = (regression.case for regression in REGRESSIONS if supports(regression.case) is None)
    return tuple(dict.fromkeys((*both, *select_long_sequence_cases(asked.seed, supports), *named)))


def _list_compiled_cases(asked: ImplementationGrids) -> tuple[Case, ...]:
    """A few long cases of kernels for a platform with a compiler; one, to say so, if there is no call to compile."""
    implementation = asked.implementation
    if not list_targets(implementation.accelerator.platform):
        return ()
    cases = select_compiled_cases(implementation.supports, sweep=asked.level == "deep")
    return cases if implementation.accelerator.native is not None else cases[:1]


def _list_interpreted_cases(asked: ImplementationGrids) -> tuple[Case, ...]:
    """Cases of kernels that JAX can interpret; one of a TPU kernel that has no call to run."""
    implementation = asked.implementation
    if not _has_interpreter(implementation):
        return ()
    cases = select_interpreted_cases(asked.seed, implementation.supports, implementation.accelerator.platform)
    return cases if implementation.accelerator.under_interpreter is not None else cases[:1]


def _has_interpreter(implementation: Implementation) -> bool:
    """Whether JAX interprets the accelerator: TPUs, and of GPU kernels those of Mosaic, which say so."""
    accelerator = implementation.accelerator
    return accelerator.platform == "tpu" or (
        accelerator.platform == "gpu" and accelerator.under_interpreter is not None
    )


def _accept_any(implementation: Implementation) -> bool:
    return True


GRID = Scope(
    name="grid",
    about="every case of the covering grids",
    cases=_list_grid_cases,
    has=lambda asked, case: True,
    accepts_any_case=_accept_any,
    short=True,
)
RICH = _build_scope(
    "rich",
    "the case with every supported operand, and beyond quick a second one",
    lambda asked: asked.grid.rich,
    accepts_any_case=_accept_any,
)
BASE = _build_scope(
    "base", "the plainest supported case", lambda asked: asked.grid.singles[:1], accepts_any_case=_accept_any
)
DECODED = _build_scope(
    "decoded",
    "a sequence under each mask that has a meaning token by token, of those who support its pieces",
    lambda asked: (
        *select_decoding_cases(asked.seed, asked.implementation.supports),
        *build_traces(asked.seed, asked.implementation.supports),
    ),
)
FRONT = Scope(
    name="front",
    about="cases whose operands come out of a model's front end",
    cases=lambda asked: select_front_end_cases(asked.level, asked.seed, asked.implementation.supports),
    has=lambda asked, case: bool(case.steps),
)
ENSEMBLE = _build_scope(
    "ensemble",
    "one plain, long case in bf16 and one in f16; in bf16 one under a window, one of decoding and one of many queries",
    lambda asked: select_ensemble_cases(asked.seed, asked.implementation.supports),
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
    cases=lambda asked: tuple(dict.fromkeys((*asked.grid.declined, *asked.sizes.declined))),
    has=lambda asked, case: asked.implementation.supports(case) is not None,
    short=True,
    supported=False,
)
FEATURE = _build_scope(
    "feature",
    "one plain case for each supported argument and mask",
    lambda asked: asked.grid.singles[1:],
    accepts_any_case=_accept_any,
    short=True,
)

SCOPES = (GRID, RICH, BASE, DECODED, FRONT, ENSEMBLE, INTERPRETED, COMPILED, DECLINED, FEATURE)
"""The order in which jobs are planned, and in which planted bugs are looked for."""
