"""Bugs of masks and operands over stored sequences, beside causal masks and windows.

Those of `PAGED` are steps of a kernel over pages, those of `PACKED` of one over packed sequences
(`tests.planted.planting.masked`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from cases.case import Case
from conformance.mutation.kernels.triggers import Trigger
from impls.contract.implementation import Implementation
from tests.bank import PlantedBug
from tests.planted.planting import masked
from tests.planted.planting.masked import MaskSteps, Places

_FORWARD = "out logsumexp max_logits"


def _is_masked(case: Case) -> bool:
    return "_at-" in case.mask


def _bug(
    style: Callable[[MaskSteps, str], Implementation],
    name: str,
    steps: MaskSteps,
    *,
    reference: str = "inferred",
    kind: str = "mask",
    trigger: Trigger = _is_masked,
    shows: str = _FORWARD,
) -> PlantedBug:
    return PlantedBug(
        name=f"stored-{name}",
        family="paged" if style is masked.build_paged else "packed",
        kind=f"masks.{kind}",
        reference=reference,
        shows=tuple(shows.split()),
        build=functools.partial(style, steps, f"stored-{name}"),
        trigger=trigger,
    )


_paged = functools.partial(_bug, masked.build_paged)
_packed = functools.partial(_bug, masked.build_packed)


def _move(**changes: Callable[[Places], Any]) -> Callable[[Places], Places]:
    """Return a step that replaces places by what the functions compute from them."""

    def moved(at: Places) -> Places:
        return dataclasses.replace(at, **{name: change(at) for name, change in changes.items()})

    return moved


def _round_to_bf16(x: Any) -> Any:
    return x.astype(jnp.bfloat16).astype(jnp.int32)


_own = _move(position=lambda at: at.own)
_packed_row = _move(position=lambda at: at.row)
_in_bf16 = _move(position=lambda at: _round_to_bf16(at.position), key=lambda at: _round_to_bf16(at.key))
_kv_head = _move(head=lambda at: at.head // at.group)
_first_sequence = _move(sequence=lambda at: jnp.zeros_like(at.sequence))


def _has(field: str) -> Trigger:
    return lambda case: bool(getattr(case, field))


PAGED: tuple[PlantedBug, ...] = (
    _paged(
        "function-of-the-place-in-the-chunk",
        MaskSteps(mask_mod=_own),
        reference="lalamo#200, a band built on rows of the chunk; jax-ml/jax#24491",
    ),
    _paged("function-of-the-packed-row", MaskSteps(mask_mod=_packed_row)),
    _paged("function-of-the-first-sequence", MaskSteps(mask_mod=_first_sequence)),
    _paged("function-of-key-value-heads", MaskSteps(mask_mod=_kv_head)),
    _paged(
        "causal-beside-a-mask-that-is-not",
        MaskSteps(is_causal=lambda causal: True),
        reference="sgl-project/sglang#39593, keys past the causal tile of a custom mask",
    ),
    _paged("right-side-of-the-window-dropped", MaskSteps(sides=lambda sides: (sides[0], 0))),
    _paged("right-side-one-too-wide", MaskSteps(sides=lambda sides: (sides[0], sides[1] + 1))),
    _paged("window-of-the-place-in-the-chunk", MaskSteps(causal=_own)),
    _paged(
        "mask-of-the-place-in-the-chunk",
        MaskSteps(mask=_move(row=lambda at: at.own)),
        reference="flashinfer-ai/flashinfer#441, the mask of another request",
    ),
    _paged("mask-beyond-the-length", MaskSteps(mask=_move(key=lambda at: at.key + 1))),
    _paged(
        "tree-admits-siblings",
        MaskSteps(in_tree=lambda found, column, at: column <= at.own),
        kind="tree",
    ),
    _paged(
        "tree-not-read-below-the-tile",
        MaskSteps(in_tree=lambda found, column, at: found | (column < at.own // 8 * 8)),
        kind="tree",
        reference="PaddlePaddle/FastDeploy#3514: blocks below the diagonal of a tile were not masked",
    ),
    _paged(
        "tree-columns-from-the-first-key",
        MaskSteps(tree=_move(ends=lambda at: at.queries)),
        kind="tree",
        reference="sgl-project/sglang#40214, keys counted without the draft",
    ),
    _paged(
        "tree-hides-the-keys-before-the-draft",
        MaskSteps(in_tree=lambda found, column, at: found & (column >= 0)),
        kind="tree",
    ),
    _paged(
        "tree-hides-the-own-key", MaskSteps(in_tree=lambda found, column, at: found & (column != at.own)), kind="tree"
    ),
    _paged("slopes-of-the-place-in-the-chunk", MaskSteps(alibi=_own), kind="alibi", trigger=_has("alibi")),
    _paged("slopes-of-places-in-bf16", MaskSteps(alibi=_in_bf16), kind="alibi", trigger=_has("alibi")),
    _paged("slopes-of-key-value-heads", MaskSteps(alibi=_kv_head), kind="alibi", trigger=_has("alibi")),
    _paged("slopes-with-a-signed-distance", MaskSteps(distance=lambda x: x), kind="alibi", trigger=_has("alibi")),
    _paged("score-of-the-first-sequence", MaskSteps(score=_first_sequence), kind="score", trigger=_has("score")),
    _paged("score-of-the-place-in-the-chunk", MaskSteps(score=_own), kind="score", trigger=_has("score")),
    _paged(
        "score-after-the-soft-cap",
        MaskSteps(compose=lambda x, scaled, sloped, scored, capped: scored(capped(sloped(scaled(x))))),
        kind="score",
        trigger=_has("score"),
    ),
    _paged(
        "logit-scale-of-key-value-heads",
        MaskSteps(logit_scale=_kv_head),
        kind="logit scale",
        trigger=_has("logit_scale"),
    ),
    _paged(
        "logit-scale-on-the-slopes-too",
        MaskSteps(compose=lambda x, scaled, sloped, scored, capped: capped(scored(scaled(sloped(x))))),
        kind="logit scale",
        trigger=_has("logit_scale"),
    ),
)

PACKED: tuple[PlantedBug, ...] = (
    _packed("packed-function-of-the-packed-row", MaskSteps(mask_mod=_packed_row)),
    _packed(
        "packed-function-of-keys-in-memory",
        MaskSteps(mask_mod=_move(key=lambda at: jnp.arange(at.key.shape[-1]))),
        reference="rotary-embedding-torch: the row in the pack taken for the position",
    ),
    _packed(
        "packed-chunks-from-the-first-query",
        MaskSteps(mask_mod=_move(position=lambda at: at.own, key=lambda at: at.key - (at.ends - at.queries))),
        reference="vllm-project/vllm#16274, chunks of attention counted in another table",
    ),
    _packed("packed-parents-only", MaskSteps(ancestors=lambda found, column: found), kind="tree"),
    _packed("packed-parents-of-the-first-sequence", MaskSteps(tree=_move(row=lambda at: at.own)), kind="tree"),
    _packed(
        "packed-segments-of-keys-by-queries",
        MaskSteps(segments=_move(key=lambda at: at.key + 1)),
        kind="segments",
        trigger=_has("segments"),
    ),
    _packed(
        "packed-segments-of-the-first-sequence",
        MaskSteps(segments=_move(row=lambda at: at.own)),
        kind="segments",
        trigger=_has("segments"),
    ),
    _packed(
        "packed-segments-in-8-bits",
        MaskSteps(ids=lambda ids: ids.astype(jnp.int8)),
        kind="segments",
        trigger=_has("segments"),
    ),
    _packed("packed-slopes-of-the-packed-row", MaskSteps(alibi=_packed_row), kind="alibi", trigger=_has("alibi")),
    _packed(
        "packed-score-twice",
        MaskSteps(compose=lambda x, a, b, scored, capped: capped(scored(scored(b(a(x)))))),
        kind="score",
        trigger=_has("score"),
    ),
    _packed("packed-score-with-key-value-heads", MaskSteps(score=_kv_head), kind="score", trigger=_has("score")),
    _packed(
        "packed-logit-scale-dropped-in-the-gradient",
        MaskSteps(
            compose=lambda x, scaled, sloped, scored, capped: capped(
                scored(sloped(x + jax.lax.stop_gradient(scaled(x) - x)))
            )
        ),
        kind="logit scale",
        trigger=_has("logit_scale"),
        shows="dq dk dlogit_scale",
    ),
)
BUGS: tuple[PlantedBug, ...] = (*PAGED, *PACKED)
