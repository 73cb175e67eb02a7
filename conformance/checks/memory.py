"""Memory: temporaries of forward and backward grow no faster than the lengths, for those who claim it."""

from __future__ import annotations

from collections.abc import Iterator

from cases.case import CaseIdError
from cases.inputs import draw
from cases.serving.calls import of_length
from conformance import records
from conformance.asking.judgement import Judgement, unsupported
from conformance.asking.subject import Subject
from conformance.driving import alone

_LENGTHS = (512, 2048)
# Linear growth gives 1, quadratic growth 4. Padding and alignment stay far below the rest.
_LIMIT = 1.25


def memory(subject: Subject) -> Iterator[Judgement]:
    """Compiled temporary memory of forward and backward at 2048 is at most 1.25 times four times that at 512."""
    if subject.implementation.memory != "linear":
        yield unsupported("temporaries", "linear memory is not claimed")
        return
    sizes = []
    for length in _LENGTHS:
        try:
            case = of_length(subject.case, length)
        except CaseIdError as error:
            yield unsupported("temporaries", f"this case has no longer form: {error}")
            return
        if (reason := subject.implementation.supports(case)) is not None:
            yield unsupported("temporaries", reason)
            return
        sizes.append(subject.executor.run(alone.temporary_bytes, draw(case), gradients=subject.with_gradients))
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
