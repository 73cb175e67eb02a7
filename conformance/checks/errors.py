"""Check `errors`: calls with wrong operands raise an error that names the operand.

The check makes calls with wrong shapes, dtypes, types and values, for implementations that declare `validates`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from cases.masks import Causal, Full, Window
from cases.operand_registry import OPERANDS, OPTIONAL
from cases.operand_values import Problem
from conformance.check_api.judgement import Judgement, build_unsupported
from conformance.check_api.subject import Subject
from conformance.execution import kernel_errors
from conformance.executor_tasks import single_calls
from reports import records


def check_errors(subject: Subject) -> Iterator[Judgement]:
    """Check that wrong operands raise an error naming the operand, before any computation."""
    if not subject.implementation.validates:
        return
    if (kind := subject.implementation.storage) is not None:
        yield build_unsupported("operands", f"the contract does not define wrong operands of a {kind} call")
        return
    refused = {o.name for o in OPTIONAL if o.opt_in and o.name not in subject.implementation.offers}
    refused |= {o.name for o in OPTIONAL if o.has_own_cases and getattr(subject.problem, o.name) is None}
    if "score_mod" not in refused:
        call = _WrongCall("score_mod_number", ("score_mod",), _build_arguments(subject.problem, score_mod=2.0))
        yield _judge_error(subject, call, (ValueError, TypeError))
    for observable, name, problem in (
        *_iter_wrong_operands(subject.problem),
        *_iter_wrong_shapes(subject.problem, refused),
    ):
        yield _judge_error(subject, _WrongCall(observable, (name,), _build_arguments(problem)), (ValueError,))
    for call in (
        *_iter_empty_operands(subject.problem),
        *_iter_wrong_dtypes(subject.problem),
        *_iter_wrong_types(subject.problem),
    ):
        yield _judge_error(subject, call, (ValueError, TypeError))
    yield from _check_second_derivatives(subject)


@dataclasses.dataclass(frozen=True)
class _WrongCall:
    """A call with wrong arguments, which an implementation should refuse."""

    observable: str
    names: tuple[str, ...]  # words, one of which the error's message must contain
    given: Mapping[str, Any]
    traced: str = ""  # the name of the argument that is a tracer in the call; empty if there is none
    # The problem that the arguments may reasonably mean. An implementation may accept the call if its result is right
    # for this problem. None if the call must be refused.
    meant: Problem | None = None


def _build_arguments(problem: Problem, **changed: Any) -> dict[str, Any]:
    """Build the arguments of the canonical call on a problem, with those in `changed` replaced."""
    values = {operand.name: getattr(problem, operand.name) for operand in OPERANDS}
    return {"mask": problem.mask, **{name: x for name, x in values.items() if x is not None}, **changed}


def _judge_error(subject: Subject, wrong: _WrongCall, kinds: tuple[type[Exception], ...]) -> Judgement:
    """Make a wrong call, and judge the error that it raises or the result that it returns.

    The error must be one of the types `kinds`. `NotImplementedError` is reported as unsupported.
    """
    requirement = f"must be a {' or a '.join(kind.__name__ for kind in kinds)} naming {wrong.names[0]!r}"
    try:
        got = subject.executor.run(single_calls.run_exactly, wrong.given, wrong.traced)
    except NotImplementedError as error:
        return Judgement(observable=wrong.observable, verdict=records.UNSUPPORTED, reason=str(error))
    except kinds as error:
        if any(re.search(rf"(?<![a-z]){name}", str(error), re.IGNORECASE) for name in wrong.names):
            return Judgement(observable=wrong.observable, verdict=records.PASS)
        reason = f"the {type(error).__name__} does not name {wrong.names[0]!r}: {error}".split("\n")[0]
        return Judgement(observable=wrong.observable, verdict=records.FAIL, reason=reason)
    except Exception as error:  # an error of another type is a failure
        reason = f"raises {type(error).__name__}, {requirement}: {error}".split("\n")[0]
        return Judgement(observable=wrong.observable, verdict=records.FAIL, reason=reason)
    accepted = f"a wrong {wrong.names[0]} is accepted"
    if wrong.meant is None:
        return Judgement(observable=wrong.observable, verdict=records.FAIL, reason=accepted)
    return _judge_accepted(subject, wrong, got, accepted)


def _judge_accepted(subject: Subject, wrong: _WrongCall, got: np.ndarray, accepted: str) -> Judgement:
    """Judge the result of a wrong call that was accepted, by the oracle on the problem `wrong.meant`.

    If that problem has an axis of length 0, the result must only have the right shape and finite values.
    """
    meant = wrong.meant
    assert meant is not None
    if 0 in (*meant.q.shape, *meant.k.shape, *meant.v.shape):
        shape = (*meant.q.shape[:3], meant.v.shape[3])
        if got.shape == shape and np.isfinite(got.astype(np.float64)).all():
            return Judgement(observable=wrong.observable, verdict=records.PASS)
        reason = f"{accepted}, and the result is not an array {list(shape)} of finite numbers"
        return Judgement(observable=wrong.observable, verdict=records.FAIL, reason=reason)
    expected, judged = subject.expect(meant).forward["out"], subject.find_judged_rows(meant)
    judgement = subject.judge("out", got, expected, judged, label=wrong.observable)
    return dataclasses.replace(judgement, reason=f"{accepted}: {judgement.reason}" if judgement.reason else "")


def _check_second_derivatives(subject: Subject) -> Iterator[Judgement]:
    """Check that a gradient of a gradient is finite, or refused by an error about derivatives."""
    if not subject.has_gradients or "dq" not in subject.implementation.gradients:
        return
    name = "second_derivatives"
    try:
        derivative = subject.executor.run(single_calls.compute_second_derivative, subject.problem)
    except NotImplementedError as error:
        names_derivatives = "derivative" in str(error) or "differentia" in str(error)
        reason = (
            ""
            if names_derivatives
            else f"the NotImplementedError does not say that only first derivatives are supported: {error}"
        )
        yield Judgement(
            observable=name,
            verdict=records.UNSUPPORTED if names_derivatives else records.FAIL,
            reason=reason or str(error),
        )
    except Exception as error:  # an error of another type does not tell the user that derivatives are the reason
        if kernel_errors.is_refused_precision(error):
            raise
        reason = (
            f"a grad of grad raises {type(error).__name__}, must be a NotImplementedError about derivatives: {error}"
        )
        yield Judgement(observable=name, verdict=records.FAIL, reason=reason.split("\n")[0])
    else:
        finite = bool(np.isfinite(derivative).all())
        reason = "" if finite else "a grad of grad is not finite"
        yield Judgement(observable=name, verdict=records.PASS if finite else records.FAIL, reason=reason)


_OPERAND_WORDS = {
    "q": ("q", "query", "queries"),
    "k": ("k", "key", "keys"),
    "v": ("v", "value", "values"),
}


def _iter_empty_operands(problem: Problem) -> Iterator[_WrongCall]:
    """Yield calls with an axis of length 0; an implementation may accept one and return finite numbers."""
    scales = {} if problem.kv_scales is None else {"kv_scales": tuple(x[:, :1] for x in problem.kv_scales)}
    cut: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
        "no_queries": ({"q": problem.q[:, :0]}, _OPERAND_WORDS["q"]),
        "no_keys": (
            {"k": problem.k[:, :0], "v": problem.v[:, :0], **scales},
            (*_OPERAND_WORDS["k"], *_OPERAND_WORDS["v"]),
        ),
        "no_head_dim": ({"q": problem.q[..., :0], "k": problem.k[..., :0]}, ("q", "k", "head_dim", "depth")),
        "no_v_head_dim": ({"v": problem.v[..., :0]}, (*_OPERAND_WORDS["v"], "head_dim", "depth")),
    }
    for observable, (changed, names) in cut.items():
        mask = problem.mask if isinstance(problem.mask, Causal | Window) else Full()
        smaller = dataclasses.replace(problem, **changed, mask=mask)
        yield _WrongCall(observable, (*names, "size", "length"), _build_arguments(smaller), meant=smaller)


def _iter_wrong_dtypes(problem: Problem) -> Iterator[_WrongCall]:
    """Yield calls whose q, k and v have a dtype that the contract excludes; with a quantised cache, only q has it."""
    changed = ("q",) if problem.kv_scales is not None else ("q", "k", "v")
    for dtype in (np.int8, np.int32, np.bool_, np.complex64, ml_dtypes.float8_e4m3fn, np.float64):
        name = np.dtype(dtype).name
        cast = {operand: getattr(problem, operand).astype(dtype) for operand in changed}
        yield _WrongCall(f"dtype_{name}", ("dtype", name), _build_arguments(problem, **cast))


def _iter_wrong_types(problem: Problem) -> Iterator[_WrongCall]:
    """Yield calls with lists, arrays of a wrong type, and traced numbers."""
    yield _WrongCall("q_list", _OPERAND_WORDS["q"], _build_arguments(problem, q=problem.q.tolist()), meant=problem)
    rows, columns = np.zeros(problem.q.shape[:2], np.float32), np.zeros(problem.k.shape[:2], np.float32)
    lists = tuple(x.astype(int).tolist() for x in (rows, columns))
    ids = ("segment_ids", "segment ids")
    yield _WrongCall("segment_ids_list", ids, _build_arguments(problem, segment_ids=lists), meant=problem)
    yield _WrongCall("segment_ids_float", ids, _build_arguments(problem, segment_ids=(rows, columns)), meant=problem)
    sinks = dataclasses.replace(problem, sinks=np.ones(problem.q.shape[2], np.float32))
    assert sinks.sinks is not None
    yield _WrongCall(
        "sinks_int", ("sinks",), _build_arguments(problem, sinks=sinks.sinks.astype(np.int32)), meant=sinks
    )
    yield _WrongCall("sinks_list", ("sinks",), _build_arguments(problem, sinks=sinks.sinks.tolist()), meant=sinks)
    biased = dataclasses.replace(problem, bias=np.ones((1, 1, 1, problem.k.shape[1]), np.float32))
    assert biased.bias is not None
    yield _WrongCall("bias_int", ("bias",), _build_arguments(problem, bias=biased.bias.astype(np.int32)), meant=biased)
    for name, number in (("soft_cap", 2.0), ("scale", 0.5)):
        changed: dict[str, Any] = {name: number}
        meant = dataclasses.replace(problem, **changed)
        yield _WrongCall(
            f"{name}_traced", (name, name.replace("_", "")), _build_arguments(meant), traced=name, meant=meant
        )


def _iter_wrong_operands(problem: Problem) -> Iterator[tuple[str, str, Problem]]:
    """Yield problems with an invalid value, or with shapes or dtypes that contradict each other.

    Each is `(name of the judgement, word that the error must contain, problem)`.
    """
    q, k, v = problem.q, problem.k, problem.v
    num_q_heads = q.shape[2]
    change = dataclasses.replace
    yield "q_rank", "q", change(problem, q=q[0])
    yield "head_dim", "head_dim", change(problem, k=np.concatenate([k, k], axis=-1))
    yield "kv_length", "v", change(problem, v=v[:, :-1])
    yield "batch", "batch", change(problem, k=np.concatenate([k, k]), v=np.concatenate([v, v]))
    many_k, many_v = (np.repeat(x[:, :, :1], num_q_heads + 1, axis=2) for x in (k, v))
    yield "head_count", "heads", change(problem, k=many_k, v=many_v)
    other = np.float16 if q.dtype != np.float16 else np.float32
    yield "dtype", "dtype", change(problem, k=k.astype(other))
    yield "soft_cap", "soft_cap", change(problem, soft_cap=0.0)
    yield "negative_soft_cap", "soft_cap", change(problem, soft_cap=-30.0)
    if problem.kv_scales is not None:
        scales = problem.kv_scales
        yield "kv_scales", "kv_scales", change(problem, kv_scales=(scales[0], scales[1][..., :0]))


def _iter_wrong_shapes(problem: Problem, refused: Collection[str]) -> Iterator[tuple[str, str, Problem]]:
    """Yield `(observable, operand, problem)` for optional arrays with one query or head too many.

    Operands in `refused` are skipped: the implementation does not offer them, or they have their own cases.
    """
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
