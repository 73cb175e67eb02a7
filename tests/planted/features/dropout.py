"""Bugs of dropout: which weights are dropped, by which key, at which rate, with which factor, and in which pass.

Each is a step of one of the kernels of `tests.planted.planting.dropped`: the one that draws an array, or the one that
hashes counters and has a backward pass written by hand, reads a mask that it is given, or runs on several devices.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cases.case import Case
from tests.bank import PlantedBug
from tests.planted.planting.dropped import BLOCK, Dropout, Steps, build, build_on_devices, hash_pairs, mix

_CALLS = itertools.count(1)


def _drops(case: Case) -> bool:
    return case.dropout_rate is not None


def _plant(
    name: str,
    steps: Steps,
    *,
    kind: str,
    says: str,
    reference: str = "inferred",
    shows: str = "out",
    trigger: Callable[[Case], bool] = _drops,
    **declared: Any,
) -> PlantedBug:
    by_hand = steps.draw is None
    return PlantedBug(
        name=f"dropout-{name}",
        family="dropout",
        kind=f"dropout.{kind}",
        reference=reference,
        shows=tuple(shows.split()),
        build=functools.partial(build, f"dropout-{name}", steps, by_hand=by_hand, **declared),
        trigger=trigger,
        says=says,
    )


def _drops_in_several_rows(case: Case) -> bool:
    return _drops(case) and case.batch > 1


def _plant_on_devices(name: str, indices: Any, says: str, shows: str) -> PlantedBug:
    """Plant a bug of a kernel on several devices; the queries in the `Dropout` are those of one device."""
    bug = _plant(name, _by_counters(indices=indices), kind="devices", says=says, shows=shows)
    return dataclasses.replace(bug, build=functools.partial(build_on_devices, bug.name, _by_counters(indices=indices)))


def _by_counters(**steps: Any) -> Steps:
    return Steps(draw=None, **steps)


def _by_mask(read: Callable[[Dropout], Any] = lambda call: call.mask, **steps: Any) -> Steps:
    return _by_counters(read=read, **steps)


def _draw(call: Dropout, shape: tuple[int, ...], key: Any = None) -> Any:
    return jax.random.bernoulli(call.key if key is None else key, 1 - call.rate, shape)


def _draw_shared(axis: int, call: Dropout) -> Any:
    return _draw(call, tuple(1 if n == axis else size for n, size in enumerate(call.shape)))


def _draw_by_other_key_when(condition: Any, call: Dropout) -> Any:
    return _draw(call, call.shape, jax.random.fold_in(call.key, 1) if condition(call) else call.key)


def _draw_by_number_of_the_call(call: Dropout) -> Any:
    return _draw(call, call.shape, jax.random.fold_in(call.key, next(_CALLS)))


def _draw_by_queries(call: Dropout) -> Any:
    bits = jax.lax.bitcast_convert_type(call.q.astype(jnp.float32), jnp.uint32).sum(dtype=jnp.uint32)
    return _draw(call, call.shape, jax.random.fold_in(call.key, bits))


def _draw_in_dtype(call: Dropout) -> Any:
    return jax.random.bernoulli(call.key, jnp.asarray(1 - call.rate, call.q.dtype), call.shape)


def _draw_for_each_head(call: Dropout) -> Any:
    """Add the head's number to the second word of the key."""
    step = np.array([0, 1], np.uint32)
    heads = [_draw(call, (call.shape[0], 1, *call.shape[2:]), call.key + n * step) for n in range(call.shape[1])]
    return jnp.concatenate(heads, axis=1)


def _hash_late_key(b: Any, n: Any, i: Any, j: Any, call: Dropout) -> Any:
    """Hash a key of zeros in the first block of the backward pass, as if the key were not there yet."""
    early = dataclasses.replace(call, key=jnp.zeros_like(call.key))
    first = (i < BLOCK) & (j < BLOCK) & call.backward
    return jnp.where(first, hash_pairs(early, b, n, i, j), hash_pairs(call, b, n, i, j))


def _hash_linearly(b: Any, n: Any, i: Any, j: Any, call: Dropout) -> Any:
    start = mix(call.key[0] ^ (call.key[1] * np.uint32(0x9E3779B9)))
    rows = mix(start + jnp.asarray((b * 64 + n) * 4096 + i, jnp.uint32))
    return rows ^ mix(start + jnp.asarray(j, jnp.uint32))


def _compare_signed(word: Any, call: Dropout) -> Any:
    return jax.lax.bitcast_convert_type(word, jnp.int32) >= np.int32(round(call.rate * 2**31))


def _read_heads_first(call: Dropout) -> Any:
    """Read the mask `[B, N, T, S]` as one of shape `[N, B, T, S]`."""
    batch, heads, *places = call.shape
    return jnp.broadcast_to(call.mask, call.shape).reshape(heads, batch, *places).swapaxes(0, 1)


def _read_one_row_for_all(call: Dropout) -> Any:
    """Read the first batch row only if all heads share the mask."""
    return call.mask[:1] if call.mask.shape[1] == 1 else call.mask


def _read_rows_with_kept_pairs(call: Dropout) -> Any:
    """Read a row without a kept pair as one that keeps all."""
    return call.mask | ~call.mask.any(axis=-1, keepdims=True)


def _divide_by_share(p: Any, kept: Any, call: Dropout) -> Any:
    return jnp.where(kept, p / kept.mean(), 0)


def _blockwise(block: int, x: Any) -> Any:
    return x % block


BUGS: tuple[PlantedBug, ...] = (
    _plant(
        "factor-missing",
        Steps(weights=lambda p, kept, call: jnp.where(kept, p, 0)),
        kind="factor",
        says="Kept weights are not multiplied by 1 / (1 - rate).",
    ),
    _plant(
        "factor-twice",
        Steps(weights=lambda p, kept, call: jnp.where(kept, p / (1 - call.rate) ** 2, 0)),
        kind="factor",
        says="Kept weights are multiplied by 1 / (1 - rate) twice.",
    ),
    _plant(
        "factor-of-the-rate",
        Steps(weights=lambda p, kept, call: jnp.where(kept, p / call.rate, 0)),
        kind="factor",
        says="Kept weights are divided by the rate.",
    ),
    _plant(
        "factor-with-an-epsilon",
        Steps(weights=lambda p, kept, call: jnp.where(kept, p / (1 - call.rate + 1e-3), 0)),
        kind="factor",
        says="An epsilon is added to the divisor 1 - rate.",
    ),
    _plant(
        "renormalised",
        Steps(weights=lambda p, kept, call: jnp.where(kept, p, 0) / jnp.where(kept, p, 1e-9).sum(-1, keepdims=True)),
        kind="factor",
        says="Kept weights are divided by their sum.",
    ),
    _plant(
        "before-the-softmax",
        Steps(
            logits=lambda z, kept, call: jnp.where(kept, z, -1e30),
            weights=lambda p, kept, call: p,
        ),
        kind="place",
        says="Dropped logits are hidden before the softmax.",
    ),
    _plant(
        "of-logits",
        Steps(
            logits=lambda z, kept, call: jnp.where(kept, z / (1 - call.rate), 0),
            weights=lambda p, kept, call: p,
        ),
        kind="place",
        says="Logits are dropped in place of weights.",
    ),
    _plant(
        "of-the-output",
        Steps(
            weights=lambda p, kept, call: p,
            out=lambda out, kept, call: jnp.where(_draw(call, out.shape), out / (1 - call.rate), 0),
        ),
        kind="place",
        says="Elements of the output are dropped in place of weights.",
    ),
    _plant(
        "in-logsumexp",
        Steps(total=lambda total, weights, kept, call: jnp.where(kept, weights, 0).sum(-1, keepdims=True)),
        kind="residuals",
        says="The logsumexp is that of the kept weights.",
        shows="logsumexp",
    ),
    _plant(
        "rate-of-kept-weights",
        Steps(draw=lambda call: ~_draw(call, call.shape)),
        kind="rate",
        says="Weights are kept with the probability with which they should be dropped.",
        shows="kept",
    ),
    _plant(
        "rate-in-the-operands-dtype",
        Steps(draw=_draw_in_dtype),
        kind="rate",
        says="The uniform numbers have the dtype of the operands: in bf16 a rate of 0.001 drops 0.8 percent.",
        reference="`jax.random.bernoulli`, which draws in the dtype of its probability",
        shows="kept",
    ),
    _plant(
        "rate-in-eight-bits",
        _by_counters(keeps=lambda word, call: (word & np.uint32(0xFF)) >= np.uint32(int(call.rate * 256))),
        kind="rate",
        says="Eight random bits are compared with the rate.",
        reference="flash-attention, which compares eight bits (`p_dropout_in_uint8_t`)",
        shows="kept",
    ),
    _plant(
        "rate-compared-as-signed",
        _by_counters(keeps=_compare_signed),
        kind="rate",
        says="Random words are compared as signed integers.",
        shows="kept",
    ),
    _plant(
        "key-ignored",
        Steps(key=lambda key, call: jnp.zeros_like(key)),
        kind="key",
        says="The seed is a constant, so every step drops the same weights.",
        reference="flash-attention issues 1251 and 2088",
        shows="masks",
    ),
    _plant(
        "second-word-of-the-key-ignored",
        Steps(key=lambda key, call: key * np.array([1, 0], np.uint32)),
        kind="key",
        says="Only the first word of the key is read.",
        shows="masks",
    ),
    _plant(
        "first-word-of-the-key-ignored",
        _by_counters(key=lambda key, call: key * np.array([0, 1], np.uint32)),
        kind="key",
        says="Only the last word of the key is read.",
        shows="masks",
    ),
    _plant(
        "key-of-the-number-of-the-call",
        Steps(draw=_draw_by_number_of_the_call),
        kind="key",
        says="A counter of the process changes the key, so a call cannot be repeated.",
        shows="mask out",
    ),
    _plant(
        "key-of-the-head-added",
        Steps(draw=_draw_for_each_head),
        kind="key",
        says="The head is added to the key: head 1 of one key drops what head 0 of the next key drops.",
        shows="masks",
    ),
    _plant(
        "key-of-the-queries",
        Steps(draw=_draw_by_queries),
        kind="key",
        says="The values of the queries change the key.",
        shows="mask",
    ),
    _plant(
        "same-for-all-heads",
        Steps(draw=functools.partial(_draw_shared, 1)),
        kind="shared",
        says="All heads drop the same weights.",
        shows="masks",
    ),
    _plant(
        "same-for-all-batch-rows",
        Steps(draw=functools.partial(_draw_shared, 0)),
        kind="shared",
        says="All batch rows drop the same weights.",
        shows="masks",
    ),
    _plant(
        "same-for-all-queries",
        Steps(draw=functools.partial(_draw_shared, 2)),
        kind="shared",
        says="All queries drop the same keys.",
        shows="places kept",
    ),
    _plant(
        "same-for-all-keys",
        Steps(draw=functools.partial(_draw_shared, 3)),
        kind="shared",
        says="Whole rows are dropped.",
        shows="places kept",
    ),
    _plant(
        "same-for-a-group-of-heads",
        _by_counters(indices=lambda b, n, i, j, call: (b, n // call.group, i, j)),
        kind="shared",
        says="The head of keys and values is counted, so the query heads of a group drop the same weights.",
        shows="masks",
    ),
    _plant(
        "batch-row-not-counted",
        _by_counters(indices=lambda b, n, i, j, call: (b * 0, n, i, j)),
        kind="shared",
        says="The batch row is not counted.",
        reference="tt-metal issue 55947 (the same mask on all devices)",
        shows="masks",
    ),
    _plant(
        "places-within-a-block",
        _by_counters(indices=lambda b, n, i, j, call: (b, n, _blockwise(BLOCK, i), _blockwise(BLOCK, j))),
        kind="places",
        says="Places are counted from the start of a block, so all blocks drop alike.",
        shows="places corners",
    ),
    _plant(
        "places-added",
        _by_counters(indices=lambda b, n, i, j, call: (b, n, i + j, 0 * j)),
        kind="places",
        says="The indices of query and key are added, so diagonals drop alike.",
        shows="corners places",
    ),
    _plant(
        "places-multiplied-by-the-wrong-stride",
        _by_counters(indices=lambda b, n, i, j, call: (b, n, i * (call.shape[3] // 2) + j, 0 * j)),
        kind="places",
        says="The stride of a row is half of the number of keys.",
        shows="corners places kept",
    ),
    _plant(
        "row-and-column-mixed-apart",
        _by_counters(word=_hash_linearly),
        kind="places",
        says="A word of the row and a word of the column are joined by exclusive or, and not mixed again.",
        shows="corners places masks kept",
    ),
    _plant(
        "places-of-the-length",
        _by_counters(indices=lambda b, n, i, j, call: (b, n, i * call.shape[3] + j, 0 * j)),
        kind="places",
        says="The stride of a row is the length, which changes the mask, though it is promised not to.",
        shows="mask",
        dropout_mask="places",
    ),
    _plant(
        "other-mask-with-residuals",
        Steps(draw=functools.partial(_draw_by_other_key_when, lambda call: call.residuals)),
        kind="passes",
        says="The call that saves residuals drops other weights.",
    ),
    _plant(
        "other-mask-in-backward",
        _by_counters(indices=lambda b, n, i, j, call: (b, n, i, j + 1) if call.backward else (b, n, i, j)),
        kind="passes",
        says="The backward pass drops other weights than the forward pass.",
        shows="dq dk dv",
    ),
    _plant(
        "key-read-late-in-backward",
        _by_counters(word=_hash_late_key),
        kind="passes",
        says="The first block of the backward pass reads the seed before it is written.",
        reference="pytorch PRs 196586 and 197563",
        shows="dq dk dv",
    ),
    _plant(
        "queries-and-keys-exchanged-in-backward",
        _by_counters(indices=lambda b, n, i, j, call: (b, n, j, i) if call.backward else (b, n, i, j)),
        kind="passes",
        says="The backward pass exchanges the indices of query and key.",
        shows="dq dk dv",
    ),
    _plant(
        "lost-in-dv",
        _by_counters(in_dv=lambda p, kept, call: p),
        kind="gradients",
        says="dv is that of all weights.",
        shows="dv",
    ),
    _plant(
        "factor-lost-in-dv",
        _by_counters(in_dv=lambda p, kept, call: jnp.where(kept, p, 0)),
        kind="gradients",
        says="dv lacks the factor.",
        shows="dv",
    ),
    _plant(
        "lost-in-dq-and-dk",
        _by_counters(dp=lambda dp, kept, call: dp),
        kind="gradients",
        says="The gradient of the weights is that without dropout.",
        shows="dq dk",
    ),
    _plant(
        "factor-lost-in-dq-and-dk",
        _by_counters(dp=lambda dp, kept, call: jnp.where(kept, dp, 0)),
        kind="gradients",
        says="The gradient of the weights lacks the factor.",
        shows="dq dk",
    ),
    _plant(
        "row-sum-of-all-weights",
        _by_counters(d=lambda d, p, undropped, call: (p * undropped).sum(axis=-1, keepdims=True)),
        kind="gradients",
        says="D is summed over all weights, and not only over kept ones.",
        shows="dq dk",
    ),
    _plant(
        "lost-in-dbias",
        _by_counters(
            dx_of_bias=lambda dx, p, undropped, call: p * (undropped - (p * undropped).sum(-1, keepdims=True))
        ),
        kind="gradients",
        says="The gradient of the bias is that without dropout.",
        shows="dbias",
    ),
    _plant(
        "given-mask-lost-in-backward",
        _by_mask(lambda call: jnp.ones_like(call.mask) if call.backward else call.mask),
        kind="given",
        says="The backward pass does not get the mask, and keeps all weights.",
        shows="dq dk dv",
    ),
    _plant(
        "given-mask-inverted",
        _by_mask(lambda call: ~call.mask),
        kind="given",
        says="True is read as dropped.",
        shows="mask",
    ),
    _plant(
        "given-mask-heads-first",
        _by_mask(_read_heads_first),
        kind="given",
        says="The mask is read as if heads came before batch rows.",
        shows="mask",
        trigger=_drops_in_several_rows,
    ),
    _plant(
        "given-mask-shared-by-heads-read-for-one-row",
        _by_mask(_read_one_row_for_all),
        kind="given",
        says="If all heads share the mask, all batch rows get that of the first.",
        shows="mask",
        trigger=_drops_in_several_rows,
    ),
    _plant(
        "given-mask-of-a-dropped-row-ignored",
        _by_mask(_read_rows_with_kept_pairs),
        kind="given",
        says="A row whose weights are all dropped keeps them all.",
        shows="mask",
    ),
    _plant(
        "given-mask-factor-missing",
        _by_mask(weights=lambda p, kept, call: jnp.where(kept, p, 0)),
        kind="given",
        says="Kept weights are not multiplied by 1 / (1 - rate).",
    ),
    _plant(
        "given-mask-factor-of-the-share",
        _by_mask(weights=_divide_by_share),
        kind="given",
        says="Kept weights are divided by the share of the mask that is kept, in place of 1 - rate.",
    ),
    _plant_on_devices(
        "same-on-each-device",
        lambda b, n, i, j, call: (b, n, i % call.q.shape[1], j),
        says="Queries are counted from the first of their device, so all devices drop alike.",
        shows="places corners",
    ),
    _plant_on_devices(
        "by-device-and-local-query",
        lambda b, n, i, j, call: (b, n + 64 * (i // call.q.shape[1]), i % call.q.shape[1], j),
        says="The device's number and the query on it are hashed, so the mask depends on how long its part is.",
        shows="mask",
    ),
    _plant_on_devices(
        "by-number-of-devices",
        lambda b, n, i, j, call: (b, n, i * jax.lax.axis_size("context"), j),
        says="The number of devices changes the mask, though it is promised not to.",
        shows="mask",
    ),
)
