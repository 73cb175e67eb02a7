"""Transforms: the call means the same under every transformation that JAX has for it.

Each transformed call is judged against the oracle, like a plain one. There are two problems: the case's own, and one
drawn with the next seed. What batched calls share by mistake is wrong for one of them.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cases.counter_rng import normal
from cases.masks import Dense
from cases.operands import GRADIENT_OF, OPTIONAL
from conformance import records
from conformance.asking.judgement import Judgement, apart, unsupported
from conformance.asking.subject import Subject
from conformance.calling.execution import Arrays, pull_back
from conformance.checks.pair import Pair
from conformance.truth.bounds import Bounded
from conformance.truth.roundoff import UNIT_ROUNDOFF


def transforms(subject: Subject) -> Iterator[Judgement]:
    """`jit` or not, `vmap`, `grad` of `vmap`, `checkpoint`, `scan`, donation, x64, and a second call mean the same."""
    pair = Pair.of(subject)
    for name, transform in _FORWARD.items():
        yield from apart(name, functools.partial(transform, pair))
    if subject.with_gradients:
        for name, transform in _BACKWARD.items():
            yield from apart(name, functools.partial(transform, pair))


def _eager(pair: Pair) -> Iterator[Judgement]:
    yield pair.judge_out(pair.plain(jax.tree.map(jnp.asarray, pair.arrays(pair.problems[0]))))


def _vmap(pair: Pair) -> Iterator[Judgement]:
    yield pair.judge_out(pair.jit(jax.vmap(pair.plain))(pair.stacked), 2)


def _vmap_over(names: Sequence[str], pair: Pair) -> Iterator[Judgement]:
    """Only some operands have the mapped axis; the others are shared."""
    problem, other = pair.problems
    shared = pair.arrays(problem)
    mapped = [name for name in names if name in shared]
    if not mapped:
        return
    axes = {name: 0 if name in mapped else None for name in shared}
    arrays = {name: pair.stacked[name] if name in mapped else x for name, x in shared.items()}
    got = pair.jit(jax.vmap(pair.plain, in_axes=(axes,)))(arrays)
    changed: dict[str, Any] = {name: getattr(other, name) for name in mapped}
    mixed = dataclasses.replace(problem, **changed)
    yield pair.judge_out_of(got, (problem, mixed), (pair.expected[0], pair.subject.expect(mixed)))


def _vmap_masks(pair: Pair) -> Iterator[Judgement]:
    """Masks that differ along the mapped axis, for calls that take them as arrays."""
    problem = pair.problems[0]
    if "mask" not in pair.arrays(problem):
        return
    dense = problem.resolved_mask.dense(problem.q.shape[1], problem.k.shape[1])
    problems = [dataclasses.replace(problem, mask=Dense(mask)) for mask in (dense, np.roll(dense, 1, axis=-1))]
    plain, arrays = pair.subject.executor.bind(problems[0])
    axes = {name: 0 if name == "mask" else None for name in arrays}
    masks = np.stack([pair.arrays(problem)["mask"] for problem in problems])
    got = pair.jit(jax.vmap(plain, in_axes=(axes,)))({**arrays, "mask": masks})
    yield pair.judge_out_of(got, problems, [pair.subject.expect(problem) for problem in problems])


def _donated(pair: Pair) -> Iterator[Judgement]:
    arrays = jax.tree.map(jnp.array, pair.arrays(pair.problems[0]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that not every buffer could be reused is no finding
        yield pair.judge_out(pair.jit(pair.plain, donate_argnums=0)(arrays))


def _x64(pair: Pair) -> Iterator[Judgement]:
    with jax.enable_x64(True):
        got = np.asarray(pair.jit(pair.plain)(pair.arrays(pair.problems[0])))
    judgement = pair.judge_out(got)
    if got.dtype != pair.problems[0].q.dtype:
        reason = f"dtype is {got.dtype}, must be that of q, {pair.problems[0].q.dtype}"
        judgement = dataclasses.replace(judgement, verdict=records.FAIL, reason=reason)
    yield judgement
    if pair.subject.implementation.residuals:
        yield from _x64_residuals(pair)


def _x64_residuals(pair: Pair) -> Iterator[Judgement]:
    """Residuals have the dtype that they have without doubles; tracing says so."""
    compiled, arrays = pair.subject.executor.compiled(pair.problems[0])
    _, usual = jax.eval_shape(compiled.residuals, arrays)
    with jax.enable_x64(True):
        _, found = jax.eval_shape(compiled.residuals, arrays)
    for name in sorted(usual):
        same = found[name].dtype == usual[name].dtype
        reason = "" if same else f"dtype is {found[name].dtype}, must be {usual[name].dtype} as without x64"
        yield Judgement(observable=name, verdict=records.PASS if same else records.FAIL, reason=reason)


def _second_call(pair: Pair) -> Iterator[Judgement]:
    """The same call, made again after another one, gives the same bits."""
    compiled = pair.jit(pair.plain)
    first, between, again = (np.asarray(compiled(pair.arrays(pair.problems[n]))) for n in (0, 1, 0))
    same = first.tobytes() == again.tobytes()
    reason = "" if same else f"{int(np.sum(first != again))} values differ when the same call is made again"
    yield Judgement(observable="bits", verdict=records.PASS if same else records.FAIL, reason=reason)
    yield pair.judge_out(np.stack([first, between]), 2)


def _other_statics(pair: Pair) -> Iterator[Judgement]:
    """Another soft cap and another scale in the same process, then the first ones again."""
    problem = pair.problems[0]
    numbers = {o.name: number for o in OPTIONAL if not o.arrays and (number := getattr(problem, o.name)) is not None}
    changes: list[dict[str, Any]] = [{name: number / 2} for name, number in numbers.items()]
    halved = [dataclasses.replace(problem, **change) for change in changes]
    for other in [*halved, problem] if halved else []:
        plain, arrays = pair.subject.executor.bind(other)
        yield pair.judge_out_of(pair.jit(plain)(arrays), (other,), (pair.subject.expect(other),))


def _grad_of_vmap(pair: Pair) -> Iterator[Judgement]:
    pull = functools.partial(pull_back, jax.vmap(pair.plain))
    out, got = pair.jit(pull)(pair.stacked, pair.stacked_do)
    yield pair.judge_out(out, 2)
    yield from pair.judge_gradients(got, 2)


def _vmap_of_grad(pair: Pair) -> Iterator[Judgement]:
    pull = functools.partial(pull_back, pair.plain)
    out, got = pair.jit(jax.vmap(pull))(pair.stacked, pair.stacked_do)
    yield pair.judge_out(out, 2)
    yield from pair.judge_gradients(got, 2)


def _vmap_of_pullback(pair: Pair) -> Iterator[Judgement]:
    """One pullback, mapped over cotangents alone."""
    problem = pair.problems[0]

    def pulled(arrays: Arrays, stacked: Any) -> Any:
        return jax.vmap(lambda do: pull_back(pair.plain, arrays, do)[1])(stacked)

    first = pair.cotangents[0]
    turned = np.where(pair.subject.judged_out, first.out[:, ::-1], np.zeros_like(first.out))
    cotangents = [first, dataclasses.replace(first, out=turned)]
    got = pair.jit(pulled)(pair.arrays(problem), np.stack([cotangent.out for cotangent in cotangents]))
    expected = pair.subject.expect(problem, cotangents).gradients
    for operand in pair.judged_operands(got):
        for n, label in enumerate(("first", "second")):
            name = GRADIENT_OF[operand]
            yield pair.subject.judge(name, got[operand][n], expected[n][name], label=f"{name}.{label}")


def _scan(pair: Pair) -> Iterator[Judgement]:
    """Layers under `lax.scan`, each with operands of its own."""

    def layers(stacked: Arrays) -> Any:
        return jax.lax.scan(lambda carry, arrays: (carry, pair.plain(arrays)), None, stacked)[1]

    out, got = pair.jit(functools.partial(pull_back, layers))(pair.stacked, pair.stacked_do)
    yield pair.judge_out(out, 2)
    yield from pair.judge_gradients(got, 2)


def _checkpoint(policy: Callable[[Sequence[str]], Any], pair: Pair) -> Iterator[Judgement]:
    """The backward pass recomputes what the policy does not save."""
    rematerialized = jax.checkpoint(pair.plain, policy=policy(pair.subject.implementation.checkpoint_names))
    pull = functools.partial(pull_back, rematerialized)
    out, got = pair.jit(pull)(pair.arrays(pair.problems[0]), pair.cotangents[0].out)
    yield pair.judge_out(out)
    yield from pair.judge_gradients(got)


def _save_nothing(names: Sequence[str]) -> Any:
    return jax.checkpoint_policies.nothing_saveable


def _save_named(names: Sequence[str]) -> Any:
    return jax.checkpoint_policies.save_only_these_names(*(names or ("out", "logsumexp")))


def _forward_mode(pair: Pair) -> Iterator[Judgement]:
    """Where forward mode is possible, its derivative along a direction is what the gradients say of it."""
    subject, problem = pair.subject, pair.problems[0]
    gradients = subject.implementation.gradients
    names = [
        name for name, gradient in GRADIENT_OF.items() if gradient in gradients and getattr(problem, name) is not None
    ]
    arrays = pair.arrays(problem)
    moving = {name: jnp.asarray(arrays[name]) for name in names}
    fixed = {name: x for name, x in arrays.items() if name not in moving}
    drawn = {name: normal(subject.case.seed, f"tangent-{name}", x.shape).astype(x.dtype) for name, x in moving.items()}
    try:
        _, tangent = pair.jit(lambda m, t: jax.jvp(lambda m: pair.plain({**m, **fixed}), (m,), (t,)))(moving, drawn)
    except TypeError as error:  # a pullback by hand has no forward mode, and JAX says so
        yield unsupported("out", f"forward mode: {error}".split("\n")[0])
        return
    do = pair.cotangents[0].out.astype(np.float64)
    got = np.asarray(tangent).astype(np.float64)
    expected = pair.expected[0].gradients[0]
    along = {name: drawn[name].astype(np.float64) for name in names}
    value = sum(float(np.sum(expected[GRADIENT_OF[name]].value * x)) for name, x in along.items())
    # By the gradients' own bounds, all at their worst together, and the rounding of the tangent to its dtype.
    bound = sum(float(np.sum(expected[GRADIENT_OF[name]].bound * np.abs(x))) for name, x in along.items())
    bound += UNIT_ROUNDOFF[subject.case.dtype] * float(np.sum(np.abs(got * do)))
    yield subject.judge("out", np.sum(got * do), Bounded(np.asarray(value), np.asarray(bound)))


def _one_gradient(pair: Pair) -> Iterator[Judgement]:
    """The gradient of one operand when nobody asks for the others."""
    arrays = pair.arrays(pair.problems[0])
    names = [name for name in GRADIENT_OF if name in arrays]

    def alone(name: str, arrays: Arrays, do: Any) -> Any:
        fixed = {other: x for other, x in arrays.items() if other != name}
        return jax.vjp(lambda x: pair.plain({**fixed, name: x}), arrays[name])[1](do)[0]

    def each(arrays: Arrays, do: Any) -> Arrays:
        return {name: alone(name, arrays, do) for name in names}

    yield from pair.judge_gradients(pair.jit(each)(arrays, pair.cotangents[0].out))


def _x64_backward(pair: Pair) -> Iterator[Judgement]:
    arrays = pair.arrays(pair.problems[0])
    with jax.enable_x64(True):
        _, found = pair.jit(functools.partial(pull_back, pair.plain))(arrays, pair.cotangents[0].out)
        got = {name: np.asarray(x) for name, x in found.items()}
    for judgement, name in zip(pair.judge_gradients(got), pair.judged_operands(got), strict=True):
        want = arrays[name].dtype
        if got[name].dtype != want:
            reason = f"dtype is {got[name].dtype}, must be that of {name}, {want}"
            judgement = dataclasses.replace(judgement, verdict=records.FAIL, reason=reason)
        yield judgement


def _mapped() -> dict[str, list[str]]:
    """The operands that have a batch axis together while the others have none, by name."""
    mapped = {"k": ["k"], "v": ["v"], "kv": ["k", "v"]}
    for operand in OPTIONAL:
        if operand.vmap:
            mapped.setdefault(operand.vmap, []).append(operand.name)
            mapped.setdefault(operand.name, [operand.name])
    return mapped


_FORWARD: dict[str, Callable[[Pair], Iterator[Judgement]]] = {
    "eager": _eager,
    "vmap": _vmap,
    "vmap_q": functools.partial(_vmap_over, ("q",)),
    **{f"vmap_{name}": functools.partial(_vmap_over, operands) for name, operands in _mapped().items()},
    "vmap_masks": _vmap_masks,
    "donated": _donated,
    "x64": _x64,
    "second_call": _second_call,
    "other_statics": _other_statics,
}
_BACKWARD: dict[str, Callable[[Pair], Iterator[Judgement]]] = {
    "grad_of_vmap": _grad_of_vmap,
    "vmap_of_grad": _vmap_of_grad,
    "checkpoint": functools.partial(_checkpoint, _save_nothing),
    "checkpoint_names": functools.partial(_checkpoint, _save_named),
    "vmap_of_pullback": _vmap_of_pullback,
    "scan": _scan,
    "one_gradient": _one_gradient,
    "x64": _x64_backward,
    "forward_mode": _forward_mode,
}
