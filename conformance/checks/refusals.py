"""Check `refusals`: a feature declared unsupported must be refused, never silently ignored."""

from __future__ import annotations

from collections.abc import Iterator

from cases import mask_spec
from cases.case import OPT_IN
from cases.operand_registry import OPTIONAL, REMOVABLE
from conformance.check_api.judgement import Judgement
from conformance.check_api.subject import Subject
from conformance.executor_tasks import single_calls
from reports import records


def check_refusals(subject: Subject) -> Iterator[Judgement]:
    """Check that a call needing an unsupported feature raises `NotImplementedError`.

    The call is made outside `jit`, as a user would make it. In a training case it is differentiated too, since an
    implementation without gradients must refuse to be differentiated. An opt-in feature, such as a quantised cache,
    needs a parameter that an implementation without the feature lacks. Then nothing is checked.

    An implementation may declare `refuses_by_signature`: it has no parameter for what it does not support. For it the
    check fails only if such an operand can be passed all the same, or if a declined size or dtype is accepted.
    """
    implementation = subject.implementation
    by_signature = implementation.refuses_by_signature
    if by_signature and not _is_declined_for_size(subject):
        yield from _check_signature(subject)
        return
    handed = [o.name for o in OPTIONAL if o.opt_in and getattr(subject.problem, o.name) is not None]
    if not all(subject.executor.run(single_calls.has_parameter, name) for name in handed):
        return
    declared = f"declared unsupported ({implementation.supports(subject.case) or ''})"
    try:
        subject.executor.run(single_calls.run_eagerly, subject.problem, gradients=subject.case.phase == "train")
    except Exception as error:
        if by_signature or isinstance(error, NotImplementedError):
            yield Judgement(observable="refusal", verdict=records.PASS)
            return
        # An error of another type misleads the user.
        reason = f"{declared}, but raises {type(error).__name__} instead of NotImplementedError"
        yield Judgement(observable="refusal", verdict=records.FAIL, reason=reason)
    else:
        if by_signature and implementation.accelerator.interpreted:
            reason = f"{declared}, and accepted by an interpreter; the accelerator's compiler may refuse it"
            yield Judgement(observable="refusal", verdict=records.UNJUDGED, reason=reason)
            return
        yield Judgement(observable="refusal", verdict=records.FAIL, reason=f"{declared}, but the call is accepted")


def _is_declined_for_size(subject: Subject) -> bool:
    """Return whether sizes, dtype or phase must be why a case is declined: operands, mask and values are plain."""
    case, implementation = subject.case, subject.implementation
    undeclared = OPT_IN - implementation.offers
    return (
        implementation.storage is None
        and case.distribution == "normal"
        and all(getattr(case, operand.field) == operand.absent for operand in OPTIONAL)
        and {"full", "causal"}.issuperset(mask_spec.list_mask_features(case.mask))
        and not any(name in implementation.unsupported or name in undeclared for name in case.features)
    )


def _check_signature(subject: Subject) -> Iterator[Judgement]:
    """Check by tracing that the call accepts no operand for which it is declared to have no parameter."""
    lacking = set(subject.implementation.unsupported)
    operands = [o.name for o in REMOVABLE if o.name in lacking and getattr(subject.case, o.field) != o.absent]
    if not operands or not all(subject.executor.run(single_calls.has_parameter, name) for name in operands):
        return
    try:
        subject.executor.run(single_calls.trace_call, subject.problem)
    except Exception:  # any exception is a refusal
        return
    reason = f"declared unsupported ({', '.join(operands)}), with no parameter for it, but the call is accepted"
    yield Judgement(observable="refusal", verdict=records.FAIL, reason=reason)
