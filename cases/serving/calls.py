"""What a call that takes its operands stored can be asked for, and how a mask reaches it."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping
from typing import Any

from cases import mask_spec
from cases.case import Case
from cases.masks import Mask
from cases.operands import OPTIONAL
from cases.serving.spec import Kind, Sides, sides, write


def sides_of_stored(
    mask: Mask, batch: int, num_q_heads: int, q_length: int, kv_length: int, *, kind: Kind
) -> tuple[Mapping[str, Hashable], Mapping[str, Any]]:
    """The lowering for a call whose operands are stored: `causal` or `window`, counted from each query's own place.

    A paged call is causal without being told, and has a `window` at most.

    Raises:
      NotImplementedError: for any other mask.
    """
    del batch, num_q_heads
    seen = sides(mask, q_length, kv_length)
    if seen is None or (kind == "paged" and not seen.is_causal):
        raise NotImplementedError(f"mask: a {kind} call has no such mask")
    if seen == Sides() or (kind == "paged" and seen.left is None):
        return {}, {}
    return ({"causal": True} if seen == Sides(None, 0) else {"window": (seen.left, seen.right)}), {}


def not_stored(case: Case, kind: Kind) -> str | None:
    """Why no call that takes its operands as `kind` can be asked for `case`, or None if one can."""
    if case.stored is None:
        return f"dense operands: the call takes {kind} ones"
    if case.stored.kind != kind:
        return f"{case.stored.kind} operands: the call takes {kind} ones"
    for operand in OPTIONAL:
        if not operand.stored and getattr(case, operand.field) != operand.absent:
            return f"{operand.name}: a {kind} call has no such operand"
    mask = mask_spec.build(case.mask, case.batch, case.num_q_heads, case.q_length, case.kv_length, case.seed)
    seen = sides(mask, case.q_length, case.kv_length)
    if seen is None or (kind == "paged" and not seen.is_causal):
        return f"{case.mask}: no mask that a {kind} call is asked for, which goes by the place in a sequence"
    return None


def of_length(case: Case, length: int) -> Case:
    """A case like this one with a single sequence, which has so many queries and keys; itself dense if `case` is."""
    changed: dict[str, Any] = {"batch": 1, "q_length": length, "kv_length": length}
    if case.stored is not None:
        storage = write(case.stored.kind, case.stored.page_size, (length,), shared=case.stored.shared)
        changed |= {"storage": storage, "mask": f"own-linf-{length}"}
    return dataclasses.replace(case, **changed)


def other_masks(case: Case) -> tuple[str, ...]:
    """Masks of the same sequences: windows of several sizes, causal, and without a mask."""
    ends = "-".join(map(str, case.kv_lengths))
    return *(f"own-l{left}-{ends}" for left in (9, 2, "inf")), f"lengths-{ends}"
