"""Checks `gradients`, `gradients_lse` and `gradients_part`: judge gradients by the oracle.

The checks differ in their cotangents of `out` and `logsumexp`. The verdict comes from the oracle's backward pass. A
record also has the ratio to the flash formula, which recomputes probabilities from `out` and `logsumexp`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import numpy as np

from cases.operand_registry import GRADIENTS
from cases.operand_values import Cotangent, Problem, draw_cotangent
from cases.storage_forms.storage_layout import NOBODY
from conformance.check_api.judgement import Judgement, add_label, build_unsupported
from conformance.check_api.subject import Subject
from conformance.execution.executor import Result
from conformance.truth import oracle
from conformance.truth.rounding_bounds import Bounded
from reports import records
from reports.records import Worst


def check_gradients(subject: Subject) -> Iterator[Judgement]:
    """Check `dq dk dv dsinks dbias` for a random cotangent of `out`.

    Each gradient is judged by the oracle. It is also compared with the flash formula, applied to the implementation's
    own rounded `out` and `logsumexp`. This second comparison shows whether an error comes from these residuals or from
    the backward pass itself.
    """
    if subject.case.phase == "train" and not subject.implementation.gradients:
        yield build_unsupported("all", "no gradient is offered")
    yield from _judge_if_drawn(subject, "random", saved=True)


def check_gradients_lse(subject: Subject) -> Iterator[Judgement]:
    """Check gradients for random cotangents of `out` and `logsumexp` together.

    A kernel that silently ignores the second cotangent fails.
    """
    if not subject.has_gradients:
        return
    if "logsumexp" not in subject.implementation.differentiable_residuals:
        offered = "logsumexp" in subject.implementation.residuals
        reason = "logsumexp is declared not differentiable" if offered else "logsumexp is not offered"
        yield build_unsupported("all", reason)
        return
    yield from _judge_if_drawn(subject, "random_lse", saved=True)


def check_gradients_part(subject: Subject) -> Iterator[Judgement]:
    """Check gradients for cotangents of one row, of one head, of `logsumexp` only, and of empty rows only.

    A cotangent of one row or head shows its gradients without those of the others. These cotangents are mostly zero, so
    they also show kernels that wrongly skip work for zero cotangents.
    """
    for part in ("row", "head", "lse", "empty"):
        yield from add_label(part, _judge_if_drawn(subject, part))


def _judge_if_drawn(subject: Subject, cotangent: str, *, saved: bool = False) -> Iterator[Judgement]:
    """Judge the gradients for a cotangent if the case has it; with `saved`, record the ratio to the flash formula."""
    if cotangent not in subject.cotangents:
        return
    result = subject.gradients(cotangent)
    expected = subject.get_expected_gradients(cotangent)
    flash = _compute_flash_gradients(subject, cotangent, result) if saved else {}
    yield from judge_gradients(subject, result, expected, flash)


def judge_gradients(
    subject: Subject,
    result: Result,
    expected: Mapping[str, Bounded],
    flash: Mapping[str, np.ndarray] | None = None,
) -> Iterator[Judgement]:
    """Judge every gradient in `expected` and its dtype, and that the gradients of padding are zero.

    `flash` has the gradients by the flash formula, for the second comparison; none or empty without it.
    """
    for name, bounded in expected.items():
        if name not in subject.implementation.gradients:
            yield build_unsupported(name, _describe_offer(name, subject.implementation.gradients))
            continue
        yield subject.judge_gradient(name, result.values[name], bounded, flash=flash[name] if flash else None)
    yield from _judge_padding(subject, result)


def _describe_offer(name: str, offered: Collection[str]) -> str:
    """Say that a gradient is not offered, and which are."""
    those = ", ".join(gradient for gradient in GRADIENTS if gradient in offered)
    return f"the gradient {name} is not offered, only {those}"


def _judge_padding(subject: Subject, result: Result) -> Iterator[Judgement]:
    """Judge the gradients of packed tokens past the last sequence: each must be exactly zero.

    Such tokens are padding. The gradients of a model's projections are sums over all tokens of the pack, so any
    nonzero gradient of padding would change the model.
    """
    storage = subject.problem.storage
    if storage is None or not ((storage.q_rows == NOBODY).any() or (storage.held == NOBODY).any()):
        return
    padding = {name: result.values.get(f"{name}.padding") for name in ("dq", "dk", "dv")}
    offered = {name: x for name, x in padding.items() if x is not None and name in subject.implementation.gradients}
    for name, x in offered.items():
        wrong = np.argwhere(x != 0)  # includes NaN, which differs from 0
        if len(wrong):
            index = tuple(int(n) for n in wrong[0])
            yield Judgement(
                observable="padding",
                verdict=records.FAIL,
                worst=Worst(index, float(x[index]), 0.0, 0.0),
                reason=f"{len(wrong)} values of {name} of tokens past the last sequence are not zero; "
                "the index is that of the packed tensor",
            )
            return
    if offered:
        yield Judgement(observable="padding", verdict=records.PASS)


def _compute_flash_gradients(subject: Subject, cotangent: str, result: Result) -> dict[str, np.ndarray]:
    """Compute gradients by the flash formula from the implementation's own `out` and `logsumexp`.

    Returns an empty dictionary if one of them has a wrong shape, or if in a judged row `out` is not finite or
    `logsumexp` is NaN. The formula has no meaning then. Nor has it for another `logsumexp` than the contract's.
    """
    if not subject.implementation.formulas.has_contract_logsumexp:
        return {}
    truth = subject.expectation.forward
    out = np.where(subject.judged_out, result.values["out"].astype(np.float64), truth["out"].value)
    lse = truth["logsumexp"].value
    if "logsumexp" in subject.implementation.residuals:
        got = subject.residuals.values.get("logsumexp")
        if got is None or got.shape != lse.shape:
            return {}
        lse = np.where(subject.judged_residuals, got.astype(np.float64), lse)
    if out.shape != truth["out"].value.shape or not np.isfinite(out).all() or np.isnan(lse).any():
        return {}
    saved = oracle.Forward(out, lse, truth["max_logits"].value)
    drawn = subject.cotangents[cotangent]
    with np.errstate(invalid="ignore", over="ignore"):  # a wrong `logsumexp` may be infinite
        return oracle.compute_backward(
            subject.problem, drawn.out, drawn.logsumexp, form="flash", saved=saved, empty_rows=subject.empty_rows
        )


def check_problem(subject: Subject, problem: Problem) -> Iterator[Judgement]:
    """Check `out`, residuals and gradients on any problem by the oracle, for the checks `calls` and `limits`."""
    drawn = draw_cotangent(subject.case).out
    judged = subject.find_judged_rows(problem)
    cotangents = [Cotangent("random", np.where(judged, drawn, np.zeros_like(drawn)))] if subject.has_gradients else []
    expected = subject.expect(problem, cotangents)
    live = (~problem.empty_rows | (subject.implementation.empty_rows == "zero")) & problem.decided
    for name, got in subject.run_results(problem).items():
        if name == "out":
            yield subject.judge(name, got, expected.forward[name], judged)
        else:
            yield subject.judge_residual(name, got, expected.forward[name], live)
    for cotangent, gradients in zip(cotangents, expected.gradients, strict=True):
        pulled = subject.executor.gradients(problem, cotangent).values
        for name in subject.implementation.gradients:
            if name in pulled:
                yield subject.judge_gradient(name, pulled[name], gradients[name])
