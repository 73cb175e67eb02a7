"""Storage form `latent`: dense operands with one latent in place of keys and values, as in multi-head latent attention.

    attention(q, latent, *, value_dim, scale, causal=False, window=None, mask=None, segment_ids=None, ...)

The latent, `[B, S, H]`, is the one key of all query heads, and its first `value_dim` coordinates are the value: the
absorbed form of arXiv:2405.04434.
"""

from __future__ import annotations

from cases.operand_registry import REMOVABLE
from cases.storage_forms.storage_form import StorageForm

REQUIRED = {
    "value_dim": "how many of a latent's coordinates, the first ones, are the values",
    "scale": "the factor of logits, which goes by the depth of the expanded heads",
}


def check_sizes(text: str, num_kv_heads: int, head_dim: int, v_head_dim: int, extra: str | None) -> None:
    """Refuse sizes and operands that no latent has.

    Args:
      text: the storage as the case id writes it.
      num_kv_heads: K of the case.
      head_dim: H of the case.
      v_head_dim: V of the case.
      extra: a quantised cache or a front end of the case, if it has one.

    Raises:
      ValueError: naming what must be.
    """
    if num_kv_heads != 1:
        raise ValueError(f"storage {text!r} is one latent for all query heads, so K must be 1, got {num_kv_heads}")
    if v_head_dim > head_dim:
        raise ValueError(
            f"storage {text!r} has its values in the first of {head_dim} coordinates, so V must be at most that, "
            f"got {v_head_dim}"
        )
    if extra is not None:
        raise ValueError(f"storage {text!r} and {extra!r} have no form together")


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
        *("causal", "window", "mask", "value_dim"),
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
