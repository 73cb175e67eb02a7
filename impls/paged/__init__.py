"""Attention over a paged cache: prompts, chunks of prompts and single tokens of many sequences in one call."""

from impls.paged.attention import attention
from impls.paged.implementation import (
    IMPLEMENTATIONS,
    build_implementation,
    build_latent_implementation,
    build_quantized_tpu_implementation,
)
from impls.paged.page_copies import side_by_side
from impls.paged.paged_latent import latent_attention
from impls.paged.paged_update import attention_with_update, latent_attention_with_update

__all__ = [
    "IMPLEMENTATIONS",
    "attention",
    "attention_with_update",
    "build_implementation",
    "build_latent_implementation",
    "build_quantized_tpu_implementation",
    "latent_attention",
    "latent_attention_with_update",
    "side_by_side",
]
