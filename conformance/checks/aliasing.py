"""Check `aliasing`: a call must not modify its operands."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from cases.operand_registry import REMOVABLE
from cases.operand_values import Problem, draw_problem
from conformance.check_api.judgement import Judgement, add_label
from conformance.check_api.subject import Subject
from conformance.checks import page_comparison
from conformance.executor_tasks import page_write_calls, single_calls
from reports import records

# A mask in two parts. A kernel that takes `causal` and `mask` gets the first part as a flag, the second as an array.
_DENSE_CAUSAL_MASK = "causal_and_dense-d40"


def check_aliasing(subject: Subject) -> Iterator[Judgement]:
    """Check that a call modifies, donates or deletes none of its operands.

    Calls get NumPy arrays outside `jit` and inside. They must hold the same bits after several calls, and after the
    threads that these started. Outside `jit` the calls are repeated with JAX arrays: a call that donates them to its
    own program deletes them. A library that checks types may refuse NumPy arrays; then the calls get JAX arrays only.
    A call that takes stored operands gets them as they lie in memory.

    Three more calls are checked:

    - `mask`: a call whose mask is partly an array, since such an array is an operand too.
    - `plain`: a call without mask and optional operands, since a kernel may have another path for it. If the kernel
      supports it, V equals H. Then `q` and `out` have the same shape, so XLA could reuse the memory of `q` for `out`.
    - `pages`: a call that writes pages. It must return new pages and leave the given ones unchanged.
    """
    yield from _check_operands(subject, subject.problem)
    absent: dict[str, Any] = {operand.field: operand.absent for operand in REMOVABLE}
    if subject.case.storage is None:  # the mask of stored sequences says how long they are
        absent["mask"] = "full"
    plain = dataclasses.replace(subject.case, **absent)
    equal_depths = dataclasses.replace(plain, v_head_dim=plain.head_dim)
    if subject.implementation.supports(equal_depths) is None:
        plain = equal_depths
    masked = dataclasses.replace(subject.case, mask=_DENSE_CAUSAL_MASK)
    for name, case in (("plain", plain), ("mask", masked)):
        if subject.implementation.supports(case) is None:
            yield from add_label(name, _check_operands(subject, draw_problem(case)))
    if subject.implementation.writes_pages:
        yield from add_label("pages", _check_pages(subject))


def _check_operands(subject: Subject, problem: Problem) -> Iterator[Judgement]:
    """Check that a call leaves the operands of one problem unchanged, outside `jit` and inside."""
    for how in ("eager", "jit"):
        yield _judge(how, *subject.executor.run(single_calls.find_written_operands, problem, compiled=how == "jit"))


def _check_pages(subject: Subject) -> Iterator[Judgement]:
    """Check that a call that writes pages leaves the given pages, new keys and new values unchanged."""
    writing = page_comparison.build_page_writing(subject)
    for how in ("eager", "jit"):
        arguments = subject.problem, writing.tokens, writing.before
        changed, reason = subject.executor.run(
            page_write_calls.find_written_operands, *arguments, compiled=how == "jit"
        )
        yield _judge(how, changed, reason)


def _judge(how: str, changed: list[str], reason: str) -> Judgement:
    return Judgement(
        observable=f"operands.{how}",
        verdict=records.FAIL if changed else records.PASS,
        reason=f"the call writes into its operands, or deletes them: {', '.join(changed)}" if changed else reason,
    )
