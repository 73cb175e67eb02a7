"""Check `transforms`: judge the call under JAX transformations, such as `vmap`, `grad` and `scan`, by the oracle.

Transformed calls run on two problems: the case's own, and one drawn with the next seed (`ProblemPair`). If batched
calls wrongly share a value, the result of one problem is wrong.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from cases import mask_spec
from cases.counter_rng import draw_normal
from cases.masks import Dense, Listed, Mask, iter_leaves, replace_lists
from cases.moba_mask import depends_on_data
from cases.operand_registry import GRADIENT_OF, LOGIT_OPERANDS, OPTIONAL, REMOVABLE, RESIDUALS
from cases.operand_values import Problem, draw_problem
from cases.storage_forms.form_registry import FORMS
from cases.storage_forms.stored_cases import list_other_masks
from conformance.check_api.judgement import Judgement, build_unsupported, catch_errors, run_subcheck
from conformance.check_api.subject import Subject
from conformance.checks import few_operand_calls
from conformance.checks.differentiation import check_second_derivatives
from conformance.checks.forward import judge_further
from conformance.checks.problem_pair import ProblemPair
from conformance.executor_tasks import call_sequences, single_calls, transformed_calls
from conformance.truth.rounding_bounds import Bounded
from conformance.truth.roundoff import UNIT_ROUNDOFF
from reports import records

# A factor that changes a number a little, in its third digit. A cache key that uses fewer digits confuses the two.
_NEARBY_FACTOR = 1 + 2.0**-6
# A factor for the scale. The cases have the scale 0.3; the result, 1.5, is above 1 and no power of two.
_SCALE_FACTOR = 5.0


def check_transforms(subject: Subject) -> Iterator[Judgement]:
    """Check `jit`, `vmap`, `grad`, `checkpoint`, `scan`, donation, x64 and repeated calls."""
    pair = ProblemPair.draw(subject)
    form = None if subject.implementation.storage is None else FORMS[subject.implementation.storage]
    for name, transform in _FORWARD_SUBCHECKS.items():
        if name.startswith("vmap") and form is not None and not form.maps_over_batch:
            yield build_unsupported(f"out.{name}", "all sequences share the pages of a cache, so vmap does not apply")
        else:
            yield from run_subcheck(name, functools.partial(transform, pair))
    if subject.has_gradients:
        for name, transform in _BACKWARD_SUBCHECKS.items():
            yield from run_subcheck(name, functools.partial(transform, pair))
        yield from catch_errors("second", functools.partial(check_second_derivatives, subject))


def _check_eager(pair: ProblemPair) -> Iterator[Judgement]:
    """Check the call outside `jit`, with its residuals."""
    yield pair.judge_out(pair.run_eagerly(pair.problems[0]))
    if pair.subject.implementation.has_residual_call:
        results = pair.subject.executor.run(call_sequences.run_residuals_eagerly, pair.problems[0])
        yield from _judge_residuals(pair, {name: x[None] for name, x in results.items()}, 1)
    elif returned := pair.subject.executor.run(single_calls.list_returned_residuals, pair.problems[0]):
        # No other check looks at residuals that the implementation does not declare.
        reason = f"returns {' and '.join(returned)}, which it declares not to offer"
        yield Judgement(observable="residuals", verdict=records.FAIL, reason=reason)


def _check_vmap(pair: ProblemPair) -> Iterator[Judgement]:
    """Check both problems under `vmap` with every operand mapped, and with residuals if they are offered."""
    if not pair.subject.implementation.has_residual_call:
        yield pair.judge_out(pair.subject.executor.run(transformed_calls.run_vmap, pair.problems), 2)
        return
    results = pair.subject.executor.run(transformed_calls.run_vmap_with_residuals, pair.problems)
    yield pair.judge_out(results["out"], 2)
    yield from _judge_residuals(pair, results, 2)


def _judge_residuals(pair: ProblemPair, results: Mapping[str, np.ndarray], count: int) -> Iterator[Judgement]:
    """Judge the stacked residuals of the first `count` problems."""
    for name in set(results) & set(RESIDUALS):
        for got, problem, expected in zip(results[name], pair.problems[:count], pair.expected[:count], strict=True):
            judged = pair.subject.find_judged_residuals(problem)
            yield pair.subject.judge(name, got, expected.forward[name], judged)
    for n in range(count):
        mapped = {name: x[n] for name, x in results.items()}
        yield from judge_further(pair.subject, pair.problems[n], pair.expected[n], mapped)


def _check_vmap_over(names: Sequence[str], pair: ProblemPair) -> Iterator[Judgement]:
    """Check `vmap` over the operands `names`; both calls share the other operands."""
    problem, other = pair.problems
    mapped = [name for name in names if getattr(problem, name) is not None]
    if problem.tied:  # tied values are coordinates of the keys, so v cannot be mapped without k
        mapped = [name for name in mapped if name != "v"]
    if not mapped:
        return
    twice = mapped == ["k"]
    got = pair.subject.executor.run(
        transformed_calls.run_vmap_twice if twice else transformed_calls.run_vmap_over, pair.problems, mapped
    )
    changed: dict[str, Any] = {name: getattr(other, name) for name in mapped}
    mixed = dataclasses.replace(problem, **changed)
    problems, expected = (problem, mixed), (pair.expected[0], pair.subject.expect(mixed))
    order = (0, 1, 1, 0) if twice else (0, 1)
    yield pair.judge_out_for(got, [problems[n] for n in order], [expected[n] for n in order])


def _check_vmap_over_half(name: str, which: int, pair: ProblemPair) -> Iterator[Judgement]:
    """Check `vmap` over one array of the pair `name`, such as the segment ids of keys but not of queries.

    `which` is the index of the mapped array. Models do this for keys of several prompts, or for several queries over
    one cache.
    """
    problem, other = pair.problems
    shared, mapped = getattr(problem, name), getattr(other, name)
    if shared is None:
        return
    changed: dict[str, Any] = {name: tuple((mapped if n == which else shared)[n] for n in range(2))}
    mixed = dataclasses.replace(problem, **changed)
    got = pair.subject.executor.run(transformed_calls.run_vmap_over, (problem, mixed), [name], which)
    yield pair.judge_out_for(got, (problem, mixed), (pair.expected[0], pair.subject.expect(mixed)))


def _check_vmap_queries(pair: ProblemPair) -> Iterator[Judgement]:
    """Check `vmap` over queries only, with a shared bias and mask that differ between batch rows."""
    yield from _check_vmap_over(("q",), dataclasses.replace(pair, problems=_vary_batch_rows(pair)))


def _vary_batch_rows(pair: ProblemPair) -> tuple[Problem, Problem]:
    """Return the problems with a bias and a mask that differ between batch rows, where supported."""
    problem, other = pair.problems
    changes: dict[str, Any] = {}
    for field, level in (("bias", "biasbatch"), ("mask", "densebatch-d60")):
        changed: dict[str, Any] = {field: level}
        case = dataclasses.replace(pair.subject.case, **changed)
        if getattr(problem, field) is not None and pair.subject.implementation.supports(case) is None:
            changes[field] = getattr(draw_problem(case), field)
    return dataclasses.replace(problem, **changes), dataclasses.replace(other, **changes)


def _check_vmap_masks(pair: ProblemPair) -> Iterator[Judgement]:
    """Check `vmap` over masks, for calls that take them as arrays."""
    problem, executor = pair.problems[0], pair.subject.executor
    names = [name for name in executor.run(single_calls.list_arrays, problem) if name in ("mask", "indices")]
    if not names:
        return
    if (other := _roll_lists(problem.mask)) is not None:
        problems = [problem, dataclasses.replace(problem, mask=other)]
    else:
        dense = problem.resolved_mask.dense(problem.q.shape[1], problem.k.shape[1])
        problems = [dataclasses.replace(problem, mask=Dense(mask)) for mask in (dense, np.roll(dense, 1, axis=-1))]
    got = executor.run(transformed_calls.run_vmap_over, problems, names)
    yield pair.judge_out_for(got, problems, [pair.subject.expect(problem) for problem in problems])


def _roll_lists(mask: Mask) -> Mask | None:
    """Return a mask in which each query has the list of the one before; None if the mask has no lists of keys."""
    if not any(isinstance(leaf, Listed) for leaf in iter_leaves(mask)):
        return None
    return replace_lists(mask, lambda lists: Listed(np.roll(lists.indices, 1, axis=1)))


def _check_call(how: Callable[..., np.ndarray], pair: ProblemPair) -> Iterator[Judgement]:
    """Check `out` of the task `how`, which makes the call in one way, such as with donated operands."""
    yield pair.judge_out(pair.subject.executor.run(how, pair.problems[0]))


def _check_x64(pair: ProblemPair) -> Iterator[Judgement]:
    """Check results and dtypes of the call with `jax.enable_x64`, where JAX may use float64."""
    got = pair.subject.executor.run(transformed_calls.run_x64, pair.problems[0])
    judgement = pair.judge_out(got)
    if got.dtype != pair.problems[0].q.dtype:
        reason = f"dtype is {got.dtype}, must be that of q, {pair.problems[0].q.dtype}"
        judgement = dataclasses.replace(judgement, verdict=records.FAIL, reason=reason)
    yield judgement
    if pair.subject.implementation.has_residual_call:
        yield from _check_x64_residuals(pair)


def _check_x64_residuals(pair: ProblemPair) -> Iterator[Judgement]:
    """Check by tracing that x64 does not change the dtypes of residuals, with a scale and without."""
    yield from _check_x64_dtypes(pair, pair.problems[0])
    if pair.problems[0].scale is not None:
        yield from _check_x64_dtypes(pair, pair.problems[0].without("scale"))


def _check_x64_dtypes(pair: ProblemPair, problem: Problem) -> Iterator[Judgement]:
    """Check that the dtypes of one problem's residuals are the same with and without x64."""
    usual, with_x64 = (
        pair.subject.executor.run(transformed_calls.find_residual_dtypes, problem, doubles=doubles)
        for doubles in (False, True)
    )
    for name in sorted(usual):
        same = with_x64[name] == usual[name]
        reason = "" if same else f"dtype is {with_x64[name]}, must be {usual[name]} as without jax_enable_x64"
        yield Judgement(observable=name, verdict=records.PASS if same else records.FAIL, reason=reason)


def _check_second_call(pair: ProblemPair) -> Iterator[Judgement]:
    """Check that a repeated call gives the same bits, with a call on the other problem in between."""
    problem, other = pair.problems
    first, between, again = pair.subject.executor.run(call_sequences.run_one_program, (problem, other, problem))
    same = first.tobytes() == again.tobytes()
    reason = "" if same else f"{int(np.sum(first != again))} values differ when the same call is made again"
    yield Judgement(observable="bits", verdict=records.PASS if same else records.FAIL, reason=reason)
    yield pair.judge_out(np.stack([first, between]), 2)


def _check_other_statics(pair: ProblemPair) -> Iterator[Judgement]:
    """Check calls with another scale and another soft cap, then the first call again, in one process.

    Then each number is changed slightly, in calls outside `jit`. Everything else that a kernel's cache key may contain
    stays the same.
    """
    problem = pair.problems[0]
    factors = {"scale": _SCALE_FACTOR}
    numbers = {o.name: number for o in OPTIONAL if o.number and (number := getattr(problem, o.name)) is not None}
    changes: list[dict[str, Any]] = [{name: number * factors.get(name, 0.5)} for name, number in numbers.items()]
    others = [dataclasses.replace(problem, **change) for change in changes]
    for other in [*others, problem] if others else []:
        got = pair.subject.executor.run(call_sequences.run_compiled, other)
        yield pair.judge_out_for(got, (other,), (pair.subject.expect(other),))
    # Only one number changes, by a little: a cache key with a rounded number returns the wrong program.
    for other in (dataclasses.replace(problem, **{name: number * _NEARBY_FACTOR}) for name, number in numbers.items()):
        yield pair.judge_out_for(pair.run_eagerly(other), (other,), (pair.subject.expect(other),))


def _check_vmap_few(pair: ProblemPair) -> Iterator[Judgement]:
    """Check `vmap` over queries of a call without optional operands: a kernel may have another path for it."""
    subject = pair.subject
    if subject.case.storage is not None or not any(getattr(subject.case, o.field) != o.absent for o in REMOVABLE):
        return  # for a case without optional operands, `vmap_q` checks the same call
    if few_operand_calls.are_made_elsewhere(subject.case):
        return
    for case in few_operand_calls.iter_variants(subject.case, {"mask": "causal"}):
        if subject.implementation.supports(case) is None:
            few = ProblemPair.draw(dataclasses.replace(subject, case=case))
            yield from _check_vmap_over(("q",), few)
            return


def _check_other_mask(
    spec: str, keep_operands: bool, check: Callable[[ProblemPair], Iterator[Judgement]], pair: ProblemPair
) -> Iterator[Judgement]:
    """Run another subcheck under the mask `spec`, with the optional operands of the case or without them."""
    case = few_operand_calls.replace_mask(pair.subject.case, spec, keep_operands=keep_operands)
    if pair.subject.case.storage is not None or few_operand_calls.are_made_elsewhere(pair.subject.case):
        return  # the mask of stored sequences is a window already
    if (refusal := pair.subject.implementation.supports(case)) is not None:
        yield build_unsupported("out", refusal)
        return
    yield from check(ProblemPair.draw(dataclasses.replace(pair.subject, case=case)))


def _check_gradients(how: transformed_calls.MappingOrder, pair: ProblemPair) -> Iterator[Judgement]:
    """Check gradients of both problems, by `grad` of `vmap`, `vmap` of `grad` or `lax.scan`, as `how` says."""
    out, got = pair.subject.executor.run(transformed_calls.run_gradients, how, pair.problems, pair.stacked_cotangents)
    yield pair.judge_out(out, 2)
    yield from pair.judge_gradients(got, 2)


def _check_shared(pair: ProblemPair) -> Iterator[Judgement]:
    """Check gradients of a call mapped over queries only: those of shared operands are sums over the mapped axis."""
    problem, other = pair.problems
    mixed = dataclasses.replace(problem, q=other.q)
    if depends_on_data(problem.mask):
        yield build_unsupported("gradients", "other queries choose other keys")
        return
    got = pair.subject.executor.run(
        transformed_calls.run_shared_gradients, (problem, mixed), ["q"], pair.stacked_cotangents
    )
    expected = [pair.expected[0].gradients[0], pair.subject.expect(mixed, pair.cotangents[1:]).gradients[0]]
    for operand in pair.list_judged_operands(got):
        name = GRADIENT_OF[operand]
        both = [gradients[name] for gradients in expected]
        values, bounds = np.stack([b.value for b in both]), np.stack([b.bound for b in both])
        if operand != "q":
            # JAX sums over the mapped axis in the dtype of the operand.
            bounds = bounds.sum(axis=0) + UNIT_ROUNDOFF[pair.subject.case.dtype] * np.abs(values).sum(axis=0)
            values = values.sum(axis=0)
        yield pair.subject.judge(name, got[operand], Bounded(values, bounds))


def _check_eager_gradients(pair: ProblemPair) -> Iterator[Judgement]:
    """Check gradients outside `jit`, where the backward pass gets arrays instead of tracers.

    The pullback of the first problem is called twice, after that of the other problem. The second result is judged.
    """
    dos = [cotangent.out for cotangent in pair.cotangents]
    got = pair.subject.executor.run(transformed_calls.run_gradients_eagerly, pair.problems, dos)
    yield from pair.judge_gradients(got)


def _check_eager_query_gradient(pair: ProblemPair) -> Iterator[Judgement]:
    """Check the gradient of q alone outside `jit`, where keys and values are arrays, not tracers."""
    got = pair.subject.executor.run(
        transformed_calls.run_query_gradient_eagerly, pair.problems[0], pair.cotangents[0].out
    )
    yield from pair.judge_gradients(got)


def _check_two_kinds(pair: ProblemPair) -> Iterator[Judgement]:
    """Check gradients of two layers of different kinds in one program, as in models that alternate them.

    The second layer has another mask, scale or soft cap. All calls come before all pullbacks.
    """
    subject, problem = pair.subject, pair.problems[0]
    other = _build_other_kind(subject)
    if other is None:
        yield build_unsupported("gradients", "there is no other mask, scale or soft cap to alternate with")
        return
    drawn = pair.cotangents[0]
    out = np.where(subject.find_judged_rows(other), drawn.out, np.zeros_like(drawn.out))
    layers = (("first", problem, drawn), ("second", other, dataclasses.replace(drawn, out=out)))
    dos = [cotangent.out for _, _, cotangent in layers]
    pulled = subject.executor.run(transformed_calls.run_alternating_layers, (problem, other), dos)
    for (label, layer, cotangent), got in zip(layers, pulled, strict=True):
        expected = subject.expect(layer, [cotangent]).gradients[0]
        for operand in pair.list_judged_operands(got):
            name = GRADIENT_OF[operand]
            yield subject.judge(name, got[operand], expected[name], label=f"{name}.{label}")


def _build_other_kind(subject: Subject) -> Problem | None:
    """Return the problem with another mask, scale and soft cap, if it has these; None if nothing can be changed."""
    case, problem = subject.case, subject.problem
    numbers = {
        o.name: number * _NEARBY_FACTOR
        for o in OPTIONAL
        if o.number and (number := getattr(problem, o.name)) is not None
    }
    changes: dict[str, Any] = dict(numbers)
    specs = ("window-l9-r0", "full") if case.storage is None else list_other_masks(case)
    others = [dataclasses.replace(case, mask=spec) for spec in specs if spec != case.mask]
    for other in others:
        if subject.implementation.supports(other) is None:
            sizes = (case.batch, case.num_q_heads, case.q_length, case.kv_length, case.seed)
            changes["mask"] = mask_spec.build_mask(other.mask, *sizes)
            break
    return dataclasses.replace(problem, **changes) if changes else None


def _check_vmap_of_pullback(pair: ProblemPair) -> Iterator[Judgement]:
    """Check `vmap` of one pullback over two cotangents of `out`."""
    problem, first = pair.problems[0], pair.cotangents[0]
    reversed_do = np.where(pair.subject.judged_out, first.out[:, ::-1], np.zeros_like(first.out))
    cotangents = [first, dataclasses.replace(first, out=reversed_do)]
    dos = np.stack([cotangent.out for cotangent in cotangents])
    got = pair.subject.executor.run(transformed_calls.run_mapped_pullback, problem, dos)
    expected = pair.subject.expect(problem, cotangents).gradients
    for operand in pair.list_judged_operands(got):
        for n, label in enumerate(("first", "second")):
            name = GRADIENT_OF[operand]
            yield pair.subject.judge(name, got[operand][n], expected[n][name], label=f"{name}.{label}")


def _check_checkpoint(named: bool, pair: ProblemPair) -> Iterator[Judgement]:
    """Check gradients under `jax.checkpoint`, with a policy that saves nothing, or if `named` only named values."""
    names = (pair.subject.implementation.checkpoint_names or ("out", "logsumexp")) if named else ()
    do = pair.cotangents[0].out
    out, got = pair.subject.executor.run(transformed_calls.run_checkpoint, pair.problems[0], do, names)
    yield pair.judge_out(out)
    yield from pair.judge_gradients(got)


def _check_forward_mode(pair: ProblemPair) -> Iterator[Judgement]:
    """Check forward mode in a random direction; kernels with a custom VJP lack it and are reported as unsupported."""
    subject, problem = pair.subject, pair.problems[0]
    gradients = subject.implementation.gradients
    names = [
        name for name, gradient in GRADIENT_OF.items() if gradient in gradients and getattr(problem, name) is not None
    ]
    operands = {name: np.asarray(getattr(problem, name)) for name in names}
    drawn = {
        name: draw_normal(subject.case.seed, f"tangent-{name}", x.shape).astype(x.dtype) for name, x in operands.items()
    }
    refused, tangent = subject.executor.run(transformed_calls.run_forward_mode, problem, drawn)
    if tangent is None:
        yield build_unsupported("out", refused)
        return
    do = pair.cotangents[0].out.astype(np.float64)
    got = tangent.astype(np.float64)
    expected = pair.expected[0].gradients[0]
    along = {name: drawn[name].astype(np.float64) for name in names}
    value = sum(float(np.sum(expected[GRADIENT_OF[name]].value * x)) for name, x in along.items())
    # The bound is the error if all gradients are off by their bounds, plus the rounding of the tangent to its dtype.
    bound = sum(float(np.sum(expected[GRADIENT_OF[name]].bound * np.abs(x))) for name, x in along.items())
    bound += UNIT_ROUNDOFF[subject.case.dtype] * float(np.sum(np.abs(got * do)))
    yield subject.judge("out", np.sum(got * do), Bounded(np.asarray(value), np.asarray(bound)))


def _check_one_gradient(pair: ProblemPair) -> Iterator[Judgement]:
    """Check the gradient of each operand, differentiated without the other operands."""
    got = pair.subject.executor.run(transformed_calls.run_single_gradients, pair.problems[0], pair.cotangents[0].out)
    yield from pair.judge_gradients(got)


def _check_x64_backward(pair: ProblemPair) -> Iterator[Judgement]:
    """Check the gradients and their dtypes with `jax.enable_x64`, where JAX may use float64."""
    problem = pair.problems[0]
    got = pair.subject.executor.run(transformed_calls.run_x64_backward, problem, pair.cotangents[0].out)
    for judgement, name in zip(pair.judge_gradients(got), pair.list_judged_operands(got), strict=True):
        required = getattr(problem, name).dtype
        if got[name].dtype != required:
            reason = f"dtype is {got[name].dtype}, must be that of {name}, {required}"
            judgement = dataclasses.replace(judgement, verdict=records.FAIL, reason=reason)
        yield judgement


def _list_mapped_operands() -> dict[str, list[str]]:
    """List the sets of operands that `vmap` maps together while the other operands are shared, by subcheck name."""
    mapped = {"k": ["k"], "v": ["v"], "kv": ["k", "v"]}
    for operand in LOGIT_OPERANDS:
        if operand.vmap:
            mapped.setdefault(operand.vmap, []).append(operand.name)
            mapped.setdefault(operand.name, [operand.name])
    return mapped


def _add_other_masks(
    checks: Mapping[str, Callable[[ProblemPair], Iterator[Judgement]]],
) -> dict[str, Callable[[ProblemPair], Iterator[Judgement]]]:
    """Return the subchecks under each of the `OTHER_MASKS`."""
    return {
        f"{name}_{mask}": functools.partial(_check_other_mask, spec, keep_operands, check)
        for name, check in checks.items()
        for mask, (spec, keep_operands) in few_operand_calls.OTHER_MASKS.items()
    }


_FORWARD_SUBCHECKS: dict[str, Callable[[ProblemPair], Iterator[Judgement]]] = {
    "eager": _check_eager,
    "vmap": _check_vmap,
    "vmap_q": _check_vmap_queries,
    **{
        f"vmap_{name}": functools.partial(_check_vmap_over, operands)
        for name, operands in _list_mapped_operands().items()
    },
    "vmap_ids_of_queries": functools.partial(_check_vmap_over_half, "segment_ids", 0),
    "vmap_ids_of_keys": functools.partial(_check_vmap_over_half, "segment_ids", 1),
    "vmap_masks": _check_vmap_masks,
    "vmap_few": _check_vmap_few,
    "donated": functools.partial(_check_call, transformed_calls.run_donated),
    "highest": functools.partial(_check_call, transformed_calls.run_at_highest_precision),
    "x64": _check_x64,
    "second_call": _check_second_call,
    "other_statics": _check_other_statics,
    **_add_other_masks({"vmap": _check_vmap, "second_call": _check_second_call}),
}
_BACKWARD_SUBCHECKS: dict[str, Callable[[ProblemPair], Iterator[Judgement]]] = {
    "grad_of_vmap": functools.partial(_check_gradients, "grad_of_vmap"),
    "vmap_of_grad": functools.partial(_check_gradients, "vmap_of_grad"),
    "checkpoint": functools.partial(_check_checkpoint, False),
    "checkpoint_names": functools.partial(_check_checkpoint, True),
    "vmap_of_pullback": _check_vmap_of_pullback,
    "scan": functools.partial(_check_gradients, "scan"),
    "two_kinds": _check_two_kinds,
    "shared": _check_shared,
    "eager": _check_eager_gradients,
    "eager_queries": _check_eager_query_gradient,
    "one_gradient": _check_one_gradient,
    "x64": _check_x64_backward,
    "forward_mode": _check_forward_mode,
    **_add_other_masks(
        {
            "checkpoint": functools.partial(_check_checkpoint, False),
            "scan": functools.partial(_check_gradients, "scan"),
        }
    ),
}
