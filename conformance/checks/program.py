"""Check `program`: inspect the traced program for faults that show only on a TPU or GPU.

The check looks at the precision that matrix products request, and at branches by platform. On a CPU every product of
f32 operands has the precision of f32. On a TPU or GPU it has that precision only if the program requests it. By default
JAX lets a TPU multiply in bf16, and a GPU in tf32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from conformance import records
from conformance.check_api.judgement import Judgement
from conformance.check_api.subject import Subject
from conformance.executor_tasks import program_inspection


def check_program(subject: Subject) -> Iterator[Judgement]:
    """Check that all f32 products request the same precision, and that the program is the same on all platforms.

    The precision is checked if the implementation declares `products="exact"`. A program that differs between platforms
    is reported as unjudged, since its other path cannot run here.
    """
    do = subject.cotangents[subject.full_cotangent].out if subject.has_gradients else None
    products, chosen, other = subject.executor.run(program_inspection.inspect_program, subject.problem, do)
    yield from _judge_products(subject, products)
    # A kernel that declares a platform is for that platform only, so a dependence on the platform is expected.
    if subject.implementation.accelerator.platform is None:
        yield _judge_paths(subject, chosen, other)


def _judge_products(subject: Subject, products: Sequence[tuple[bool, str, str]]) -> Iterator[Judgement]:
    """Judge the requested precisions of the f32 products.

    Each product is described by whether its precision is all of f32, the name of its precision, and its source line.
    """
    if subject.implementation.arithmetic.products != "exact" or subject.case.dtype != "f32":
        return
    low = [(precision, place) for exact, precision, place in products if not exact]
    # Only a mixture is a failure. If no product requests a precision, the user's setting of JAX decides. On a chip, the
    # kernel must then declare the chip's precision. Here the verdict on the kernel says so (`DEFAULT_PRECISION`).
    wrong = 0 < len(low) < len(products)
    reason = ""
    figures = {"products": float(len(products)), "products_below_f32": float(len(low))}
    if low and not wrong:
        figures[records.DEFAULT_PRECISION] = 1.0
        reason = (
            f"none of {len(low)} products of f32 operands requests the precision of f32: by default, a TPU computes "
            "them in bf16 and a GPU in tf32"
        )
    if wrong:
        where = ", ".join(dict.fromkeys(place for _, place in low[:3]))
        reason = (
            f"{len(low)} of {len(products)} products of f32 operands request precision {low[0][0]}, which a TPU "
            f"computes in bf16 and a GPU in tf32, while the others request all of f32: {where}"
        )
    verdict = records.FAIL if wrong else records.PASS
    yield Judgement(observable="products", verdict=verdict, reason=reason, figures=figures)


def _judge_paths(subject: Subject, chosen: bool, other: str) -> Judgement:
    """Judge whether the program depends on the platform; if so, report other platforms as unjudged.

    `chosen` says whether the program has a branch by platform. `other` is a backend for which another program is
    traced, or "".
    """
    if not (chosen or other):
        return Judgement(observable="paths", verdict=records.PASS)
    on = f"a {other.upper()}" if other else "another platform"
    reason = (
        f"the kernel takes another path on {on} than here ({subject.executor.backend}); "
        "that path can be judged only there"
    )
    return Judgement(observable="paths", verdict=records.UNJUDGED, reason=reason)
