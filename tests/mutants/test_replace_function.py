"""Wrong functions stand in wherever the true one is held, under any settings of the suite."""

from __future__ import annotations

import dataclasses
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conformance.mutation.calls import AttentionCall
from conformance.mutation.mutant_list import build_right
from conformance.mutation.substitution import read_recorded_calls, replace_function
from conformance.mutation.suite import Suite


def attend(q: Any, k: Any, v: Any) -> Any:
    """Be the function that is replaced."""


def test_the_default_of_a_parameter_is_replaced(tmp_path: Path) -> None:
    @dataclasses.dataclass
    class Layer:
        function: Callable[..., Any] = attend

    def apply(x: Any, *, function: Callable[..., Any] = attend) -> Any:
        return function

    module = types.ModuleType("layers")
    vars(module).update(attend=attend, Layer=Layer, apply=apply)
    replace_function(module, {"replace": "layers:attend", "mode": "true", "folder": str(tmp_path)})
    assert module.attend is not attend
    assert Layer().function is apply(0) is module.attend


@pytest.mark.parametrize("by_hand", [True, False])
def test_attention_is_computed_where_the_suite_refuses_to_promote_dtypes(by_hand: bool) -> None:
    x = jnp.ones((1, 4, 1, 8), jnp.float16)
    right = build_right(by_hand=by_hand)
    with jax.numpy_dtype_promotion("strict"):
        dq = jax.grad(lambda q: AttentionCall(q, x, x).run(right)["out"].astype(jnp.float32).sum())(x)
    assert dq.dtype == jnp.float16


def test_float64_of_numpy_is_recorded_as_jax_reads_it(tmp_path: Path) -> None:
    def attention(q: Any, k: Any, v: Any) -> Any:
        return jax.nn.dot_product_attention(*(jnp.asarray(x) for x in (q, k, v)))

    module = types.ModuleType("layers")
    vars(module).update(attention=attention)
    replace_function(module, {"replace": "layers:attention", "mode": "right", "folder": str(tmp_path)})
    x = np.random.default_rng(0).standard_normal((1, 4, 1, 8))
    module.attention(x, x, x)
    (recorded,) = read_recorded_calls(tmp_path)
    assert recorded.call.q.dtype == np.float32


def test_a_function_of_jax_is_replaced_where_the_process_of_pytest_has_loaded_it(tmp_path: Path) -> None:
    test = tmp_path / "test_jax.py"
    test.write_text(
        "import jax\n\n"
        "def test_one():\n"
        "    x = jax.numpy.ones((1, 4, 1, 8))\n"
        "    jax.nn.dot_product_attention(x, x, x)\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", str(test)]
    suite = Suite(command, "jax.nn:dot_product_attention", "", tmp_path, os.environ)
    try:
        assert suite.run("true").was_replaced
    finally:
        suite.stop()
