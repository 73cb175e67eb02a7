"""Check `sharding`: judge the call and its gradients on four devices by the oracle.

- The call runs under `shard_map`, sharded over batch rows, heads or queries.
- So does `out`, over batch rows and heads, under other kinds of mask, with optional operands and without.
- It runs on arrays with explicit shardings, without `shard_map`.
- It is traced under `shard_map` with `check_vma=True`, JAX's check of the axes over which values differ.
- It runs outside `jit` on arrays that lie on the second device.
- A call whose sequence several devices share (`Implementation.on_devices`) runs on 2, 4 and 8 devices, with each
  declared `check_vma`. There are fewer key heads than devices, if the call supports that, and a window or segments that
  cross the borders of the devices.

Four devices are needed. On CPU they are virtual: `conformance.environment` requests them from XLA. Queries are sharded
in the load-balanced order of context parallelism (docs/contract.md, section 3). Each device gets the mask of its own
queries.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, get_args

import numpy as np

from cases.case import Case, CaseIdError
from cases.operand_registry import GRADIENT_OF, OPTIONAL
from cases.operand_values import Cotangent, Problem, draw_cotangent, draw_problem
from conformance.check_api.judgement import Judgement, build_unsupported, run_subcheck
from conformance.check_api.subject import Subject
from conformance.checks.few_operand_calls import OTHER_MASKS, are_made_elsewhere, replace_mask
from conformance.execution.executor import Values
from conformance.executor_tasks import sharded_calls, single_calls
from conformance.executor_tasks.sharded_calls import DEVICES
from reports import records

_COUNTS = (2, 4, 8)  # numbers of devices that share a sequence
_SETTINGS = {False: (False,), True: (True,), "both": (False, True)}  # of `check_vma`, by what is declared
# Specs of arrays that differ along the sharded axis, in place of an array that all devices share.
_DENSE: dict[sharded_calls.ShardedAxis, str] = {"batch": "densebatch-d60", "heads": "densehead-d60"}


def check_sharding(subject: Subject) -> Iterator[Judgement]:
    """Check results on four devices: sharded over batch rows, heads and queries, on a mesh, and on the second alone."""
    if (kind := subject.implementation.storage) is not None:
        yield build_unsupported("all", f"the contract does not define which part of {kind} operands each device gets")
        return
    if (count := subject.executor.devices) < DEVICES:
        yield Judgement(observable="all", verdict=records.UNJUDGED, reason=_explain_devices(DEVICES, count))
        return
    for name in get_args(sharded_calls.ShardedAxis):
        try:
            case = _make_divisible(subject.case)
            case = _balance_queries(case) if name == "sequence" else _remove_functions(case)
        except CaseIdError as error:
            yield build_unsupported(name, f"this case cannot be shared by {DEVICES} devices: {error}")
            continue
        yield from run_subcheck(name, functools.partial(_check_axis, subject, case, name))
    for axis, name in () if are_made_elsewhere(subject.case) else itertools.product(_DENSE, OTHER_MASKS):
        yield from run_subcheck(
            f"{axis}_{name}", functools.partial(_check_other_mask, subject, axis, *OTHER_MASKS[name])
        )
    for name, judge in (("explicit", _check_explicit), ("checked", _check_vma), ("second", _check_second_device)):
        yield from run_subcheck(name, functools.partial(_check_unless_refused, subject, judge))
    if subject.implementation.on_devices is not None:
        for devices, vma in itertools.product(_COUNTS, _SETTINGS[subject.implementation.check_vma]):
            name = f"devices_{devices}" + ("_checked" if vma else "")
            yield from run_subcheck(name, functools.partial(_check_devices, subject, devices, vma))


def _check_devices(subject: Subject, devices: int, check_vma: bool) -> Iterator[Judgement]:
    """Check all results and gradients of a call whose sequence so many devices share."""
    if (count := subject.executor.devices) < devices:
        yield build_unsupported("all", _explain_devices(devices, count))
        return
    cases = list(_list_shared_cases(subject.case, devices))
    reasons = [subject.implementation.supports(each) for each in cases]
    case = next((each for each, reason in zip(cases, reasons, strict=True) if reason is None), None)
    if case is None:
        yield build_unsupported("all", reasons[0] or "")
        return
    problem = draw_problem(case)
    do, judged = _draw_cotangent(subject, case, problem)
    rows = (~problem.empty_rows | (subject.implementation.empty_rows == "zero")) & problem.decided
    dlse = None
    if "logsumexp" in subject.implementation.differentiable_residuals:
        drawn = draw_cotangent(case).logsumexp
        assert drawn is not None
        dlse = np.where(rows, drawn, np.float32(0))
    cotangent = Cotangent("random", do, dlse)
    pulled = (cotangent,) if subject.has_gradients else ()
    got = subject.executor.run(sharded_calls.run_on_devices, devices, check_vma, problem, (*pulled, None)[0])
    expected = subject.expect(problem, pulled)
    yield _judge(subject, "out", got["out"], expected.forward["out"], judged)
    for name in sorted(subject.implementation.residuals):
        yield _judge(subject, name, got[name], expected.forward[name], rows)
    for name in (name for name in GRADIENT_OF.values() if name in got and pulled):
        if name in subject.implementation.gradients:
            yield _judge(subject, name, got[name], expected.gradients[0][name], None)


def _list_shared_cases(case: Case, devices: int) -> Iterator[Case]:
    """Yield cases with two query heads a device, by preference with few key heads and a window across devices."""
    few = 1 if devices == _COUNTS[0] else 2
    for num_kv_heads, spec in itertools.product((few, 2 * devices), ("window-l40-r0", case.mask)):
        shaped = dataclasses.replace(case, num_q_heads=2 * devices, num_kv_heads=num_kv_heads)
        with contextlib.suppress(CaseIdError):
            yield replace_mask(shaped, spec, keep_operands=True)


def _explain_devices(needed: int, count: int) -> str:
    return (
        f"{needed} devices are needed, there are {count}; on CPU, XLA_FLAGS must have "
        f"--xla_force_host_platform_device_count={needed} (it is set to {DEVICES} unless XLA_FLAGS is set already)"
    )


def _check_unless_refused(
    subject: Subject, judge: Callable[[Subject, Case], Iterator[Judgement]]
) -> Iterator[Judgement]:
    """Run the check `judge`, and report an exception as unsupported unless the implementation declares `validates`.

    JAX itself may raise the exception. A function in plain JAX may have to state how a result is sharded, or how the
    carry of a loop differs between devices. If it does not, JAX raises an error that names the operation. No result is
    wrong then, and the author may never have intended such use.
    """
    try:
        case = _make_divisible(subject.case)
    except CaseIdError as error:
        yield build_unsupported("all", f"this case cannot be shared by {DEVICES} devices: {error}")
        return
    if (reason := _find_refusal(subject, case)) is not None:
        yield build_unsupported("all", reason)
        return
    try:
        yield from judge(subject, case)
    except NotImplementedError:
        raise
    except Exception as error:  # JAX raises exceptions of many types
        if subject.implementation.validates:
            raise
        yield build_unsupported("all", f"{type(error).__name__}: {error}".split("\n")[0])


def _check_explicit(subject: Subject, case: Case) -> Iterator[Judgement]:
    """Check batch rows sharded over explicit mesh axes, the default of jax 0.12's `make_mesh`, without `shard_map`."""
    problem = draw_problem(case)
    do, judged = _draw_cotangent(subject, case, problem)
    out, gradients = subject.executor.run(
        sharded_calls.run_on_explicit_mesh, problem, do if subject.has_gradients else None
    )
    yield from _judge_results(subject, problem, do, judged, out, gradients)


def _check_vma(subject: Subject, case: Case) -> Iterator[Judgement]:
    """Check that the call can be traced under the default `shard_map`, with `check_vma=True`."""
    if subject.implementation.accelerator.interpreted:
        yield build_unsupported("all", "JAX's Pallas interpreters do not track over which axes values differ")
        return
    do = draw_cotangent(case).out if subject.has_gradients else None
    subject.executor.run(sharded_calls.trace_with_vma_check, draw_problem(case), do)
    yield Judgement(observable="traced", verdict=records.PASS)


def _check_second_device(subject: Subject, case: Case) -> Iterator[Judgement]:
    """Check a call outside `jit` whose operands lie on the second device. JAX's default device is the first."""
    if subject.implementation.devices > 1:
        yield build_unsupported("all", "the call chooses its devices itself")
        return
    problem = draw_problem(case)
    out = subject.executor.run(sharded_calls.run_on_second_device, problem)
    expected = subject.expect(problem).forward["out"]
    yield _judge(subject, "out", out, expected, subject.find_judged_rows(problem))


def _draw_cotangent(subject: Subject, case: Case, problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """Return a cotangent of `out` that is zero in unjudged rows, and booleans that mark the judged rows."""
    judged, drawn = subject.find_judged_rows(problem), draw_cotangent(case).out
    return np.where(judged, drawn, np.zeros_like(drawn)), judged


def _make_divisible(case: Case) -> Case:
    """Return the case with four batch rows and four key/value heads, so that four devices can share each axis."""
    group = case.num_q_heads // case.num_kv_heads
    return dataclasses.replace(case, batch=DEVICES, num_kv_heads=DEVICES, num_q_heads=DEVICES * group)


def _remove_functions(case: Case) -> Case:
    """Remove operands that are functions of batch row and head: a device does not know the indices of its shard."""
    absent: dict[str, Any] = {operand.field: operand.absent for operand in OPTIONAL if operand.is_function}
    return dataclasses.replace(case, **absent)


def _balance_queries(case: Case) -> Case:
    """Give the case load-balanced queries, and drop operands that need positions, which devices do not know."""
    absent: dict[str, Any] = {operand.field: operand.absent for operand in OPTIONAL if operand.is_positional}
    return dataclasses.replace(case, mask=f"balanced-{DEVICES}", **absent)


def _check_axis(subject: Subject, case: Case, axis: sharded_calls.ShardedAxis) -> Iterator[Judgement]:
    """Check the call with one axis sharded."""
    if (reason := _find_refusal(subject, case)) is not None:
        yield build_unsupported("all", reason)
        return
    problem = draw_problem(case)
    do, judged = _draw_cotangent(subject, case, problem)
    out, gradients = subject.executor.run(
        sharded_calls.run_sharded, axis, problem, do if subject.has_gradients else None
    )
    yield from _judge_results(subject, problem, do, judged, out, gradients)


def _check_other_mask(
    subject: Subject, axis: sharded_calls.ShardedAxis, spec: str, keep_operands: bool
) -> Iterator[Judgement]:
    """Check `out` with one axis sharded, under another mask, with the optional operands of the case or without them."""
    plain = _remove_functions(_make_divisible(subject.case))
    specs = (_DENSE[axis], spec) if spec.startswith("dense") else (spec,)
    cases = [replace_mask(plain, each, keep_operands=keep_operands) for each in specs]
    reasons = [_find_refusal(subject, each) for each in cases]
    case = next((each for each, reason in zip(cases, reasons, strict=True) if reason is None), None)
    if case is None:
        yield build_unsupported("out", reasons[-1] or "")
        return
    problem = draw_problem(case)
    if spec.startswith("dense") and "mask" not in subject.executor.run(single_calls.list_arrays, problem):
        return  # without an array, the call has the mask of all batch rows, and no device gets that of its own
    out, _ = subject.executor.run(sharded_calls.run_sharded, axis, problem, None)
    yield _judge(subject, "out", out, subject.expect(problem).forward["out"], subject.find_judged_rows(problem))


def _judge_results(
    subject: Subject, problem: Problem, do: np.ndarray, judged: np.ndarray, out: Any, gradients: Values
) -> Iterator[Judgement]:
    """Judge `out` and the gradients of a sharded call by the oracle."""
    cotangents = (Cotangent("random", do),) if subject.has_gradients else ()
    expected = subject.expect(problem, cotangents)
    yield _judge(subject, "out", out, expected.forward["out"], judged)
    for operand, name in GRADIENT_OF.items():
        if operand in gradients and name in subject.implementation.gradients:
            yield _judge(subject, name, gradients[operand], expected.gradients[0][name], None)


def _find_refusal(subject: Subject, case: Case) -> str | None:
    """Return why the sharded case is unsupported, or None; with sharded queries, dense masks must be supported too."""
    supports = subject.implementation.supports
    if (reason := supports(case)) is not None or not case.mask.startswith("balanced"):
        return reason
    return supports(dataclasses.replace(case, mask="dense-d40"))


def _judge(subject: Subject, name: str, got: Any, expected: Any, judged: np.ndarray | None) -> Judgement:
    return subject.judge(name, np.asarray(got), expected, judged)
