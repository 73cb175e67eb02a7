"""Find out which wrong functions give something else than correct attention on the calls that a suite made.

A wrong function that gives the same on all of them cannot be seen by these inputs: the suite is not to blame, and it is
not run. What counts as the same are the limits by which the judge fails a kernel (`conformance.truth`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cases.masks import iter_leaves
from cases.operand_values import Cotangent, Problem
from conformance.check_api.judgement import judge_comparison
from conformance.mutation.calls import AttentionCall
from conformance.mutation.planted_bug import PlantedBug
from conformance.mutation.substitution import DTYPE_NAMES, RecordedCall
from conformance.truth.comparison import compare
from conformance.truth.rounding_bounds import Bounded, compute_expectation
from conformance.truth.tolerances import load_default_tolerances
from impls.contract.declarations import Arithmetic
from impls.contract.implementation import Implementation
from reports.records import FAIL

_LARGE_LOGIT = 50.0


@dataclasses.dataclass(frozen=True)
class SeenCall:
    """A recorded call with its exact results.

    Attributes:
      recorded: the call.
      facts: what distinguishes it from other calls, in words.
    """

    recorded: RecordedCall
    facts: frozenset[str]

    @property
    def size(self) -> int:
        """The number of pairs of a query and a key."""
        return int(np.prod(self.recorded.call.sizes))

    @functools.cached_property
    def problem(self) -> Problem:
        """The operands."""
        return build_problem(self.recorded.call)

    @functools.cached_property
    def cotangents(self) -> list[Cotangent]:
        """A random cotangent of `out`, and of logsumexp where residuals are returned; none without gradients."""
        if not self.recorded.differentiated:
            return []
        q, rng = self.problem.q, np.random.default_rng(1)
        out = rng.standard_normal((*q.shape[:3], self.problem.v.shape[-1])).astype(q.dtype)
        lse = rng.standard_normal((q.shape[0], q.shape[2], q.shape[1])).astype(np.float32)
        empty = self.problem.empty_rows
        out = np.where(empty.transpose(0, 2, 1)[..., None], np.zeros_like(out), out)
        lse = np.where(empty, np.zeros_like(lse), lse)
        return [Cotangent("random", out, lse if self.recorded.residuals else None)]

    @functools.cached_property
    def expected(self) -> dict[str, Bounded]:
        """The exact results that the suite gets, with the bounds of their rounding errors."""
        found = compute_expectation(self.problem, Arithmetic(), self.cotangents)
        names = ("out", "logsumexp", "max_logits") if self.recorded.residuals else ("out",)
        expected = {name: found.forward[name] for name in names}
        if self.cotangents:
            gradients = found.gradients[0]
            expected |= {f"d{n}": gradients[f"d{n}"] for n in self.recorded.differentiated if f"d{n}" in gradients}
        return expected

    def is_wrong(self, results: Mapping[str, np.ndarray]) -> bool:
        """Return whether results fail on this call."""
        tolerances = load_default_tolerances()
        there = ~self.problem.empty_rows
        if self.recorded.empty_rows:
            there = np.ones_like(there)
        for name, bounded in self.expected.items():
            judged = {"out": there.swapaxes(1, 2)[..., None]}.get(name, there if name in _RESIDUALS else None)
            comparison = compare(results[name], bounded, judged)
            dtype = DTYPE_NAMES[self.problem.q.dtype.name]
            if judge_comparison(name, comparison, dtype=dtype, tolerances=tolerances).verdict == FAIL:
                return True
        return False


_RESIDUALS = ("logsumexp", "max_logits")
_OPERANDS = {"sinks": "sinks", "bias": "bias", "segments": "segment_ids", "soft cap": "soft_cap"}
"""The operand without which a wrong function of a family is right."""


def build_problem(call: AttentionCall) -> Problem:
    """Build the problem that a call solves."""
    names = ("q", "k", "v", "segment_ids", "soft_cap", "sinks", "bias", "scale")
    return Problem(mask=call.mask, **{name: getattr(call, name) for name in names})


def _compute_results(implementation: Implementation, seen: SeenCall) -> dict[str, np.ndarray]:
    """Compute results and gradients operation by operation, which compiles nothing anew for each wrong function."""
    call, residuals = seen.recorded.call, seen.recorded.residuals
    pulled = {name: jnp.asarray(getattr(call, name)) for name in seen.recorded.differentiated}

    def run(operands: dict[str, Any]) -> dict[str, Any]:
        return dataclasses.replace(call, **operands).run(implementation, residuals=residuals)

    with jax.disable_jit():
        if not pulled:
            return {name: np.asarray(x) for name, x in run({}).items()}
        results, pull_back = jax.vjp(run, pulled)
        (cotangent,) = seen.cotangents
        given = {name: jnp.zeros_like(x) for name, x in results.items()}
        given["out"] = jnp.asarray(cotangent.out, results["out"].dtype)
        if cotangent.logsumexp is not None:
            given["logsumexp"] = jnp.asarray(cotangent.logsumexp)
        (gradients,) = pull_back(given)
    results |= {f"d{name}": x for name, x in gradients.items()}
    return {name: np.asarray(x) for name, x in results.items()}


def describe_problem(problem: Problem, *, gradients: Collection[str], residuals: bool) -> frozenset[str]:
    """Return facts that distinguish a call from others, in words that complete "no call has ..."."""
    b, t, n, h = problem.q.shape
    s, k, v = problem.k.shape[1], problem.k.shape[2], problem.v.shape[3]
    masks = {type(leaf).__name__: leaf for leaf in iter_leaves(problem.mask)}
    with np.errstate(all="ignore"):
        norms = [np.sqrt(np.square(x.astype(np.float64)).sum(axis=-1)).max() for x in (problem.q, problem.k)]
        bias = 0.0 if problem.bias is None else float(np.abs(problem.bias[np.isfinite(problem.bias)]).max(initial=0))
        largest = norms[0] * norms[1] * abs(problem.effective_scale) + bias
    empty = problem.empty_rows
    facts = {
        f"{DTYPE_NAMES[problem.q.dtype.name]} operands": True,
        "gradients": bool(gradients),
        **{f"a gradient of {name}": True for name in gradients},
        "residuals": residuals,
        "sinks": problem.sinks is not None,
        "a soft cap": problem.soft_cap is not None,
        "a scale of its own": problem.scale is not None,
        "segment ids": problem.segment_ids is not None,
        "a bias": problem.bias is not None,
        "a bias broadcast over queries": problem.bias is not None and problem.bias.shape[2] == 1 < t,
        "no mask": set(masks) <= {"Full"},
        "a causal mask": "Causal" in masks,
        "a window": "Window" in masks,
        "a mask of booleans": not {*masks} <= {"Full", "Causal", "Window"},
        "one query": t == 1,
        "fewer queries than keys": 1 < t < s,
        "more queries than keys": t > s,
        "heads that share keys": n > k,
        "several batch rows": b > 1,
        "values of another depth": v != h,
        "a depth that is no power of two": h & (h - 1) != 0,
        "more than 128 keys": s > 128,
        "keys in no whole blocks of 64": s % 64 != 0,
        "queries without a key": bool(empty.any()),
        "keys that no query sees": bool(problem.dead_keys.any()),
        "logits beyond 50": bool(largest > _LARGE_LOGIT),
    }
    return frozenset(name for name, holds in facts.items() if holds)


def describe_calls(calls: Iterable[RecordedCall]) -> list[SeenCall]:
    """Return one call for each set of facts and operands that were differentiated, the smallest, small ones first."""
    found: dict[Any, SeenCall] = {}
    for recorded in calls:
        problem = build_problem(recorded.call)
        facts = describe_problem(problem, gradients=recorded.differentiated, residuals=recorded.residuals)
        seen = SeenCall(recorded, facts)
        key = seen.facts, recorded.differentiated, recorded.empty_rows
        if key not in found or seen.size < found[key].size:
            found[key] = seen
    return sorted(found.values(), key=lambda seen: seen.size)


def find_visible(bugs: Sequence[PlantedBug], calls: Sequence[SeenCall]) -> dict[str, SeenCall]:
    """Find the wrong functions that some call can see; return that call, by the name of the wrong function."""
    visible: dict[str, SeenCall] = {}
    for bug in bugs:
        implementation = bug.build()
        for seen in calls:
            if _can_show(bug, seen) and is_visible(implementation, seen):
                visible[bug.name] = seen
                break
    return visible


def _can_show(bug: PlantedBug, seen: SeenCall) -> bool:
    """Return whether a call has the operand that a family is about, and returns one of the results that are wrong."""
    operand = _OPERANDS.get(bug.family)
    if operand is not None and getattr(seen.recorded.call, operand) is None:
        return False
    returned = {"out", *(_RESIDUALS if seen.recorded.residuals else ())}
    returned |= {f"d{name}" for name in seen.recorded.differentiated}
    return bool(returned & {name.partition(".")[0] for name in bug.shows})


def is_visible(implementation: Implementation, seen: SeenCall) -> bool:
    """Return whether a call shows that an implementation is wrong; False if it does not take the call."""
    try:
        results = _compute_results(implementation, seen)
    except Exception:  # any: a wrong function may fail in any way on a call that it does not take
        return False
    return seen.is_wrong(results)


def say_lacking(facts: frozenset[str], calls: Sequence[SeenCall]) -> str:
    """Say what a case has and no call of the suite has; or, if each has some of it, what no call has together."""
    known: frozenset[str] = frozenset().union(*(seen.facts for seen in calls))
    lacking = sorted(facts - known)
    if "gradients" in lacking:
        lacking = [one for one in lacking if not one.startswith("a gradient of ")]
    if lacking:
        return "no call has " + ", ".join(lacking)
    nearest = max((seen.facts for seen in calls), key=lambda own: len(facts & own), default=frozenset())
    if lacking := sorted(facts - nearest):
        return f"no call has {', '.join(lacking)} together with {', '.join(sorted(facts & nearest))}"
    return "no call has such values"
