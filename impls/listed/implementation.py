"""Declare attention to listed keys as implementations to judge, one for each storage form."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from cases import mask_spec
from cases.case import Case
from cases.masks import split_lists
from impls.contract.declarations import Arithmetic
from impls.contract.implementation import Implementation
from impls.listed.attention import attention, latent_attention
from impls.listed.stored_lists import (
    latent_pages_attention,
    packed_attention,
    paged_attention,
    paged_attention_with_update,
)

# Formulas of places: other masks are arrays, or depend on q and k.
_JOINED = {"causal", "window", "chunked", "spans", "lengths", "listed", "full", "own"}


def _refuse_other_calls(case: Case) -> str | None:
    if "indices" not in case.features:
        return "indices: the keys are those of lists, and this case has none"
    kinds = {term[0] for group in mask_spec.parse_mask_spec(case.mask) for term in group}
    mask = mask_spec.build_mask(case.mask, case.batch, case.num_q_heads, case.q_length, case.kv_length, case.seed)
    if split_lists(mask) is None or not kinds <= _JOINED:
        return "mask: lists are joined with formulas of places and a window only"
    return None


def _build(name: str, call: Callable[..., Any], about: str, *, block: int, **declared: Any) -> Implementation:
    return Implementation(
        name=name,
        call=functools.partial(call, block=block),
        description=f"attention to listed keys, which are gathered, in plain JAX, {about}",
        offers=frozenset(
            {"indices", "local_window", *(("own_window",) if declared.get("storage") in (None, "latent") else ())}
        ),
        unsupported={"bias": "gathers keys only"},
        supports_case=_refuse_other_calls,
        arithmetic=Arithmetic(probabilities="input"),
        empty_rows="zero",
        behind_mask="any",
        memory="linear",
        variants={"default_block": call, "blocks_7": functools.partial(call, block=7)},
        **declared,
    )


_CACHE: dict[str, Any] = {
    "gradients": frozenset(),
    "differentiable_residuals": frozenset(),
    "refuses_by_signature": True,
}
_NAMES = ("out", "logsumexp")

# Blocks are small, so that most cases have several, of which the last is not full.
IMPLEMENTATIONS: tuple[Implementation, ...] = (
    _build("listed", attention, "dense, with gradients", block=24, validates=True, checkpoint_names=_NAMES),
    _build(
        "listed_packed",
        packed_attention,
        "over packed sequences, with gradients",
        block=24,
        storage="packed",
        gradients=frozenset({"dq", "dk", "dv", "dsinks"}),
        refuses_by_signature=True,
        checkpoint_names=_NAMES,
    ),
    _build(
        "listed_latent",
        latent_attention,
        "over dense latents, with gradients",
        block=24,
        storage="latent",
        checkpoint_names=_NAMES,
    ),
    _build("listed_paged", paged_attention, "over pages", block=8, storage="paged", **_CACHE),
    _build("listed_latent_pages", latent_pages_attention, "over latents", block=8, storage="latent_pages", **_CACHE),
    _build(
        "listed_paged_update",
        paged_attention_with_update,
        "over pages, new keys and values written into the pages first",
        block=8,
        storage="paged",
        writes_pages=True,
        **_CACHE,
    ),
)
