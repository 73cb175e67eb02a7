"""Programs of Triton kernels: what a program sees, the tiles that it visits, and their masks, products and logits.

    (1)  x_ij = scale <q_i, k_j> + bias_ij
    (2)  z_ij = soft_cap tanh(x_ij / soft_cap)
    (3)  z_ij = -inf, where i may not attend to j

Without bias and soft cap, tiles hold `y = <q_i, k_j>` instead of z. The scale is then the unit of the logits:
`z = scale y` (`impls.block_arithmetic`).

A program sees one batch row, its heads, its block along the axis that it owns, and the whole other axis, of which it
loads tiles itself. A kernel that owns queries has one query head per program. The kernel that owns keys has one
key/value head per program, and sees all query heads of its group: query head `n` reads key/value head `n // group`. So
k and v are never copied.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from cases.masks import And, Dense, Lengths, Mask, Or
from impls.block_arithmetic import make_shape, multiply_tiles
from impls.dropout_bits import DropoutWords, draw_key_words, draw_query_words, find_kept
from impls.flash_gpu.block_sizes import Axis, Tiles
from impls.flash_gpu.packed_visits import KeyRanges, compute_visits
from impls.flash_gpu.tile_schedule import BLOCK_KINDS, BlockKind, FlashGpuPlan, Operands, name_leaf
from impls.jax_compat import Ref, Scalar, build_triton_call
from impls.pallas_gpu.triton_tiles import (
    compute_positions,
    load_values,
)
from impls.varying_axes import find_varying_axes, mark_varying

Arrays = dict[str, Any]
Specs = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Launch:
    """A grid of programs `(block along the axis, head, batch row)`; the fastest axis comes first."""

    plan: FlashGpuPlan
    tiles: Tiles
    # `"q"` if a program owns a block of queries of one query head, `"kv"` if it owns a block of keys of one key/value
    # head and visits the query heads of its group.
    axis: Axis
    batch: int

    @property
    def grid(self) -> tuple[int, int, int]:
        """Number of programs along each axis of the grid."""
        plan = self.plan
        if self.axis == "q":
            return -(-plan.q_length // self.tiles.block_q), plan.num_q_heads, self.batch
        return -(-plan.kv_length // self.tiles.block_kv), plan.num_kv_heads, self.batch

    @property
    def kinds(self) -> tuple[BlockKind, ...]:
        """Kinds of blocks that may occur: all kinds for packed sequences, whose masks are known at run time only."""
        return BLOCK_KINDS if self.plan.packed else tuple(self.plan.build_visits(self.tiles, self.axis).lists)

    @property
    def heads(self) -> int:
        """Query heads that a program sees."""
        return 1 if self.axis == "q" else self.plan.group

    @property
    def q_tail(self) -> int:
        """Number of queries, padded to whole blocks."""
        return -(-self.plan.q_length // self.tiles.block_q) * self.tiles.block_q

    @property
    def kv_tail(self) -> int:
        """Number of keys, padded to whole blocks."""
        return -(-self.plan.kv_length // self.tiles.block_kv) * self.tiles.block_kv

    @property
    def q_seen(self) -> int:
        """Queries that a program sees."""
        return self.tiles.block_q if self.axis == "q" else self.q_tail

    @property
    def kv_seen(self) -> int:
        """Keys that a program sees."""
        return self.tiles.block_kv if self.axis == "kv" else self.kv_tail

    def q_block(self, i: Scalar) -> Any:
        """Return which block of `q_seen` queries program `i` sees: `i` if it owns queries, else 0, as it sees all."""
        return i if self.axis == "q" else jnp.int32(0)

    def kv_block(self, i: Scalar) -> Any:
        """Return which block of `kv_seen` keys program `i` sees: `i` if it owns keys, else 0, as it sees all."""
        return i if self.axis == "kv" else jnp.int32(0)

    def kv_head(self, head: Scalar) -> Any:
        """Compute the key/value head of a program."""
        return lax.div(head, jnp.int32(self.plan.group)) if self.axis == "q" else head

    def inputs(self, operands: Operands) -> tuple[Arrays, Specs]:
        """Return the operands, the mask or key ranges, and the schedule by name, and their `BlockSpec`s by name."""
        plan = self.plan
        arrays: Arrays = {"q": operands.q, "k": operands.k, "v": operands.v}
        specs: Specs = {
            "q": self.see_query_rows(plan.head_tile),
            "k": self._see_key_rows(plan.head_tile),
            "v": self._see_key_rows(plan.v_head_tile),
        }
        if operands.bias is not None:
            arrays["bias"], specs["bias"] = operands.bias, self.pairs(operands.bias.shape)
        if operands.segment_ids is not None:
            arrays["q_ids"], arrays["kv_ids"] = operands.segment_ids
            specs["q_ids"] = pl.BlockSpec((None, self.q_seen), lambda i, n, b: (b, self.q_block(i)))
            specs["kv_ids"] = pl.BlockSpec((None, self.kv_seen), lambda i, n, b: (b, self.kv_block(i)))
        if operands.dropout_key is not None:
            q_words = draw_query_words(operands.dropout_key, self.batch, plan.num_q_heads, plan.q_length)
            kv_words = draw_key_words(operands.dropout_key, plan.kv_length)
            for name in DropoutWords._fields:
                arrays[f"q_{name}"], specs[f"q_{name}"] = getattr(q_words, name), self.see_query_scalars()
                arrays[f"kv_{name}"] = getattr(kv_words, name)
                specs[f"kv_{name}"] = pl.BlockSpec((self.kv_seen,), lambda i, n, b: (self.kv_block(i),))
        more, seen = self._build_mask_inputs() if operands.ranges is None else self._build_range_inputs(operands.ranges)
        return arrays | more, specs | seen

    def _build_mask_inputs(self) -> tuple[Arrays, Specs]:
        """Build the inputs of a static mask: its arrays and its schedule."""
        plan = self.plan
        arrays: Arrays = {}
        specs: Specs = {}
        for name, array in plan.mask_arrays.items():
            arrays[name] = jnp.asarray(array)
            specs[name] = _see_whole(array) if array.ndim == 1 else self.pairs(array.shape)
        visits = plan.build_visits(self.tiles, self.axis)
        arrays["visits"], specs["visits"] = jnp.asarray(visits.table), self._see_program_line(visits.table.shape)
        for kind, blocks in visits.lists.items():
            if blocks is not None:
                arrays[f"{kind}_blocks"], specs[f"{kind}_blocks"] = jnp.asarray(blocks), _see_whole(blocks)
        return arrays, specs

    def _build_range_inputs(self, ranges: KeyRanges) -> tuple[Arrays, Specs]:
        """Build the inputs of packed sequences: key ranges and the schedule that follows from them."""
        visits = compute_visits(ranges, self.tiles, self.axis, self.plan.kv_length)
        table, queries = visits.table[None, None], pl.BlockSpec((self.q_seen,), lambda i, n, b: (self.q_block(i),))
        return (
            {"low": ranges.low, "high": ranges.high, "visits": table, "partial_blocks": visits.partial},
            {
                "low": queries,
                "high": queries,
                "visits": self._see_program_line(table.shape),
                "partial_blocks": _see_whole(visits.partial),
            },
        )

    def see_query_rows(self, columns: int) -> Any:
        """Return the `BlockSpec` of an array `[B, T, N, .]`: the queries and heads that a program sees."""
        return pl.BlockSpec(
            (None, self.q_seen, self.heads, columns), lambda i, n, b: (b, self.q_block(i), n, jnp.int32(0))
        )

    def see_query_scalars(self) -> Any:
        """Return the `BlockSpec` of an array `[B, N, T]`: the heads and queries that a program sees."""
        return pl.BlockSpec((None, self.heads, self.q_seen), lambda i, n, b: (b, n, self.q_block(i)))

    def see_head_scalars(self) -> Any:
        """Return the `BlockSpec` of an array `[N]`: one value for each head that a program sees."""
        return pl.BlockSpec((self.heads,), lambda i, n, b: (n,))

    def pairs(self, shape: tuple[int, ...]) -> Any:
        """Return the `BlockSpec` of the pairs that a program sees of an array `[B or 1, N or 1, T or 1, S or 1]`."""
        block = (
            None,
            1 if shape[1] == 1 else self.heads,
            1 if shape[2] == 1 else self.q_seen,
            1 if shape[3] == 1 else self.kv_seen,
        )

        def index(i: Scalar, n: Scalar, b: Scalar) -> Any:
            at = (b, n, self.q_block(i), self.kv_block(i))
            return tuple(place if size > 1 else jnp.int32(0) for place, size in zip(at, shape, strict=True))

        return pl.BlockSpec(block, index)

    def _see_key_rows(self, columns: int) -> Any:
        return pl.BlockSpec(
            (None, self.kv_seen, None, columns), lambda i, n, b: (b, self.kv_block(i), self.kv_head(n), jnp.int32(0))
        )

    def _see_program_line(self, shape: tuple[int, ...]) -> Any:
        """Return the `BlockSpec` of the table of visits: the row of the program."""

        def index(i: Scalar, n: Scalar, b: Scalar) -> Any:
            zero = jnp.int32(0)
            return b if shape[0] > 1 else zero, n if shape[1] > 1 else zero, i, zero

        return pl.BlockSpec((None, 1 if shape[1] == 1 else self.heads, None, shape[3]), index)

    def __call__(
        self,
        name: str,
        kernel: Callable[[Arrays, Arrays], None],
        arrays: Arrays,
        specs: Specs,
        out_shapes: Arrays,
        out_specs: Specs,
    ) -> Arrays:
        """Run `kernel(inputs, outputs)` in every program; profiles show `name`.

        A program sees the part of each input and output that `specs` and `out_specs` describe.
        """
        # `shard_map` checks over which mesh axes arrays vary: constants and outputs must name the operands' axes.
        arrays = mark_varying(arrays, find_varying_axes(arrays))
        varying = jax.typeof(arrays["q"]).manual_axis_type
        out_shapes = {name: make_shape(x.shape, x.dtype, varying) for name, x in out_shapes.items()}
        return build_triton_call(
            kernel,
            name=name,
            grid=self.grid,
            in_specs=specs,
            out_shapes=out_shapes,
            out_specs=out_specs,
            num_warps=self.tiles.num_warps,
            num_stages=self.tiles.num_stages,
            interpret=bool(self.plan.interpret),
        )(arrays)


def _see_whole(array: np.ndarray | jax.Array) -> Any:
    return pl.BlockSpec(array.shape, lambda i, n, b: tuple(jnp.int32(0) for _ in array.shape))


Carry = TypeVar("Carry")


class TilePair(NamedTuple):
    """Start and sizes of a tile of query/key pairs.

    A program that owns queries has tiles `[queries, keys]`. One that owns keys sums over queries, so its tiles are
    `[keys, queries]` (`keys_first`): the product of this sum then needs no transpose.
    """

    batch: Scalar
    head: Scalar  # index among the heads that the program sees
    q_start: Scalar
    kv_start: Scalar
    block_q: int
    block_kv: int
    keys_first: bool

    @property
    def q_at(self) -> Any:
        """Start of the tile's queries within the part of an array that the program sees."""
        return self.q_start if self.keys_first else 0

    @property
    def kv_at(self) -> Any:
        """Start of the tile's keys within the part of an array that the program sees."""
        return 0 if self.keys_first else self.kv_start

    def queries(self, x: jax.Array) -> jax.Array:
        """Reshape a value per query so that it broadcasts over the keys."""
        return x[None, :] if self.keys_first else x[:, None]

    def keys(self, x: jax.Array) -> jax.Array:
        """Reshape a value per key so that it broadcasts over the queries."""
        return x[:, None] if self.keys_first else x[None, :]


def get_program_ids() -> tuple[Any, Any, Any]:
    """Return this program's block along the axis that it owns, its head and its batch row."""
    return pl.program_id(0), pl.program_id(1), pl.program_id(2)


def load_pairs(ref: Ref, plan: FlashGpuPlan, pair: TilePair) -> jax.Array:
    """Load a tile of an array over pairs `[heads or 1, T or 1, S or 1]`, which broadcasts to the tile of `pair`."""
    heads, q_length, kv_length = ref.shape
    rows, row = (pair.block_q, pair.q_at) if q_length > 1 else (1, 0)
    columns, column = (pair.block_kv, pair.kv_at) if kv_length > 1 else (1, 0)
    at = ref.at[jnp.int32(pair.head if heads > 1 else 0), pl.ds(row, rows), pl.ds(column, columns)]
    inside_q = compute_positions(pair.q_start if q_length > 1 else 0, rows)[:, None] < plan.q_length
    inside_kv = compute_positions(pair.kv_start if kv_length > 1 else 0, columns)[None, :] < plan.kv_length
    tile = plt.load(at, mask=inside_q & inside_kv, other=0)
    return tile.T if pair.keys_first else tile


def visit_blocks(
    launch: Launch, inputs: Arrays, head: Scalar, step: Callable[[bool, Any, Carry], Carry], carry: Carry
) -> Carry:
    """Fold `step(masked, block, carry)` over this program's blocks, without code for kinds that no program visits."""
    table = inputs["visits"]
    place = head if table.shape[0] > 1 else jnp.int32(0)
    for kind in launch.kinds:
        column = 2 * BLOCK_KINDS.index(kind)
        first, count = table[place, column], table[place, column + 1]
        listed = inputs.get(f"{kind}_blocks")
        visit = functools.partial(_visit, functools.partial(step, kind == "partial"), first, listed)
        carry = lax.fori_loop(jnp.int32(0), count, visit, carry)
    return carry


def _visit(step: Callable[[Any, Carry], Carry], first: Scalar, listed: Any, t: Any, carry: Carry) -> Carry:
    return step(first + t if listed is None else listed[first + t], carry)


def compute_allowed(plan: FlashGpuPlan, inputs: Arrays, pair: TilePair) -> jax.Array:
    """Compute which positions of the tile of `pair` may attend: by mask and segments, or by key ranges."""
    j = pair.keys(compute_positions(pair.kv_start, pair.block_kv))
    if plan.packed:
        low, high = load_key_ranges(plan, inputs, pair)
        return (j >= pair.queries(low)) & (j < pair.queries(high))
    i = pair.queries(compute_positions(pair.q_start, pair.block_q))
    found = _evaluate_mask(plan.mask, plan, inputs, pair, i, j, itertools.count())
    if plan.q_length % pair.block_q:
        found = found & (i < plan.q_length)  # else keys that only padding queries see would count as seen
    if plan.kv_length % pair.block_kv:
        found = found & (j < plan.kv_length)
    if plan.segmented:
        q_ids = load_values(inputs["q_ids"], pair.q_start, pair.block_q, plan.q_length, at=pair.q_at)
        kv_ids = load_values(inputs["kv_ids"], pair.kv_start, pair.block_kv, plan.kv_length, at=pair.kv_at)
        found = found & (pair.queries(q_ids) == pair.keys(kv_ids))
    return found


def drop_weights(plan: FlashGpuPlan, inputs: Arrays, pair: TilePair, *tiles: jax.Array) -> tuple[jax.Array, ...]:
    """Zero what dropout drops in tiles of weights or of their gradients; the caller multiplies the rest.

    Returns the tiles, in the order given.
    """
    if plan.dropout_rate is None:
        return tiles
    of_queries, of_keys = [], []
    for name in DropoutWords._fields:
        queries, keys = inputs[f"q_{name}"], inputs[f"kv_{name}"]
        queries = load_values(queries, pair.q_start, pair.block_q, plan.q_length, head=pair.head, at=pair.q_at)
        keys = load_values(keys, pair.kv_start, pair.block_kv, plan.kv_length, at=pair.kv_at)
        of_queries.append(pair.queries(queries))
        of_keys.append(pair.keys(keys))
    kept = find_kept(plan.dropout_rate, DropoutWords(*of_queries), DropoutWords(*of_keys))
    return tuple(jnp.where(kept, tile, 0.0) for tile in tiles)


def load_key_ranges(plan: FlashGpuPlan, inputs: Arrays, pair: TilePair) -> tuple[jax.Array, jax.Array]:
    """Load the first key that each query of a tile sees, and one past the last; both are 0 if it sees no key."""
    low, high = (
        load_values(inputs[name], pair.q_start, pair.block_q, plan.q_length, at=pair.q_at) for name in ("low", "high")
    )
    return low, high


def _evaluate_mask(
    mask: Mask, plan: FlashGpuPlan, inputs: Arrays, pair: TilePair, i: Scalar, j: Scalar, places: Iterator[int]
) -> Any:
    """Evaluate `mask` on a tile; `places` counts the leaves in the order of `cases.masks.iter_leaves`."""
    if isinstance(mask, And | Or):
        left = _evaluate_mask(mask.left, plan, inputs, pair, i, j, places)
        right = _evaluate_mask(mask.right, plan, inputs, pair, i, j, places)
        return left & right if isinstance(mask, And) else left | right
    name = name_leaf(next(places))
    if isinstance(mask, Lengths):
        return (i >= 0) & (j < inputs[name][pair.batch])
    if isinstance(mask, Dense):
        return load_pairs(inputs[name], plan, pair) != 0
    return mask.allowed(i, j)


def multiply(plan: FlashGpuPlan, a: jax.Array, b: jax.Array, *, over: tuple[int, int]) -> jax.Array:
    """Multiply two tiles of one dtype in f32, contracting axis `over[0]` of `a` with `over[1]` of `b`."""
    return multiply_tiles(a, b, over, exact=plan.exact)


def get_logit_unit(plan: FlashGpuPlan, inputs: Arrays) -> float:
    """Return the unit of the logits in tiles: a logit is this factor times the stored value."""
    return plan.unit(biased="bias" in inputs)


def compute_logits(
    plan: FlashGpuPlan, inputs: Arrays, pair: TilePair, q: jax.Array, k: jax.Array, allowed: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """Compute the logits of a tile in their unit, and the soft cap's derivative, None without a soft cap."""
    z = multiply(plan, k, q, over=(1, 1)) if pair.keys_first else multiply(plan, q, k, over=(1, 1))
    if get_logit_unit(plan, inputs) == 1:
        z = z * jnp.float32(plan.scale)  # scaled logits, equation (1)
    if "bias" in inputs:
        z = z + load_pairs(inputs["bias"], plan, pair).astype(jnp.float32)
    slope = None
    if plan.soft_cap is not None:
        tanh = jnp.tanh(z / jnp.float32(plan.soft_cap))
        z, slope = jnp.float32(plan.soft_cap) * tanh, 1 - tanh * tanh  # soft cap, equation (2)
    if allowed is not None:
        z = jnp.where(allowed, z, -jnp.inf)  # hidden pairs get -inf, equation (3)
    return z, slope
