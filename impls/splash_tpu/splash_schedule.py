"""Schedule of a kernel: which pairs of blocks it visits, in which order, and how each is masked.

A kernel walks a list of steps, one pair of blocks each. Pairs that the mask leaves empty are not in the list, so the
grid is as long as the work. Steps of the same result block are consecutive; the first and the last are flagged. A
result block without any pair has one step, which computes nothing.

A mask that is a formula is computed in the kernel. For any other mask, each distinct partial block is stored once.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from cases.masks import EMPTY, FULL, PARTIAL, And, Causal, Full, Mask, Window
from impls.pallas_tpu.tpu_tiles import round_up
from impls.splash_tpu.splash_plan import Blocks, StepKinds


class Band(NamedTuple):
    """Smallest and largest `j - i` that a mask allows, if it depends on `j - i` only; None on an open side.

    A causal mask or a window hides the same positions in every block on its border. So the hidden positions are known
    when the kernel is built. The kernel has specialised code for the blocks of each border: it skips hidden parts,
    applies the mask only to parts that the border crosses, and computes no positions.
    """

    first: int | None
    last: int | None


class KeySpan(NamedTuple):
    """A run of keys that is computed at once for the queries of a part."""

    start: int  # index of the first key in the block
    size: int
    masked: bool  # whether the mask hides any of these keys from any query of the part
    # `j - i` of the run's first key and the part's first query; None if known at run time only.
    diagonal: int | None = None


class BlockPart(NamedTuple):
    """A run of queries of a block, with the runs of keys that they may attend to."""

    rows: slice
    keys: tuple[KeySpan, ...]

    @property
    def size(self) -> int:
        """Number of queries."""
        size: int = self.rows.stop - self.rows.start
        return size


def find_band(mask: Mask | None) -> Band | None:
    """Return the band that is equal to `mask`, or None if the mask is not a band."""
    match mask:
        case Full():
            return Band(None, None)
        case Causal(offset):
            return Band(None, offset)
        case Window(left, right, offset):
            return Band(None if left is None else offset - left, None if right is None else offset + right)
        case And(left, right):
            one, other = find_band(left), find_band(right)
            if one is None or other is None:
                return None
            firsts, lasts = ([x for x in side if x is not None] for side in zip(one, other, strict=True))
            return Band(max(firsts, default=None), min(lasts, default=None))
        case _:
            return None


def find_diagonals(mask: Mask, lengths: tuple[int, int], blocks: Blocks, at: np.ndarray) -> tuple[int, ...]:
    """List the diagonals of partially masked blocks that the kernel gets specialised code for.

    Args:
      lengths: `(T, S)`, with T of one shard.
      at: diagonal of each partially masked block: `j - i` of its first key and its first query.

    Returns:
      the distinct diagonals. Empty if the mask is not a band, a length is not a multiple of its block, or there are too
      many diagonals.
    """
    ragged = lengths[0] % blocks.q or lengths[1] % blocks.kv
    if find_band(mask) is None or ragged:
        return ()
    found = np.unique(at)
    # A block without parts needs the same code at every diagonal, so several would gain nothing.
    limit = _MAX_DIAGONALS if blocks.static_parts != (blocks.q, blocks.kv) else 1
    return tuple(found.tolist()) if len(found) <= limit else ()


_MAX_DIAGONALS = 4
"""Diagonals of masked blocks that a kernel has specialised code for, at most."""


def split_whole_block(blocks: Blocks, rows: int, *, masked: bool) -> tuple[BlockPart, ...]:
    """Split a block, with nothing skipped, into parts of `rows` queries."""
    return tuple(
        BlockPart(slice(row, row + rows), _list_spans(range(0, blocks.kv, blocks.compute), masked))
        for row in range(0, blocks.q, rows)
    )


def iter_parts(blocks: Blocks) -> Iterator[BlockPart]:
    """Yield the parts of a masked block that can be skipped individually, in the order of their flags."""
    q, kv = blocks.parts
    for row, start in itertools.product(range(0, blocks.q, q), range(0, blocks.kv, kv)):
        yield BlockPart(slice(row, row + q), _list_spans(range(start, start + kv, blocks.compute), masked=True))


def cut_block(blocks: Blocks, band: Band, diagonal: int) -> tuple[BlockPart, ...]:
    """List the visible parts of a block at a diagonal. Hidden parts are left out, fully visible ones are unmasked."""
    q, kv = blocks.static_parts
    step, found = min(kv, blocks.compute), []
    for row in range(0, blocks.q, q):
        keys: list[KeySpan] = []
        for start in range(0, blocks.kv, step):
            at = diagonal + start - row
            low, high = at - (q - 1), at + (step - 1)  # smallest and largest `j - i` of the part
            if (band.first is not None and high < band.first) or (band.last is not None and low > band.last):
                continue
            masked = (band.first is not None and low < band.first) or (band.last is not None and high > band.last)
            last = keys[-1] if keys else None
            if last and not (masked or last.masked) and last.size < blocks.compute:
                keys[-1] = last._replace(size=last.size + step)  # join adjacent fully visible runs
            else:
                keys.append(KeySpan(start, step, masked, at))
        if keys:
            found.append(BlockPart(slice(row, row + q), tuple(keys)))
    return tuple(found)


def compute_allowed_in_band(band: Band, keys: KeySpan, queries: int, difference: Any, diagonal: Any) -> Any:
    """Compute which positions of a tile a band allows; None if all are known to be allowed.

    Args:
      difference: index of the key minus index of the query, within the tile.
      diagonal: `j - i` of the first key and the first query.
    """
    found = None
    if band.first is not None and (keys.diagonal is None or keys.diagonal - (queries - 1) < band.first):
        found = difference >= band.first - diagonal
    if band.last is not None and (keys.diagonal is None or keys.diagonal + (keys.size - 1) > band.last):
        before = difference <= band.last - diagonal
        found = before if found is None else found & before
    return found


def _list_spans(starts: range, masked: bool) -> tuple[KeySpan, ...]:
    return tuple(KeySpan(start, starts.step, masked) for start in starts)


FIRST, LAST, COMPUTE, MASKED, PART = 1, 2, 4, 8, 16
"""Bits of a step's `flags`.

`FIRST` and `LAST` mark the first and the last step of a result block, `COMPUTE` a step that computes, and `MASKED` a
step that must apply the mask. The bits from `PART` on describe a masked block: either one bit per part that is not
completely hidden, or one bit per diagonal that the kernel has specialised code for (`Band`).
"""


_MAX_WIDE_LIST_BYTES = 2**17
"""Largest size in bytes up to which the lists of a phase stay int32; scalar memory has 1 MiB."""

Order = Literal["q", "kv"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Steps:
    """Lists of steps `[shards, b, n, L]`. `b` and `n` are 1 where all batch rows and heads share a list."""

    q: Any
    kv: Any
    head: Any  # query head in its group, for order `"kv"` with a mask per head; else None
    flags: Any  # `FIRST`, `LAST`, `COMPUTE`, `MASKED` and the bits from `PART` on
    place: Any  # index of the step's block in `stored`; None if the mask is a formula
    stored: Any  # mask blocks int8 `[X, block_q, block_kv]`, transposed for order `"kv"`
    total: Any = None  # number of steps, if known at run time only (`impls.splash_tpu.splash_packed`)


@functools.lru_cache(maxsize=64)
def build_static_steps(
    mask: Mask, shape: tuple[int, int], blocks: Blocks, order: Order, group: int, shards: int
) -> tuple[Steps, StepKinds]:
    """Build the steps for a static mask, as NumPy arrays.

    Args:
      shape: lengths `(T, S)`, over all shards.
      order: `"q"` if results are blocks of queries, `"kv"` if they are blocks of keys.
      group: query heads per key/value head; matters only for order `"kv"` with a mask per head.
      shards: number of equal shards of the queries, one list of steps each.
    """
    q_length, kv_length = shape
    local = q_length // shards
    found_of = [_classify_blocks(mask, part * local, local, kv_length, blocks) for part in range(shards)]
    kinds, left = (np.stack([found[number] for found in found_of]) for number in (0, 1))
    seen = np.any([found[2] for found in found_of], axis=0)  # [b, n, S]
    lists = [
        [_walk(kinds[part, b], order, group) for b in range(kinds.shape[1])] for part in range(shards)
    ]  # [shards][b]: [n, steps, 5]
    longest = max(len(steps) for part in lists for row in part for steps in row)
    table = np.stack([np.stack([np.stack([_pad_steps(s, longest) for s in row]) for row in part]) for part in lists])
    head, q, kv, flags, n = np.moveaxis(table, -1, 0)  # each [shards, b, heads, L]
    masked = flags & MASKED > 0
    shard, b = np.indices(q.shape)[:2]
    left = left[shard, b, n, q, kv]  # [shards, b, heads, L, parts]
    at = kv * blocks.kv - (q * blocks.q + shard * local)
    places = find_diagonals(mask, (local, kv_length), blocks, at[masked])
    part_bits = (at[..., None] == np.array(places)) if places else left
    flags = flags + masked * (part_bits @ (PART << np.arange(part_bits.shape[-1])))
    found = StepKinds(
        full=bool(((flags & COMPUTE > 0) & ~masked).any()),
        masked=bool(masked.any()),
        empty=bool((flags & COMPUTE == 0).any()),
        stored=bool(masked.any()) and not mask.is_computed,
        parts=bool((masked & ~left.all(axis=-1)).any()) and not places,
        dead=not seen.all(),
        diagonals=places,
    )
    place = stored = None
    if found.stored:
        place, stored = _store_mask_blocks(mask, (local, kv_length), blocks, q, kv, n, flags)
        stored = np.ascontiguousarray(stored.swapaxes(1, 2)) if order == "kv" else stored
    per_head = order == "kv" and kinds.shape[2] > 1
    return Steps(
        _to_int32(q), _to_int32(kv), _to_int32(head) if per_head else None, _to_int32(flags), place, stored
    ), found


@functools.lru_cache(maxsize=8)  # the phases of one kernel share it
def _classify_blocks(
    mask: Mask, start: int, q_length: int, kv_length: int, blocks: Blocks
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Classify the blocks of `q_length` queries from `start` on.

    Returns:
      `FULL`, `PARTIAL` or `EMPTY` for each block, `[b, n, q blocks, kv blocks]`.
      booleans `[b, n, q blocks, kv blocks, parts]`: parts that are not completely hidden.
      booleans `[b, n, S]`: keys that some query may attend to.
    """
    kinds, left, seen = [], [], []
    padded = round_up(kv_length, blocks.kv)
    q_part, kv_part = blocks.parts
    j = np.arange(kv_length, dtype=np.int32)[None, :]
    for row in range(start, start + q_length, blocks.q):
        i = np.arange(row, min(row + blocks.q, start + q_length), dtype=np.int32)[:, None]
        strip = np.asarray(mask.allowed(i, j), bool)
        leading = strip.shape[:2] if strip.ndim == 4 else (1, 1)
        strip = np.broadcast_to(strip, (*leading, len(i), kv_length))
        every = np.all(_split_blocks(np.all(strip, axis=-2), padded, blocks.kv), axis=-1)
        some = np.stack([strip[..., at : at + q_part, :].any(axis=-2) for at in range(0, blocks.q, q_part)], axis=2)
        seen.append(some.any(axis=2))
        parts = np.any(_split_blocks(_split_blocks(some, padded, blocks.kv), blocks.kv, kv_part), axis=-1)
        left.append(np.moveaxis(np.asarray(parts), 2, 3).reshape(*every.shape, -1))
        kinds.append(np.where(every, FULL, np.where(left[-1].any(axis=-1), PARTIAL, EMPTY)))
    return np.stack(kinds, axis=2), np.stack(left, axis=2), np.any(seen, axis=0)


def _split_blocks(x: Any, padded: int, block: int) -> np.ndarray:
    """Split booleans `[..., length]` into `[..., padded / block, block]`, False beyond the end."""
    x = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, padded - x.shape[-1])])
    return x.reshape(*x.shape[:-1], -1, block)


def _walk(kinds: np.ndarray, order: Order, group: int) -> list[np.ndarray]:
    """List the steps of `kinds [n, q, kv]`, `[L, 5]` each: head in its group, q block, kv block, flags, head."""
    if order == "q":
        return [_order_steps(kind[:, :, None], ("q", "kv", "head"), head) for head, kind in enumerate(kinds)]
    if len(kinds) == 1:
        return [_order_steps(kinds[0].T[:, None, :], ("kv", "head", "q"), 0)]
    grouped = kinds.reshape(-1, group, *kinds.shape[1:])
    return [
        _order_steps(heads.transpose(2, 0, 1), ("kv", "head", "q"), number * group)
        for number, heads in enumerate(grouped)
    ]


def _order_steps(kinds: np.ndarray, axes: tuple[str, str, str], first_head: int) -> np.ndarray:
    """Order the active blocks of `kinds` by `axes`, slowest axis first. The first axis is that of the result blocks."""
    visited = kinds != EMPTY
    visited[~visited.any(axis=(1, 2)), 0, 0] = True
    where = np.argwhere(visited)
    kind = kinds[tuple(where.T)]
    row = where[:, 0]
    flags = FIRST * np.r_[True, row[1:] != row[:-1]] + LAST * np.r_[row[1:] != row[:-1], True]
    flags = flags + COMPUTE * (kind != EMPTY) + MASKED * (kind == PARTIAL)
    at = dict(zip(axes, where.T, strict=True))
    # An idle step points to the blocks of the step before, so that nothing is fetched for it.
    other = "kv" if axes[0] == "q" else "q"
    at[other] = _hold_last_valid(at[other], kind != EMPTY)
    return np.stack([at["head"], at["q"], at["kv"], flags, at["head"] + first_head], axis=-1)


def _hold_last_valid(values: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """Replace each invalid value by the last valid value before it, or by the first valid value if there is none."""
    if not valid.any():
        return np.zeros_like(values)
    last = np.maximum.accumulate(np.where(valid, np.arange(len(values)), -1))
    return values[np.where(last < 0, np.argmax(valid), last)]


def _pad_steps(steps: np.ndarray, length: int) -> np.ndarray:
    """Pad `steps` to `length` with steps that compute and fetch nothing."""
    tail = np.repeat(steps[-1:], length - len(steps), axis=0)
    tail[:, 3] = 0
    return np.concatenate([steps, tail])


def _store_mask_blocks(
    mask: Mask, shape: tuple[int, int], blocks: Blocks, q: Any, kv: Any, head: Any, flags: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Store each distinct partial block once.

    Returns the index of each step's block, `[shards, b, n, L]`, and the blocks, int8 `[X, block_q, block_kv]`.
    """
    local, kv_length = shape
    known: dict[bytes, int] = {}
    found: list[np.ndarray] = []
    place = np.zeros(q.shape, np.int32)
    per_head = np.asarray(mask.allowed(np.zeros((1, 1), int), np.zeros((1, 1), int))).shape[1] > 1
    for part, b in np.ndindex(q.shape[:2]):
        for n in range(q.shape[2]):
            steps = np.flatnonzero(flags[part, b, n] & MASKED)
            current = np.zeros(q.shape[3], np.int32)
            for step in steps:
                i0, j0 = q[part, b, n, step] * blocks.q, kv[part, b, n, step] * blocks.kv
                i = part * local + np.arange(i0, min(i0 + blocks.q, local))[:, None]
                j = np.arange(j0, min(j0 + blocks.kv, kv_length))[None, :]
                allowed = np.asarray(mask.allowed(i, j))[b, head[part, b, n, step] if per_head else 0]
                block = np.zeros((blocks.q, blocks.kv), np.int8)
                block[: allowed.shape[0], : allowed.shape[1]] = allowed
                key = block.tobytes()
                if key not in known:
                    known[key] = len(found)
                    found.append(block)
                current[step] = known[key]
            place[part, b, n] = _hold_last_valid(current, (flags[part, b, n] & MASKED) > 0)
    return place, np.stack(found)


def _to_int32(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x, np.int32)


def downcast(steps: Steps) -> Steps:
    """Store long lists in the narrowest integers that hold them, since scalar memory is small.

    Short lists stay int32. Extracting a byte from a word takes more scalar instructions, for each array of the kernel,
    at this step and the next. An idle step of the forward kernel takes 330 cycles on v5e with int32 lists, and 392 with
    narrower ones.
    """
    lists = {name: getattr(steps, name) for name in ("q", "kv", "head", "flags", "place")}
    if sum(x.nbytes for x in lists.values() if isinstance(x, np.ndarray)) <= _MAX_WIDE_LIST_BYTES:
        return steps

    def narrow(x: Any) -> Any:
        if x is None or not isinstance(x, np.ndarray):
            return x
        fits = [t for t in (np.int8, np.int16) if x.size == 0 or x.max() <= np.iinfo(t).max]
        return x.astype(fits[0]) if fits else x

    return dataclasses.replace(steps, **{name: narrow(x) for name, x in lists.items()})


def build_dynamic_steps(
    allowed: Bool[Array, "b n T S"], blocks: Blocks, order: Order, group: int
) -> tuple[Steps, StepKinds]:
    """Build a step per pair of blocks for a traced mask `[b, n, T, S]`. Steps of empty pairs do and fetch nothing."""
    b, n, q_length, kv_length = allowed.shape
    padding = (
        (0, 0),
        (0, 0),
        (0, round_up(q_length, blocks.q) - q_length),
        (0, round_up(kv_length, blocks.kv) - kv_length),
    )
    cut = jnp.pad(allowed, padding).reshape(
        b, n, -(-q_length // blocks.q), blocks.q, -(-kv_length // blocks.kv), blocks.kv
    )
    cut = cut.transpose(0, 1, 2, 4, 3, 5)  # [b, n, q blocks, kv blocks, block_q, block_kv]
    some = cut.any(axis=(-2, -1))
    num_q, num_kv = some.shape[2:]
    place = jnp.arange(some.size, dtype=jnp.int32).reshape(some.shape)
    stored = cut.reshape(-1, blocks.q, blocks.kv).astype(jnp.int8)
    q = jnp.broadcast_to(jnp.arange(num_q, dtype=jnp.int32)[:, None], some.shape)
    kv = jnp.broadcast_to(jnp.arange(num_kv, dtype=jnp.int32), some.shape)
    head = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32)[:, None, None] % group, some.shape)
    lists: tuple[jax.Array, ...] = (q, kv, head, place, some)
    if order == "q":
        lists = tuple(x.reshape(b, n, -1) for x in lists)
        length, run = num_q * num_kv, num_kv
    else:
        shared = n == 1
        heads = (1, 1) if shared else (n // group, group)
        # [b, kv heads, kv blocks, group, q blocks], flattened from the third axis on
        lists = tuple(
            x.reshape(b, *heads, num_q, num_kv).transpose(0, 1, 4, 2, 3).reshape(b, heads[0], -1) for x in lists
        )
        length, run = num_kv * heads[1] * num_q, heads[1] * num_q
        stored = stored.swapaxes(1, 2)
    q, kv, head, place, some = lists
    number = jnp.arange(length, dtype=jnp.int32)
    flags = FIRST * (number % run == 0) + LAST * (number % run == run - 1) + (COMPUTE + MASKED) * some
    latest = jax.lax.cummax(jnp.where(some, number, 0), axis=2)
    held = [jnp.take_along_axis(x, latest, axis=2)[None] for x in (q, kv, place)]
    results = (q[None], held[1]) if order == "q" else (held[0], kv[None])
    per_head = order == "kv" and n > 1
    steps = Steps(
        q=results[0],
        kv=results[1],
        head=jnp.take_along_axis(head, latest, axis=2)[None] if per_head else None,
        flags=flags.astype(jnp.int32)[None],
        place=held[2],
        stored=stored,
    )
    return steps, StepKinds(full=False, masked=True, empty=True, stored=True, parts=False, dead=True)
