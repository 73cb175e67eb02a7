"""Read calls of `jax.nn.dot_product_attention` that name an implementation; others are the reference of the tests."""

import jax.numpy as jnp

PARAMETERS = ("causal", "window", "mask", "bias", "scale", "save_residuals")


def call(attention, true, query, key, value, bias=None, mask=None, *, implementation=None, **options):
    """Replace calls with an implementation."""
    if implementation is None:
        return true(query, key, value, bias, mask, **options)
    q, k, v = (x.reshape(-1, *x.shape[-3:]) for x in (query, key, value))
    bias, pairs = (None if x is None else x.reshape(*(1,) * (4 - x.ndim), *x.shape) for x in (bias, mask))
    rows = None
    for name, length, axis in (("query_seq_lengths", q.shape[1], 2), ("key_value_seq_lengths", k.shape[1], 3)):
        if (lengths := options.get(name)) is not None:
            seen = jnp.expand_dims(jnp.arange(length)[None] < lengths[:, None], (1, 5 - axis))
            rows = seen[:, 0] if axis == 2 else rows
            pairs = seen if pairs is None else pairs & seen
    window = options.get("local_window_size")
    window = (window, window) if isinstance(window, int) else window
    found = attention(
        *(q, k, v),
        causal=options.get("is_causal", False),
        window=window,
        mask=pairs,
        bias=bias,
        scale=options.get("scale"),
        save_residuals=options.get("return_residual", False),
    )
    out, residuals = found if isinstance(found, tuple) else (found, None)
    out = (out if rows is None else out * rows[..., None]).reshape(query.shape)
    if residuals is None:
        return out
    return out, residuals["logsumexp"].swapaxes(1, 2).reshape(query.shape[:-1]).astype(out.dtype)
