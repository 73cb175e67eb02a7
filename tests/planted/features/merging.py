"""Bugs of what parts of attention promise to be merged by, of the merge itself, and of sinks in it."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from conformance.mutation.kernels.triggers import Trigger, has
from impls import softmax_merge
from impls.ragged.ragged_plan import RaggedPlan
from impls.softmax_merge import Normalised, Part
from tests.bank import PlantedBug
from tests.kernels.split_decode import DecodeSteps, build_decode_implementation, build_sink_part, compute_part

Array = Any

_DECODE = has("decode")
_SINKS = has("decode", "sinks")


def _bug(
    name: str, *, kind: str, reference: str, shows: tuple[str, ...], trigger: Trigger = _DECODE, **steps: Any
) -> PlantedBug:
    return PlantedBug(
        name=name,
        family="merging",
        kind=kind,
        reference=reference,
        shows=shows,
        build=functools.partial(build_decode_implementation, DecodeSteps(**steps), name),
        trigger=trigger,
    )


def _stacked(parts: Sequence[Part]) -> Part:
    return Part(*(jnp.stack(x) for x in zip(*parts, strict=True)))


def _sums(parts: Part, weights: Array, top: Array) -> Part:
    return Part((weights * parts.out).sum(axis=0), top, (weights * parts.sum).sum(axis=0))


def _weights_of_one(parts: Sequence[Part]) -> Part:
    x = _stacked(parts)
    return _sums(x, jnp.ones_like(x.sum), x.max.max(axis=0))


def _minus_infinity_minus_itself(parts: Sequence[Part]) -> Part:
    x = _stacked(parts)
    top = x.max.max(axis=0)
    return _sums(x, jnp.exp(x.max - top), top)


def _relative_to_the_first(parts: Sequence[Part]) -> Part:
    x = _stacked(parts)
    top = jnp.where(x.max[0] == -jnp.inf, 0.0, x.max[0])
    return _sums(x, jnp.exp(x.max - top), top)


def _top_of_zero(parts: Sequence[Part]) -> Part:
    """What an empty part holds takes part in the maximum: zero, as fresh memory is."""
    x = _stacked(parts)
    held = jnp.where(x.sum == 0, 0.0, x.max)
    top = held.max(axis=0)
    return _sums(x, jnp.where(x.sum == 0, 0.0, jnp.exp(held - top)), top)


def _sum_not_rescaled(parts: Sequence[Part]) -> Part:
    found, x = softmax_merge.merge(parts), _stacked(parts)
    return found._replace(sum=x.sum.sum(axis=0))


def _sinks_of_the_first_head(sinks: Array, plan: RaggedPlan) -> Array:
    by_kv_head = sinks.reshape(-1, plan.group)
    return jnp.broadcast_to(by_kv_head[:, :1], by_kv_head.shape).reshape(sinks.shape)


def _rescaled_twice(parts: Sequence[Part]) -> Part:
    x = _stacked(parts)
    found = softmax_merge.merge(parts)
    weights = jnp.where(x.sum == 0, 0.0, jnp.exp(2 * (x.max - jnp.where(found.max == -jnp.inf, 0.0, found.max))))
    return _sums(x, weights, found.max)


def _last_part_dropped(parts: Sequence[Part]) -> Part:
    return softmax_merge.merge(parts[:-1]) if len(parts) > 2 else softmax_merge.merge(parts)


def _rows_of_the_first_sequence(parts: Sequence[Part]) -> Part:
    """The combine step's batch stride is 0, but for the statistics."""
    first = [part._replace(out=jnp.broadcast_to(part.out[:1], part.out.shape)) for part in parts]
    return softmax_merge.merge(first)


def _statistics_turned(parts: Sequence[Part]) -> Part:
    """The combine step takes the heads' statistics in another order than their rows."""
    return softmax_merge.merge([part._replace(max=jnp.roll(part.max, 1, axis=2)) for part in parts])


def _in_bf16(parts: Part, plan: RaggedPlan) -> Part:
    return parts._replace(out=parts.out.astype(jnp.bfloat16).astype(jnp.float32))


def _base_two(z: Array, v: Array) -> Part:
    """The maximum is that of logits in base 2."""
    part = compute_part(z, v)
    return part._replace(max=part.max * math.log2(math.e))


def _in_every_split(splits: Part, merged: Part, sinks: Array, merge: Any) -> Part:
    parts = [Part(*(x[:, :, n] for x in splits)) for n in range(splits.sum.shape[2])]
    return merge([merge([part, build_sink_part(part, sinks)]) for part in parts])


def _in_the_first_split_if_it_has_keys(splits: Part, merged: Part, sinks: Array, merge: Any) -> Part:
    there = splits.sum[:, :, 0] > 0
    return merge([merged, build_sink_part(merged, sinks)._replace(sum=there.astype(jnp.float32))])


def _never(splits: Part, merged: Part, sinks: Array, merge: Any) -> Part:
    return merged


def _in_the_maximum_only(splits: Part, merged: Part, sinks: Array, merge: Any) -> Part:
    return merge([merged, build_sink_part(merged, sinks)._replace(sum=jnp.full(merged.sum.shape, 1e-30))])


def _not_rebased(splits: Part, merged: Part, sinks: Array, merge: Any) -> Part:
    """`exp(sink - max)` is added, whichever is larger: it overflows."""
    top = jnp.where(merged.max == -jnp.inf, 0.0, merged.max)
    return merged._replace(max=top, sum=merged.sum + jnp.exp(sinks - top))


def _only_with_keys(splits: Part, merged: Part, sinks: Array, merge: Any) -> Part:
    """A query without keys has no sink either."""
    found = merge([merged, build_sink_part(merged, sinks)])
    return Part(*(jnp.where(merged.sum == 0, x, y) for x, y in zip(merged, found, strict=True)))


def _local(part: Part) -> Normalised:
    """The logarithm of the sum, without the maximum that it is relative to."""
    found = softmax_merge.normalise(part)
    return found._replace(logsumexp=jnp.where(part.sum == 0, -jnp.inf, jnp.log(part.sum))[..., 0])


def _normalised(part: Part) -> Part:
    return part._replace(out=jnp.where(part.sum == 0, 0.0, part.out / jnp.where(part.sum == 0, 1.0, part.sum)))


def _turned_round(part: Part) -> Part:
    return part._replace(max=part.sum, sum=part.max)


def _logsumexp_for_sum(part: Part) -> Part:
    return part._replace(sum=softmax_merge.normalise(part).logsumexp[..., None])


def _rounded(part: Part) -> Part:
    return Part(*(x.astype(jnp.bfloat16).astype(jnp.float32) for x in part))


def _max_in_base_two(part: Part) -> Part:
    return part._replace(max=part.max * math.log2(math.e))


BUGS: tuple[PlantedBug, ...] = (
    _bug(
        "merge-without-maxima",
        kind="merge.no-m",
        reference="inferred from flash-attn#404 (partials relative to their own maximum)",
        shows=("out", "logsumexp"),
        merge=_weights_of_one,
    ),
    _bug(
        "merge-two-empty-parts",
        kind="merge.empty-empty",
        reference="flashinfer#4051",
        shows=("out", "logsumexp"),
        trigger=has("decode", "lengths"),
        merge=_minus_infinity_minus_itself,
    ),
    _bug(
        "merge-relative-to-the-first-part",
        kind="merge.pivot-overflow",
        reference="inferred from fla PR 831 (no rebasing to the larger maximum)",
        shows=("out", "logsumexp", "max"),
        merge=_relative_to_the_first,
    ),
    _bug(
        "merge-empty-part-in-the-maximum",
        kind="merge.empty-max",
        reference="inferred from tokamax 657b71a",
        shows=("out", "logsumexp", "max"),
        trigger=has("decode", "lengths"),
        merge=_top_of_zero,
    ),
    _bug(
        "merge-sum-not-rescaled",
        kind="merge.one-sided",
        reference="inferred from flash-attn#404",
        shows=("out", "logsumexp"),
        merge=_sum_not_rescaled,
    ),
    _bug(
        "merge-rescaled-twice",
        kind="merge.double-conversion",
        reference="meta-pytorch/attention-gym PR 207",
        shows=("out", "logsumexp"),
        merge=_rescaled_twice,
    ),
    _bug(
        "merge-last-part-dropped",
        kind="merge.count",
        reference="inferred from tokamax f896356",
        shows=("out", "logsumexp"),
        merge=_last_part_dropped,
    ),
    _bug(
        "merge-rows-of-the-first-sequence",
        kind="splitkv.batch-stride0",
        reference="vllm-project/flash-attention PR 176",
        shows=("out",),
        trigger=lambda case: case.phase == "decode" and case.batch > 1,
        merge=_rows_of_the_first_sequence,
    ),
    _bug(
        "merge-statistics-of-another-head",
        kind="splitkv.gqa-sink-stats",
        reference="vllm-xpu-kernels PR 556",
        shows=("out", "logsumexp"),
        trigger=has("decode", "gqa"),
        merge=_statistics_turned,
    ),
    _bug(
        "merge-parts-in-bf16",
        kind="splitkv.partial-dtype",
        reference="flash-attn PR 2336",
        shows=("out",),
        trigger=has("decode", "f32"),
        store=_in_bf16,
    ),
    _bug(
        "merge-maxima-in-base-two",
        kind="lse.base2-into-merge",
        reference="sglang#40903",
        shows=("out", "logsumexp"),
        part=_base_two,
    ),
    _bug(
        "merge-sink-in-every-split",
        kind="sink.splitkv-count",
        reference="rocm-libraries PR 12229",
        shows=("out", "logsumexp"),
        trigger=_SINKS,
        add_sinks=_in_every_split,
    ),
    _bug(
        "merge-sink-in-a-split-that-may-be-empty",
        kind="sink.splitkv-count",
        reference="rocm-libraries PR 12229",
        shows=("out", "logsumexp"),
        trigger=_SINKS,
        add_sinks=_in_the_first_split_if_it_has_keys,
    ),
    _bug(
        "merge-sink-forgotten",
        kind="sink.s1-vs-sn",
        reference="mlx#3452",
        shows=("out", "logsumexp"),
        trigger=_SINKS,
        add_sinks=_never,
    ),
    _bug(
        "merge-sink-in-the-maximum-only",
        kind="sink.max-only",
        reference="inferred from rocm-libraries PR 11189",
        shows=("out", "logsumexp"),
        trigger=_SINKS,
        add_sinks=_in_the_maximum_only,
    ),
    _bug(
        "merge-sink-not-rebased",
        kind="sink.pivot-overflow",
        reference="fla PR 831",
        shows=("out", "logsumexp", "max"),
        trigger=_SINKS,
        add_sinks=_not_rebased,
    ),
    _bug(
        "merge-sink-only-with-keys",
        kind="sink.empty-kv-lse",
        reference="flash-attn PR 2706",
        shows=("logsumexp",),
        trigger=has("decode", "lengths", "sinks"),
        add_sinks=_only_with_keys,
    ),
    _bug(
        "merge-sink-of-the-groups-first-head",
        kind="sink.packgqa-row",
        reference="sgl-project/sgl-kernel-xpu PR 254",
        shows=("out", "logsumexp"),
        trigger=has("decode", "gqa", "sinks"),
        sinks=_sinks_of_the_first_head,
    ),
    _bug(
        "parts-logsumexp-without-the-maximum",
        kind="lse.local-max",
        reference="flash-attn#404",
        shows=("logsumexp",),
        normalise=_local,
    ),
    _bug(
        "parts-normalised",
        kind="decode.unnormalised",
        reference="maxtext 211ec5efe",
        shows=("out",),
        returned=_normalised,
    ),
    _bug(
        "parts-max-and-sum-exchanged",
        kind="residual.unpack",
        reference="jax 4931774548 (decode_attention gqa)",
        shows=("out", "logsumexp", "max"),
        returned=_turned_round,
    ),
    _bug(
        "parts-logsumexp-for-the-sum",
        kind="l-vs-lse",
        reference="inferred from jax 4931774548 (residuals of decode_attention)",
        shows=("out", "logsumexp"),
        returned=_logsumexp_for_sum,
    ),
    _bug(
        "parts-returned-in-bf16",
        kind="residual.dtype",
        reference="jax 178e622ef1",
        shows=("out", "logsumexp", "max"),
        returned=_rounded,
    ),
    _bug(
        "parts-maximum-in-base-two",
        kind="lse.log2-returned",
        reference="pytorch#181645",
        shows=("logsumexp", "max"),
        returned=_max_in_base_two,
    ),
)
