"""Bugs of who calls and with what: threads, NumPy arrays, one array twice, a pullback's second use, doubles."""

from __future__ import annotations

import functools
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from conformance.mutation.kernels.triggers import both, has, trains
from tests.bank import PlantedBug
from tests.planted.planting.wrapped import Arrays, Kernel, Statics, correct, planted

_bug = functools.partial(planted, family="state", shows=("out",))
_FIXED = ("segment_ids", "mask")


def _traced(*values: Any) -> bool:
    return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(values))


_CONFIGURED = threading.local()
_CONFIGURED.here = True  # where this module is imported, and in no other thread


def _configured_in_one_thread(arrays: Arrays, statics: Statics) -> Any:
    return correct(arrays, statics if hasattr(_CONFIGURED, "here") else {**statics, "soft_cap": None, "scale": None})


def _in_a_workspace(arrays: Arrays, statics: Statics) -> Any:
    """`out` is written where the one before was, of the same shape."""
    found = correct(arrays, statics)
    if statics["save_residuals"] or _traced(found):
        return found
    space = _SPACES.setdefault((found.shape, str(found.dtype)), np.empty(found.shape, found.dtype))
    space[...] = np.asarray(found)
    return space


_SPACES: dict[Any, np.ndarray] = {}


def _same_ids_are_runs(arrays: Arrays, statics: Statics) -> Any:
    """Where queries and keys have one array of ids, each run of an id is taken for a sequence of its own."""
    ids = arrays.get("segment_ids")
    if ids is None or ids[0] is not ids[1]:
        return correct(arrays, statics)
    begins = jnp.diff(jnp.asarray(ids[0]), axis=1, prepend=jnp.asarray(ids[0])[:, :1]) != 0
    runs = jnp.cumsum(begins, axis=1, dtype=jnp.int32)
    return correct({**arrays, "segment_ids": (runs, runs)}, statics)


def _out_in_place_of_q(arrays: Arrays, statics: Statics) -> Any:
    """An output that is as large as the queries is given their memory."""
    found, q = correct(arrays, statics), arrays["q"]
    out = found[0] if statics["save_residuals"] else found
    if isinstance(q, np.ndarray) and q.flags.writeable and q.shape == out.shape:
        q[...] = np.asarray(out)
    return found


def _named_by_two_digits(arrays: Arrays, statics: Statics) -> Any:
    """Configurations are kept by a name, in which numbers have two digits."""
    named = {name: _NAMED.setdefault(f"{name}{x:.2g}", x) for name in ("scale", "soft_cap") if (x := statics[name])}
    return correct(arrays, {**statics, **named})


_NAMED: dict[str, Any] = {}


def _logsumexp_of_keys_outside_jit(arrays: Arrays, statics: Statics) -> Any:
    found = correct(arrays, statics)
    if not statics["save_residuals"] or _traced(arrays) or "sinks" not in arrays:
        return found
    bare = correct({name: x for name, x in arrays.items() if name != "sinks"}, statics)
    return found[0], {**found[1], "logsumexp": bare[1]["logsumexp"]}


def _first_logsumexp_where_mapped(arrays: Arrays, statics: Statics) -> Any:
    found = correct(arrays, statics)
    if not statics["save_residuals"]:
        return found

    @jax.custom_batching.custom_vmap
    def kept(logsumexp: Any) -> Any:
        return logsumexp

    @kept.def_vmap
    def rule(axis_size: int, batched: list[Any], logsumexp: Any) -> Any:
        return jnp.broadcast_to(logsumexp[:1], logsumexp.shape), True

    @jax.custom_vjp
    def differentiable(logsumexp: Any) -> Any:
        return kept(logsumexp)

    differentiable.defvjp(lambda logsumexp: (kept(logsumexp), None), lambda _, cotangent: (cotangent,))
    return found[0], {**found[1], "logsumexp": differentiable(found[1]["logsumexp"])}


def _root_by_numpy(arrays: Arrays, statics: Statics) -> Any:
    """NumPy's root is a double of its own, which a Python number is not."""
    usual = 1 / np.sqrt(arrays["q"].shape[-1])
    return correct(arrays, {**statics, "scale": usual if statics["scale"] is None else statics["scale"]})


def _by_pullback(back: Any) -> Kernel:
    """The kernel with a backward pass that has a memory, one for each call."""

    def kernel(arrays: Arrays, statics: Statics) -> Any:
        memory: dict[str, Any] = {}

        @jax.custom_vjp
        def call(arrays: Arrays) -> Any:
            return correct(arrays, statics)

        def pull(arrays: Arrays, cotangent: Any) -> tuple[Arrays]:
            return ({**jax.tree.map(lambda _: None, arrays), **back(arrays, cotangent, statics, memory)},)

        call.defvjp(lambda arrays: (call(arrays), arrays), pull)
        return call(arrays)

    return kernel


def _pulled_back(arrays: Arrays, cotangent: Any, statics: Statics) -> Arrays:
    moving = {name: x for name, x in arrays.items() if name not in _FIXED}
    pulled: Arrays = jax.vjp(lambda m: correct({**arrays, **m}, statics), moving)[1](cotangent)[0]
    return pulled


def _added_to_the_last(arrays: Arrays, cotangent: Any, statics: Statics, memory: dict[str, Any]) -> Arrays:
    """The buffer of `dq` is cleared by the forward pass, and added to by each backward pass."""
    pulled = _pulled_back(arrays, cotangent, statics)
    if _traced(pulled):
        return pulled
    memory["q"] = pulled["q"] + memory.get("q", 0)
    return {**pulled, "q": memory["q"]}


def _ids_by_shape(arrays: Arrays, cotangent: Any, statics: Statics, memory: dict[str, Any]) -> Arrays:
    """The backward pass keeps its table of segments, outside `jit`, by the lengths."""
    if "segment_ids" in arrays and not _traced(arrays, cotangent):
        ids = _IDS.setdefault((arrays["q"].shape, arrays["k"].shape), arrays["segment_ids"])
        arrays = {**arrays, "segment_ids": ids}
    return _pulled_back(arrays, cotangent, statics)


_IDS: dict[Any, Any] = {}


BUGS: tuple[PlantedBug, ...] = (
    _bug(
        "configured-in-one-thread-only",
        _configured_in_one_thread,
        kind="state.thread",
        reference="inferred from libraries whose options are of a thread, set where they are imported",
        trigger=has("soft_cap"),
    ),
    _bug(
        "results-outside-jit-share-a-workspace",
        _in_a_workspace,
        kind="state.workspace",
        reference="inferred from servers that replay captured graphs into static buffers",
    ),
    _bug(
        "one-array-of-ids-is-of-runs",
        _same_ids_are_runs,
        kind="segments.runs",
        reference="inferred from paths for self-attention that turn segment ids into cumulative lengths",
        trigger=has("segment_ids"),
    ),
    _bug(
        "out-in-the-memory-of-q",
        _out_in_place_of_q,
        kind="aliasing.shape",
        reference="inferred from kernels with input_output_aliases for operands of equal shape",
        shows=("operands",),
    ),
    _bug(
        "configurations-named-by-two-digits",
        _named_by_two_digits,
        kind="cache.name",
        reference="inferred from libraries that compile a kernel for each soft cap and name it by the printed number",
        shows=("out", "dq", "dk", "dv", "dsinks", "dbias"),
        trigger=has("soft_cap"),
    ),
    _bug(
        "logsumexp-outside-jit-lacks-the-sinks",
        _logsumexp_of_keys_outside_jit,
        kind="eager.residual",
        reference="inferred from paths that are taken for concrete arrays",
        shows=("logsumexp",),
        trigger=has("sinks"),
    ),
    _bug(
        "vmap-gives-all-the-first-logsumexp",
        _first_logsumexp_where_mapped,
        kind="vmap.residual",
        reference="inferred from batching rules that are written for one result",
        shows=("logsumexp",),
    ),
    _bug(
        "usual-scale-by-numpy-promotes-logsumexp",
        _root_by_numpy,
        kind="x64.scale",
        reference="inferred from kernels that divide by np.sqrt of the depth",
        shows=("logsumexp", "max_logits"),
    ),
    _bug(
        "dq-is-added-to-that-of-the-last-pullback",
        _by_pullback(_added_to_the_last),
        kind="grad.buffer",
        reference="inferred from backward passes that accumulate dq into a buffer which the forward pass clears",
        shows=("dq",),
        trigger=trains(),
    ),
    _bug(
        "eager-backward-keeps-segment-ids-by-shape",
        _by_pullback(_ids_by_shape),
        kind="grad.cache",
        reference="inferred from block maps that are cached under the lengths",
        shows=("dq", "dk", "dv"),
        trigger=both(trains(), has("segment_ids")),
    ),
)
