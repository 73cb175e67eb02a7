"""Bugs of what the backward recomputes: logits, masks, probabilities, and the soft cap's derivative."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from cases.case import Case
from conformance.mutation.kernels.block_triggers import (
    by_batch,
    by_head,
    empty_rows,
    key_tail,
    masked,
    query_tail,
    train,
    train_blocks,
)
from conformance.mutation.kernels.blockwise import planted
from conformance.mutation.kernels.layout import Call
from conformance.mutation.kernels.steps import Block, finite_or_zero, logits
from conformance.mutation.planted_bug import PlantedBug

_bug = functools.partial(planted, family="backward")
_Z = tuple[jax.Array, jax.Array | float]
_DQ_DK = ("dq", "dk")
_ALL = ("dq", "dk", "dv")


def _with_cap(case: Case) -> bool:
    return train(case) and case.soft_cap is not None


def _changed(**fields: Any) -> functools.partial[_Z]:
    """Logits with some operand left out of the call."""
    return functools.partial(_logits_with, fields=fields)


def _logits_with(products: jax.Array, block: Block, fields: dict[str, Any]) -> _Z:
    names = {field.name for field in dataclasses.fields(Call)}
    call = dataclasses.replace(block.call, **{name: x for name, x in fields.items() if name in names})
    rest = {name: x for name, x in fields.items() if name not in names}
    return logits(products, dataclasses.replace(block, call=call, **rest))


def _slope_of_uncapped(products: jax.Array, block: Block) -> _Z:
    """`1 - tanh(x)^2`, without the division by the cap."""
    z, slope = logits(products, block)
    if block.call.soft_cap is None:
        return z, slope
    x, _ = _logits_with(products, block, {"soft_cap": None})
    return z, 1 - jnp.tanh(x) ** 2


def _slope_of_masked(dz: jax.Array, slope: jax.Array, z: jax.Array, block: Block) -> jax.Array:
    """`1 - (z / cap)^2`, where `z` is -inf behind the mask."""
    if block.call.soft_cap is None:
        return jnp.where(block.visible, dz, 0)
    return dz * (1 - (z / block.call.soft_cap) ** 2)


def _causal(block: Block) -> jax.Array:
    return block.columns <= block.rows


def _end_aligned(block: Block) -> jax.Array:
    return block.columns <= block.rows + block.call.kv_length - block.call.q_length


def _is_wide(block: Block) -> bool:
    """Whether there are more keys than queries."""
    return block.call.q_length < block.call.kv_length


def _local_probabilities(z: jax.Array, lse: jax.Array, block: Block) -> jax.Array:
    top = finite_or_zero(z.max(axis=-1, keepdims=True))
    e = jnp.exp(z - top)
    total = e.sum(axis=-1, keepdims=True)
    return e / jnp.where(total == 0, 1, total)


BUGS: tuple[PlantedBug, ...] = (
    _bug(
        name="bwd-probabilities-of-one-block",
        says="The backward pass normalises the probabilities within each key block, not by the saved logsumexp.",
        kind="ring.bwd-local-lse",
        reference="tt-metal PR 53216",
        shows=_ALL,
        trigger=train_blocks,
        probabilities=_local_probabilities,
    ),
    _bug(
        name="bwd-probabilities-unguarded",
        says="The backward pass computes -inf minus -inf in rows without keys or in padding, which gives NaN.",
        kind="bwd.mask-s-vs-p",
        reference="tokamax ddce6dc",
        shows=_ALL,
        trigger=lambda case: train(case) and (empty_rows(case) or query_tail(case)),
        probabilities=lambda z, lse, block: jnp.exp(z - lse[..., None]),
    ),
    _bug(
        name="bwd-probabilities-base-2",
        says="The backward pass recomputes the probabilities with powers of 2, not of e.",
        kind="lse.base2-into-merge",
        reference="inferred from sglang#40903",
        shows=_ALL,
        trigger=train,
        probabilities=lambda z, lse, block: jnp.exp2(z - finite_or_zero(lse)[..., None]),
    ),
    _bug(
        name="bwd-recomputes-without-cap",
        says="The backward pass recomputes the logits without the soft cap and leaves out its derivative.",
        kind="I.cap-no-bwd-recompute",
        reference="inferred from flash-attn PR 1033",
        shows=_ALL,
        trigger=_with_cap,
        logits_again=_changed(soft_cap=None),
    ),
    _bug(
        name="bwd-recomputes-without-bias",
        says="The backward pass recomputes the logits without the bias.",
        kind="dropout.bwd-wrong-p",
        reference="inferred from aws-neuron nki-samples PR 81",
        shows=(*_ALL, "dbias"),
        trigger=lambda case: train(case) and case.bias is not None,
        logits_again=_changed(bias=None),
    ),
    _bug(
        name="bwd-recomputes-without-mask",
        says="The backward pass recomputes the probabilities without mask and segment ids.",
        kind="bwd.noncausal-masked",
        reference="inferred from triton#5660",
        shows=_ALL,
        trigger=lambda case: train(case) and masked(case),
        visible_again=lambda block: (block.rows < block.call.q_length) & (block.columns < block.call.kv_length),
    ),
    _bug(
        name="bwd-always-causal",
        says="A backward pass over key blocks adds a causal mask to whatever mask the call has.",
        kind="bwd.noncausal-masked",
        reference="triton#5660",
        shows=_ALL,
        trigger=lambda case: train(case) and case.mask == "full",
        visible_again=lambda block: block.visible & _causal(block),
    ),
    _bug(
        name="bwd-causal-aligned-at-start",
        says="With more keys than queries, the backward pass also hides every key past the query index.",
        kind="bwd.causal-square-align",
        reference="ffpa-attn PR 300",
        shows=_ALL,
        trigger=lambda case: train(case) and "causal-o" in case.mask and case.q_length < case.kv_length,
        visible_again=lambda block: block.visible & (_causal(block) | (not _is_wide(block))),
    ),
    _bug(
        name="bwd-causal-aligned-at-end",
        says="With more queries than keys, the backward pass also aligns a causal mask to the last key.",
        kind="causal.bottom-right",
        reference="inferred from mlx#2835",
        shows=_ALL,
        trigger=lambda case: train(case) and case.q_length > case.kv_length,
        visible_again=lambda block: (
            block.visible & (_end_aligned(block) | (block.call.q_length <= block.call.kv_length))
        ),
    ),
    _bug(
        name="bwd-mask-of-first-batch-row",
        says="The backward pass uses mask and segment ids of the first batch row for all batch rows.",
        kind="I.batch0-mask",
        reference="inferred from ejkernel 3ed3b1f",
        shows=_ALL,
        trigger=lambda case: train(case) and case.batch > 1 and (by_batch(case) or case.segments is not None),
        visible_again=lambda block: jnp.broadcast_to(block.visible[:1], block.visible.shape),
    ),
    _bug(
        name="bwd-mask-of-first-head",
        says="The backward pass uses the mask of the first head for all heads.",
        kind="I.head0-mask",
        reference="inferred from torch-xpu-ops#5090",
        shows=_ALL,
        trigger=lambda case: train(case) and by_head(case),
        visible_again=lambda block: jnp.broadcast_to(block.visible[:, :1, :1], block.visible.shape),
    ),
    _bug(
        name="bwd-cap-derivative-missing",
        says="A backward pass over key blocks leaves out the derivative of the soft cap.",
        kind="cap.bwd-missing",
        reference="flash-attn PR 1033",
        shows=_DQ_DK,
        trigger=_with_cap,
        dx=lambda dz, slope, z, block: jnp.where(block.visible, dz, 0),
    ),
    _bug(
        name="bwd-cap-derivative-of-uncapped",
        says="The derivative of the soft cap is 1 - tanh(x)^2, not 1 - tanh(x / cap)^2.",
        kind="cap.bwd-sign",
        reference="inferred from flash-attn PR 1033",
        shows=_DQ_DK,
        trigger=_with_cap,
        logits_again=_slope_of_uncapped,
    ),
    _bug(
        name="bwd-cap-derivative-after-mask",
        says="The derivative of the soft cap is taken at masked logits of -inf, which gives NaN.",
        kind="cap.dtanh-after-mask",
        reference="tokamax PR 1121",
        shows=_DQ_DK,
        trigger=lambda case: _with_cap(case) and (masked(case) or key_tail(case)),
        dx=_slope_of_masked,
    ),
    _bug(
        name="bwd-keys-behind-mask-read",
        says="The backward pass reads keys that no query may see, and NaN there reaches dq.",
        kind="softmax.where-nan-grad",
        reference="inferred from jax 11cf85deb0",
        shows=("dq",),
        trigger=lambda case: train(case) and ("lengths" in case.mask or "dense" in case.mask),
        hide_k_again=lambda k, seen: k,
    ),
    _bug(
        name="bwd-values-behind-mask-read",
        says="The backward pass reads values that no query may see, and NaN there reaches dq and dk.",
        kind="nan.masked-v",
        reference="inferred from jax 11cf85deb0",
        shows=_DQ_DK,
        trigger=lambda case: train(case) and ("lengths" in case.mask or "dense" in case.mask),
        hide_v_again=lambda v, seen: v,
        dx=lambda dz, slope, z, block: dz * slope,
    ),
)
"""Bugs of what the backward recomputes."""
