"""Read calls of `haiku.MultiHeadAttention`: attention between its projections is replaced."""

import haiku
import jax.numpy as jnp

PARAMETERS = ("mask",)


def call(attention, true, self, query, key, value, mask=None):
    """Take heads from the first three linear layers, and give the result to the last."""
    heads = []

    def project(layer, arguments, options, context):
        if not isinstance(context.module, haiku.Linear) or context.method_name != "__call__":
            return layer(*arguments, **options)
        if len(heads) == 3:
            return layer(_attend(attention, heads, mask).reshape(arguments[0].shape))
        projected = layer(*arguments, **options)
        heads.append(projected.reshape(*projected.shape[:-1], self.num_heads, -1))
        return projected

    with haiku.intercept_methods(project):
        return true(self, query, key, value, mask)


def _attend(attention, heads, mask):
    q, k, v = (x.reshape(-1, *x.shape[-3:]) for x in heads)
    if mask is not None:
        pairs = jnp.broadcast_to(mask != 0, (*heads[0].shape[:-3], mask.shape[-3], q.shape[1], k.shape[1]))
        mask = pairs.reshape(-1, *pairs.shape[-3:])
    return attention(q, k, v, mask=mask)
