"""Aliasing: a call must leave its operands as they were."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from cases.operand_registry import REMOVABLE
from cases.operand_values import Problem, draw_problem
from conformance import records
from conformance.check_api.judgement import Judgement, add_label
from conformance.check_api.subject import Subject
from conformance.checks import page_comparison
from conformance.executor_tasks import page_write_calls, single_calls

# Half of it is a flag, and the other half an array, for who takes both.
_DENSE_CAUSAL_MASK = "causal_and_dense-d40"


def check_aliasing(subject: Subject) -> Iterator[Judgement]:
    """Operands given as NumPy arrays, outside `jit` and inside, hold the same bits after the call.

    Outside `jit` JAX arrays are given too, which must still be there after the call: one that donates them to a program
    of its own has deleted them. A library that checks types may refuse NumPy arrays, and is given JAX arrays alone. A
    mask that is an array is one of the operands. Without mask and optional operands a call may go another way, so that
    is asked too, with values as deep as queries, whose memory fits `out` then. Pages that a call writes are new ones:
    those that it was given are the caller's still.
    """
    yield from _check_operands(subject, subject.problem)
    absent: dict[str, Any] = {operand.field: operand.absent for operand in REMOVABLE}
    plain = dataclasses.replace(subject.case, mask="full", **absent)
    alike = dataclasses.replace(plain, v_head_dim=plain.head_dim)
    if subject.implementation.supports(alike) is None:
        plain = alike
    masked = dataclasses.replace(subject.case, mask=_DENSE_CAUSAL_MASK)
    for name, case in (("plain", plain), ("mask", masked)):
        if subject.implementation.supports(case) is None:
            yield from add_label(name, _check_operands(subject, draw_problem(case)))
    if subject.implementation.writes_pages:
        yield from add_label("pages", _check_pages(subject))


def _check_operands(subject: Subject, problem: Problem) -> Iterator[Judgement]:
    for how in ("eager", "jit"):
        yield _judge(how, *subject.executor.run(single_calls.find_written_operands, problem, compiled=how == "jit"))


def _check_pages(subject: Subject) -> Iterator[Judgement]:
    """The pages that a call writes, and the new keys and values, as the caller has them."""
    what = page_comparison.build_page_writing(subject)
    for how in ("eager", "jit"):
        asked = subject.problem, what.tokens, what.before
        yield _judge(how, *subject.executor.run(page_write_calls.find_written_operands, *asked, compiled=how == "jit"))


def _judge(how: str, changed: list[str], reason: str) -> Judgement:
    return Judgement(
        observable=f"operands.{how}",
        verdict=records.FAIL if changed else records.PASS,
        reason=f"the call writes into its operands, or deletes them: {', '.join(changed)}" if changed else reason,
    )
