"""A correct kernel as a function of arrays, for bugs that lie in what is put around a kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from cases.case import Case
from conformance import declare
from conformance.execution.plain_functions import build_implementation
from impls.contract.implementation import Implementation
from tests.bank import PlantedBug
from tests.kernels import naive

Arrays = dict[str, Any]
Statics = dict[str, Any]
Kernel = Callable[[Arrays, Statics], Any]
"""`(arrays, static keywords)` to `out`, or `(out, residuals)` with `save_residuals`."""


def correct(arrays: Arrays, statics: Statics) -> Any:
    """The kernel without a bug."""
    return naive.attention(**arrays, **statics)


def attention_by(kernel: Kernel, **declared: Any) -> Callable[..., Any]:
    """An attention function that hands its operands to `kernel`, those that are given."""

    @declare(**{"behind_mask": "finite", **declared})
    def attention(
        q: Any,
        k: Any,
        v: Any,
        *,
        causal: bool = False,
        window: Any = None,
        mask: Any = None,
        segment_ids: Any = None,
        soft_cap: Any = None,
        sinks: Any = None,
        bias: Any = None,
        scale: Any = None,
        save_residuals: bool = False,
    ) -> Any:
        given = {"causal": causal, "window": window, "soft_cap": soft_cap, "scale": scale}
        options = {"mask": mask, "segment_ids": segment_ids, "sinks": sinks, "bias": bias}
        arrays = {"q": q, "k": k, "v": v, **{name: x for name, x in options.items() if x is not None}}
        return kernel(arrays, {**given, "save_residuals": save_residuals})

    return attention


def implementation(name: str, kernel: Kernel, **declared: Any) -> Implementation:
    """`kernel` as an implementation."""
    return build_implementation(attention_by(kernel, **declared), name)


def _always(case: Case) -> bool:
    return True


def planted(
    name: str,
    kernel: Kernel,
    *,
    family: str,
    kind: str,
    reference: str,
    shows: tuple[str, ...],
    trigger: Callable[[Case], bool] = _always,
    **declared: Any,
) -> PlantedBug:
    """The planted bug that is `kernel`."""
    build = functools.partial(implementation, name, kernel, **declared)
    return PlantedBug(
        name=name, family=family, kind=kind, reference=reference, shows=shows, build=build, trigger=trigger
    )
