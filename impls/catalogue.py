"""Names of our implementations and of the adapters, with the modules that define them.

The registry reads this table before it imports any of them. Each module has a tuple `IMPLEMENTATIONS`, with one
`impls.contract.implementation.Implementation` for each of its names.
"""

from __future__ import annotations

from collections.abc import Mapping

_NAMES_BY_MODULE: Mapping[str, tuple[str, ...]] = {
    "impls.dot_product": ("dot_product",),
    "impls.block_flash": ("block_flash", "block_flash_packed", "block_flash_latent"),
    "impls.splash_tpu": ("splash_tpu", "splash_tpu_fused", "splash_tpu_packed"),
    "impls.flash_gpu": ("flash_gpu", "flash_gpu_tf32", "flash_gpu_mosaic", "flash_gpu_packed"),
    "impls.context_parallel": (
        "block_flash_allgather",
        "block_flash_ring",
        "block_flash_ulysses",
        "block_flash_usp",
    ),
    "impls.auto": (
        "auto",
        "auto_moba_tpu",
        "auto_moba",
        "auto_quantized_kv",
        "auto_ragged_tpu",
        "auto_ragged_gpu",
        "auto_ragged",
        "auto_splash_tpu",
        "auto_flash_gpu",
        "auto_dot_product",
        "auto_block_flash",
    ),
    "impls.quantized_kv": ("quantized_kv", "quantized_kv_dequantized"),
    "impls.listed": (
        "listed",
        "listed_packed",
        "listed_latent",
        "listed_paged",
        "listed_latent_pages",
        "listed_paged_update",
    ),
    "impls.moba": ("moba", "moba_tpu", "moba_dense"),
    "impls.ragged": ("ragged", "ragged_tpu", "ragged_gpu", "ragged_gpu_mosaic"),
    "impls.paged": (
        "paged",
        "paged_tpu",
        "paged_gpu",
        "paged_gpu_mosaic",
        "paged_update",
        "paged_update_tpu",
        "paged_latent",
        "paged_latent_update",
        "paged_latent_tpu",
        "paged_quantized",
        "paged_update_quantized",
        "paged_latent_quantized",
        "paged_quantized_tpu",
        "paged_quantized_gpu",
        "paged_quantized_gpu_mosaic",
    ),
    "impls.libraries.jax_nn": ("jax_nn_xla", "jax_nn_cudnn"),
    "impls.libraries.jax_splash_tpu": ("jax_splash_tpu", "jax_splash_tpu_fused"),
    "impls.libraries.tokamax_splash": ("tokamax_splash_tpu",),
    "impls.libraries.jax_flash_tpu": ("jax_flash_tpu",),
    "impls.libraries.jax_mha_gpu": ("jax_mha_gpu", "jax_mha_gpu_xla_bwd"),
    "impls.libraries.mosaic_gpu": ("jax_mosaic_gpu", "tokamax_mosaic_gpu"),
    "impls.libraries.jax_ragged_paged_tpu": ("jax_ragged_paged_tpu",),
    "impls.libraries.jax_decode_gpu": ("jax_decode_gpu",),
    "impls.libraries.jax_paged_decode": ("jax_paged_tpu", "jax_paged_gpu"),
    "impls.libraries.tpu_inference_kernels": ("tpu_inference_ragged_paged_tpu", "tpu_inference_latent_tpu"),
}

MODULES: Mapping[str, str] = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}
"""Module of each name, in the order in which commands list them."""
