"""Splash attention over packed sequences: visited blocks, and results over several of them."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cases.operand_values import draw_cotangent, draw_problem
from conformance.execution.executor import Executor
from impls.packed_sequences import compute_key_ranges
from impls.splash_tpu import (
    BlockSizes,
    build_packed_implementation,
    dkv_kernel,
    dq_kernel,
    forward,
    packed_attention,
    splash_tiles,
)
from impls.splash_tpu.splash_packed import build_packed_steps
from impls.splash_tpu.splash_plan import Blocks
from impls.splash_tpu.splash_schedule import COMPUTE, FIRST, LAST, MASKED, PART, Order, Steps
from tests.comparison_asserts import assert_attention
from tests.impls.test_block_flash_packed import Lengths, pairs, tables
from tests.planted.computing.splash_packed import CASE

TOTAL = 520, 700  # queries and keys of a pack, which fill no whole number of blocks
WHOLE, IN_PARTS = Blocks(128, 128), Blocks(256, 256, 128, 128)
SIDES = [(None, None), (None, 0), (30, 0), (0, 0), (200, 40), (None, 70)]
# A sequence longer than several blocks, some of a few tokens, and keys and queries that have nobody.
GAPS: Lengths = [(130, 128), (1, 2), (0, 260), (200, 190), (60, 0), (3, 3)]


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def steps_of(where: Any, sides: Any, blocks: Blocks, order: Order) -> Steps:
    low, high = compute_key_ranges(where, sides, TOTAL[0])
    left, right = sides
    seen = None if left is None or right is None else left + right + 1
    return build_packed_steps(low, high, TOTAL[1], blocks, order, seen=seen)


def in_blocks(seen: np.ndarray, q: int, kv: int) -> np.ndarray:
    """Split pairs into `[q blocks, kv blocks, q * kv]`, False beyond the ends."""
    whole = np.pad(seen, [(0, -size % IN_PARTS.q) for size in seen.shape])[: -(-len(seen) // q) * q]
    whole = whole[:, : -(-seen.shape[1] // kv) * kv]
    return whole.reshape(len(whole) // q, q, -1, kv).swapaxes(1, 2).reshape(len(whole) // q, -1, q * kv)


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 200), st.integers(0, 280)), min_size=1, max_size=5),
    st.sampled_from(SIDES),
    st.sampled_from([WHOLE, IN_PARTS]),
    st.sampled_from(["q", "kv"]),
)
@example(GAPS, (None, 0), WHOLE, "q")
@example(GAPS, (None, 0), WHOLE, "kv")
@example([(1, 1)] * 5, (0, 0), WHOLE, "kv")
def test_exactly_the_blocks_that_hold_a_pair_are_visited(
    lengths: Lengths, sides: Any, blocks: Blocks, order: Order
) -> None:
    while any(sum(column) > total for column, total in zip(zip(*lengths, strict=True), TOTAL, strict=True)):
        lengths = lengths[1:]
    where = tables(lengths or [(0, 0)], 6)
    found: Any = jax.tree.map(np.asarray, steps_of(where, sides, blocks, order))
    (left, right), total = sides, int(found.total)
    assert total <= found.q.size
    q, kv, flags = (x.reshape(-1)[:total] for x in (found.q, found.kv, found.flags))
    seen = pairs(lengths, left, right, TOTAL) if lengths else np.zeros(TOTAL, bool)
    held = in_blocks(seen, blocks.q, blocks.kv)
    computes = flags & COMPUTE > 0
    visited = np.zeros(held.shape[:2], int)
    np.add.at(visited, (q[computes], kv[computes]), 1)
    np.testing.assert_array_equal(visited, held.any(axis=2))
    masked = flags & MASKED > 0
    np.testing.assert_array_equal(masked[computes], ~np.all(held, axis=2)[q[computes], kv[computes]])
    assert not masked[~computes].any()
    # Every block of results is begun and ended once, also one that no pair contributes to.
    results = q if order == "q" else kv
    for bit in (FIRST, LAST):
        assert results[flags & bit > 0].tolist() == list(range(held.shape[0 if order == "q" else 1]))
    assert (np.diff(results) >= 0).all()
    if blocks is IN_PARTS:
        parts = in_blocks(seen, 256, 256).reshape(*held.shape[:2], 2, 128, 2, 128).any(axis=(3, 5))
        told = flags[:, None] & (PART << np.arange(4)) > 0
        np.testing.assert_array_equal(told[masked], parts.reshape(*held.shape[:2], 4)[q[masked], kv[masked]])


def test_a_step_that_computes_nothing_fetches_nothing() -> None:
    found: Any = jax.tree.map(np.asarray, steps_of(tables(GAPS, 6), (None, 0), WHOLE, "q"))
    flags, kv = (x.reshape(-1)[: int(found.total)] for x in (found.flags, found.kv))
    idle = np.flatnonzero(flags & COMPUTE == 0)
    assert idle.size
    assert (kv[idle] == kv[idle - 1]).all()


def test_under_a_window_lists_grow_with_the_length() -> None:
    def longest(blocks: int, seen: int | None) -> int:
        low = jax.ShapeDtypeStruct((blocks * WHOLE.q,), jnp.int32)
        listed = functools.partial(build_packed_steps, kv_length=blocks * WHOLE.kv, blocks=WHOLE, order="q", seen=seen)
        return int(jax.eval_shape(listed, low, low).q.size)

    assert longest(24, 129) - longest(16, 129) == longest(16, 129) - longest(8, 129)
    assert longest(16, 129) < longest(16, None) == 16 * 16


@pytest.mark.long
def test_blocks_without_a_pair_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted as they are computed, in each pass and for each head."""
    run: Counter[str] = Counter()
    plain_logits = splash_tiles.compute_logits

    def counting(call: Any, *given: Any) -> Any:
        jax.debug.callback(lambda: run.update([call.phase]))
        return plain_logits(call, *given)

    for module in (forward, dq_kernel, dkv_kernel):
        monkeypatch.setattr(module, "compute_logits", counting)
    q, k, v = (jnp.ones((total, heads, 8)) for total, heads in zip((*TOTAL, TOTAL[1]), (2, 1, 1), strict=True))
    where: Any = tables(GAPS, 8)._asdict()

    def loss(*given: jax.Array) -> Any:
        # A scale that no other call has: what was traced before counts nothing.
        return packed_attention(
            *given, **where, causal=True, scale=0.43, block_sizes=BlockSizes.uniform(128, 128)
        ).sum()

    jax.block_until_ready(jax.grad(loss, (0, 1, 2))(q, k, v))
    jax.effects_barrier()
    held = in_blocks(pairs(GAPS, None, 0, TOTAL), 128, 128).any(axis=2)
    assert held.sum() < held.size / 2
    assert run == dict.fromkeys(("forward", "dq", "dkv"), 2 * int(held.sum()))


SIZES = {
    "whole": BlockSizes.uniform(128, 128),
    "in parts": BlockSizes.uniform(256, 256, 128, 128),
    "fused": BlockSizes.uniform(128, 256, fused_backward=True),
}


@pytest.mark.long
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_several_blocks_are_right_and_padding_has_no_gradient(sizes: BlockSizes) -> None:
    problem, drawn = draw_problem(CASE), draw_cotangent(CASE)
    implementation = build_packed_implementation("packed", block_sizes=sizes)
    executor = Executor(implementation)
    found = {**executor.residuals(problem).values, **executor.gradients_lse(problem, drawn).values}
    padding = {name: found.pop(name) for name in list(found) if "padding" in name}
    assert all(x.size for x in padding.values())
    assert padding
    for name, x in padding.items():
        assert not np.asarray(x).any(), name
    assert_attention(found, problem, drawn, arithmetic=implementation.arithmetic)


def call(dtype: Any = jnp.float32, **changed: Any) -> Any:
    given: dict[str, Any] = {
        "q": jnp.ones((5, 4, 8), dtype),
        "k": jnp.ones((6, 2, 8), dtype),
        "v": jnp.ones((6, 2, 8), dtype),
        **tables([(2, 3), (3, 3)], 2)._asdict(),
    } | changed
    return packed_attention(**given)


def test_what_is_refused_is_named() -> None:
    with pytest.raises(NotImplementedError, match="splash_tpu_packed does not support f16"):
        call(jnp.float16)
    with pytest.raises(ValueError, match=r"cu_q_lens must have shape \(max_seqs \+ 1,\)"):
        call(cu_q_lens=jnp.ones((1, 3), jnp.int32))
    with pytest.raises(ValueError, match="q has 3 heads"):
        call(q=jnp.ones((5, 3, 8)))


def test_a_second_derivative_is_refused() -> None:
    q = jnp.ones((5, 4, 8))
    with pytest.raises(NotImplementedError, match="second derivative"):
        jax.grad(lambda q: jax.grad(lambda q: (call(q=q) ** 2).sum())(q).sum())(q)
