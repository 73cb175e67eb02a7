"""Bugs of a first minute: of plain calls, of the dtypes of results, and of results that change from call to call."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from conformance import declare
from conformance.execution.plain_functions import build_implementation
from conformance.mutation.kernels.triggers import trains
from impls.contract.implementation import Implementation
from tests.bank import PlantedBug
from tests.kernels import naive
from tests.planted.planting.wrapped import Arrays, Statics, correct, planted

_FIXED = ("segment_ids", "mask")


def _read_in_memory_order(q: Any, k: Any, v: Any) -> Any:
    """Read a NumPy operand as the buffer behind it, whatever its strides."""
    q, k, v = (x.ravel(order="K").reshape(x.shape) if isinstance(x, np.ndarray) else x for x in (q, k, v))
    return naive.attention(q, k, v)


def _no_side_is_the_own_key(q: Any, k: Any, v: Any, *, window: Any = None) -> Any:
    """Take a window without a number on either side for one with the query's own key alone."""
    if window is not None and not any(window):
        window = (0, 0)
    return naive.attention(q, k, v, window=window)


def _build_first_scale() -> Callable[..., Any]:
    """Build a function that keeps the scale of its first call."""
    kept: list[float] = []

    def attention(q: Any, k: Any, v: Any, *, scale: float | None = None) -> Any:
        kept.append(q.shape[-1] ** -0.5 if scale is None else scale)
        return naive.attention(q, k, v, scale=kept[0])

    return attention


def _refuse_to_be_mapped(arrays: Arrays, statics: Statics) -> Any:
    """Ask for the bytes of an operand where no optional one is given; a mapped operand has none."""
    batched = type(arrays["q"]).__name__ == "BatchTracer"
    if batched and all(isinstance(arrays[name], jax.core.Tracer) for name in "qkv") and arrays.keys() == set("qkv"):
        raise TypeError("q must be an array, got a tracer")
    return correct(arrays, statics)


def _widen_gradients(arrays: Arrays, statics: Statics) -> Any:
    """Return the f32 accumulators of `dq` and `dk` from the backward pass."""

    @jax.custom_vjp
    def call(arrays: Arrays) -> Any:
        return correct(arrays, statics)

    def pull(arrays: Arrays, cotangent: Any) -> tuple[Arrays]:
        moving = {name: x for name, x in arrays.items() if name not in _FIXED}
        pulled = jax.vjp(lambda m: correct({**arrays, **m}, statics), moving)[1](cotangent)[0]
        wide = {name: x.astype(jnp.float32) if name in ("q", "k") else x for name, x in pulled.items()}
        return ({**jax.tree.map(lambda _: None, arrays), **wide},)

    call.defvjp(lambda arrays: (call(arrays), arrays), pull)
    return call(arrays)


def _residuals_in_double(q: Any, k: Any, v: Any, *, save_residuals: bool = False) -> Any:
    """Take the logarithm of the sum in Python's float, which is a double under x64."""
    out, residuals = naive.attention(q, k, v, save_residuals=True)
    residuals = {name: x.astype(jnp.result_type(float)) for name, x in residuals.items()}
    return (out, residuals) if save_residuals else out


def _build_any_order() -> Callable[..., Any]:
    """Build a function whose `dq` is summed in another order at each call, so that its last bits change."""
    calls = itertools.count(1)

    @jax.custom_vjp
    def perturb(q: Any) -> Any:
        return q

    def draw(dq: Any) -> Any:
        change = np.random.default_rng(next(calls)).uniform(-1, 1, dq.shape) * 2.0**-23
        return change.astype(np.float32)

    def pull_back(_: None, dq: Any) -> tuple[Any]:
        change = jax.pure_callback(draw, jax.ShapeDtypeStruct(dq.shape, jnp.float32), dq, vmap_method="sequential")
        return ((dq * (1 + change)).astype(dq.dtype),)

    perturb.defvjp(lambda q: (q, None), pull_back)

    def attention(q: Any, k: Any, v: Any, *, causal: bool = False) -> Any:
        return naive.attention(perturb(q), k, v, causal=causal)

    return attention


def _build(name: str, make: Callable[[], Callable[..., Any]]) -> Implementation:
    return build_implementation(declare(behind_mask="finite")(make()), name)


def _function(
    name: str, make: Callable[[], Callable[..., Any]], *, kind: str, reference: str, shows: tuple[str, ...]
) -> PlantedBug:
    """Return the planted bug that is the plain function which `make` builds."""
    return PlantedBug(
        name=name,
        family="first minute",
        kind=kind,
        reference=reference,
        shows=shows,
        build=functools.partial(_build, name, make),
    )


BUGS: tuple[PlantedBug, ...] = (
    _function(
        "numpy-operands-read-in-memory-order",
        lambda: _read_in_memory_order,
        kind="first.strides",
        reference="inferred from extensions that read the buffer of an array",
        shows=("out",),
    ),
    _function(
        "window-of-two-open-sides-is-the-own-key",
        lambda: _no_side_is_the_own_key,
        kind="first.open-window",
        reference="inferred from flash-attention's window_size=(-1, -1)",
        shows=("out",),
    ),
    _function(
        "scale-of-the-first-call-kept",
        _build_first_scale,
        kind="first.scale",
        reference="inferred from jit caches keyed by shapes",
        shows=("out",),
    ),
    planted(
        "plain-call-refuses-to-be-mapped",
        _refuse_to_be_mapped,
        family="first minute",
        kind="first.vmap",
        reference="inferred from Pallas calls without a batching rule",
        shows=("error",),
    ),
    planted(
        "gradients-in-f32-of-narrow-operands",
        _widen_gradients,
        family="first minute",
        kind="dtype.gradients",
        reference="inferred from custom_vjp, which accepts cotangents of another dtype",
        shows=("dq", "dk"),
        trigger=trains("bf16"),
    ),
    _function(
        "residuals-in-f64-under-x64",
        lambda: _residuals_in_double,
        kind="dtype.residuals",
        reference="inferred from Python floats under jax_enable_x64",
        shows=("logsumexp", "max_logits"),
    ),
    _function(
        "dq-summed-in-any-order",
        _build_any_order,
        kind="order.atomics",
        reference="inferred from backward passes that add to dq atomically",
        shows=("dq",),
    ),
)
