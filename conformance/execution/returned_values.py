"""Check that a call of a kernel returned what it must return."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from cases.operand_registry import RESIDUALS
from conformance.execution.kernel_errors import WrongReturn

_RESIDUALS_MUST = (
    "with save_residuals=True the call must return (out, {'logsumexp': ..., 'max_logits': ...}) with an array "
    "[B, N, T] for each"
)


def check_output(returned: Any) -> Any:
    """Return `returned`, the value of a call without residuals, if it is one array. Raises `WrongReturn`."""
    if _is_array(returned):
        return returned
    raise WrongReturn(
        f"the call must return out alone, an array [B, T, N, V], and returned {_describe_value(returned)}"
    )


def check_residuals(returned: Any) -> tuple[Any, dict[str, Any]]:
    """Return the value of a call with residuals, if it is `out` and a mapping of arrays. Raises `WrongReturn`."""
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping):
        # The mapping is copied once, since a user's mapping may return other values at each access.
        out, residuals = returned[0], dict(returned[1])
        if all(map(_is_array, (out, *residuals.values()))):
            return out, residuals
    raise WrongReturn(f"{_RESIDUALS_MUST}, and returned {_describe_value(returned)}")


def check_pages(returned: Any, pools: Sequence[str], *, save_residuals: bool) -> tuple[Any, ...]:
    """Return the value of a call that writes pages, if it is `out`, any residuals, and pages. Raises `WrongReturn`.

    `pools` names the arrays of pages, and those of scales if the call computes scales.
    """
    first = 2 if save_residuals else 1
    fits = isinstance(returned, tuple) and len(returned) == first + len(pools)
    if fits and all(map(_is_array, (returned[0], *returned[first:]))):
        return tuple(returned)
    must = f"(out, {', '.join(pools)})"
    if save_residuals:
        must = f"(out, {{'logsumexp': ..., 'max_logits': ...}}, {', '.join(pools)}) with save_residuals=True"
    raise WrongReturn(f"a call that writes pages must return {must}, and returned {_describe_value(returned)}")


def check_shape(name: str, returned: Any, shape: tuple[int, ...]) -> None:
    """Check the shape of an array that the call returned, before gradients or results are computed from it.

    Raises:
      WrongReturn: if the array has another shape.
    """
    if tuple(returned.shape) != shape:
        must = ", ".join(map(str, shape))
        raise WrongReturn(f"{name} must be an array [{must}], and the call returned {_describe_value(returned)}")


def get_residual(residuals: Mapping[str, Any], name: str) -> Any:
    """Return the residual of this name. Raises `WrongReturn` if the call returned no residual of this name."""
    if name in residuals:
        return residuals[name]
    raise WrongReturn(describe_residuals(residuals, f"without {name!r}"))


def check_names(values: Mapping[str, Any]) -> list[str]:
    """Return the names of the residuals among the results of a call. Raises `WrongReturn` if one is no residual."""
    residuals = {name: x for name, x in values.items() if name != "out"}
    for name in residuals:
        if name not in RESIDUALS:
            raise WrongReturn(describe_residuals(residuals, f"where {name!r} is unknown"))
    return sorted(residuals)


def describe_residuals(residuals: Mapping[str, Any], what: str) -> str:
    """Describe residuals that a call must not return, such as `without 'logsumexp'`, and what it must return."""
    return f"{_RESIDUALS_MUST}, and returned the residuals {_describe_value(residuals)}, {what}"


def _is_array(x: Any) -> bool:
    """Return whether the type of `x` is an array or a tracer.

    `isinstance` is not used: an object may set its own `__class__` to pass for an array.
    """
    return issubclass(type(x), jax.Array | jax.core.Tracer | np.ndarray | np.generic)


def _describe_value(returned: Any, *, within: bool = False) -> str:
    """Describe a wrongly returned value for an error message, with the items of a tuple or list.

    The value's own `repr` is not called, since it may run any code. `within` says that the value is such an item.
    """
    if returned is None:
        return "None" if within else "None: is there a `return`?"
    if _is_array(returned):
        return f"an array {returned.dtype}[{', '.join(map(str, returned.shape))}]"
    if isinstance(returned, str | bytes):
        return "a string"
    if isinstance(returned, types.GeneratorType):
        return "a generator: is there a `yield` where `return` is meant?"
    if isinstance(returned, types.CoroutineType):
        returned.close()  # so that Python does not warn about a coroutine that was never awaited
        return "a coroutine: the function is `async`"
    if isinstance(returned, Mapping):
        entries = [f"{name!r}: {_describe_value(value, within=True)}" for name, value in list(returned.items())[:4]]
        more = ", ..." if len(returned) > 4 else ""
        return f"{{{', '.join(entries)}{more}}}" if entries else "an empty mapping"
    if isinstance(returned, tuple | list) and not within:
        items = ", ".join(_describe_value(item, within=True) for item in list(returned)[:4])
        unasked = len(returned) == 2 and isinstance(returned[1], Mapping)
        more = ", ..." if len(returned) > 4 else ""
        found = f"a {type(returned).__name__} of {len(returned)} ({items}{more})"
        return f"{found}, which is right only with save_residuals=True" if unasked else found
    return f"a {type(returned).__qualname__}"
