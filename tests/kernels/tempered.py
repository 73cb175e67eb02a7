"""A correct attention function with a learned temperature for each query head, as a user would write it."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from conformance import declare
from tests.kernels import naive


@declare(behind_mask="finite")
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: Any = None,
    mask: Any = None,
    segment_ids: Any = None,
    soft_cap: Any = None,
    sinks: Any = None,
    bias: Any = None,
    scale: Any = None,
    logit_scale: Any = None,
    save_residuals: bool = False,
) -> Any:
    """Naive attention whose queries are multiplied by the logit scale in f32."""
    tempered = q if logit_scale is None else q.astype(jnp.float32) * logit_scale[:, None]
    out, residuals = naive.attention(
        tempered,
        k,
        v,
        causal=causal,
        window=window,
        mask=mask,
        segment_ids=segment_ids,
        soft_cap=soft_cap,
        sinks=sinks,
        bias=bias,
        scale=scale,
        save_residuals=True,
    )
    out = out.astype(q.dtype)
    return (out, residuals) if save_residuals else out
