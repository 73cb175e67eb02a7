"""Check `program`: what the traced program requests of a chip, which results on a CPU do not show.

On a CPU every product of f32 numbers is exact to f32. On a TPU or a GPU it is so only if the program requests it. By
default JAX lets a TPU multiply in bf16, and a GPU in tf32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from conformance import records
from conformance.check_api.judgement import Judgement
from conformance.check_api.subject import Subject
from conformance.executor_tasks import program_inspection


def check_program(subject: Subject) -> Iterator[Judgement]:
    """Check that all f32 products request the same precision, and no platform has another path.

    The first applies if products are declared exact. Another path for another platform is not judged here.
    """
    do = subject.cotangents[subject.full_cotangent].out if subject.has_gradients else None
    products, chosen, other = subject.executor.run(program_inspection.inspect_program, subject.problem, do)
    yield from _judge_products(subject, products)
    # A kernel that declares its platform is reported elsewhere if that platform is missing.
    if subject.implementation.accelerator.platform is None:
        yield _judge_paths(subject, chosen, other)


def _judge_products(subject: Subject, products: Sequence[tuple[bool, str, str]]) -> Iterator[Judgement]:
    """Judge the requested precisions of the f32 products."""
    if subject.implementation.arithmetic.products != "exact" or subject.case.dtype != "f32":
        return
    low = [(precision, place) for exact, precision, place in products if not exact]
    # If all products use the default, the user's setting decides. The kernel must then declare the chip's precision.
    wrong = 0 < len(low) < len(products)
    reason = ""
    if wrong:
        where = ", ".join(dict.fromkeys(place for _, place in low[:3]))
        reason = (
            f"{len(low)} of {len(products)} products of f32 operands ask for precision {low[0][0]}, which a TPU "
            f"computes in bf16 and a GPU in tf32, and the others for all of f32: {where}"
        )
    verdict = records.FAIL if wrong else records.PASS
    figures = {"products": len(products), "products_below_f32": len(low)}
    yield Judgement(observable="products", verdict=verdict, reason=reason, figures=figures)


def _judge_paths(subject: Subject, chosen: bool, other: str) -> Judgement:
    """Judge whether the program depends on the platform: then other platforms are unjudged."""
    if not (chosen or other):
        return Judgement(observable="paths", verdict=records.PASS)
    on = f"a {other.upper()}" if other else "another platform"
    reason = f"takes another path on {on} than here ({subject.executor.backend}), which can be judged only there"
    return Judgement(observable="paths", verdict=records.UNJUDGED, reason=reason)
