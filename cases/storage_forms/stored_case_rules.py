"""What a call that takes its operands stored can be asked for, and how a mask reaches it."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping
from typing import Any

from cases import mask_spec
from cases.case import Case
from cases.masks import Mask
from cases.operand_registry import OPTIONAL
from cases.quantization import PAGES_HOLD
from cases.storage_forms.page_writes import find_write_refusal
from cases.storage_forms.storage_spec import IN_PAGES, Kind, Sides, find_sides, format_storage

# More than eight key/value heads.
_KEY_HEADS = {"num_q_heads": 9, "num_kv_heads": 9}
_CHUNK = {"batch": 1, "q_length": 24, "kv_length": 40, "mask": "window-linf-r3-o16"}
# Of two and of four queries, whose windows begin on both sides of a page's first row.
_BORDER: dict[str, Any] = {
    **{"phase": "prefill", "batch": 3, "q_length": 4, "kv_length": 80},
    **{"mask": "own-l31-48-64-80", "soft_cap": None},  # each key has some weight
}
# Three queries in all, two of them of one sequence, in tables with room for more sequences than there are queries.
_ROOM: dict[str, Any] = {
    **{"phase": "prefill", "batch": 6, "q_length": 2, "kv_length": 40},
    **{"mask": "own-linf-17-40-8-33-1-24", "soft_cap": None},
}
# More than sixteen query heads to a key head, an odd number.
_GROUPS = {"num_q_heads": 17, "num_kv_heads": 1}
_FORTY = tuple(1 + 5 * n % 13 for n in range(40))
_ENDS = "-".join(map(str, _FORTY))
FURTHER_SEQUENCES: Mapping[Kind, Mapping[str, Mapping[str, Any]]] = {
    "packed": {
        # One sequence alone, a chunk of it, whose window is open to the left and sees three keys to the right.
        "one_chunk": {**_CHUNK, **_KEY_HEADS, "storage": "packed"},
        # As many keys as queries in all, and in none of the sequences.
        "as_many_in_all": {
            "batch": 3,
            "q_length": 17,
            "kv_length": 20,
            "mask": "own-linf-20-3-9",
            "storage": "packed-q7-17-8",
            **_GROUPS,
        },
        "forty": {
            "batch": 40,
            "q_length": 13,
            "kv_length": 13,
            "mask": f"own-linf-{_ENDS}",
            "storage": f"packed-q{_ENDS}",
        },
    },
    "paged": {
        # Forty sequences, and more than 255 pages.
        "forty": {
            "phase": "decode",
            "batch": 40,
            "q_length": 1,
            "kv_length": 13,
            "mask": f"own-linf-{_ENDS}",
            "storage": "paged1",
        },
        "border": {**_BORDER, **_KEY_HEADS, "storage": "paged16-q2-4-1"},
        "room": {**_ROOM, **_GROUPS, "storage": "paged16-q0-2-0-1-0-0"},
        # More than 4,096 keys.
        "long": {
            "phase": "decode",
            "batch": 1,
            "q_length": 1,
            "kv_length": 4233,
            "mask": "own-linf-4233",
            "storage": "paged64",
            "soft_cap": None,
        },
    },
    "latent": {},
    "latent_pages": {
        "forty": {
            "phase": "decode",
            "batch": 40,
            "q_length": 1,
            "kv_length": 13,
            "mask": f"own-linf-{_ENDS}",
            "storage": "latent1",
        },
        "border": {**_BORDER, "storage": "latent16-q2-4-1"},
        "room": {**_ROOM, "storage": "latent16-q0-2-0-1-0-0"},
        # A rank and a rotary part that no vector divides.
        "uneven": {**_BORDER, "storage": "latent16-q2-4-1", "head_dim": 45, "v_head_dim": 35},
    },
}
"""Sequences that no case of the grids has, by kind of storage and name: the fields of a case that differ."""


def lower_sides(
    mask: Mask, batch: int, num_q_heads: int, q_length: int, kv_length: int, *, kind: Kind
) -> tuple[Mapping[str, Hashable], Mapping[str, Any]]:
    """The lowering for a call whose operands are stored: `causal` or `window`, counted from each query's own place.

    A paged call is causal without being told, and has a `window` at most.

    Raises:
      NotImplementedError: for any other mask.
    """
    del batch, num_q_heads
    seen = find_sides(mask, q_length, kv_length)
    if seen is None or (kind in IN_PAGES and not seen.is_causal):
        raise NotImplementedError(f"mask: a {kind} call has no such mask")
    if seen == Sides() or (kind in IN_PAGES and seen.left is None):
        return {}, {}
    return ({"causal": True} if seen == Sides(None, 0) else {"window": (seen.left, seen.right)}), {}


def find_refusal(case: Case, kind: Kind, *, writes: bool = False) -> str | None:
    """Why no call that takes its operands as `kind` can be asked for `case`, or None if one can.

    With `writes` it also writes the new tokens of each sequence into pages.
    """
    if case.stored is None:
        return f"dense operands: the call takes {kind} ones"
    if case.stored.kind != kind:
        return f"{case.stored.kind} operands: the call takes {kind} ones"
    if kind == "latent":  # dense but for its values: what else there is, it may have
        return None
    for operand in OPTIONAL:
        scaled = kind == "paged" and operand.name == "kv_scales"
        if not operand.stored and not scaled and getattr(case, operand.field) != operand.absent:
            return f"{operand.name}: a {kind} call has no such operand"
    if case.kv_cache not in PAGES_HOLD:
        return f"kv_scales: pages are int8 or fp8 with scales of each token and head or of all, not {case.kv_cache}"
    if case.kv_cache is not None and writes:
        return "kv_scales: no call that writes pages is asked for those with scales"
    mask = mask_spec.build_mask(case.mask, case.batch, case.num_q_heads, case.q_length, case.kv_length, case.seed)
    seen = find_sides(mask, case.q_length, case.kv_length)
    if seen is None or (kind in IN_PAGES and not seen.is_causal):
        return f"{case.mask}: no mask that a {kind} call is asked for, which goes by the place in a sequence"
    return find_write_refusal(case) if writes else None


def with_length(case: Case, length: int) -> Case:
    """A case like this one with a single sequence, which has so many queries and keys; itself dense if `case` is."""
    changed: dict[str, Any] = {"batch": 1, "q_length": length, "kv_length": length}
    if case.stored is not None and case.stored.kind != "latent":
        storage = format_storage(case.stored.kind, case.stored.page_size, (length,), shared=case.stored.shared)
        changed |= {"storage": storage, "mask": f"own-linf-{length}"}
    return dataclasses.replace(case, **changed)


def list_other_masks(case: Case) -> tuple[str, ...]:
    """Masks of the same sequences: windows of several sizes, causal, and without a mask."""
    if case.storage == "latent":
        return "window-l9-r0", "window-l2-r0", "causal", "full"
    ends = "-".join(map(str, case.kv_lengths))
    return *(f"own-l{left}-{ends}" for left in (9, 2, "inf")), f"lengths-{ends}"
