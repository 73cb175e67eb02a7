"""Bugs of decode over long caches: splits, their merge, and more than one query at a time."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np

from cases.case import Case
from conformance.mutation.kernels.triggers import Trigger, both, has, sixteen_bits
from tests.bank import PlantedBug
from tests.planted.beyond import long_cache_steps as wrong
from tests.planted.planting import splits, wrapped
from tests.planted.planting.splits import Call, takes
from tests.planted.planting.tile_triggers import mask_of

_bug = functools.partial(splits.planted, family="long caches")


def _call(case: Case) -> Call:
    return Call(
        case.batch, case.q_length, case.kv_length, case.num_kv_heads, case.num_q_heads // case.num_kv_heads, 1.0,
        case.soft_cap, case.segments is not None, None,
    )  # fmt: skip


def _length(case: Case) -> int:
    return splits.split_length(_call(case))


def _visible(case: Case) -> np.ndarray:
    """What the mask alone allows, `[b, n, T, S]`."""
    return mask_of(case).dense(case.q_length, case.kv_length)


def _empty_splits(case: Case) -> np.ndarray:
    """Splits of which a row sees nothing, `[b, n, T, P]`; segment ids are left out."""
    seen = _visible(case)
    seen = np.pad(seen, [(0, 0)] * 3 + [(0, -case.kv_length % _length(case))])
    return np.logical_not(np.any(seen.reshape(*seen.shape[:3], -1, _length(case)), axis=-1))


def _some_empty_split(case: Case) -> bool:
    return takes(case) and (case.segments is not None or bool(_empty_splits(case).any()))


def _first_split_empty(case: Case) -> bool:
    return takes(case) and (case.segments is not None or bool(_empty_splits(case)[..., 0].any()))


def _hidden_before_the_last_split(case: Case) -> bool:
    if not takes(case):
        return False
    whole = (-(-case.kv_length // _length(case)) - 1) * _length(case)
    return case.segments is not None or not _visible(case)[..., :whole].all()


def _differs_by_query(case: Case) -> bool:
    seen = _visible(case)
    return takes(case) and (case.segments is not None or bool((seen != seen[:, :, -1:]).any()))


def _unfinished(case: Case) -> bool:
    """The last split is padded."""
    return takes(case) and bool(case.kv_length % _length(case))


def _queries(least: int) -> Trigger:
    return lambda case: takes(case) and case.q_length >= least


def _grouped(case: Case) -> bool:
    return takes(case) and case.num_q_heads > case.num_kv_heads and case.q_length > 1


def _hidden(case: Case) -> bool:
    return takes(case) and (case.segments is not None or not bool(_visible(case).all()))


def _several_groups(case: Case) -> bool:
    return _grouped(case) and case.num_q_heads // case.num_kv_heads > 1


_ONE = "decode/f32/B1.T1.S{}.N2.K2.H16.V16/{}/normal/s0"
_FEW = "prefill/f32/B{}.T{}.S1100.N4.K2.H16.V16/{}/normal/s0"

_PLANTED: tuple[tuple[str, PlantedBug], ...] = (
    (
        _ONE.format(1100, "full"),
        _bug(
            name="keys-behind-the-last-whole-split-are-dropped",
            kind="split.floor",
            reference="inferred from tile-ai/TileOPs PR 101 (keys of a split rounded down)",
            trigger=_unfinished,
            parts=wrong.floor_of_splits,
        ),
    ),
    (
        _ONE.format(2560, "full"),
        _bug(
            name="merge-has-room-for-four-splits",
            kind="split.capacity",
            reference="inferred from ROCm/vllm PR 238 (partitions that the reduction has room for)",
            trigger=lambda case: takes(case) and case.kv_length > 4 * _length(case),
            parts=wrong.four_slots,
        ),
    ),
    (
        _ONE.format(1100, "full"),
        _bug(
            name="splits-are-added-whatever-their-maximum",
            kind="merge.no-max",
            reference="inferred from flash-attention#404 (statistics relative to a split's maximum)",
            merge=wrong.merge_without_max,
        ),
    ),
    (
        _ONE.format(1100, "full"),
        _bug(
            name="outputs-of-splits-are-averaged",
            kind="split.unweighted",
            reference="inferred from flash-attention#404 (merge of partial outputs)",
            shows=("out",),
            merge=wrong.merge_unweighted,
        ),
    ),
    (
        _ONE.format(1100, "window-l100-r0-o1099/sinks"),
        _bug(
            name="sink-is-lost-with-an-empty-first-split",
            kind="sink.splitkv-count",
            reference="rocm-libraries#12227",
            trigger=both(has("sinks"), _first_split_empty),
            merge=wrong.sink_in_the_first_split_alone,
        ),
    ),
    (
        _ONE.format(1100, "lengths-300"),
        _bug(
            name="split-without-keys-is-nan",
            kind="split.both-empty",
            reference="inferred from vllm#39148 (-inf minus -inf)",
            trigger=_some_empty_split,
            part=wrong.unguarded_part,
        ),
    ),
    (
        _ONE.format(1100, "lengths-300"),
        _bug(
            name="split-without-keys-has-a-finite-logsumexp",
            kind="split.empty-finite",
            reference="inferred from vllm#49294 (empty part merged as a real one)",
            trigger=_some_empty_split,
            part=wrong.empty_counts_as_one,
        ),
    ),
    (
        _ONE.format(1100, "full"),
        _bug(
            name="splits-in-base-two-are-merged-by-exp",
            kind="split.base2",
            reference="inferred from sglang#40903 (base of partial states)",
            shows=("out",),
            merge=wrong.base_two_of_splits,
        ),
    ),
    (
        "decode/bf16/B1.T1.S1100.N2.K2.H16.V16/full/normal/s0",
        _bug(
            name="logsumexp-of-splits-is-kept-in-sixteen-bits",
            kind="split.lse-dtype",
            reference="inferred from jax 178e622ef1 (logsumexp in the dtype of the keys)",
            trigger=both(sixteen_bits, takes),
            parts=wrong.rounded_statistics,
        ),
    ),
    (
        _ONE.format(1100, "full/bias"),
        _bug(
            name="bias-of-the-first-split-for-all",
            kind="split.bias-offset",
            reference="inferred from flash-attention PR 540 (bias by position within the tile)",
            trigger=both(has("bias"), takes),
            bias_rows=wrong.bias_of_the_first_split,
        ),
    ),
    (
        _ONE.format(1100, "lengths-700"),
        _bug(
            name="mask-and-keys-are-cut-at-different-places",
            kind="split.boundary",
            reference="inferred from ROCm/vllm PR 196 (partition sizes that differ by place)",
            trigger=both(_hidden, lambda case: -(-case.kv_length // wrong.splits_of(_call(case))) != _length(case)),
            visible=wrong.mask_by_even_splits,
        ),
    ),
    (
        _ONE.format(1100, "lengths-300"),
        _bug(
            name="only-the-last-split-is-masked",
            kind="split.mask-last",
            reference="inferred from flash-attention#1449 (masking steps of a split)",
            trigger=_hidden_before_the_last_split,
            visible=wrong.last_split_is_masked,
        ),
    ),
    (
        _ONE.format(1100, "full"),
        _bug(
            name="padding-of-the-last-split-counts",
            kind="split.padding",
            reference="inferred from flash-attention PR 1455 (length of the buffer in the kernel with splits)",
            trigger=_unfinished,
            visible=wrong.padding_is_seen,
        ),
    ),
    (
        _ONE.format(1100, "full/softcap2"),
        _bug(
            name="path-with-splits-has-no-soft-cap",
            kind="cap.dropped-by-backend",
            reference="inferred from sgl-project/sglang#33915 (soft cap lost on one path)",
            shows=("out", "logsumexp", "max_logits"),
            trigger=both(has("soft_cap"), takes),
            capped=lambda z, call: z,
        ),
    ),
    (
        _FEW.format(1, 4, "causal-o1096"),
        _bug(
            name="mask-of-packed-rows-is-head-first",
            kind="packgqa.mask-rows",
            reference="inferred from sgl-kernel-xpu PR 254 (what belongs to a packed row)",
            trigger=both(_several_groups, _differs_by_query),
            visible=wrong.rows_by_head_first,
        ),
    ),
    (
        _FEW.format(1, 4, "full"),
        _bug(
            name="out-of-packed-rows-is-head-first",
            kind="packgqa.out-rows",
            reference="inferred from vllm-project/flash-attention PR 87 (rows after the swap of groups)",
            shows=("out",),
            trigger=_several_groups,
            from_rows=wrong.out_by_head_first,
        ),
    ),
    (
        _FEW.format(1, 4, "full"),
        _bug(
            name="logsumexp-of-packed-rows-is-head-first",
            kind="splitkv.lse-layout",
            reference="vllm-project/flash-attention PR 87",
            shows=("logsumexp",),
            trigger=_several_groups,
            lse=wrong.lse_by_head_first,
        ),
    ),
    (
        _FEW.format(1, 4, "full/sinks"),
        _bug(
            name="sinks-of-packed-rows-are-head-first",
            kind="sink.packgqa-row",
            reference="sgl-kernel-xpu PR 254",
            trigger=both(has("sinks"), _several_groups),
            sink_rows=lambda sinks, call: jnp.repeat(sinks.reshape(call.kv_heads, call.group), call.q_length, axis=1),
        ),
    ),
    (
        _FEW.format(1, 4, "causal-o1096"),
        _bug(
            name="drafted-tokens-see-what-the-last-sees",
            kind="spec.offset",
            reference="inferred from vllm#45227 (plan for one query)",
            trigger=both(_queries(2), _differs_by_query),
            allowed=lambda mask, call: jnp.broadcast_to(mask[:, :, -1:], mask.shape),
        ),
    ),
    (
        _FEW.format(1, 9, "full"),
        _bug(
            name="rows-behind-a-tile-of-sixteen-are-not-written",
            kind="packgqa.row-tile",
            reference="inferred from vllm-project/vllm PR 52879 (scratch for a sequence, rows by query)",
            shows=("out",),
            trigger=lambda case: takes(case) and case.q_length * case.num_q_heads // case.num_kv_heads > 16,
            from_rows=wrong.tile_of_sixteen_rows,
        ),
    ),
    (
        _FEW.format(2, 2, "full"),
        _bug(
            name="merge-folds-all-sequences-onto-one",
            kind="splitkv.batch-stride0",
            reference="vllm-project/flash-attention PR 176",
            shows=("out",),
            trigger=both(_queries(2), lambda case: case.batch > 1),
            from_rows=wrong.last_sequence_for_all,
        ),
    ),
    (
        _FEW.format(1, 12, "full/sinks"),
        wrapped.planted(
            "more-than-eight-queries-lose-the-sinks",
            wrong.path_of_many_queries_without_sinks,
            family="long caches",
            kind="sink.s1-vs-sN",
            reference="inferred from mlx#3452 (path by the number of queries)",
            shows=("out", "logsumexp", "dsinks"),
            trigger=both(has("sinks"), _queries(9)),
        ),
    ),
)

BUGS = tuple(bug for _, bug in _PLANTED)
WITNESSES = {bug.name: case for case, bug in _PLANTED}
CORRECT = splits.implementation(splits.SplitSteps(), "splits")
