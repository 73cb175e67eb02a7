"""Convert masks to the causal flag that most upstream functions take, for adapters."""

from __future__ import annotations

from cases import mask_spec
from cases.case import Case
from cases.masks import Causal, Full, Mask, list_conjuncts

ONLY_CAUSAL = "takes no mask but its causal flag"
OTHER_MASKS = ("chunked", "bidirectional", "balanced", "dense", "dense_head", "dense_batch", "indexer")
"""Features of masks that no number or flag of a call says."""
NO_OTHER_MASK = {
    **dict.fromkeys(("window", "lengths", *OTHER_MASKS), ONLY_CAUSAL),
    "offset": "takes no causal offset",
}
"""Unsupported masks of a function with a causal flag and no other mask."""


def find_causal_flag(mask: Mask) -> bool | None:
    """Find the value of `causal=` that means `mask`, for functions without other mask operands, or None."""
    parts = list_conjuncts(mask)
    if not all(isinstance(part, Full) or part == Causal(0) for part in parts):
        return None
    return Causal(0) in parts


def build_case_mask(case: Case) -> Mask:
    """Build the mask of a case."""
    return mask_spec.build_mask(case.mask, case.batch, case.num_q_heads, case.q_length, case.kv_length, case.seed)
