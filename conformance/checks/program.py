"""The program: what the call asks of a chip that its results on a CPU do not show.

On a CPU every product of f32 numbers is exact to f32. On a TPU or a GPU it is so only where the program asks for it: by
default JAX lets a TPU multiply in bf16, and a GPU in tf32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

import jax
import numpy as np

from conformance import records
from conformance.asking.judgement import Judgement
from conformance.asking.subject import Subject
from conformance.calling.execution import Arrays, pull_back

_OTHER_BACKENDS = ("tpu", "gpu")
# What chooses among branches by the platform that a program is lowered for.
_BY_PLATFORM = ("platform_index", "platform_dependent")


def program(subject: Subject) -> Iterator[Judgement]:
    """All products of f32 operands that are declared exact ask for the same, and no platform has a path of its own."""
    traced = _traced(subject)
    operations = list(_operations(traced))
    yield from _products(subject, operations)
    yield from _paths(subject, operations, traced)


def _traced(subject: Subject) -> tuple[Any, ...]:
    """The traced programs of the call, and of its gradients where there are any."""
    plain, arrays = subject.executor.bind(subject.problem)
    arrays = jax.tree.map(jax.numpy.asarray, arrays)
    found: list[Any] = [jax.make_jaxpr(plain)(arrays)]
    if subject.with_gradients:
        do = subject.cotangents[subject.any_random].out

        def pulled(arrays: Arrays, do: Any) -> Any:
            return pull_back(plain, arrays, do)

        found.append(jax.make_jaxpr(pulled)(arrays, do))
    return tuple(found)


def _operations(programs: Iterable[Any]) -> Iterator[Any]:
    """Every operation of traced programs, those inside of loops, branches and kernels too."""
    for traced in programs:
        inner = getattr(traced, "jaxpr", traced)
        for operation in getattr(inner, "eqns", ()):
            yield operation
            yield from _operations(_programs_in(operation.params.values()))


def _programs_in(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _programs_in(value)
        elif hasattr(value, "eqns") or hasattr(getattr(value, "jaxpr", None), "eqns"):
            yield value


@dataclasses.dataclass(frozen=True)
class _Product:
    """A product of f32 operands, and whether the program asks for all of f32."""

    exact: bool
    precision: str
    place: str


def _products(subject: Subject, operations: Iterable[Any]) -> Iterator[Judgement]:
    if subject.implementation.arithmetic.products != "exact" or subject.case.dtype != "f32":
        return
    products = [_product(operation) for operation in operations if _multiplies_f32(operation)]
    low = [product for product in products if not product.exact]
    # What leaves all of them to the user's setting has chosen nothing, and declares on its chip what it does there.
    wrong = 0 < len(low) < len(products)
    reason = ""
    if wrong:
        where = ", ".join(dict.fromkeys(product.place for product in low[:3]))
        reason = (
            f"{len(low)} of {len(products)} products of f32 operands ask for precision {low[0].precision}, which a TPU "
            f"computes in bf16 and a GPU in tf32, and the others for all of f32: {where}"
        )
    verdict = records.FAIL if wrong else records.PASS
    figures = {"products": len(products), "products_below_f32": len(low)}
    yield Judgement(observable="products", verdict=verdict, reason=reason, figures=figures)


def _multiplies_f32(operation: Any) -> bool:
    if operation.primitive.name != "dot_general":
        return False
    return all(getattr(x.aval, "dtype", None) == np.float32 for x in operation.invars[:2])


def _product(operation: Any) -> _Product:
    precision = operation.params.get("precision")
    asked = precision if isinstance(precision, tuple) else (precision,)
    exact = all(_is_exact(one) for one in asked)
    name = "DEFAULT" if precision is None else "/".join(getattr(one, "name", str(one)) for one in asked)
    return _Product(exact, name, _place(operation))


def _is_exact(precision: Any) -> bool:
    name = getattr(precision, "name", str(precision)).upper()
    return name in ("HIGHEST", "F32_F32_F32", "F64_F64_F64", "TF32_TF32_F32_X3", "BF16_BF16_F32_X9", "BF16_BF16_F32_X6")


def _place(operation: Any) -> str:
    from jax._src import source_info_util  # what it says of a place is for people alone

    return str(source_info_util.summarize(operation.source_info))


def _paths(subject: Subject, operations: Iterable[Any], traced: tuple[Any, ...]) -> Iterator[Judgement]:
    """What is chosen by the platform is not what was judged here."""
    if subject.implementation.accelerator.platform is not None:
        return  # kernels of a platform are reported as such where that is missing
    names = {operation.primitive.name for operation in operations}
    chosen = names & {*_BY_PLATFORM}
    other = next((backend for backend in _OTHER_BACKENDS if _differs(subject, traced, backend)), None)
    if chosen or other:
        on = "another platform" if other is None else f"a {other.upper()}"
        reason = f"takes another path on {on} than here ({jax.default_backend()}), which is judged there only"
        yield Judgement(observable="paths", verdict=records.UNJUDGED, reason=reason)
    else:
        yield Judgement(observable="paths", verdict=records.PASS)


def _differs(subject: Subject, traced: tuple[Any, ...], backend: str) -> bool:
    """Whether the traced program is another one if JAX says that it computes on `backend`."""
    with mock.patch.object(jax, "default_backend", return_value=backend):
        try:
            return [str(one) for one in _traced(subject)] != [str(one) for one in traced]
        except Exception:  # a path that cannot even be traced here is another one
            return True
