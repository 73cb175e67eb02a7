"""Packed attention of `block_flash` beyond the checks of every kernel: ranges, work, padded form, errors."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cases.case_id import parse_case_id
from cases.masks import Dense
from cases.operand_values import draw_cotangent, draw_problem
from conformance.execution.executor import Executor
from impls import block_flash
from impls.block_flash import packed_passes
from impls.block_flash.block_flash_packed import packed_attention
from impls.block_flash.packed_passes import KeyRanges, PackedPlan, compute_allowed, compute_ranges, has_pair
from impls.packed_sequences import SequenceTables
from tests.comparison_asserts import assert_attention

BLOCK = 4
Lengths = list[tuple[int, int]]


def tables(lengths: Lengths, most: int, junk: int = -7) -> SequenceTables:
    """Build tables of some sequences with room for `most`, filled up with `junk`."""
    past = [junk] * (most - len(lengths))
    starts = [[*np.cumsum([0, *column]).tolist(), *past] for column in zip(*lengths, strict=True)]
    return SequenceTables(*(jnp.asarray(x, jnp.int32) for x in (*starts, [len(lengths)])))


def plan(total_q: int, total_kv: int, left: int | None = None, right: int | None = None) -> PackedPlan:
    return PackedPlan(
        num_q_heads=1, num_kv_heads=1, q_length=total_q, kv_length=total_kv, block_q=BLOCK, block_kv=BLOCK,
        scale=1.0, soft_cap=None, left=left, right=right,
    )  # fmt: skip


def pairs(lengths: Lengths, left: int | None, right: int | None, shape: tuple[int, int]) -> np.ndarray:
    """Compute which query sees which key, sequence by sequence."""
    seen = np.zeros(shape, bool)
    q_start = kv_start = 0
    for q_len, kv_len in lengths:
        position = np.arange(q_len)[:, None] + kv_len - q_len
        j = np.arange(kv_len)
        own = np.ones((q_len, kv_len), bool)
        if left is not None:
            own &= j >= position - left
        if right is not None:
            own &= j <= position + right
        seen[q_start : q_start + q_len, kv_start : kv_start + kv_len] = own
        q_start, kv_start = q_start + q_len, kv_start + kv_len
    return seen


def on_host(ranges: KeyRanges) -> Any:
    """Convert the ranges to NumPy arrays."""
    return jax.tree.map(np.asarray, ranges)


def blocks_of(seen: np.ndarray) -> np.ndarray:
    """Find the pairs of blocks with an allowed pair."""
    whole = np.pad(seen, [(0, -size % BLOCK) for size in seen.shape])
    return np.asarray(whole.reshape(len(whole) // BLOCK, BLOCK, -1, BLOCK).any(axis=(1, 3)))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=5),
    st.sampled_from([None, 0, 3]),
    st.sampled_from([None, 0, 2]),
    st.sampled_from([-7, 0, 2**31 - 1]),
)
def test_ranges_are_what_each_query_sees(lengths: Lengths, left: int | None, right: int | None, junk: int) -> None:
    of_pack = plan(48, 48, left, right)
    ranges = on_host(compute_ranges(of_pack, tables(lengths, 6, junk)))
    seen = pairs(lengths, left, right, (48, 48))
    low, high = (x.reshape(-1, 1) for x in ranges[:2])
    np.testing.assert_array_equal((np.arange(48) >= low) & (np.arange(48) < high), seen)
    held = blocks_of(seen)
    numbers: Any = np.arange(12, dtype=np.int32)
    for i in range(12):
        rows = ranges.low[i], ranges.high[i]
        found = [bool(has_pair(of_pack, *rows, j)) for j in numbers]
        assert found == held[i].tolist()
        assert set(np.flatnonzero(held[i])) <= set(range(ranges.first[i], ranges.end[i]))
    np.testing.assert_array_equal(
        compute_allowed(of_pack, ranges.low[1], ranges.high[1], numbers[1])[0, 0, 0], seen[4:8, 4:8]
    )


def computed(monkeypatch: pytest.MonkeyPatch, lengths: Lengths, **options: Any) -> Counter[str]:
    """Count the pairs of blocks that each pass computes at run time."""
    counted: Counter[str] = Counter()
    for name in ("add_block", "compute_pair_gradients"):
        step = getattr(packed_passes, name)

        def counting(*given: Any, name: str = name, step: Any = step) -> Any:
            jax.debug.callback(lambda: counted.update([name]))
            return step(*given)

        monkeypatch.setattr(packed_passes, name, counting)
    total_q, total_kv = (sum(column) + 3 for column in zip(*lengths, strict=True))
    q, k, v = (jnp.ones((total, 1, 2)) for total in (total_q, total_kv, total_kv))
    where: dict[str, Any] = {**tables(lengths, len(lengths) + 1)._asdict(), **options}

    def loss(*given: jax.Array) -> Any:
        # A scale that no other call has: what was traced before counts nothing.
        return packed_attention(*given, **where, scale=0.37, block_q=BLOCK, block_kv=BLOCK).sum()

    jax.block_until_ready(jax.grad(loss, (0, 1, 2))(q, k, v))
    jax.effects_barrier()
    return counted


@pytest.mark.parametrize(
    ("lengths", "options"),
    [
        ([(5, 5)] * 6, {"causal": True}),
        ([(5, 5)] * 12, {"causal": True}),
        ([(1, 1), (30, 30), (2, 2), (0, 25), (3, 9)], {}),
        ([(6, 40), (40, 6)], {"window": (3, 0)}),
    ],
    ids=["short", "twice as many", "one long", "window"],
)
def test_blocks_without_a_pair_are_not_computed(
    lengths: Lengths, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    left, right = options.get("window", (None, 0 if "causal" in options else None))
    shape = sum(q for q, _ in lengths) + 3, sum(kv for _, kv in lengths) + 3
    held = blocks_of(pairs(lengths, left, right, shape))
    assert held.sum() < held.size / 2
    wanted = int(held.sum())
    assert computed(monkeypatch, lengths, **options) == {"add_block": wanted, "compute_pair_gradients": wanted}


def test_packed_and_padded_are_both_right() -> None:
    """Judged by the same exact values and bounds: the padded form has the mask of the packed one as booleans."""
    case = parse_case_id(
        "train/f32/B4.T30.S30.N4.K2.H16.V16/own-l9-24-0-17-30/softcap5/sinks/packed-q24-3-17-30/normal/s0"
    )
    problem, drawn = draw_problem(case), draw_cotangent(case)
    padded, packed, *_ = block_flash.IMPLEMENTATIONS
    assert (padded.storage, packed.storage) == (None, "packed")
    dense = dataclasses.replace(problem, storage=None, mask=Dense(problem.allowed))
    for implementation, asked in ((padded, dense), (packed, problem)):
        executor = Executor(implementation)
        found = {**executor.residuals(asked).values, **executor.gradients_lse(asked, drawn).values}
        got = {name: x for name, x in found.items() if "padding" not in name}
        assert_attention(got, problem, drawn, arithmetic=implementation.arithmetic)


def call(**changed: Any) -> Any:
    given: dict[str, Any] = {
        "q": jnp.ones((5, 4, 8)),
        "k": jnp.ones((6, 2, 8)),
        "v": jnp.ones((6, 2, 8)),
        "cu_q_lens": jnp.asarray([0, 2, 5], jnp.int32),
        "cu_kv_lens": jnp.asarray([0, 3, 6], jnp.int32),
        "num_seqs": jnp.asarray([2], jnp.int32),
    } | changed
    return packed_attention(**given)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"q": jnp.ones((5, 8))}, r"q must have the axes \[total_q, heads, depth\]"),
        ({"v": jnp.ones((5, 2, 8))}, "k and v must agree"),
        ({"q": jnp.ones((5, 4, 7))}, "k has head_dim 8, q has 7"),
        ({"q": jnp.ones((5, 3, 8))}, "q has 3 heads"),
        ({"q": jnp.ones((5, 4, 8), jnp.bfloat16)}, "q, k and v must have one dtype"),
        ({"sinks": jnp.ones(2)}, "sinks must have shape"),
        ({"soft_cap": 0.0}, "soft_cap must be positive"),
        ({"window": (-1, 0)}, r"window must be \(left, right\)"),
        ({"block_q": 0}, "block_q must be positive"),
        ({"cu_q_lens": jnp.ones((1, 3), jnp.int32)}, "cu_q_lens must have shape"),
        ({"cu_kv_lens": jnp.ones(2, jnp.int32)}, r"cu_kv_lens must have shape \(3,\)"),
        ({"num_seqs": jnp.int32(2)}, r"num_seqs must have shape \(1,\)"),
        ({"cu_q_lens": jnp.ones(3)}, "cu_q_lens must be integers"),
    ],
)
def test_what_is_refused_is_named(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(**changed)


def test_a_second_derivative_is_refused() -> None:
    q = jnp.ones((5, 4, 8))
    with pytest.raises(NotImplementedError, match="block_flash_packed has no second derivatives"):
        jax.grad(lambda q: jax.grad(lambda q: (call(q=q) ** 2).sum())(q).sum())(q)


def test_a_side_beyond_every_token_is_open() -> None:
    assert all(
        (call(window=window) == call()).all() for window in itertools.product((None, 2**30, 2**31 - 1), repeat=2)
    )
