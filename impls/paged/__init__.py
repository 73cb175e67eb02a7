"""Attention over a cache in pages: prompts, chunks of prompts and single tokens of many sequences in one call."""

from impls.paged.attention import attention
from impls.paged.implementation import IMPLEMENTATIONS, implementation, latents, quantized_tpu
from impls.paged.latent import latent_attention
from impls.paged.scales import side_by_side
from impls.paged.update import attention_with_update

__all__ = [
    "IMPLEMENTATIONS",
    "attention",
    "attention_with_update",
    "implementation",
    "latent_attention",
    "latents",
    "quantized_tpu",
    "side_by_side",
]
