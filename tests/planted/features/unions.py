"""Bugs of a window beside lists of keys, and of masks that differ by head beside lists.

The kernels and their steps are those of `tests.planted.planting.unions`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from cases.case import Case
from conformance.mutation.kernels.triggers import Trigger, both, has
from impls.contract.implementation import Implementation
from tests.bank import PlantedBug
from tests.planted.planting.unions import Array, JoinSteps, MergeSteps, Window, joined, merged, paged

_BESIDE = has("indices", "local_window")
_TRAINED = has("indices", "local_window", "train")
_SUNK = has("indices", "local_window", "sinks")
_PAGED = has("indices", "local_window", "paged")
_BY_HEAD = has("indices", "dense_head")


def _bug(
    name: str,
    steps: Any,
    *,
    build: Callable[[str, Any], Implementation],
    kind: str = "union",
    reference: str = "inferred",
    shows: str = "out",
    trigger: Trigger = _BESIDE,
) -> PlantedBug:
    return PlantedBug(
        name=f"beside-lists-{name}",
        family="masks",
        kind=f"lists.{kind}",
        reference=reference,
        shows=tuple(shows.split()),
        build=functools.partial(build, f"beside-lists-{name}", steps),
        trigger=trigger,
    )


_joined = functools.partial(_bug, build=joined)
_merged = functools.partial(_bug, build=merged)
_paged = functools.partial(_bug, build=paged, trigger=_PAGED)


def _is_decode(case: Case) -> bool:
    return _BESIDE(case) and case.q_length != case.kv_length


def _is_wide(case: Case) -> bool:
    return _BESIDE(case) and "window-l0-" not in case.mask


def _nowhere(lists: Array, position: Array, window: Window) -> Array:
    return jnp.full(lists.shape, False)


def _drop_one_key_more(lists: Array, position: Array, window: Window) -> Array:
    """Leave a listed key out that stands one before the window."""
    return (lists >= position - window[0] - 1) & (lists <= position + window[1])


def _start_one_later(position: Array, window: Window) -> Array:
    return position + jnp.arange(1 - window[0], window[1] + 1)


def _stop_before_own(position: Array, window: Window) -> Array:
    return position + jnp.arange(-window[0], 0)


def _clip_to_first(position: Array, window: Window) -> Array:
    return jnp.maximum(position + jnp.arange(-window[0], window[1] + 1), 0)


def _wrap(places: Array) -> Array:
    """Take an entry of -1 for a key; which it is, `jnp.clip` says: the first."""
    return places >= -1


def _only_if_empty(lists: Array, near: Array) -> Array:
    """Use the window only where the list names no key."""
    is_empty = (lists < 0).all(axis=-1, keepdims=True)
    return jnp.concatenate([lists, jnp.where(is_empty, near, -1)], axis=-1)


def _stop_near(x: Array, count: int) -> Array:
    return jnp.concatenate([x[:, :, :count], jax.lax.stop_gradient(x[:, :, count:])], axis=2)


def _wrap_marks(lists: Array, kv_length: int) -> Array:
    b, t = jnp.ogrid[: lists.shape[0], : lists.shape[1]]
    return jnp.zeros((*lists.shape[:2], kv_length), bool).at[b[..., None], t[..., None], lists].set(True)


def _add_without_weights(parts: list[tuple[Array, Array]], sinks: Array | None) -> Array:
    """Average the parts, each with its own sink."""
    outs = [out if sinks is None else out / (1 + jnp.exp(sinks - lse))[..., None] for out, lse in parts]
    return jnp.stack(outs).mean(axis=0)


def _weigh_by_first(parts: list[tuple[Array, Array]], sinks: Array | None) -> Array:
    """Weigh every part by the `logsumexp` of the listed keys."""
    lse = parts[0][1]
    share = 1 if sinks is None else 1 / (1 + jnp.exp(sinks - lse))[..., None] if len(parts) == 1 else 1
    return jnp.stack([out for out, _ in parts]).mean(axis=0) * share


def _drop_sinks(parts: list[tuple[Array, Array]], sinks: Array | None) -> Array:
    return MergeSteps().merge(parts, None if len(parts) > 1 else sinks)


def _divide_by_zero(parts: list[tuple[Array, Array]], sinks: Array | None) -> Array:
    """Merge with -inf for the `logsumexp` of an empty part, and without care for it."""
    return MergeSteps().merge([(out, jnp.where(lse <= -1e30, jnp.nan, lse)) for out, lse in parts], sinks)


BUGS: tuple[PlantedBug, ...] = (
    _joined("key-in-both-counted-twice", JoinSteps(is_within=_nowhere)),
    _joined("one-listed-key-too-many-left-out", JoinSteps(is_within=_drop_one_key_more)),
    _joined("window-starts-one-later", JoinSteps(list_near=_start_one_later)),
    _joined("own-key-not-in-the-window", JoinSteps(list_near=_stop_before_own)),
    _joined("window-before-the-first-key-is-key-0", JoinSteps(list_near=_clip_to_first), trigger=_is_wide),
    _joined("minus-one-is-key-0", JoinSteps(is_named=_wrap), kind="padding"),
    _joined("window-only-for-empty-lists", JoinSteps(join=_only_if_empty)),
    _joined("window-left-out", JoinSteps(join=lambda lists, near: lists)),
    _joined(
        "window-from-the-first-query",
        JoinSteps(find_position=lambda t, q_length, kv_length: t),
        trigger=_is_decode,
    ),
    _joined("no-gradient-of-the-window", JoinSteps(pull=_stop_near), shows="dk dv", trigger=_TRAINED),
    _joined("mask-of-head-0", JoinSteps(select_head=lambda mask, n: mask[:, 0]), kind="heads", trigger=_BY_HEAD),
    _joined(
        "mask-of-the-key-head",
        JoinSteps(select_head=lambda mask, n: mask[:, n // 2 % mask.shape[1]]),
        kind="heads",
        trigger=_BY_HEAD,
    ),
    _merged("key-in-both-parts", MergeSteps(leave_out=lambda marked, near: marked)),
    _merged(
        "parts-each-with-a-sink",
        MergeSteps(sink_of_part=lambda sinks: sinks, merge=lambda parts, sinks: MergeSteps().merge(parts, None)),
        kind="sinks",
        trigger=_SUNK,
    ),
    _merged("sink-lost-in-the-merge", MergeSteps(merge=_drop_sinks), kind="sinks", trigger=_SUNK),
    _merged("parts-averaged", MergeSteps(merge=_add_without_weights)),
    _merged(
        "logsumexp-of-the-window-not-used",
        MergeSteps(merge=_weigh_by_first),
        trigger=lambda case: _BESIDE(case) and not _SUNK(case),
    ),
    _merged("empty-part-spoils-the-other", MergeSteps(merge=_divide_by_zero), kind="empty"),
    _merged(
        "window-one-key-short",
        MergeSteps(is_near=lambda i, j, window: (j > i - window[0]) & (j <= i + window[1])),
    ),
    _merged("minus-one-marks-the-last-key", MergeSteps(mark=_wrap_marks), kind="padding"),
    _merged(
        "mask-not-held-by-the-window",
        MergeSteps(mask_near=lambda near, mask: near[None, None] & jnp.ones_like(mask)),
        trigger=both(_BESIDE, has("lengths")),
    ),
    _paged("key-in-both-counted-twice-in-pages", JoinSteps(is_within=_nowhere)),
    _paged("window-starts-one-later-in-pages", JoinSteps(list_near=_start_one_later)),
    _paged(
        "window-of-the-last-token",
        JoinSteps(find_position=lambda back, q_length, kv_length: kv_length - 1),
        trigger=lambda case: _PAGED(case) and case.q_length > 1,
    ),
)
