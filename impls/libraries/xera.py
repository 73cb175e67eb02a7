"""Adapter of `xera.functional.flash_sdpa` on its portable back end, in the layout `[B, N, T, H]`.

All lengths, heads and depths are the same (https://github.com/arunika-labs/xera). Logits are rounded to the operands'
dtype before they become f32.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from xera.functional import flash_sdpa as library_call

from impls.contract.declarations import declare

_UNSUPPORTED = {
    **dict.fromkeys(("gqa", "mqa"), "q, k and v have the same number of heads"),
    **dict.fromkeys(("unequal_lengths", "decode"), "q, k and v have the same length"),
    "v_head_dim": "values have the depth of keys",
}


@declare(logits="input", empty_rows="zero", behind_mask="finite", unsupported=_UNSUPPORTED)
def flash_sdpa(
    q: Any, k: Any, v: Any, *, causal: bool = False, window: Any = None, bias: Any = None, scale: Any = None
) -> Any:
    """`xera.functional.flash_sdpa`, in blocks of 128 queries and keys."""
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
    options = {"causal": causal, "scale": scale, "bias": bias, "local_window_size": window}
    return jnp.swapaxes(library_call(q, k, v, backend="jax", **options), 1, 2)
