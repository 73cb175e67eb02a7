"""Questions that the gate does not ask, in the form of its checks: witnesses of bugs that it cannot see."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from cases.masks import Dense
from cases.operand_registry import GRADIENT_OF
from cases.operand_values import Cotangent, Problem, draw_problem
from conformance.check_api.judgement import Judgement
from conformance.check_api.subject import Subject
from conformance.checks import ensemble
from conformance.execution.executor import Executor, pull_back
from reports import records
from tests.kernels import naive
from tests.planted.planting import plain

# Calls that are compared, of a result that is rarely wrong.
_REPEATED = 200


def _of(subject: Subject, problem: Problem, got: Any) -> Judgement:
    """`out` of a problem against what is to be expected of it."""
    array, q = np.asarray(got), problem.q
    if array.dtype != q.dtype:
        reason = f"dtype is {array.dtype}, must be that of q, {q.dtype}"
        return Judgement(observable="out", verdict=records.FAIL, reason=reason)
    return subject.judge("out", array, subject.expect(problem).forward["out"], subject.find_judged_rows(problem))


def _eagerly(subject: Subject, problem: Problem) -> Judgement:
    call, arrays = subject.executor.bind(problem)
    return _of(subject, problem, call(jax.tree.map(jnp.asarray, arrays)))


def _other(subject: Subject) -> Problem:
    """The same case with the next seed."""
    return draw_problem(dataclasses.replace(subject.case, seed=subject.case.seed + 1))


def called(**options: Any) -> Callable[[Subject], Iterator[Judgement]]:
    """The problem's own result, of a call that is made with these options; a function of the problem gives its own."""

    def check(subject: Subject) -> Iterator[Judgement]:
        problem = subject.problem
        given = {name: x(problem) if callable(x) else x for name, x in options.items()}
        result = subject.implementation.call(problem.q, problem.k, problem.v, save_residuals=True, **given)
        yield _of(subject, problem, result[0])
        expected = subject.expect(problem).forward["logsumexp"]
        yield subject.judge("logsumexp", np.asarray(result[1]["logsumexp"]), expected, subject.judged_residuals)

    return check


def in_turn(change: Callable[[Problem, Problem], Problem]) -> Callable[[Subject], Iterator[Judgement]]:
    """Eager calls of the problem, of `change(problem, one of another seed)`, and of the problem again."""

    def check(subject: Subject) -> Iterator[Judgement]:
        changed = change(subject.problem, _other(subject))
        for problem in (subject.problem, changed, subject.problem):
            yield _eagerly(subject, problem)

    return check


def other_operand(*names: str) -> Callable[[Problem, Problem], Problem]:
    """The problem with some operands of another one."""

    def change(problem: Problem, other: Problem) -> Problem:
        changed: dict[str, Any] = {name: getattr(other, name) for name in names}
        return dataclasses.replace(problem, **changed)

    return change


def nearly_the_same_cap(problem: Problem, other: Problem) -> Problem:
    """The problem with a soft cap that has the same whole number."""
    assert problem.soft_cap is not None
    return dataclasses.replace(problem, soft_cap=problem.soft_cap * (1 + 2.0**-6))


def other_mask(problem: Problem, other: Problem) -> Problem:
    """The problem with its mask moved by one key, as an array."""
    dense = problem.mask.dense(problem.q.shape[1], problem.k.shape[1])
    return dataclasses.replace(problem, mask=Dense(np.roll(dense, 1, axis=-1)))


def after(**fields: Any) -> Callable[[Subject], Iterator[Judgement]]:
    """The problem, after an eager call of another case: this one with other `fields`."""

    def check(subject: Subject) -> Iterator[Judgement]:
        call, arrays = subject.executor.bind(draw_problem(dataclasses.replace(subject.case, **fields)))
        call(jax.tree.map(jnp.asarray, arrays))
        yield _eagerly(subject, subject.problem)

    return check


def louder(subject: Subject) -> Iterator[Judgement]:
    """Values sixteen times as large as those of the call before."""
    problem = subject.problem
    for factor in (2.0**-4, 1.0):
        v = (problem.v.astype(np.float64) * factor).astype(problem.v.dtype)
        yield _eagerly(subject, dataclasses.replace(problem, v=v))


def hidden_by_bias(*place: Any) -> Callable[[Subject], Iterator[Judgement]]:
    """A bias of minus infinity at a place of `[b, n, T, S]` hides pairs as a mask does."""

    def check(subject: Subject) -> Iterator[Judgement]:
        problem = subject.problem
        assert problem.bias is not None
        there = np.ones((1, 1, problem.q.shape[1], problem.k.shape[1]), bool)
        there[place] = False
        masked = dataclasses.replace(problem, mask=Dense(there & problem.mask.dense(*there.shape[2:])))
        hidden = dataclasses.replace(problem, bias=np.where(there, problem.bias, -np.inf).astype(problem.bias.dtype))
        yield from _as_if(subject, hidden, masked)

    return check


def no_sinks_at_minus_infinity(subject: Subject) -> Iterator[Judgement]:
    """A sink of minus infinity is none."""
    problem = subject.problem
    assert problem.sinks is not None
    low = dataclasses.replace(problem, sinks=np.full_like(problem.sinks, -np.inf))
    yield from _as_if(subject, low, problem.without("sinks"))


def _as_if(subject: Subject, asked: Problem, meant: Problem) -> Iterator[Judgement]:
    """Results of the problem `asked` are those of the one that is `meant`."""
    expected, results = subject.expect(meant).forward, subject.run_results(asked)
    for name, got in results.items():
        judged = subject.find_judged_rows(meant) if name == "out" else ~meant.empty_rows
        yield subject.judge(name, got, expected[name], judged)


def value_of_the_only_key(subject: Subject) -> Iterator[Judgement]:
    """The first query of a causal call sees one key: it returns its value, times a weight that is one over one."""
    problem = subject.problem
    got = subject.forward.values["out"][:, 0].astype(np.float64)
    group = problem.q.shape[2] // problem.k.shape[2]
    want = np.repeat(problem.v[:, 0], group, axis=1).astype(np.float64)
    # One rounding each of the exponential, of the quotient, of the product and of the result.
    wrong = np.abs(got - want) > 4 * np.finfo(problem.v.dtype).eps * np.abs(want)
    verdict = records.FAIL if wrong.any() else records.PASS
    yield Judgement(observable="out", verdict=verdict, reason=f"{int(wrong.sum())} values are not the key's")


def no_wider_than_without(subject: Subject) -> Iterator[Judgement]:
    """Errors scatter no more than those of the plain kernel with a backward of its own, by the limit of `ensemble`."""
    base = plain.implementation("correct", back=plain.BackwardSteps())
    narrow = {
        j.observable: j.ratio for j in ensemble.check_ensemble(dataclasses.replace(subject, executor=Executor(base)))
    }
    for judgement in ensemble.check_ensemble(subject):
        if judgement.observable.endswith(".spread"):
            ratio, usual = judgement.ratio, narrow[judgement.observable]
            assert ratio is not None
            assert usual is not None
            verdict = records.PASS if ratio <= ensemble.SPREAD_LIMIT * usual else records.FAIL
            yield dataclasses.replace(judgement, verdict=verdict, reason=f"spread {ratio:.3g}, usually {usual:.3g}")


def repeated(subject: Subject) -> Iterator[Judgement]:
    """The same call many times gives the same bits."""
    plainly, arrays = subject.executor.bind(subject.problem)
    call = jax.jit(plainly)
    found = {np.asarray(call(arrays)).tobytes() for _ in range(_REPEATED)}
    verdict = records.PASS if len(found) == 1 else records.FAIL
    yield Judgement(observable="bits", verdict=verdict, reason=f"{len(found)} results of {_REPEATED} equal calls")


def one_gradient_at_a_time(subject: Subject) -> Iterator[Judgement]:
    """Gradients with respect to each operand alone."""
    call, arrays = subject.executor.bind(subject.problem)
    cotangent = subject.cotangents["random"].out
    for name in filter(GRADIENT_OF.__contains__, arrays):
        rest = {other: x for other, x in arrays.items() if other != name}

        def pulled(x: Any, rest: Mapping[str, Any] = rest, name: str = name) -> Any:
            return jax.vjp(lambda moving: call({**rest, name: moving}), x)[1](cotangent)[0]

        gradient = GRADIENT_OF[name]
        yield subject.judge(gradient, jax.jit(pulled)(arrays[name]), subject.get_expected_gradients("random")[gradient])


def mapped_alone(subject: Subject) -> Iterator[Judgement]:
    """`vmap` over each operand alone, the others shared."""
    problem, other = subject.problem, _other(subject)
    call, arrays = subject.executor.bind(problem)
    for name in (name for name in arrays if name != "mask"):
        second = dataclasses.replace(problem, **{name: getattr(other, name)})
        stacked = jax.tree.map(lambda x, y: np.stack([x, y]), arrays[name], getattr(other, name))
        axes = {which: 0 if which == name else None for which in arrays}
        got = jax.jit(jax.vmap(call, in_axes=(axes,)))({**arrays, name: stacked})
        for one, out in zip((problem, second), got, strict=True):
            yield _of(subject, one, out)


def mapped_half(subject: Subject) -> Iterator[Judgement]:
    """`vmap` over the segment ids of keys alone."""
    problem, other = subject.problem, _other(subject)
    assert problem.segment_ids is not None
    assert other.segment_ids is not None
    second = dataclasses.replace(problem, segment_ids=(problem.segment_ids[0], other.segment_ids[1]))
    call, arrays = subject.executor.bind(problem)
    ids = problem.segment_ids[0], np.stack([problem.segment_ids[1], other.segment_ids[1]])
    axes = {which: (None, 0) if which == "segment_ids" else None for which in arrays}
    got = jax.jit(jax.vmap(call, in_axes=(axes,)))({**arrays, "segment_ids": ids})
    for one, out in zip((problem, second), got, strict=True):
        yield _of(subject, one, out)


def mapped_cotangents(subject: Subject) -> Iterator[Judgement]:
    """The backward mapped over cotangents alone, as a Jacobian maps it."""
    call, arrays = subject.executor.bind(subject.problem)
    first = subject.cotangents["random"].out
    both = [Cotangent("random", first), Cotangent("random", np.ascontiguousarray(first[:, :, ::-1]))]
    moved = jax.vmap(lambda do: pull_back(call, arrays, do)[1])(np.stack([c.out for c in both]))
    expected = subject.expect(subject.problem, both).gradients
    for name, gradients in moved.items():
        for got, want in zip(gradients, expected, strict=True):
            yield subject.judge(GRADIENT_OF[name], got, want[GRADIENT_OF[name]])


def doubles(subject: Subject) -> Iterator[Judgement]:
    """Where JAX has doubles, residuals are f32 and gradients have the dtypes of their operands."""
    call, arrays = subject.executor.bind(subject.problem)
    with jax.enable_x64(True):
        result = subject.executor.residuals(subject.problem).values
        pulled = jax.jit(functools.partial(pull_back, call))(arrays, subject.cotangents["random"].out)[1]
        found = {"logsumexp": result["logsumexp"].dtype, **{GRADIENT_OF[name]: x.dtype for name, x in pulled.items()}}
    wanted = {"logsumexp": np.float32, **{GRADIENT_OF[name]: arrays[name].dtype for name in pulled}}
    for name, dtype in found.items():
        verdict = records.PASS if dtype == wanted[name] else records.FAIL
        yield Judgement(observable=name, verdict=verdict, reason=f"dtype is {dtype}")


def second_derivatives(subject: Subject) -> Iterator[Judgement]:
    """The derivative of a gradient is no more than half its size off what a plain kernel has."""
    plainly, arrays = subject.executor.bind(subject.problem)
    cotangent = subject.cotangents["random"].out

    def bent(call: Callable[[Any], Any]) -> Any:
        def length(q: Any) -> Any:
            return (jax.grad(lambda q: (call({**arrays, "q": q}) * cotangent).sum())(q) ** 2).sum()

        return jax.jit(jax.grad(length))(arrays["q"])

    got, want = bent(plainly), bent(lambda given: naive.attention(**given))
    off = float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))
    verdict = records.PASS if off < 0.5 else records.FAIL
    yield Judgement(observable="second", verdict=verdict, reason=f"off by {off:.2g} of its size")


def one_path(subject: Subject) -> Iterator[Judgement]:
    """What is traced is the same whatever platform JAX says it has, and has no branch for any."""
    call, arrays = subject.executor.bind(subject.problem)
    here = str(jax.make_jaxpr(lambda arrays: call(arrays))(arrays))
    with mock.patch.object(jax, "default_backend", return_value="tpu"):
        there = str(jax.make_jaxpr(lambda arrays: call(arrays))(arrays))
    same = here == there and "platform_index" not in here
    verdict = records.PASS if same else records.FAIL
    yield Judgement(observable="platform", verdict=verdict, reason="another path is taken on another platform")


def exact_products(subject: Subject) -> Iterator[Judgement]:
    """Products of f32 operands are asked for at the highest precision, forward and backward."""
    call, arrays = subject.executor.bind(subject.problem)
    pull = functools.partial(pull_back, call)
    traced = jax.make_jaxpr(pull)(arrays, subject.cotangents["random"].out)
    low = [product for product in _products(traced.jaxpr) if not _highest(product)]
    verdict = records.PASS if not low else records.FAIL
    yield Judgement(observable="precision", verdict=verdict, reason=f"{len(low)} products at default precision")


def _products(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation
        for part in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(part):
                yield from _products(getattr(part, "jaxpr", part))


def _is_jaxpr(x: Any) -> bool:
    return hasattr(x, "eqns") or hasattr(x, "jaxpr")


def _highest(product: Any) -> bool:
    precision = product.params["precision"]
    asked = precision if isinstance(precision, tuple) else (precision,)
    f32 = all(x.aval.dtype == jnp.float32 for x in product.invars)
    return not f32 or all(one == jax.lax.Precision.HIGHEST for one in asked)
