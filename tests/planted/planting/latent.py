"""Kernels over one latent for all heads, in pages and dense, made of steps that a planted bug replaces one of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from cases.case import Case
from cases.storage_forms.paged_form import SCALED_FEATURES, WHOLE_FEATURES
from conformance.mutation.kernels.triggers import Trigger, has
from impls import dot_product
from impls.contract.implementation import Implementation
from tests.bank import PlantedBug
from tests.planted.planting import stored_bug
from tests.planted.planting.served import PagedSteps, paged_by

Array = jax.Array
Step = Callable[..., Any]

in_pages = has("latent_pages")
trained = has("latent", "train")


def turned(case: Case) -> bool:
    """The latent has a rotary part beside its values."""
    return case.head_dim > case.v_head_dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentSteps:
    """Steps of attention to a latent `[..., H]`, in order; the defaults are correct."""

    queries: Step = lambda q, value_dim: q
    keys: Step = lambda latent, value_dim: latent
    values: Step = lambda latent, value_dim: latent[..., :value_dim]
    scale: Step = lambda scale, depth, value_dim: scale
    pages: PagedSteps = dataclasses.field(default_factory=PagedSteps)


def paged_latent(name: str, steps: LatentSteps = LatentSteps()) -> Implementation:
    """The kernel over latents in pages made of `steps` as the gate takes it."""
    attend = paged_by(steps.pages)

    def attention(q: Array, latent_pages: Array, *, value_dim: int, scale: float, **options: Any) -> Any:
        keys, values = (step(latent_pages, value_dim)[:, :, None] for step in (steps.keys, steps.values))
        scale = steps.scale(scale, q.shape[-1], value_dim)
        return attend(steps.queries(q, value_dim), keys, values, scale=scale, **options)

    return Implementation(
        name=name,
        call=attention,
        storage="latent_pages",
        gradients=frozenset(),
        differentiable_residuals=frozenset(),
        empty_rows="zero",
        unsupported={"train": "a cache is read, not differentiated"},
        refuses_by_signature=True,
    )


def scaled_latent(name: str, scales: Step = lambda scales, scale: (scales, scales, scale, scale)) -> Implementation:
    """The kernel over latents with scales; the step gives the scales of keys and of values, by token and as numbers."""
    attend = paged_by(PagedSteps())

    def attention(
        q: Array,
        latent_pages: Array,
        *,
        value_dim: int,
        latent_scales: Array | None = None,
        latent_scale: float | None = None,
        **options: Any,
    ) -> Any:
        of_keys, of_values, k_scale, v_scale = scales(latent_scales, latent_scale)
        if latent_scales is None:
            options |= {"k_scale": k_scale, "v_scale": v_scale}
        else:
            options |= {"k_scales": of_keys[..., None], "v_scales": of_values[..., None]}
        latents = latent_pages[:, :, None]
        return attend(q, latents, latents[..., :value_dim], **options)

    return dataclasses.replace(
        paged_latent(name),
        call=attention,
        offers=SCALED_FEATURES | WHOLE_FEATURES,
        supports_case=lambda case: None if case.kv_cache else "latents without scales",
    )


def dense_latent(name: str, steps: LatentSteps = LatentSteps()) -> Implementation:
    """The kernel over dense latents made of `steps`, with gradients, as the gate takes it."""

    def attention(q: Array, latent: Array, *, value_dim: int, scale: float, **options: Any) -> Any:
        keys, values = (step(latent, value_dim)[:, :, None] for step in (steps.keys, steps.values))
        scale = steps.scale(scale, q.shape[-1], value_dim)
        return dot_product.attention(steps.queries(q, value_dim), keys, values, scale=scale, **options)

    return Implementation(name=name, call=attention, storage="latent", empty_rows="zero")


def bug(
    name: str,
    steps: LatentSteps,
    *,
    kind: str,
    reference: str,
    shows: str = "out logsumexp max_logits",
    trigger: Trigger | None = None,
) -> PlantedBug:
    """A kernel over latents of which `steps` has one step that is wrong, dense where it `shows` by a gradient."""
    dense = shows.startswith("d")
    return stored_bug.bug(
        name,
        steps,
        family="latent",
        build=dense_latent if dense else paged_latent,
        kind=kind,
        reference=reference,
        shows=shows,
        trigger=trigger or (trained if dense else in_pages),
    )
