"""Bugs of kernels that take mask and score as functions: what they call these with, when, and what they forget."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from cases.case import Case
from conformance.mutation.kernels.triggers import Trigger, both, grouped, has, masked, one_query
from tests.bank import PlantedBug
from tests.planted.planting import flex
from tests.planted.planting.flex import BLOCK, FlexSteps

_FORWARD = "out logsumexp max_logits"


def _score(case: Case) -> bool:
    return case.score is not None


def _bent(case: Case) -> bool:
    """A score that is no sum."""
    return case.soft_cap is not None or case.score == "score-cap"


def _several_rows(case: Case) -> bool:
    return case.batch > 1


def _several_blocks(case: Case) -> bool:
    return case.q_length > BLOCK


def _bug(
    name: str,
    steps: FlexSteps,
    *,
    kind: str,
    reference: str,
    trigger: Trigger = _score,
    shows: str = _FORWARD,
) -> PlantedBug:
    return PlantedBug(
        name=name,
        family="functions",
        kind=kind,
        reference=reference,
        shows=tuple(shows.split()),
        build=lambda: flex.implementation(name, steps),
        trigger=trigger,
    )


def _turned(at: flex.Places, start: Any, call: flex.Call) -> flex.Places:
    return at._replace(i=at.j, j=at.i)


def _of_block(at: flex.Places, start: Any, call: flex.Call) -> flex.Places:
    return at._replace(i=at.i - start)


def _of_first_row(at: flex.Places, start: Any, call: flex.Call) -> flex.Places:
    return at._replace(b=jnp.zeros_like(at.b))


def _of_kv_head(at: flex.Places, start: Any, call: flex.Call) -> flex.Places:
    return at._replace(n=at.n // call.group)


def _of_group(at: flex.Places, start: Any, call: flex.Call) -> flex.Places:
    return at._replace(n=at.n % call.group)


def _from_the_end(at: flex.Places, start: Any, call: flex.Call) -> flex.Places:
    return at._replace(i=at.i + (call.kv_length - call.q_length))


def _from_the_end_in_decode(at: flex.Places, start: Any, call: flex.Call) -> flex.Places:
    return _from_the_end(at, start, call) if call.q_length == 1 else at


def _masked_first(hidden: float) -> Any:
    """The mask before the score: what is hidden gets a score too."""

    def masked(score: Any, products: Any, ok: Any) -> Any:
        return score(products if ok is None else jnp.where(ok, products, hidden))

    return masked


def _scaled_last(products: Any, at: flex.Places, call: flex.Call) -> Any:
    return call.scale * (products if call.score_mod is None else call.score_mod(products, *at))


def _in_sixteen_bits(products: Any, at: flex.Places, call: flex.Call) -> Any:
    return flex.scored(products.astype(jnp.bfloat16).astype(jnp.float32), at, call)


def _unless_unmasked(products: Any, at: flex.Places, call: flex.Call) -> Any:
    return call.scale * products if call.mask_mod is None else flex.scored(products, at, call)


BUGS: tuple[PlantedBug, ...] = (
    _bug(
        "score-of-the-kv-head",
        FlexSteps(score_places=_of_kv_head),
        kind="functions.head",
        reference="pytorch PR 131559 (functions get the query head, once heads are grouped)",
        trigger=both(_score, grouped),
    ),
    _bug(
        "score-of-the-head-in-its-group",
        FlexSteps(score_places=_of_group),
        kind="functions.head",
        reference="inferred from flash-attention PR 1937 (heads of a group packed along the queries)",
        trigger=both(_score, lambda case: case.num_kv_heads > 1),
    ),
    _bug(
        "score-of-query-and-key-swapped",
        FlexSteps(score_places=_turned),
        kind="functions.swapped",
        reference="inferred from pytorch PR 130076 (five arguments by place)",
    ),
    _bug(
        "score-of-places-within-the-block",
        FlexSteps(score_places=_of_block),
        kind="functions.block-relative",
        reference="inferred from attention-gym issue 189 (places of the memory instead of those of the sequence)",
        trigger=both(_score, _several_blocks),
    ),
    _bug(
        "score-of-hidden-logits",
        FlexSteps(masked=_masked_first(-1e30)),
        kind="functions.order",
        reference="inferred from tokamax PR 1121 (what is hidden is a number before the cap)",
        trigger=both(masked, _bent),
    ),
    _bug(
        "score-of-the-first-batch-row",
        FlexSteps(score_places=_of_first_row),
        kind="functions.batch-row",
        reference="inferred from attention-gym issue 189 (the batch row of another request)",
        trigger=both(lambda case: case.score == "score-rows", _several_rows),
    ),
    _bug(
        "mask-of-the-first-batch-row",
        FlexSteps(mask_places=_of_first_row),
        kind="functions.batch-row",
        reference="inferred from attention-gym issue 189, likewise",
        trigger=both(has("lengths"), _several_rows),
    ),
    _bug(
        "score-before-the-scale",
        FlexSteps(scored=_scaled_last),
        kind="functions.scale",
        reference="inferred from flash-attention PR 2402 (in which units the score comes)",
    ),
    _bug(
        "score-derivative-of-query-and-key-swapped",
        FlexSteps(slope_places=_turned),
        kind="functions.backward",
        reference="inferred from pytorch PR 130076, in the backward pass alone, whose arguments are written out anew",
        shows="dq dk",
        trigger=both(has("train"), _bent),
    ),
    _bug(
        "functions-of-a-moved-query-in-decode",
        FlexSteps(score_places=_from_the_end_in_decode, mask_places=_from_the_end_in_decode),
        kind="functions.offset",
        reference="inferred from gpt-fast issue 233 (the place of the one query in decode)",
        trigger=both(lambda case: case.score is not None or case.mask != "full", one_query),
    ),
    _bug(
        "score-of-rounded-logits",
        FlexSteps(scored=_in_sixteen_bits),
        kind="functions.precision",
        reference="inferred from pytorch PR 123902 (scores in the dtype of the operands)",
    ),
    _bug(
        "score-dropped-without-a-mask",
        FlexSteps(scored=_unless_unmasked),
        kind="functions.not-taken",
        reference="inferred from kernels with a path for calls that have no block mask",
        trigger=both(
            lambda case: case.score is not None or case.soft_cap is not None, lambda case: case.mask == "full"
        ),
    ),
)
