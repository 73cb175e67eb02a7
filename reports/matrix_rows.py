"""Order the rows of the report's matrices by kind, independently of the order in which cases were judged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from cases.operand_registry import REMOVABLE
from cases.storage_forms.form_registry import FORMS

FEATURE_KINDS: Mapping[str, tuple[str, ...]] = {
    "dtype": ("f32", "bf16", "f16"),
    "phase": ("train", "prefill", "decode"),
    "heads": ("mha", "gqa", "mqa"),
    "mask": (
        *("full", "causal", "window", "chunked", "bidirectional", "balanced", "lengths", "dense", "dense_head"),
        *("dense_batch", "indexer", "moba", "indices", "lightning", "own_window", "tree", "placed"),
        *("first_tokens", "local_window", "offset", "segment_ids"),
    ),
    "operands": (*(operand.name for operand in REMOVABLE if operand.name != "segment_ids"), "captures", "dropout"),
    "shape": ("v_head_dim", "unequal_lengths"),
    "storage": (*FORMS, "later_pages", "packed_segments"),
    "quantised cache": (
        *("kv_int8", "kv_int4", "kv_fp8", "kv_token_scales", "kv_head_scales", "kv_tensor_scales"),
        *("kv_sequence_scales", "kv_mxfp8", "kv_nvfp4", "kv_channel_scales"),
        *("kv_writes_scaled", "kv_writes_computed", "q_fp8", "q_descale"),
    ),
}
"""The names of features by kind, in the order of the matrix rows."""
CHECK_KINDS: Mapping[str, tuple[str, ...]] = {
    "results": ("forward", "residuals", "primal", "parts", "index_scores", "ensemble", "algorithm"),
    "gradients": ("gradients", "gradients_lse", "gradients_part", "differentiation", "tangents"),
    "what must not matter": ("poison", "independence", "batch_invariance", "aliasing"),
    "laws": ("linearity", "invariance", "limits", "dropout"),
    "arguments": ("arguments", "errors", "refusals", "forms"),
    "under JAX": ("first_calls", "transforms", "calls", "sharding", "program", "branches"),
    "in a model": ("front_end", "decoding"),
    "accelerators": ("compiles", "interpreter", "memory", "hardware"),
    "about the case": ("support", "devices", "discrimination", "expectations", "files", "flags", "early_end"),
}
"""The names of checks by kind, in the order of the matrix rows.

The last kind has the other values that a record's `check` may have, which concern the case and not the results.
"""
OTHERS = "others"


def group_rows(found: Iterable[str], kinds: Mapping[str, tuple[str, ...]]) -> list[tuple[str, tuple[str, ...]]]:
    """Group the row names in `found` by kind; those of no kind come last, under `OTHERS`, in order of appearance."""
    there = dict.fromkeys(found)
    known = {name for names in kinds.values() for name in names}
    groups = [(kind, tuple(name for name in names if name in there)) for kind, names in kinds.items()]
    groups.append((OTHERS, tuple(name for name in there if name not in known)))
    return [(kind, names) for kind, names in groups if names]
