"""Calls of functions of any convention are read as they are meant, and what is no attention is never replaced."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conformance.execution.implementation_registry import find_implementation
from conformance.mutation import mutant_list
from conformance.mutation.calls import CannotRead, Reading, find_reading, read_call
from tests.adaptation.foreign import STYLES, make_foreign

# Both results are rounded in f32: 24 keys and a depth of 8, logits and values below 8, a few roundings in each sum.
_ROUNDING = (24 + 8) * 8 * 2.0**-24
_ORDERS = {"BTNH": (0, 1, 2, 3), "BNTH": (0, 2, 1, 3), "TBNH": (1, 0, 2, 3)}


def _draw(layout: str, q_length: int = 20, kv_length: int = 24) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    shapes = ((2, q_length, 4, 8), (2, kv_length, 2, 8), (2, kv_length, 2, 8))
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32).transpose(_ORDERS[layout]) for shape in shapes]


def _read(function: Callable[..., Any], *arguments: Any, **options: Any) -> tuple[Reading, dict[str, Any]]:
    signature = inspect.signature(function)
    bound = signature.bind(*arguments, **options)
    bound.apply_defaults()
    defaults = {p.name: p.default for p in signature.parameters.values() if p.default is not p.empty}
    right = mutant_list.build_right(by_hand=True)
    reading = find_reading(lambda named: function(**named), bound.arguments, defaults, right)
    return reading, read_call(bound.arguments, defaults, reading).run(right)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True, "return_lse": True},
        {"window_size": 6, "softcap": 2.0, "softmax_scale": 0.3},
        {"attn_mask": True},
    ],
    ids=["plain", "causal", "window", "mask"],
)
def test_foreign_calls_give_what_their_readings_say(style: str, options: dict[str, Any]) -> None:
    conventions = STYLES[style]
    function = make_foreign(find_implementation("block_flash"), conventions)
    if "window_size" in options and conventions.window == "pair":
        options = {**options, "window_size": (5, 2)}
    if "attn_mask" in options:
        kept = np.random.default_rng(1).random((2, 1, 20, 24)) < 0.7
        masks = {"keep": kept, "drop": ~kept, "add": np.where(kept, 0, -1e30).astype(np.float32)}
        options = {"attn_mask": jnp.asarray(masks[conventions.mask])}
    operands = _draw(conventions.layout)
    reading, results = _read(function, *operands, **options)
    returned = jax.tree.leaves(function(*operands, **options))
    assert reading.is_whole
    for array, output in zip(returned, reading.outputs, strict=True):
        assert output is not None
        np.testing.assert_allclose(output.write(results, array), array, atol=_ROUNDING)


def test_what_is_no_attention_is_not_read() -> None:
    def attention(q: Any, k: Any, v: Any) -> Any:
        weights = jax.nn.sigmoid(jnp.einsum("btnh,bsnh->bnts", q, k))
        return jnp.einsum("bnts,bsnh->btnh", weights, v)

    q = _draw("BTNH")[1]
    with pytest.raises(CannotRead, match="correct attention gives something else"):
        _read(attention, q, q, q)


def test_an_option_that_the_contract_lacks_is_named() -> None:
    def attention(q: Any, k: Any, v: Any, dropout_rate: float = 0.0, block_q: int = 128) -> Any:
        return jax.nn.dot_product_attention(q, k, v)

    q = _draw("BTNH")[1]
    assert _read(attention, q, q, q, block_q=64)[0].layout == "BTNH"
    with pytest.raises(CannotRead, match="dropout_rate is no operand of the contract"):
        _read(attention, q, q, q, dropout_rate=0.1)


def test_ids_are_drawn_and_a_number_is_not_read_where_they_are_known_at_run_time_only() -> None:
    def attention(q: Any, k: Any, v: Any, segment_ids: Any = None, causal: Any = False) -> Any:
        kept = segment_ids[0][:, None, :, None] == segment_ids[1][:, None, None, :]
        kept = kept & (jnp.tril(jnp.ones(kept.shape[2:], bool)) | jnp.logical_not(causal))
        return jax.nn.dot_product_attention(q, k, v, mask=kept)

    q = _draw("BTNH")[1]
    read: list[Reading] = []

    def run(ids: Any, causal: Any) -> Any:
        with jax.core.eval_context():
            drawn = {"q": q, "k": q, "v": q, "segment_ids": (ids, ids), "causal": causal}
            right = mutant_list.build_right(by_hand=True)
            read.append(find_reading(lambda named: attention(**named), drawn, {"segment_ids": None}, right))
        return ids

    ids = jnp.zeros(q.shape[:2], int)
    jax.jit(lambda ids: run(ids, True))(ids)
    assert read[0].layout == "BTNH"
    with pytest.raises(CannotRead, match="causal is known at run time only"):
        jax.jit(run)(ids, True)
