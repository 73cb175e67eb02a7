"""Kernels that go wrong with the depth, the heads or the batch of a call."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tests.planted.planting import wrapped
from tests.planted.planting.wrapped import Arrays, Kernel, Statics

Array = Any


def power_of_two(size: int) -> int:
    """The smallest power of two that is not less."""
    return 1 << (size - 1).bit_length()


def scaled_by(scale: Callable[[int, int], float]) -> Kernel:
    """The usual scale is `scale(H, V)`."""

    def kernel(arrays: Arrays, statics: Statics) -> Any:
        if statics["scale"] is None:
            statics = {**statics, "scale": scale(arrays["q"].shape[-1], arrays["v"].shape[-1])}
        return wrapped.correct(arrays, statics)

    return kernel


def with_depth(take: Callable[[int], int]) -> Kernel:
    """Products of q and k are over the first `take(H)` channels."""

    def kernel(arrays: Arrays, statics: Statics) -> Any:
        depth = arrays["q"].shape[-1]
        scale = depth**-0.5 if statics["scale"] is None else statics["scale"]
        q, k = (arrays[name][..., : take(depth)] for name in "qk")
        return wrapped.correct({**arrays, "q": q, "k": k}, {**statics, "scale": scale})

    return kernel


def without_gradient(name: str, start: Callable[[int], int]) -> Kernel:
    """The operand has no gradient from channel `start(depth)` on."""

    def kernel(arrays: Arrays, statics: Statics) -> Any:
        x = arrays[name]
        at = start(x.shape[-1])
        x = jnp.concatenate([x[..., :at], jax.lax.stop_gradient(x[..., at:])], axis=-1)
        return wrapped.correct({**arrays, name: x}, statics)

    return kernel


def outputs(change: Callable[[Array, Arrays], Array]) -> Kernel:
    """`out` is changed behind the kernel."""

    def kernel(arrays: Arrays, statics: Statics) -> Any:
        found = wrapped.correct(arrays, statics)
        if not statics["save_residuals"]:
            return change(found, arrays)
        return change(found[0], arrays), found[1]

    return kernel


def values_by_key_depth(arrays: Arrays, statics: Statics) -> Any:
    """What dq and dk get from values and cotangents is over the first H channels."""
    depth = arrays["q"].shape[-1]
    if arrays["v"].shape[-1] <= depth:
        return wrapped.correct(arrays, statics)
    still = {name: x if name == "v" else jax.lax.stop_gradient(x) for name, x in arrays.items()}
    first = wrapped.correct({**arrays, "v": arrays["v"][..., :depth]}, statics)
    rest = wrapped.correct({**still, "v": arrays["v"][..., depth:]}, statics)
    if not statics["save_residuals"]:
        return jnp.concatenate([first, rest], axis=-1)
    return jnp.concatenate([first[0], rest[0]], axis=-1), first[1]


def lanes_of_the_next_head(arrays: Arrays, statics: Statics) -> Any:
    """The depth is padded to a power of two by what lies behind it in memory."""
    depth = arrays["q"].shape[-1]
    scale = depth**-0.5 if statics["scale"] is None else statics["scale"]

    def padded(x: Array) -> Array:
        behind = jnp.roll(x.reshape(x.shape[0], -1, depth), -1, axis=1).reshape(x.shape)
        return jnp.concatenate([x, behind[..., : power_of_two(depth) - depth]], axis=-1)

    changed = {**arrays, "q": padded(arrays["q"]), "k": padded(arrays["k"])}
    return wrapped.correct(changed, {**statics, "scale": scale})


def group_sum(total: Callable[[Array], Array]) -> Kernel:
    """Gradients of the heads of a group, `[B, S, K, G, D]`, become `total` of them."""

    def repeated(x: Array, group: int) -> Array:
        @jax.custom_vjp
        def repeat(x: Array) -> Array:
            return jnp.repeat(x, group, axis=2)

        def pull_back(_: None, g: Array) -> tuple[Array]:
            return (total(g.reshape(*g.shape[:2], -1, group, g.shape[-1])),)

        repeat.defvjp(lambda x: (repeat(x), None), pull_back)
        return repeat(x.astype(jnp.float32))

    def kernel(arrays: Arrays, statics: Statics) -> Any:
        group = arrays["q"].shape[2] // arrays["k"].shape[2]
        if group == 1:
            return wrapped.correct(arrays, statics)
        k, v = repeated(arrays["k"], group), repeated(arrays["v"], group)
        return wrapped.correct({**arrays, "k": k, "v": v}, statics)

    return kernel


def by_halving(g: Array) -> Array:
    """A tree of pairs, which leaves out the odd one of each level."""
    while (count := g.shape[3]) > 1:
        g = g[:, :, :, : count // 2] + g[:, :, :, count // 2 : count // 2 * 2]
    return g[:, :, :, 0]


def divided_by_kv_heads(g: Array) -> Array:
    """A query head's key head is its number over the number of key heads, not over the size of a group."""
    kv_heads = g.shape[2]
    flat = g.reshape(*g.shape[:2], -1, g.shape[-1])
    owner = jnp.arange(flat.shape[2]) // kv_heads
    return jnp.stack([jnp.where((owner == k)[:, None], flat, 0).sum(axis=2) for k in range(kv_heads)], axis=2)


def head_map(kv_head: Callable[[Array, int, int], Array]) -> Kernel:
    """Query head `n` reads key head `kv_head(n, N, K)`."""

    def kernel(arrays: Arrays, statics: Statics) -> Any:
        heads, kv_heads = arrays["q"].shape[2], arrays["k"].shape[2]
        at = jnp.minimum(kv_head(jnp.arange(heads), heads, kv_heads), kv_heads - 1)
        k, v = (arrays[name].astype(jnp.float32)[:, :, at] for name in "kv")
        return wrapped.correct({**arrays, "k": k, "v": v}, statics)

    return kernel


def padded_group(n: Array, heads: int, kv_heads: int) -> Array:
    """Groups are padded to a power of two, and heads are numbered as if they were."""
    return n // power_of_two(heads // kv_heads)


def tiles_of_four_heads(n: Array, heads: int, kv_heads: int) -> Array:
    """Large groups are taken four heads at a time; the first head of a tile says what the tile reads."""
    group = heads // kv_heads
    return (n // 4 * 4 if group > 4 else n) // group


def operand(name: str, change: Callable[[Array, Arrays], Array]) -> Kernel:
    """The operand is changed in front of the kernel, where the call has it."""

    def kernel(arrays: Arrays, statics: Statics) -> Any:
        if name in arrays:
            arrays = {**arrays, name: change(arrays[name], arrays)}
        return wrapped.correct(arrays, statics)

    return kernel


def swapped_programs(arrays: Arrays, statics: Statics) -> Any:
    """Programs of four batch rows and more run head after head; keys and values are still read row after row."""
    batch, _, heads, _ = arrays["q"].shape
    if batch < 4:
        return wrapped.correct(arrays, statics)
    program = jnp.arange(batch * heads)
    row, head = program % batch, program // batch // (heads // arrays["k"].shape[2])

    def read(x: Array) -> Array:
        x = x.astype(jnp.float32)[row, :, head]  # [B * N, S, D]
        return x.reshape(batch, heads, *x.shape[1:]).transpose(0, 2, 1, 3)

    return wrapped.correct({**arrays, "k": read(arrays["k"]), "v": read(arrays["v"])}, statics)


def integer_root(depth: int, v_depth: int) -> float:
    """The scale by a root in integers."""
    return 1 / math.isqrt(depth)
