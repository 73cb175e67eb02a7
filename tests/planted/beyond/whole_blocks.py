"""Bugs over several whole blocks: running softmax, skipped tiles, indices of blocks."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp

from conformance.mutation.kernels.triggers import both, has, sixteen_bits, trains
from tests.bank import PlantedBug
from tests.planted.planting import tiled
from tests.planted.planting.tile_triggers import (
    call_of,
    kv_blocks,
    loses,
    masked_by_array,
    q_blocks,
    whole,
    whole_keys,
)
from tests.planted.planting.tiled import BLOCK, Call

Array = Any

_tiled = functools.partial(tiled.planted, family="whole blocks")


def _late_alpha(call: Call, acc: Array, alpha: Array, values: Array, j: Array) -> Array:
    return acc * jnp.where(j == 2, 1.0, alpha)[..., None] + values


def _last_whole_block(call: Call, j: Array) -> Array:
    return (j == call.kv_blocks - 1) & (call.kv_length % BLOCK == 0)


def _floor_of_wide_blocks(call: Call, i: Array) -> tuple[Array, Array]:
    """Key blocks are taken two at a time, and the number of pairs up to the diagonal is rounded down."""
    first, stop = tiled.key_range(call, i)
    if call.right is not None:
        stop = jnp.minimum(stop, jnp.maximum(2, (i + 1) // 2 * 2))
    return first, stop


def _first_rounded_up(call: Call, i: Array) -> tuple[Array, Array]:
    first, stop = tiled.key_range(call, i)
    if call.left is not None:
        first = jnp.maximum(0, -((call.left - i * BLOCK) // BLOCK))
    return first, stop


def _stop_of_first_column(call: Call, j: Array) -> tuple[Array, Array]:
    """The last query that sees a key block is asked of its first key."""
    first, stop = tiled.query_range(call, j)
    if call.left is not None:
        stop = jnp.minimum(stop, (j * BLOCK + call.left) // BLOCK + 1)
    return first, stop


def _as_many_queries_as_keys(call: Call, j: Array) -> tuple[Array, Array]:
    first, stop = tiled.query_range(call, j)
    return first, jnp.minimum(stop, call.kv_blocks)


def _prologue_lost(call: Call, j: Array) -> tuple[Array, Array]:
    """The block loaded ahead of the loop is only used where the loop is too short to be pipelined."""
    first, stop = tiled.query_range(call, j)
    return jnp.where(stop - first > 2, first + 1, first), stop


def _three_slots(call: Call, i: Array) -> tuple[Array, Array]:
    """Partial sums of dq have three slots; what a slot held before is overwritten."""
    first, stop = tiled.key_range(call, i)
    return jnp.maximum(first, call.kv_blocks - 3), stop


def _aligned_at_the_end(call: Call, i: Array) -> tuple[Array, Array]:
    """Blocks are skipped as if the last query stood at the last key; the mask inside tiles is right."""
    first, stop = tiled.key_range(call, i)
    if call.causal:
        stop = jnp.minimum(stop, (i * BLOCK + BLOCK - 1 + call.kv_length - call.q_length) // BLOCK + 1)
    return first, stop


def _unmasked_loop_without_bias(call: Call, x: Array, bias: Array, j: Array) -> Array:
    """Tiles left of the diagonal have a loop of their own, which knows of no bias."""
    if not call.causal:
        return x + bias
    diagonal = jnp.arange(call.q_blocks)[:, None, None] <= j
    return x + jnp.where(diagonal, bias, 0)


_OUT = ("out", "logsumexp")
_ALL = ("out", "logsumexp", "dq", "dk", "dv")
_F32 = "train/f32/B1.T{}.S{}.N2.K2.H16.V16/{}/s0"


def _f32(q_length: int, kv_length: int, rest: str) -> str:
    return _F32.format(q_length, kv_length, rest)


_PLANTED: tuple[tuple[str, PlantedBug], ...] = (
    (
        _f32(192, 192, "full/normal"),
        _tiled(
            name="third-block-does-not-rescale-the-sum-of-values",
            kind="online.alpha-late",
            reference="inferred from tile-ai/TileOPs PR 1511 (rescaling of the accumulator)",
            shows=("out", "dq", "dk"),
            trigger=kv_blocks(3),
            add_values=_late_alpha,
        ),
    ),
    (
        _f32(128, 256, "full/normal"),
        _tiled(
            name="peeled-last-whole-block-does-not-rescale-the-total",
            kind="online.alpha-peeled",
            reference="inferred from tile-ai/TileOPs PR 1511 (a last iteration apart from the loop)",
            shows=_ALL,
            trigger=both(whole_keys, kv_blocks(2)),
            add_total=lambda call, total, alpha, sums, j: (
                total * jnp.where(_last_whole_block(call, j), 1.0, alpha) + sums
            ),
        ),
    ),
    (
        _f32(64, 256, "full/normal"),
        _tiled(
            name="pivot-of-the-block-with-alpha-at-most-one",
            kind="online.falling-max",
            reference="inferred from tile-ai/TileOPs PR 1511 (maximum of the block taken for the running one)",
            shows=_OUT,
            trigger=kv_blocks(2),
            pivot=lambda call, old, top, j: jnp.where(top == -jnp.inf, old, top),
            alpha=lambda call, old, shift, j: jnp.exp(jnp.minimum(old - shift, 0.0)),
        ),
    ),
    (
        _f32(64, 192, "dense-d40/normal"),
        _tiled(
            name="masked-tiles-forget-to-rescale-the-total-from-the-third-on",
            kind="online.alpha-masked",
            reference="inferred from tracel-ai/cubecl PR 1027 (mask wrong with more than one key partition)",
            shows=_ALL,
            trigger=both(masked_by_array, kv_blocks(3)),
            add_total=lambda call, total, alpha, sums, j: (
                total * (jnp.where(j >= 2, 1.0, alpha) if call.masked else alpha) + sums
            ),
        ),
    ),
    (
        _f32(64, 192, "full/normal"),
        _tiled(
            name="loop-unrolled-by-two-leaves-the-odd-block",
            kind="blocks.unroll-odd",
            reference="inferred from jax b8b9f2bc33 (bounds rounded down)",
            shows=_OUT,
            trigger=lambda case: call_of(case).kv_blocks >= 3 and call_of(case).kv_blocks % 2 == 1,
            live=lambda call, i, j: (j < max(2, call.kv_blocks // 2 * 2)) & (i >= 0),
        ),
    ),
    (
        "train/bf16/B1.T128.S256.N2.K2.H16.V16/full/normal/s0",
        _tiled(
            name="running-maximum-rounded-to-sixteen-bits-from-the-second-block-on",
            kind="online.low-max",
            reference="inferred from maxtext fbef426f5 (statistics in the operands' dtype)",
            shows=_OUT,
            trigger=both(sixteen_bits, kv_blocks(2)),
            alpha=lambda call, old, shift, j: jnp.exp(old.astype(call.dtype).astype(jnp.float32) - shift),
        ),
    ),
    (
        _f32(192, 192, "causal/normal"),
        _tiled(
            name="dq-stops-before-the-diagonal-of-every-second-block",
            kind="causal.ub-floor",
            reference="jax b8b9f2bc33",
            shows=("dq",),
            trigger=both(has("train"), loses(tiled.key_range, _floor_of_wide_blocks, "q")),
            key_range_again=_floor_of_wide_blocks,
        ),
    ),
    (
        _f32(192, 192, "window-l100-r0/normal"),
        _tiled(
            name="window-starts-one-block-late",
            kind="window.first-block",
            reference="inferred from vllm-project/tpu-inference#1954 (first block of a window)",
            shows=_OUT,
            trigger=loses(tiled.key_range, _first_rounded_up, "q"),
            key_range=_first_rounded_up,
        ),
    ),
    (
        _f32(192, 128, "window-l70-r5/normal"),
        _tiled(
            name="dkv-stops-at-the-window-of-the-first-key",
            kind="window.last-query-block",
            reference="inferred from jax b8b9f2bc33 (bounds of the backward loops)",
            shows=("dk", "dv"),
            trigger=both(has("train"), loses(tiled.query_range, _stop_of_first_column, "kv")),
            query_range=_stop_of_first_column,
        ),
    ),
    (
        _f32(256, 128, "full/normal"),
        _tiled(
            name="dkv-loops-over-as-many-query-blocks-as-key-blocks",
            kind="len.q-ne-kv",
            reference="jax bd9a10e4eb",
            shows=("dk", "dv"),
            trigger=both(has("train"), loses(tiled.query_range, _as_many_queries_as_keys, "kv")),
            query_range=_as_many_queries_as_keys,
        ),
    ),
    (
        _f32(192, 64, "full/normal"),
        _tiled(
            name="dkv-loses-the-query-block-of-the-prologue",
            kind="blocks.prologue",
            reference="inferred from tokamax 602c79a (steps of a short loop)",
            shows=("dk", "dv"),
            trigger=both(has("train"), loses(tiled.query_range, _prologue_lost, "kv")),
            query_range=_prologue_lost,
        ),
    ),
    (
        _f32(64, 256, "full/normal"),
        _tiled(
            name="dq-keeps-the-last-three-partial-sums",
            kind="bwd.dq-steps",
            reference="inferred from tokamax 602c79a (dq_reduction_steps)",
            shows=("dq",),
            trigger=both(has("train"), loses(tiled.key_range, _three_slots, "q")),
            key_range_again=_three_slots,
        ),
    ),
    (
        _f32(256, 128, "causal/normal"),
        _tiled(
            name="causal-skips-as-if-aligned-at-the-end",
            kind="causal.bottom-right-skip",
            reference="Dao-AILab/flash-attention#1778",
            shows=_OUT,
            trigger=loses(tiled.key_range, _aligned_at_the_end, "q"),
            key_range=_aligned_at_the_end,
        ),
    ),
    (
        _f32(64, 192, "dense-d40/normal"),
        _tiled(
            name="mask-block-counted-along-the-queries",
            kind="mask.shape-config",
            reference="inferred from meta-pytorch/attention-gym#31 (mask of other lengths)",
            shows=_ALL,
            trigger=both(masked_by_array, lambda case: call_of(case).q_blocks != call_of(case).kv_blocks),
            mask_block=lambda call, j: j * call.q_blocks // call.kv_blocks,
        ),
    ),
    (
        _f32(64, 192, "full/bias/normal"),
        _tiled(
            name="bias-buffer-of-two-blocks-is-not-refilled",
            kind="bias.block-modulo",
            reference="inferred from tokenspeed#522 (block of another tile)",
            shows=_ALL,
            trigger=both(has("bias"), kv_blocks(3)),
            bias_block=lambda call, j: j % 2,
        ),
    ),
    (
        _f32(128, 128, "full/seg/normal"),
        _tiled(
            name="segment-ids-of-the-first-key-block",
            kind="segments.block",
            reference="inferred from tokamax 795b06e (ids of keys stay where they are)",
            shows=_ALL,
            trigger=both(has("segment_ids"), kv_blocks(2)),
            ids_block=lambda call, j: j * 0,
        ),
    ),
    (
        _f32(64, 192, "full/normal"),
        _tiled(
            name="last-whole-block-of-values-is-the-one-before",
            kind="blocks.clamp",
            reference="inferred from jax 0e690c1a88 (lookahead clamped)",
            shows=("out", "dq", "dk"),
            trigger=both(whole_keys, kv_blocks(3)),
            value_block=lambda call, j: (
                jnp.minimum(j, call.kv_blocks - 2) if call.kv_length % BLOCK == 0 and call.kv_blocks > 2 else j
            ),
        ),
    ),
    (
        _f32(192, 192, "causal/bias/normal"),
        _tiled(
            name="tiles-below-the-diagonal-have-no-bias",
            kind="bias.unmasked-loop",
            reference="inferred from bledden/triton-msl PR 7 (two loops, operands of one)",
            shows=_ALL,
            trigger=both(lambda case: call_of(case).causal, has("bias"), q_blocks(2)),
            bias=_unmasked_loop_without_bias,
        ),
    ),
    (
        _f32(192, 64, "full/softcap2/normal"),
        _tiled(
            name="derivative-of-the-cap-is-left-out-for-whole-blocks",
            kind="cap.bwd-missing",
            reference="inferred from tokamax PR 1121 (the cap's derivative)",
            shows=("dq", "dk"),
            trigger=both(trains("soft_cap"), whole(BLOCK)),
            capped=lambda call, x: (tiled.capped(call, x)[0], jnp.ones(())) if call.whole else tiled.capped(call, x),
        ),
    ),
)

BUGS = tuple(bug for _, bug in _PLANTED)
WITNESSES = {bug.name: case for case, bug in _PLANTED}
CORRECT = tiled.implementation(tiled.TileSteps(), "tiled")
