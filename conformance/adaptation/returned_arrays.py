"""Find `out` and residuals among the arrays that a call returned, by the sizes of their axes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from conformance.adaptation.sizes import Size


def find_out(result: Any, size: Size, axes: str) -> tuple[str, Any] | None:
    """Find `out [B, T, N, V]` in what a call returned: the first array whose axes have its sizes (`iter_outs`)."""
    return next(iter_outs(result, size, axes), None)


def iter_outs(result: Any, size: Size, axes: str) -> Iterator[tuple[str, Any]]:
    """Iterate over arrays in what a call returned that may be `out [B, T, N, V]`, by the sizes of their axes.

    Yields:
      The code that brings `result` to `out`, and its value.
    """
    for access, x in iter_arrays(result):
        if (code := find_axes(x.shape, size, axes)) is not None:
            full = f"result{access}{code}"
            q = np.empty((size.batch, size.q_length, size.heads, size.depth))
            yield full, eval(full, {"result": result, "q": q})


def find_axes(shape: tuple[int, ...], size: Size, axes: str) -> str | None:
    """Return the code that brings an array of this shape to `[B, T, N, V]`; None if its sizes do not fit."""
    b, t, n, d = size.batch, size.q_length, size.heads, size.depth
    candidates = {
        (b, t, n, d): "",
        (b, n, t, d): ".swapaxes(1, 2)",
        (t, b, n, d): ".swapaxes(0, 1)",
        (b, t, n * d): ".reshape(*q.shape[:3], -1)",
        (b * n, t, d): ".reshape(q.shape[0], q.shape[2], q.shape[1], -1).swapaxes(1, 2)",
    }
    return candidates.get(tuple(shape))


def iter_arrays(result: Any, access: str = "") -> Iterator[tuple[str, Any]]:
    """Iterate over the arrays in what a call returned, each with the code that reads it."""
    if hasattr(result, "shape") and hasattr(result, "dtype"):
        yield access, result
    elif isinstance(result, Mapping):
        for key, value in result.items():
            yield from iter_arrays(value, f"{access}[{key!r}]")
    elif hasattr(result, "_fields"):
        for key in result._fields:
            yield from iter_arrays(getattr(result, key), f"{access}.{key}")
    elif isinstance(result, tuple | list):
        for n, value in enumerate(result):
            yield from iter_arrays(value, f"{access}[{n}]")


def iter_residuals(result: Any, size: Size) -> Iterator[tuple[str, np.ndarray]]:
    """Iterate over arrays `[B, N, T]` in what a call returned, with the code that brings them into this order."""
    b, t, n = size.batch, size.q_length, size.heads
    forms = {
        (b, n, t): "",
        (b, t, n): ".swapaxes(1, 2)",
        (t, b, n): ".transpose(1, 2, 0)",
        (b, n, t, 1): "[..., 0]",
        (b, t, n, 1): "[..., 0].swapaxes(1, 2)",
        (b * n, t): ".reshape(q.shape[0], q.shape[2], -1)",
        (b * n, t, 1): ".reshape(q.shape[0], q.shape[2], -1)",
    }
    found = []
    for access, x in iter_arrays(result):
        shape = tuple(x.shape)
        code = forms.get(shape)
        if code is None and len(shape) == 4 and shape[:3] == (b, n, t) and shape[3] != size.kv_length:
            code = "[..., 0]"
        if code is not None:
            full = f"result{access}{code}"
            q = np.empty((b, t, n, size.depth))
            found.append((full, np.asarray(eval(full, {"result": result, "q": q})).astype(np.float64)))
    found = [(code, x.astype(np.float32)) for code, x in found]
    yield from found
    for (one, x), (other, y) in itertools.permutations(found, 2):
        with np.errstate(all="ignore"):
            yield f"{one} + jnp.log({other})", (x + np.log(y)).astype(np.float32)


def describe_result(result: Any) -> str:
    """Describe what a call returned by the shapes of its arrays."""
    found = [f"{x.dtype}{list(x.shape)}" for _, x in iter_arrays(result)]
    return ", ".join(found) or f"a {type(result).__name__}"
