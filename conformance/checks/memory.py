"""Check `memory`: temporary memory grows no faster than the lengths, for kernels that declare it linear."""

from __future__ import annotations

from collections.abc import Iterator

from cases.case import CaseIdError
from cases.operand_values import draw_problem
from cases.storage_forms.stored_cases import with_length
from conformance.check_api.judgement import Judgement, build_unsupported
from conformance.check_api.subject import Subject
from conformance.executor_tasks import single_calls
from reports import records

_LENGTHS = (512, 2048)
# The largest growth of memory, divided by the growth of the lengths: linear growth gives 1, quadratic growth 4. Padding
# and alignment explain far less than this limit.
_LIMIT = 1.25


def check_memory(subject: Subject) -> Iterator[Judgement]:
    """Check that temporary memory of forward and backward grows linearly from length 512 to 2048.

    The temporaries of the compiled program at 2048 may be at most 1.25 times four times those at 512.
    """
    if subject.implementation.memory != "linear":
        yield build_unsupported("temporaries", "linear memory is not declared")
        return
    sizes = []
    for length in _LENGTHS:
        try:
            case = with_length(subject.case, length)
        except CaseIdError as error:
            yield build_unsupported("temporaries", f"this case cannot be made longer: {error}")
            return
        if (reason := subject.implementation.supports(case)) is not None:
            yield build_unsupported("temporaries", reason)
            return
        sizes.append(
            subject.executor.run(
                single_calls.measure_temporary_bytes, draw_problem(case), gradients=subject.has_gradients
            )
        )
    if None in sizes or 0 in sizes:
        reason = "the compiler does not say how much temporary memory the program takes"
        yield Judgement(observable="temporaries", verdict=records.UNJUDGED, reason=reason)
        return
    short, long = sizes
    assert short is not None
    assert long is not None
    growth = (long / short) / (_LENGTHS[1] / _LENGTHS[0])
    fits = growth <= _LIMIT
    yield Judgement(
        observable="temporaries",
        verdict=records.PASS if fits else records.FAIL,
        ratio=growth,
        limit=_LIMIT,
        reason=f"{short:,} bytes at length {_LENGTHS[0]}, {long:,} at {_LENGTHS[1]}",
    )
