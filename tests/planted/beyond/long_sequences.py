"""Bugs of long sequences: small integers for blocks and places, loops and tables of a fixed size."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp

from cases.case import Case
from conformance.mutation.kernels.triggers import Trigger, both, has, sixteen_bits
from tests.bank import PlantedBug
from tests.planted.planting import tiled
from tests.planted.planting.tile_triggers import call_of, kv_blocks, loses, masked_by_array, q_blocks
from tests.planted.planting.tiled import BLOCK, Call

Array = Any

_bug = functools.partial(tiled.planted, family="long sequences")


def _near(case: Case) -> bool:
    """The kernel compares places: causal or a window."""
    call = call_of(case)
    return call.left is not None or call.right is not None


def _longer(length: int) -> Trigger:
    """Places of both queries and keys go beyond `length`."""
    return lambda case: min(case.q_length, case.kv_length) > length


def _q_longer(length: int) -> Trigger:
    return lambda case: case.q_length > length


def _either_longer(length: int) -> Trigger:
    return lambda case: max(case.q_length, case.kv_length) > length


def _wide(window_blocks: int) -> Trigger:
    def trigger(case: Case) -> bool:
        left = call_of(case).left
        return left is not None and left > window_blocks * BLOCK

    return trigger


def _in(dtype: Any) -> Any:
    """Places of another type."""
    return lambda call, block: tiled.positions(call, block).astype(dtype)


def _stop_in_int8(call: Call, i: Array) -> tuple[Array, Array]:
    """The number of the block behind the last is kept in eight bits."""
    first, stop = tiled.key_range(call, i)
    return first, jnp.asarray(stop).astype(jnp.int8).astype(jnp.int32)


def _rows_in_int8(call: Call, i: Array) -> tuple[Array, Array]:
    """Numbers of query blocks are kept in eight bits."""
    return tiled.key_range(call, jnp.asarray(i).astype(jnp.int8).astype(jnp.int32))


def _at_most_keys(blocks: int) -> Any:
    def ranges(call: Call, i: Array) -> tuple[Array, Array]:
        first, stop = tiled.key_range(call, i)
        return first, jnp.minimum(stop, blocks)

    return ranges


def _trip_count_of_queries(call: Call, j: Array) -> tuple[Array, Array]:
    """The loop over query blocks has a fixed trip count from where it begins."""
    first, stop = tiled.query_range(call, j)
    return first, jnp.minimum(stop, first + 12)


def _eight_blocks_of_window(call: Call, i: Array) -> tuple[Array, Array]:
    """How many blocks a window reaches back has three bits."""
    first, stop = tiled.key_range(call, i)
    if call.left is None:
        return first, stop
    return jnp.maximum(first, i - 8), stop


def _keys_of_id_and_place(call: Call, q_ids: Array, kv_ids: Array, rows: Array, columns: Array) -> Array:
    """Ids and places share one number of 16 bits, `id * S + place`, of which the id is read back by division."""
    length = jnp.asarray(call.kv_length, jnp.int16 if call.kv_length < 2**15 else jnp.int32)
    q_keys = (q_ids * call.kv_length).astype(length.dtype)
    kv_keys = (kv_ids * call.kv_length + columns % call.kv_length).astype(length.dtype)
    return q_keys // length == kv_keys // length


def _ids_and_places_overflow(case: Case) -> bool:
    """Ids go up to 8 and the batch rows; a length that is a power of two leaves them whole."""
    length = case.kv_length
    power = length & (length - 1) == 0
    return case.segments is not None and not power and length < 2**15 <= (9 + case.batch) * length


def _delta_ring(call: Call, delta: Array) -> Array:
    """The buffer of delta has sixteen blocks."""
    return delta[:, :, jnp.arange(call.q_blocks) % 16]


_LONG_KEYS = "train/f32/B1.T64.S{}.N1.K1.H8.V8/{}/s0"
_LONG_QUERIES = "train/f32/B1.T{}.S{}.N1.K1.H8.V8/{}/s0"

_PLANTED: tuple[tuple[str, PlantedBug], ...] = (
    (
        _LONG_KEYS.format(8256, "full/normal"),
        _bug(
            name="number-of-key-blocks-in-int8",
            kind="index.int8",
            reference="inferred from jax splash mask info (block numbers in the smallest type that fits)",
            shows=("out", "logsumexp"),
            trigger=loses(tiled.key_range, _stop_in_int8, "q"),
            key_range=_stop_in_int8,
        ),
    ),
    (
        _LONG_QUERIES.format(8256, 16, "causal/normal"),
        _bug(
            name="query-block-number-in-int8-where-blocks-are-skipped",
            kind="index.int8",
            reference="inferred from jax splash mask info (block numbers in the smallest type that fits)",
            shows=("out", "logsumexp"),
            trigger=loses(tiled.key_range, _rows_in_int8, "q"),
            key_range=_rows_in_int8,
        ),
    ),
    (
        _LONG_QUERIES.format(16448, 16, "causal/normal"),
        _bug(
            name="query-block-number-in-uint8-where-pairs-are-masked",
            kind="index.uint8",
            reference="inferred from vllm-project/tpu-inference PR 2756 (width of places)",
            shows=("out", "logsumexp"),
            trigger=both(_near, q_blocks(257)),
            rows=lambda call, i: tiled.positions(call, i.astype(jnp.uint8).astype(jnp.int32)),
        ),
    ),
    (
        _LONG_QUERIES.format(32832, 16, "causal/normal"),
        _bug(
            name="places-in-int16",
            kind="index.int16",
            reference="vllm-project/tpu-inference PR 2756",
            shows=("out", "logsumexp", "dq"),
            trigger=both(_near, _either_longer(2**15)),
            rows=_in(jnp.int16),
            columns=_in(jnp.int16),
        ),
    ),
    (
        _LONG_QUERIES.format(320, 320, "causal/normal"),
        _bug(
            name="places-in-bf16",
            kind="index.bf16",
            reference="inferred from RosettaCommons/foundry PR 236 (indices in bf16)",
            shows=("out", "logsumexp", "dq"),
            trigger=both(_near, _either_longer(256)),
            rows=_in(jnp.bfloat16),
            columns=_in(jnp.bfloat16),
        ),
    ),
    (
        _LONG_QUERIES.format(2240, 64, "window-l2100-rinf/normal"),
        _bug(
            name="places-in-f16",
            kind="index.f16",
            reference="inferred from RosettaCommons/foundry PR 236 (indices in the operands' dtype)",
            shows=("out", "logsumexp", "dq"),
            trigger=both(_near, _either_longer(2048)),
            rows=_in(jnp.float16),
            columns=_in(jnp.float16),
        ),
    ),
    (
        _LONG_KEYS.format(4160, "full/seg/normal"),
        _bug(
            name="id-and-place-share-sixteen-bits",
            kind="segments.packed-key",
            reference="inferred from vllm-project/tpu-inference PR 2756 (places in int16)",
            shows=("out", "logsumexp"),
            trigger=_ids_and_places_overflow,
            same_ids=_keys_of_id_and_place,
        ),
    ),
    (
        _LONG_KEYS.format(576, "full/normal"),
        _bug(
            name="at-most-eight-key-blocks",
            kind="loop.cap",
            reference="inferred from golang-design/accel#8 (keys that one launch has room for)",
            shows=("out", "logsumexp", "dq", "dk", "dv"),
            trigger=kv_blocks(9),
            live=lambda call, i, j: (j < 8) & (i >= 0),
        ),
    ),
    (
        _LONG_KEYS.format(1088, "full/normal"),
        _bug(
            name="dq-sums-at-most-sixteen-key-blocks",
            kind="loop.cap",
            reference="inferred from tokamax 602c79a (fixed number of partial sums of dq)",
            shows=("dq",),
            trigger=both(has("train"), loses(tiled.key_range, _at_most_keys(16), "q")),
            key_range_again=_at_most_keys(16),
        ),
    ),
    (
        _LONG_QUERIES.format(832, 64, "causal/normal"),
        _bug(
            name="dkv-loop-has-twelve-trips",
            kind="loop.cap",
            reference="inferred from tokamax 602c79a (fixed number of steps of a loop)",
            shows=("dk", "dv"),
            trigger=both(has("train"), loses(tiled.query_range, _trip_count_of_queries, "kv")),
            query_range=_trip_count_of_queries,
        ),
    ),
    (
        _LONG_KEYS.format(2112, "dense-d40/normal"),
        _bug(
            name="bits-of-live-blocks-in-one-word",
            kind="mask.bits",
            reference="inferred from PaddlePaddle/flash-attention PR 136 (block mask of a chunk)",
            shows=("out", "logsumexp", "dq", "dk", "dv"),
            trigger=both(masked_by_array, kv_blocks(33)),
            live=lambda call, i, j: ((j < 32) | (not call.masked)) & (i >= 0),
        ),
    ),
    (
        _LONG_KEYS.format(1088, "full/seg/normal"),
        _bug(
            name="bits-of-live-blocks-of-segments-in-half-a-word",
            kind="mask.bits",
            reference="inferred from PaddlePaddle/flash-attention PR 136 (block mask of a chunk)",
            shows=("out", "logsumexp", "dq", "dk", "dv"),
            trigger=both(has("segment_ids"), kv_blocks(17)),
            live=lambda call, i, j: ((j < 16) | (not call.packed)) & (i >= 0),
        ),
    ),
    (
        _LONG_KEYS.format(576, "dense-d40/normal"),
        _bug(
            name="table-of-mask-blocks-wraps-after-eight",
            kind="mask.table",
            reference="inferred from PaddlePaddle/flash-attention PR 136 (block mask of a chunk)",
            shows=("out", "logsumexp", "dq", "dk", "dv"),
            trigger=both(masked_by_array, kv_blocks(9)),
            mask_block=lambda call, j: j % 8,
        ),
    ),
    (
        _LONG_KEYS.format(832, "full/normal"),
        _bug(
            name="queue-of-values-wraps-after-twelve-blocks",
            kind="prefetch.wrap",
            reference="inferred from tokenspeed#522 (block of another tile)",
            shows=("out", "dq", "dk"),
            trigger=kv_blocks(13),
            value_block=lambda call, j: j % 12,
        ),
    ),
    (
        _LONG_KEYS.format(1088, "full/seg/normal"),
        _bug(
            name="table-of-segment-ids-ends-after-sixteen-blocks",
            kind="segments.table",
            reference="inferred from sglang#9675 (table narrower than the longest row)",
            shows=("out", "logsumexp", "dq", "dk", "dv"),
            trigger=both(has("segment_ids"), kv_blocks(17)),
            ids_block=lambda call, j: jnp.minimum(j, 15),
        ),
    ),
    (
        _LONG_QUERIES.format(704, 704, "window-l600-r0/normal"),
        _bug(
            name="window-reaches-back-eight-blocks",
            kind="window.block-bits",
            reference="inferred from flagos-ai/FlagAttention#25 (first block of a window)",
            shows=("out", "logsumexp"),
            trigger=both(_wide(8), loses(tiled.key_range, _eight_blocks_of_window, "q")),
            key_range=_eight_blocks_of_window,
        ),
    ),
    (
        _LONG_QUERIES.format(1088, 1088, "causal/normal"),
        _bug(
            name="places-are-looked-up-in-a-table-of-1024",
            kind="places.table",
            reference="inferred from maxtext ecedb581f (lengths of the configuration)",
            shows=("out", "logsumexp", "dq", "dk", "dv"),
            trigger=both(_near, _longer(1024)),
            rows=lambda call, i: jnp.minimum(tiled.positions(call, i), 1023),
            columns=lambda call, j: jnp.minimum(tiled.positions(call, j), 1023),
        ),
    ),
    (
        _LONG_QUERIES.format(1088, 16, "full/normal"),
        _bug(
            name="buffer-of-delta-wraps-after-1024-queries",
            kind="delta.wrap",
            reference="inferred from flash-attention PR 1500 (offset of a row in the accumulator of dq)",
            shows=("dq", "dk"),
            trigger=both(has("train"), _q_longer(1024)),
            delta=_delta_ring,
        ),
    ),
    (
        "train/bf16/B1.T64.S1088.N1.K1.H8.V8/full/normal/s0",
        _bug(
            name="sum-in-sixteen-bits-over-more-than-sixteen-blocks",
            kind="online.low-total",
            reference="inferred from maxtext fbef426f5 (statistics in the operands' dtype)",
            shows=("out", "logsumexp", "dq", "dk", "dv"),
            trigger=both(sixteen_bits, kv_blocks(17)),
            add_total=lambda call, total, alpha, sums, j: (
                (total * alpha + sums).astype(call.dtype if call.kv_blocks > 16 else jnp.float32).astype(jnp.float32)
            ),
        ),
    ),
)

BUGS = tuple(bug for _, bug in _PLANTED)
WITNESSES = {bug.name: case for case, bug in _PLANTED}
CORRECT = tiled.implementation(tiled.TileSteps(), "tiled")
