"""Check `program`: inspect the traced program for faults that show only on a TPU or GPU.

The check looks at the precision that matrix products request, and at branches by platform. On a CPU every product of
f32 operands has the precision of f32. On a TPU or GPU it has that precision only if the program requests it. By default
JAX lets a TPU multiply in bf16, and a GPU in tf32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from conformance.check_api.judgement import Judgement, build_refused_precision
from conformance.check_api.subject import Subject
from conformance.executor_tasks import program_inspection
from reports import records

# The declarations of products, from strict to lax. The empty one stands for a precision that no declaration states.
_PRODUCTS = ("exact", "", "tf32", "bf16")
# The declaration for each requested precision. With bf16 in three products, what is left out is below 2^-14 of a
# product, and no declaration is between that and tf32.
_COVERED_BY = {"HIGH": "tf32", "TF32_TF32_F32": "tf32", "BF16_BF16_F32_X3": "tf32", "BF16_BF16_F32": "bf16"}


def check_program(subject: Subject) -> Iterator[Judgement]:
    """Check that f32 products request the declared precision, and that the program is the same on all platforms.

    A program that differs between platforms is reported as unjudged, since its other path cannot run here.
    """
    do = subject.cotangents[subject.full_cotangent].out if subject.has_gradients else None
    products, chosen, other = subject.executor.run(program_inspection.inspect_program, subject.problem, do)
    yield from _judge_products(subject, products)
    # A kernel that declares a platform is for that platform only, so a dependence on the platform is expected.
    if subject.implementation.accelerator.platform is None:
        yield _judge_paths(subject, chosen, other)


def _judge_products(subject: Subject, products: Sequence[program_inspection.Product]) -> Iterator[Judgement]:
    """Judge the requested precisions of the f32 products."""
    declared = subject.implementation.arithmetic.products
    low = [product for product in products if not product[0]]
    requested = {one: no for _, names, _, no in low for one in names.split("/") if one not in ("DEFAULT", "HIGHEST")}
    # The declaration that covers what is requested.
    needed = max((_COVERED_BY.get(name, "") for name in requested), key=_PRODUCTS.index, default="exact")
    too_strict = _PRODUCTS.index(declared) < _PRODUCTS.index(needed)
    if subject.case.dtype != "f32" or not (declared == "exact" or too_strict):
        return
    figures = {"products": float(len(products)), "products_below_f32": float(len(low))}
    where = ", ".join(dict.fromkeys(place for _, _, place, _ in low[:3]))
    verdict, reason = records.PASS, ""
    # A mixture is a failure, and so is a request of less than is declared.
    if declared == "exact" and 0 < len(low) < len(products):
        verdict = records.FAIL
        reason = (
            f"{len(low)} of {len(products)} products of f32 operands request precision {low[0][1]}, which a TPU "
            f"computes in bf16 and a GPU in tf32, while the others request all of f32: {where}"
        )
    elif refusal := next(filter(None, requested.values()), ""):
        yield build_refused_precision("products", f"{refusal} ({where})")
        return
    elif too_strict:
        verdict = records.FAIL
        remedy = f'declare products="{needed}"' if needed else "no declaration states that"
        reason = (
            f'products="{declared}" is declared, and products of f32 operands request {" and ".join(requested)}, which '
            f"is less on a TPU or GPU: {remedy}, or request all of f32 ({where})"
        )
    elif low:
        # No product requests a precision, so the user's setting of JAX decides. On a chip, the kernel must then declare
        # the chip's precision. Here the verdict on the kernel says so (`DEFAULT_PRECISION`).
        figures[records.DEFAULT_PRECISION] = 1.0
        reason = (
            f"none of {len(low)} products of f32 operands requests the precision of f32: by default, a TPU computes "
            "them in bf16 and a GPU in tf32"
        )
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
