"""Compute exact results and bounds for the formulas that an implementation declares in place of the contract's.

An implementation may return `logsumexp` in base 2, without the sink, or as +inf in rows without keys
(`impls.contract.declarations.Formulas`). With `L` for the contract's `logsumexp`, `e` for its cotangent, and `u` for
the f32 unit roundoff:

- Base 2: the result is `L / ln 2`. Its bound is `E(L) / ln 2 + u |L| / ln 2`, since a kernel may multiply by `log2(e)`
  at the end. The cotangent of `L` is `e / ln 2`. That product rounds too, which adds `u |e| / ln 2` to the error of
  `dp - D + dlse`.
- Without the sink: the result is `L` of the same problem without sinks, with its bound. The gradients are the sum of
  two, since a pullback is linear: those of `out` of the problem, and those of `L` of the problem without sinks. The
  bounds add up too.
- +inf in rows without keys: the result is +inf there, and exact.

The order of operations is declared too (`reorder_terms`). A bias that the scale multiplies enters as `scale * bias`,
and its gradient is `scale * dx`. Both products round once more.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from cases.operand_values import Cotangent, Problem
from conformance.truth.oracle import Array, EmptyRows
from conformance.truth.rounding_bounds import (
    Bounded,
    Expectation,
    OperandErrors,
    compute_expectation_for_roundoff,
)
from conformance.truth.roundoff import Roundoff, U
from impls.contract.declarations import Arithmetic, Formulas


def reorder_terms(problem: Problem, formulas: Formulas) -> Problem:
    """Return the problem with the declared order of the scale, the soft cap and the terms that are added to logits."""
    later = ("bias", "alibi_slopes") if formulas.soft_cap == "before_bias" else ()
    scaled = ("bias",) if formulas.scaled_bias else ()
    if (problem.terms_after_cap, problem.scaled_terms) == (later, scaled):
        return problem
    return dataclasses.replace(problem, terms_after_cap=later, scaled_terms=scaled)


def compute_declared_expectation(
    problem: Problem,
    arithmetic: Arithmetic,
    formulas: Formulas,
    cotangents: Sequence[Cotangent] = (),
    *,
    empty_rows: EmptyRows = "zero",
    inexact: OperandErrors | None = None,
    further: Collection[str] = (),
) -> Expectation:
    """Compute the exact results and their bounds for declared formulas.

    Args:
      cotangents: cotangents of the outputs, those of `logsumexp` as the implementation returns it.
      empty_rows: what the implementation declares to return for a query that may attend to nothing.
      inexact: how far the implementation's operands may be from those of `problem`; None if they are equal.
      further: the names of the further results that are computed too.
    """
    u = Roundoff.of(arithmetic, problem, None if inexact is None else inexact.dtype)
    return compute_declared_expectation_for_roundoff(
        problem, u, formulas, cotangents, empty_rows=empty_rows, inexact=inexact, further=further
    )


def compute_declared_expectation_for_roundoff(
    problem: Problem,
    u: Roundoff,
    formulas: Formulas,
    cotangents: Sequence[Cotangent] = (),
    *,
    empty_rows: EmptyRows = "zero",
    inexact: OperandErrors | None = None,
    further: Collection[str] = (),
) -> Expectation:
    """Compute the exact results and their bounds for declared formulas and given unit roundoffs."""
    problem = reorder_terms(problem, formulas)
    compute_contract = functools.partial(
        compute_expectation_for_roundoff, empty_rows=empty_rows, inexact=inexact, further=further
    )
    if formulas.has_contract_logsumexp:
        return compute_contract(problem, u, cotangents)
    if formulas.logsumexp_base == 2:
        u = dataclasses.replace(u, base=U)
        cotangents = [_scale_logsumexp(cotangent, 1 / math.log(2)) for cotangent in cotangents]

    def compute(problem: Problem, cotangents: Sequence[Cotangent]) -> Expectation:
        return compute_contract(problem, u, cotangents)

    if formulas.logsumexp_sink or problem.sinks is None:
        found = compute(problem, cotangents)
        forward, gradients = found.forward, found.gradients
    else:
        found = compute(problem, [dataclasses.replace(cotangent, logsumexp=None) for cotangent in cotangents])
        only_logsumexp = [dataclasses.replace(c, out=np.zeros_like(c.out)) for c in cotangents]
        without = compute(problem.without("sinks"), only_logsumexp)
        forward = {**found.forward, "logsumexp": without.forward["logsumexp"]}
        gradients = tuple(map(_add_gradients, found.gradients, without.gradients))
    return Expectation({**forward, "logsumexp": _convert_logsumexp(forward["logsumexp"], formulas, u)}, gradients)


def convert_to_contract(logsumexp: Array, formulas: Formulas) -> Array:
    """Convert `logsumexp` of a call without sinks to the contract's formula, in float64."""
    natural = logsumexp.astype(np.float64) * (math.log(2) if formulas.logsumexp_base == 2 else 1.0)
    return np.where(np.isinf(natural), -natural, natural) if formulas.logsumexp_empty == "inf" else natural


def convert_from_contract(logsumexp: Array, formulas: Formulas) -> Array:
    """Convert the contract's `logsumexp` of a call without sinks to the declared formula, in float64."""
    found = logsumexp / math.log(2) if formulas.logsumexp_base == 2 else logsumexp
    return np.where(np.isneginf(found), np.inf, found) if formulas.logsumexp_empty == "inf" else found


def _convert_logsumexp(natural: Bounded, formulas: Formulas, u: Roundoff) -> Bounded:
    """Convert the exact `logsumexp`, in base e, and its bound."""
    value, bound = natural.value, natural.bound
    if formulas.logsumexp_base == 2:
        bound = (bound + u.base * np.abs(np.where(np.isfinite(value), value, 0.0))) / math.log(2)
    return Bounded(convert_from_contract(value, formulas), bound)


def _scale_logsumexp(cotangent: Cotangent, factor: float) -> Cotangent:
    """Return the cotangent with that of `logsumexp` multiplied by a factor, in float64."""
    if cotangent.logsumexp is None:
        return cotangent
    return dataclasses.replace(cotangent, logsumexp=cotangent.logsumexp.astype(np.float64) * factor)


def _add_gradients(one: Mapping[str, Bounded], other: Mapping[str, Bounded]) -> dict[str, Bounded]:
    """Add gradients and their bounds; `other` may lack some of the gradients of `one`."""
    return {
        name: Bounded(x.value + other[name].value, x.bound + other[name].bound) if name in other else x
        for name, x in one.items()
    }
