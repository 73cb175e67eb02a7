"""Calls that follow each other in one process: none may see what another one left behind."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cases import mask_spec
from cases.inputs import Problem
from conformance import records
from conformance.asking.judgement import Judgement, apart, unsupported
from conformance.asking.subject import Subject
from conformance.checks.pair import Pair

# Two of a kind that is numbers, and two of one that is an array.
_OTHER_MASKS = ("window-l9-r0", "window-l3-r2", "dense-d60", "dense-d30")
# How often one program is called: what goes wrong once in a few hundred calls shows. Interpreted kernels take longer.
_CALLS = 1000
_CALLS_INTERPRETED = 10


def calls(subject: Subject) -> Iterator[Judgement]:
    """Calls that follow each other with other masks, values, shapes and types, or a thousand times the same, agree."""
    pair = Pair.of(subject)
    for name, sequence in _SEQUENCES.items():
        yield from apart(name, functools.partial(sequence, pair))


def _eagerly(pair: Pair, problem: Problem) -> Any:
    plain, arrays = pair.subject.executor.bind(problem)
    return plain(jax.tree.map(jnp.asarray, arrays))


def _other_masks(pair: Pair) -> Iterator[Judgement]:
    """Other masks of the same shapes, outside `jit`, then the first one again."""
    case = pair.subject.case
    possible = (dataclasses.replace(case, mask=spec) for spec in _OTHER_MASKS)
    others = [other for other in possible if pair.subject.implementation.supports(other) is None]
    sizes = (case.batch, case.num_q_heads, case.q_length, case.kv_length, case.seed)
    problems = [dataclasses.replace(pair.problems[0], mask=mask_spec.build(other.mask, *sizes)) for other in others]
    for problem in [*problems, pair.problems[0]] if problems else []:
        got = _eagerly(pair, problem)
        yield pair.judge_out_of(got, (problem,), (pair.subject.expect(problem),))


def _other_values(pair: Pair) -> Iterator[Judgement]:
    """Other operands, segment ids among them, outside `jit`, then the first ones again."""
    first, other = pair.problems
    for problem, expected in ((first, 0), (other, 1), (first, 0)):
        yield pair.judge_out_of(_eagerly(pair, problem), (problem,), (pair.expected[expected],))


def _other_shapes(pair: Pair) -> Iterator[Judgement]:
    """Another dtype, other lengths in that dtype first, outside `jit`, then the first ones again."""
    case = pair.subject.case
    dtype = {"dtype": "bf16" if case.dtype == "f32" else "f32"}
    longer = {"q_length": 2 * case.q_length, "kv_length": 2 * case.kv_length}
    changes: tuple[dict[str, Any], ...] = (dtype, longer | dtype, longer, {})
    others = [dataclasses.replace(case, **change) for change in changes]
    for other in others:
        if pair.subject.implementation.supports(other) is None:
            subject = dataclasses.replace(pair.subject, case=other)
            got = np.asarray(_eagerly(pair, subject.problem))
            yield subject.judge("out", got, subject.expectation.forward["out"], subject.judged_out)


def _numpy(pair: Pair) -> Iterator[Judgement]:
    """Operands that are NumPy arrays, outside `jit`, then other values in the same arrays."""
    problem, other = pair.problems
    plain, arrays = pair.subject.executor.bind(problem)
    given = jax.tree.map(lambda x: np.array(x, copy=True), arrays)
    try:
        got = plain(given)
    except Exception as error:  # a kernel may want arrays of JAX; what it computes from others is what counts
        reason = f"NumPy operands outside jit: {type(error).__name__}: {error}".split("\n")[0]
        yield unsupported("out", reason)
        return
    yield pair.judge_out(np.array(got))
    jax.tree.map(np.copyto, given, pair.arrays(other))
    yield pair.judge_out_of(plain(given), (other,), pair.expected[1:])


def _a_thousand(pair: Pair) -> Iterator[Judgement]:
    """The same program on the same operands, again and again, gives the same bits."""
    count = _CALLS_INTERPRETED if pair.subject.implementation.accelerator.interpreted else _CALLS
    compiled = pair.jit(pair.plain)
    arrays = jax.tree.map(jnp.asarray, pair.arrays(pair.problems[0]))
    first = np.asarray(compiled(arrays))
    different = sum(np.asarray(compiled(arrays)).tobytes() != first.tobytes() for _ in range(count))
    reason = "" if not different else f"{different} of {count:,} calls give other bits than the first"
    yield Judgement(observable="bits", verdict=records.FAIL if different else records.PASS, reason=reason)


_SEQUENCES: dict[str, Callable[[Pair], Iterator[Judgement]]] = {
    "other_masks": _other_masks,
    "other_values": _other_values,
    "other_shapes": _other_shapes,
    "numpy": _numpy,
    "a_thousand": _a_thousand,
}
