"""Measure the smallest error that the checks detect: how far a correct result must be perturbed before it fails.

Attention is computed correctly in f32, and the results are rounded to the dtype of the case. One place of the
computation is perturbed by a relative error `e`. The results are judged with the cases, bounds and limits of a run.
Bisection on a logarithmic scale finds the smallest `e` at which each observable fails. The smallest `e` over all cases
is the *resolution*: a run with these cases detects every error of this kind and at least this size.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from cases.case import Case
from cases.case_fields import DTYPES
from cases.ensemble_cases import select_plain_cases
from cases.grid import build_grid
from cases.operand_values import Cotangent, Problem, draw_cotangent, draw_problem
from conformance.check_api.judgement import judge_comparison
from conformance.checks.ensemble import compute_statistics, judge_statistics, list_reseeded_cases
from conformance.truth import oracle, tolerances
from conformance.truth.comparison import compare
from conformance.truth.error_variance import compute_error_variance
from conformance.truth.rounding_bounds import Bounded, compute_expectation
from conformance.truth.roundoff import UNIT_ROUNDOFF
from conformance.truth.tolerances import Tolerances
from impls.contract.declarations import Arithmetic
from reports import records

SCALE = "scale"
KEY = "probability of one key"
ELEMENT = "one element of out"
GRADIENT = "gradient {}"

# The tried errors are powers of `_STEP`, from far below a roundoff to 100%. Neighbouring errors differ by 10%.
_STEP = 1.1
_MIN_POWER = round(math.log(2.0**-30, _STEP))
_REVEALING_DISTRIBUTIONS = ("dominant", "heavy", "huge")

Values = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Resolution:
    """The smallest relative error of one kind at which one observable fails, over all cases.

    Attributes:
      perturbation: the place that is perturbed: `SCALE`, `KEY`, `ELEMENT` or `GRADIENT`.
      dtype: dtype of the operands.
      observable: the result that fails, such as `"dq"`.
      smallest: the smallest relative error at which it fails; None if even an error of 100% passes in every case.
      roundoffs: `smallest` in unit roundoffs of the dtype; None if `smallest` is None.
      case: id of the case in which it fails; empty if `smallest` is None.
    """

    perturbation: str
    dtype: str
    observable: str
    smallest: float | None
    roundoffs: float | None
    case: str


def select_default_cases(dtype: str, seed: int = 0) -> list[Case]:
    """Select one to two dozen cases with gradients from the quick grid: every n-th case, and the most sensitive ones.

    A case is sensitive if its rounding bounds are small. They are small if a logit sums few products and nothing
    cancels: at the smallest head dimension (16), with values in which one coordinate or one key dominates. Cases with
    large logits, where one key gets all the weight of a row, are sensitive too. The first case with sinks is added,
    for the gradient of the sinks.
    """
    candidates = [case for case in build_grid("quick", seed).cases if case.dtype == dtype and case.phase == "train"]
    stride = max(1, len(candidates) // 10)
    with_sinks = next((case for case in candidates if case.sinks), None)
    return [
        case
        for number, case in enumerate(candidates)
        if number % stride == 0
        or case is with_sinks
        or case.distribution == "large"
        or (case.head_dim == 16 and case.distribution in _REVEALING_DISTRIBUTIONS)
    ]


def measure_resolutions(
    table: Tolerances | None = None,
    *,
    dtypes: Sequence[str] = DTYPES,
    cases: Callable[[str], Sequence[Case]] = select_default_cases,
    ensemble: bool = True,
) -> list[Resolution]:
    """Measure the resolution for each perturbation, each dtype, and each observable that the perturbation changes.

    Args:
      table: the tolerances to judge with; the default tolerances if None.
      dtypes: dtypes of the operands.
      cases: function that returns the cases to judge for a dtype.
      ensemble: whether to judge by the check `ensemble` too, which runs in bf16 and f16. It judges the statistics of
        an observable over several seeds: `out.bias`, `out.spread`, and so on.
    """
    table = table or tolerances.load_default_tolerances()
    resolutions: list[Resolution] = []
    for dtype in dtypes:
        best: dict[tuple[str, str], tuple[float, str]] = {}
        for case in cases(dtype):
            for perturbation in _iter_perturbations(case, table):
                _lower_best(perturbation, case, best)
        for case in select_plain_cases(0) if ensemble else ():
            if case.dtype == dtype:
                for perturbation in _iter_ensemble_perturbations(case):
                    _lower_best(perturbation, case, best)
        resolutions += [_build_resolution(dtype, *key, *smallest) for key, smallest in best.items()]
    order = (SCALE, *(GRADIENT.format(name) for name in ("dq", "dk", "dv")), KEY, ELEMENT)
    return sorted(resolutions, key=lambda x: (list(dtypes).index(x.dtype), order.index(x.perturbation)))


def _build_resolution(dtype: str, perturbation: str, observable: str, smallest: float, case: str) -> Resolution:
    """Build the `Resolution` of one perturbation and observable; `smallest` is infinite if no error was seen."""
    if smallest == math.inf:
        return Resolution(perturbation, dtype, observable, None, None, "")
    return Resolution(perturbation, dtype, observable, smallest, smallest / UNIT_ROUNDOFF[dtype], case)


@dataclasses.dataclass(frozen=True)
class _Perturbation:
    """A kind of error on one case.

    Attributes:
      name: the perturbed place, as in `Resolution.perturbation`.
      observables: names of the results that are judged.
      seen: function from the relative error `e` to a mapping that says for each observable whether it fails.
    """

    name: str
    observables: tuple[str, ...]
    seen: Callable[[float], Mapping[str, bool]]


def _lower_best(perturbation: _Perturbation, case: Case, best: dict[tuple[str, str], tuple[float, str]]) -> None:
    """Search the smallest visible error of a perturbation on a case, and enter it in `best` if it is smaller.

    Args:
      perturbation: the perturbation on this case.
      case: the case.
      best: by (perturbation, observable), the smallest visible error so far and the id of its case.
    """
    seen = functools.cache(lambda power: perturbation.seen(_STEP**power))
    for observable in perturbation.observables:
        key = (perturbation.name, observable)
        smallest, _ = best.setdefault(key, (math.inf, ""))
        # Bisect only if this case fails at an error one step below the smallest so far.
        high = 0 if smallest == math.inf else round(math.log(smallest, _STEP)) - 1
        if seen(high)[observable]:
            best[key] = (_STEP ** _find_least_power(seen, observable, high), case.id)


def _find_least_power(seen: Callable[[int], Mapping[str, bool]], observable: str, high: int) -> int:
    """Find by bisection the least power of `_STEP` at which the observable fails; it must fail at `high`."""
    low = _MIN_POWER
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if seen(middle)[observable] else (middle, high)
    return high


def _iter_perturbations(case: Case, table: Tolerances) -> Iterator[_Perturbation]:
    """Yield perturbations that are judged element by element, with a cotangent on all rows and one on a single row.

    dk and dv are sums over the rows of queries, and such a sum can hide an error of the logits. With a cotangent on a
    single row there is no sum, so dk and dv show an error of the logits about as well as the residuals do.
    """
    problem = draw_problem(case)
    cotangents = _build_cotangents(case, problem)
    expectation = compute_expectation(problem, Arithmetic(), cotangents)
    for cotangent, gradients in zip(cotangents, expectation.gradients, strict=True):
        forward = expectation.forward if cotangent is cotangents[0] else {}
        yield from _iter_judged_perturbations(case, problem, cotangent, {**forward, **gradients}, table)


def _build_cotangents(case: Case, problem: Problem) -> list[Cotangent]:
    """Build a cotangent on all rows of queries, and one on the last row that may attend to at least one key.

    The checks `gradients` and `gradients_part` use the same two cotangents.
    """
    out = draw_cotangent(case).out
    live_rows = np.flatnonzero(~problem.empty_rows.all(axis=(0, 1)))
    single_row = np.where(np.arange(case.q_length)[:, None, None] == live_rows[-1:], out, np.zeros_like(out))
    return [Cotangent("random", out), Cotangent("row", single_row)]


def _iter_judged_perturbations(
    case: Case, problem: Problem, cotangent: Cotangent, expected: Mapping[str, Bounded], table: Tolerances
) -> Iterator[_Perturbation]:
    """Yield the perturbations that are judged element by element against the bounds, for one cotangent.

    Args:
      case: the case.
      problem: operands of the case.
      cotangent: cotangent of `out`.
      expected: exact value and bound of each observable that is judged.
      table: the limits to judge with.
    """
    attention = _Attention.of(problem, cotangent)
    exact = attention(0.0, 0.0)

    def perturbation(name: str, results: Callable[[float], Values], observables: Iterable[str]) -> _Perturbation:
        names = tuple(observable for observable in observables if observable in expected)

        def seen(e: float) -> dict[str, bool]:
            values = _round_values(results(e), problem)
            return {observable: fails(observable, values[observable]) for observable in names}

        return _Perturbation(name, names, seen)

    def fails(observable: str, value: np.ndarray) -> bool:
        judged = judge_comparison(observable, compare(value, expected[observable]), dtype=case.dtype, tolerances=table)
        return judged.verdict == records.FAIL

    yield perturbation(SCALE, lambda e: attention(e, 0.0), expected)
    yield perturbation(KEY, lambda e: attention(0.0, e), ("out", "dq", "dk", "dv"))
    for name in ("dq", "dk", "dv"):
        yield perturbation(GRADIENT.format(name), _scale_observable(exact, name), (name,))
    if "out" in expected:
        yield perturbation(ELEMENT, _scale_observable(exact, "out", _find_clearest_element(expected["out"])), ("out",))


def _iter_ensemble_perturbations(case: Case) -> Iterator[_Perturbation]:
    """Yield the perturbations that the check `ensemble` judges: an error in the scale, or in a whole gradient.

    That check judges statistics over several seeds of a case, so it can only see errors that change all elements of a
    result.
    """
    members = []
    for one in list_reseeded_cases(case):
        problem, cotangent = draw_problem(one), draw_cotangent(one)
        members.append((_Attention.of(problem, cotangent), compute_error_variance(problem, Arithmetic(), cotangent)))
    exact = [attention(0.0, 0.0) for attention, _ in members]

    def perturbation(name: str, results: Callable[[int, float], Values], observables: Sequence[str]) -> _Perturbation:
        """Build a perturbation; `results` takes the index of a seed in the ensemble, and the relative error."""

        def seen(e: float) -> dict[str, bool]:
            rounded = [_round_values(results(n, e), member.problem) for n, (member, _) in enumerate(members)]
            judged = [
                judgement
                for observable in observables
                for judgement in judge_statistics(
                    observable,
                    compute_statistics(
                        [(x[observable], y[observable]) for x, (_, y) in zip(rounded, members, strict=True)]
                    ),
                    case.dtype,
                )
            ]
            return {judgement.observable: judgement.verdict == records.FAIL for judgement in judged}

        both = tuple(f"{observable}.{what}" for observable in observables for what in ("bias", "spread"))
        return _Perturbation(name, both, seen)

    yield perturbation(SCALE, lambda n, e: members[n][0](e, 0.0), ("out", "dq", "dk", "dv"))
    for name in ("dq", "dk", "dv"):
        times = [_scale_observable(values, name) for values in exact]
        yield perturbation(GRADIENT.format(name), functools.partial(_call_member, times), (name,))


def _call_member(results: Sequence[Callable[[float], Values]], number: int, e: float) -> Values:
    """Return the results for one seed of the ensemble (`number`), perturbed by the relative error `e`."""
    return results[number](e)


def _round_values(values: Values, problem: Problem) -> Values:
    """Round results to the dtypes in which an implementation returns them: the operands' dtype, or f32 for others."""
    dtypes = dict.fromkeys(("out", "dq", "dk", "dv"), problem.q.dtype)
    if problem.bias is not None:
        dtypes["dbias"] = problem.bias.dtype
    return {name: x.astype(dtypes.get(name, np.float32)) for name, x in values.items()}


def _scale_observable(exact: Values, name: str, place: tuple[Any, ...] = ()) -> Callable[[float], Values]:
    """Return a function of `e` that multiplies the exact observable, or only its element at `place`, by `1 + e`."""

    def results(e: float) -> Values:
        values = exact[name].astype(np.float64)
        values[place] *= 1 + e
        return {name: values}

    return results


def _find_clearest_element(expected: Bounded) -> tuple[Any, ...]:
    """Find the index of the element whose bound is smallest relative to its value."""
    relative = np.divide(
        np.abs(expected.value), expected.bound, where=expected.bound > 0, out=np.zeros_like(expected.bound)
    )
    return np.unravel_index(int(np.argmax(relative)), relative.shape)


@dataclasses.dataclass(frozen=True)
class _Attention:
    """Attention and its backward pass as docs/contract.md, section 2, defines them, computed in f32 with NumPy.

    Attributes:
      problem: the operands.
      do: cotangent of `out`, `[B, N, T, V]`.
      key: index of the key whose probability can be perturbed.
    """

    problem: Problem
    do: np.ndarray
    key: int

    @classmethod
    def of(cls, problem: Problem, cotangent: Cotangent) -> _Attention:
        """Build the attention of `problem`; its `key` is the one with the largest probability in any row."""
        top = [(group.p.max(), int(group.p.max(axis=(0, 1)).argmax())) for group in oracle.iter_head_groups(problem)]
        return cls(problem, _move_heads_first(cotangent.out), max(top)[1])

    @functools.cached_property
    def operands(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """q, k and v in f32 as `[B, N, length, depth]`; keys and values are repeated for each query head."""
        k, v = (np.repeat(_move_heads_first(x), self.group, axis=1) for x in (self.problem.k, self.problem.v))
        return _move_heads_first(self.problem.q), k, v

    @property
    def group(self) -> int:
        """Number of query heads for each key/value head."""
        return self.problem.q.shape[2] // self.problem.k.shape[2]

    def __call__(self, scale_error: float, key_error: float) -> Values:
        """Compute all results and gradients, with an error at two places.

        Args:
          scale_error: relative error of the scale of the logits.
          key_error: relative error of the normalised probability of the key `self.key`.

        Returns:
          results by name (`out`, `logsumexp`, `dq`, ...), in the layouts in which an implementation returns them.
        """
        q, k, v = self.operands
        scale = np.float32(self.problem.effective_scale * (1 + scale_error))
        factor = np.ones(k.shape[2], np.float32)
        factor[self.key] += np.float32(key_error)
        z, slope = self._compute_logits(scale * (q @ k.swapaxes(2, 3)))
        top = z.max(axis=-1)
        sinks = None if self.problem.sinks is None else self.problem.sinks[:, None]
        pivot = top if sinks is None else np.maximum(top, sinks)
        pivot = np.where(np.isfinite(pivot), pivot, np.float32(0))
        weights = np.exp(z - pivot[..., None])
        total = weights.sum(axis=-1)
        if sinks is not None:
            total = total + np.exp(sinks - pivot)
        with np.errstate(divide="ignore"):
            results = {"logsumexp": pivot + np.log(total), "max_logits": top}
        p = factor * weights / np.where(total > 0, total, np.float32(1))[..., None]
        dp = self.do @ v.swapaxes(2, 3)
        d = (p * dp).sum(axis=-1, keepdims=True)
        dz = p * (dp - d)
        dx = slope * dz
        results["out"] = (p @ v).transpose(0, 2, 1, 3)
        results["dq"] = (scale * (dx @ k)).transpose(0, 2, 1, 3)
        results["dk"] = self._sum_over_groups(scale * (dx.swapaxes(2, 3) @ q))
        results["dv"] = self._sum_over_groups(p.swapaxes(2, 3) @ self.do)
        if sinks is not None:
            results["dsinks"] = -(np.exp(sinks - results["logsumexp"]) * d[..., 0]).sum(axis=(0, 2))
        if self.problem.bias is not None:
            axes = tuple(axis for axis in range(4) if self.problem.bias.shape[axis] == 1)
            results["dbias"] = dx.sum(axis=axes, keepdims=True)
        return results

    def _compute_logits(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the logits after bias, soft cap and mask, and the derivative of the soft cap; `x` is scaled q k."""
        if self.problem.bias is not None:
            x = x + self.problem.bias.astype(np.float32)
        slope = np.ones((), np.float32)
        if self.problem.soft_cap is not None:
            tanh = np.tanh(x / np.float32(self.problem.soft_cap))
            x, slope = np.float32(self.problem.soft_cap) * tanh, 1 - tanh**2
        return np.where(self.problem.allowed, x, np.float32(-np.inf)), slope

    def _sum_over_groups(self, by_head: np.ndarray) -> np.ndarray:
        """Sum gradients over the query heads of each group: `[B, N, S, H]` to `[B, S, K, H]`."""
        batch, heads, length, depth = by_head.shape
        grouped = by_head.reshape(batch, heads // self.group, self.group, length, depth)
        return grouped.sum(axis=2).transpose(0, 2, 1, 3)


def _move_heads_first(x: np.ndarray) -> np.ndarray:
    """Convert to f32 and move the heads first: `[B, T, N, H]` to `[B, N, T, H]`."""
    return np.ascontiguousarray(x.astype(np.float32).transpose(0, 2, 1, 3))
