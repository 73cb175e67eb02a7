"""Split operands into blocks, and compute the logits of one pair of blocks for both passes.

    (1)  x_ij = score_mod(scale <q_i, k_j> + bias_ij - alibi_slope |i + S - T - j|, b, n, i, j)
    (2)  z_ij = soft_cap tanh(x_ij / soft_cap)
    (3)  z_ij = -inf, where i may not attend to j

Blocked operands carry the block index first, so that one block is one contiguous slice: q is
`[q blocks, B, K, G, block_q, H]`, k `[kv blocks, B, K, block_kv, H]`. Query head `n = k * G + g` reads key/value
head `k`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int, Int32, Shaped, UInt32

from impls.block_arithmetic import multiply, take_block
from impls.block_flash.block_schedule import BlockFlashPlan, FlashSizes, PairIndices, evaluate_mask
from impls.captured_arrays import Captured, CapturedGradients, join_function, keep_gradients
from impls.dropout_bits import DropoutWords, compute_keep_factor, draw_key_words, draw_query_words, find_kept

Result = TypeVar("Result")


class Operands(NamedTuple):
    """Array operands of an attention call, in the shapes of the contract (docs/contract.md, section 1)."""

    q: Float[Array, "B T N H"]
    k: Float[Array, "B S K H"]
    v: Float[Array, "B S K V"]
    bias: Float[Array, "#B #N #T #S"] | None
    alibi_slopes: Float[Array, " N"] | None
    sinks: Float[Array, " N"] | None
    segment_ids: tuple[Int[Array, "B T"], Int[Array, "B S"]] | None
    selected: Bool[Array, "#B #N T S"] | None
    dropout_key: UInt32[Array, " 2"] | None = None
    captured: Captured | CapturedGradients = ()  # the arrays that `score_mod` captures, or their gradients


class Blocks(NamedTuple):
    """Operands split into blocks; the module docstring has the layout."""

    q: Float[Array, "q_blocks B K G block_q H"]
    k: Float[Array, "kv_blocks B K block_kv H"]
    v: Float[Array, "kv_blocks B K block_kv V"]
    bias: Float[Array, "b k g t s"] | None  # padded to whole blocks by `pad_pairs`
    alibi_slopes: Float32[Array, "1 K G 1 1"] | None
    q_ids: Int[Array, "q_blocks B block_q"] | None
    kv_ids: Int[Array, "kv_blocks B block_kv"] | None
    selected: Bool[Array, "b k g t s"] | None  # padded to whole blocks by `pad_pairs`
    q_words: DropoutWords | None  # `[q_blocks, B, K, G, block_q]`
    kv_words: DropoutWords | None  # `[kv_blocks, block_kv]`
    captured: Captured


class Pair(NamedTuple):
    """One block of queries and one of keys, with their logits and mask."""

    q: Float[Array, "B K G block_q H"]
    k: Float[Array, "B K block_kv H"]
    v: Float[Array, "B K block_kv V"]
    allowed: Bool[Array, "#B #K #G block_q block_kv"] | None  # None if all pairs are allowed
    logits: Float32[Array, "B K G block_q block_kv"]  # -inf where not allowed
    # From the gradient of the logits z to that of x and those of the arrays that `score_mod` captures. None if there is
    # neither a soft cap nor a score.
    pull_back: Callable[[jax.Array], tuple[jax.Array, CapturedGradients]] | None
    # What dropout multiplies a weight by: 0, or 1 / (1 - rate). None without dropout.
    keep: Float32[Array, "B K G block_q block_kv"] | None = None


def cut_operands(plan: BlockFlashPlan, operands: Operands) -> Blocks:
    """Split the operands into blocks, padding with zeros."""
    q_ids, kv_ids = (None, None) if operands.segment_ids is None else operands.segment_ids
    slopes = operands.alibi_slopes
    q_words = kv_words = None
    if operands.dropout_key is not None:
        batch = operands.q.shape[0]
        q_words = draw_query_words(operands.dropout_key, batch, plan.num_q_heads, plan.q_length)
        q_words = jax.tree.map(functools.partial(cut_rows, plan), q_words)
        kv_words = draw_key_words(operands.dropout_key, plan.kv_length)
        kv_words = jax.tree.map(lambda x: _cut_axis(x, 0, plan.block_kv), kv_words)
    return Blocks(
        q=cut_queries(plan, operands.q),
        k=cut_keys(plan, operands.k),
        v=cut_keys(plan, operands.v),
        bias=None if operands.bias is None else pad_pairs(plan, operands.bias),
        alibi_slopes=None if slopes is None else slopes.astype(jnp.float32).reshape(1, plan.num_kv_heads, -1, 1, 1),
        q_ids=None if q_ids is None else _cut_axis(q_ids, 1, plan.block_q),
        kv_ids=None if kv_ids is None else _cut_axis(kv_ids, 1, plan.block_kv),
        selected=None if operands.selected is None else pad_pairs(plan, operands.selected),
        q_words=q_words,
        kv_words=kv_words,
        captured=tuple(x for x in operands.captured if x is not None),
    )


def cut_queries(plan: FlashSizes, x: Shaped[Array, "B T N D"]) -> Shaped[Array, "q_blocks B K G block_q D"]:
    """Split queries `[B, T, N, D]` into `[q blocks, B, K, G, block_q, D]`."""
    x = x.reshape(*x.shape[:2], plan.num_kv_heads, -1, x.shape[3])
    return _cut_axis(x, 1, plan.block_q).transpose(0, 1, 3, 4, 2, 5)


def join_queries(plan: FlashSizes, x: Shaped[Array, "q_blocks B K G block_q D"]) -> Shaped[Array, "B T N D"]:
    """Join blocks of queries to `[B, T, N, D]`, without the padding: the inverse of `cut_queries`."""
    x = x.transpose(1, 0, 4, 2, 3, 5)  # [B, q blocks, block_q, K, G, D]
    return x.reshape(x.shape[0], -1, plan.num_q_heads, x.shape[5])[:, : plan.q_length]


def cut_rows(plan: FlashSizes, x: Shaped[Array, "B N T"]) -> Shaped[Array, "q_blocks B K G block_q"]:
    """Split one value per query `[B, N, T]` into `[q blocks, B, K, G, block_q]`."""
    return _cut_axis(x.reshape(x.shape[0], plan.num_kv_heads, -1, x.shape[2]), 3, plan.block_q)


def join_rows(plan: FlashSizes, x: Shaped[Array, "q_blocks B K G block_q"]) -> Shaped[Array, "B N T"]:
    """Join blocks of one value per query to `[B, N, T]`, without the padding: the inverse of `cut_rows`."""
    x = jnp.moveaxis(x, 0, 3)  # [B, K, G, q blocks, block_q]
    return x.reshape(x.shape[0], plan.num_q_heads, -1)[..., : plan.q_length]


def cut_keys(plan: FlashSizes, x: Shaped[Array, "B S K D"]) -> Shaped[Array, "kv_blocks B K block_kv D"]:
    """Split keys or values `[B, S, K, D]` into `[kv blocks, B, K, block_kv, D]`."""
    return _cut_axis(x, 1, plan.block_kv).transpose(0, 1, 3, 2, 4)


def join_keys(plan: FlashSizes, x: Shaped[Array, "kv_blocks B K block_kv D"]) -> Shaped[Array, "B S K D"]:
    """Join blocks of keys or values to `[B, S, K, D]`, without the padding: the inverse of `cut_keys`."""
    x = x.transpose(1, 0, 3, 2, 4)  # [B, kv blocks, block_kv, K, D]
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, : plan.kv_length]


def pad_pairs(plan: BlockFlashPlan, bias: Shaped[Array, "b n t s"]) -> Shaped[Array, "b k g padded_t padded_s"]:
    """Pad bias or booleans `[b, n, t, s]` to whole blocks `[b, k, g, t, s]`. Axes of size 1 stay as they are."""
    q_padding = plan.num_q_blocks * plan.block_q - plan.q_length if bias.shape[2] > 1 else 0
    kv_padding = plan.num_kv_blocks * plan.block_kv - plan.kv_length if bias.shape[3] > 1 else 0
    if q_padding or kv_padding:
        bias = jnp.pad(bias, ((0, 0), (0, 0), (0, q_padding), (0, kv_padding)))
    return split_heads(plan, bias)


def split_heads(plan: BlockFlashPlan, x: Shaped[Array, "b n *rest"]) -> Shaped[Array, "b k g *rest"]:
    """Split the axis of query heads into key/value heads and groups: `[b, n, ...]` to `[b, k, g, ...]`."""
    return x[:, :, None] if x.shape[1] == 1 else x.reshape(x.shape[0], plan.num_kv_heads, -1, *x.shape[2:])


def locate_pair(
    plan: BlockFlashPlan, bias: jax.Array, pair: PairIndices
) -> tuple[tuple[jax.Array | int, ...], tuple[int, ...]]:
    """Find start and size of the slice of the padded bias that belongs to a pair of blocks."""
    zero = jnp.uint32(0)
    row, rows = (pair.q * plan.block_q, plan.block_q) if bias.shape[3] > 1 else (zero, 1)
    column, columns = (pair.kv * plan.block_kv, plan.block_kv) if bias.shape[4] > 1 else (zero, 1)
    return (zero, zero, zero, row, column), (*bias.shape[:3], rows, columns)


def compute_pair(plan: BlockFlashPlan, blocks: Blocks, pair: PairIndices) -> Pair:
    """Compute the logits of one pair of blocks; `pair` is an entry of the schedule."""
    q, k, v = take_block(blocks.q, pair.q), take_block(blocks.k, pair.kv), take_block(blocks.v, pair.kv)
    bias = None
    if blocks.bias is not None:
        bias = lax.dynamic_slice(blocks.bias, *locate_pair(plan, blocks.bias, pair))
    penalty = None
    if blocks.alibi_slopes is not None:
        i, j = _compute_positions(plan, pair)
        distance = jnp.abs(i + (plan.kv_length - plan.q_length) - j).astype(jnp.float32)
        penalty = blocks.alibi_slopes * distance
    score = None
    if plan.score_mod is not None:
        i, j = _compute_positions(plan, pair)
        b = jnp.arange(q.shape[0], dtype=jnp.int32).reshape(-1, 1, 1, 1, 1)
        n = jnp.arange(plan.num_q_heads, dtype=jnp.int32).reshape(plan.num_kv_heads, -1, 1, 1)

        def score(x: jax.Array, captured: Captured) -> jax.Array:
            changed: jax.Array = join_function(plan.score_mod, captured)(x, b, n, i, j)
            return changed

    allowed = _compute_allowed(plan, blocks, pair)
    found = compute_pair_logits(plan, q, k, v, allowed, bias, penalty, score, blocks.captured)
    return found._replace(keep=_compute_keep(plan, blocks, pair))


def compute_pair_logits(
    plan: FlashSizes,
    q: Float[Array, "B K G block_q H"],
    k: Float[Array, "B K block_kv H"],
    v: Float[Array, "B K block_kv V"],
    allowed: Bool[Array, "#B #K #G block_q block_kv"] | None,
    bias: Float[Array, "#B #K #G #block_q #block_kv"] | None = None,
    penalty: Float32[Array, "1 K G block_q block_kv"] | None = None,
    score: Callable[[jax.Array, Captured], jax.Array] | None = None,
    captured: Captured = (),
) -> Pair:
    """Compute the logits of a pair of blocks: add the bias, subtract the ALiBi `penalty`, and then apply `score`.

    `score` takes the logits and the arrays `captured`.
    """
    if allowed is not None:
        # Keys and values that no query attends to may be NaN, and 0 * NaN is not 0.
        seen = allowed.any(axis=(2, 3))[..., None]  # [b, k, block_kv, 1]
        k, v = (jnp.where(seen, x, jnp.zeros((), x.dtype)) for x in (k, v))
    logits = multiply("bkgth,bksh->bkgts", q, k) * plan.scale  # the scaled logits x, equation (1)
    if bias is not None:
        logits = logits + bias.astype(jnp.float32)
    if penalty is not None:
        logits = logits - penalty
    if allowed is not None and (score is not None or plan.soft_cap is not None):
        # A bias behind the mask may be NaN. The derivative there would be NaN, and 0 * NaN would reach a gradient.
        logits = jnp.where(allowed, logits, 0.0)
    pull_back_score = slope = None
    if score is not None:
        logits, pull_back_score = jax.vjp(score, logits, captured)
    if plan.soft_cap is not None:
        tanh = jnp.tanh(logits / plan.soft_cap)
        logits, slope = plan.soft_cap * tanh, 1 - tanh * tanh  # (2)

    def pull_back(dz: jax.Array) -> tuple[jax.Array, CapturedGradients]:
        capped = dz if slope is None else dz * slope
        if pull_back_score is None:
            return capped, ()
        dx, found = pull_back_score(capped)
        return dx, keep_gradients(found)

    if allowed is not None:
        logits = jnp.where(allowed, logits, -jnp.inf)  # mask, equation (3)
    return Pair(q, k, v, allowed, logits, None if slope is None and score is None else pull_back)


def compute_unless_empty(
    plan: BlockFlashPlan, blocks: Blocks, pair: PairIndices, compute: Callable[[], Result], empty: Result
) -> Result:
    """Call `compute`, or return `empty` if the selection hides the pair; `vmap` over selections runs both branches."""
    if blocks.selected is None:
        return compute()
    some = lax.dynamic_slice(blocks.selected, *locate_pair(plan, blocks.selected, pair)).any()
    found: Result = lax.cond(some, compute, lambda: empty)
    return found


def _compute_positions(
    plan: BlockFlashPlan, pair: PairIndices
) -> tuple[Int32[Array, "1 1 block_q 1"], Int32[Array, "1 1 1 block_kv"]]:
    """Compute the sequence indices of a pair's queries `[1, 1, block_q, 1]` and keys `[1, 1, 1, block_kv]`."""
    i = pair.q.astype(jnp.int32) * plan.block_q + jnp.arange(plan.block_q, dtype=jnp.int32).reshape(1, 1, -1, 1)
    j = pair.kv.astype(jnp.int32) * plan.block_kv + jnp.arange(plan.block_kv, dtype=jnp.int32).reshape(1, 1, 1, -1)
    return i, j


def _compute_keep(
    plan: BlockFlashPlan, blocks: Blocks, pair: PairIndices
) -> Float32[Array, "B K G block_q block_kv"] | None:
    """Compute what dropout multiplies the weights of a pair by; None without dropout."""
    if plan.dropout_rate is None or blocks.q_words is None or blocks.kv_words is None:
        return None
    q_words = jax.tree.map(lambda x: take_block(x, pair.q)[..., None], blocks.q_words)
    kv_words = jax.tree.map(lambda x: take_block(x, pair.kv), blocks.kv_words)
    return jnp.where(find_kept(plan.dropout_rate, q_words, kv_words), compute_keep_factor(plan.dropout_rate), 0.0)


def _compute_allowed(
    plan: BlockFlashPlan, blocks: Blocks, pair: PairIndices
) -> Bool[Array, "b k g block_q block_kv"] | None:
    """Compute which positions of a pair may attend, `[b, k, g, block_q, block_kv]`; None if all may."""
    schedule = plan.schedule
    if not schedule.masked:
        return None
    i, j = _compute_positions(plan, pair)
    stored = schedule.stored
    allowed = evaluate_mask(plan.mask, i, j) if stored is None else take_block(jnp.asarray(stored), pair.stored)
    if plan.padded:
        allowed = allowed & (i < plan.q_length) & (j < plan.kv_length)
    if blocks.q_ids is not None and blocks.kv_ids is not None:
        q_ids, kv_ids = take_block(blocks.q_ids, pair.q), take_block(blocks.kv_ids, pair.kv)
        allowed = allowed & (q_ids[:, None, :, None] == kv_ids[:, None, None, :])
    allowed = split_heads(plan, allowed)
    if blocks.selected is not None:
        allowed = allowed & lax.dynamic_slice(blocks.selected, *locate_pair(plan, blocks.selected, pair))
    return allowed


def _cut_axis(x: jax.Array, axis: int, block: int) -> jax.Array:
    """Split `axis` into blocks and move the block index to the front: `[blocks, ..., block, ...]`."""
    if padding := -x.shape[axis] % block:
        x = jnp.pad(x, [(0, padding if a == axis else 0) for a in range(x.ndim)])
    x = x.reshape(*x.shape[:axis], -1, block, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis, 0)
