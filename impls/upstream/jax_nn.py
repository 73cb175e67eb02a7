"""`jax.nn.dot_product_attention(implementation="xla")`.

Masks go to its native arguments where those mean exactly the same (`is_causal`, `local_window_size`,
`key_value_seq_lengths`), and what is left over to its boolean `mask`. Its logsumexp `[B, T, N]` is natural, comes in
the operands' dtype (bf16 has lost most digits before the adapter casts it to f32) and carries no gradient
(`stop_gradient` in the library).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cases.masks import Causal, Full, Lengths, Mask, Window, conjuncts
from conformance.contract import Arithmetic, Implementation
from impls.upstream.refusals import refuse
from impls.versions import default_products

NAME = "jax_nn_xla"
UNSUPPORTED = {
    "soft_cap": "takes no soft cap",
    "sinks": "takes no sinks",
    "segment_ids": "takes no segment ids",
    "v_head_dim": "needs values of the same depth as keys",
}


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    mask: Mask,
    segment_ids: Any = None,
    soft_cap: float | None = None,
    sinks: Any = None,
    bias: jax.Array | None = None,
    scale: float | None = None,
    save_residuals: bool = False,
) -> Any:
    """The canonical call (`conformance.contract`)."""
    refuse(
        NAME,
        UNSUPPORTED,
        q,
        k,
        v,
        mask=mask,
        segment_ids=segment_ids,
        soft_cap=soft_cap,
        sinks=sinks,
        bias=bias,
        scale=scale,
    )
    result: Any = jax.nn.dot_product_attention(  # type: ignore[call-overload] # overloads want a literal flag
        q,
        k,
        v,
        bias,
        scale=scale,
        implementation="xla",
        return_residual=save_residuals,
        **mask_arguments(mask, q.shape[0], q.shape[1], k.shape[1]),
    )
    if not save_residuals:
        return result
    out, logsumexp = result
    return out, {"logsumexp": logsumexp.astype(jnp.float32).transpose(0, 2, 1)}


def mask_arguments(mask: Mask, batch: int, q_length: int, kv_length: int) -> dict[str, Any]:
    """Keyword arguments of `jax.nn.dot_product_attention` that together mean `mask`."""
    arguments: dict[str, Any] = {}
    rest: np.ndarray | None = None
    for part in conjuncts(mask):
        if isinstance(part, Full):
            continue
        if part == Causal(0):
            arguments["is_causal"] = True
        elif isinstance(part, Window) and part.offset == 0 and "local_window_size" not in arguments:
            # It has no unbounded side: a side as long as the sequence means the same.
            left = q_length if part.left is None else part.left
            right = kv_length if part.right is None else part.right
            arguments["local_window_size"] = (left, right)
        elif isinstance(part, Lengths) and "key_value_seq_lengths" not in arguments:
            lengths = np.broadcast_to(np.asarray(part.lengths, np.int32), (batch,))
            arguments["key_value_seq_lengths"] = jnp.asarray(lengths)
        else:
            dense = part.dense(q_length, kv_length)
            rest = dense if rest is None else rest & dense
    if rest is not None:
        arguments["mask"] = jnp.asarray(rest)
    return arguments


IMPLEMENTATIONS: tuple[Implementation, ...] = (
    Implementation(
        name=NAME,
        call=attention,
        description='jax.nn.dot_product_attention(implementation="xla")',
        unsupported=UNSUPPORTED,
        arithmetic=Arithmetic(products=default_products()),
        residuals=frozenset({"logsumexp"}),
        differentiable_residuals=frozenset(),
        gradients=frozenset({"dq", "dk", "dv", "dbias"}),
        empty_rows="mean",
    ),
)
