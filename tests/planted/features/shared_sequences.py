"""Bugs of functions that run on the tokens of one device: what is exchanged, summed and counted once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from conformance.mutation.kernels.triggers import Trigger, both, has, trains
from tests.bank import PlantedBug
from tests.planted.planting import context_steps, ring_steps
from tests.planted.planting.context_steps import AXIS, enough_heads, exchanged, gathered, with_gradient
from tests.planted.planting.ring_steps import Part


def _bug(
    name: str,
    make: Callable[..., Any],
    *,
    kind: str,
    reference: str,
    shows: tuple[str, ...],
    trigger: Trigger,
    **replaced: Any,
) -> PlantedBug:
    return PlantedBug(
        name=name,
        family="context parallelism",
        kind=kind,
        reference=reference,
        shows=shows,
        trigger=trigger,
        build=functools.partial(context_steps.implementation, name, make, **replaced),
    )


def _first_replica_only(x: Any, replicas: int) -> Any:
    """Other replicas of a key head give no gradient."""
    others = jnp.broadcast_to(lax.stop_gradient(x)[:, :, :, None], (*x.shape[:3], replicas - 1, x.shape[3]))
    return jnp.concatenate([x[:, :, :, None], others], axis=3).reshape(*x.shape[:2], -1, x.shape[3])


def _summed_twice(x: Any, replicas: int) -> Any:
    """The gradient of replicas is summed by hand, and once more by the derivative of the repeat."""
    group = with_gradient(
        lambda dx: jnp.repeat(dx.reshape(*dx.shape[:2], -1, replicas, dx.shape[3]).sum(axis=3), replicas, axis=2)
    )
    return group(jnp.repeat(x, replicas, axis=2))


def _tiled(x: Any, replicas: int) -> Any:
    """Replicas follow one another as whole sets of heads: a device gets the keys of another group."""
    return jnp.tile(x, (1, 1, replicas, 1))


def _heads_dealt_in_turn(x: Any) -> Any:
    """A device gets every nth head, and returns its results as if they were neighbours."""
    devices = lax.axis_size(AXIS)
    each = x.shape[2] // devices
    return context_steps.to_heads(x.reshape(*x.shape[:2], each, devices, -1).swapaxes(2, 3).reshape(x.shape))


def _local_distance(distance: Any, rank: Any, source: int) -> Any:
    """The window is measured on the indices of a device."""
    t, s = distance.shape
    return jnp.arange(t)[:, None] - jnp.arange(s)


def _positions_of_next(rank: Any, length: int) -> Any:
    return context_steps.contiguous((rank + 1) % lax.axis_size(AXIS), length)


def _one_later(rank: Any, length: int) -> Any:
    return context_steps.striped(rank, length) + 1


def _own_ids(ids: Any) -> Any:
    return jnp.broadcast_to(ids, (lax.axis_size(AXIS), *ids.shape))


def _max_of_first_part(parts: list[Part]) -> Part:
    """Weights are relative to the largest maximum, and the logsumexp adds back that of the first part."""
    found = ring_steps.merge(parts)
    top, first = found.max_logits, parts[0].max_logits
    return found._replace(logsumexp=found.logsumexp - jnp.where(first == -jnp.inf, 0.0, top - first))


def _weighed_by_max(parts: list[Part]) -> Part:
    """Parts are weighed by their maxima in place of their logsumexps."""
    found = ring_steps.merge(parts)
    weighed = [part._replace(logsumexp=part.max_logits) for part in parts]
    return found._replace(out=ring_steps.merge(weighed).out)


def _sinks_of_every_part(parts: list[Part], sinks: Any) -> list[Part]:
    return [ring_steps.merge([part, ring_steps.of_sinks(sinks, part)]) for part in parts]


_dv_as_mean = with_gradient(lambda dx: dx / lax.axis_size(AXIS))


@jax.custom_vjp
def _spread(sinks: Any, rank: Any) -> Any:
    return sinks + 0.0 * rank


_spread.defvjp(lambda sinks, rank: (_spread(sinks, rank), None), lambda _, dx: (lax.psum(dx, AXIS), 0.0 * dx.sum()))


def sum_gradient_by_hand(sinks: Any) -> Any:
    """The backward pass sums the gradient of sinks over devices, as it must with `check_vma=True` and only then."""
    return _spread(sinks, lax.axis_index(AXIS).astype(jnp.float32))


def _sink_gradient_of_own_rows(sinks: Any) -> Any:
    """Only the rows of the first device give the sinks a gradient."""
    return jnp.where(lax.axis_index(AXIS) == 0, sinks, jax.lax.stop_gradient(sinks))


_ulysses_trains = both(enough_heads, trains())
_few_key_heads = both(_ulysses_trains, lambda case: case.num_kv_heads < 4)
BUGS: tuple[PlantedBug, ...] = (
    _bug(
        "ulysses-gradient-of-first-replica-only",
        exchanged,
        kind="cp.replica-gradient",
        reference="inferred from maxtext ulysses: key heads repeated for the devices",
        shows=("dk", "dv"),
        trigger=_few_key_heads,
        replicate=_first_replica_only,
    ),
    _bug(
        "ulysses-replica-gradients-summed-twice",
        exchanged,
        kind="cp.replica-gradient",
        reference="inferred from maxtext ulysses: key heads repeated for the devices",
        shows=("dk", "dv"),
        trigger=_few_key_heads,
        replicate=_summed_twice,
    ),
    _bug(
        "ulysses-replicas-tiled",
        exchanged,
        kind="cp.head-order",
        reference="inferred from maxtext ulysses: key heads repeated for the devices",
        shows=("out", "logsumexp"),
        trigger=both(enough_heads, lambda case: 1 < case.num_kv_heads < 4),
        replicate=_tiled,
    ),
    _bug(
        "ulysses-heads-dealt-in-turn",
        exchanged,
        kind="cp.head-order",
        reference="inferred from maxtext 4476",
        shows=("out", "logsumexp"),
        trigger=enough_heads,
        to_heads=_heads_dealt_in_turn,
    ),
    _bug(
        "shared-window-on-local-positions",
        gathered,
        kind="cp.local-window",
        reference="inferred from TransformerEngine 3527",
        shows=("out", "logsumexp"),
        trigger=has("window"),
        distance=_local_distance,
    ),
    _bug(
        "shared-mask-of-next-device",
        gathered,
        kind="ring.mask-shard",
        reference="inferred from tokamax 657b71a",
        shows=("out", "logsumexp"),
        trigger=has("causal"),
        query_positions=_positions_of_next,
    ),
    _bug(
        "striped-positions-one-later",
        gathered,
        kind="cp.striped-position",
        reference="inferred from maxtext 0.2.5: striped order",
        shows=("out", "logsumexp"),
        trigger=has("causal"),
        order="striped",
        query_positions=_one_later,
        key_positions=context_steps.striped,
    ),
    _bug(
        "shared-segment-ids-not-gathered",
        gathered,
        kind="ring.segids-not-rotated",
        reference="tokamax 795b06e",
        shows=("out", "logsumexp"),
        trigger=has("segment_ids"),
        gather_ids=_own_ids,
    ),
    _bug(
        "shared-logsumexp-with-first-maximum",
        gathered,
        kind="cp.wrong-merge",
        reference="inferred from TransformerEngine PR 716",
        shows=("logsumexp",),
        trigger=trains(),
        merge=_max_of_first_part,
    ),
    _bug(
        "shared-parts-weighed-by-maxima",
        gathered,
        kind="cp.wrong-merge",
        reference="inferred from TransformerEngine PR 716",
        shows=("out",),
        trigger=trains(),
        merge=_weighed_by_max,
    ),
    _bug(
        "shared-soft-cap-after-merge",
        gathered,
        kind="cp.cap-after-merge",
        reference="inferred from maxtext flash attention, whose cap comes after the mask",
        shows=("out", "logsumexp"),
        trigger=has("soft_cap"),
        cap=(False, True),
    ),
    _bug(
        "shared-sinks-once-per-device",
        gathered,
        kind="sink.splitkv-count",
        reference="rocm-libraries PR 12229",
        shows=("out", "logsumexp"),
        trigger=has("sinks"),
        add_sinks=_sinks_of_every_part,
    ),
    _bug(
        "shared-sink-gradient-of-first-device",
        gathered,
        kind="cp.replica-gradient",
        reference="inferred from Megatron-LM 1464",
        shows=("dsinks",),
        trigger=both(has("sinks"), trains()),
        sinks=_sink_gradient_of_own_rows,
    ),
    _bug(
        "shared-dv-divided-by-devices",
        gathered,
        kind="cp.mean-gradient",
        reference="inferred from data-parallel means of gradients",
        shows=("dv",),
        trigger=trains(),
        values=_dv_as_mean,
    ),
    _bug(
        "shared-psum-in-backward-without-check-vma",
        gathered,
        kind="cp.double-psum",
        reference="inferred from jax shard_map: it sums the gradients of replicated operands itself",
        shows=("dsinks",),
        trigger=both(has("sinks"), trains()),
        sinks=sum_gradient_by_hand,
    ),
)
