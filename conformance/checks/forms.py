"""Check `forms`: an argument in another form gives the result that it means, or is refused.

A scale may be an integer, a NumPy number, traced, or zero. A window may be a list. A bias may have its own dtype. A
mask or a bias may have axes of length 1, or lack leading axes. A `mask_mod` may differ between heads. An
implementation must return the result that the argument means, or raise an exception. A result for another meaning is a
failure. An exception of any type is reported as unsupported.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from cases.case import Case
from cases.masks import Dense, HeadWindow
from cases.moba_mask import depends_on_data
from cases.operand_values import Cotangent, Problem, draw_cotangent, draw_problem
from conformance.check_api.judgement import Judgement, build_unsupported
from conformance.check_api.subject import Subject
from conformance.executor_tasks import single_calls
from reports import records


@dataclasses.dataclass(frozen=True)
class _Form:
    """A call with an argument in another form."""

    name: str  # the name of the form. The observable is `out.` followed by this name.
    meant: Problem  # the problem that the call means, which the oracle gets
    given: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    case: Case | None = None  # the case of `meant`, if it is not the subject's case


def check_forms(subject: Subject) -> Iterator[Judgement]:
    """Check that arguments in other forms, such as a scale as an integer, mean the same or are refused."""
    for form in _iter_forms(subject):
        yield _judge_form(subject, form)
    yield from _check_shared_bias_residuals(subject)
    yield from _check_shared_bias_gradient(subject)


def _judge_form(subject: Subject, form: _Form) -> Judgement:
    """Make the call of one form, and judge its result by the problem that it means."""
    label = f"out.{form.name}"
    subject = dataclasses.replace(subject, case=form.case or subject.case)
    try:
        got = subject.executor.run(single_calls.run_with_arguments, form.meant, form.given)
    except Exception as error:  # an exception of any type is a refusal: no wrong result was returned
        return build_unsupported(label, f"{type(error).__name__}: {error}".split("\n")[0])
    expected = subject.expect(form.meant).forward["out"]
    judgement = subject.judge("out", got, expected, subject.find_judged_rows(form.meant), label=label)
    if judgement.verdict == records.PASS and got.dtype != form.meant.q.dtype:
        # The result is right, so the argument was not misread. Only its dtype was promoted, as JAX promotes dtypes.
        return build_unsupported(label, f"the argument makes the result {got.dtype}, where q is {form.meant.q.dtype}")
    return judgement


def _iter_forms(subject: Subject) -> Iterator[_Form]:
    """Yield the forms that apply to the case."""
    problem = subject.problem
    flags = subject.executor.run(single_calls.find_mask_arguments, problem)
    for name in ("scale", "soft_cap"):
        if getattr(problem, name) is not None:
            yield from _iter_number_forms(subject, name)
    if problem.scale is not None:
        # Zero is a valid scale, but Python takes it for false: with `if scale`, a kernel would use the default scale.
        yield _Form("scale_zero", dataclasses.replace(problem, scale=0.0))
        if not depends_on_data(problem.mask):
            # Negating both the scale and the queries leaves the logits as they are. Signs are exact, so the bounds are
            # the same too. A mask that depends on data is excluded: its gates are computed without the scale, so
            # negated queries would choose other keys.
            yield _Form("scale_below_zero", problem, {"scale": -problem.scale, "q": -problem.q})
    if flags["causal"]:
        yield _Form("causal_numpy", problem, {"causal": np.True_})
    if (window := flags["window"]) is not None:
        yield _Form("window_list", problem, {"window": list(window)})
        yield _Form("window_numpy", problem, {"window": tuple(None if n is None else np.int32(n) for n in window)})
    if flags["mask"] and subject.case.mask.startswith("dense-"):
        yield from _iter_mask_forms(problem)
        yield from _iter_square_forms(subject, "mask", "densehead-d60", "densebatch-d60")
    if subject.case.mask == "causal" and subject.case.storage is None:
        yield from _iter_mask_functions(subject)
    if problem.bias is not None and (subject.case.bias == "bias" or not _supports_plain_bias(subject)):
        yield from _iter_bias_forms(problem)
        yield from _iter_square_forms(subject, "bias", "biashead", "biasbatch")


def _iter_mask_functions(subject: Subject) -> Iterator[_Form]:
    """Yield a `mask_mod` that differs between query heads, also between those of a group."""
    shared = dataclasses.replace(subject.case, num_q_heads=3 * subject.case.num_kv_heads)
    case = shared if subject.implementation.supports(shared) is None else subject.case
    lefts = tuple(3 + 5 * n for n in range(case.num_q_heads))
    meant = dataclasses.replace(draw_problem(case), mask=HeadWindow(lefts))
    if subject.executor.run(single_calls.find_mask_arguments, meant)["mask_mod"]:
        yield _Form("mask_mod_by_head", meant, case=case)


def _supports_plain_bias(subject: Subject) -> bool:
    """Return whether the implementation supports the case with `bias="bias"`, a full bias `[B, N, T, S]`."""
    return subject.implementation.supports(dataclasses.replace(subject.case, bias="bias")) is None


def _iter_number_forms(subject: Subject, name: str) -> Iterator[_Form]:
    """Yield forms of the number `name`: 1.0 as an integer, a traced number, and NumPy and JAX numbers.

    NumPy and JAX numbers in f32 are given with bf16 operands. They must not change the dtype of the result.
    """
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
    """Yield masks that all queries or all keys share, and masks `[T, S]` and `[S]` without their leading axes."""
    mask = problem.resolved_mask.dense(problem.q.shape[1], problem.k.shape[1])[:1, :1]
    key = int(np.argmin(np.abs(mask[0, 0].mean(axis=0) - 0.5)))  # a key that about half of the queries attend to
    row = mask[:, :, -1:, :]
    for name, part, given in (
        ("shared_by_rows", row, row),
        ("shared_by_keys", mask[..., key : key + 1], mask[..., key : key + 1]),
        ("of_rank_one", row, row[0, 0, 0]),
        ("of_rank_two", mask, mask[0, 0]),
    ):
        meant = Dense(np.ascontiguousarray(np.broadcast_to(part, mask.shape)))
        yield _Form(f"mask_{name}", dataclasses.replace(problem, mask=meant), {"mask": given})


def _iter_bias_forms(problem: Problem) -> Iterator[_Form]:
    """Yield a bias that all queries share, one that all keys share, one in bf16, and biases `[T, S]` and `[S]`."""
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
    row = plane[:, :, -1:]
    yield _Form("bias_of_rank_one", dataclasses.replace(problem, bias=row), {"bias": row[0, 0, 0]})


def _check_shared_bias_residuals(subject: Subject) -> Iterator[Judgement]:
    """Check the residuals for a bias that all keys share: the bias changes residuals, though it changes no weight."""
    if subject.problem.bias is None or not subject.implementation.residuals:
        return
    shared = dataclasses.replace(subject.problem, bias=subject.problem.bias[..., :1])
    try:
        got = subject.executor.residuals(shared).values
    except Exception as error:  # an exception of any type is a refusal: no wrong result was returned
        yield build_unsupported("logsumexp.bias_shared_by_keys", f"{type(error).__name__}: {error}".split("\n")[0])
        return
    expected = subject.expect(shared).forward
    live = ~shared.empty_rows & shared.decided
    for name in subject.implementation.residuals:
        yield subject.judge(name, got[name], expected[name], live, label=f"{name}.bias_shared_by_keys")


def _check_shared_bias_gradient(subject: Subject) -> Iterator[Judgement]:
    """Check the gradient of a bias that all keys share: for each query, a sum over keys."""
    if subject.problem.bias is None or not subject.has_gradients or "dbias" not in subject.implementation.gradients:
        return
    # Sinks are added if they are supported. Without a sink, a bias that all keys share changes no weight.
    with_sinks = dataclasses.replace(subject.case, sinks=True)
    if subject.implementation.supports(with_sinks) is None:
        subject = dataclasses.replace(subject, case=with_sinks)
    problem = subject.problem
    assert problem.bias is not None
    shared = dataclasses.replace(problem, bias=problem.bias[..., :1])
    drawn = draw_cotangent(subject.case).out
    cotangent = Cotangent("random", np.where(subject.find_judged_rows(shared), drawn, np.zeros_like(drawn)))
    label = "dbias.bias_shared_by_keys"
    try:
        got = subject.executor.gradients(shared, cotangent).values
    except Exception as error:  # an exception of any type is a refusal: no wrong result was returned
        yield build_unsupported(label, f"{type(error).__name__}: {error}".split("\n")[0])
        return
    expected = subject.expect(shared, [cotangent])
    judged = subject.find_judged_rows(shared)
    yield subject.judge("out", got["out"], expected.forward["out"], judged, label="out.bias_shared_beside_sinks")
    yield subject.judge("dbias", got["dbias"], expected.gradients[0]["dbias"], label=label)


def _iter_square_forms(subject: Subject, name: str, by_head: str, by_row: str) -> Iterator[_Form]:
    """Yield a mask or bias `[N, T, S]`, and one `[B, 1, T, S]`, in cases with as many batch rows as query heads.

    A kernel may take the first axis of the one for the batch, and that of the other for the heads. As B equals N, it
    raises no error, and its result is wrong. In one case K equals both, and in one it does not. If query heads must
    have key/value heads of their own, or must share them, only one of the two cases is supported.

    Args:
      subject: the kernel and the case.
      name: `mask` or `bias`.
      by_head: the level of the case in which the operand differs between heads.
      by_row: the level of the case in which it differs between batch rows.
    """
    heads = subject.case.num_q_heads
    for level, kv_heads, rank in (
        (by_head, heads, "rank_three"),
        (by_head, 1, "rank_three_beside_groups"),
        (by_row, heads, "row_of_batch"),
        (by_row, 1, "row_of_batch_beside_groups"),
    ):
        changes: dict[str, Any] = {name: level, "batch": heads, "num_kv_heads": kv_heads}
        square = dataclasses.replace(subject.case, **changes)
        if (kv_heads == heads == 1) or subject.implementation.supports(square) is not None:
            continue
        meant = draw_problem(square)
        drawn = meant.bias
        if name == "mask":
            drawn = meant.resolved_mask.dense(meant.q.shape[1], meant.k.shape[1])
        assert drawn is not None
        yield _Form(f"{name}_of_{rank}", meant, {name: drawn[0] if level == by_head else drawn}, square)
