"""Bugs of calls beside those of the grids: counts that no grid has, and arrays that differ where a grid shares them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cases.case import Case
from conformance.mutation.kernels.triggers import both, has, sixteen_bits, trains
from tests.bank import PlantedBug
from tests.planted.beyond.borders import in_a_tile
from tests.planted.beyond.combined import Pulled, backward_by, pulled_back
from tests.planted.beyond.few_operands import rows_of
from tests.planted.computing.transformation_bugs import batched_by, mapped
from tests.planted.planting.served import Call, PackedSteps, PagedSteps, packed, paged
from tests.planted.planting.wrapped import Arrays, Kernel, Statics, correct, planted

_FAMILY = "further calls"
_bug = functools.partial(planted, family=_FAMILY)
_FEW = 16
_TILE = 128
_BLOCK = 64
_MANY = 8
_TABLE = 32
_LONGEST = 4096

Array = jax.Array


def _of_fours(length: int, block: int) -> bool:
    """Whether blocks taken by fours leave three."""
    return length > 4 * block and -(-length // block) % 4 == 3


def _seen_keys(arrays: Arrays, statics: Statics, seen: Array) -> Any:
    """The correct result under a mask that also hides the keys `~seen`, which broadcasts to `[B, N, T, S]`."""
    return correct({**arrays, "mask": arrays["mask"] & seen if "mask" in arrays else seen}, statics)


def _by_fours(block: int) -> Kernel:
    """A loop over key blocks that is unrolled by four has a rest for one block and for two."""

    def kernel(arrays: Arrays, statics: Statics) -> Any:
        length = arrays["k"].shape[1]
        if not _of_fours(length, block):
            return correct(arrays, statics)
        seen = jnp.arange(length) < (-(-length // block) - 1) * block
        return _seen_keys(arrays, statics, seen[None, None, None])

    return kernel


def _queries_by_fours(arrays: Arrays, cotangent: Any, statics: Statics) -> Pulled:
    """The same of the loop over query blocks, of which keys and values hear."""
    found, length = pulled_back(arrays, cotangent, statics), arrays["q"].shape[1]
    if not _of_fours(length, _TILE):
        return found
    last = (-(-length // _TILE) - 1) * _TILE
    heard = pulled_back(arrays, rows_of(cotangent, lambda rows: np.arange(rows) < last, 1), statics)
    return {**found, "k": heard["k"], "v": heard["v"]}


def _low_sums_of_many_blocks(arrays: Arrays, cotangent: Any, statics: Statics) -> Pulled:
    """Over more than eight blocks of queries what keys and values hear is kept in the operands' dtype."""
    found = pulled_back(arrays, cotangent, statics)
    blocks = -(-arrays["q"].shape[1] // _BLOCK)
    if blocks <= _MANY:
        return found

    def add(held: tuple[Array, Array], number: Array) -> tuple[tuple[Array, Array], None]:
        of_one = rows_of(cotangent, lambda rows: jnp.arange(rows) // _BLOCK == number, 1)
        heard = pulled_back(arrays, of_one, statics)
        return (held[0] + heard["k"], held[1] + heard["v"]), None

    none = jnp.zeros_like(arrays["k"]), jnp.zeros_like(arrays["v"])
    (dk, dv), _ = jax.lax.scan(add, none, jnp.arange(blocks))
    return {**found, "k": dk, "v": dv}


def _narrow_heads_in_pairs(arrays: Arrays, statics: Statics) -> Any:
    """Two narrow heads fill a register; the last of an odd number is taken with the one before it."""
    k = arrays["k"]
    if k.shape[2] > 1 and k.shape[2] % 2 and k.shape[3] <= _TILE // 2:
        arrays = {**arrays, "k": k.at[:, :, -1].set(k[:, :, -2])}
    return correct(arrays, statics)


def _blocks_of_the_last_query(arrays: Arrays, statics: Statics) -> Any:
    """A step of few queries reads the blocks of keys that its last query sees."""
    mask = arrays.get("mask")
    if mask is None or arrays["q"].shape[1] > _FEW:
        return correct(arrays, statics)
    last = mask[:, :, -1:]
    padded = jnp.pad(last, ((0, 0), (0, 0), (0, 0), (0, -last.shape[3] % _TILE)))
    read = padded.reshape(*last.shape[:3], -1, _TILE).any(axis=-1)
    return _seen_keys(arrays, statics, jnp.repeat(read, _TILE, axis=-1)[..., : last.shape[3]])


def _eager_bias_of_the_first_row(arrays: Arrays, statics: Statics) -> Any:
    bias = arrays.get("bias")
    if bias is not None and not isinstance(bias, jax.core.Tracer):
        arrays = {**arrays, "bias": bias[:1]}
    return correct(arrays, statics)


def _cached_keys_stop_gradients(arrays: Arrays, statics: Statics) -> Any:
    """Keys that are arrays, and no tracers, are those of a cache: nothing is trained then."""
    result = correct(arrays, statics)
    return result if isinstance(arrays["k"], jax.core.Tracer) else jax.lax.stop_gradient(result)


def _repeated_bias(arrays: Arrays, batched: Any, size: int, statics: Statics) -> Any:
    """The mapped axis is made part of the batch: rows of a bias that all share are repeated, where all come again."""
    bias = arrays.get("bias")
    if bias is None or batched["bias"] or bias.shape[0] == 1:
        return mapped(arrays, batched, statics)
    folded = jnp.repeat(bias, size, axis=0).reshape(size, *bias.shape)
    return mapped({**arrays, "bias": folded}, {**batched, "bias": True}, statics)


def _sinks_scaled_up(arrays: Arrays, statics: Statics) -> Any:
    """The sink is held to be a logit before the scale, as far as that makes it larger."""
    scale = statics["scale"]
    if "sinks" in arrays and scale is not None and scale > 1:
        arrays = {**arrays, "sinks": arrays["sinks"] * scale}
    return correct(arrays, statics)


def _from_the_start(when: Callable[[Call], Array]) -> PackedSteps:
    """Queries stand where they would with as many keys as queries."""

    def sequence(call: Call) -> tuple[Array, Array]:
        found, place = PackedSteps().sequence(call)
        row = jnp.minimum(found, call.rows - 1)
        return found, place + jnp.where(when(call), (call.q_lens - call.kv_lens)[row], 0)

    return PackedSteps(sequence=sequence)


def _right_beside_left(left: int | None, right: int | None) -> tuple[int | None, int | None]:
    return left, None if left is None and right != 0 else right


def _one_table(sequence: Array) -> Array:
    """Sequences beyond the last row of a table of 32 share it."""
    return jnp.minimum(sequence, _TABLE - 1)


def _of_eight(x: Array, axis: int) -> Array:
    """Heads beyond eight are the first again."""
    return jnp.take(x, jnp.arange(x.shape[axis]) % _MANY, axis=axis)


def _served(name: str, steps: PackedSteps | PagedSteps, kind: str, reference: str, *shows: str) -> PlantedBug:
    """A bug of a kernel whose operands are stored."""
    is_packed = isinstance(steps, PackedSteps)
    return PlantedBug(
        name=name,
        family=_FAMILY,
        kind=kind,
        reference=reference,
        shows=shows,
        build=functools.partial(packed, name, steps)
        if isinstance(steps, PackedSteps)
        else functools.partial(paged, name, steps),
        trigger=has("packed" if is_packed else "paged"),
    )


def _leaves_three(block: int) -> Callable[[Case], bool]:
    return lambda case: _of_fours(case.kv_length, block)


_OUT = ("out", "logsumexp")
_ALL = (*_OUT, "dq", "dk", "dv")

BUGS: tuple[PlantedBug, ...] = (
    _bug(
        "loop-unrolled-by-four-leaves-the-third-block-of-64",
        _by_fours(64),
        kind="blocks.unroll-rest",
        reference="inferred from jax b8b9f2bc33 (bounds rounded down), for a rest of three",
        shows=_ALL,
        trigger=_leaves_three(64),
    ),
    _bug(
        "loop-unrolled-by-four-leaves-the-third-block-of-128",
        _by_fours(128),
        kind="blocks.unroll-rest",
        reference="inferred from jax b8b9f2bc33 (bounds rounded down), for a rest of three",
        shows=_ALL,
        trigger=_leaves_three(128),
    ),
    _bug(
        "backward-loop-unrolled-by-four-leaves-the-third-block-of-queries",
        backward_by(_queries_by_fours),
        kind="blocks.unroll-rest",
        reference="inferred from jax b8b9f2bc33 (bounds rounded down), for the loop over queries",
        shows=("dk", "dv"),
        trigger=both(trains(), lambda case: _of_fours(case.q_length, _TILE)),
    ),
    _bug(
        "dk-and-dv-kept-low-over-more-than-eight-blocks-of-queries",
        backward_by(_low_sums_of_many_blocks),
        kind="accumulation.low",
        reference="inferred from tile-ai/TileOPs PR 1511, for sums of the backward pass",
        shows=("dk", "dv"),
        trigger=both(trains(), sixteen_bits, lambda case: case.q_length > _MANY * _BLOCK),
    ),
    _bug(
        "narrow-heads-in-pairs-with-an-odd-one",
        _narrow_heads_in_pairs,
        kind="heads.odd",
        reference="inferred from kernels that put two heads of 64 in 128 lanes",
        shows=_ALL,
        trigger=lambda case: case.num_kv_heads > 1 and case.num_kv_heads % 2 == 1 and case.head_dim <= _TILE // 2,
    ),
    _bug(
        "step-reads-the-blocks-of-its-last-query",
        _blocks_of_the_last_query,
        kind="window.block-skip",
        reference="inferred from flashinfer-ai/flashinfer#4972, for blocks that a step of queries reads",
        shows=_OUT,
        trigger=both(has("window"), lambda case: 1 < case.q_length <= _FEW),
    ),
    _bug(
        "eager-bias-of-the-first-row",
        _eager_bias_of_the_first_row,
        kind="eager.broadcast",
        reference="inferred from mlx-lm PR 1903, for a path outside `jit`",
        shows=("out",),
        trigger=has("bias"),
    ),
    _bug(
        "eager-keys-stop-gradients",
        _cached_keys_stop_gradients,
        kind="eager.gradient",
        reference="inferred from paths for decoding that are told by what is traced",
        shows=("dq",),
        trigger=trains(),
    ),
    _bug(
        "vmap-repeats-the-rows-of-a-shared-bias",
        batched_by(_repeated_bias),
        kind="vmap.partial-axes",
        reference="jax 3b20cce354, issue 38495, for a bias alone",
        shows=("out",),
        trigger=has("bias"),
    ),
    _bug(
        "sinks-multiplied-by-scales-above-one",
        _sinks_scaled_up,
        kind="sink.scaled",
        reference="inferred from sinks that are joined to the logits before the scale",
        shows=_ALL,
        trigger=has("sinks", "scale"),
    ),
    _served(
        "one-packed-sequence-counts-from-its-first-key",
        _from_the_start(lambda call: call.count == 1),
        "alignment",
        "sparkinfer#3, for the path of one sequence",
        *_ALL,
    ),
    _served(
        "as-many-packed-keys-as-queries-are-taken-for-the-same",
        _from_the_start(lambda call: call.q_lens.sum() == call.kv_lens.sum()),
        "alignment",
        "inferred from self-attention that is told by the sizes of its operands",
        *_ALL,
    ),
    _served(
        "packed-right-side-read-beside-a-left-one",
        PackedSteps(sides=_right_beside_left),
        "window",
        "inferred from flash-attention, where -1 stands for an open side",
        *_ALL,
    ),
    _served(
        "packed-sequences-beyond-32-see-one-another",
        PackedSteps(same=lambda sequence, of_key: _one_table(sequence)[:, None] == _one_table(of_key)),
        "table",
        "inferred from tables of a fixed size in shared memory",
        *_ALL,
    ),
    _served(
        "paged-sequences-beyond-32-have-one-row",
        PagedSteps(row_of_table=_one_table),
        "table",
        "inferred from tables of a fixed size in shared memory",
        *_OUT,
    ),
    _served(
        "page-numbers-of-eight-bits",
        PagedSteps(pages=lambda slot, call: call.page_indices[:, slot] & 255),
        "pages",
        "inferred from indices that are as narrow as a test needs",
        *_OUT,
    ),
    _served(
        "packed-queries-take-sixteen-heads-of-a-group",
        PackedSteps(gradients=lambda q, k, v, call: (in_a_tile(q, 1, call.kv_heads), k, v)),
        "heads",
        "inferred from flash-decoding, which packs the heads of a group in the rows of a tile",
        *_ALL,
    ),
    _served(
        "paged-queries-take-sixteen-heads-of-a-group",
        PagedSteps(output=lambda out, call: in_a_tile(out, 1, call.kv_heads)),
        "heads",
        "inferred from flash-decoding, which packs the heads of a group in the rows of a tile, for pages",
        *_OUT,
    ),
    _served(
        "packed-key-heads-beyond-eight-are-the-first-again",
        PackedSteps(heads=lambda x, count: jnp.repeat(_of_eight(x, 1), count // x.shape[1], axis=1)),
        "heads",
        "inferred from kernels that keep the heads of a token in one tile of eight rows",
        *_ALL,
    ),
    _served(
        "paged-key-heads-beyond-eight-are-the-first-again",
        PagedSteps(heads=lambda x, count: jnp.repeat(_of_eight(x, 2), count // x.shape[2], axis=2)),
        "heads",
        "inferred from kernels that keep the heads of a token in one tile of eight rows, for pages",
        *_OUT,
    ),
    _served(
        "paged-keys-beyond-4096-are-not-read",
        PagedSteps(allowed=lambda allowed, call: allowed & (jnp.arange(allowed.shape[-1]) < _LONGEST)),
        "splits",
        "inferred from merges of a fixed number of parts of the cache",
        *_OUT,
    ),
)
