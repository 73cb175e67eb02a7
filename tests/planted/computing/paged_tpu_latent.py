"""Bugs that only a paged kernel can have that reads values where its keys are, each one passage of ours changed."""

from __future__ import annotations

import functools

from cases.case import Case
from conformance.mutation.kernels.triggers import both
from tests.bank import PlantedBug
from tests.planted.planting import stored_bug
from tests.planted.planting.latent import in_pages, turned
from tests.planted.planting.source_change import Change, build_changed


def _several_units(case: Case) -> bool:
    """More rows than are computed at a time, in a tile of several queries."""
    return in_pages(case) and case.num_q_heads * min(case.q_length, 8) > 16


def _several_blocks(case: Case) -> bool:
    return in_pages(case) and max(case.kv_lengths) > 48


_build = functools.partial(build_changed, "impls.paged", "build_latent_implementation", backend="tpu")
_bug = functools.partial(
    stored_bug.bug, family="paged tpu latents", build=_build, shows="out logsumexp max_logits", trigger=in_pages
)

BUGS: tuple[PlantedBug, ...] = (
    _bug(
        "paged-tpu-latent-values-from-its-end",
        Change("paged_tpu", "k[:, : plan.value_dim]", "k[:, k.shape[1] - (plan.value_dim or 0) :]"),
        kind="latent read",
        reference="inferred from kernels that keep the rotary part first and slice values behind it",
        shows="out",
        trigger=both(in_pages, turned),
    ),
    _bug(
        "paged-tpu-latent-values-of-the-rank-filled-up-by-the-rotary-part",
        Change(
            "paged_tpu",
            "return k[:, : plan.value_dim]",
            "return jnp.concatenate([k[:, : 2 * plan.value_dim - k.shape[1]], k[:, plan.value_dim :]], axis=1)",
        ),
        kind="latent read",
        reference="inferred: a block of lanes that lies over the border of rank and rotary part",
        shows="out",
        trigger=both(in_pages, turned),
    ),
    _bug(
        "paged-tpu-latent-values-of-the-other-buffer",
        Change("paged_tpu", "k = latents(number, odd)", "k = cache.held[0][1 - buffer].reshape(cache.block, -1)"),
        kind="pipeline.parity",
        reference="inferred: keys by the buffer of the block, values by that of the one on its way",
        shows="races out",
        trigger=_several_blocks,
    ),
    _bug(
        "paged-tpu-latent-block-of-the-other-buffer",
        Change("paged_tpu", "return cache.held[0][buffer]", "return cache.held[0][1 - buffer]"),
        kind="pipeline.parity",
        reference="inferred from jax ragged_paged_attention (buffer index carried between steps)",
        shows="races out logsumexp max_logits",
        trigger=_several_blocks,
    ),
    _bug(
        "paged-tpu-latent-last-heads-left-out",
        Change(
            "paged_tpu",
            "ComputeUnits(rows // some, some, place",
            "ComputeUnits(max(rows // some - 1, 1), some, place",
        ),
        kind="heads.tile",
        reference="inferred from kernels whose tile of heads is that of one matrix unit",
        trigger=_several_units,
    ),
    _bug(
        "paged-tpu-latent-mask-of-the-first-heads-for-all",
        Change("paged_tpu", "sees(number * units.rows)", "sees(0 * number)"),
        kind="causal.position",
        reference="inferred: rows of later queries see what those of the first unit see",
        trigger=_several_units,
    ),
    _bug(
        "paged-tpu-latent-pages-not-copied-kept",
        Change("paged_tpu", "seen = (j >= low) & (j < high)\n            held", "seen = j >= low\n            held"),
        kind="tail",
        reference="flashinfer-ai/flashinfer#942, where NaN in other rows of a page reaches out",
        shows="out",
    ),
    _bug(
        "paged-tpu-latent-pages-one-place-late",
        Change("page_copies", "held.at[buffer, number]\n", "held.at[buffer, jnp.maximum(number - 1, 0)]\n"),
        kind="pipeline.place",
        reference="inferred: the place of a page in its block counted from one",
        shows="races forward out logsumexp max_logits",
        trigger=_several_blocks,
    ),
)
