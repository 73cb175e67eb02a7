"""Give a case's operands, exact results and bounds as arrays: `conformance.case` and `conformance.cases`."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Unpack

import jax
import numpy as np
from jaxtyping import Bool, Float

from cases import size_model
from cases.case import Case
from cases.case_id import matches_query
from cases.grid import Grid, build_grid
from cases.name_suggestions import suggest_or_list
from cases.operand_registry import FURTHER_RESULTS, REMOVABLE, RESIDUALS
from cases.operand_values import Cotangent, Problem
from cases.storage_forms.form_registry import FORMS
from cases.storage_forms.storage_layout import NOBODY
from conformance import packages
from conformance.api import argument_checks
from conformance.api.subject_lookup import describe_function
from conformance.check_api.judgement import judge_comparison
from conformance.check_api.scopes import ImplementationGrids
from conformance.check_api.subject import Subject
from conformance.commands.case_description import explain_case
from conformance.execution.executor import Executor
from conformance.execution.plain_functions import build_implementation
from conformance.truth.comparison import compare
from conformance.truth.rounding_bounds import Bounded
from conformance.truth.tolerances import load_default_tolerances
from impls.contract.argument_validation import validate_arguments
from impls.contract.declarations import Declarations, declare, redeclare
from impls.contract.implementation import Implementation
from reports.records import FAIL, UNJUDGED
from reports.text_format import format_number

Array = Float[np.ndarray, "..."]
"""An array of floats of any shape."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResultComparison:
    """One result compared with its exact values.

    Attributes:
      name: of the result, such as `out` or `dk`.
      verdict: `pass`, `fail` or `unjudged`.
      ratio: the largest error in units of its bound.
      limit: the largest ratio that passes.
      rms: the root mean square of these ratios.
      rms_limit: the largest root mean square that passes; None if there are too few elements to judge it.
      index: of the element with the largest ratio; empty if nothing could be compared.
      got, expected, bound: the value there, the exact value, and the bound of the error.
      reason: why it does not pass; empty if it does.
    """

    name: str
    verdict: str
    ratio: float | None
    limit: float | None
    rms: float | None
    rms_limit: float | None
    index: tuple[int, ...] = ()
    got: float = math.nan
    expected: float = math.nan
    bound: float = math.nan
    reason: str = ""

    def __str__(self) -> str:
        text = f"{self.name:<11} {self.verdict}"
        if self.ratio is not None and self.limit is not None:
            text += f"  ratio {format_number(self.ratio)}, limit {format_number(self.limit)}"
        if self.index:
            place = f"at {list(self.index)}: got {self.got:.7g}, expected {self.expected:.7g}, bound {self.bound:.3g}"
            text += f"  {place}"
        return f"{text}  ({self.reason})" if self.reason and not self.index else text


@dataclasses.dataclass(frozen=True)
class CaseComparison(Mapping[str, ResultComparison]):
    """The results of one call compared with a case, by name. It prints as a table.

    Attributes:
      results: one comparison for each result.
    """

    results: tuple[ResultComparison, ...]

    @property
    def passes(self) -> bool:
        """Return whether something was compared, and nothing fails."""
        verdicts = {result.verdict for result in self.results}
        return FAIL not in verdicts and bool(verdicts - {UNJUDGED})

    def __getitem__(self, name: str) -> ResultComparison:
        for result in self.results:
            if result.name == name:
                return result
        raise KeyError(f"{name}: compared were {', '.join(self)}")

    def __iter__(self) -> Any:
        return iter([result.name for result in self.results])

    def __len__(self) -> int:
        return len(self.results)

    def __str__(self) -> str:
        return "\n".join(map(str, self.results))

    __repr__ = __str__


class CaseData:
    """One attention problem as arrays, for debugging with plain NumPy.

    `B`, `T`, `S`, `N`, `K`, `H`, `V` are the sizes of the contract: batch, queries, keys, query heads, key/value heads,
    depth, and depth of the values.

    Attributes:
      id: the id of the case.
      case: the case, with its sizes as fields.
    """

    def __init__(self, case: Case, declarations: Declarations) -> None:
        self.id = case.id
        self.case = case
        self._declarations = declarations
        self._subject = Subject(Executor(_build_oracle(declarations)), case, load_default_tolerances())

    def __repr__(self) -> str:
        return f"<CaseData: {self.id}>"

    def __str__(self) -> str:
        return self.description

    @property
    def description(self) -> str:
        """The case in words: sizes, mask, values, operands and tolerances, as `explain` prints it."""
        return explain_case(self.case, load_default_tolerances())

    @property
    def problem(self) -> Problem:
        """The operands and the mask as the judge has them: dense, whatever form the case stores them in."""
        return self._subject.problem

    @functools.cached_property
    def operands(self) -> dict[str, Any]:
        """The arguments of a function that has every parameter: arrays in NumPy, and Python numbers.

        For dense cases: `q [B, T, N, H]`, `k [B, S, K, H]`, `v [B, S, K, V]`, `mask` as booleans broadcastable to
        `[B, N, T, S]`, and the optional operands that the case has. For a case whose operands are stored (pages, packs,
        latents, rings): the arrays of that form, by the names that its functions have.
        """
        return self.arguments(_build_full_function(self.case))

    @functools.cached_property
    def cotangents(self) -> dict[str, Array]:
        """The cotangent of `out`, `[B, T, N, V]`, for which the gradients are expected; empty without gradients."""
        if not self._subject.has_gradients:
            return {}
        return {"out": self._subject.cotangents[self._subject.full_cotangent].out}

    @property
    def expected(self) -> dict[str, Array]:
        """The exact results by name, in float64 and dense.

        `out [B, T, N, V]`, `logsumexp` and `max_logits [B, N, T]`, and the gradients for `cotangents`, each in the
        shape of its operand: `dq`, `dk`, `dv`, and `dbias`, `dsinks` and so on where the case has these operands.
        """
        return {name: bounded.value for name, bounded in self._bounded.items()}

    @property
    def bounds(self) -> dict[str, Array]:
        """The rounding error that a correct kernel may have at each element, with the keys and shapes of `expected`."""
        return {name: np.broadcast_to(x.bound, x.value.shape) for name, x in self._bounded.items()}

    @property
    def judged(self) -> dict[str, Bool[np.ndarray, "..."]]:
        """Return masks of the judged elements: all but rows of queries that may attend to nothing, unless declared."""
        return {name: np.broadcast_to(self._find_judged(name), x.value.shape) for name, x in self._bounded.items()}

    @validate_arguments
    def arguments(self, function: Callable[..., Any]) -> dict[str, Any]:
        """Return the keyword arguments that a function would be called with on this case, arrays in NumPy.

        Which they are depends on the parameters that it has: `causal=True` for a function with that parameter, `mask`
        for one without.

        Raises:
          TypeError: if it is no attention function.
          ValueError: if it does not support the case; the message says why.
        """
        recorded: dict[str, Any] = {}
        signature = inspect.signature(function)

        @functools.wraps(function)
        def record(*positional: Any, **named: Any) -> Any:
            recorded.update(zip(signature.parameters, positional, strict=False))
            recorded.update(named)
            raise _Recorded

        executor = self._build_executor(record)
        static, arrays = executor.arguments(self.problem)
        try:
            executor.implementation.call(**arrays, **static)
        except _Recorded:
            return {name: np.asarray(x) if isinstance(x, jax.Array) else x for name, x in recorded.items()}
        raise AssertionError(f"{function} was not called")  # the call above always reaches `record`

    @validate_arguments
    def run(self, function: Callable[..., Any] | Implementation) -> dict[str, Array]:
        """Run a function on this case, jitted, and return its results by name, dense and in NumPy.

        They are `out`, the residuals that it offers, and in a case of training the gradients for `cotangents`.

        Raises:
          TypeError: if it is no attention function.
          ValueError: if it does not support the case; the message says why.
        """
        executor = self._build_executor(function)
        run = executor.residuals if executor.implementation.has_residual_call else executor.forward
        results = dict(run(self.problem).values)
        if self.cotangents:
            gradients = executor.gradients(self.problem, Cotangent("random", self.cotangents["out"])).values
            results |= {name: x for name, x in gradients.items() if name in self.expected and name != "out"}
        return {name: results[name] for name in self.expected if name in results}

    def compare(self, results: Any) -> CaseComparison:
        """Compare results with the exact ones, by the limits that the judge uses.

        Examples:
          >>> import conformance
          >>> case = conformance.case("train/f32/B1.T128.S128.N2.K2.H64.V64/full/normal/s0")
          >>> case.compare(case.expected["out"]).passes
          True
          >>> case.compare(case.expected["out"] + 1e-3)["out"].verdict
          'fail'

        Args:
          results: results by name, such as `{"out": ..., "dk": ...}`; or `out [B, T, N, V]` alone; or
            `(out, residuals)` as a function returns it, with residuals `[B, N, T]` by name. Each has the shape that it
            has in `expected`. Of a case with stored operands, `out` and residuals may be in their stored shapes.

        Raises:
          ValueError: for a name that the case has no result of.
        """
        named = _name_results(results)
        if unknown := [name for name in named if name not in self._bounded]:
            hint = suggest_or_list(unknown[0], self._bounded)
            raise ValueError(f"results[{unknown[0]!r}] is no result of this case{hint}")
        return CaseComparison(tuple(self._compare(name, x) for name, x in named.items()))

    @functools.cached_property
    def _bounded(self) -> dict[str, Bounded]:
        gradients = self._subject.get_expected_gradients(self._subject.full_cotangent) if self.cotangents else {}
        return {**self._subject.expectation.forward, **gradients}

    def _find_judged(self, name: str) -> np.ndarray:
        if name == "out":
            return self._subject.judged_out
        return self._subject.judged_residuals if name in RESIDUALS else np.ones((), bool)

    def _compare(self, name: str, result: Any) -> ResultComparison:
        array = self._restore_stored(name, np.asarray(result))
        comparison = compare(array, self._bounded[name], self._find_judged(name))
        judged = judge_comparison(name, comparison, dtype=self.case.dtype, tolerances=self._subject.limits)
        worst = judged.worst
        place = {} if worst is None else {n: getattr(worst, n) for n in ("index", "got", "expected", "bound")}
        return ResultComparison(
            name=name,
            verdict=judged.verdict,
            ratio=judged.ratio,
            limit=judged.limit,
            rms=judged.rms,
            rms_limit=judged.rms_limit,
            reason=judged.reason,
            **place,
        )

    def _restore_stored(self, name: str, x: np.ndarray) -> np.ndarray:
        """Return a result in its dense shape, if it is in the shape of stored queries."""
        storage = self.problem.storage
        if storage is None or name not in ("out", *RESIDUALS) or x.shape == self._bounded[name].value.shape:
            return x
        rows = storage.q_rows.shape
        if name != "out" and len(rows) == 2:
            x = np.moveaxis(x, 1, 2)  # [rows, N, T]
        if x.shape[: len(rows)] != rows:
            return x  # the comparison says which shape it must have
        flat = x.reshape(-1, *x.shape[len(rows) :])[np.maximum(storage.places, 0)]
        there = (storage.places != NOBODY).reshape(*storage.places.shape, *(1,) * (flat.ndim - 2))
        absent = np.moveaxis(self._bounded[name].value, 1, 2) if name != "out" else self._bounded[name].value
        dense = np.where(there, flat, absent.astype(flat.dtype))
        return dense if name == "out" else np.moveaxis(dense, 1, 2)

    def _build_executor(self, function: Callable[..., Any] | Implementation) -> Executor:
        implementation = _build_implementation(function, self._declarations)
        if (reason := implementation.supports(self.case)) is not None:
            raise ValueError(f"{implementation.name} does not support {self.id}: {reason}")
        return Executor(implementation)


@validate_arguments
def case(case_id: str, **declarations: Unpack[Declarations]) -> CaseData:
    """Return the operands, exact results and bounds of a case as arrays.

    Examples:
      >>> import conformance
      >>> import jax
      >>> case = conformance.case("train/f32/B1.T128.S128.N2.K2.H64.V64/causal/normal/s0")
      >>> {name: getattr(x, "shape", x) for name, x in case.operands.items()}
      {'q': (1, 128, 2, 64), 'k': (1, 128, 2, 64), 'v': (1, 128, 2, 64), 'mask': (1, 1, 128, 128)}
      >>> sorted(case.expected)
      ['dk', 'dq', 'dv', 'logsumexp', 'max_logits', 'out']
      >>> def attention(q, k, v, causal=False):
      ...     return jax.nn.dot_product_attention(q, k, v, is_causal=causal)
      >>> sorted(case.arguments(attention))
      ['causal', 'k', 'q', 'v']
      >>> case.compare(case.run(attention)).passes
      True

    Args:
      case_id: the id of the case, as reports print it.
      **declarations: how the kernel computes, as `conformance.declare` takes it: bounds depend on it.

    Raises:
      ValueError: for an id that no case has, or a declaration that does not exist.
      TypeError: for an unknown declaration, and for an argument of a wrong type.
    """
    packages.claim_names()
    argument_checks.check_declarations(declarations)
    return CaseData(argument_checks.parse_case_argument(case_id), declarations)


@validate_arguments
def cases(
    query: str | None = None,
    *,
    function: Callable[..., Any] | Implementation | None = None,
    level: Literal["quick", "standard", "deep"] = "quick",
    seed: int = 0,
) -> Sequence[str]:
    """Return the ids of the cases of a level, or those that match a query.

    Examples:
      >>> import conformance
      >>> conformance.cases("train/f32")[0].startswith("train/f32/B")
      True

    Args:
      query: the first components of an id; `*` is a wildcard.
      function: a kernel, for the cases that it is judged by: those with pages or other stored operands are only there
        for kernels that take these.
      level: the level of the grid.
      seed: the base seed of the grid.

    Raises:
      TypeError: for an argument of a wrong type, and if `function` is no attention function.
      ValueError: for a level that does not exist, and an empty query.
    """
    packages.claim_names()
    if query == "":
        raise ValueError("query must not be empty, got '': leave it out for all cases")
    if function is None:
        grids: Sequence[Grid] = (build_grid(level, seed), build_grid(level, seed, model=size_model.MODEL))
    else:
        grids = tuple(ImplementationGrids(_build_implementation(function, {}), level, seed).all_grids)
    found = dict.fromkeys(one.id for grid in grids for one in grid.cases)
    return tuple(one for one in found if query is None or matches_query(query, one))


class _Recorded(Exception):
    """The function was called; its arguments are recorded."""


def _build_implementation(function: Callable[..., Any] | Implementation, declarations: Declarations) -> Implementation:
    if isinstance(function, Implementation):
        return function
    declared = redeclare(function, declarations) if declarations else function
    return build_implementation(declared, describe_function(function))


def _build_oracle(declarations: Declarations) -> Implementation:
    """Build an implementation that declares this, offers everything, and computes nothing."""

    def never(q: Any, k: Any, v: Any) -> Any:
        raise NotImplementedError

    declared = build_implementation(redeclare(never, declarations), "oracle")
    return Implementation(
        name="oracle",
        call=never,
        arithmetic=declared.arithmetic,
        formulas=declared.formulas,
        empty_rows=declared.empty_rows,
    )


def _build_full_function(case: Case) -> Callable[..., Any]:
    """Build a function with every parameter that a function of the case's storage form may have."""
    form = None if case.stored is None else FORMS[case.stored.form]
    operands = ("q", "k", "v") if form is None else form.operands
    options = ("mask", *(operand.name for operand in REMOVABLE)) if form is None else form.parameters
    kinds = inspect.Parameter
    parameters = [kinds(name, kinds.POSITIONAL_OR_KEYWORD) for name in operands]
    parameters += [kinds(name, kinds.KEYWORD_ONLY, default=None) for name in options if name != "save_residuals"]

    def full(*operands: Any, **options: Any) -> Any:
        """Take every operand."""

    vars(full)["__signature__"] = inspect.Signature(parameters)
    return declare(captures=True)(full) if "captures" in case.features else full


def _name_results(results: Any) -> dict[str, Any]:
    """Return results by name, from a mapping, an array, or what a function returns, without its further results."""
    if isinstance(results, Mapping):
        return dict(results)
    if isinstance(results, tuple) and len(results) == 2 and isinstance(results[1], Mapping):
        return {"out": results[0], **{name: x for name, x in results[1].items() if name not in FURTHER_RESULTS}}
    return {"out": results}
