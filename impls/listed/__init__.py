"""Attention to listed keys only: dense, packed and in pages, and to latents; the keys of each list are gathered.

All calls end in one kernel over rows (`impls.listed.listed_rows`).
"""

from impls.listed.attention import attention, latent_attention
from impls.listed.implementation import IMPLEMENTATIONS
from impls.listed.stored_lists import (
    latent_pages_attention,
    packed_attention,
    paged_attention,
    paged_attention_with_update,
)

__all__ = [
    "IMPLEMENTATIONS",
    "attention",
    "latent_attention",
    "latent_pages_attention",
    "packed_attention",
    "paged_attention",
    "paged_attention_with_update",
]
