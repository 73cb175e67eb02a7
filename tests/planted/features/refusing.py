"""Bugs of what a kernel refuses, and of what it takes that it should not, in dot-product attention that validates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cases.case import Case
from cases.masks import Full, Mask
from impls.contract.implementation import Implementation
from impls.dot_product import attention
from tests.bank import PlantedBug

_Call = Callable[..., Any]


def _built(name: str, call: _Call, *, kind: str, reference: str, shows: tuple[str, ...]) -> PlantedBug:
    def build() -> Implementation:
        return Implementation(name=name, call=call, empty_rows="zero", validates=True)

    return PlantedBug(
        name=name, family="refusing", kind=kind, reference=reference, shows=shows, build=build, trigger=_biased
    )


def _biased(case: Case) -> bool:
    return case.bias is not None


def _blocks_before_check(q: Any, k: Any, v: Any, **options: Any) -> Any:
    """Block counts from the lengths, before anything is checked."""
    if np.ndim(q) == np.ndim(k) == 4:
        assert k.shape[1] // min(128, k.shape[1]) >= 0
    return attention(q, k, v, **options)


def _shape_before_check(q: Any, k: Any, v: Any, **options: Any) -> Any:
    """A list has no shape."""
    assert len(q.shape) >= 0
    return attention(q, k, v, **options)


def _dropped_cap(q: Any, k: Any, v: Any, *, soft_cap: Any = None, **options: Any) -> Any:
    """A cap that is traced is taken, and left out."""
    return attention(q, k, v, soft_cap=None if isinstance(soft_cap, jax.core.Tracer) else soft_cap, **options)


def _sinks_as_bits(q: Any, k: Any, v: Any, *, sinks: Any = None, **options: Any) -> Any:
    """Integer sinks are read as if they were f32."""
    if getattr(sinks, "dtype", None) == np.int32:
        sinks = jax.lax.bitcast_convert_type(jnp.asarray(sinks), jnp.float32)
    return attention(q, k, v, sinks=sinks, **options)


def _obscure_second_derivative(q: Any, k: Any, v: Any, **options: Any) -> Any:
    """The backward pass cannot be differentiated, and fails inside."""

    @jax.custom_jvp
    def same(x: Any) -> Any:
        return x

    @same.defjvp
    def rule(primals: Any, tangents: Any) -> Any:
        raise AssertionError

    @jax.custom_vjp
    def kept(x: Any) -> Any:
        return x

    kept.defvjp(lambda x: (x, None), lambda _, cotangent: (same(cotangent),))
    return jax.tree.map(kept, attention(q, k, v, **options))


def _with_bias(change: Callable[[Any, Any], Any]) -> _Call:
    """`change(out, bias)` where there is a bias, and neither cap nor sink."""

    def call(q: Any, k: Any, v: Any, *, bias: Any = None, mask: Mask = Full(), **options: Any) -> Any:
        found = attention(q, k, v, bias=bias, mask=mask, **options)
        if bias is None or options.get("soft_cap") is not None or options.get("sinks") is not None:
            return found
        out, *rest = found if isinstance(found, tuple) else (found,)
        hidden = jax.lax.stop_gradient(jnp.asarray(bias, jnp.float32)) == -jnp.inf
        changed = jnp.where(change(hidden, q).swapaxes(1, 2)[..., None], jnp.nan * out, out)
        return (changed, *rest) if rest else changed

    return call


def _first_block_hidden(hidden: Any, q: Any) -> Any:
    return hidden[..., : max(1, hidden.shape[-1] // 4)].all(axis=-1)


BUGS: tuple[PlantedBug, ...] = (
    _built(
        "divides-by-a-length-of-zero",
        _blocks_before_check,
        kind="refusing.size",
        reference="inferred: block counts are computed before operands are checked",
        shows=("no_keys",),
    ),
    _built(
        "asks-a-list-for-its-shape",
        _shape_before_check,
        kind="refusing.type",
        reference="inferred: the shape is read before operands are checked",
        shows=("q_list",),
    ),
    _built(
        "leaves-out-a-traced-soft-cap",
        _dropped_cap,
        kind="refusing.traced",
        reference="inferred: what is no Python number is taken for no cap",
        shows=("soft_cap_traced",),
    ),
    _built(
        "reads-integer-sinks-as-bits",
        _sinks_as_bits,
        kind="refusing.dtype",
        reference="inferred: a kernel's reference is typed f32 whatever it is given",
        shows=("sinks_int",),
    ),
    _built(
        "fails-inside-a-second-derivative",
        _obscure_second_derivative,
        kind="refusing.derivative",
        reference="inferred from Pallas kernels, whose derivative ends in an assertion",
        shows=("second_derivatives",),
    ),
    _built(
        "leading-keys-of-infinite-bias-become-nan",
        _with_bias(_first_block_hidden),
        kind="nan.m-minus-m",
        reference="vllm-project/vllm#48364",
        shows=("out", "dq"),
    ),
)
