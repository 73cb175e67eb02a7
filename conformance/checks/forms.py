"""Forms of an argument that mean the same: who takes them must give what they mean, and who does not must say so.

A scale may come as an integer, out of NumPy, traced, or as zero. A window may come in a list, a bias in a dtype of its
own, a mask or a bias with an axis that rows or heads share. What is silently taken for something else is wrong; what is
refused is unsupported, and shown.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from cases.case import Case
from cases.masks import Dense
from cases.moba_mask import depends_on_data
from cases.operand_values import Cotangent, Problem, draw_cotangent, draw_problem
from conformance import records
from conformance.check_api.judgement import Judgement, build_unsupported
from conformance.check_api.subject import Subject
from conformance.executor_tasks import single_calls


@dataclasses.dataclass(frozen=True)
class _Form:
    """An argument in another form.

    Attributes:
      name: the observable is `out` with this name behind it.
      meant: what the call means.
      given: arguments in the form that is asked, in place of those that `meant` gives.
      case: of what dtype it is, if not of that of the subject.
    """

    name: str
    meant: Problem
    given: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    case: Case | None = None


def check_forms(subject: Subject) -> Iterator[Judgement]:
    """Numbers of every type, windows in lists, shared axes and narrow biases mean what they say, or are refused."""
    for form in _iter_forms(subject):
        yield _judge_form(subject, form)
    yield from _check_shared_bias_residuals(subject)
    yield from _check_shared_bias_gradient(subject)


def _judge_form(subject: Subject, form: _Form) -> Judgement:
    label = f"out.{form.name}"
    subject = dataclasses.replace(subject, case=form.case or subject.case)
    try:
        got = subject.executor.run(single_calls.run_with_arguments, form.meant, form.given)
    except Exception as error:  # whatever is raised, nothing wrong was returned
        return build_unsupported(label, f"{type(error).__name__}: {error}".split("\n")[0])
    expected = subject.expect(form.meant).forward["out"]
    found = subject.judge("out", got, expected, subject.find_judged_rows(form.meant), label=label)
    if found.verdict == records.PASS and got.dtype != form.meant.q.dtype:
        # Right, and wider, as JAX's rules of promotion have it: nothing is taken for something else.
        return build_unsupported(label, f"the argument makes the result {got.dtype}, where q is {form.meant.q.dtype}")
    return found


def _iter_forms(subject: Subject) -> Iterator[_Form]:
    problem = subject.problem
    flags = subject.executor.run(single_calls.find_mask_arguments, problem)
    for name in ("scale", "soft_cap"):
        if getattr(problem, name) is not None:
            yield from _iter_number_forms(subject, name)
    if problem.scale is not None:
        # A number like any other, and none where somebody tests for truth.
        yield _Form("scale_zero", dataclasses.replace(problem, scale=0.0))
        if not depends_on_data(problem.mask):
            # With queries of the other sign a scale below zero means what it means above: signs are exact, so the
            # bounds are the same too. Gates have no scale, and would choose other keys.
            yield _Form("scale_below_zero", problem, {"scale": -problem.scale, "q": -problem.q})
    if flags["causal"]:
        yield _Form("causal_numpy", problem, {"causal": np.True_})
    if (window := flags["window"]) is not None:
        yield _Form("window_list", problem, {"window": list(window)})
        yield _Form("window_numpy", problem, {"window": tuple(None if n is None else np.int32(n) for n in window)})
    if flags["mask"] and subject.case.mask.startswith("dense-"):
        yield from _iter_mask_forms(problem)
    if problem.bias is not None and (subject.case.bias == "bias" or not _takes_any_bias(subject)):
        yield from _iter_bias_forms(problem)
        yield from _iter_rank_three_bias(subject)


def _takes_any_bias(subject: Subject) -> bool:
    return subject.implementation.supports(dataclasses.replace(subject.case, bias="bias")) is None


def _iter_number_forms(subject: Subject, name: str) -> Iterator[_Form]:
    """A whole number as an integer; a traced one; and beside operands of 16 bits, which none must make wider."""
    whole: dict[str, Any] = {name: 1.0}
    yield _Form(f"{name}_int", dataclasses.replace(subject.problem, **whole), {name: 1})
    traced = np.asarray(getattr(subject.problem, name), np.float32)
    as_narrow: dict[str, Any] = {name: float(traced)}
    yield _Form(f"{name}_traced", dataclasses.replace(subject.problem, **as_narrow), {name: traced})
    narrow = dataclasses.replace(subject.case, dtype="bf16")
    if subject.implementation.supports(narrow) is None:
        problem = draw_problem(narrow)
        number = getattr(problem, name)
        exact: dict[str, Any] = {name: float(np.float32(number))}
        meant = dataclasses.replace(problem, **exact)
        yield _Form(f"{name}_numpy", meant, {name: np.float32(number)}, narrow)
        yield _Form(f"{name}_jax", meant, {name: jnp.float32(number)}, narrow)


def _iter_mask_forms(problem: Problem) -> Iterator[_Form]:
    """Booleans that heads and rows, or heads and keys, share; and without the axes of batch and heads."""
    whole = problem.resolved_mask.dense(problem.q.shape[1], problem.k.shape[1])[:1, :1]
    key = int(np.argmin(np.abs(whole[0, 0].mean(axis=0) - 0.5)))  # that some rows see, and some do not
    for name, part in (("rows", whole[:, :, -1:, :]), ("keys", whole[..., key : key + 1])):
        meant = dataclasses.replace(problem, mask=Dense(np.ascontiguousarray(np.broadcast_to(part, whole.shape))))
        yield _Form(f"mask_shared_by_{name}", meant, {"mask": part})
    yield _Form("mask_of_rank_two", dataclasses.replace(problem, mask=Dense(whole)), {"mask": whole[0, 0]})


def _iter_bias_forms(problem: Problem) -> Iterator[_Form]:
    """Numbers that rows or keys share; in 16 bits beside operands of 32; and without the axes of batch and heads."""
    assert problem.bias is not None
    parts = {
        "bias_shared_by_rows": problem.bias[:, :, -1:, :],
        "bias_shared_by_keys": problem.bias[:, :, :, :1],
        "bias_narrow": problem.bias.astype(ml_dtypes.bfloat16),
    }
    for name, bias in parts.items():
        yield _Form(name, dataclasses.replace(problem, bias=bias))
    plane = problem.bias[:1, :1]
    yield _Form("bias_of_rank_two", dataclasses.replace(problem, bias=plane), {"bias": plane[0, 0]})


def _check_shared_bias_residuals(subject: Subject) -> Iterator[Judgement]:
    """What a bias with one column for all keys does where it changes no weight: it is in the residuals."""
    if subject.problem.bias is None or not subject.implementation.residuals:
        return
    shared = dataclasses.replace(subject.problem, bias=subject.problem.bias[..., :1])
    try:
        got = subject.executor.residuals(shared).values
    except Exception as error:  # as above
        yield build_unsupported("logsumexp.bias_shared_by_keys", f"{type(error).__name__}: {error}".split("\n")[0])
        return
    expected = subject.expect(shared).forward
    live = ~shared.empty_rows & shared.decided
    for name in subject.implementation.residuals:
        yield subject.judge(name, got[name], expected[name], live, label=f"{name}.bias_shared_by_keys")


def _check_shared_bias_gradient(subject: Subject) -> Iterator[Judgement]:
    """What a bias with one column for all keys is pulled back to: the sum over the keys of every row."""
    if subject.problem.bias is None or not subject.has_gradients or "dbias" not in subject.implementation.gradients:
        return
    # Without a sink, what all keys share changes nothing.
    beside = dataclasses.replace(subject.case, sinks=True)
    if subject.implementation.supports(beside) is None:
        subject = dataclasses.replace(subject, case=beside)
    problem = subject.problem
    assert problem.bias is not None
    shared = dataclasses.replace(problem, bias=problem.bias[..., :1])
    drawn = draw_cotangent(subject.case).out
    cotangent = Cotangent("random", np.where(subject.find_judged_rows(shared), drawn, np.zeros_like(drawn)))
    label = "dbias.bias_shared_by_keys"
    try:
        got = subject.executor.gradients(shared, cotangent).values
    except Exception as error:  # as above
        yield build_unsupported(label, f"{type(error).__name__}: {error}".split("\n")[0])
        return
    expected = subject.expect(shared, [cotangent])
    judged = subject.find_judged_rows(shared)
    yield subject.judge("out", got["out"], expected.forward["out"], judged, label="out.bias_shared_beside_sinks")
    yield subject.judge("dbias", got["dbias"], expected.gradients[0]["dbias"], label=label)


def _iter_rank_three_bias(subject: Subject) -> Iterator[_Form]:
    """A bias without the axis of the batch, where there are as many batch rows as heads: only the order tells them."""
    square = dataclasses.replace(subject.case, batch=subject.case.num_q_heads)
    if subject.implementation.supports(square) is None:
        problem = draw_problem(square)
        assert problem.bias is not None
        shared = problem.bias[:1]
        yield _Form("bias_of_rank_three", dataclasses.replace(problem, bias=shared), {"bias": shared[0]}, square)
