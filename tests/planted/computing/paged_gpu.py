"""Bugs of a paged kernel whose programs share the keys of a sequence, each one passage of ours changed."""

from __future__ import annotations

import functools

from cases.case import Case
from tests.bank import PlantedBug
from tests.planted.planting import stored_bug
from tests.planted.planting.paged_bug import in_pages, several, windowed
from tests.planted.planting.source_change import Change, build_changed


def _grouped(case: Case) -> bool:
    """Several groups of several heads."""
    return in_pages(case) and 1 < case.num_kv_heads < case.num_q_heads


def _shared(case: Case) -> bool:
    """Sequences of several blocks of keys, which several programs share."""
    return in_pages(case) and case.kv_length > 128


def _shared_windows(case: Case) -> bool:
    return _shared(case) and windowed(case)


def _with_sinks(case: Case) -> bool:
    return in_pages(case) and "sinks" in case.features


_build = functools.partial(build_changed, "impls.paged", "build_implementation", backend="gpu")
_bug = functools.partial(
    stored_bug.bug, family="paged gpu", build=_build, shows="out logsumexp max_logits", trigger=in_pages
)

BUGS: tuple[PlantedBug, ...] = (
    _bug(
        "paged-gpu-parts-merged-without-their-scale",
        Change("paged_gpu", "old.out * decay[:, None] + new.out * weight[:, None]", "old.out + new.out"),
        kind="merge.rescale",
        reference="inferred from vllm-project/vllm paged attention v2 (parts reduced by their maxima)",
        shows="out",
        trigger=_shared,
    ),
    _bug(
        "paged-gpu-sums-of-parts-added-as-they-are",
        Change("paged_gpu", "old.sum * decay + new.sum * weight", "old.sum + new.sum"),
        kind="merge.rescale",
        reference="inferred from vllm-project/vllm paged attention v2 (parts reduced by their maxima)",
        shows="out logsumexp",
        trigger=_shared,
    ),
    _bug(
        "paged-gpu-empty-part-gives-nan",
        Change(
            "paged_gpu",
            "compute_exp(old.max - replace_neg_inf(top)), compute_exp(new.max - replace_neg_inf(top))",
            "exp(old.max - top), exp(new.max - top)",
        ),
        kind="merge.empty",
        reference="inferred: -inf minus -inf, where a query sees no key of the first share",
        trigger=_shared_windows,
        shows="out logsumexp",
    ),
    _bug(
        "paged-gpu-first-part-merged-again",
        Change(
            "paged_gpu",
            "_locate_share_rows(launch, before + number, column)",
            "_locate_share_rows(launch, before, column)",
        ),
        kind="merge.place",
        reference="inferred: the place of a part without its number",
        trigger=_shared,
    ),
    _bug(
        "paged-gpu-share-ends-a-block-late",
        Change("paged_gpu", "jnp.minimum(begin + size, end[tile])", "jnp.minimum(begin + size + 1, end[tile])"),
        kind="split.border",
        reference="inferred: the last block of a share counted by both of its neighbours",
        shows="out logsumexp",
        trigger=_shared,
    ),
    _bug(
        "paged-gpu-share-without-its-last-block",
        Change("paged_gpu", "jnp.minimum(begin + size, end[tile])", "jnp.minimum(begin + size, end[tile] - 1)"),
        kind="split.border",
        reference="inferred from jax ops/gpu/paged_attention.py (end of a partition)",
    ),
    _bug(
        "paged-gpu-shares-of-a-window-from-the-first-key",
        Change("paged_gpu", "begin = first[tile] + (share", "begin = (share"),
        kind="window.skip",
        reference="vllm-project/tpu-inference PR 1954, a window's first block taken for another",
        trigger=windowed,
    ),
    _bug(
        "paged-gpu-window-by-page",
        Change(
            "paged_gpu",
            "compute_allowed(plan, i, j[None, :], keys)",
            "(j[None, :] <= i) & (plan.left is None or lax.div(j[None, :], jnp.int32(launch.page_size))"
            " >= lax.div(i - (plan.left or 0), jnp.int32(launch.page_size)))",
        ),
        kind="window.page",
        reference="inferred from vllm-project/vllm (pages outside a window are freed, and none is cut)",
        trigger=windowed,
        shows="out logsumexp",
    ),
    _bug(
        "paged-gpu-pages-in-order-of-memory",
        Change(
            "paged_gpu",
            "page = plt.load(inputs",
            "page = lax.div(j, jnp.int32(launch.page_size)) + 0 * plt.load(inputs",
        ),
        kind="table ignored",
        reference="flashinfer-ai/flashinfer#3219, where results depend on where pages lie",
    ),
    _bug(
        "paged-gpu-table-of-the-sequence-before",
        Change("paged_gpu", "slot = sequence * launch", "slot = jnp.maximum(sequence - 1, 0) * launch"),
        kind="row of the table",
        reference="jax 10dbfcf747 (paged attention, length of another row)",
        trigger=several,
    ),
    _bug(
        "paged-gpu-tail-of-the-last-page-read",
        Change("paged_gpu", "seen = (j >= low) & (j < high)", "seen = j >= low"),
        kind="tail",
        reference="vllm-project/vllm#936, vllm-project/vllm#47305",
        shows="out",
    ),
    _bug(
        "paged-gpu-queries-of-a-tile-at-one-position",
        Change(
            "paged_gpu",
            "i = (position + rows.query)[:, None]",
            "i = (position + queries - 1 + 0 * rows.query)[:, None]",
        ),
        kind="causal.position",
        reference="inferred: a prompt's queries taken for tokens of one step",
    ),
    _bug(
        "paged-gpu-heads-interleaved",
        Change(
            "paged_gpu",
            "launch.num_q_heads + head * launch.group + of_group",
            "launch.num_q_heads + of_group * launch.num_kv_heads + head",
        ),
        kind="heads.order",
        reference="inferred: query heads of a key/value head by remainder",
        trigger=_grouped,
    ),
    _bug(
        "paged-gpu-sink-in-each-of-two-parts",
        Change(
            "attention",
            "softmax_merge.merge([part, softmax_merge.build_sink_part(jnp.asarray(sinks))])",
            "softmax_merge.merge([part, *[softmax_merge.build_sink_part(jnp.asarray(sinks))] * 2])",
        ),
        kind="sinks.split",
        reference="inferred: a sink joins the sum of every split, and not that of the whole",
        trigger=_with_sinks,
        shows="out logsumexp",
    ),
)
