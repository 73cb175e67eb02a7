"""Read calls of `equinox.nn._attention:dot_product_attention`, one head at a time."""

PARAMETERS = ("mask",)


def call(attention, true, query, key_, value, mask=None, dropout=None, *, key=None, inference=None):
    """Replace calls without dropout."""
    if dropout is not None and dropout.p and not (dropout.inference if inference is None else inference):
        return true(query, key_, value, mask, dropout, key=key, inference=inference)
    q, k, v = (x[None, :, None] for x in (query, key_, value))
    return attention(q, k, v, mask=None if mask is None else mask[None, None])[0, :, 0]
