"""Bugs of the last place of a block, of long sequences, and of batch rows, heads and depths that few cases have."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from cases.case import Case
from conformance.mutation.kernels.triggers import both, has
from tests.bank import PlantedBug
from tests.planted.planting.wrapped import Arrays, Kernel, Statics, correct, planted

_bug = functools.partial(planted, family="borders")

_NARROW = 32
_BLOCK = 64
_WIDE = 128
_EIGHT = 8
_SIXTEEN = 16
# Places that f16 tells apart.
_LONG = 2048

Array = jax.Array


def _seen(arrays: Arrays, statics: Statics, seen: Array) -> Any:
    """The correct result under a mask that also hides the pairs `~seen`, `[T, S]` or `[B, 1, T, S]`."""
    allowed = seen if seen.ndim == 4 else seen[None, None]
    return correct({**arrays, "mask": arrays["mask"] & allowed if "mask" in arrays else allowed}, statics)


def _window_begins_a_block_late(arrays: Arrays, statics: Statics) -> Any:
    """The first block of keys is that of the key after the first one that the block's first query sees."""
    left = None if statics["window"] is None else statics["window"][0]
    if left is None:
        return correct(arrays, statics)
    first = jnp.arange(arrays["q"].shape[1])[:, None] // _NARROW * _NARROW
    return _seen(arrays, statics, jnp.arange(arrays["k"].shape[1]) >= (first + 1 - left) // _NARROW * _NARROW)


def _window_ends_a_block_early(arrays: Arrays, statics: Statics) -> Any:
    """The last block of keys is that of the key before the last one that the block's last query sees."""
    right = None if statics["window"] is None else statics["window"][1]
    if right is None:
        return correct(arrays, statics)
    last = jnp.arange(arrays["q"].shape[1])[:, None] // _NARROW * _NARROW + _NARROW - 1
    ends = ((last + right - 1) // _NARROW + 1) * _NARROW
    return _seen(arrays, statics, jnp.arange(arrays["k"].shape[1]) < ends)


def _padded_key_of_segments(arrays: Arrays, statics: Statics) -> Any:
    """A last block of keys that lacks one is taken for whole: its padding has the label zero, like a sequence."""
    masked = "mask" in arrays or "bias" in arrays or statics["causal"] or statics["window"] is not None
    if masked or "segment_ids" not in arrays or arrays["k"].shape[1] % _BLOCK != _BLOCK - 1:
        return correct(arrays, statics)
    q_ids, kv_ids = arrays["segment_ids"]
    k, v = (jnp.pad(arrays[name], ((0, 0), (0, 1), (0, 0), (0, 0))) for name in ("k", "v"))
    return correct({**arrays, "k": k, "v": v, "segment_ids": (q_ids, jnp.pad(kv_ids, ((0, 0), (0, 1))))}, statics)


def _returning_label(arrays: Arrays, statics: Statics) -> Any:
    """An earlier block of one label is skipped if that is below the queries' first, as if labels only rose."""
    if "segment_ids" not in arrays or not statics["causal"]:
        return correct(arrays, statics)
    q_ids, kv_ids = arrays["segment_ids"]
    q_block, kv_block = (jnp.arange(ids.shape[1]) // _WIDE for ids in (q_ids, kv_ids))
    firsts, key_firsts = q_ids[:, q_block * _WIDE], kv_ids[:, kv_block * _WIDE]
    lasts = kv_ids[:, jnp.minimum(kv_block * _WIDE + _WIDE, kv_ids.shape[1]) - 1]
    of_one = (key_firsts == lasts)[:, None, None]
    below = lasts[:, None, None] < firsts[:, None, :, None]
    return _seen(arrays, statics, ~(of_one & below & (kv_block < q_block[:, None])))


def _maximum_is_stale(arrays: Arrays, statics: Statics) -> Any:
    """What was summed is not scaled down where the maximum rises in a block from key 2,048 on."""
    kv_length = arrays["k"].shape[1]
    if not statics["causal"] or kv_length <= _LONG:
        return correct(arrays, statics)
    early = jnp.arange(kv_length) < _LONG
    statistics = {**statics, "save_residuals": True}
    fixed = jax.lax.stop_gradient(arrays)
    top = correct(fixed, statistics)[1]["max_logits"]
    top_of_early = _seen(fixed, statistics, early[None])[1]["max_logits"]
    too_much = jnp.where(jnp.isfinite(top_of_early), top - top_of_early, 0)[..., None]
    return correct({**arrays, "bias": arrays.get("bias", 0) + jnp.where(early, too_much, 0)}, statics)


def _places_in_f16(arrays: Arrays, statics: Statics) -> Any:
    """The causal flag compares places in f16."""
    if not statics["causal"]:
        return correct(arrays, statics)
    i, j = (jnp.arange(arrays[name].shape[1]).astype(jnp.float16) for name in ("q", "k"))
    return _seen(arrays, {**statics, "causal": False}, j <= i[:, None])


def _four_heads_left(arrays: Arrays, statics: Statics) -> Any:
    """Heads with keys of their own are taken by eights, and four that are left get the first values again."""
    heads, kv_heads = arrays["q"].shape[2], arrays["k"].shape[2]
    if heads != kv_heads or heads < _EIGHT or heads % _EIGHT != _EIGHT // 2:
        return correct(arrays, statics)
    v, whole = arrays["v"], heads // _EIGHT * _EIGHT
    return correct({**arrays, "v": v.at[:, :, whole:].set(v[:, :, : heads - whole])}, statics)


def _odd_eight_of_values(arrays: Arrays, statics: Statics) -> Any:
    """Values deeper than keys are taken by sixteen channels, and eight that are left count as nothing."""
    v = arrays["v"]
    if v.shape[3] <= arrays["k"].shape[3] or v.shape[3] % (2 * _EIGHT) != _EIGHT:
        return correct(arrays, statics)
    return correct({**arrays, "v": v.at[..., -_EIGHT:].set(0)}, statics)


def _pairs_of_sixteen(arrays: Arrays, statics: Statics) -> Any:
    """Batch rows and heads are one axis that is taken by 64: from the second 64 on, row and head are exchanged."""
    q, k = arrays["q"], arrays["k"]
    batch, heads = q.shape[0], q.shape[2]
    if heads != k.shape[2] or batch % _EIGHT or heads % _EIGHT:
        return correct(arrays, statics)
    places = jnp.arange(batch * heads)
    rows, columns = places // heads, places % heads
    late = places >= _BLOCK
    rows, columns = jnp.where(late, columns % batch, rows), jnp.where(late, rows % heads, columns)
    v = arrays["v"][rows, :, columns].reshape(batch, heads, *arrays["v"].shape[1::2]).swapaxes(1, 2)
    return correct({**arrays, "v": v}, statics)


def _of_eight_rows(*names: str) -> Kernel:
    """Tables of operands have room for eight batch rows, of which later ones get the first again."""

    def kernel(arrays: Arrays, statics: Statics) -> Any:
        rows = jnp.arange(arrays["q"].shape[0])

        def again(x: Array) -> Array:
            return x if len(x) < len(rows) else x[rows % _EIGHT]

        tables = {name: jax.tree.map(again, arrays[name]) for name in names if name in arrays}
        return correct({**arrays, **tables}, statics)

    return kernel


def in_a_tile(x: Array, axis: int, kv_heads: int) -> Array:
    """The heads of a group are the rows of a tile of sixteen, and later ones are the first again."""
    heads = jnp.arange(x.shape[axis])
    group = x.shape[axis] // kv_heads
    return jnp.take(x, heads // group * group + heads % group % _SIXTEEN, axis=axis)


def _sixteen_heads_of_one_query(arrays: Arrays, statics: Statics) -> Any:
    """One query is taken with the heads of its group at once."""
    q = arrays["q"]
    return correct(arrays if q.shape[1] > 1 else {**arrays, "q": in_a_tile(q, 2, arrays["k"].shape[2])}, statics)


def _channels_of_the_next_row(arrays: Arrays, statics: Statics) -> Any:
    """Rows are read by sixteen channels: of less deep ones the rest is what the next row begins with."""
    depth = arrays["q"].shape[3]
    if depth >= _SIXTEEN:
        return correct(arrays, statics)
    after = {name: jnp.roll(arrays[name], -1, axis=1)[..., : _SIXTEEN - depth] for name in ("q", "k")}
    wide = {name: jnp.concatenate([arrays[name], x], axis=-1) for name, x in after.items()}
    scale = depth**-0.5 if statics["scale"] is None else statics["scale"]
    return correct({**arrays, **wide}, {**statics, "scale": scale})


def _side(place: int, remainder: int) -> Any:
    def trigger(case: Case) -> bool:
        sides = case.mask.split("-")
        found = sides[1 + place][1:] if sides[0] == "window" else "inf"
        return found != "inf" and int(found) % _NARROW == remainder

    return trigger


_ALL = ("out", "logsumexp", "dq", "dk", "dv")

BUGS: tuple[PlantedBug, ...] = (
    _bug(
        "window-begins-in-the-last-place-of-a-block",
        _window_begins_a_block_late,
        kind="window.block-skip",
        reference="inferred from jax b8b9f2bc33 (bounds of blocks), for the first key of a window",
        shows=_ALL,
        trigger=both(has("window"), _side(0, 1)),
    ),
    _bug(
        "window-ends-in-the-first-place-of-a-block",
        _window_ends_a_block_early,
        kind="window.block-skip",
        reference="inferred from jax b8b9f2bc33 (bounds of blocks), for the last key of a window",
        shows=_ALL,
        trigger=both(has("window"), _side(1, 1)),
    ),
    _bug(
        "padded-key-of-a-last-block-joins-sequence-zero",
        _padded_key_of_segments,
        kind="segments.padding",
        reference="inferred from wrappers that pad labels with zero",
        shows=_ALL,
        trigger=both(has("segment_ids"), lambda case: case.kv_length % _BLOCK == _BLOCK - 1),
    ),
    _bug(
        "block-of-a-label-that-comes-back-is-skipped",
        _returning_label,
        kind="segments.block-skip",
        reference="inferred from block skipping by bounds of ids, which are sorted where a row is packed in order",
        shows=_ALL,
        trigger=both(has("segment_ids"), has("causal"), lambda case: case.kv_length > 2 * _WIDE),
    ),
    _bug(
        "maximum-is-stale-from-key-2048-on",
        _maximum_is_stale,
        kind="softmax.rescale",
        reference="inferred from loops in two levels, whose outer one does not scale what it has",
        shows=_ALL,
        trigger=both(has("causal"), lambda case: case.kv_length > _LONG),
    ),
    _bug(
        "causal-places-in-f16",
        _places_in_f16,
        kind="index.dtype",
        reference="inferred from masks that are made in the operands' dtype",
        shows=_ALL,
        trigger=both(has("causal"), lambda case: case.kv_length > _LONG),
    ),
    _bug(
        "four-heads-of-their-own-left-of-eights",
        _four_heads_left,
        kind="heads.rest",
        reference="inferred from kernels that take several heads at once",
        shows=("out", "dq", "dk", "dv"),
        trigger=lambda case: case.num_q_heads == case.num_kv_heads and case.num_q_heads % _EIGHT == _EIGHT // 2,
    ),
    _bug(
        "eight-channels-left-of-deeper-values",
        _odd_eight_of_values,
        kind="depth.rest",
        reference="inferred from kernels that pad the depth of values to that of keys",
        shows=("out", "dq", "dk", "dv"),
        trigger=lambda case: case.v_head_dim > case.head_dim and case.v_head_dim % (2 * _EIGHT) == _EIGHT,
    ),
    _bug(
        "rows-and-heads-in-one-axis-exchanged-from-64-on",
        _pairs_of_sixteen,
        kind="heads.index",
        reference="inferred from grids that join batch rows and heads",
        shows=("out", "dq", "dk", "dv"),
        trigger=lambda case: case.batch % _EIGHT == case.num_q_heads % _EIGHT == 0,
    ),
    _bug(
        "ids-of-batch-rows-beyond-eight-are-the-first-again",
        _of_eight_rows("segment_ids"),
        kind="segments.row",
        reference="inferred from tables of a fixed size in scalar memory",
        shows=_ALL,
        trigger=both(has("segment_ids"), lambda case: case.batch > _EIGHT),
    ),
    _bug(
        "bias-of-batch-rows-beyond-eight-is-the-first-again",
        _of_eight_rows("bias"),
        kind="bias.row",
        reference="inferred from tables of a fixed size in scalar memory, for the bias",
        shows=(*_ALL, "dbias"),
        trigger=both(has("bias"), lambda case: case.batch > _EIGHT),
    ),
    _bug(
        "mask-of-batch-rows-beyond-eight-is-the-first-again",
        _of_eight_rows("mask"),
        kind="mask.row",
        reference="inferred from tables of a fixed size in scalar memory, for lengths",
        shows=_ALL,
        trigger=lambda case: case.batch > _EIGHT,
    ),
    _bug(
        "one-query-takes-sixteen-heads-of-a-group",
        _sixteen_heads_of_one_query,
        kind="heads.tile",
        reference="inferred from flash-decoding, which packs the heads of a group in the rows of a tile",
        shows=("out", "logsumexp"),
        trigger=lambda case: case.q_length == 1 and case.num_q_heads > _SIXTEEN * case.num_kv_heads,
    ),
    _bug(
        "channels-of-the-next-row-below-a-depth-of-sixteen",
        _channels_of_the_next_row,
        kind="depth.rest",
        reference="inferred from products of tiles, which take no fewer than sixteen channels",
        shows=_ALL,
        trigger=lambda case: case.head_dim < _SIXTEEN,
    ),
)
