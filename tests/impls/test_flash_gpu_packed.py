"""Packed attention of `flash_gpu`: visited blocks, tiles, lowering, and results over several blocks."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractDevice, AbstractMesh

from cases.masks import Dense
from cases.operand_values import draw_cotangent, draw_problem
from conformance.execution.executor import Executor
from impls import flash_gpu
from impls.flash_gpu import BlockSizes, Tiles, build_packed_implementation, packed_attention
from impls.flash_gpu.block_sizes import PACKED_TABLE, look_up_packed
from impls.flash_gpu.implementation import build_uniform_sizes
from impls.flash_gpu.packed_visits import PackedVisits, compute_ranges, compute_visits
from impls.flash_gpu.triton import backward, forward
from tests.comparison_asserts import assert_attention
from tests.impls.test_block_flash_packed import Lengths, pairs, tables
from tests.impls.test_flash_gpu import LOWERING
from tests.planted.computing.flash_gpu.packed import CASE

TOTAL = 150, 230  # queries and keys of a pack, which fill no whole number of blocks
TILES = Tiles(block_q=16, block_kv=32), Tiles(block_q=32, block_kv=16)
SIDES = [(None, None), (None, 0), (30, 0), (0, 0), (60, 20), (None, 40)]
# A sequence longer than several blocks, some of a few tokens, and keys and queries that have nobody.
GAPS: Lengths = [(50, 64), (1, 2), (0, 90), (40, 30), (20, 0), (3, 3)]
# Every query has keys of its own: as many blocks as there can be hold pairs of several sequences.
MANY: Lengths = [(1, 40), (2, 0)] * 5 + [(1, 1)] * 20


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def visits_in(where: Any, sides: Any, tiles: Tiles, axis: Any) -> PackedVisits:
    return compute_visits(compute_ranges(where, sides, TOTAL[0]), tiles, axis, TOTAL[1])


def in_blocks(seen: np.ndarray, block_q: int, block_kv: int, beyond: bool) -> np.ndarray:
    """Split pairs into `[q blocks, kv blocks, pairs]`; padding counts as `beyond`."""
    whole = np.pad(seen, [(0, -len(seen) % block_q), (0, -seen.shape[1] % block_kv)], constant_values=beyond)
    return (
        whole.reshape(len(whole) // block_q, block_q, -1, block_kv)
        .swapaxes(1, 2)
        .reshape(len(whole) // block_q, -1, block_q * block_kv)
    )


@settings(max_examples=10, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 90)), min_size=1, max_size=6),
    st.sampled_from(SIDES),
    st.sampled_from(TILES),
    st.sampled_from(["q", "kv"]),
)
@example(GAPS, (None, 0), TILES[0], "q")
@example(GAPS, (None, 0), TILES[0], "kv")
@example(GAPS, (30, 0), TILES[1], "q")
@example(GAPS, (30, 0), TILES[1], "kv")
@example(MANY, (None, None), TILES[0], "q")
@example(MANY, (None, None), TILES[1], "kv")
@example([(150, 230)], (None, None), TILES[0], "q")
@example([(150, 230)], (None, 0), TILES[1], "kv")
@example([(1, 1)] * 30, (0, 0), TILES[0], "kv")
def test_exactly_the_blocks_that_hold_a_pair_are_visited(lengths: Lengths, sides: Any, tiles: Tiles, axis: str) -> None:
    while any(sum(column) > total for column, total in zip(zip(*lengths, strict=True), TOTAL, strict=True)):
        lengths = lengths[1:]
    table, partial = (np.asarray(x) for x in visits_in(tables(lengths or [(0, 0)], 40), sides, tiles, axis))
    left, right = sides
    seen = pairs(lengths, left, right, TOTAL) if lengths else np.zeros(TOTAL, bool)
    holds = in_blocks(seen, tiles.block_q, tiles.block_kv, beyond=False).any(axis=2)
    # Keys that do not exist are masked where a program sums over keys; of queries that do not, nothing is stored.
    whole = np.pad(seen, [(0, -TOTAL[0] % tiles.block_q), (0, 0)])
    full = in_blocks(whole, tiles.block_q, tiles.block_kv, beyond=axis == "kv").all(axis=2)
    if axis == "kv":
        holds, full = holds.T, full.T
    unmasked, masked = np.zeros(holds.shape, int), np.zeros(holds.shape, int)
    for program, (first, count, begin, listed) in enumerate(table):
        unmasked[program, first : first + count] += 1
        assert 0 <= begin <= begin + listed <= partial.size
        np.add.at(masked[program], partial[begin : begin + listed], 1)
    np.testing.assert_array_equal(unmasked + masked, holds)
    np.testing.assert_array_equal(unmasked, full)


@pytest.mark.parametrize("axis", ["q", "kv"])
def test_the_list_has_places_that_grow_with_the_length(axis: Any) -> None:
    def places(length: int) -> int:
        def find(where: Any) -> PackedVisits:
            return compute_visits(compute_ranges(where, (None, 0), length), TILES[0], axis, length)

        return int(jax.eval_shape(find, tables([(1, 1)], 4)).partial.size)

    assert places(4096) - places(2048) == 2 * (places(2048) - places(1024))


def test_blocks_without_a_pair_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted as they are computed, in each pass and for each head."""
    run: Counter[str] = Counter()
    for module in (forward, backward):
        logits = module.compute_logits

        def counting(plan: Any, inputs: Any, pair: Any, *given: Any, logits: Any = logits) -> Any:
            phase = "dkv" if pair.keys_first else "dq" if "d_out" in inputs else "forward"
            jax.debug.callback(lambda: run.update([phase]))
            return logits(plan, inputs, pair, *given)

        monkeypatch.setattr(module, "compute_logits", counting)
    q, k, v = (jnp.ones((total, heads, 8)) for total, heads in zip((*TOTAL, TOTAL[1]), (2, 1, 1), strict=True))
    where: Any = tables(GAPS, 8)._asdict()

    def loss(*given: jax.Array) -> Any:
        # A scale that no other call has: what was traced before counts nothing.
        return packed_attention(*given, **where, causal=True, scale=0.43, block_sizes=build_uniform_sizes(16, 16)).sum()

    jax.block_until_ready(jax.grad(loss, (0, 1, 2))(q, k, v))
    jax.effects_barrier()
    held = in_blocks(pairs(GAPS, None, 0, TOTAL), 16, 16, beyond=False).any(axis=2)
    assert held.sum() < held.size / 3
    assert run == dict.fromkeys(("forward", "dq", "dkv"), 2 * int(held.sum()))


def test_packed_and_padded_are_both_right() -> None:
    """Judged by the same exact values and bounds: the padded form has the mask of the packed one as booleans."""
    problem, drawn = draw_problem(CASE), draw_cotangent(CASE)
    dense = dataclasses.replace(problem, storage=None, mask=Dense(problem.allowed))
    sizes = BlockSizes(forward=TILES[0], dq=TILES[1], dkv=Tiles(block_q=64, block_kv=32))
    packed = build_packed_implementation("packed", block_sizes=sizes, on_gpu=False)
    padded = flash_gpu.build_implementation("padded", block_sizes=sizes, on_gpu=False)
    for implementation, asked in ((padded, dense), (packed, problem)):
        executor = Executor(implementation)
        found = {**executor.residuals(asked).values, **executor.gradients_lse(asked, drawn).values}
        padding = {name: found.pop(name) for name in list(found) if "padding" in name}
        assert bool(padding) == (implementation is packed)
        assert not any(np.asarray(x).any() for x in padding.values())
        assert_attention(found, problem, drawn, arithmetic=implementation.arithmetic)


def call(dtype: Any = jnp.float32, **changed: Any) -> Any:
    given: dict[str, Any] = {
        "q": jnp.ones((8, 4, 8), dtype),
        "k": jnp.ones((9, 2, 8), dtype),
        "v": jnp.ones((9, 2, 8), dtype),
        **tables([(2, 3), (3, 3)], 3)._asdict(),
        "block_sizes": build_uniform_sizes(16, 16),
    } | changed
    return packed_attention(**given)


def test_neither_tokens_nor_cotangents_past_the_last_sequence_reach_anything() -> None:
    q, k, v, sinks = jnp.ones((8, 4, 8)), jnp.ones((9, 2, 8)), jnp.ones((9, 2, 8)), jnp.ones(4)

    def pulled(junk: float) -> Any:
        def residuals(q: Any, k: Any, v: Any, sinks: Any) -> Any:
            out, found = call(q=q, k=k, v=v, sinks=sinks, save_residuals=True)
            return out, found["logsumexp"]

        given = q.at[5:].set(junk), k.at[6:].set(junk), v.at[6:].set(junk), sinks
        (out, logsumexp), pull = jax.vjp(residuals, *given)
        gradients = pull((jnp.ones_like(out).at[5:].set(junk), jnp.ones_like(logsumexp).at[5:].set(junk)))
        return out[:5], logsumexp[:5], *gradients

    for x, y in zip(pulled(float("nan")), pulled(0.0), strict=True):
        np.testing.assert_array_equal(x, y)


def test_what_is_refused_is_named() -> None:
    with pytest.raises(ValueError, match=r"cu_q_lens must have shape \(max_seqs \+ 1,\)"):
        call(cu_q_lens=jnp.ones((1, 3), jnp.int32))
    with pytest.raises(ValueError, match="q has 3 heads"):
        call(q=jnp.ones((5, 3, 8)))
    with pytest.raises(ValueError, match="products must be 'exact' or 'tf32', got 'bf16'"):
        call(products="bf16")


def test_a_second_derivative_is_refused() -> None:
    q = jnp.ones((8, 4, 8))
    with pytest.raises(NotImplementedError, match="flash_gpu_packed has first derivatives in reverse mode only"):
        jax.grad(lambda q: jax.grad(lambda q: (call(q=q) ** 2).sum())(q).sum())(q)


def test_there_are_tiles_for_every_device_depth_and_dtype() -> None:
    for device in ("NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "NVIDIA B200", ""):
        for depth in (1, 64, 80, 128, 192, 256, 512):
            small, large = (look_up_packed(device, depth, itemsize) for itemsize in (2, 4))
            for one, other in zip(
                (small.forward, small.dq, small.dkv), (large.forward, large.dq, large.dkv), strict=True
            ):
                assert one.block_q * one.block_kv >= other.block_q * other.block_kv
    assert look_up_packed("NVIDIA H100 80GB HBM3", 128, 2) != look_up_packed("NVIDIA A100-SXM4-80GB", 128, 2)
    keys = [(entry.device, entry.max_depth, entry.max_itemsize) for entry in PACKED_TABLE]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("x64", [False, True])
def test_lowering_for_cuda(x64: bool) -> None:
    """Forward and gradients with every operand; no GPU is needed."""

    def loss(x: dict[str, Any], where: Any) -> Any:
        out, residuals = packed_attention(
            **x, **where, window=(30, 0), soft_cap=5.0, save_residuals=True, interpret=False
        )
        return out.astype(jnp.float32).sum() + residuals["logsumexp"].sum()

    with jax.enable_x64(x64):
        shapes = {"q": (200, 4, 80), "k": (300, 2, 80), "v": (300, 2, 48)}
        x = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}
        x["sinks"] = jax.ShapeDtypeStruct((4,), jnp.float32)
        where: Any = tables(GAPS, 8)._asdict()
        device = AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132)
        with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
            exported = jax.export.export(
                jax.jit(jax.value_and_grad(loss)),
                platforms=["cuda"],
                disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(LOWERING)],
            )(x, where)
    assert exported.mlir_module().count(LOWERING) == 3  # out, dq, dk with dv
