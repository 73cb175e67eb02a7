"""Bugs of further results: the largest logit of each head, and weights; `out` and the residuals are right.

Some are a step of a plain function, others one passage of the source of dot-product attention.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cases.case import Case
from cases.operand_registry import FURTHER_RESULTS
from conformance.mutation.kernels.triggers import Trigger, both, grouped, has, masked, sixteen_bits
from tests.bank import PlantedBug
from tests.planted.planting.further import Results, Rows, build, find_head_maximum
from tests.planted.planting.source_change import Change, build_changed

_QK_CLIP = "inferred from QK-clip (arXiv:2507.20534), which scales projections by the largest logit of each head"
_RETURNED = "inferred from layers that return their attention scores"
_bug = functools.partial(PlantedBug, family="further results")


def _any(case: Any) -> bool:
    return True


def _plant(
    name: str,
    make: Callable[[], Results],
    *,
    kind: str,
    shows: str,
    says: str,
    reference: str = _QK_CLIP,
    trigger: Trigger = _any,
) -> PlantedBug:
    """The bug of a kernel with a wrong step; each kernel that is built has steps of its own."""
    return _bug(
        name=name,
        kind=f"further_results.{kind}",
        reference=reference,
        shows=(shows,),
        build=lambda: build(name, make()),
        trigger=trigger,
        says=says,
    )


def _maximum(step: Callable[[Rows], Any]) -> Callable[[], Results]:
    return lambda: Results(head_max_logits=step)


def _weights(step: Callable[[Rows], Any]) -> Callable[[], Results]:
    return lambda: Results(weights=step)


def _change(name: str, before: str, after: str, *, kind: str, shows: str, says: str, **facts: Any) -> PlantedBug:
    """The bug of dot-product attention with one changed passage."""
    change = Change("attention", before, after)
    make = functools.partial(
        build_changed, "impls.dot_product", "build_implementation", name, change, further_results=FURTHER_RESULTS
    )
    return _bug(name=name, kind=f"further_results.{kind}", shows=(shows,), build=make, says=says, **facts)


def _running() -> Results:
    """Keep the maximum of all calls so far, by the number of heads."""
    kept: dict[int, np.ndarray] = {}

    def keep(top: Any) -> np.ndarray:
        found = np.maximum(np.asarray(top), kept.get(top.shape[-1], -np.inf)).astype(np.float32)
        kept[top.shape[-1]] = found
        return found

    def step(rows: Rows) -> Any:
        top = find_head_maximum(rows)
        return jax.pure_callback(keep, jax.ShapeDtypeStruct(top.shape, top.dtype), top, vmap_method="sequential")

    return Results(head_max_logits=step)


@jax.custom_batching.custom_vmap
def _over_calls(top: jax.Array) -> jax.Array:
    return top.max(axis=(0, 2))


@_over_calls.def_vmap
def _over_mapped_calls(size: int, mapped: list[bool], top: jax.Array) -> tuple[jax.Array, bool]:
    return top.max(axis=(0, 1, 3)), False


def _masked_maximum(rows: Rows, logits: Any) -> Any:
    return jnp.where(rows.allowed, logits, -jnp.inf).max(axis=(0, 2, 3))


def _swap_heads(rows: Rows) -> Any:
    """Order the heads as if those of a group were interleaved."""
    batch, heads, *pairs = rows.p.shape
    return rows.p.reshape(batch, heads // rows.group, rows.group, *pairs).swapaxes(1, 2).reshape(rows.p.shape)


def _several_rows(case: Case) -> bool:
    return case.batch > 1


BUGS: tuple[PlantedBug, ...] = (
    _plant(
        "head-maximum-of-all-calls",
        _running,
        kind="maximum.calls",
        shows="head_max_logits",
        says="The maximum is kept in a buffer that no call resets.",
        reference="inferred from Transformer Engine's `max_logit`, which a training step reads once",
    ),
    _plant(
        "head-maximum-from-zero",
        _maximum(lambda rows: jnp.maximum(find_head_maximum(rows), 0)),
        kind="maximum.start",
        shows="head_max_logits",
        says="The maximum begins at zero instead of minus infinity.",
    ),
    _plant(
        "head-maximum-over-mapped-calls",
        _maximum(lambda rows: _over_calls(rows.top)),
        kind="maximum.vmap",
        shows="head_max_logits",
        says="Under `vmap`, all calls get the maximum of all.",
    ),
    _plant(
        "head-maximum-before-soft-cap",
        _maximum(lambda rows: _masked_maximum(rows, rows.x)),
        kind="maximum.logits",
        shows="head_max_logits",
        says="The maximum is that of the logits before the soft cap.",
        trigger=has("soft_cap"),
    ),
    _plant(
        "head-maximum-over-hidden-pairs",
        _maximum(lambda rows: rows.z.max(axis=(0, 2, 3))),
        kind="maximum.mask",
        shows="head_max_logits",
        says="The maximum includes pairs that the mask hides.",
        trigger=masked,
    ),
    _plant(
        "head-maximum-of-magnitudes",
        _maximum(lambda rows: _masked_maximum(rows, jnp.abs(rows.z))),
        kind="maximum.logits",
        shows="head_max_logits",
        says="The maximum is that of the absolute values.",
    ),
    _plant(
        "head-maximum-in-the-operands-dtype",
        _maximum(lambda rows: find_head_maximum(rows).astype(rows.dtype).astype(jnp.float32)),
        kind="maximum.precision",
        shows="head_max_logits",
        says="The maximum is rounded to the operands' dtype.",
        trigger=sixteen_bits,
    ),
    _change(
        "head-maximum-of-the-first-row",
        '"head_max_logits": lambda: residuals["max_logits"].max(axis=(0, 2))',
        '"head_max_logits": lambda: residuals["max_logits"][0].max(axis=-1)',
        kind="maximum.rows",
        shows="head_max_logits",
        says="The maximum is that of the first batch row.",
        reference=_QK_CLIP,
        trigger=_several_rows,
    ),
    _plant(
        "head-maximum-with-the-sink",
        _maximum(lambda rows: jnp.maximum(find_head_maximum(rows), -jnp.inf if rows.sinks is None else rows.sinks)),
        kind="maximum.sink",
        shows="head_max_logits",
        says="The maximum is that of the pivots of the softmax, which include the sink.",
        trigger=has("sinks"),
    ),
    _plant(
        "weights-before-the-mask",
        _weights(lambda rows: jax.nn.softmax(rows.z, axis=-1)),
        kind="weights.mask",
        shows="weights",
        says="The weights are the softmax of logits that are not masked.",
        reference=_RETURNED,
        trigger=masked,
    ),
    _plant(
        "weights-not-normalised",
        _weights(lambda rows: rows.exponentials),
        kind="weights.sum",
        shows="weights",
        says="The weights are not divided by their sum.",
        reference=_RETURNED,
    ),
    _plant(
        "weights-without-the-sink",
        _weights(lambda rows: rows.p / jnp.maximum(rows.p.sum(axis=-1, keepdims=True), 1e-30)),
        kind="weights.sum",
        shows="weights",
        says="The weights of each row sum to 1 although a sink takes its share.",
        reference=_RETURNED,
        trigger=has("sinks"),
    ),
    _plant(
        "weights-with-heads-interleaved",
        _weights(_swap_heads),
        kind="weights.heads",
        shows="weights",
        says="The heads of the weights are in the wrong order.",
        reference=_RETURNED,
        trigger=both(grouped, lambda case: case.num_kv_heads > 1),
    ),
    _plant(
        "weights-after-dropout",
        _weights(lambda rows: rows.dropped),
        kind="weights.dropout",
        shows="weights",
        says="The weights after dropout are returned as those before it.",
        reference="inferred from PyTorch, whose `need_weights` returns weights after dropout",
        trigger=has("dropout"),
    ),
    _plant(
        "dropped-weights-without-the-factor",
        lambda: Results(dropped_weights=lambda rows: rows.p if rows.kept is None else jnp.where(rows.kept, rows.p, 0)),
        kind="weights.dropout",
        shows="dropped_weights",
        says="The kept weights are not divided by the share that is kept.",
        reference=_RETURNED,
        trigger=has("dropout"),
    ),
    _change(
        "weights-in-bf16",
        '"weights": lambda: _join_heads(weights)',
        '"weights": lambda: lax.reduce_precision(_join_heads(weights), 8, 7)',
        kind="weights.precision",
        shows="weights",
        says="The weights are rounded to bf16.",
        reference=_RETURNED,
    ),
)
