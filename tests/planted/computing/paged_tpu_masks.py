"""Bugs of masks and operands over sequences in a paged kernel for TPUs, each one passage of ours changed."""

from __future__ import annotations

import functools

from cases.case import Case
from conformance.mutation.kernels.triggers import has
from tests.bank import PlantedBug
from tests.planted.planting import stored_bug
from tests.planted.planting.source_change import Change, build_changed


def _reaches_ahead(case: Case) -> bool:
    """A window with a right side."""
    return case.mask.startswith("window-") and "_at-" in case.mask


def _calls_mask(case: Case) -> bool:
    return case.mask.startswith(("chunked", "causal_or_spans")) and "_at-" in case.mask


def _calls_mask_far(case: Case) -> bool:
    """Chunks of sequences of several blocks, whose first keys no query sees."""
    return case.mask.startswith("chunked") and max(case.kv_lengths) > 128 and _calls_mask(case)


def _varies(case: Case) -> bool:
    return case.mask.startswith("varying")


def _grows(case: Case) -> bool:
    """A tree behind other keys, in several sequences."""
    return case.mask.startswith("tree") and any(
        0 < queries < keys for queries, keys in zip(case.q_lengths, case.kv_lengths, strict=True)
    )


def _has_array(case: Case) -> bool:
    return case.mask.startswith("dense") and "_at-" in case.mask


_build = functools.partial(build_changed, "impls.paged", "build_implementation", backend="tpu")
_bug = functools.partial(
    stored_bug.bug, family="paged tpu masks", build=_build, shows="out logsumexp max_logits", trigger=_calls_mask
)

BUGS: tuple[PlantedBug, ...] = (
    _bug(
        "paged-tpu-right-side-without-its-last-key",
        Change(
            "paged_plan", "jnp.minimum(position + (plan.right + 1), end)", "jnp.minimum(position + plan.right, end)"
        ),
        kind="window.border",
        reference="inferred from window_size of flash-attention, which counts keys on both sides",
        trigger=_reaches_ahead,
    ),
    _bug(
        "paged-tpu-blocks-end-at-the-own-position",
        Change(
            "page_copies",
            "slot, end = find_block_range(plan, tiles.position, tiles.queries, operands.k_pages.shape[1], keys)",
            "slot, end = find_block_range(plan, tiles.position, tiles.queries, operands.k_pages.shape[1], keys); "
            "end = jnp.minimum(end, (tiles.position + tiles.queries - 1) // operands.k_pages.shape[1] + 1)",
        ),
        kind="window.skip",
        reference="inferred: blocks are listed as for a causal mask",
        trigger=has("later_pages"),
    ),
    _bug(
        "paged-tpu-right-side-past-the-last-key",
        Change("paged_plan", "jnp.minimum(position + (plan.right + 1), end)", "position + (plan.right + 1)"),
        kind="tail",
        reference="inferred: a causal mask never reaches past the last key, a window may",
        trigger=_reaches_ahead,
        shows="out logsumexp max_logits forward",
    ),
    _bug(
        "paged-tpu-mask-of-queries-counted-from-the-tile",
        Change(
            "paged_tpu",
            "_call_mask(plan, tile, number, *_locate(tile, start, shape))",
            "_call_mask(plan, tile, number, *_locate(tile._replace(position=jnp.int32(0)), start, shape))",
        ),
        kind="mask.place",
        reference="inferred: the place of a query without the keys before it",
    ),
    _bug(
        "paged-tpu-mask-of-keys-counted-from-the-block",
        Change(
            "paged_tpu",
            "_call_mask(plan, tile, number, *_locate(tile, start, shape))",
            "_call_mask(plan, tile, number, *_locate(tile, jnp.int32(0), shape))",
        ),
        kind="mask.place",
        reference="inferred: the place of a key within its block",
        trigger=_calls_mask_far,
    ),
    _bug(
        "paged-tpu-mask-only-where-a-window-cuts",
        Change(
            "paged_tpu",
            "if plan.mask_mod is not None or further.mask is not None:\n        seen_in_part()",
            "if further.mask is not None:\n        seen_in_part()",
        ),
        kind="mask.whole-block",
        reference="inferred: blocks within the window of every query are taken as seen whole",
        trigger=_calls_mask_far,
    ),
    _bug(
        "paged-tpu-mask-called-with-key-heads",
        Change("paged_tpu", "_find_heads(tile, number, i.shape), i, j))", "number + 0 * i, i, j))"),
        kind="mask.head",
        reference="inferred: `n` is the query head, and a loop over key/value heads has another number",
        trigger=_varies,
    ),
    _bug(
        "paged-tpu-mask-called-with-the-number-of-the-tile",
        Change("paged_tpu", "sequence=tiles.sequence[number]", "sequence=number"),
        kind="mask.sequence",
        reference="inferred: a tile taken for a sequence",
        trigger=_varies,
    ),
    _bug(
        "paged-tpu-values-of-hidden-keys-kept",
        Change("paged_tpu", "values = _zero_hidden(values, z)", "values = values + 0 * values"),
        kind="tail",
        reference="vllm-project/vllm#936, for keys that a mask hides inside a sequence",
        shows="out",
        trigger=_calls_mask_far,
    ),
    _bug(
        "paged-tpu-distance-from-the-block",
        Change("paged_tpu", "i, j = _locate(tile, start, shape)\n", "i, j = _locate(tile, jnp.int32(0), shape)\n"),
        kind="alibi.distance",
        reference="inferred: distances within a block of keys",
        trigger=has("alibi_slopes", "paged"),
    ),
    _bug(
        "paged-tpu-slopes-of-the-first-group",
        Change("paged_tpu", "_repeat_heads(ref[number], shape)", "_repeat_heads(ref[0 * number], shape)"),
        kind="alibi.head",
        reference="inferred: numbers of heads without the key/value head",
        trigger=has("alibi_slopes", "paged"),
    ),
    _bug(
        "paged-tpu-logit-scale-behind-alibi",
        Change(
            "paged_plan",
            "        x = x - slopes * jnp.abs(i - j).astype(jnp.float32)\n",
            "        x = x - (1 if factor is None else factor) * slopes * jnp.abs(i - j).astype(jnp.float32)\n",
        ),
        kind="logit-scale.order",
        reference="inferred: a factor that multiplies ALiBi too",
        trigger=has("alibi_slopes", "logit_scale", "paged"),
    ),
    _bug(
        "paged-tpu-changed-logits-in-the-wrong-unit",
        Change("paged_plan", "x if unit == 1.0 else x * jnp.float32(1 / unit)", "x"),
        kind="score.unit",
        reference="inferred: exponents of 2 from logits for powers of e",
        trigger=lambda case: has("score_mod", "paged")(case) and case.soft_cap is None,
    ),
    _bug(
        "paged-tpu-tree-from-the-first-key",
        Change("paged_tpu", "(further.tree_mask, tile.before))", "(further.tree_mask, jnp.int32(0)))"),
        kind="tree.place",
        reference="inferred: columns of a tree taken for keys of the whole sequence",
        trigger=_grows,
    ),
    _bug(
        "paged-tpu-column-of-the-next-key",
        Change("paged_tpu", "(width, block), 0) + at == column", "(width, block), 0) + at == column + 1"),
        kind="tree.place",
        reference="inferred: columns of a tree counted from the first drafted token or from the one before it",
        trigger=_grows,
    ),
    _bug(
        "paged-tpu-rows-of-a-mask-by-head",
        Change(
            "paged_tpu",
            "(rows, size), 0) // jnp.int32(tile.group), tile.queries - 1)",
            "(rows, size), 0), tile.queries - 1)",
        ),
        kind="mask.row",
        reference="inferred: rows of a tile are queries times heads, those of a mask are queries",
        trigger=_has_array,
    ),
)
