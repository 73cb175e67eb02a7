"""Read calls of flax's `dot_product_attention`, of linen and of nnx."""

import inspect

import jax.numpy as jnp

PARAMETERS = ("causal", "mask", "bias")


def call(attention, true, *arguments, **options):
    """Replace calls without dropout; what is stored in a module is the true function's."""
    given = inspect.signature(true).bind(*arguments, **options)
    given.apply_defaults()
    a = given.arguments
    q, k, v = (jnp.asarray(a[name], a["dtype"]) for name in ("query", "key", "value"))
    own = any(a.get(name) is not None for name in _OWN)
    dropped = a["dropout_rate"] > 0 and not a["deterministic"]
    if dropped or own or not jnp.issubdtype(q.dtype, jnp.floating) or q.shape[-2] % k.shape[-2]:
        return true(*arguments, **options)
    if a["module"] is not None:
        true(*arguments, **options)
    q4, k4, v4 = (x.reshape(-1, *x.shape[-3:]) for x in (q, k, v))
    pairs, bias = (_flatten(a[name], q, k) for name in ("mask", "bias"))
    if pairs is not None:
        pairs = pairs != 0
    out = attention(q4, k4, v4, causal=a.get("is_causal", False), mask=pairs, bias=bias)
    return out.reshape(*q.shape[:-1], v.shape[-1])


_OWN = ("einsum_dot_general", "qk_attn_weights_einsum", "attn_weights_value_einsum")


def _flatten(x, q, k):
    if x is None:
        return None
    full = (*q.shape[:-3], x.shape[-3], x.shape[-2], k.shape[-3])
    return jnp.broadcast_to(x, full).reshape(-1, *full[-3:])
