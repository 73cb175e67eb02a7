"""Operands: an accepted one must matter as the oracle says, a wrong one must be named in the error."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from cases.masks import Causal, Full, OwnWindow, Window, list_conjuncts
from cases.moba_mask import Moba
from cases.operand_registry import OPERANDS, OPTIONAL, REMOVABLE
from cases.operand_values import Problem
from cases.storage_forms.form_registry import FORMS
from cases.storage_forms.storage_layout import Storage
from conformance import records
from conformance.check_api.judgement import Judgement, build_unsupported
from conformance.check_api.subject import Subject
from conformance.executor_tasks import single_calls
from conformance.truth.rounding_bounds import Bounded, compute_expectation


def check_arguments(subject: Subject) -> Iterator[Judgement]:
    """The result with an accepted argument differs from the result without it as the oracle says."""
    for name, without in iter_without_argument(subject.problem):
        arithmetic = subject.implementation.arithmetic
        other = compute_expectation(without, arithmetic, empty_rows=subject.empty_rows).forward["out"]
        here = subject.expectation.forward["out"]
        effect = Bounded(here.value - other.value, here.bound + other.bound)
        with_it = subject.forward.values["out"].astype(np.float64)
        without_it = subject.executor.forward(without).values["out"].astype(np.float64)
        both = subject.judged_out & ~without.empty_rows.transpose(0, 2, 1)[..., None]
        yield subject.judge("out", with_it - without_it, effect, both, label=f"effect_of_{name}")


def iter_without_argument(problem: Problem) -> Iterator[tuple[str, Problem]]:
    """The arguments that the problem has and may lack, each with the problem without it."""
    if isinstance(problem.mask, Moba):
        every = dataclasses.replace(problem.mask, topk=problem.mask.chunks(problem.k.shape[1]))
        yield "gates", dataclasses.replace(problem, mask=every)
    elif problem.storage is not None:
        if (widened := _widen_window(problem, problem.storage)).mask != problem.mask:
            yield "window", widened
    elif problem.mask != Full():
        yield "mask", dataclasses.replace(problem, mask=Full())
    for operand in REMOVABLE:
        if getattr(problem, operand.name) is not None:
            yield operand.name, problem.without(operand.name)


def _widen_window(problem: Problem, storage: Storage) -> Problem:
    """Return the problem without a window, or with the widest one that its storage allows: the lengths stay.

    A window that is the widest already becomes the narrowest.
    """
    widest = FORMS[storage.form].find_widest_left(storage)

    def widen(window: OwnWindow) -> OwnWindow:
        return dataclasses.replace(window, left=0 if widest is not None and window.left == widest else widest)

    parts = [widen(x) if isinstance(x, OwnWindow) else x for x in list_conjuncts(problem.mask)]
    return dataclasses.replace(problem, mask=functools.reduce(lambda one, other: one & other, parts))


def check_errors(subject: Subject) -> Iterator[Judgement]:
    """Wrong operands raise an error that names the operand, before any work; what no result would be right for too."""
    if not subject.implementation.validates:
        return
    if (kind := subject.implementation.storage) is not None:
        yield build_unsupported("operands", f"what is wrong of the operands of a {kind} call has no rule yet")
        return
    refused = {o.name for o in OPTIONAL if o.opt_in and o.name not in subject.implementation.offers}
    if "score_mod" not in refused:
        number = _WrongCall("score_mod_number", ("score_mod",), _build_arguments(subject.problem, score_mod=2.0))
        yield _judge_error(subject, number, (ValueError, TypeError))
    for wrong, name, problem in (*_iter_wrong_operands(subject.problem), *_iter_wrong_shapes(subject.problem, refused)):
        yield _judge_error(subject, _WrongCall(wrong, (name,), _build_arguments(problem)), (ValueError,))
    for asked in (
        *_iter_empty_operands(subject.problem),
        *_iter_wrong_dtypes(subject.problem),
        *_iter_wrong_types(subject.problem),
    ):
        yield _judge_error(subject, asked, (ValueError, TypeError))
    yield from _check_second_derivatives(subject)


@dataclasses.dataclass(frozen=True)
class _WrongCall:
    """A call that should be refused.

    Attributes:
      what: the observable.
      names: the message has one of these words.
      given: the arguments.
      traced: the one among them that is traced, if any.
      meant: what it could mean to an implementation that takes it: then the result must be right; none if nothing.
    """

    what: str
    names: tuple[str, ...]
    given: Mapping[str, Any]
    traced: str = ""
    meant: Problem | None = None


def _build_arguments(problem: Problem, **changed: Any) -> dict[str, Any]:
    """The arguments of the canonical call, some of them changed."""
    values = {operand.name: getattr(problem, operand.name) for operand in OPERANDS}
    return {"mask": problem.mask, **{name: x for name, x in values.items() if x is not None}, **changed}


def _judge_error(subject: Subject, wrong: _WrongCall, kinds: tuple[type[Exception], ...]) -> Judgement:
    said = f"must be a {' or a '.join(kind.__name__ for kind in kinds)} naming {wrong.names[0]!r}"
    try:
        got = subject.executor.run(single_calls.run_exactly, wrong.given, wrong.traced)
    except NotImplementedError as error:
        return Judgement(observable=wrong.what, verdict=records.UNSUPPORTED, reason=str(error))
    except kinds as error:
        if any(re.search(rf"(?<![a-z]){name}", str(error), re.IGNORECASE) for name in wrong.names):
            return Judgement(observable=wrong.what, verdict=records.PASS)
        reason = f"the {type(error).__name__} does not name {wrong.names[0]!r}: {error}".split("\n")[0]
        return Judgement(observable=wrong.what, verdict=records.FAIL, reason=reason)
    except Exception as error:  # any other type is the finding
        reason = f"raises {type(error).__name__}, {said}: {error}".split("\n")[0]
        return Judgement(observable=wrong.what, verdict=records.FAIL, reason=reason)
    accepted = f"a wrong {wrong.names[0]} is accepted"
    if wrong.meant is None:
        return Judgement(observable=wrong.what, verdict=records.FAIL, reason=accepted)
    return _judge_accepted(subject, wrong, got, accepted)


def _judge_accepted(subject: Subject, wrong: _WrongCall, got: np.ndarray, accepted: str) -> Judgement:
    """What was taken as it was meant must be right; where there is nothing to be right, it has the shape and no NaN."""
    meant = wrong.meant
    assert meant is not None
    if 0 in (*meant.q.shape, *meant.k.shape, *meant.v.shape):
        shape = (*meant.q.shape[:3], meant.v.shape[3])
        if got.shape == shape and np.isfinite(got.astype(np.float64)).all():
            return Judgement(observable=wrong.what, verdict=records.PASS)
        reason = f"{accepted}, and the result is no array {list(shape)} of finite numbers"
        return Judgement(observable=wrong.what, verdict=records.FAIL, reason=reason)
    expected, judged = subject.expect(meant).forward["out"], subject.find_judged_rows(meant)
    found = subject.judge("out", got, expected, judged, label=wrong.what)
    return dataclasses.replace(found, reason=f"{accepted}: {found.reason}" if found.reason else "")


def _check_second_derivatives(subject: Subject) -> Iterator[Judgement]:
    """A gradient of a gradient is computed, or a sentence says that it is not."""
    if not subject.has_gradients or "dq" not in subject.implementation.gradients:
        return
    name = "second_derivatives"
    try:
        found = subject.executor.run(single_calls.compute_second_derivative, subject.problem)
    except NotImplementedError as error:
        said = "derivative" in str(error) or "differentia" in str(error)
        reason = "" if said else f"the NotImplementedError does not say that derivatives are first ones only: {error}"
        yield Judgement(
            observable=name, verdict=records.UNSUPPORTED if said else records.FAIL, reason=reason or str(error)
        )
    except Exception as error:  # whatever it is, it is not a sentence about derivatives
        reason = f"a grad of grad raises {type(error).__name__}, must be a NotImplementedError that says so: {error}"
        yield Judgement(observable=name, verdict=records.FAIL, reason=reason.split("\n")[0])
    else:
        finite = bool(np.isfinite(found).all())
        reason = "" if finite else "a grad of grad is not finite"
        yield Judgement(observable=name, verdict=records.PASS if finite else records.FAIL, reason=reason)


_OPERAND_WORDS = {
    "q": ("q", "query", "queries"),
    "k": ("k", "key", "keys"),
    "v": ("v", "value", "values"),
}


def _iter_empty_operands(problem: Problem) -> Iterator[_WrongCall]:
    """Operands with an axis of length 0; who takes them gives an empty or finite result."""
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
    for what, (changed, names) in cut.items():
        mask = problem.mask if isinstance(problem.mask, Causal | Window) else Full()
        smaller = dataclasses.replace(problem, **changed, mask=mask)
        yield _WrongCall(what, (*names, "size", "length"), _build_arguments(smaller), meant=smaller)


def _iter_wrong_dtypes(problem: Problem) -> Iterator[_WrongCall]:
    """Operands of each kind of dtype that the contract does not have: `out` would be in it too."""
    changed = ("q",) if problem.kv_scales is not None else ("q", "k", "v")
    for dtype in (np.int8, np.int32, np.bool_, np.complex64, ml_dtypes.float8_e4m3fn, np.float64):
        name = np.dtype(dtype).name
        cast = {operand: getattr(problem, operand).astype(dtype) for operand in changed}
        yield _WrongCall(f"dtype_{name}", ("dtype", name), _build_arguments(problem, **cast))


def _iter_wrong_types(problem: Problem) -> Iterator[_WrongCall]:
    """Lists, numbers of another kind, and numbers that are traced."""
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


def _iter_wrong_shapes(problem: Problem, refused: Collection[str]) -> Iterator[tuple[str, str, Problem]]:
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
