"""Bugs of backward passes where something is shared or combined: kinds of layers, queries' keys, a bias, `jit`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from conformance.mutation.kernels.triggers import trains
from tests.bank import PlantedBug
from tests.planted.planting.wrapped import Arrays, Kernel, Statics, correct, planted

_bug = functools.partial(planted, family="state")
_FIXED = ("segment_ids", "mask")

Pulled = dict[str, Any]


def _statics_of_the_last_call(arrays: Arrays, statics: Statics) -> Any:
    """The backward pass finds its mask, scale and soft cap where the last call left them."""
    _LAST.update({"statics": statics})

    @jax.custom_vjp
    def call(arrays: Arrays) -> Any:
        return correct(arrays, statics)

    def pull(arrays: Arrays, cotangent: Any) -> tuple[Arrays]:
        last = {**_LAST["statics"], "save_residuals": statics["save_residuals"]}
        moving = {name: x for name, x in arrays.items() if name not in _FIXED}
        _, pullback = jax.vjp(lambda m: correct({**arrays, **m}, last), moving)
        return ({**jax.tree.map(lambda _: None, arrays), **pullback(cotangent)[0]},)

    call.defvjp(lambda arrays: (call(arrays), arrays), pull)
    return call(arrays)


_LAST: dict[str, Statics] = {}


def backward_by(back: Callable[[Arrays, Any, Statics], Pulled]) -> Kernel:
    """The kernel with `back(arrays, cotangent, statics)` for a backward pass."""

    def kernel(arrays: Arrays, statics: Statics) -> Any:
        @jax.custom_vjp
        def call(arrays: Arrays) -> Any:
            return correct(arrays, statics)

        def pull(arrays: Arrays, cotangent: Any) -> tuple[Arrays]:
            return ({**jax.tree.map(lambda _: None, arrays), **back(arrays, cotangent, statics)},)

        call.defvjp(lambda arrays: (call(arrays), arrays), pull)
        return call(arrays)

    return kernel


def pulled_back(arrays: Arrays, cotangent: Any, statics: Statics) -> Pulled:
    moving = {name: x for name, x in arrays.items() if name not in _FIXED}
    pulled: Pulled = jax.vjp(lambda m: correct({**arrays, **m}, statics), moving)[1](cotangent)[0]
    return pulled


def _without_cap_outside_jit(arrays: Arrays, cotangent: Any, statics: Statics) -> Pulled:
    """What gets arrays takes a path of its own."""
    traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((arrays, cotangent)))
    return pulled_back(arrays, cotangent, statics if traced else {**statics, "soft_cap": None})


def _of_shared_keys_by_the_first(arrays: Arrays, cotangent: Any, statics: Statics) -> Pulled:
    """The batching rule of the backward: keys without the mapped axis get the gradient of its first entry."""

    @jax.custom_batching.custom_vmap
    def back(arrays: Arrays, cotangent: Any) -> Pulled:
        return pulled_back(arrays, cotangent, statics)

    @back.def_vmap
    def rule(axis_size: int, batched: list[Any], arrays: Arrays, cotangent: Any) -> Any:
        axes = jax.tree.map(lambda mapped: 0 if mapped else None, tuple(batched))
        result = jax.vmap(lambda a, do: pulled_back(a, do, statics), in_axes=axes)(arrays, cotangent)
        shared = not batched[0]["k"] and batched[0]["q"]
        return {**result, "k": result["k"][0]} if shared else result, {
            name: name != "k" or not shared for name in result
        }

    return back(arrays, cotangent)


def _of_the_first_key(arrays: Arrays, cotangent: Any, statics: Statics) -> Pulled:
    """The sum over keys was meant for the axes before."""
    bias = arrays.get("bias")
    if bias is None or bias.shape[-1] > 1:
        return pulled_back(arrays, cotangent, statics)
    whole = jax.numpy.broadcast_to(bias, (*bias.shape[:-1], arrays["k"].shape[1]))
    pulled = pulled_back({**arrays, "bias": whole}, cotangent, statics)
    return {**pulled, "bias": pulled["bias"][..., :1]}


BUGS: tuple[PlantedBug, ...] = (
    _bug(
        "dbias-of-shared-keys-is-that-of-the-first",
        backward_by(_of_the_first_key),
        kind="grad.broadcast",
        reference="inferred from backward passes that sum `dbias` over batch rows, heads and queries alone",
        shows=("dbias",),
        trigger=trains("bias"),
    ),
    _bug(
        "backward-has-the-statics-of-the-last-call",
        _statics_of_the_last_call,
        kind="grad.state",
        reference="inferred from kernels that keep their configuration in a module; models alternate kinds of layers",
        shows=("dq", "dk", "dv"),
        trigger=trains(),
    ),
    _bug(
        "eager-backward-drops-soft-cap",
        backward_by(_without_cap_outside_jit),
        kind="grad.eager",
        reference="inferred from paths that are taken for concrete arrays, in the backward pass alone",
        shows=("dq", "dk"),
        trigger=trains("soft_cap"),
    ),
    _bug(
        "vmap-gives-shared-keys-the-first-gradient",
        backward_by(_of_shared_keys_by_the_first),
        kind="vmap.partial-axes",
        reference="inferred from jax issue 38495, for queries that share a prefix",
        shows=("dk",),
        trigger=trains(),
    ),
)
