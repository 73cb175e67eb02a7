"""Bugs in context parallelism: who masks with what, what travels, how parts are merged and put back in order."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cases.case import Case
from conformance.mutation.kernels.triggers import Trigger, both, empty_rows, has, trains
from tests.bank import PlantedBug
from tests.planted.planting import ring_steps
from tests.planted.planting.ring_steps import Part, RingSteps, Shard, by_row, of_sinks
from tests.planted.planting.wrapped import Arrays, Statics, planted


def _anywhere(case: Case) -> bool:
    return True


def _bug(
    name: str, *, kind: str, reference: str, shows: tuple[str, ...], trigger: Trigger = _anywhere, **replaced: Any
) -> PlantedBug:
    steps = ring_steps.kernel(RingSteps(**replaced))
    return planted(
        name,
        steps,
        family="context parallelism",
        kind=kind,
        reference=reference,
        shows=shows,
        trigger=trigger,
        empty_rows="zero",
    )


def _own_columns(shard: Shard) -> Shard:
    """Every step masks as the first one does, whose keys are the device's own."""
    size = shard.columns.size
    own = np.concatenate([shard.rows, np.zeros(max(0, size - shard.rows.size), int)])[:size]
    return shard._replace(columns=own)


def _rows_in_sequence(shard: Shard) -> Shard:
    start = 0 if shard.rank == 0 else shard.rows.max() + 1 - shard.rows.size
    return shard._replace(rows=np.clip(np.arange(shard.rows.size) + start, 0, None))


def _columns_in_sequence(shard: Shard) -> Shard:
    start = shard.source * shard.columns.size
    top = max(shard.columns.max(initial=0), shard.columns.size - 1)
    return shard._replace(columns=np.minimum(np.arange(shard.columns.size) + start, top))


def _full_becomes_causal(allowed: Any, arrays: Arrays, statics: Statics) -> Any:
    masked = statics["causal"] or statics["window"] is not None or "mask" in arrays
    t, s = arrays["q"].shape[1], arrays["k"].shape[1]
    return allowed if masked or t != s else jnp.tril(jnp.ones((1, 1, t, s), bool))


def _mask_of_first_batch_row(pairs: Any, shard: Shard) -> Any:
    return pairs[:1] if shard.rank else pairs


def _skipped_by_first_row(pairs: Any, shard: Shard) -> Any:
    return pairs & pairs[:, :, :1].any(axis=-1, keepdims=True)


def _skipped_by_last_corner(pairs: Any, shard: Shard) -> Any:
    """A step is computed if its last query may attend to its first key."""
    return pairs & pairs[:, :, -1:, :1]


def _own_ids(kv_ids: Any, shard: Shard) -> Any:
    size = shard.columns.size
    own = np.concatenate([shard.rows, np.zeros(max(0, size - shard.rows.size), int)])[:size]
    return kv_ids[:, np.minimum(own, kv_ids.shape[1] - 1)]


def _no_gradient_from_others(moving: Any, shard: Shard) -> Any:
    return moving if shard.rank == shard.source else jax.lax.stop_gradient(moving)


def _as_wide_as_keys(part: Part, pairs: Any, v: Any, *, depth: int = 48) -> Part:
    """The accumulator is as wide as a narrow key."""
    out = part.out
    return part._replace(out=jnp.where(jnp.arange(out.shape[3]) < depth, out, 0.0)) if out.shape[3] > depth else part


def _empty_counts_as_mean(part: Part, pairs: Any, v: Any) -> Part:
    """A step that sees nothing averages its values and weighs as many keys with a logit of zero."""
    empty = part.logsumexp == -jnp.inf
    mean = jnp.repeat(v.mean(axis=1, keepdims=True), part.out.shape[2] // v.shape[2], axis=2)
    keys = jnp.log(jnp.float32(max(1, v.shape[1])))
    return part._replace(out=jnp.where(by_row(empty), mean, part.out), logsumexp=jnp.where(empty, keys, part.logsumexp))


def _in_bf16(part: Part, pairs: Any, v: Any) -> Part:
    return part._replace(out=jax.lax.reduce_precision(part.out, 8, 7))


def _logsumexp_in_bf16(part: Part, pairs: Any, v: Any) -> Part:
    return part._replace(logsumexp=jax.lax.reduce_precision(part.logsumexp, 8, 7))


def _sink_in_every_part(parts: list[Part], sinks: Any) -> list[Part]:
    return [ring_steps.merge([part, of_sinks(sinks, part)]) for part in parts]


def _sink_with_first_keys(parts: list[Part], sinks: Any) -> list[Part]:
    """The sink joins the first step, and is lost where that sees no key."""
    sink = of_sinks(sinks, parts[0])
    lost = parts[0].logsumexp == -jnp.inf
    return [*parts, sink._replace(logsumexp=jnp.where(lost, -jnp.inf, sink.logsumexp))]


def _without_shift(parts: list[Part]) -> Part:
    found = ring_steps.merge(parts)
    total = sum(jnp.exp(part.logsumexp) for part in parts)
    out = sum(by_row(jnp.exp(part.logsumexp)) * part.out for part in parts) / by_row(jnp.where(total == 0, 1.0, total))
    return found._replace(out=out, logsumexp=jnp.log(total))


def _half_stale(parts: list[Part]) -> Part:
    """The second half of the rows keeps the logsumexp of the first step."""
    found = ring_steps.merge(parts)
    rows = jnp.arange(found.logsumexp.shape[2])
    stale = jnp.where(rows < (rows.size + 1) // 2, found.logsumexp, parts[0].logsumexp)
    return found._replace(logsumexp=stale)


def _local_softmax_in_backward(parts: list[Part]) -> Part:
    """The backward pass takes each step's own logsumexp: every part gets the whole cotangent."""
    found = ring_steps.merge(parts)
    unweighted = sum(part.out for part in parts)
    return found._replace(out=unweighted + jax.lax.stop_gradient(found.out - unweighted))


def _mean_of_parts(parts: list[Part]) -> Part:
    """Steps weigh the same, whatever their logsumexp."""
    found = ring_steps.merge(parts)
    return found._replace(out=jnp.mean(jnp.stack([part.out for part in parts]), axis=0))


def _max_of_last(parts: list[Part]) -> Part:
    return ring_steps.merge(parts)._replace(max_logits=parts[1].max_logits)


def _fewer_chunks(order: np.ndarray) -> np.ndarray:
    """Put back as if there were as many chunks as devices."""
    return np.concatenate(np.array_split(np.arange(order.size), ring_steps.DEVICES))


_windowed = has("window")
BUGS: tuple[PlantedBug, ...] = (
    _bug(
        "ring-mask-of-first-step",
        kind="ring.mask-shard",
        reference="tokamax 657b71a",
        shows=("out", "logsumexp"),
        trigger=has("causal"),
        shard_of_mask=_own_columns,
    ),
    _bug(
        "ring-step-without-keys-averages-values",
        kind="ring.empty-block",
        reference="tokamax 657b71a",
        shows=("out", "logsumexp"),
        trigger=has("causal"),
        part=_empty_counts_as_mean,
    ),
    _bug(
        "ring-step-skipped-by-its-first-query",
        kind="ring.empty-block",
        reference="inferred from tokamax 657b71a",
        shows=("out", "logsumexp"),
        trigger=has("causal"),
        cut_mask=_skipped_by_first_row,
    ),
    _bug(
        "ring-step-skipped-by-one-corner",
        kind="ring.empty-block",
        reference="inferred from tokamax 657b71a",
        shows=("out", "logsumexp"),
        trigger=_windowed,
        cut_mask=_skipped_by_last_corner,
    ),
    _bug(
        "ring-segment-ids-stay",
        kind="ring.segids-not-rotated",
        reference="tokamax 795b06e",
        shows=("out", "logsumexp"),
        trigger=has("segment_ids"),
        ids_of=_own_ids,
    ),
    _bug(
        "ring-accumulator-as-wide-as-a-narrow-key",
        kind="ring.hdv",
        reference="tokamax b41524a",
        shows=("out",),
        part=_as_wide_as_keys,
    ),
    _bug(
        "balanced-keys-masked-in-sequence",
        kind="cp.chunk-not-reordered",
        reference="maxtext 90b0395e1",
        shows=("out", "logsumexp"),
        trigger=has("chunked"),
        shard_of_mask=_columns_in_sequence,
    ),
    _bug(
        "balanced-queries-biased-in-sequence",
        kind="cp.local-not-reordered",
        reference="inferred from maxtext b4e047211",
        shows=("out", "logsumexp"),
        trigger=has("bias"),
        shard_of_bias=_rows_in_sequence,
    ),
    _bug(
        "balanced-full-becomes-causal",
        kind="cp.full-gets-causal",
        reference="maxtext b4e047211",
        shows=("out", "logsumexp"),
        trigger=has("full"),
        allowed=_full_becomes_causal,
    ),
    _bug(
        "balanced-order-of-too-few-chunks",
        kind="I.load-balance-pair",
        reference="inferred from maxtext b4e047211",
        shows=("out", "logsumexp"),
        collected=_fewer_chunks,
    ),
    _bug(
        "ring-later-devices-mask-by-first-batch-row",
        kind="I.batch0-mask",
        reference="inferred from fla issue 1115: an offset without the batch row on later ranks",
        shows=("out", "logsumexp"),
        trigger=has("dense_batch"),
        cut_mask=_mask_of_first_batch_row,
    ),
    _bug(
        "ring-merge-without-shift",
        kind="cp.lse-exp-overflow",
        reference="TransformerEngine PR 716; EasyContext issue 14",
        shows=("out", "logsumexp"),
        trigger=lambda case: case.distribution == "huge",
        merge=_without_shift,
    ),
    _bug(
        "ring-logsumexp-stale-in-half-the-rows",
        kind="cp.lse-not-inplace",
        reference="TransformerEngine PR 716",
        shows=("logsumexp",),
        merge=_half_stale,
    ),
    _bug(
        "ring-parts-in-bf16",
        kind="cp.bf16-partials",
        reference="ring-flash-attention issues 42 and 22",
        shows=("out",),
        trigger=lambda case: case.dtype == "f32",
        part=_in_bf16,
    ),
    _bug(
        "ring-logsumexp-of-parts-in-bf16",
        kind="residual.dtype",
        reference="inferred from jax 178e622ef1: a logsumexp in the operands' dtype",
        shows=("out", "logsumexp"),
        part=_logsumexp_in_bf16,
    ),
    _bug(
        "ring-backward-with-local-logsumexp",
        kind="ring.bwd-local-lse",
        reference="tt-metal PR 53216",
        shows=("dq", "dk", "dv"),
        trigger=trains(),
        merge=_local_softmax_in_backward,
    ),
    _bug(
        "ring-steps-weigh-the-same",
        kind="cp.wrong-merge",
        reference="inferred from tt-metal PR 53216",
        shows=("out",),
        merge=_mean_of_parts,
    ),
    _bug(
        "ring-key-gradients-of-own-step-only",
        kind="cp.wrong-grad",
        reference="TransformerEngine issue 1557",
        shows=("dk", "dv"),
        trigger=trains(),
        moving=_no_gradient_from_others,
    ),
    _bug(
        "ring-sink-in-every-step",
        kind="sink.splitkv-count",
        reference="rocm-libraries PR 12229",
        shows=("out", "logsumexp"),
        trigger=has("sinks"),
        add_sinks=_sink_in_every_part,
    ),
    _bug(
        "ring-sink-lost-with-an-empty-first-step",
        kind="sink.splitkv-count",
        reference="rocm-libraries PR 12229",
        shows=("out", "logsumexp"),
        trigger=both(has("sinks"), empty_rows),
        add_sinks=_sink_with_first_keys,
    ),
    _bug(
        "ring-max-logits-of-last-step",
        kind="qkclip.reduction",
        reference="inferred from tokamax 62aeeb2",
        shows=("max_logits",),
        merge=_max_of_last,
    ),
)
