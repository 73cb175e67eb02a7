"""Bugs of head counts, groups, batches and depths."""

from __future__ import annotations

import functools
import math

import jax.numpy as jnp

from cases.case import Case
from conformance.mutation.kernels.triggers import Trigger, both, has
from tests.bank import PlantedBug
from tests.planted.beyond import size_steps as wrong
from tests.planted.planting import wrapped

_bug = functools.partial(wrapped.planted, family="sizes")
_ALL = ("out", "logsumexp", "dq", "dk", "dv")
_TABLE = {64: 0.125, 128: 128**-0.5, 256: 0.0625}

_train = has("train")


def _depth(condition: Trigger) -> Trigger:
    """The usual scale, and a condition."""
    return lambda case: case.scale is None and condition(case)


def _group(case: Case) -> int:
    return case.num_q_heads // case.num_kv_heads


def _odd_group(case: Case) -> bool:
    return _group(case) & (_group(case) - 1) > 0


_LITTLE = "train/f32/B{}.T24.S24.N{}.K{}.H16.V16/{}/normal/s0"
_DEEP = "train/f32/B1.T24.S24.N1.K1.H{}.V{}/full/normal/s0"

_PLANTED: tuple[tuple[str, PlantedBug], ...] = (
    (
        _DEEP.format(96, 96),
        _bug(
            "scale-of-the-padded-depth",
            wrong.scaled_by(lambda depth, v_depth: (-(-depth // 64) * 64) ** -0.5 if depth > 64 else depth**-0.5),
            kind="scale.padded-depth",
            reference="intel/ipex-llm PR 12619",
            shows=_ALL,
            trigger=_depth(lambda case: case.head_dim > 64 and case.head_dim % 64 > 0),
        ),
    ),
    (
        _DEEP.format(80, 80),
        _bug(
            "depth-is-the-first-64-channels",
            wrong.with_depth(lambda depth: min(depth, 64)),
            kind="depth.first-64",
            reference="triton-lang/triton#621",
            shows=_ALL,
            trigger=lambda case: case.head_dim > 64,
        ),
    ),
    (
        _DEEP.format(80, 80),
        _bug(
            "depth-in-chunks-of-32-rounded-down",
            wrong.with_depth(lambda depth: depth if depth < 32 else depth // 32 * 32),
            kind="depth.chunks",
            reference="inferred from mlc-ai/mlc-llm PR 1889 (depth taken for a multiple of 32)",
            shows=_ALL,
            trigger=lambda case: case.head_dim > 32 and case.head_dim % 32 > 0,
        ),
    ),
    (
        _DEEP.format(33, 33),
        _bug(
            "odd-depth-loses-its-last-channel",
            wrong.with_depth(lambda depth: max(1, depth // 2 * 2)),
            kind="depth.odd",
            reference="inferred from mlc-ai/mlc-llm PR 1889 (channels loaded in vectors)",
            shows=_ALL,
            trigger=lambda case: case.head_dim > 1 and case.head_dim % 2 > 0,
        ),
    ),
    (
        _DEEP.format(256, 64),
        _bug(
            "dq-lacks-the-second-half-of-a-depth-of-256",
            wrong.without_gradient("q", lambda depth: 128 if depth > 192 else depth),
            kind="depth.halves",
            reference="inferred from Dao-AILab/flash-attention#1306 (gradients at depth 256)",
            shows=("dq",),
            trigger=both(_train, lambda case: case.head_dim > 192),
        ),
    ),
    (
        _DEEP.format(192, 64),
        _bug(
            "dk-lacks-channels-beyond-128-from-depth-160-on",
            wrong.without_gradient("k", lambda depth: 128 if depth >= 160 else depth),
            kind="depth.halves",
            reference="inferred from Dao-AILab/flash-attention#498 (gradients from depth 160 on)",
            shows=("dk",),
            trigger=both(_train, lambda case: case.head_dim >= 160),
        ),
    ),
    (
        _DEEP.format(64, 256),
        _bug(
            "dv-lacks-the-second-half-of-a-depth-of-256",
            wrong.without_gradient("v", lambda depth: 128 if depth > 192 else depth),
            kind="depth.halves",
            reference="inferred from Dao-AILab/flash-attention#1306 (gradients at depth 256)",
            shows=("dv",),
            trigger=both(_train, lambda case: case.v_head_dim > 192),
        ),
    ),
    (
        _DEEP.format(72, 72),
        _bug(
            "dq-lacks-channels-beyond-a-multiple-of-32",
            wrong.without_gradient("q", lambda depth: depth if depth < 64 else depth // 32 * 32),
            kind="bwd.hd-nonmult32",
            reference="inferred from Dao-AILab/flash-attention PR 2896 (depths that are no multiple of 32)",
            shows=("dq",),
            trigger=both(_train, lambda case: case.head_dim > 64 and case.head_dim % 32 > 0),
        ),
    ),
    (
        _DEEP.format(16, 24),
        _bug(
            "dq-and-dk-by-as-many-value-channels-as-key-channels",
            wrong.values_by_key_depth,
            kind="bwd.hdv-extent",
            reference="XunhaoLai/native-sparse-attention-triton#27",
            shows=("dq", "dk"),
            trigger=both(_train, lambda case: case.v_head_dim > case.head_dim),
        ),
    ),
    (
        _DEEP.format(16, 20),
        _bug(
            "value-channels-beyond-a-multiple-of-eight-are-not-written",
            wrong.outputs(
                lambda out, arrays: jnp.where(jnp.arange(out.shape[-1]) < max(8, out.shape[-1] // 8 * 8), out, 0)
            ),
            kind="hdv.vector",
            reference="inferred from jax c9a5799a2a (value depth of whole lanes)",
            shows=("out", "dq", "dk", "dv"),
            trigger=lambda case: case.v_head_dim > 8 and case.v_head_dim % 8 > 0,
        ),
    ),
    (
        _DEEP.format(80, 80),
        _bug(
            "scale-by-an-integer-root",
            wrong.scaled_by(wrong.integer_root),
            kind="scale.integer",
            reference="inferred from lucidrains/muse-maskgit-pytorch#40 (scale that does not follow the depth)",
            shows=_ALL,
            trigger=_depth(lambda case: math.isqrt(case.head_dim) ** 2 != case.head_dim),
        ),
    ),
    (
        _DEEP.format(80, 80),
        _bug(
            "scale-from-a-table-of-three-depths",
            wrong.scaled_by(
                lambda depth, v_depth: _TABLE.get(
                    depth, depth**-0.5 if depth < 64 else _TABLE[64 if depth < 128 else 128]
                )
            ),
            kind="scale.table",
            reference="inferred from intel/ipex-llm PR 12619 (scale of the depth that a kernel has)",
            shows=_ALL,
            trigger=_depth(lambda case: case.head_dim > 64 and case.head_dim not in _TABLE),
        ),
    ),
    (
        _DEEP.format(96, 64),
        _bug(
            "scale-of-the-value-depth",
            wrong.scaled_by(lambda depth, v_depth: min(depth, v_depth) ** -0.5),
            kind="scale.v-depth",
            reference="inferred from Megatron-LM#1429 (scale of latent attention)",
            shows=_ALL,
            trigger=_depth(lambda case: case.head_dim > case.v_head_dim),
        ),
    ),
    (
        _DEEP.format(96, 96),
        _bug(
            "padding-of-the-depth-is-the-next-head",
            wrong.lanes_of_the_next_head,
            kind="hd.nonpow2-garbage",
            reference="jax 1aaec81f22",
            shows=_ALL,
            trigger=lambda case: case.head_dim & (case.head_dim - 1) > 0,
        ),
    ),
    (
        _LITTLE.format(1, 3, 1, "full"),
        _bug(
            "group-sum-by-halving",
            wrong.group_sum(wrong.by_halving),
            kind="gqa.tree-sum",
            reference="inferred from AMD-AGI/Primus-Turbo PR 516 (groups that are powers of two)",
            shows=("dk", "dv"),
            trigger=both(_train, _odd_group),
        ),
    ),
    (
        _LITTLE.format(1, 8, 1, "full"),
        _bug(
            "group-sum-of-at-most-four-heads",
            wrong.group_sum(lambda g: g[:, :, :, :4].sum(axis=3)),
            kind="gqa.dispatch",
            reference="inferred from flashinfer-ai/flashinfer PR 4316 (groups that have a kernel)",
            shows=("dk", "dv"),
            trigger=both(_train, lambda case: _group(case) > 4),
        ),
    ),
    (
        _LITTLE.format(1, 6, 2, "full"),
        _bug(
            "dkv-divide-heads-by-the-number-of-key-heads",
            wrong.group_sum(wrong.divided_by_kv_heads),
            kind="gqa.interleave-div",
            reference="XunhaoLai/native-sparse-attention-triton#27",
            shows=("dk", "dv"),
            trigger=both(_train, lambda case: _group(case) > 1 and _group(case) != case.num_kv_heads),
        ),
    ),
    (
        _LITTLE.format(1, 6, 2, "full"),
        _bug(
            "groups-are-padded-to-a-power-of-two",
            wrong.head_map(wrong.padded_group),
            kind="gqa.padded-group",
            reference="inferred from vllm-project/vllm-ascend PR 9560 (padded query heads)",
            shows=_ALL,
            trigger=lambda case: _odd_group(case) and case.num_kv_heads > 1,
        ),
    ),
    (
        _LITTLE.format(1, 12, 2, "full"),
        _bug(
            "tile-of-heads-crosses-its-group",
            wrong.head_map(wrong.tiles_of_four_heads),
            kind="gqa.head-tile",
            reference="FlashML-org/FreeToken PR 177",
            shows=_ALL,
            trigger=lambda case: _group(case) > 4 and _group(case) % 4 > 0 and case.num_kv_heads > 1,
        ),
    ),
    (
        _LITTLE.format(1, 32, 8, "full"),
        _bug(
            "heads-beyond-sixteen-read-the-first-queries",
            wrong.operand("q", lambda q, arrays: q[:, :, jnp.arange(q.shape[2]) % 16]),
            kind="heads.modulo",
            reference="inferred from vllm-xpu-kernels PR 409 (heads by the thread's number)",
            shows=_ALL,
            trigger=lambda case: case.num_q_heads > 16,
        ),
    ),
    (
        _LITTLE.format(1, 9, 3, "full/sinks"),
        _bug(
            "sinks-in-a-vector-of-eight",
            wrong.operand("sinks", lambda sinks, arrays: sinks[jnp.arange(sinks.shape[0]) % 8]),
            kind="sink.pad-heads",
            reference="inferred from vllm-project/tpu-inference#3167 (sinks and padded heads)",
            shows=("out", "logsumexp", "dsinks"),
            trigger=both(has("sinks"), lambda case: case.num_q_heads > 8),
        ),
    ),
    (
        _LITTLE.format(3, 1, 1, "full/seg"),
        _bug(
            "segment-ids-alternate-between-two-batch-rows",
            wrong.operand("segment_ids", lambda ids, arrays: tuple(x[jnp.arange(x.shape[0]) % 2] for x in ids)),
            kind="segments.batch-modulo",
            reference="inferred from jax 10dbfcf747 (row of a batch split over cores)",
            shows=_ALL,
            trigger=both(has("segment_ids"), lambda case: case.batch > 2),
        ),
    ),
    (
        _LITTLE.format(4, 2, 2, "full"),
        _bug(
            "programs-of-many-batch-rows-run-in-another-order",
            wrong.swapped_programs,
            kind="grid.order",
            reference="inferred from bledden/triton-msl PR 7 (batch row and head of a program)",
            shows=_ALL,
            trigger=lambda case: case.batch >= 4 and case.num_q_heads > 1,
        ),
    ),
    (
        _LITTLE.format(1, 3, 1, "full/biashead"),
        _bug(
            "one-key-head-means-one-head-of-bias",
            wrong.operand("bias", lambda bias, arrays: bias[:, :1] if arrays["k"].shape[2] == 1 else bias),
            kind="perhead-mask-gqa",
            reference="inferred from torch-xpu-ops#5090 (mask of each head with groups)",
            shows=_ALL,
            trigger=lambda case: case.bias == "biashead" and case.num_kv_heads == 1 and case.num_q_heads > 1,
        ),
    ),
    (
        _LITTLE.format(1, 3, 3, "full"),
        _bug(
            "odd-head-is-on-neither-of-two-cores",
            wrong.outputs(
                lambda out, arrays: jnp.where(
                    (jnp.arange(out.shape[2]) < max(1, out.shape[2] // 2 * 2))[:, None], out, 0
                )
            ),
            kind="grid.odd-heads",
            reference="inferred from jax 10dbfcf747 (grid split over cores)",
            shows=("out", "dq", "dk", "dv"),
            trigger=lambda case: case.num_q_heads > 1 and case.num_q_heads % 2 > 0,
        ),
    ),
    (
        _LITTLE.format(3, 1, 1, "full"),
        _bug(
            "odd-batch-row-is-on-neither-of-two-cores",
            wrong.outputs(
                lambda out, arrays: jnp.where(
                    (jnp.arange(out.shape[0]) < max(1, out.shape[0] // 2 * 2))[:, None, None, None], out, 0
                )
            ),
            kind="grid.odd-batch",
            reference="inferred from jax 10dbfcf747 (batch split over cores)",
            shows=("out", "dq", "dk", "dv"),
            trigger=lambda case: case.batch > 1 and case.batch % 2 > 0,
        ),
    ),
)

BUGS = tuple(bug for _, bug in _PLANTED)
WITNESSES = {bug.name: case for case, bug in _PLANTED}
CORRECT = wrapped.implementation("naive", wrapped.correct)
