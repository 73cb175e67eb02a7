"""Implementations that are wrong and built to look right: what a harness must not be fooled by."""

from __future__ import annotations

import functools
import gc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from conformance.truth.rounding_bounds import Expectation
from tests.bank import PlantedBug
from tests.planted.planting.wrapped import Arrays, Statics, correct, planted

_bug = functools.partial(planted, family="gaming")


def _shapes(arrays: Arrays, statics: Statics) -> Any:
    q, v = arrays["q"], arrays["v"]
    out = jax.ShapeDtypeStruct((*q.shape[:3], v.shape[-1]), q.dtype)
    rows = jax.ShapeDtypeStruct((q.shape[0], q.shape[2], q.shape[1]), jnp.float32)
    return (out, {"logsumexp": rows, "max_logits": rows}) if statics["save_residuals"] else out


def _filled(value: float, arrays: Arrays, statics: Statics) -> Any:
    return jax.tree.map(lambda x: jnp.full(x.shape, value, x.dtype), _shapes(arrays, statics))


def _zeros_where_it_raises(arrays: Arrays, statics: Statics) -> Any:
    """A wrapper that swallows what the kernel raises."""
    try:
        if "bias" in arrays:
            raise NotImplementedError("bias")
        return correct(arrays, statics)
    except NotImplementedError:
        return _filled(0.0, arrays, statics)


def _without_what_it_lacks(arrays: Arrays, statics: Statics) -> Any:
    """A wrapper that tries again without the operand that the kernel refuses."""
    return correct({name: x for name, x in arrays.items() if name != "sinks"}, statics)


_remembered: dict[Any, Any] = {}


def _first_result_again(arrays: Arrays, statics: Statics) -> Any:
    """Results are kept by shape; later calls get the first one."""
    shapes = _shapes(arrays, statics)
    key = str((jax.tree.map(lambda x: (x.shape, str(x.dtype)), arrays), statics))

    def remembered(*results: Any) -> Any:
        return _remembered.setdefault(key, tuple(map(np.asarray, results)))

    results, tree = jax.tree.flatten(correct(arrays, statics))
    kept = jax.pure_callback(remembered, tuple(jax.tree.leaves(shapes)), *map(jax.lax.stop_gradient, results))
    again = [x + jax.lax.stop_gradient(old - x) for x, old in zip(results, kept, strict=True)]
    return jax.tree.unflatten(tree, again)


def _the_oracles_answer(arrays: Arrays, statics: Statics) -> Any:
    """Looks through the process for an expectation of this shape that the harness has computed, and returns it."""
    shapes = jax.tree.leaves(_shapes(arrays, statics))
    names = ("out", "logsumexp", "max_logits")

    def found() -> tuple[np.ndarray, ...]:
        for there in gc.get_objects():
            if type(there) is Expectation and there.forward["out"].value.shape == shapes[0].shape:
                values = (there.forward[name].value for name in names[: len(shapes)])
                return tuple(x.astype(shape.dtype) for x, shape in zip(values, shapes, strict=True))
        return tuple(np.zeros(shape.shape, shape.dtype) for shape in shapes)

    values = jax.pure_callback(found, tuple(shapes), vmap_method="broadcast_all")
    return (values[0], dict(zip(names[1:], values[1:], strict=True))) if statics["save_residuals"] else values[0]


def _right_on_what_tests_use(arrays: Arrays, statics: Statics) -> Any:
    """Right for equal lengths that blocks of 64 divide, and the mean of v elsewhere."""
    result = correct(arrays, statics)
    if arrays["q"].shape[1] == arrays["k"].shape[1] and arrays["k"].shape[1] % 64 == 0:
        return result
    return jax.tree.map(lambda x: x * 0 + jnp.mean(x), result)


BUGS: tuple[PlantedBug, ...] = (
    _bug(
        "returns-zeros",
        functools.partial(_filled, 0.0),
        kind="harness.zeros-pass",
        reference="KernelBench issue 165; TransformerEngine PR 3536",
        shows=("out", "logsumexp"),
    ),
    _bug(
        "returns-nan",
        functools.partial(_filled, float("nan")),
        kind="harness.nan-wildcard",
        reference="pygpubench PR 7; cubecl PR 1070",
        shows=("out", "logsumexp"),
    ),
    _bug(
        "swallows-what-the-kernel-raises",
        _zeros_where_it_raises,
        kind="harness.skip-hides",
        reference="rocm-libraries PR 10625",
        shows=("out",),
        trigger=lambda case: case.bias is not None,
    ),
    _bug(
        "tries-again-without-sinks",
        _without_what_it_lacks,
        kind="sink.dead-code",
        reference="vllm-metal PR 550, issue 212",
        shows=("out", "dsinks"),
        trigger=lambda case: bool(case.sinks),
    ),
    _bug(
        "returns-first-result-again",
        _first_result_again,
        kind="harness.stale-memory",
        reference="KernelBench PR 82",
        shows=("out", "logsumexp"),
    ),
    _bug(
        "returns-the-oracles-answer",
        _the_oracles_answer,
        kind="harness.stale-memory",
        reference="KernelBench PR 82",
        shows=("out", "dq"),
    ),
    _bug(
        "right-on-what-tests-use",
        _right_on_what_tests_use,
        kind="harness.fixed-distribution",
        reference="kernelbench.com PR 7; AgentKernelArena PR 82",
        shows=("out", "logsumexp"),
        trigger=lambda case: case.q_length != case.kv_length,
    ),
)
