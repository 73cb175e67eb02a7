"""Transforms: the call means the same under every transformation that JAX has for it.

Each transformed call is judged against the oracle, like a plain one. There are two problems: the case's own, and one
drawn with the next seed. What batched calls share by mistake is wrong for one of them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from cases import mask_spec
from cases.counter_rng import draw_normal
from cases.masks import Dense
from cases.moba_mask import depends_on_data
from cases.operand_registry import GRADIENT_OF, OPTIONAL, REMOVABLE, RESIDUALS
from cases.operand_values import Problem, draw_problem
from cases.storage_forms.form_registry import FORMS
from cases.storage_forms.stored_cases import list_other_masks
from conformance import records
from conformance.check_api.judgement import Judgement, build_unsupported, catch_errors, run_subcheck
from conformance.check_api.subject import Subject
from conformance.checks import few_operand_calls
from conformance.checks.differentiation import check_second_derivatives
from conformance.checks.problem_pair import ProblemPair
from conformance.executor_tasks import call_sequences, single_calls, transformed_calls
from conformance.truth.rounding_bounds import Bounded
from conformance.truth.roundoff import UNIT_ROUNDOFF

# A number this many times as large is another one, and the same where its first two digits are all that counts.
_NEARBY_FACTOR = 1 + 2.0**-6
# Makes the scale of the grids, 0.3, one that is above 1 and no power of two.
_SCALE_FACTOR = 5.0


def check_transforms(subject: Subject) -> Iterator[Judgement]:
    """`jit` or not, `vmap`, `grad` of `vmap`, `checkpoint`, `scan`, donation, x64, and a second call mean the same."""
    pair = ProblemPair.of(subject)
    form = None if subject.implementation.storage is None else FORMS[subject.implementation.storage]
    for name, transform in _FORWARD_SUBCHECKS.items():
        if name.startswith("vmap") and form is not None and not form.maps_over_batch:
            yield build_unsupported(f"out.{name}", "a cache in pages is one for all sequences, and is not mapped over")
        else:
            yield from run_subcheck(name, functools.partial(transform, pair))
    if subject.has_gradients:
        for name, transform in _BACKWARD_SUBCHECKS.items():
            yield from run_subcheck(name, functools.partial(transform, pair))
        yield from catch_errors("second", functools.partial(check_second_derivatives, subject))


def _check_eager(pair: ProblemPair) -> Iterator[Judgement]:
    yield pair.judge_out(_call_eagerly(pair, pair.problems[0]))
    if pair.subject.implementation.residuals:
        results = pair.subject.executor.run(call_sequences.run_residuals_eagerly, pair.problems[0])
        yield from _judge_residuals(pair, {name: x[None] for name, x in results.items()}, 1)
    elif returned := pair.subject.executor.run(single_calls.list_returned_residuals, pair.problems[0]):
        # A kernel may have left them out as it was loaded, and then nothing else would be asked about them.
        reason = f"returns {' and '.join(returned)}, which it said that it does not offer"
        yield Judgement(observable="residuals", verdict=records.FAIL, reason=reason)


def _call_eagerly(pair: ProblemPair, problem: Problem) -> np.ndarray:
    return pair.subject.executor.run(call_sequences.run_eagerly, problem)


def _check_vmap(pair: ProblemPair) -> Iterator[Judgement]:
    """Both problems; with residuals, where they are offered: what shares some operands is asked without."""
    if not pair.subject.implementation.residuals:
        yield pair.judge_out(pair.subject.executor.run(transformed_calls.run_vmap, pair.problems), 2)
        return
    results = pair.subject.executor.run(transformed_calls.run_vmap_with_residuals, pair.problems)
    yield pair.judge_out(results["out"], 2)
    yield from _judge_residuals(pair, results, 2)


def _judge_residuals(pair: ProblemPair, results: Mapping[str, np.ndarray], count: int) -> Iterator[Judgement]:
    """The residuals of the first problem, or of both, stacked."""
    for name in set(results) & set(RESIDUALS):
        for got, problem, expected in zip(results[name], pair.problems[:count], pair.expected[:count], strict=True):
            live = (~problem.empty_rows | (pair.subject.implementation.empty_rows == "zero")) & problem.decided
            yield pair.subject.judge(name, got, expected.forward[name], live)


def _check_vmap_over(names: Sequence[str], pair: ProblemPair) -> Iterator[Judgement]:
    """Only some operands have the mapped axis; the others are shared."""
    problem, other = pair.problems
    mapped = [name for name in names if getattr(problem, name) is not None]
    if problem.tied:  # values alone cannot have it: they are coordinates of the keys
        mapped = [name for name in mapped if name != "v"]
    if not mapped:
        return
    twice = mapped == ["k"]
    got = pair.subject.executor.run(
        transformed_calls.run_vmap_twice if twice else transformed_calls.run_vmap_over, pair.problems, mapped
    )
    changed: dict[str, Any] = {name: getattr(other, name) for name in mapped}
    mixed = dataclasses.replace(problem, **changed)
    found, expected = (problem, mixed), (pair.expected[0], pair.subject.expect(mixed))
    turns = (0, 1, 1, 0) if twice else (0, 1)
    yield pair.judge_out_for(got, [found[n] for n in turns], [expected[n] for n in turns])


def _check_vmap_over_half(name: str, which: int, pair: ProblemPair) -> Iterator[Judgement]:
    """One of the two arrays of a pair has the mapped axis alone: keys of several prompts, or queries over one cache."""
    problem, other = pair.problems
    ours, theirs = getattr(problem, name), getattr(other, name)
    if ours is None:
        return
    changed: dict[str, Any] = {name: tuple((theirs if n == which else ours)[n] for n in range(2))}
    mixed = dataclasses.replace(problem, **changed)
    got = pair.subject.executor.run(transformed_calls.run_vmap_over, (problem, mixed), [name], which)
    yield pair.judge_out_for(got, (problem, mixed), (pair.expected[0], pair.subject.expect(mixed)))


def _check_vmap_queries(pair: ProblemPair) -> Iterator[Judgement]:
    """Queries alone have the mapped axis, and batch rows differ in what they share: in bias and mask too."""
    yield from _check_vmap_over(("q",), dataclasses.replace(pair, problems=_vary_batch_rows(pair)))


def _vary_batch_rows(pair: ProblemPair) -> tuple[Problem, Problem]:
    """The problems with a bias and a mask that differ between batch rows, as far as they are supported."""
    problem, other = pair.problems
    changes: dict[str, Any] = {}
    for field, level in (("bias", "biasbatch"), ("mask", "densebatch-d60")):
        changed: dict[str, Any] = {field: level}
        case = dataclasses.replace(pair.subject.case, **changed)
        if getattr(problem, field) is not None and pair.subject.implementation.supports(case) is None:
            changes[field] = getattr(draw_problem(case), field)
    return dataclasses.replace(problem, **changes), dataclasses.replace(other, **changes)


def _check_vmap_masks(pair: ProblemPair) -> Iterator[Judgement]:
    """Masks that differ along the mapped axis, for calls that take them as arrays."""
    problem, executor = pair.problems[0], pair.subject.executor
    if "mask" not in executor.run(single_calls.list_arrays, problem):
        return
    dense = problem.resolved_mask.dense(problem.q.shape[1], problem.k.shape[1])
    problems = [dataclasses.replace(problem, mask=Dense(mask)) for mask in (dense, np.roll(dense, 1, axis=-1))]
    got = executor.run(transformed_calls.run_vmap_over, problems, ["mask"])
    yield pair.judge_out_for(got, problems, [pair.subject.expect(problem) for problem in problems])


def _check_call(how: Callable[..., np.ndarray], pair: ProblemPair) -> Iterator[Judgement]:
    yield pair.judge_out(pair.subject.executor.run(how, pair.problems[0]))


def _check_x64(pair: ProblemPair) -> Iterator[Judgement]:
    got = pair.subject.executor.run(transformed_calls.run_x64, pair.problems[0])
    judgement = pair.judge_out(got)
    if got.dtype != pair.problems[0].q.dtype:
        reason = f"dtype is {got.dtype}, must be that of q, {pair.problems[0].q.dtype}"
        judgement = dataclasses.replace(judgement, verdict=records.FAIL, reason=reason)
    yield judgement
    if pair.subject.implementation.residuals:
        yield from _check_x64_residuals(pair)


def _check_x64_residuals(pair: ProblemPair) -> Iterator[Judgement]:
    """Residuals have the dtype that they have without doubles, with a scale and with the usual one; tracing says so."""
    yield from _check_x64_dtypes(pair, pair.problems[0])
    if pair.problems[0].scale is not None:
        yield from _check_x64_dtypes(pair, pair.problems[0].without("scale"))


def _check_x64_dtypes(pair: ProblemPair, problem: Problem) -> Iterator[Judgement]:
    usual, found = (
        pair.subject.executor.run(transformed_calls.find_residual_dtypes, problem, doubles=doubles)
        for doubles in (False, True)
    )
    for name in sorted(usual):
        same = found[name] == usual[name]
        reason = "" if same else f"dtype is {found[name]}, must be {usual[name]} as without x64"
        yield Judgement(observable=name, verdict=records.PASS if same else records.FAIL, reason=reason)


def _check_second_call(pair: ProblemPair) -> Iterator[Judgement]:
    """The same call, made again after another one, gives the same bits."""
    problem, other = pair.problems
    first, between, again = pair.subject.executor.run(call_sequences.run_one_program, (problem, other, problem))
    same = first.tobytes() == again.tobytes()
    reason = "" if same else f"{int(np.sum(first != again))} values differ when the same call is made again"
    yield Judgement(observable="bits", verdict=records.PASS if same else records.FAIL, reason=reason)
    yield pair.judge_out(np.stack([first, between]), 2)


def _check_other_statics(pair: ProblemPair) -> Iterator[Judgement]:
    """Another soft cap and another scale in the same process, one above 1, then the first ones again."""
    problem = pair.problems[0]
    factors = {"scale": _SCALE_FACTOR}
    numbers = {o.name: number for o in OPTIONAL if o.number and (number := getattr(problem, o.name)) is not None}
    changes: list[dict[str, Any]] = [{name: number * factors.get(name, 0.5)} for name, number in numbers.items()]
    others = [dataclasses.replace(problem, **change) for change in changes]
    for other in [*others, problem] if others else []:
        got = pair.subject.executor.run(call_sequences.run_compiled, other)
        yield pair.judge_out_for(got, (other,), (pair.subject.expect(other),))
    # One number at a time, and outside `jit`: all else that a key may hold is as it was.
    for other in (dataclasses.replace(problem, **{name: number * _NEARBY_FACTOR}) for name, number in numbers.items()):
        yield pair.judge_out_for(_call_eagerly(pair, other), (other,), (pair.subject.expect(other),))


def _check_vmap_few(pair: ProblemPair) -> Iterator[Judgement]:
    """Queries alone have the mapped axis, of a call without optional operands: it may have a rule of its own."""
    subject = pair.subject
    if subject.case.storage is not None or not any(getattr(subject.case, o.field) != o.absent for o in REMOVABLE):
        return  # `vmap_q` is that
    for case in few_operand_calls.iter_variants(subject.case, {"mask": "causal"}):
        if subject.implementation.supports(case) is None:
            few = ProblemPair.of(dataclasses.replace(subject, case=case))
            yield from _check_vmap_over(("q",), few)
            return


def _check_gradients(how: transformed_calls.MappingOrder, pair: ProblemPair) -> Iterator[Judgement]:
    """Gradients of the mapped call, mapped gradients, or those of layers under `lax.scan`."""
    out, got = pair.subject.executor.run(transformed_calls.run_gradients, how, pair.problems, pair.stacked_cotangents)
    yield pair.judge_out(out, 2)
    yield from pair.judge_gradients(got, 2)


def _check_shared(pair: ProblemPair) -> Iterator[Judgement]:
    """Queries alone have the mapped axis: gradients of what they share are sums over it."""
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
            # JAX adds them up in the dtype of the operand.
            bounds = bounds.sum(axis=0) + UNIT_ROUNDOFF[pair.subject.case.dtype] * np.abs(values).sum(axis=0)
            values = values.sum(axis=0)
        yield pair.subject.judge(name, got[operand], Bounded(values, bounds))


def _check_eager_gradients(pair: ProblemPair) -> Iterator[Judgement]:
    """Gradients outside `jit`, where the backward pass gets arrays and not tracers.

    They are those of the second use of a pullback, after the other problem has been pulled back.
    """
    dos = [cotangent.out for cotangent in pair.cotangents]
    found = pair.subject.executor.run(transformed_calls.run_gradients_eagerly, pair.problems, dos)
    yield from pair.judge_gradients(found)


def _check_eager_query_gradient(pair: ProblemPair) -> Iterator[Judgement]:
    """The gradient of q alone outside `jit`: keys and values that nobody differentiates are arrays, and no tracers."""
    found = pair.subject.executor.run(
        transformed_calls.run_query_gradient_eagerly, pair.problems[0], pair.cotangents[0].out
    )
    yield from pair.judge_gradients(found)


def _check_two_kinds(pair: ProblemPair) -> Iterator[Judgement]:
    """Layers of two kinds in one program, as models alternate them, pulled back once both have been called."""
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
    """The problem under another mask, and with a scale and soft cap near its own, as far as it has them."""
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
    """One pullback, mapped over cotangents alone."""
    problem = pair.problems[0]

    first = pair.cotangents[0]
    turned = np.where(pair.subject.judged_out, first.out[:, ::-1], np.zeros_like(first.out))
    cotangents = [first, dataclasses.replace(first, out=turned)]
    dos = np.stack([cotangent.out for cotangent in cotangents])
    got = pair.subject.executor.run(transformed_calls.run_mapped_pullback, problem, dos)
    expected = pair.subject.expect(problem, cotangents).gradients
    for operand in pair.list_judged_operands(got):
        for n, label in enumerate(("first", "second")):
            name = GRADIENT_OF[operand]
            yield pair.subject.judge(name, got[operand][n], expected[n][name], label=f"{name}.{label}")


def _check_checkpoint(named: bool, pair: ProblemPair) -> Iterator[Judgement]:
    """The backward pass recomputes what the policy does not save: everything, or what has no name."""
    names = (pair.subject.implementation.checkpoint_names or ("out", "logsumexp")) if named else ()
    do = pair.cotangents[0].out
    out, got = pair.subject.executor.run(transformed_calls.run_checkpoint, pair.problems[0], do, names)
    yield pair.judge_out(out)
    yield from pair.judge_gradients(got)


def _check_forward_mode(pair: ProblemPair) -> Iterator[Judgement]:
    """Where forward mode is possible, its derivative along a direction is what the gradients say of it."""
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
    # By the gradients' own bounds, all at their worst together, and the rounding of the tangent to its dtype.
    bound = sum(float(np.sum(expected[GRADIENT_OF[name]].bound * np.abs(x))) for name, x in along.items())
    bound += UNIT_ROUNDOFF[subject.case.dtype] * float(np.sum(np.abs(got * do)))
    yield subject.judge("out", np.sum(got * do), Bounded(np.asarray(value), np.asarray(bound)))


def _check_one_gradient(pair: ProblemPair) -> Iterator[Judgement]:
    """The gradient of one operand when nobody asks for the others."""
    found = pair.subject.executor.run(transformed_calls.run_single_gradients, pair.problems[0], pair.cotangents[0].out)
    yield from pair.judge_gradients(found)


def _check_x64_backward(pair: ProblemPair) -> Iterator[Judgement]:
    problem = pair.problems[0]
    got = pair.subject.executor.run(transformed_calls.run_x64_backward, problem, pair.cotangents[0].out)
    for judgement, name in zip(pair.judge_gradients(got), pair.list_judged_operands(got), strict=True):
        want = getattr(problem, name).dtype
        if got[name].dtype != want:
            reason = f"dtype is {got[name].dtype}, must be that of {name}, {want}"
            judgement = dataclasses.replace(judgement, verdict=records.FAIL, reason=reason)
        yield judgement


def _list_mapped_operands() -> dict[str, list[str]]:
    """The operands that have a batch axis together while the others have none, by name."""
    mapped = {"k": ["k"], "v": ["v"], "kv": ["k", "v"]}
    for operand in OPTIONAL:
        if operand.vmap:
            mapped.setdefault(operand.vmap, []).append(operand.name)
            mapped.setdefault(operand.name, [operand.name])
    return mapped


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
}
_BACKWARD_SUBCHECKS: dict[str, Callable[[ProblemPair], Iterator[Judgement]]] = {
    "grad_of_vmap": functools.partial(_check_gradients, "outside"),
    "vmap_of_grad": functools.partial(_check_gradients, "inside"),
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
}
