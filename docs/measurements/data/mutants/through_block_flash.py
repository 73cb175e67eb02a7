"""Read calls of `impls.block_flash.implementation:attention`, whose masks are objects."""

import jax.numpy as jnp

from cases.masks import Full

PARAMETERS = ("mask", "segment_ids", "soft_cap", "sinks", "bias", "scale", "save_residuals")


def call(attention, true, q, k, v, *, mask=Full(), **options):
    """Replace calls without slopes and functions of scores; write the mask as an array of booleans."""
    if options.get("alibi_slopes") is not None or options.get("score_mod") is not None:
        return true(q, k, v, mask=mask, **options)
    read = {name: x for name, x in options.items() if name in PARAMETERS}
    return attention(q, k, v, mask=jnp.asarray(mask.dense(q.shape[1], k.shape[1])), **read)
