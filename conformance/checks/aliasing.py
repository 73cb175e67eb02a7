"""Aliasing: a call must leave its operands as they were."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cases.inputs import Problem, draw
from cases.operands import REMOVABLE
from conformance import records
from conformance.asking.judgement import Judgement, labelled
from conformance.asking.subject import Subject

# Half of it is a flag, and the other half an array, for who takes both.
_MASK = "causal_and_dense-d40"


def aliasing(subject: Subject) -> Iterator[Judgement]:
    """Operands given as NumPy arrays, outside `jit` and inside, hold the same bits after the call.

    Outside `jit` a library that checks types may refuse NumPy arrays, into which alone it could write. It is given JAX
    arrays then, which must still be there after the call. A mask that is an array is one of the operands. Without
    mask and optional operands a call may go another way, so that is asked too.
    """
    yield from _aliasing(subject, subject.problem)
    absent: dict[str, Any] = {operand.field: operand.absent for operand in REMOVABLE}
    plain = dataclasses.replace(subject.case, mask="full", **absent)
    masked = dataclasses.replace(subject.case, mask=_MASK)
    for name, case in (("plain", plain), ("mask", masked)):
        if subject.implementation.supports(case) is None:
            yield from labelled(name, _aliasing(subject, draw(case)))


def _aliasing(subject: Subject, problem: Problem) -> Iterator[Judgement]:
    plain, arrays = subject.executor.bind(problem)
    for how, call in (("eager", plain), ("jit", subject.executor.jit(plain))):
        given, reason = _called(call, arrays)
        pairs = zip(_leaves(arrays), _leaves(given), strict=True)
        changed = [name for (name, before), (_, after) in pairs if _differs(before, after)]
        yield Judgement(
            observable=f"operands.{how}",
            verdict=records.FAIL if changed else records.PASS,
            reason=f"the call writes into its operands: {', '.join(changed)}" if changed else reason,
        )


def _called(call: Callable[[Any], Any], arrays: Any) -> tuple[Any, str]:
    """The operands that the call was made with, and why they are JAX arrays if NumPy arrays are refused."""
    given = jax.tree.map(np.copy, arrays)
    try:
        jax.block_until_ready(call(given))  # type: ignore[no-untyped-call] # untyped upstream
    except Exception as refusal:  # type checkers raise errors of their own
        of_jax = jax.tree.map(jnp.array, arrays)
        jax.block_until_ready(call(of_jax))  # type: ignore[no-untyped-call] # untyped upstream
        return of_jax, f"given JAX arrays, since NumPy arrays are refused ({type(refusal).__name__})"
    return given, ""


def _differs(before: np.ndarray, after: Any) -> bool:
    if isinstance(after, jax.Array) and after.is_deleted():
        return True
    return before.tobytes() != np.asarray(after).tobytes()


def _leaves(arrays: Any) -> list[tuple[str, Any]]:
    return [(jax.tree_util.keystr(path), x) for path, x in jax.tree_util.tree_leaves_with_path(arrays)]
