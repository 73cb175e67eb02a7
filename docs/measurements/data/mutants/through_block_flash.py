"""Read calls of `impls.block_flash.attention`, whose masks are objects."""

import jax.numpy as jnp

PARAMETERS = ("mask", "segment_ids", "soft_cap", "sinks", "bias", "scale", "save_residuals")


def call(attention, true, q, k, v, *, mask, block_sizes=None, **options):
    """Write the mask as an array of booleans."""
    return attention(q, k, v, mask=jnp.asarray(mask.dense(q.shape[1], k.shape[1])), **options)
