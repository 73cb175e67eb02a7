"""Define scopes. The scope of a check selects the cases that the check runs on.

A scope holds its cases, whether they are cheap, and the call that replaces the kernel's own if the accelerator is
missing. The planning of runs and the measurement of planted bugs use it. `SCOPES` lists all scopes, the most revealing
first.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from cases import feature_model, size_model
from cases.accelerator_cases import select_compiled_cases, select_interpreted_cases
from cases.algorithm_cases import select_algorithm_cases
from cases.batch_cases import select_batch_cases
from cases.case import Case
from cases.case_fields import DTYPES
from cases.case_space.coarse_levels import find_given_operands
from cases.covering_model import Model
from cases.decoding_cases import select_decoding_cases
from cases.dropout_cases import select_dropout_cases
from cases.ensemble_cases import select_ensemble_cases
from cases.first_call_cases import select_first_call_cases
from cases.front_end_cases import select_front_end_cases
from cases.grid import Grid, build_grid
from cases.indexer_cases import build_indexer_models
from cases.list_model import build_list_models, build_union_model
from cases.long_sequence_cases import select_long_sequence_cases, select_wide_cases
from cases.masks import LOCAL_WINDOW
from cases.operand_model import build_capture_model, build_operand_model
from cases.operand_registry import WITH_OWN_CASES
from cases.regressions import REGRESSIONS
from cases.storage_forms.form_cases import load_form_cases
from cases.storage_forms.server_traces import build_traces
from conformance.accelerators.targets import list_targets
from impls.contract.implementation import Implementation


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

    @functools.cached_property
    def operand_grids(self) -> tuple[Grid, ...]:
        """The grids of the operands that have their own cases and that the implementation offers.

        Then those of functions that capture arrays, of masks and operands over stored sequences, of lists of keys that
        a call need not have, and of windows beside lists.
        """
        offers, writes_pages = self.implementation.offers, self.implementation.writes_pages
        if self.implementation.storage is None:
            models = [build_operand_model(operand) for operand in WITH_OWN_CASES if operand.name in offers]
            if offers.issuperset({"captures", "score_mod"}):
                models.append(build_capture_model())
        else:
            find = load_form_cases(self.implementation.storage).find_further_models
            models = list(find(writes_pages, offers) if find else ())
        if "indices" in offers and not needs_lists(self.implementation):
            models.append(build_list_models(self.implementation.storage, writes_pages=writes_pages)[0])
        if LOCAL_WINDOW in offers:
            models.append(build_union_model(self.implementation.storage, writes_pages=writes_pages))
        return tuple(build_grid(self.level, self.seed, self.implementation.supports, model) for model in models)

    @property
    def all_grids(self) -> tuple[Grid, ...]:
        """The grids of features, of sizes, and of operands that have their own cases."""
        return (self.grid, self.sizes, *self.operand_grids)

    @property
    def declined(self) -> tuple[Case, ...]:
        """Cases that the implementation must refuse: one for each unsupported level and operand.

        The levels are those of the grids of features and of sizes. The operands are those with their own cases.
        """
        plainest = self.grid.singles[:1] if self.implementation.storage is None else ()
        declined = [case for grid in (self.grid, self.sizes) for case in grid.declined]
        for operand in WITH_OWN_CASES:
            changed: dict[str, Any] = {operand.field: operand.levels[0]}
            if operand.name not in self.implementation.offers:
                declined += [dataclasses.replace(case, **changed) for case in plainest]
        return tuple(dict.fromkeys(declined))

    @property
    def _models(self) -> tuple[Model, Model]:
        return select_models(self.implementation)


def select_models(implementation: Implementation) -> tuple[Model, Model]:
    """Select the models of features and of sizes for the implementation's storage form, or for an indexer."""
    if "lightning" in implementation.offers:
        return build_indexer_models()
    if needs_lists(implementation):
        return build_list_models(implementation.storage, writes_pages=implementation.writes_pages)
    if implementation.storage is None:
        return feature_model.MODEL, size_model.MODEL
    cases = load_form_cases(implementation.storage)
    if cases.find_models is None:
        return cases.models
    return cases.find_models(implementation.writes_pages, implementation.offers)


def needs_lists(implementation: Implementation) -> bool:
    """Return whether the implementation takes only calls with lists of keys, as its refusal of plain cases says."""
    if "indices" not in implementation.offers:
        return False
    form = implementation.storage
    plain = Case() if form is None else load_form_cases(form).plain
    phases: tuple[dict[str, Any], ...] = ({}, {"phase": "prefill"}, {"phase": "decode", "q_length": 1})
    cases = (dataclasses.replace(plain, **phase, dtype=dtype) for phase in phases for dtype in DTYPES)
    return any((implementation.supports(case) or "").startswith("indices:") for case in cases)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scope:
    """The selection of cases that a check runs on."""

    name: str  # the name of the scope in `list checks` and in messages
    about: str  # a short description of its cases
    # A function that lists its cases for one implementation, level and base seed.
    cases: Callable[[ImplementationGrids], tuple[Case, ...]]
    # A function that says whether a case belongs to the scope. A case that the user names gets the checks of all scopes
    # that contain it.
    contains: Callable[[ImplementationGrids, Case], bool]
    # A function that says whether a check may run on every supported case of an implementation, if the user names the
    # check.
    accepts_any_case: Callable[[Implementation], bool] = lambda implementation: False
    short: bool = False  # whether few programs have to be compiled for a case
    supported: bool = True  # whether the implementation supports the cases. If not, it must refuse them.
    seeded: bool = True  # whether results depend on the values of operands. If not, the cases of one seed are enough.
    # A function that returns the call to judge if the implementation's accelerator is missing, or None if nothing can
    # be judged without it.
    without_accelerator: Callable[[Implementation], Callable[..., Any] | None] | None = None


def _build_scope(
    name: str, about: str, cases: Callable[[ImplementationGrids], tuple[Case, ...]], **options: Any
) -> Scope:
    """Build a scope that contains exactly the cases that it lists."""
    return Scope(name=name, about=about, cases=cases, contains=lambda grids, case: case in cases(grids), **options)


def _list_grid_cases(grids: ImplementationGrids) -> tuple[Case, ...]:
    """List the supported cases of all grids; above level `quick`, add very large sizes and named regressions.

    A kernel that is interpreted gets no case with very many batch rows or heads: an interpreter takes them one by one.
    """
    gridded = [case for grid in grids.all_grids for case in grid.cases]
    if grids.level == "quick":
        return tuple(dict.fromkeys(gridded))
    supports = grids.implementation.supports
    named = (regression.case for regression in REGRESSIONS if supports(regression.case) is None)
    wide = () if grids.implementation.accelerator.interpreted else select_wide_cases(grids.seed, supports)
    return tuple(dict.fromkeys((*gridded, *select_long_sequence_cases(grids.seed, supports), *wide, *named)))


def _list_compiled_cases(grids: ImplementationGrids) -> tuple[Case, ...]:
    """List a few long cases for kernels of a platform whose compiler is installed here.

    An implementation without a declared native call gets one case, so that the report mentions that it has none.
    """
    implementation = grids.implementation
    if not list_targets(implementation.accelerator.platform):
        return ()
    cases = select_compiled_cases(implementation.supports, sweep=grids.level == "deep")
    return cases if implementation.accelerator.native is not None else cases[:1]


def _list_interpreted_cases(grids: ImplementationGrids) -> tuple[Case, ...]:
    """List cases that JAX can interpret.

    A TPU kernel without a declared call for the interpreter gets one case, so that the report mentions this lack.
    """
    implementation = grids.implementation
    if not _has_interpreter(implementation):
        return ()
    cases = select_interpreted_cases(grids.seed, implementation.supports, implementation.accelerator.platform)
    return cases if implementation.accelerator.under_interpreter is not None else cases[:1]


def _has_interpreter(implementation: Implementation) -> bool:
    """Return whether JAX can interpret the kernel: any TPU kernel, or a GPU kernel with a call for the interpreter."""
    accelerator = implementation.accelerator
    return accelerator.platform == "tpu" or (
        accelerator.platform == "gpu" and accelerator.under_interpreter is not None
    )


def _list_batch_cases(grids: ImplementationGrids) -> tuple[Case, ...]:
    """List cases whose sequences take part in other calls; without the declaration one, and none at `quick`."""
    declared = grids.implementation.batch_invariant
    if not declared and grids.level == "quick":
        return ()
    lengths = () if isinstance(declared, bool) else tuple(declared)
    cases = select_batch_cases(grids.implementation.storage, lengths, grids.seed, grids.implementation.supports)
    return cases if declared else cases[:1]


def _list_plainest(grid: Grid) -> tuple[Case, ...]:
    """List the plainest case of a grid, and the plain ones with another score function."""
    first = grid.singles[:1]
    if first and first[0].storage is not None:  # the plainest of the form is among the cases of its other grids
        return tuple(case for case in grid.singles if find_given_operands(case))
    return tuple(case for case in grid.singles if case in first or case.score != first[0].score)


def _accept_any(implementation: Implementation) -> bool:
    """Return True: a check of the scope may run on every supported case."""
    return True


def _list_tangent_cases(grids: ImplementationGrids) -> tuple[Case, ...]:
    """List cases of training for an implementation that declares tangents, all of which other checks have as well.

    They are those of `COMBINED`, `BASE` and `FEATURE`, and for each dtype the smallest cases of the grid with and
    without query heads that share keys.
    """
    if not grids.implementation.tangents:
        return ()

    def order(case: Case) -> tuple[bool, bool, int]:
        size = case.batch * case.num_q_heads * case.q_length * case.kv_length
        return case.distribution != "normal", case.q_length == 1, size

    ordered = sorted(filter(_trains, grids.grid.cases), key=order, reverse=True)
    smallest = {(case.dtype, case.num_q_heads > case.num_kv_heads): case for case in ordered}
    found = (*COMBINED.cases(grids), *BASE.cases(grids), *FEATURE.cases(grids), *smallest.values())
    return tuple(dict.fromkeys(case for case in found if _trains(case)))


def _list_index_cases(grids: ImplementationGrids) -> tuple[Case, ...]:
    """List a small case of an indexer for each dtype, causal and not; none for other implementations.

    Where there are such cases, it has several heads, lists of several keys, and keys that several lists name.
    """
    if "lightning" not in grids.implementation.offers:
        return ()

    def rate(case: Case) -> tuple[bool, bool, bool, int]:
        is_single = case.mask.startswith("lightning-1-") or case.mask == "lightning-1"
        return case.q_length < 24, case.num_q_heads == 1, is_single, case.q_length * case.kv_length

    ordered = sorted(grids.grid.cases, key=rate, reverse=True)
    return tuple({(case.dtype, "causal" in case.mask): case for case in ordered}.values())


def _trains(case: Case) -> bool:
    """Return whether the case is of training."""
    return case.phase == "train"


GRID = Scope(
    name="grid",
    about="every case of the covering grids",
    cases=_list_grid_cases,
    contains=lambda grids, case: case.dropout_rate is None,
    accepts_any_case=_accept_any,
    short=True,
)
FIRST = _build_scope(
    "first",
    "a small variant of the plainest supported case",
    lambda grids: select_first_call_cases(grids.grid.singles, grids.implementation.supports),
    accepts_any_case=_accept_any,
)
COMBINED = _build_scope(
    "combined",
    "the case with every supported operand, and beyond quick a second one; one more for operands with their own cases",
    lambda grids: (*grids.grid.combined, *(case for grid in grids.operand_grids for case in grid.combined)),
    accepts_any_case=_accept_any,
)
BASE = _build_scope(
    "base",
    "the plainest supported case; one more for operands with their own cases",
    lambda grids: tuple(case for grid in (grids.grid, *grids.operand_grids) for case in grid.singles[:1]),
    accepts_any_case=_accept_any,
)
SEARCHED = _build_scope(
    "searched",
    "the plainest supported case, from which cases that reach other branches of the source are searched",
    lambda grids: grids.grid.singles[:1],
    accepts_any_case=_accept_any,
    seeded=False,
)
DECODED = _build_scope(
    "decoded",
    "a sequence under each mask that can be decoded token by token, if all its pieces are supported",
    lambda grids: (
        *select_decoding_cases(grids.seed, grids.implementation.supports),
        *build_traces(grids.seed, grids.implementation.supports),
    ),
)
BATCHED = _build_scope(
    "batched",
    "sequences that also come alone, with others, elsewhere, padded and in chunks, for kernels that declare "
    "`batch_invariant`; beyond quick one case for others",
    _list_batch_cases,
    accepts_any_case=_accept_any,
    seeded=False,
)
FRONT = Scope(
    name="front",
    about="cases whose operands come out of a model's front end",
    cases=lambda grids: select_front_end_cases(grids.level, grids.seed, grids.implementation.supports),
    contains=lambda grids, case: bool(case.steps),
)
DROPPED = Scope(
    name="dropped",
    about="cases in which weights are dropped at random",
    cases=lambda grids: select_dropout_cases(grids.level, grids.seed, grids.implementation.supports),
    contains=lambda grids, case: case.dropout_rate is not None,
)
INDEXED = _build_scope(
    "indexed",
    "for indexers: a small case of each dtype, causal and not",
    _list_index_cases,
    accepts_any_case=lambda implementation: "lightning" in implementation.offers,
)
ENSEMBLE = _build_scope(
    "ensemble",
    "plain, long cases in bf16 and f16, and cases whose values make one rounding stand out: causal, biased, decoding, "
    "stored in pages, packs, rings and latents",
    lambda grids: select_ensemble_cases(grids.seed, grids.implementation.supports),
)
EXACT = _build_scope(
    "exact",
    "the plainest case in bf16 and in f32, and cases that have every property of a case between them, in bf16 and in "
    "f16; beyond quick one for each compiled program of 16-bit operands",
    lambda grids: select_algorithm_cases(
        [case for grid in grids.all_grids for case in grid.cases],
        grids.grid.singles,
        grids.implementation.supports,
        every_program=grids.level != "quick",
    ),
    accepts_any_case=_accept_any,
    short=True,
    seeded=False,
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
    cases=lambda grids: grids.declined,
    contains=lambda grids, case: grids.implementation.supports(case) is not None,
    short=True,
    supported=False,
)
FEATURE = _build_scope(
    "feature",
    "one plain case for each supported argument and mask",
    lambda grids: (
        *grids.grid.singles[1:],
        *(case for grid in grids.operand_grids for case in _list_plainest(grid)),
    ),
    accepts_any_case=_accept_any,
    short=True,
)
TANGENT = _build_scope(
    "tangent",
    "for kernels that declare tangents: the cases with every operand, the plainest, one for each supported argument "
    "and mask, and small ones of each dtype",
    _list_tangent_cases,
    accepts_any_case=lambda implementation: bool(implementation.tangents),
)

SCOPES = (
    *(GRID, FIRST, SEARCHED, EXACT, TANGENT, COMBINED, BASE, DECODED, BATCHED),
    *(FRONT, DROPPED, INDEXED, ENSEMBLE, INTERPRETED, COMPILED, DECLINED, FEATURE),
)
"""All scopes, in the order in which their cases are planned in a run, and tried on planted bugs."""
