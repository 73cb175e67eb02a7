"""Bugs under transformations of some operands only: gradients, mapped axes, doubles, several devices."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from conformance.mutation.kernels.triggers import both, has, trains
from tests.bank import PlantedBug
from tests.planted.planting.wrapped import Arrays, Kernel, Statics, correct, planted

_bug = functools.partial(planted, family="state")
_FORWARD = ("out", "logsumexp")
_FIXED = ("segment_ids", "mask")


Pulled = dict[str, Any]
Change = Callable[[Pulled, Mapping[str, Any]], Pulled]


def _with_pullback(change: Change) -> Kernel:
    """The kernel with a backward of its own: `change(gradients, which operands are differentiated)`."""

    def kernel(arrays: Arrays, statics: Statics) -> Any:
        @jax.custom_vjp
        def call(arrays: Arrays) -> Any:
            return correct(arrays, statics)

        def save(arrays: Any) -> Any:
            values = jax.tree.map(lambda x: x.value, arrays, is_leaf=lambda x: hasattr(x, "perturbed"))
            wanted = {name: x.perturbed for name, x in arrays.items() if name not in _FIXED}
            return correct(values, statics), (values, jax.tree.map(jnp.asarray, wanted))

        def pull(saved: Any, cotangent: Any) -> tuple[Arrays]:
            values, wanted = saved
            moving = {name: x for name, x in values.items() if name not in _FIXED}
            _, pullback = jax.vjp(lambda m: correct({**values, **m}, statics), moving)
            given = jax.tree.map(_instantiated, cotangent, is_leaf=_is_symbolic)
            pulled = change(pullback(given)[0], wanted)
            return ({**jax.tree.map(lambda _: None, values), **pulled},)

        call.defvjp(save, pull, symbolic_zeros=True)
        return call(arrays)

    return kernel


def _is_symbolic(x: Any) -> bool:
    return isinstance(x, jax.custom_derivatives.SymbolicZero)


def _instantiated(x: Any) -> Any:
    return jnp.zeros(x.shape, x.dtype) if _is_symbolic(x) else x


def _only_with(name: str, *others: str) -> Change:
    """The gradient of `name` is left at zero unless one of `others` is differentiated too."""

    def change(pulled: Pulled, wanted: Mapping[str, Any]) -> Pulled:
        if name not in pulled:
            return pulled
        asked = functools.reduce(jnp.logical_or, [wanted[other] for other in others])
        return {**pulled, name: jnp.where(asked, pulled[name], 0)}

    return change


def _double_under_x64(pulled: Pulled, wanted: Mapping[str, Any]) -> Pulled:
    """A constant is a double; the cast back is left out where gradients are f32."""
    one = jnp.asarray(np.float64(1.0))
    return {name: x * one if x.dtype == jnp.float32 else x for name, x in pulled.items()}


def _manual_axes() -> tuple[str, ...]:
    return tuple(jax.sharding.get_abstract_mesh().manual_axes)


def _sums_dsinks_itself(pulled: Pulled, wanted: Mapping[str, Any]) -> Pulled:
    """Inside `shard_map` the backward adds up what JAX adds up as well."""
    if not _manual_axes() or "sinks" not in pulled:
        return pulled
    return {**pulled, "sinks": lax.psum(pulled["sinks"], _manual_axes())}


def _averages_dk(pulled: Pulled, wanted: Mapping[str, Any]) -> Pulled:
    """Inside `shard_map` gradients of keys are averaged over the devices, as those of weights are."""
    if not _manual_axes():
        return pulled
    return {**pulled, "k": pulled["k"] / lax.axis_size(_manual_axes())}


def _first_derivative_only(arrays: Arrays, statics: Statics) -> Any:
    """The backward pass is a constant to whoever differentiates it."""

    @jax.custom_vjp
    def call(arrays: Arrays) -> Any:
        return correct(arrays, statics)

    def pull(arrays: Arrays, cotangent: Any) -> tuple[Arrays]:
        moving = {name: lax.stop_gradient(x) for name, x in arrays.items() if name not in _FIXED}
        _, pullback = jax.vjp(lambda m: correct({**arrays, **m}, statics), moving)
        return ({**jax.tree.map(lambda _: None, arrays), **pullback(cotangent)[0]},)

    call.defvjp(lambda arrays: (call(arrays), arrays), pull)
    return call(arrays)


# A mapped axis of some operands only.


def _shares_first_if_alone(operand: str, *, half: bool = False) -> Kernel:
    """The batching rule takes the first entry of an operand, or of one half of a pair, if no other is mapped over."""

    def kernel(arrays: Arrays, statics: Statics) -> Any:
        @jax.custom_batching.custom_vmap
        def call(arrays: Arrays) -> Any:
            return correct(arrays, statics)

        @call.def_vmap
        def rule(axis_size: int, batched: list[Any], arrays: Arrays) -> Any:
            flags = {name: any(jax.tree.leaves(batched[0][name])) for name in arrays}
            whole = operand in arrays and all(jax.tree.leaves(batched[0][operand]))
            if operand in arrays and flags[operand] and sum(flags.values()) == 1 and whole != half:
                of_one = jax.tree.map(
                    lambda x, is_batched: x[0] if is_batched else x, arrays[operand], batched[0][operand]
                )
                arrays = {**arrays, operand: of_one}
                result = correct(arrays, statics)
                repeated = jax.tree.map(lambda x: jnp.broadcast_to(x, (axis_size, *x.shape)), result)
                return repeated, jax.tree.map(lambda _: True, result)
            axes = jax.tree.map(lambda is_batched: 0 if is_batched else None, batched[0])
            result = jax.vmap(lambda a: correct(a, statics), in_axes=(axes,))(arrays)
            return result, jax.tree.map(lambda _: True, result)

        @jax.custom_vjp
        def differentiable(arrays: Arrays) -> Any:
            return call(arrays)

        def pull(arrays: Arrays, cotangent: Any) -> tuple[Arrays]:
            moving = {name: x for name, x in arrays.items() if name not in _FIXED}
            _, pullback = jax.vjp(lambda m: correct({**arrays, **m}, statics), moving)
            return ({**jax.tree.map(lambda _: None, arrays), **pullback(cotangent)[0]},)

        differentiable.defvjp(lambda arrays: (call(arrays), arrays), pull)
        return differentiable(arrays)

    return kernel


def _repeats_shared_rows(arrays: Arrays, statics: Statics) -> Any:
    """A mapped call without extras is one call of a larger batch; what is not mapped over is repeated row by row."""
    if set(arrays) != {"q", "k", "v"}:
        return correct(arrays, statics)

    @jax.custom_batching.custom_vmap
    def call(arrays: Arrays) -> Any:
        return correct(arrays, statics)

    @call.def_vmap
    def rule(axis_size: int, batched: list[Any], arrays: Arrays) -> Any:
        merged = {
            name: x.reshape(-1, *x.shape[2:]) if batched[0][name] else jnp.repeat(x, axis_size, axis=0)
            for name, x in arrays.items()
        }
        result = jax.tree.map(lambda x: x.reshape(axis_size, -1, *x.shape[1:]), correct(merged, statics))
        return result, jax.tree.map(lambda _: True, result)

    @jax.custom_vjp
    def differentiable(arrays: Arrays) -> Any:
        return call(arrays)

    def pull(arrays: Arrays, cotangent: Any) -> tuple[Arrays]:
        return jax.vjp(lambda moving: correct(moving, statics), arrays)[1](cotangent)

    differentiable.defvjp(lambda arrays: (call(arrays), arrays), pull)
    return differentiable(arrays)


def _first_cotangent(arrays: Arrays, statics: Statics) -> Any:
    """The batching rule of the backward takes the first cotangent if nothing else has the mapped axis."""

    def moved(arrays: Arrays, cotangent: Any) -> Pulled:
        moving = {name: x for name, x in arrays.items() if name not in _FIXED}
        pulled: Pulled = jax.vjp(lambda m: correct({**arrays, **m}, statics), moving)[1](cotangent)[0]
        return pulled

    @jax.custom_batching.custom_vmap
    def back(arrays: Arrays, cotangent: Any) -> Pulled:
        return moved(arrays, cotangent)

    @back.def_vmap
    def rule(axis_size: int, batched: list[Any], arrays: Arrays, cotangent: Any) -> Any:
        if not any(jax.tree.leaves(batched[0])):
            cotangent = jax.tree.map(
                lambda x, mapped: jnp.broadcast_to(x[0], x.shape) if mapped else x, cotangent, batched[1]
            )
        axes = jax.tree.map(lambda is_batched: 0 if is_batched else None, tuple(batched))
        result = jax.vmap(moved, in_axes=axes)(arrays, cotangent)
        return result, jax.tree.map(lambda _: True, result)

    @jax.custom_vjp
    def call(arrays: Arrays) -> Any:
        return correct(arrays, statics)

    def pull(arrays: Arrays, cotangent: Any) -> tuple[Arrays]:
        return ({**jax.tree.map(lambda _: None, arrays), **back(arrays, cotangent)},)

    call.defvjp(lambda arrays: (call(arrays), arrays), pull)
    return call(arrays)


def _double_residuals(arrays: Arrays, statics: Statics) -> Any:
    """A constant of the logarithm is a double where there are doubles."""
    result = correct(arrays, statics)
    if not statics["save_residuals"]:
        return result
    return result[0], {**result[1], "logsumexp": result[1]["logsumexp"] + jnp.asarray(np.float64(0.0))}


_vmap_bug = functools.partial(_bug, shows=_FORWARD, kind="vmap.partial-axes")

BUGS: tuple[PlantedBug, ...] = (
    _bug(
        "dq-only-with-dk",
        _with_pullback(_only_with("q", "k")),
        kind="grad.partial",
        reference="inferred from flash-attention issue 906: queries trained, keys and values frozen",
        shows=("dq",),
        trigger=trains(),
    ),
    _bug(
        "dv-only-with-dq",
        _with_pullback(_only_with("v", "q")),
        kind="grad.partial",
        reference="inferred from flash-attention issue 906",
        shows=("dv",),
        trigger=trains(),
    ),
    _bug(
        "dsinks-only-with-other-gradients",
        _with_pullback(_only_with("sinks", "q", "k", "v")),
        kind="grad.partial",
        reference="Primus-Turbo PR 458: sinks that are all that is learned get no gradient",
        shows=("dsinks",),
        trigger=trains("sinks"),
    ),
    _bug(
        "dbias-only-with-dq",
        _with_pullback(_only_with("bias", "q")),
        kind="grad.partial",
        reference="inferred from Primus-Turbo PR 458",
        shows=("dbias",),
        trigger=trains("bias"),
    ),
    _bug(
        "second-derivatives-are-zero",
        _first_derivative_only,
        kind="grad.second",
        reference="inferred from pytorch issue 116350; NATTEN issue 191",
        shows=("second",),
        trigger=trains(),
    ),
    _vmap_bug(
        "vmap-shares-first-keys-if-alone",
        _shares_first_if_alone("k"),
        reference="inferred from jax commit 3b20cce354, issue 38495",
    ),
    _vmap_bug(
        "vmap-without-extras-repeats-shared-rows",
        _repeats_shared_rows,
        reference="inferred from batching rules that fold the mapped axis into the batch",
    ),
    _vmap_bug(
        "vmap-shares-first-values-if-alone",
        _shares_first_if_alone("v"),
        reference="inferred from jax commit 3b20cce354, issue 38495",
    ),
    _vmap_bug(
        "vmap-shares-first-bias-if-alone",
        _shares_first_if_alone("bias"),
        reference="inferred from jax commits b7e26ba3ee, d29a757e30: the bias in a batching rule",
        trigger=has("bias"),
    ),
    _vmap_bug(
        "vmap-shares-first-ids-of-keys-if-alone",
        _shares_first_if_alone("segment_ids", half=True),
        reference="inferred from jax commit 3b20cce354, issue 38495, for one array of a pair",
        trigger=has("seg"),
    ),
    _bug(
        "vmap-shares-first-cotangent-if-alone",
        _first_cotangent,
        kind="vmap.partial-axes",
        reference="inferred from jax issue 38495: a Jacobian maps the backward over cotangents alone",
        shows=("dq", "dk", "dv"),
        trigger=trains(),
    ),
    _bug(
        "x64-promotes-logsumexp",
        _double_residuals,
        kind="x64.constant",
        reference="inferred from jax commit e935bd112b, issue 37422",
        shows=("logsumexp",),
    ),
    _bug(
        "x64-promotes-gradients",
        _with_pullback(_double_under_x64),
        kind="x64.constant",
        reference="inferred from tokamax issue 1349, a kernel that does not trace where there are doubles",
        shows=("dq", "dk", "dv", "error"),
        trigger=both(trains(), lambda case: case.dtype == "f32"),
    ),
    _bug(
        "shard-adds-dsinks-twice",
        _with_pullback(_sums_dsinks_itself),
        kind="shard.extra-psum",
        reference="jax PR 19174, issue 19175: a psum too many in a custom backward",
        shows=("dsinks",),
        trigger=trains("sinks"),
    ),
    _bug(
        "shard-averages-dk",
        _with_pullback(_averages_dk),
        kind="shard.average",
        reference="inferred from jax issue 3970: who adds up gradients under a mapped axis",
        shows=("dk",),
        trigger=trains(),
    ),
)
