"""The order in which tiles of the Mosaic GPU kernels start, and the idle time of multiprocessors at the end."""

from __future__ import annotations

import heapq

import numpy as np
import pytest

from impls import flash_gpu
from impls.flash_gpu.block_sizes import TABLE, BlockSizes
from impls.flash_gpu.mosaic.mosaic_launch import MAX_CACHED_BYTES, TILE_OVERHEAD_STEPS, TileOrder, deal_tiles

MULTIPROCESSORS = 132  # of an H100 or H200
TILE = 128


def causal(length: int) -> np.ndarray:
    """Compute the steps of a head's tiles under a causal mask, `[1, blocks]`."""
    return np.arange(1, length // TILE + 1)[None]


def order_of(length: int, rows: int, depth: int) -> TileOrder:
    """That of a causal call in two-byte elements with so many heads of batch rows."""
    return TileOrder.of(causal(length), 1, rows, 2 * length * depth * 2)


def whole_time(steps: np.ndarray) -> float:
    """How long tiles take that begin in this order wherever there is room, in parts of what no order is faster than."""
    costs, times = steps + TILE_OVERHEAD_STEPS, [0] * MULTIPROCESSORS
    for cost in costs.tolist():
        heapq.heapreplace(times, times[0] + cost)
    return float(max(times) / max(costs.sum() / MULTIPROCESSORS, costs.max()))


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize(("batch", "together"), [(1, 1), (1, 4), (3, 1), (3, 6), (3, 12)])
def test_every_tile_has_its_turn(batch: int, descending: bool, together: int) -> None:
    order = TileOrder(batch, 4, 5, together, descending)
    found = [tuple(map(int, order.at(np.int32(tile)))) for tile in range(order.tiles)]
    assert sorted(found) == sorted(np.ndindex(batch, 4, 5))
    steps = np.arange(batch * 5).reshape(batch, 5)
    assert order.steps(steps).tolist() == [steps[row, block] for row, _head, block in found]


def test_tiles_of_one_length_begin_head_after_head() -> None:
    order = TileOrder.of(np.full((1, 8), 3), 2, 4, 1 << 20)
    assert (order.together, order.descending) == (1, False)
    assert [int(order.at(np.int32(tile))[2]) for tile in range(8)] == list(range(8))


def test_the_longest_begin_first_and_no_more_heads_than_the_cache_has() -> None:
    order = order_of(4096, 32, 128)
    assert order.together == MAX_CACHED_BYTES // (2 * 4096 * 128 * 2) == 16
    steps = order.steps(causal(4096)).reshape(2, -1)
    assert (np.diff(steps) <= 0).all()
    keys_first = TileOrder.of(causal(4096)[:, ::-1], 1, 32, 2 << 20)  # as dk and dv have it
    assert (keys_first.steps(causal(4096)[:, ::-1]) == steps.ravel()).all()


@pytest.mark.parametrize(
    ("length", "rows", "depth", "before", "now"),
    [(4096, 64, 64, 1.08, 1.01), (4096, 32, 128, 1.16, 1.02), (16384, 8, 128, 1.15, 1.01), (16384, 16, 64, 1.07, 1.01)],
)
def test_what_a_causal_call_waits_for_at_its_end(length: int, rows: int, depth: int, before: float, now: float) -> None:
    """Steps are whole numbers and nothing is timed, so these figures are exact; here to two digits."""
    assert round(whole_time(np.tile(causal(length)[0], rows)), 2) == before
    assert round(whole_time(order_of(length, rows, depth).steps(causal(length))), 2) <= now


def test_tiles_are_dealt_to_whoever_is_free() -> None:
    order = order_of(4096, 32, 128)
    steps = order.steps(causal(4096))
    table = deal_tiles(steps, MULTIPROCESSORS)
    hands = [row[1 : 1 + row[0]] for row in table]
    assert sorted(np.concatenate(hands).tolist()) == list(range(order.tiles))
    assert [int(hand[0]) for hand in hands] == list(range(MULTIPROCESSORS))  # by which a program knows its first
    assert (
        max((steps[hand] + TILE_OVERHEAD_STEPS).sum() for hand in hands)
        == whole_time(steps) * (steps + TILE_OVERHEAD_STEPS).sum() / 132
    )


@pytest.mark.parametrize("setting", ["ping_pong", "persistent"])
def test_only_the_forward_kernel_has_other_schedules(setting: str) -> None:
    sizes, ring = TABLE[0].sizes, flash_gpu.Ring(**{setting: True})
    assert BlockSizes(forward=sizes.forward, dq=sizes.dq, dkv=sizes.dkv, mosaic_forward=ring).ring("forward") == ring
    for name in ("mosaic_dq", "mosaic_dkv"):
        with pytest.raises(ValueError, match=f"{name} must be without ping_pong and persistent"):
            BlockSizes(forward=sizes.forward, dq=sizes.dq, dkv=sizes.dkv, **{name: ring})
