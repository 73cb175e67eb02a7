"""Bugs of pages with scales of sequences, in two styles of kernels."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from cases.storage_forms.paged_form import SEQUENCE_FEATURES
from conformance.mutation.kernels.triggers import both, has
from tests.planted.planting import stored_bug
from tests.planted.planting.scaled_pages import ScaleSteps, build_at_once, build_by_page

Array = jax.Array
_BY_SEQUENCE = has("paged", "kv_sequence_scales")
OFFERED = SEQUENCE_FEATURES | {"q_descale"}
"""The features of the correct kernels."""
_bug = functools.partial(stored_bug.bug, family="paged", shows="out logsumexp max_logits")
_sequence_bug = functools.partial(_bug, build=functools.partial(build_at_once, features=OFFERED), trigger=_BY_SEQUENCE)
_sequence_bug_by_page = functools.partial(
    _bug, build=functools.partial(build_by_page, features=OFFERED), trigger=_BY_SEQUENCE
)


def _by_query_head(scales: Array, group: int) -> Array:
    """Scales of key/value heads found by the number of the query head."""
    return scales[jnp.arange(group * len(scales)) % len(scales)]


BUGS = (
    _sequence_bug(
        "page-descale-of-the-first-sequence",
        ScaleSteps(sequence=lambda sequence: jnp.zeros_like(sequence)),
        kind="kvscale.batch0",
        reference="inferred from vllm-project/flash-attention#176, all rows folded onto the first",
        trigger=both(_BY_SEQUENCE, lambda case: case.batch > 1),
    ),
    _sequence_bug_by_page(
        "page-descale-of-the-next-sequence-by-page",
        ScaleSteps(sequence=lambda sequence: sequence + 1),
        kind="kvscale.batch",
        reference="inferred from tables that begin with a total",
    ),
    _sequence_bug(
        "page-descale-by-query-head",
        ScaleSteps(heads=_by_query_head),
        kind="gqa.packgqa-descale",
        reference="rocm-libraries PR 11189",
        trigger=both(_BY_SEQUENCE, has("gqa")),
    ),
    _sequence_bug_by_page(
        "page-descale-of-the-first-head-by-page",
        ScaleSteps(heads=lambda scales, group: jnp.broadcast_to(scales[:1], group * len(scales))),
        kind="kvscale.per-head",
        reference="sgl-kernel-xpu PR 252",
        trigger=both(_BY_SEQUENCE, lambda case: case.num_kv_heads > 1),
    ),
    _sequence_bug(
        "page-descale-of-queries-forgotten",
        ScaleSteps(descales=lambda k, v, q: (k, v, jnp.ones_like(q))),
        kind="kvscale.dropped",
        reference="inferred from flashinfer-ai/flashinfer#1023",
        trigger=both(_BY_SEQUENCE, has("q_descale")),
    ),
    _sequence_bug_by_page(
        "page-descale-of-keys-for-values-by-page",
        ScaleSteps(descales=lambda k, v, q: (k, k, q)),
        kind="kvscale.k-for-v",
        reference="sgl-project/sglang#26852",
        shows="out",
    ),
)
