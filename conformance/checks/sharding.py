"""Sharding: under `shard_map` over batch, heads and query sequence, the call and its gradients mean the same.

And on arrays whose shardings are part of their types, and where `shard_map` checks over which axes values differ.

Four devices are needed; on CPU they are virtual (`conformance.environment` asks XLA for them). Queries are sharded in
the load-balanced order of context parallelism (docs/contract.md, section 3), each device masking with its own rows.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from cases.case import Case, CaseIdError
from cases.inputs import Cotangent, Problem, draw, draw_cotangent
from cases.masks import Dense
from cases.operands import GRADIENT_OF, OPERANDS, Axes, Operand
from conformance import records
from conformance.asking.judgement import Judgement, apart, unsupported
from conformance.asking.subject import Subject
from conformance.calling.execution import Arrays, pull_back

_DEVICES = 4
_AXIS = "shards"


def sharding(subject: Subject) -> Iterator[Judgement]:
    """Under `shard_map` on four devices, over batch, heads and queries, and on explicit axes, results are right."""
    if (count := len(jax.devices())) < _DEVICES:
        reason = (
            f"{_DEVICES} devices are needed, there are {count}; on CPU, XLA_FLAGS must have "
            f"--xla_force_host_platform_device_count={_DEVICES} (it is set unless XLA_FLAGS is set already)"
        )
        yield Judgement(observable="all", verdict=records.UNJUDGED, reason=reason)
        return
    for name, shard in (("batch", _over_batch), ("heads", _over_heads), ("sequence", _over_queries)):
        try:
            case = _divisible(subject.case)
            case = case if name != "sequence" else _balanced(case)
        except CaseIdError as error:
            yield unsupported(name, f"this case cannot be shared by {_DEVICES} devices: {error}")
            continue
        yield from apart(name, functools.partial(_judge, subject, case, shard))
    for name, judge in (("explicit", _judge_explicit), ("checked", _judge_checked)):
        yield from apart(name, functools.partial(_unless_refused, subject, judge))


def _unless_refused(subject: Subject, judge: Callable[[Subject, Case], Iterator[Judgement]]) -> Iterator[Judgement]:
    """What `judge` finds. What JAX refuses is a finding only of those who declare that they `validate`.

    A function in plain JAX has to say how some results are sharded, or where a loop's carry differs, and JAX names the
    operation: that it does not is no wrong result, and its author may never have meant it.
    """
    try:
        case = _divisible(subject.case)
    except CaseIdError as error:
        yield unsupported("all", f"this case cannot be shared by {_DEVICES} devices: {error}")
        return
    if (reason := _declined(subject, case)) is not None:
        yield unsupported("all", reason)
        return
    try:
        yield from judge(subject, case)
    except NotImplementedError:
        raise
    except Exception as error:  # whatever JAX raises
        if subject.implementation.validates:
            raise
        yield unsupported("all", f"{type(error).__name__}: {error}".split("\n")[0])


def _judge_explicit(subject: Subject, case: Case) -> Iterator[Judgement]:
    """Batch rows on a mesh of explicit axes, as `jax.make_mesh` makes it from jax 0.12 on, with no `shard_map`."""
    problem = draw(case)
    do = np.where(judged := subject.judged_out_of(problem), drawn := draw_cotangent(case).out, np.zeros_like(drawn))
    call, arrays, specs, out_spec = _over_batch(subject, problem)
    mesh = jax.make_mesh((_DEVICES,), (_AXIS,), axis_types=(AxisType.Explicit,))

    def put(x: Any, spec: Any) -> Any:
        return jax.tree.map(lambda leaf: jax.device_put(leaf, NamedSharding(mesh, spec)), x)

    def put_each(x: Any, spec: Any) -> Any:
        return tuple(map(put, x, spec)) if isinstance(spec, tuple) and isinstance(x, tuple) else put(x, spec)

    with jax.set_mesh(mesh):
        placed = {name: put_each(x, specs.get(name, _spec())) for name, x in arrays.items()}
        if subject.with_gradients:
            out, gradients = jax.jit(functools.partial(pull_back, call))(placed, put(do, out_spec))
        else:
            out, gradients = jax.jit(call)(placed), {}
    yield from _judge_results(subject, problem, do, judged, out, gradients)


def _judge_checked(subject: Subject, case: Case) -> Iterator[Judgement]:
    """`shard_map` as it is by default, `check_vma=True`; traced only, since its results are those without the check."""
    if subject.implementation.accelerator.interpreted:
        yield unsupported("all", "JAX's interpreters of Pallas kernels do not say over which axes values differ")
        return
    problem = draw(case)
    call, arrays, specs, out_spec = _over_batch(subject, problem)
    in_specs = {name: specs.get(name, _spec()) for name in arrays}
    mesh = jax.make_mesh((_DEVICES,), (_AXIS,), axis_types=(AxisType.Auto,))
    sharded = jax.shard_map(call, mesh=mesh, in_specs=(in_specs,), out_specs=out_spec)
    if subject.with_gradients:
        jax.eval_shape(functools.partial(pull_back, sharded), arrays, draw_cotangent(case).out)
    else:
        jax.eval_shape(sharded, arrays)
    yield Judgement(observable="traced", verdict=records.PASS)


def _divisible(case: Case) -> Case:
    """The case with a batch and key/value heads that four devices can share."""
    group = case.num_q_heads // case.num_kv_heads
    return dataclasses.replace(case, batch=_DEVICES, num_kv_heads=_DEVICES, num_q_heads=_DEVICES * group)


def _balanced(case: Case) -> Case:
    return dataclasses.replace(case, mask=f"balanced-{_DEVICES}")


def _spec(*axes: str | None) -> Any:
    return PartitionSpec(*axes)  # type: ignore[no-untyped-call] # untyped upstream


def _specs(problem: Problem, letters: str) -> dict[str, Any]:
    """How the operands of `problem` are shared where devices share the axes `letters`; the others have all of it."""

    def spec(operand: Operand, x: np.ndarray, axes: Axes) -> Any:
        shared = [axis for letter in letters if (axis := operand.axis_of(x, axes, letter)) is not None]
        return _spec(*(None,) * shared[0], _AXIS) if shared else _spec()

    return {o.name: o.each(getattr(problem, o.name), functools.partial(spec, o)) for o in OPERANDS}


Call = Callable[[Arrays], Any]
Specs = Mapping[str, Any]
Shard = Callable[[Subject, Problem], tuple[Call, Arrays, Specs, Any]]


def _over_batch(subject: Subject, problem: Problem) -> tuple[Call, Arrays, Specs, Any]:
    call, arrays = subject.executor.bind(problem)
    rows = _spec(_AXIS)
    own = {name: rows for name in _of_the_mask(arrays) if arrays[name].shape[0] == problem.q.shape[0]}
    return call, arrays, _specs(problem, "B") | own, rows


def _of_the_mask(arrays: Arrays) -> set[str]:
    """Names of the arrays that the mask was lowered to: those with a value for each batch row are sharded with them."""
    return set(arrays) - {operand.name for operand in OPERANDS}


def _over_heads(subject: Subject, problem: Problem) -> tuple[Call, Arrays, Specs, Any]:
    call, arrays = subject.executor.bind(problem)
    return call, arrays, _specs(problem, "NK"), _spec(None, None, _AXIS)


def _over_queries(subject: Subject, problem: Problem) -> tuple[Call, Arrays, Specs, Any]:
    """Each device has some of the queries, and masks with the rows that are theirs."""
    q_length, kv_length = problem.q.shape[1], problem.k.shape[1]
    dense = problem.mask.dense(q_length, kv_length)
    local = q_length // _DEVICES
    here = problem.along("T", lambda x, axis: x.take(range(local), axis))
    calls = [
        _with_mask(subject, dataclasses.replace(here, mask=Dense(dense[..., n * local : (n + 1) * local, :])))
        for n in range(_DEVICES)
    ]

    def call(arrays: Arrays) -> Any:
        return jax.lax.switch(jax.lax.axis_index(_AXIS), calls, arrays)

    arrays = {name: x for name, x in subject.executor.bind(problem)[1].items() if name != "mask"}
    return call, arrays, _specs(problem, "T"), _spec(None, _AXIS)


def _with_mask(subject: Subject, problem: Problem) -> Call:
    """The call with the mask of `problem`, be it static or an array."""
    call, arrays = subject.executor.bind(problem)
    extra = {name: x for name, x in arrays.items() if name == "mask"}
    return lambda moving: call({**moving, **extra})


def _judge(subject: Subject, case: Case, shard: Shard) -> Iterator[Judgement]:
    if (reason := _declined(subject, case)) is not None:
        yield unsupported("all", reason)
        return
    problem = draw(case)
    do = np.where(judged := subject.judged_out_of(problem), drawn := draw_cotangent(case).out, np.zeros_like(drawn))
    call, arrays, specs, out_spec = shard(subject, problem)
    in_specs = {name: specs.get(name, _spec()) for name in arrays}
    mesh = jax.make_mesh((_DEVICES,), (_AXIS,), axis_types=(AxisType.Auto,))
    sharded = jax.shard_map(call, mesh=mesh, in_specs=(in_specs,), out_specs=out_spec, check_vma=False)
    if subject.with_gradients:
        out, gradients = subject.executor.jit(functools.partial(pull_back, sharded))(arrays, do)
    else:
        out, gradients = subject.executor.jit(sharded)(arrays), {}
    yield from _judge_results(subject, problem, do, judged, out, gradients)


def _judge_results(
    subject: Subject, problem: Problem, do: np.ndarray, judged: np.ndarray, out: Any, gradients: Arrays
) -> Iterator[Judgement]:
    cotangents = (Cotangent("random", do),) if subject.with_gradients else ()
    expected = subject.expect(problem, cotangents)
    yield _compared(subject, "out", out, expected.forward["out"], judged)
    for operand, name in GRADIENT_OF.items():
        if operand in gradients and name in subject.implementation.gradients:
            yield _compared(subject, name, gradients[operand], expected.gradients[0][name], None)


def _declined(subject: Subject, case: Case) -> str | None:
    supports = subject.implementation.supports
    if (reason := supports(case)) is not None or not case.mask.startswith("balanced"):
        return reason
    return supports(dataclasses.replace(case, mask="dense-d40"))


def _compared(subject: Subject, name: str, got: Any, expected: Any, judged: np.ndarray | None) -> Judgement:
    return subject.judge(name, np.asarray(got), expected, judged)
