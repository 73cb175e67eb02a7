"""Bugs of kernels whose functions capture arrays: what becomes of the arrays, and of their gradients.

Those of the first half are steps of `tests.planted.planting.flex`, whose backward pass is written by hand. Those of the
second half change what a dense kernel that JAX differentiates gets.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from cases.case import Case
from cases.score_functions import CAPTURED
from conformance.execution.plain_functions import build_implementation
from conformance.mutation.kernels.triggers import Trigger, both, has
from impls.contract.declarations import declare
from impls.contract.implementation import Implementation
from tests.bank import PlantedBug
from tests.planted.planting import flex
from tests.planted.planting.flex import BLOCK, FlexSteps, Leaves

_FORWARD = "out logsumexp max_logits"
_LEAF = "dscore_table"


def _captures(case: Case) -> bool:
    return case.score in CAPTURED


def _trains(case: Case) -> bool:
    return _captures(case) and case.phase == "train"


def _bent(case: Case) -> bool:
    return case.score == "score-caps" or (_captures(case) and case.soft_cap is not None)


def _bug(
    name: str, build: Callable[[str], Implementation], *, kind: str, reference: str, shows: str, trigger: Trigger
) -> PlantedBug:
    return PlantedBug(
        name=f"captured-{name}",
        family="functions",
        kind=f"captures.{kind}",
        reference=reference,
        shows=tuple(shows.split()),
        build=functools.partial(build, f"captured-{name}"),
        trigger=trigger,
    )


def _by_hand(
    name: str,
    steps: FlexSteps,
    *,
    kind: str,
    reference: str = "inferred",
    shows: str = _LEAF,
    trigger: Trigger = _trains,
) -> PlantedBug:
    def build(name: str) -> Implementation:
        return flex.implementation(name, steps, captures=True)

    return _bug(name, build, kind=kind, reference=reference, shows=shows, trigger=trigger)


def _map_score(change: Callable[[Any], Any], *, backward_only: bool = False) -> Callable[..., Leaves]:
    def read(leaves: Leaves, in_backward: bool) -> Leaves:
        if backward_only and not in_backward:
            return leaves
        return leaves._replace(score=jax.tree.map(change, leaves.score))

    return read


def _nothing(pull_back: Any, dz: Any, dx: Any, start: Any) -> Any:
    return jax.tree.map(jnp.zeros_like, pull_back(dz))


def _of_first_row(pull_back: Any, dz: Any, dx: Any, start: Any) -> Any:
    return pull_back(dz.at[1:].set(0))


def _of_even_heads(pull_back: Any, dz: Any, dx: Any, start: Any) -> Any:
    return jax.tree.map(lambda d: d.at[..., 1::2].set(0) if d.shape[-1] > 1 else d, pull_back(dz))


def _in_sixteen_bits(total: Any, found: Any, start: Any) -> Any:
    return (total + found).astype(jnp.bfloat16).astype(jnp.float32)


# A dense kernel that JAX differentiates.


@dataclasses.dataclass(frozen=True)
class _Change:
    """Changes of the functions before they are called."""

    score: Callable[[Any], Any] = lambda score: score
    mask: Callable[[Any], Any] = lambda mask: mask


def _build_dense(change: _Change, name: str) -> Implementation:
    @declare(behind_mask="finite", empty_rows="zero", captures=True)
    def attention(q: Any, k: Any, v: Any, *, mask_mod: Any = None, score_mod: Any = None) -> Any:
        """Attention with all logits at once."""
        k, v = (jnp.repeat(x.astype(jnp.float32), q.shape[2] // k.shape[2], axis=2) for x in (k, v))
        x = jnp.einsum("btnh,bsnh->bnts", q, k, precision="highest", preferred_element_type=jnp.float32)
        x = x * q.shape[-1] ** -0.5
        b, n, i, j = jnp.ogrid[: x.shape[0], : x.shape[1], : x.shape[2], : x.shape[3]]
        seen = jnp.bool_(True) if mask_mod is None else change.mask(mask_mod)(b, n, i, j)
        if score_mod is not None:
            x = change.score(score_mod)(jnp.where(seen, x, 0), b, n, i, j)
        x = jnp.where(seen, x, -1e30)
        weights = jnp.where(seen, jnp.exp(x - jax.lax.stop_gradient(x.max(axis=-1, keepdims=True))), 0)
        total = weights.sum(axis=-1, keepdims=True)
        p = (weights / jnp.where(total == 0, 1, total)).astype(q.dtype)
        return jnp.einsum("bnts,bsnv->btnv", p.astype(jnp.float32), v, precision="highest").astype(q.dtype)

    return build_implementation(attention, name)


def _dense(
    name: str,
    change: _Change,
    *,
    kind: str,
    reference: str = "inferred",
    shows: str = "out",
    trigger: Trigger = _captures,
) -> PlantedBug:
    build = functools.partial(_build_dense, change)
    return _bug(name, build, kind=kind, reference=reference, shows=shows, trigger=trigger)


def _map_leaves(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return functools.partial(jax.tree.map, change)


def _reverse_leaves(function: Any) -> Any:
    leaves, structure = jax.tree.flatten(function)
    is_fitting = len({(x.shape, x.dtype) for x in leaves}) == 1
    return jax.tree.unflatten(structure, leaves[::-1] if is_fitting else leaves)


def _remember(seen: dict[Any, Any]) -> Callable[[Any], Any]:
    """Keep a function by its structure, as a cache of compiled programs does that takes its arrays for constants."""

    def change(function: Any) -> Any:
        leaves, structure = jax.tree.flatten(function)
        if not leaves or any(isinstance(x, jax.core.Tracer) for x in leaves):
            return function
        return seen.setdefault((structure, *(x.shape for x in leaves)), function)

    return change


def _move_rows(mask: Any) -> Any:
    return lambda b, n, i, j: mask(jnp.zeros_like(b), n, i, j)


BUGS: tuple[PlantedBug, ...] = (
    _by_hand(
        "gradient-missing",
        FlexSteps(pull_leaves=_nothing),
        kind="no-gradient",
        reference="attention-gym issue 20 (a captured bias has no gradient)",
    ),
    _by_hand(
        "gradient-of-the-unchanged-logit",
        FlexSteps(pull_leaves=lambda pull_back, dz, dx, start: pull_back(dx)),
        kind="chain-rule",
        trigger=both(_trains, _bent),
    ),
    _by_hand(
        "gradient-of-the-last-block",
        FlexSteps(add_leaves=lambda total, found, start: found),
        kind="partial-sum",
        reference="inferred from pytorch issue 145208 (gradients of captured buffers that several blocks add to)",
        trigger=both(_trains, lambda case: case.q_length > BLOCK),
    ),
    _by_hand(
        "gradient-without-the-first-block",
        FlexSteps(add_leaves=lambda total, found, start: jnp.where(start == 0, total, total + found)),
        kind="partial-sum",
    ),
    _by_hand(
        "gradient-of-the-first-batch-row",
        FlexSteps(pull_leaves=_of_first_row),
        kind="batch-row",
        trigger=both(_trains, lambda case: case.batch > 1),
    ),
    _by_hand(
        "gradient-of-every-second-head",
        FlexSteps(pull_leaves=_of_even_heads),
        kind="heads",
        trigger=both(_trains, lambda case: case.num_q_heads > 1),
    ),
    _by_hand("gradient-summed-in-16-bits", FlexSteps(add_leaves=_in_sixteen_bits), kind="precision"),
    _by_hand(
        "gradient-of-the-magnitude",
        FlexSteps(pull_leaves=lambda pull_back, dz, dx, start: pull_back(jnp.abs(dz))),
        kind="sign",
    ),
    _by_hand(
        "array-of-another-precision-in-backward",
        FlexSteps(
            read_leaves=_map_score(lambda x: x.astype(jnp.bfloat16).astype(x.dtype), backward_only=True),
        ),
        kind="backward",
        shows="dq dk dv dscore_table",
    ),
    _by_hand(
        "other-array-in-backward",
        FlexSteps(read_leaves=_map_score(lambda x: x * 0.5 + 0.5, backward_only=True)),
        kind="backward",
        shows="dq dk dv dscore_table",
    ),
    _by_hand(
        "array-of-the-first-head",
        FlexSteps(read_leaves=_map_score(lambda x: jnp.broadcast_to(x[..., :1], x.shape))),
        kind="heads",
        shows=_FORWARD,
        trigger=both(_captures, lambda case: case.num_q_heads > 1),
    ),
    _dense(
        "array-without-gradient",
        _Change(score=_map_leaves(jax.lax.stop_gradient)),
        kind="no-gradient",
        reference="attention-gym issue 20 (a captured bias has no gradient)",
        shows=_LEAF,
        trigger=_trains,
    ),
    _dense(
        "array-in-16-bits",
        _Change(score=_map_leaves(lambda x: x.astype(jnp.bfloat16).astype(x.dtype))),
        kind="precision",
        reference="inferred from pytorch PR 123902 (scores in the dtype of the operands)",
    ),
    _dense(
        "array-of-the-even-head",
        _Change(score=lambda score: lambda x, b, n, i, j: score(x, b, n // 2 * 2, i, j)),
        kind="heads",
        trigger=both(_captures, lambda case: case.num_q_heads > 1),
    ),
    _dense(
        "array-of-the-first-call",
        _Change(score=_remember({})),
        kind="stale",
        reference="inferred from pytorch issue 174251 (a compiled program that keeps a captured tensor)",
    ),
    _dense(
        "ids-of-queries-and-keys-swapped",
        _Change(mask=_reverse_leaves),
        kind="order-of-leaves",
        trigger=lambda case: case.segments is not None and case.q_length == case.kv_length,
    ),
    _dense(
        "ids-of-the-first-batch-row",
        _Change(mask=_move_rows),
        kind="batch-row",
        trigger=both(has("segment_ids"), lambda case: case.batch > 1),
    ),
    _dense(
        "booleans-of-the-first-call",
        _Change(mask=_remember({})),
        kind="stale",
        trigger=lambda case: case.mask.startswith("dense"),
    ),
)
