"""Transforms: the call means the same under every transformation that JAX has for it.

Each transformed call is judged against the oracle, like a plain one. There are two problems: the case's own, and one
drawn with the next seed. What batched calls share by mistake is wrong for one of them.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cases.inputs import Cotangent, Problem, draw, draw_cotangent
from cases.masks import Dense
from cases.operands import GRADIENT_OF, OPTIONAL
from conformance import records
from conformance.asking.judgement import Judgement, apart
from conformance.asking.subject import Subject
from conformance.calling.execution import Arrays, pull_back
from conformance.truth.bounds import Bounded, Expectation


def transforms(subject: Subject) -> Iterator[Judgement]:
    """`jit` or not, `vmap`, `grad` of `vmap`, `checkpoint`, `scan`, donation, x64, and a second call mean the same."""
    pair = _Pair.of(subject)
    for name, transform in _FORWARD.items():
        yield from apart(name, functools.partial(transform, pair))
    if subject.with_gradients:
        for name, transform in _BACKWARD.items():
            yield from apart(name, functools.partial(transform, pair))


@dataclasses.dataclass(frozen=True)
class _Pair:
    """The case's problem and another one of the same static configuration, with a cotangent of `out` for each."""

    subject: Subject
    problems: tuple[Problem, Problem]
    cotangents: tuple[Cotangent, ...]

    @classmethod
    def of(cls, subject: Subject) -> _Pair:
        """The case, and the same case with the next seed and the same mask."""
        other = dataclasses.replace(subject.case, seed=subject.case.seed + 1)
        problems = (subject.problem, dataclasses.replace(draw(other), mask=subject.problem.mask))
        cotangents: tuple[Cotangent, ...] = ()
        if subject.with_gradients:
            drawn = (draw_cotangent(case).out for case in (subject.case, other))
            judged = (subject.judged_out_of(problem) for problem in problems)
            pairs = zip(drawn, judged, strict=True)
            cotangents = tuple(Cotangent("random", np.where(keep, out, np.zeros_like(out))) for out, keep in pairs)
        return cls(subject, problems, cotangents)

    @functools.cached_property
    def plain(self) -> Callable[[Arrays], Any]:
        """The call, not compiled."""
        return self.subject.executor.bind(self.problems[0])[0]

    @property
    def jit(self) -> Callable[..., Any]:
        """`jax.jit` as the executor compiles."""
        return self.subject.executor.jit

    def arrays(self, problem: Problem) -> Arrays:
        """The arrays that the call takes for a problem of the same configuration."""
        return self.subject.executor.bind(problem)[1]

    @functools.cached_property
    def stacked(self) -> Arrays:
        """Both problems' arrays, stacked."""
        stacked: Arrays = jax.tree.map(lambda *xs: np.stack(xs), *map(self.arrays, self.problems))
        return stacked

    @functools.cached_property
    def stacked_do(self) -> np.ndarray:
        """Both cotangents, stacked."""
        return np.stack([cotangent.out for cotangent in self.cotangents])

    @functools.cached_property
    def expected(self) -> tuple[Expectation, ...]:
        """What to expect of each problem."""
        return tuple(self.subject.expect(p, self.cotangents[n : n + 1]) for n, p in enumerate(self.problems))

    def judge_out(self, got: Any, count: int = 1) -> Judgement:
        """Judge `out` of the case's problem, or of both, stacked."""
        return self.judge_out_of(got, self.problems[:count], self.expected[:count])

    def judge_out_of(self, got: Any, problems: Sequence[Problem], expected: Sequence[Expectation]) -> Judgement:
        """Judge `out` of other problems, stacked if there are several."""
        want = _stack([e.forward["out"] for e in expected])
        judged = np.stack([self.subject.judged_out_of(problem) for problem in problems])
        return self._judge("out", got, want, judged)

    def judge_gradients(self, got: Mapping[str, Any], count: int = 1) -> Iterator[Judgement]:
        """Judge the gradients of the case's problem, or of both, stacked."""
        for operand, name in GRADIENT_OF.items():
            if operand in got and name in self.subject.implementation.gradients:
                want = _stack([e.gradients[0][name] for e in self.expected[:count]])
                yield self._judge(name, got[operand], want, None)

    def _judge(self, name: str, got: Any, want: Bounded, judged: np.ndarray | None) -> Judgement:
        array = np.asarray(got)
        array = array[None] if array.ndim == want.value.ndim - 1 else array
        return self.subject.judge(name, array, want, judged)


def _stack(bounded: Sequence[Bounded]) -> Bounded:
    return Bounded(np.stack([b.value for b in bounded]), np.stack([b.bound for b in bounded]))


def _eager(pair: _Pair) -> Iterator[Judgement]:
    yield pair.judge_out(pair.plain(jax.tree.map(jnp.asarray, pair.arrays(pair.problems[0]))))


def _vmap(pair: _Pair) -> Iterator[Judgement]:
    yield pair.judge_out(pair.jit(jax.vmap(pair.plain))(pair.stacked), 2)


def _vmap_over(names: Sequence[str], pair: _Pair) -> Iterator[Judgement]:
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


def _vmap_masks(pair: _Pair) -> Iterator[Judgement]:
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


def _donated(pair: _Pair) -> Iterator[Judgement]:
    arrays = jax.tree.map(jnp.array, pair.arrays(pair.problems[0]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that not every buffer could be reused is no finding
        yield pair.judge_out(pair.jit(pair.plain, donate_argnums=0)(arrays))


def _x64(pair: _Pair) -> Iterator[Judgement]:
    with jax.enable_x64(True):
        got = np.asarray(pair.jit(pair.plain)(pair.arrays(pair.problems[0])))
    judgement = pair.judge_out(got)
    if got.dtype != pair.problems[0].q.dtype:
        reason = f"dtype is {got.dtype}, must be that of q, {pair.problems[0].q.dtype}"
        judgement = dataclasses.replace(judgement, verdict=records.FAIL, reason=reason)
    yield judgement


def _second_call(pair: _Pair) -> Iterator[Judgement]:
    """The same call, made again after another one, gives the same bits."""
    compiled = pair.jit(pair.plain)
    first, between, again = (np.asarray(compiled(pair.arrays(pair.problems[n]))) for n in (0, 1, 0))
    same = first.tobytes() == again.tobytes()
    reason = "" if same else f"{int(np.sum(first != again))} values differ when the same call is made again"
    yield Judgement(observable="bits", verdict=records.PASS if same else records.FAIL, reason=reason)
    yield pair.judge_out(np.stack([first, between]), 2)


def _other_statics(pair: _Pair) -> Iterator[Judgement]:
    """Another soft cap and another scale in the same process, then the first ones again."""
    problem = pair.problems[0]
    numbers = {o.name: number for o in OPTIONAL if not o.arrays and (number := getattr(problem, o.name)) is not None}
    changes: list[dict[str, Any]] = [{name: number / 2} for name, number in numbers.items()]
    halved = [dataclasses.replace(problem, **change) for change in changes]
    for other in [*halved, problem] if halved else []:
        plain, arrays = pair.subject.executor.bind(other)
        yield pair.judge_out_of(pair.jit(plain)(arrays), (other,), (pair.subject.expect(other),))


def _grad_of_vmap(pair: _Pair) -> Iterator[Judgement]:
    pull = functools.partial(pull_back, jax.vmap(pair.plain))
    out, got = pair.jit(pull)(pair.stacked, pair.stacked_do)
    yield pair.judge_out(out, 2)
    yield from pair.judge_gradients(got, 2)


def _vmap_of_grad(pair: _Pair) -> Iterator[Judgement]:
    pull = functools.partial(pull_back, pair.plain)
    out, got = pair.jit(jax.vmap(pull))(pair.stacked, pair.stacked_do)
    yield pair.judge_out(out, 2)
    yield from pair.judge_gradients(got, 2)


def _scan(pair: _Pair) -> Iterator[Judgement]:
    """Layers under `lax.scan`, each with operands of its own."""

    def layers(stacked: Arrays) -> Any:
        return jax.lax.scan(lambda carry, arrays: (carry, pair.plain(arrays)), None, stacked)[1]

    out, got = pair.jit(functools.partial(pull_back, layers))(pair.stacked, pair.stacked_do)
    yield pair.judge_out(out, 2)
    yield from pair.judge_gradients(got, 2)


def _checkpoint(policy: Callable[[Sequence[str]], Any], pair: _Pair) -> Iterator[Judgement]:
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


def _mapped() -> dict[str, list[str]]:
    """The operands that have a batch axis together while the others have none, by name."""
    mapped = {"kv": ["k", "v"]}
    for operand in OPTIONAL:
        if operand.vmap:
            mapped.setdefault(operand.vmap, []).append(operand.name)
    return mapped


_FORWARD: dict[str, Callable[[_Pair], Iterator[Judgement]]] = {
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
_BACKWARD: dict[str, Callable[[_Pair], Iterator[Judgement]]] = {
    "grad_of_vmap": _grad_of_vmap,
    "vmap_of_grad": _vmap_of_grad,
    "checkpoint": functools.partial(_checkpoint, _save_nothing),
    "checkpoint_names": functools.partial(_checkpoint, _save_named),
    "scan": _scan,
}
