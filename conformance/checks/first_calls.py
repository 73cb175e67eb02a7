"""Check `first_calls`: the calls that a user makes in the first minute, on one small, plain case.

The check runs early, so a kernel that fails in plain use is red within seconds. Optional operands are left out, except
where a subcheck is about one. The checks `transforms` and `calls` make such calls with every operand that a kernel
supports, and much later.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from cases.case import Case
from cases.operand_registry import REMOVABLE
from cases.operand_values import Problem, draw_problem
from cases.storage_forms.form_registry import FORMS
from conformance.check_api.judgement import Judgement, build_unsupported, run_subcheck
from conformance.check_api.subject import Subject
from conformance.checks.gradients import check_problem
from conformance.checks.problem_pair import ProblemPair
from conformance.executor_tasks import call_sequences, single_calls, transformed_calls
from reports import records

# A scale above 1, and no power of two. The usual scale of the case is below 1.
_OTHER_SCALE = 1.5
_GROUPED = 4, 2
"""Numbers of query and key/value heads: two query heads share one, and more than one is shared."""
_WINDOWS = "window-l31-r5", "window-l31-r0"
_WINDOW_LENGTHS = 136, 256
"""The second is for kernels that take whole blocks only."""
_STORED = "this call needs dense operands, and the implementation takes stored ones"


def check_first_calls(subject: Subject) -> Iterator[Judgement]:
    """Check `vmap`, NumPy views, another scale, one causal query, windows, a shared bias and x64."""
    for name, check in _SUBCHECKS.items():
        yield from run_subcheck(name, functools.partial(check, subject))


def _check_vmap(subject: Subject) -> Iterator[Judgement]:
    """Check two problems under `vmap` with every operand mapped."""
    form = None if subject.implementation.storage is None else FORMS[subject.implementation.storage]
    if form is not None and not form.maps_over_batch:
        yield build_unsupported("out", "all sequences share the pages of a cache, so vmap does not apply")
        return
    pair = ProblemPair.draw(subject)
    yield pair.judge_out(subject.executor.run(transformed_calls.run_vmap, pair.problems), 2)


def _check_numpy(layout: call_sequences.Layout, subject: Subject) -> Iterator[Judgement]:
    """Check a call outside `jit` on NumPy views that are not contiguous, with every operand that is an array."""
    case = _add_arrays(subject)
    problem = draw_problem(case) if case != subject.case else subject.problem
    refused, got = subject.executor.run(call_sequences.run_on_numpy_views, problem, layout)
    yield build_unsupported("out", refused) if refused else _judge(subject, case, problem, got)


def _add_arrays(subject: Subject) -> Case:
    """Return the case with heads that share keys, and every optional array operand that the implementation supports."""
    case = subject.case
    if case.storage is None:
        grouped = _change(case, num_q_heads=_GROUPED[0], num_kv_heads=_GROUPED[1])
        case = case if subject.implementation.supports(grouped) else grouped
    for operand in REMOVABLE if case.storage is None else ():
        with_operand = _change(case, **{operand.field: operand.levels[0]})
        if operand.arrays and subject.implementation.supports(with_operand) is None:
            case = with_operand
    return case


def _check_second_scale(subject: Subject) -> Iterator[Judgement]:
    """Check calls outside `jit` with the usual scale, with another scale, and with the usual one again."""
    case = _change(subject.case, scale=_OTHER_SCALE)
    if (refusal := subject.implementation.supports(case)) is not None:
        yield build_unsupported("out", refusal)
        return
    other = dataclasses.replace(subject.problem, scale=_OTHER_SCALE)
    problems = [subject.problem, other, subject.problem]
    results = subject.executor.run(call_sequences.run_sequence_eagerly, problems)
    for problem, got in zip(problems, results, strict=True):
        yield _judge(subject, case, problem, got)


def _check_one_query(subject: Subject) -> Iterator[Judgement]:
    """Check a call with one query and `causal=True`, or for a canonical call with a causal mask."""
    if subject.case.storage is not None:
        yield build_unsupported("out", _STORED)
        return
    # Implementations align the one query of `causal=True` with the first key, or with the last one.
    masks = ("causal", f"causal-o{subject.case.kv_length - 1}")
    refusal = None
    for mask, phase in itertools.product(masks, (subject.case.phase, "decode")):
        case = _change(subject.case, mask=mask, q_length=1, phase=phase)
        if (refusal := subject.implementation.supports(case)) is not None:
            continue
        problem = draw_problem(case)
        flags = subject.executor.run(single_calls.find_mask_arguments, problem)
        if flags["causal"] or not flags["mask"]:
            yield _judge(subject, case, problem, subject.executor.forward(problem).values["out"])
            return
    yield build_unsupported("out", refusal or "the call has no argument `causal`")


def _check_open_window(subject: Subject) -> Iterator[Judgement]:
    """Check a window without a limit on either side, and beside a causal mask."""
    if subject.case.storage is not None:
        yield build_unsupported("out", _STORED)
        return
    for mask in ("window-linf-rinf", "causal_and_window-linf-rinf"):
        case = _change(subject.case, mask=mask)
        if (refusal := subject.implementation.supports(case)) is not None:
            yield build_unsupported("out", refusal)
            continue
        problem = draw_problem(case)
        yield _judge(subject, case, problem, subject.executor.forward(problem).values["out"])


def _check_window(subject: Subject) -> Iterator[Judgement]:
    """Check results and gradients under a window alone, over two blocks of most kernels."""
    if subject.case.storage is not None:
        yield build_unsupported("out", _STORED)
        return
    refusals = []
    for mask, length in itertools.product(_WINDOWS, _WINDOW_LENGTHS):
        case = _change(subject.case, mask=mask, q_length=length, kv_length=length)
        if (refusal := subject.implementation.supports(case)) is None:
            windowed = dataclasses.replace(subject, case=case)
            yield from check_problem(windowed, windowed.problem)
            return
        refusals.append(refusal)
    yield build_unsupported("out", refusals[0])


def _check_shared_bias(shared: tuple[int, ...], subject: Subject) -> Iterator[Judgement]:
    """Check a bias with size 1 along the axes `shared` of `[B, N, T, S]`, and the residuals under it."""
    case = _change(subject.case, bias="biaspair")
    if subject.case.storage is not None or (refusal := subject.implementation.supports(case)) is not None:
        yield build_unsupported("out", _STORED if subject.case.storage is not None else refusal or "")
        return
    problem = draw_problem(case)
    assert problem.bias is not None
    kept = tuple(slice(1) if axis in shared else slice(None) for axis in range(4))
    problem = dataclasses.replace(problem, bias=np.ascontiguousarray(problem.bias[kept]))
    try:
        results = subject.run_results(problem)
    except Exception as error:  # the contract lets a kernel refuse this form by any error
        yield build_unsupported("out", f"{type(error).__name__}: {error}".split("\n")[0])
        return
    expected = subject.expect(problem).forward
    for name, got in results.items():
        if name == "out":
            yield subject.judge(name, got, expected[name], subject.find_judged_rows(problem))
        else:
            yield subject.judge_residual(name, got, expected[name])


def _check_x64(subject: Subject) -> Iterator[Judgement]:
    """Check the result with `jax.enable_x64`, where the usual scale may become a float64, and all dtypes by tracing."""
    got = subject.executor.run(transformed_calls.run_x64, subject.problem)
    yield _judge(subject, subject.case, subject.problem, got)
    if subject.implementation.has_residual_call:
        usual, with_x64 = (
            subject.executor.run(transformed_calls.find_residual_dtypes, subject.problem, doubles=doubles)
            for doubles in (False, True)
        )
        for name in sorted(usual):
            same = with_x64[name] == usual[name]
            reason = "" if same else f"dtype is {with_x64[name]}, must be {usual[name]} as without jax_enable_x64"
            yield Judgement(observable=name, verdict=records.PASS if same else records.FAIL, reason=reason)


def _judge(subject: Subject, case: Case, problem: Problem, got: Any) -> Judgement:
    """Judge `out` of a problem of the case `case`, and its dtype."""
    out, dtype = np.asarray(got), problem.q.dtype
    if out.dtype != dtype:
        return subject.judge_malformed("out", f"dtype is {out.dtype}, must be that of q, {dtype}")
    judging = dataclasses.replace(subject, case=case) if case != subject.case else subject
    return judging.judge("out", out, subject.expect(problem).forward["out"], subject.find_judged_rows(problem))


def _change(case: Case, **changes: Any) -> Case:
    return dataclasses.replace(case, **changes)


_SUBCHECKS: dict[str, Callable[[Subject], Iterator[Judgement]]] = {
    "vmap": _check_vmap,
    "numpy_transposed": functools.partial(_check_numpy, "transposed"),
    "numpy_strided": functools.partial(_check_numpy, "strided"),
    "second_scale": _check_second_scale,
    "one_causal_query": _check_one_query,
    "open_window": _check_open_window,
    "window": _check_window,
    "bias_shared_by_heads": functools.partial(_check_shared_bias, (0, 1)),
    "bias_shared_by_keys": functools.partial(_check_shared_bias, (0, 1, 3)),
    "x64": _check_x64,
}
