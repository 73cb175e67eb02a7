"""Read calls of tokamax's operations of attention."""

import jax
import jax.numpy as jnp
from tokamax._src.ops.attention import base

PARAMETERS = ("causal", "mask", "bias", "soft_cap", "scale")
_READ = {"precision", "bias", "mask", "is_causal", "logits_soft_cap", "logits_scale", "impl"}


def call(attention, true, self, q, k, v, **options):
    """Replace calls of arrays without dropout, pages, residuals and indices."""
    given = {name for name, x in options.items() if x is not None}
    if given - _READ or not all(isinstance(x, jax.Array) for x in (q, k, v)):
        return true(self, q, k, v, **options)
    q4, k4, v4 = (x.reshape(-1, *x.shape[-3:]) for x in (q, k, v))
    mask, scale = options.get("mask"), options.get("logits_scale")
    if isinstance(mask, base.Mask):
        mask = mask.as_array(q.shape[-3], k.shape[-3])
    out = attention(
        *(q4, k4, v4),
        causal=options.get("is_causal", False),
        mask=_flatten(mask, q, k),
        bias=_flatten(options.get("bias"), q, k),
        soft_cap=options.get("logits_soft_cap"),
        scale=scale if isinstance(scale, (float, int)) else None,
    )
    return out.reshape(*q.shape[:-1], v.shape[-1])


def _flatten(x, q, k):
    if x is None:
        return None
    x = x.reshape(*(1,) * (q.ndim - x.ndim), *x.shape)
    full = (*q.shape[:-3], x.shape[-3], q.shape[-3], k.shape[-3])
    return jnp.broadcast_to(x, full).reshape(-1, *full[-3:])
