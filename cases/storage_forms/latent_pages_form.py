"""Storage form `latent_pages`: packed queries, and latents in pages that a table names.

    attention(q, latent_pages, *, value_dim, scale, kv_lens, page_indices, cu_q_lens, num_seqs, window=None, ...)

`q` is `[total_q, N, H]` and `latent_pages` is `[pages, page_size, H]`. If pages are quantised, the function also gets
`latent_scales`, f32 `[pages, page_size]`, or the number `latent_scale`. The latents are those of the storage form
`latent` (`latent_form`). The tables and pages are those of the storage form `paged` (`paged_form`).
"""

from __future__ import annotations

from cases.quantization import PAGED_CACHES, WHOLE_CACHES
from cases.storage_forms import latent_form, paged_form
from cases.storage_forms.storage_form import STORED_OPERANDS, ScaleParameters, StorageForm

LATENT_SCALES = ("latent_scales",)
"""The parameter that takes a scale for each row of a page of latents, f32 `[pages, page_size]`."""
WHOLE_LATENT_SCALE = ("latent_scale",)
"""The parameter that takes one scale for all latents, as a Python number."""


def check_sizes(text: str, num_kv_heads: int, head_dim: int, v_head_dim: int, extra: str | None) -> None:
    """Raise `ValueError` for sizes, a front end or a quantised cache that a case of latents in pages cannot have."""
    is_taken = extra in (*PAGED_CACHES, *WHOLE_CACHES)
    latent_form.check_sizes(text, num_kv_heads, head_dim, v_head_dim, None if is_taken else extra)


LATENT_PAGES = StorageForm(
    name="latent_pages",
    description="packed queries, and such latents in pages that a table names",
    prefixes={False: "latent", True: "latentshared"},
    unit="pages",
    is_cache=True,
    is_tied=True,
    maps_over_batch=False,
    check_sizes=check_sizes,
    check_lengths=paged_form.check_lengths,
    draw_layout=paged_form.draw_layout,
    describe_layout=paged_form.describe_layout,
    operands=("q", "latent_pages"),
    tables=paged_form.TABLES,
    parameters=(
        *(*paged_form.TABLES, *LATENT_SCALES, *WHOLE_LATENT_SCALE, "value_dim"),
        *("causal", "window", "indices", "local_window"),
        *(*STORED_OPERANDS, "save_residuals"),
    ),
    required={**paged_form.REQUIRED, **latent_form.REQUIRED},
    noun="latents in pages",
    scales=(
        ScaleParameters(
            names=LATENT_SCALES,
            descriptions=("the scales of latents, [pages, page_size]",),
            features=paged_form.SCALED_FEATURES,
            caches=PAGED_CACHES,
        ),
        ScaleParameters(
            names=WHOLE_LATENT_SCALE,
            descriptions=("the scale of all latents, a number",),
            features=paged_form.WHOLE_FEATURES,
            caches=WHOLE_CACHES,
        ),
    ),
    arrange=lambda arrays: {"latent_pages": arrays["k"][..., 0, :]},
    example="latent16",
    level="latent",
    condition="values are a part of the keys",
)
