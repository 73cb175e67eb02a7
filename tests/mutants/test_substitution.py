"""In the processes of a suite, a function is replaced by correct attention, whose calls are kept, or by a wrong one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conformance.mutation import mutant_list, visibility
from conformance.mutation.pytest_selection import read_events
from conformance.mutation.substitution import build_replacement, read_recorded_calls
from tests.mutants.repository.flash import flash_attention

# Rounding in f32 of averages of 40 values below 2.5, whose logits are products of depth 16, and of sums of 40 times 16.
_AVERAGED = (40 + 16) * 2.5 * 2.0**-24
_SUMMED = 40 * 16 * 2.5 * 2.0**-24


def _draw(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@pytest.fixture
def build(tmp_path: Path) -> Callable[[str], Callable[..., Any]]:
    def build(mode: str) -> Callable[..., Any]:
        settings = {"replace": "flash:flash_attention", "mode": mode, "folder": str(tmp_path), "by_hand": True}
        return build_replacement(flash_attention, settings)

    return build


def _operands() -> tuple[jax.Array, ...]:
    return _draw(1, 40, 4, 16), _draw(1, 40, 2, 16, seed=1), _draw(1, 40, 2, 16, seed=2)


def test_correct_attention_gives_the_same_and_is_recorded(build: Any, tmp_path: Path) -> None:
    replaced = build("right")
    q, k, v = _operands()
    ok = jnp.asarray(np.random.default_rng(3).random((1, 1, 40, 40)) < 0.8)

    def run(attention: Callable[..., Any]) -> Any:
        def loss(q: Any, sinks: Any, ok: Any) -> Any:
            out, lse = attention(q, k, v, ok, is_causal=True, sinks=sinks, return_lse=True)
            return (out * out).sum() + lse.sum()

        return jax.jit(jax.value_and_grad(loss, (0, 1)))(q, jnp.ones(4), ok)

    for got, expected in zip(jax.tree.leaves(run(replaced)), jax.tree.leaves(run(flash_attention)), strict=True):
        np.testing.assert_allclose(got, expected, rtol=_SUMMED, atol=_SUMMED)
    jax.effects_barrier()
    (recorded,) = read_recorded_calls(tmp_path)
    assert recorded.differentiated == ("q", "sinks")
    assert recorded.residuals
    assert recorded.call.q.shape == (1, 40, 4, 16)
    assert len(recorded.call.masks) == 2


def test_a_wrong_one_is_wrong_where_it_should_be(build: Any) -> None:
    replaced = build("sinks-ignored")
    q, k, v = _operands()
    np.testing.assert_allclose(replaced(q, k, v), flash_attention(q, k, v), atol=_AVERAGED)
    sinks = jnp.ones(4)
    np.testing.assert_allclose(replaced(q, k, v, sinks=sinks), flash_attention(q, k, v), atol=_AVERAGED)


def test_a_call_that_cannot_be_read_is_left_and_noted(tmp_path: Path) -> None:
    def attention(q: Any, k: Any, v: Any, dropout_rate: float = 0.0) -> Any:
        return v if dropout_rate else flash_attention(q, k, v)

    settings = {"replace": "m:attention", "mode": "scale-dropped", "folder": str(tmp_path)}
    replaced = build_replacement(attention, settings)
    q, k, v = _operands()
    assert replaced(q, k, v, dropout_rate=0.5) is v
    assert [event["reason"] for event in read_events(tmp_path)] == ["dropout_rate is no operand of the contract"]
    assert not np.allclose(replaced(q, k, v), attention(q, k, v), atol=1e-3)


def test_a_function_of_the_users_turns_calls_into_ours(tmp_path: Path) -> None:
    (tmp_path / "through.py").write_text(
        "def call(attention, true, cap):\n"
        "    def kernel(x):\n"
        "        return attention(x, x, x, soft_cap=cap, causal=True, window=(3, None))\n"
        "    return kernel\n"
    )

    def make_kernel(cap: float) -> Callable[..., Any]:
        return lambda x: flash_attention(x, x, x, softcap=cap, is_causal=True, window_size=(3, -1))

    settings = {"replace": "m:make_kernel", "mode": "right", "folder": str(tmp_path)}
    replaced = build_replacement(make_kernel, {**settings, "through": f"{tmp_path}/through.py:call"})
    x = _operands()[1]
    np.testing.assert_allclose(replaced(2.0)(x), make_kernel(2.0)(x), atol=_AVERAGED)
    (recorded,) = read_recorded_calls(tmp_path)
    assert recorded.call.soft_cap == 2.0


def test_what_calls_can_see_depends_on_their_operands(build: Any, tmp_path: Path) -> None:
    replaced = build("right")
    q, k, v = _operands()
    replaced(q, k, v, sinks=jnp.ones(4))
    replaced(q, k, v, is_causal=True)
    calls = visibility.describe_calls(read_recorded_calls(tmp_path))
    names = ("sinks-ignored", "first-sink-for-all-heads", "sinks-without-gradient", "kv-heads-tiled", "scale-dropped")
    bugs = [mutant_list.find_mutant(name) for name in names]
    # All sinks are equal, and nothing is differentiated.
    assert set(visibility.find_visible(bugs, calls)) == {"sinks-ignored", "kv-heads-tiled", "scale-dropped"}
    lacking = visibility.say_lacking(frozenset({"sinks", "gradients", "a causal mask"}), calls)
    assert lacking == "no call has gradients"
    lacking = visibility.say_lacking(frozenset({"sinks", "a causal mask"}), calls)
    assert lacking in (
        "no call has a causal mask together with sinks",
        "no call has sinks together with a causal mask",
    )
