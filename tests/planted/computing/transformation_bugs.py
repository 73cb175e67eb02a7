"""Bugs that only show under a transformation: vmap, jit, shard_map, x64, a second call, or none at all."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from conformance.mutation.kernels.triggers import has
from tests.bank import PlantedBug
from tests.planted.planting.wrapped import Arrays, Kernel, Statics, correct, planted

_bug = functools.partial(planted, family="transforms")


def batched_by(rule: Any) -> Kernel:
    """The correct kernel with a batching rule of its own: `rule(arrays, batched, axis_size, statics) -> result`."""

    def kernel(arrays: Arrays, statics: Statics) -> Any:
        @jax.custom_batching.custom_vmap
        def call(arrays: Arrays) -> Any:
            return correct(arrays, statics)

        @call.def_vmap
        def batch(axis_size: int, batched: list[Any], arrays: Arrays) -> Any:
            result = rule(arrays, batched[0], axis_size, statics)
            return result, jax.tree.map(lambda _: True, result)

        # A batching rule has no derivative of its own; the one here is that of the correct kernel.
        @jax.custom_vjp
        def differentiable(arrays: Arrays) -> Any:
            return call(arrays)

        def pull(arrays: Arrays, cotangent: Any) -> tuple[Arrays]:
            moving = {name: x for name, x in arrays.items() if name not in ("segment_ids", "mask")}
            _, pullback = jax.vjp(lambda m: correct({**arrays, **m}, statics), moving)
            return ({**jax.tree.map(lambda _: None, arrays), **pullback(cotangent)[0]},)

        differentiable.defvjp(lambda arrays: (call(arrays), arrays), pull)
        return differentiable(arrays)

    return kernel


def mapped(arrays: Arrays, batched: Any, statics: Statics) -> Any:
    axes = jax.tree.map(lambda is_batched: 0 if is_batched else None, batched)
    return jax.vmap(lambda a: correct(a, statics), in_axes=(axes,))(arrays)


def _drops(option: str) -> Kernel:
    return batched_by(lambda arrays, batched, size, statics: mapped(arrays, batched, {**statics, option: None}))


def _shares_first(operand: str) -> Kernel:
    """The batching rule takes the first entry of an operand for all."""

    def rule(arrays: Arrays, batched: Any, size: int, statics: Statics) -> Any:
        if operand in arrays and all(jax.tree.leaves(batched[operand])):
            arrays = {**arrays, operand: jax.tree.map(lambda x: x[0], arrays[operand])}
            batched = {**batched, operand: jax.tree.map(lambda _: False, batched[operand])}
        return mapped(arrays, batched, statics)

    return batched_by(rule)


def _folds_unbatched_in_wrong_order(arrays: Arrays, batched: Any, size: int, statics: Statics) -> Any:
    """The mapped axis is folded into the batch; what is not mapped is repeated row by row, not tiled."""
    folded = {}
    for name, x in arrays.items():
        flags = jax.tree.leaves(batched[name])
        if name in ("sinks", "mask") or (name == "bias" and x.shape[-4] == 1):
            if any(flags):
                return mapped(arrays, batched, statics)
            folded[name] = x
        elif all(flags):
            folded[name] = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), x)
        else:
            folded[name] = jax.tree.map(lambda leaf: jnp.repeat(leaf, size, axis=0), x)
    result = correct(folded, statics)
    return jax.tree.map(lambda leaf: leaf.reshape(size, -1, *leaf.shape[1:]), result)


def _first_static_wins(option: str) -> Kernel:
    """Kernels are kept by the shapes of their operands alone."""
    kept: dict[Any, Any] = {}

    def kernel(arrays: Arrays, statics: Statics) -> Any:
        if statics[option] is None:
            return correct(arrays, statics)
        others = tuple((name, value) for name, value in statics.items() if name != option)
        shapes = tuple(str(jax.tree.map(lambda x: (jnp.shape(x), str(x.dtype)), arrays[name])) for name in arrays)
        value = kept.setdefault((shapes, others), statics[option])
        return correct(arrays, {**statics, option: value})

    return kernel


def _scale_of_one_wins() -> Kernel:
    """A program for a scale of 1, or for any other, is kept by the shapes of its operands."""
    kept: dict[Any, bool] = {}

    def kernel(arrays: Arrays, statics: Statics) -> Any:
        if (scale := statics["scale"]) is None:
            return correct(arrays, statics)
        is_one = kept.setdefault(str(jax.tree.map(lambda x: (jnp.shape(x), str(x.dtype)), arrays)), scale == 1)
        return correct(arrays, {**statics, "scale": 1.0 if is_one else scale})

    return kernel


def _wrong_outside_jit(arrays: Arrays, statics: Statics) -> Any:
    if not isinstance(arrays["q"], jax.core.Tracer):
        statics = {**statics, "soft_cap": None}
    return correct(arrays, statics)


def _promotes_under_x64(arrays: Arrays, statics: Statics) -> Any:
    """The last division is by a double; the cast back is left out where the operands are f32 anyway."""
    result = correct(arrays, statics)
    out, *rest = result if isinstance(result, tuple) else (result,)
    quotient = out / jnp.asarray(np.float64(1.0))
    out = quotient if out.dtype == jnp.float32 else quotient.astype(out.dtype)
    return (out, *rest) if rest else out


def _not_the_same_twice(arrays: Arrays, statics: Statics) -> Any:
    """Terms are added up in an order that changes from call to call: the last bits do."""
    state = {"calls": 0}

    def jitter(x: Any) -> Any:
        state["calls"] += 1
        return np.asarray(x) * np.float32(1 + 2.0**-23 * (state["calls"] % 2))

    @jax.custom_jvp
    def jittered(out: jax.Array) -> jax.Array:
        wide = out.astype(jnp.float32)
        changed = jax.pure_callback(
            jitter, jax.ShapeDtypeStruct(wide.shape, wide.dtype), wide, vmap_method="expand_dims"
        )
        return changed.astype(out.dtype)

    jittered.defjvp(lambda primals, tangents: (jittered(*primals), tangents[0]))
    result = correct(arrays, statics)
    return (jittered(result[0]), result[1]) if isinstance(result, tuple) else jittered(result)


def _offset_by_device(arrays: Arrays, statics: Statics) -> Any:
    """Inside `shard_map` the queries are taken to be this device's contiguous part of a sharded sequence."""
    axes = jax.sharding.get_abstract_mesh().manual_axes
    if not axes or not statics["causal"]:
        return correct(arrays, statics)
    q_length, kv_length = arrays["q"].shape[1], arrays["k"].shape[1]
    offset = lax.axis_index(axes[0]) * q_length
    i, j = jnp.arange(q_length)[:, None] + offset, jnp.arange(kv_length)[None]
    return correct({**arrays, "mask": (j <= i)[None, None]}, {**statics, "causal": False})


def _contiguous_rows(arrays: Arrays, statics: Statics) -> Any:
    """Inside `shard_map` a mask of some of the queries is rebuilt as if they were contiguous."""
    axes = jax.sharding.get_abstract_mesh().manual_axes
    if not axes or "mask" not in arrays or arrays["mask"].shape[-2] == arrays["k"].shape[1]:
        return correct(arrays, statics)
    q_length, kv_length = arrays["q"].shape[1], arrays["k"].shape[1]
    i = jnp.arange(q_length)[:, None] + lax.axis_index(axes[0]) * q_length
    return correct({**arrays, "mask": (jnp.arange(kv_length)[None] <= i)[None, None]}, statics)


def _global_sinks(arrays: Arrays, statics: Statics) -> Any:
    """Inside `shard_map` over heads, every device takes the sinks of the first."""
    axes = jax.sharding.get_abstract_mesh().manual_axes
    if axes and "sinks" in arrays:
        arrays = {**arrays, "sinks": lax.all_gather(arrays["sinks"], axes[0])[0]}
    return correct(arrays, statics)


def _writes_into_q(arrays: Arrays, statics: Statics) -> Any:
    q = arrays["q"]
    scale = q.shape[-1] ** -0.5 if statics["scale"] is None else statics["scale"]
    if isinstance(q, np.ndarray):
        q *= np.asarray(scale, q.dtype)  # in place for NumPy, a new array for JAX
        return correct({**arrays, "q": q}, {**statics, "scale": 1.0})
    return correct(arrays, statics)


def _in_wrong_order(arrays: Arrays, batched: Any, size: int, statics: Statics) -> Any:
    """The mapped axis comes back the wrong way round."""
    return jax.tree.map(lambda x: x[::-1], mapped(arrays, batched, statics))


_LOST = "jax ccabd21084"
BUGS: tuple[PlantedBug, ...] = (
    _bug("vmap-drops-scale", _drops("scale"), kind="vmap.param-dropped", reference=_LOST, shows=("out", "dq")),
    _bug(
        "vmap-shares-first-sinks",
        _shares_first("sinks"),
        kind="sink.vmap",
        reference="jax fd4d5dd224",
        shows=("out",),
    ),
    _bug(
        "vmap-shares-first-segment-ids",
        _shares_first("segment_ids"),
        kind="I.batch0-mask",
        reference="inferred from jax 3b20cce354: unbatched operands in a batching rule",
        shows=("out",),
    ),
    _bug(
        "vmap-folds-unbatched-operands-in-wrong-order",
        batched_by(_folds_unbatched_in_wrong_order),
        kind="vmap.partial-axes",
        reference="jax 3b20cce354, issue 38495",
        shows=("out",),
    ),
    _bug(
        "vmap-returns-results-in-wrong-order",
        batched_by(_in_wrong_order),
        kind="vmap.shape-restore",
        reference="jax 3f7a31a830",
        shows=("out",),
    ),
    _bug(
        "jit-cache-omits-soft-cap",
        _first_static_wins("soft_cap"),
        kind="cap.jit-cache",
        reference="flash-attention PR 2402",
        shows=("out", "effect_of_soft_cap"),
    ),
    _bug(
        "jit-cache-omits-scale",
        _first_static_wins("scale"),
        kind="I.jit-static",
        reference="inferred from flash-attention PR 2402",
        shows=("out",),
    ),
    _bug(
        "program-of-a-scale-of-one-kept",
        _scale_of_one_wins(),
        kind="I.jit-static",
        reference="inferred from flash-attention PR 2402, for the value that needs no product",
        shows=("out",),
        trigger=has("scale"),
    ),
    _bug(
        "eager-path-drops-soft-cap",
        _wrong_outside_jit,
        kind="cap.dropped-by-backend",
        reference="sglang issue 33915, PR 34093",
        shows=("out",),
    ),
    _bug(
        "x64-promotes-out",
        _promotes_under_x64,
        kind="mask.value-overflow",
        reference="jax e935bd112b, issue 37422: constants under x64",
        shows=("out",),
    ),
    _bug(
        "not-the-same-bits-twice",
        _not_the_same_twice,
        kind="race.syncthreads",
        reference="llama.cpp PR 13438; flash-attention issue 359",
        shows=("bits", "out", "logsumexp"),
    ),
    _bug(
        "shard-offsets-queries-by-device",
        _offset_by_device,
        kind="ring.mask-shard",
        reference="tokamax 657b71a",
        shows=("out", "dq"),
    ),
    _bug(
        "shard-takes-reordered-queries-as-contiguous",
        _contiguous_rows,
        kind="cp.local-not-reordered",
        reference="maxtext b4e047211",
        shows=("out", "dq"),
    ),
    _bug(
        "shard-takes-sinks-of-first-device",
        _global_sinks,
        kind="sink.packgqa-row",
        reference="sgl-kernel-xpu PR 254; inferred for head shards",
        shows=("out", "dsinks"),
    ),
    _bug(
        "writes-into-q",
        _writes_into_q,
        kind="I.mutate-input",
        reference="KernelBench PR 82",
        shows=("operands",),
    ),
)
