"""Bugs that only a paged kernel can have that copies scales beside its pages, each one passage of ours changed."""

from __future__ import annotations

import functools

from cases.case import Case
from tests.bank import PlantedBug
from tests.planted.planting import stored_bug
from tests.planted.planting.source_change import Change, build_changed


def _scaled(case: Case) -> bool:
    return case.kv_cache is not None


def _several_heads(case: Case) -> bool:
    return _scaled(case) and case.num_kv_heads > 1


def _several_blocks(case: Case) -> bool:
    return _scaled(case) and max(case.kv_lengths) > 48


def _capped(case: Case) -> bool:
    return _scaled(case) and case.soft_cap is not None


_build = functools.partial(build_changed, "impls.paged", "build_quantized_tpu_implementation")
_bug = functools.partial(
    stored_bug.bug, family="paged tpu scales", build=_build, shows="out logsumexp max_logits", trigger=_scaled
)

BUGS: tuple[PlantedBug, ...] = (
    _bug(
        "paged-tpu-scales-not-awaited",
        Change(
            "page_copies",
            "zip(cache.pages, cache.held, strict=True)):\n            there",
            "zip(cache.pages[:2], cache.held[:2], strict=True)):\n            there",
        ),
        kind="pipeline.missing-wait",
        reference="inferred: one wait for the bytes of keys and one for those of values, and scales forgotten",
        shows="races out logsumexp max_logits forward",
        trigger=_several_blocks,
    ),
    _bug(
        "paged-tpu-scales-of-the-page-before",
        Change("paged_tpu", "cache.held[2][buffer].reshape", "jnp.roll(cache.held[2][buffer], 1, axis=0).reshape"),
        kind="scales.place",
        reference="inferred from kernels that copy scales by a table of their own",
        trigger=_several_blocks,
    ),
    _bug(
        "paged-tpu-scales-of-the-other-buffer",
        Change("paged_tpu", "cache.held[2][buffer].reshape", "cache.held[2][1 - buffer].reshape"),
        kind="pipeline.parity",
        reference="inferred from jax ragged_paged_attention (buffer index carried between steps)",
        shows="races out logsumexp max_logits",
        trigger=_several_blocks,
    ),
    _bug(
        "paged-tpu-scales-of-the-first-head-for-all",
        Change(
            "paged_tpu",
            "of_keys=lambda h, x: x * heads.scales[pl.ds(h, 1), :]",
            "of_keys=lambda h, x: x * heads.scales[:1, :]",
        ),
        kind="scales.heads",
        reference="inferred from kernels with one scale of a token",
        trigger=_several_heads,
    ),
    _bug(
        "paged-tpu-values-by-the-scales-of-keys",
        Change("paged_tpu", "heads.scales[pl.ds(total + h, 1), :]", "heads.scales[pl.ds(h, 1), :]"),
        kind="scales.side",
        reference="inferred: both lie in one row, and the offset of the second is forgotten",
        shows="out",
    ),
    _bug(
        "paged-tpu-sum-of-scaled-probabilities",
        Change("paged_tpu", "sum_by_lane(weights), acc", "_sum_by_lane(units.of_values(this, weights)), acc"),
        kind="scales.order",
        reference="inferred: the scale of a value multiplies its probability before these are added up",
        shows="out logsumexp",
    ),
    _bug(
        "paged-tpu-scales-behind-the-length-kept",
        Change("paged_tpu", "jnp.where((j >= seen[0]) & (j < seen[1]), scales, 0.0)", "scales"),
        kind="tail",
        reference="flashinfer-ai/flashinfer#942, where NaN in other rows of a page reaches out",
        shows="out",
    ),
    _bug(
        "paged-tpu-keys-scaled-behind-the-soft-cap",
        Change("paged_plan", "bent = jnp.tanh(products * of_keys(", "bent = of_keys(1.0) * jnp.tanh(products * ("),
        kind="scales.order",
        reference="inferred: the scale of a key multiplies its logit and not its product",
        trigger=_capped,
    ),
)
