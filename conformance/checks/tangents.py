"""Check `tangents`: results in forward mode are right, for kernels that declare tangents.

Each direction moves one operand, all operands, or a single number of k, which leaves the rows that cannot see this key
exactly as they are. Tangents are compared with those of the oracle, and so are derivatives of gradients along a
direction, if they are declared.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from cases.counter_rng import draw_normal
from cases.operand_registry import GRADIENT_OF
from conformance.check_api.judgement import Judgement, build_unsupported, run_subcheck
from conformance.check_api.scopes import BASE, COMBINED, ImplementationGrids
from conformance.check_api.subject import Subject
from conformance.executor_tasks import tangent_calls
from conformance.truth import tangent_oracle
from conformance.truth.rounding_bounds import Bounded
from reports import records


@dataclasses.dataclass(frozen=True)
class _Direction:
    """The tangents of all operands that may move, zeros for those that stay, and the exact tangents of results."""

    tangents: Mapping[str, np.ndarray]
    expected: Mapping[str, Bounded]


def check_tangents(subject: Subject) -> Iterator[Judgement]:
    """Check `jax.jvp` of results, and of gradients, along several directions, for kernels that declare tangents.

    On the plainest case and those with every operand also `jax.linearize`, `jax.jacfwd`, each operand while the others
    are constants, and gradients.
    """
    declared = subject.implementation.tangents
    if not declared:
        yield build_unsupported("tangents", "no tangents are declared")
        return
    if not subject.has_gradients:
        yield build_unsupported("tangents", "the case is not of training, or no operand has a gradient")
        return
    if subject.implementation.arithmetic.softmax == "input" and subject.case.dtype != "f32":
        reason = "no bounds of tangents are derived for a softmax in the operands' dtype"
        yield Judgement(observable="tangents", verdict=records.UNJUDGED, reason=reason)
        return
    if subject.problem.bias is not None and subject.implementation.formulas.scaled_bias:
        reason = "tangents of a bias that the scale multiplies are not derived"
        yield Judgement(observable="tangents", verdict=records.UNJUDGED, reason=reason)
        return
    directions = _draw_directions(subject)
    results = [name for name in declared if name != "gradients"]
    is_central = _is_central(subject)
    if results:
        yield from run_subcheck("jvp", functools.partial(_check_results, subject, directions, results, "jvp"))
        if is_central:
            for how in ("linearize", "jacfwd"):
                yield from run_subcheck(how, functools.partial(_check_results, subject, directions, results, how))
            yield from run_subcheck("alone", functools.partial(_check_each_alone, subject, directions, results))
    if "gradients" in declared and is_central and subject.case.dtype == "f32":
        orders: tuple[tangent_calls.Order, ...] = ("jvp_of_grad", "grad_of_jvp")
        for order in orders if "out" in results else orders[:1]:
            check = functools.partial(_check_gradients, subject, directions["all"].tangents, order)
            yield from run_subcheck(order, check)


def _draw_directions(subject: Subject) -> dict[str, _Direction]:
    """Draw the directions by name: each operand's, `all`, and `one`, which is nonzero at one place of k."""
    problem, declared = subject.problem, subject.implementation
    operands = {
        name: getattr(problem, name) for name, gradient in GRADIENT_OF.items() if gradient in declared.gradients
    }
    if problem.score_mod is not None and problem.score_mod.caps:
        operands.pop("score_table", None)  # tangents of soft caps are not derived
    every = {
        name: draw_normal(subject.case.seed, f"tangent-{name}", x.shape).astype(x.dtype)
        for name, x in operands.items()
        if x is not None
    }
    still = {name: np.zeros_like(x) for name, x in every.items()}
    drawn = {name: {**still, name: x} for name, x in every.items()} | {"all": every}
    live = np.argwhere(~problem.dead_keys)
    if "k" in every and len(live):
        one = np.zeros_like(every["k"])
        one[(*live[len(live) // 2], 0)] = 1
        drawn["one"] = {**still, "k": one}
    expected = tangent_oracle.compute_tangents(
        problem, list(drawn.values()), declared.arithmetic, declared.formulas, subject.empty_rows
    )
    pairs = zip(drawn.items(), expected, strict=True)
    return {label: _Direction(tangents, exact) for (label, tangents), exact in pairs}


def _is_central(subject: Subject) -> bool:
    """Return whether the case is the plainest or one of those with every supported operand."""
    grids = ImplementationGrids(subject.implementation, "quick", subject.case.seed)
    return subject.case in (*BASE.cases(grids), *COMBINED.cases(grids))


def _check_results(
    subject: Subject, directions: Mapping[str, _Direction], results: Sequence[str], how: tangent_calls.How
) -> Iterator[Judgement]:
    """Check the tangents of results along all directions."""
    names = directions["all"].tangents
    stacked = {name: np.stack([one.tangents[name] for one in directions.values()]) for name in names}
    got = subject.executor.run(tangent_calls.run_tangents, subject.problem, stacked, results, how)
    for place, (label, direction) in enumerate(directions.items()):
        yield from _judge(subject, label, direction, {name: x[place] for name, x in got.items()})


def _check_each_alone(
    subject: Subject, directions: Mapping[str, _Direction], results: Sequence[str]
) -> Iterator[Judgement]:
    """Check the tangents along the direction of each operand, while the others are constants."""
    for name, tangents in directions["all"].tangents.items():
        got = subject.executor.run(tangent_calls.run_tangents, subject.problem, {name: tangents[None]}, results)
        yield from _judge(subject, name, directions[name], {result: x[0] for result, x in got.items()})


def _judge(subject: Subject, label: str, direction: _Direction, got: Mapping[str, np.ndarray]) -> Iterator[Judgement]:
    """Judge the tangents of results along one direction."""
    for name, tangent in got.items():
        result = "out" if name == "out_saved" else name
        judged = subject.judged_out if result == "out" else subject.judged_residuals
        yield subject.judge(result, tangent, direction.expected[result], judged, label=f"{name}.{label}")


def _check_gradients(
    subject: Subject, direction: tangent_oracle.Direction, order: tangent_calls.Order
) -> Iterator[Judgement]:
    """Check the derivatives of the gradients along a direction, in f32."""
    declared = subject.implementation
    do = subject.cotangents[subject.full_cotangent].out
    got = subject.executor.run(tangent_calls.run_gradient_tangents, subject.problem, direction, do, order)
    expected = tangent_oracle.compute_gradient_tangents(
        subject.problem, direction, do, declared.arithmetic, subject.empty_rows
    )
    for operand, x in got.items():
        name = GRADIENT_OF[operand]
        yield subject.judge(name, x, expected[name])
