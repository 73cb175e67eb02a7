"""Bugs that show between calls, rarely, or on another machine."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cases.case import Case
from conformance.mutation.kernels.triggers import has
from tests.bank import PlantedBug
from tests.planted.planting.wrapped import Arrays, Kernel, Statics, correct, implementation, planted

_bug = functools.partial(planted, family="state")


def _fresh(name: str, make: Callable[[], Kernel], **facts: Any) -> PlantedBug:
    """The bug of a kernel that keeps something from call to call: each one that is built starts anew."""
    return dataclasses.replace(_bug(name, correct, **facts), build=lambda: implementation(name, make()))


_FORWARD = ("out", "logsumexp")
# The call of so many that goes wrong.
_RARE = 97


def _eager(arrays: Arrays) -> bool:
    return not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(arrays))


def _like(arrays: Arrays, statics: Statics) -> str:
    """What a compiled function is kept by: structure, shapes and dtypes, and what is static."""
    return str((jax.tree.map(lambda x: (jnp.shape(x), str(x.dtype)), arrays), statics))


# Kept from an earlier call.


def _kept(operand: str) -> Kernel:
    """Outside `jit`, what was made of an operand is kept, by its shape."""
    kept: dict[str, Any] = {}

    def kernel(arrays: Arrays, statics: Statics) -> Any:
        if operand not in arrays or not _eager(arrays):
            return correct(arrays, statics)
        first = kept.setdefault(_like(arrays, statics), jax.tree.map(jnp.array, arrays[operand]))
        return correct({**arrays, operand: first}, statics)

    return kernel


def _cap_by_whole_number() -> Kernel:
    """Kernels are kept by all that is static, the soft cap as a whole number."""
    kept: dict[str, float] = {}

    def kernel(arrays: Arrays, statics: Statics) -> Any:
        if (cap := statics["soft_cap"]) is None:
            return correct(arrays, statics)
        key = _like({}, {**statics, "soft_cap": round(cap)})
        return correct(arrays, {**statics, "soft_cap": kept.setdefault(key, cap)})

    return kernel


def _by_identity(operand: str) -> Kernel:
    """The copy of a NumPy operand on the device is kept by the identity of the array."""
    kept: dict[int, tuple[Any, Any]] = {}

    def kernel(arrays: Arrays, statics: Statics) -> Any:
        if not isinstance(given := arrays.get(operand), np.ndarray):
            return correct(arrays, statics)
        _, there = kept.setdefault(id(given), (given, jnp.array(given)))
        return correct({**arrays, operand: there}, statics)

    return kernel


def _bias_by_its_first_row(arrays: Arrays, statics: Statics) -> Any:
    """Outside `jit`, a bias of zeros is left out, and is told by its first row."""
    if "bias" not in arrays or not _eager(arrays) or bool(jnp.any(arrays["bias"][:, :, 0])):
        return correct(arrays, statics)
    return correct({name: x for name, x in arrays.items() if name != "bias"}, statics)


def _clipped_to_history() -> Kernel:
    """Values are scaled by the largest of the call before, and saturate beyond it."""
    history: list[float] = []

    def kernel(arrays: Arrays, statics: Statics) -> Any:
        if not _eager(arrays):
            return correct(arrays, statics)
        top = history[-1] if history else np.inf
        history.append(float(jnp.abs(arrays["v"]).max()))
        return correct({**arrays, "v": jnp.clip(arrays["v"], -top, top).astype(arrays["v"].dtype)}, statics)

    return kernel


def _precision_of_first_call() -> Kernel:
    """Kernels are kept by shape; one made for bf16 is then used for f32 too."""
    kept: dict[str, Any] = {}

    def kernel(arrays: Arrays, statics: Statics) -> Any:
        shapes = str((jax.tree.map(jnp.shape, arrays), statics))
        first, dtype = kept.setdefault(shapes, arrays["q"].dtype), arrays["q"].dtype
        if jnp.finfo(first).bits >= jnp.finfo(dtype).bits:
            return correct(arrays, statics)
        bits = jnp.finfo(first)
        narrow = {name: lax.reduce_precision(arrays[name], bits.nexp, bits.nmant) for name in ("q", "k", "v")}
        return correct({**arrays, **narrow}, statics)

    return kernel


# NumPy, chance, and other machines.


def _writes_into_mask(arrays: Arrays, statics: Statics) -> Any:
    """A mask that is a NumPy array has the causal one put into it."""
    mask, t, s = arrays.get("mask"), arrays["q"].shape[1], arrays["k"].shape[1]
    if isinstance(mask, np.ndarray) and statics["causal"] and mask.shape[2:] == (t, s) and mask.flags.writeable:
        mask &= np.tri(t, s, dtype=bool)
    return correct(arrays, statics)


_GIVEN_AWAY = jax.jit(lambda q: q * 1, donate_argnums=0)


def _donates_q(arrays: Arrays, statics: Statics) -> Any:
    """Queries are donated to a program of the kernel's own, as a step of a model may do with what it made itself."""
    if not isinstance(arrays["q"], jax.core.Tracer):
        arrays = {**arrays, "q": _GIVEN_AWAY(arrays["q"])}
    return correct(arrays, statics)


def _rarely_wrong() -> Kernel:
    """One call of many reads a row before it is written."""
    state = {"calls": 0}

    def late(x: Any) -> Any:
        state["calls"] += 1
        there = np.array(x)
        if state["calls"] % _RARE == 0:
            there[:, -1] = 0
        return there

    @jax.custom_jvp
    def read(out: jax.Array) -> jax.Array:
        there: jax.Array = jax.pure_callback(
            late, jax.ShapeDtypeStruct(out.shape, out.dtype), out, vmap_method="sequential"
        )
        return there

    read.defjvp(lambda primals, tangents: (read(*primals), tangents[0]))

    def kernel(arrays: Arrays, statics: Statics) -> Any:
        result = correct(arrays, statics)
        return (read(result[0]), result[1]) if isinstance(result, tuple) else read(result)

    return kernel


def _without_sinks_and_bias(arrays: Arrays, statics: Statics) -> Any:
    kept = {name: x for name, x in arrays.items() if name not in ("sinks", "bias")}
    return correct(kept, {**statics, "soft_cap": None})


def _other_branch_on_chips(arrays: Arrays, statics: Statics) -> Any:
    """The kernel for chips takes fewer operands than the one for CPUs, and nobody says so."""
    return lax.platform_dependent(
        arrays,
        default=lambda arrays: correct(arrays, statics),
        tpu=lambda arrays: _without_sinks_and_bias(arrays, statics),
        cuda=lambda arrays: _without_sinks_and_bias(arrays, statics),
    )


def _other_route_on_chips(arrays: Arrays, statics: Statics) -> Any:
    """Which kernel is taken is asked of JAX, before anything is traced."""
    on_chip = jax.default_backend() != "cpu"
    return (_without_sinks_and_bias if on_chip else correct)(arrays, statics)


def _any_extra(case: Case) -> bool:
    return bool(case.sinks) or case.bias is not None or case.soft_cap is not None


_kept_bug = functools.partial(_fresh, shows=_FORWARD)

BUGS: tuple[PlantedBug, ...] = (
    _kept_bug(
        "eager-mask-kept-by-shape",
        lambda: _kept("mask"),
        kind="state.kept",
        reference="inferred from Model-Optimizer PR 1343, where a mask is kept by too little",
        trigger=lambda case: case.mask not in ("full", "causal"),
    ),
    _kept_bug(
        "eager-bias-kept-by-shape",
        lambda: _kept("bias"),
        kind="state.kept",
        reference="inferred from tables of ALiBi slopes that are kept by the number of heads",
        trigger=has("bias"),
    ),
    _kept_bug(
        "eager-sinks-kept-by-shape",
        lambda: _kept("sinks"),
        kind="state.closure",
        reference="inferred from compiled functions that close over a parameter",
        trigger=has("sinks"),
    ),
    _kept_bug(
        "kernel-kept-by-the-cap-as-a-whole-number",
        _cap_by_whole_number,
        kind="state.static",
        reference="inferred from caches of compiled kernels whose keys are names with `int(soft_cap)` in them",
        trigger=has("soft_cap"),
    ),
    _kept_bug(
        "numpy-mask-kept-by-identity",
        functools.partial(_by_identity, "mask"),
        kind="state.identity",
        reference="inferred from imp issue 538, where a table is sent again only if its first entry differs",
    ),
    _kept_bug(
        "eager-bias-told-by-its-first-row",
        lambda: _bias_by_its_first_row,
        kind="state.values",
        reference="inferred from imp issue 538, where a table is sent again only if its first entry differs",
    ),
    _kept_bug(
        "values-clipped-to-the-last-call",
        _clipped_to_history,
        kind="state.accumulates",
        reference="inferred from delayed scaling in TransformerEngine; pytorch/ao issue 570",
    ),
    _kept_bug(
        "kernel-of-the-first-dtype",
        _precision_of_first_call,
        kind="state.kept",
        reference="inferred from vllm issue 46997, where a plan is made for another dtype",
        trigger=lambda case: case.dtype == "f32",
    ),
    _bug(
        "writes-into-mask",
        _writes_into_mask,
        kind="I.mutate-input",
        reference="inferred from KernelBench PR 82 and mlx-lm issue 1699, where an operand is moved in place",
        shows=("operands",),
        trigger=lambda case: "causal_and_dense" in case.mask,
    ),
    _bug(
        "donates-q-outside-jit",
        _donates_q,
        kind="I.mutate-input",
        reference="inferred from mlx-lm issue 1699, for a buffer that is given away",
        shows=("operands",),
    ),
    _fresh(
        "last-query-lost-in-one-call-of-many",
        _rarely_wrong,
        kind="race.rare",
        reference="inferred from flash-attention issue 359: a backward that is wrong in few runs",
        shows=("out", "bits"),
    ),
    _bug(
        "chips-take-a-branch-without-extras",
        _other_branch_on_chips,
        kind="dispatch.platform",
        reference="inferred from sglang issue 33915, where one backend drops the cap",
        shows=("platform",),
        trigger=_any_extra,
    ),
    _bug(
        "chips-take-a-route-without-extras",
        _other_route_on_chips,
        kind="dispatch.platform",
        reference="inferred from RL-Kernel issue 235: the backend asked for is not the one that ran",
        shows=("platform",),
        trigger=_any_extra,
    ),
)
