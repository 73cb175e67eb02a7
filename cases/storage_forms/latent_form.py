"""Storage form `latent`: dense operands with a latent in place of keys and values (multi-head latent attention).

    attention(q, latent, *, value_dim, scale, causal=False, window=None, mask=None, segment_ids=None, ...)

The latent is `[B, S, H]`. All query heads share it as their key, and its first `value_dim` coordinates are their value.
This is the form with absorbed projections of multi-head latent attention (arXiv:2405.04434).
"""

from __future__ import annotations

from cases.operand_registry import REMOVABLE
from cases.storage_forms.storage_form import StorageForm

REQUIRED = {
    "value_dim": "the number of a latent's coordinates, counted from the first, that are the value",
    "scale": "the factor of the logits, which depends on the depth of the expanded heads",
}


def check_sizes(text: str, num_kv_heads: int, head_dim: int, v_head_dim: int, extra: str | None) -> None:
    """Raise `ValueError` for sizes or operands that a case of latents cannot have. The message says what is required.

    `extra` is the case's quantised cache or front end, which latents do not combine with; None if it has neither.
    """
    if num_kv_heads != 1:
        raise ValueError(f"storage {text!r} is one latent for all query heads, so K must be 1, got {num_kv_heads}")
    if v_head_dim > head_dim:
        raise ValueError(
            f"storage {text!r} has its values in the first of {head_dim} coordinates, so V must be at most that, "
            f"got {v_head_dim}"
        )
    if extra is not None:
        raise ValueError(f"storage {text!r} cannot be combined with {extra!r}")


LATENT = StorageForm(
    name="latent",
    description="one latent for all query heads, whose first coordinates are the values",
    prefixes={False: "latent"},
    has_q_lengths=False,
    is_cache=False,
    is_tied=True,
    check_sizes=check_sizes,
    draw_layout=None,
    operands=("q", "latent"),
    parameters=(
        *("causal", "window", "mask", "indices", "local_window", "value_dim"),
        *(operand.name for operand in REMOVABLE if not operand.opt_in),
        "save_residuals",
    ),
    required=REQUIRED,
    noun="latents",
    arrange=lambda arrays: {"latent": arrays["k"][..., 0, :]},
    example="latent",
    level="latent",
    condition="values are a part of the keys",
)
