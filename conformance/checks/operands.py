"""Operands: an accepted one must matter as the oracle says, a wrong one must be named in the error."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np

from cases.inputs import Problem
from cases.masks import Full
from cases.moba import Moba
from cases.operands import OPERANDS, OPTIONAL, REMOVABLE
from conformance import records
from conformance.asking.judgement import Judgement
from conformance.asking.subject import Subject
from conformance.truth.bounds import Bounded, expect


def arguments(subject: Subject) -> Iterator[Judgement]:
    """The result with an accepted argument differs from the result without it as the oracle says."""
    for name, without in _dropped(subject):
        arithmetic = subject.implementation.arithmetic
        other = expect(without, arithmetic, empty_rows=subject.empty_rows).forward["out"]
        here = subject.expectation.forward["out"]
        effect = Bounded(here.value - other.value, here.bound + other.bound)
        with_it = subject.forward.values["out"].astype(np.float64)
        without_it = subject.executor.forward(without).values["out"].astype(np.float64)
        both = subject.judged_out & ~without.empty_rows.transpose(0, 2, 1)[..., None]
        yield subject.judge("out", with_it - without_it, effect, both, label=f"effect_of_{name}")


def _dropped(subject: Subject) -> Iterator[tuple[str, Problem]]:
    problem = subject.problem
    if isinstance(problem.mask, Moba):
        every = dataclasses.replace(problem.mask, topk=problem.mask.chunks(problem.k.shape[1]))
        yield "gates", dataclasses.replace(problem, mask=every)
    elif problem.mask != Full():
        yield "mask", dataclasses.replace(problem, mask=Full())
    for operand in REMOVABLE:
        if getattr(problem, operand.name) is not None:
            yield operand.name, problem.without(operand.name)


def errors(subject: Subject) -> Iterator[Judgement]:
    """Wrong operands raise `ValueError` that names the operand, before any work."""
    if not subject.implementation.validates:
        return
    refused = {o.name for o in OPTIONAL if o.opt_in and o.name not in subject.implementation.offers}
    for wrong, name, problem in (*_wrong(subject.problem), *_misshapen(subject.problem, refused)):
        yield _judge_error(subject, wrong, name, problem)


def _judge_error(subject: Subject, wrong: str, name: str, problem: Problem) -> Judgement:
    values = {operand.name: getattr(problem, operand.name) for operand in OPERANDS}
    arrays = {"mask": problem.mask, **{name: value for name, value in values.items() if value is not None}}
    try:
        subject.implementation.call(**arrays)
    except NotImplementedError as error:
        return Judgement(observable=wrong, verdict=records.UNSUPPORTED, reason=str(error))
    except ValueError as error:
        if name in str(error):
            return Judgement(observable=wrong, verdict=records.PASS)
        return Judgement(
            observable=wrong, verdict=records.FAIL, reason=f"the ValueError does not name {name!r}: {error}"
        )
    except Exception as error:  # any other type is the finding
        reason = f"raises {type(error).__name__}, must be a ValueError naming {name!r}: {error}".split("\n")[0]
        return Judgement(observable=wrong, verdict=records.FAIL, reason=reason)
    return Judgement(observable=wrong, verdict=records.FAIL, reason=f"a wrong {name} is accepted")


def _wrong(problem: Problem) -> Iterator[tuple[str, str, Problem]]:
    """`(what is wrong, operand to be named, problem)`."""
    q, k, v = problem.q, problem.k, problem.v
    num_q_heads = q.shape[2]
    wrong = dataclasses.replace
    yield "q_rank", "q", wrong(problem, q=q[0])
    yield "head_dim", "head_dim", wrong(problem, k=np.concatenate([k, k], axis=-1))
    yield "kv_length", "v", wrong(problem, v=v[:, :-1])
    yield "batch", "batch", wrong(problem, k=np.concatenate([k, k]), v=np.concatenate([v, v]))
    three = np.repeat(k[:, :, :1], num_q_heads + 1, axis=2), np.repeat(v[:, :, :1], num_q_heads + 1, axis=2)
    yield "head_count", "heads", wrong(problem, k=three[0], v=three[1])
    other = np.float16 if q.dtype != np.float16 else np.float32
    yield "dtype", "dtype", wrong(problem, k=k.astype(other))
    yield "soft_cap", "soft_cap", wrong(problem, soft_cap=0.0)
    yield "negative_soft_cap", "soft_cap", wrong(problem, soft_cap=-30.0)
    if problem.kv_scales is not None:
        scales = problem.kv_scales
        yield "kv_scales", "kv_scales", wrong(problem, kv_scales=(scales[0], scales[1][..., :0]))


def _misshapen(problem: Problem, refused: Collection[str]) -> Iterator[tuple[str, str, Problem]]:
    """Likewise, every optional array in turn with one query or query head too many; none of those `refused`."""
    batch, q_length, num_q_heads, _ = problem.q.shape
    sizes = {"B": batch, "T": q_length, "S": problem.k.shape[1], "N": num_q_heads, "K": problem.k.shape[2]}
    for operand in OPTIONAL:
        if operand.name in refused or not operand.arrays:
            continue
        longer = "T" if any("T" in axes for axes in operand.arrays) else "N"
        shapes = [tuple(sizes[axis] + (axis == longer) for axis in axes) for axes in operand.arrays]
        dtype = np.float32 if operand.gradient else np.int32
        arrays = tuple(np.zeros(shape, dtype) for shape in shapes)
        changed: dict[str, Any] = {operand.name: arrays if len(arrays) > 1 else arrays[0]}
        yield operand.name, operand.name, dataclasses.replace(problem, **changed)
