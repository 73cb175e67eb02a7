"""Storage form `latent_pages`: packed queries, and latents in pages that a table names.

    attention(q, latent_pages, *, value_dim, scale, kv_lens, page_indices, cu_q_lens, num_seqs, window=None, ...)

`q` is `[total_q, N, H]` and `latent_pages` is `[pages, page_size, H]`. The latents are those of the storage form
`latent` (`latent_form`). The tables and pages are those of the storage form `paged` (`paged_form`).
"""

from __future__ import annotations

from cases.storage_forms import latent_form, paged_form
from cases.storage_forms.storage_form import STORED_OPERANDS, StorageForm

LATENT_PAGES = StorageForm(
    name="latent_pages",
    description="packed queries, and such latents in pages that a table names",
    prefixes={False: "latent", True: "latentshared"},
    unit="pages",
    is_cache=True,
    is_tied=True,
    maps_over_batch=False,
    check_sizes=latent_form.check_sizes,
    check_lengths=paged_form.check_lengths,
    draw_layout=paged_form.draw_layout,
    describe_layout=paged_form.describe_layout,
    operands=("q", "latent_pages"),
    tables=paged_form.TABLES,
    parameters=(
        *(*paged_form.TABLES, "value_dim", "causal", "window", "indices", "local_window"),
        *(*STORED_OPERANDS, "save_residuals"),
    ),
    required={**paged_form.REQUIRED, **latent_form.REQUIRED},
    noun="latents in pages",
    arrange=lambda arrays: {"latent_pages": arrays["k"][..., 0, :]},
    example="latent16",
    level="latent",
    condition="values are a part of the keys",
)
