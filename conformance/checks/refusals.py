"""A feature declared unsupported must be refused: silently ignoring an argument is the worst failure there is."""

from __future__ import annotations

from collections.abc import Iterator

from cases.operand_registry import OPTIONAL, REMOVABLE
from conformance import records
from conformance.check_api.judgement import Judgement
from conformance.check_api.subject import Subject
from conformance.executor_tasks import single_calls


def check_refusals(subject: Subject) -> Iterator[Judgement]:
    """A call that needs a feature declared unsupported raises `NotImplementedError`.

    The call is made as a user makes it, outside `jit`. It is differentiated where the case asks for gradients: an
    implementation that has none must say so too. A feature that needs a parameter which only its supporters have, as a
    quantised cache does, is not asked: nobody can hand it to a call without that parameter.

    Who refuses by signature says that nobody can ask for what it lacks. Where such an operand can be handed to the call
    all the same, it is; that it cannot is no judgement.
    """
    if subject.implementation.refuses_by_signature:
        yield from _check_signature(subject)
        return
    handed = [o.name for o in OPTIONAL if o.opt_in and getattr(subject.problem, o.name) is not None]
    if not all(subject.executor.run(single_calls.has_parameter, name) for name in handed):
        return
    declared = subject.implementation.supports(subject.case) or ""
    try:
        subject.executor.run(single_calls.run_eagerly, subject.problem, gradients=subject.case.phase == "train")
    except NotImplementedError:
        yield Judgement(observable="refusal", verdict=records.PASS)
    except Exception as error:  # any other error is the finding: the user is told the wrong thing
        reason = f"declared unsupported ({declared}), but raises {type(error).__name__} instead of NotImplementedError"
        yield Judgement(observable="refusal", verdict=records.FAIL, reason=reason)
    else:
        reason = f"declared unsupported ({declared}), but the call is accepted"
        yield Judgement(observable="refusal", verdict=records.FAIL, reason=reason)


def _check_signature(subject: Subject) -> Iterator[Judgement]:
    """A fault if the call takes an operand that it is declared to have no parameter for; nothing is computed."""
    lacking = set(subject.implementation.unsupported)
    operands = [o.name for o in REMOVABLE if o.name in lacking and getattr(subject.case, o.field) != o.absent]
    if not operands or not all(subject.executor.run(single_calls.has_parameter, name) for name in operands):
        return
    try:
        subject.executor.run(single_calls.trace_call, subject.problem)
    except Exception:  # whatever it says: it cannot be asked for
        return
    reason = f"declared unsupported ({', '.join(operands)}), not to be asked for, but the call is accepted"
    yield Judgement(observable="refusal", verdict=records.FAIL, reason=reason)
