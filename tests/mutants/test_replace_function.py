"""Wrong functions stand in wherever the true one is held, under any settings of the suite."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from conformance.mutation.calls import AttentionCall
from conformance.mutation.mutant_list import build_right
from conformance.mutation.substitution import replace_function


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
