"""Adapter of `jax.experimental.pallas.ops.gpu.decode_attention`: one query per sequence over a contiguous cache.

The library takes queries `[B, N, H]`, keys and values `[B, S, K, H]`. A sequence sees the keys from `start_idx` up to
`kv_seq_len`. So the adapter turns a causal mask, a window and lengths into two numbers per sequence. Each split must
have a whole number of blocks, so the adapter pads keys with zeros past `kv_seq_len`. The library's residuals are the
sum and the maximum, from which the adapter computes the logsumexp. The library's output is f32 for bf16 and f16
queries, since it divides by a sum plus an f32 epsilon; the adapter rounds it to q's dtype.
"""

from __future__ import annotations

import functools
import importlib
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from cases.case import FEATURES, Case
from cases.masks import Causal, Full, Lengths, Mask, OwnWindow, Window, list_conjuncts
from impls.contract.declarations import Arithmetic
from impls.contract.implementation import Accelerator, Implementation
from impls.jax_compat import Interpret, get_default_products, resolve_interpret, runs_on
from impls.libraries.adapter_refusals import forbid_gradients, refuse_unsupported
from impls.libraries.mask_flags import OTHER_MASKS, build_case_mask

NAME = "jax_decode_gpu"
SPLITS = 2
"""Programs that share the keys of a sequence. The library's default is 16, with at least 16 keys each."""
BLOCK = 32
"""Keys that a program takes at once. With the library's default of 128, most calls would have a single block."""
_RANGE = "takes a range of keys for each sequence"
_ONE_QUERY = "takes one query for each sequence"
OFFERS = frozenset({"own_window"})
UNSUPPORTED = {
    "train": f"{_ONE_QUERY}, and has no gradients",
    "prefill": _ONE_QUERY,
    **dict.fromkeys(OTHER_MASKS, _RANGE),
    "segment_ids": "takes no segment ids",
    "soft_cap": "takes no soft cap",
    "sinks": "takes no sinks",
    "bias": "takes no bias",
    "v_head_dim": "needs values of the same depth as keys",
}


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K V"],
    *,
    mask: Mask,
    segment_ids: tuple[Int[Array, "B T"], Int[Array, "B S"]] | None = None,
    soft_cap: float | None = None,
    sinks: Any = None,
    bias: Any = None,
    scale: float | None = None,
    save_residuals: bool = False,
    interpret: Interpret = None,
) -> Any:
    """Implement the canonical call (`impls.contract.implementation`) for one query per sequence.

    The operands are those of `impls.contract`.

    Args:
      mask: A mask that lets each sequence see one range of keys.
      interpret: As in `pallas_call`; by default true unless the process runs on a GPU.
    """
    others = {"segment_ids": segment_ids, "soft_cap": soft_cap, "sinks": sinks, "bias": bias, "scale": scale}
    refuse_unsupported(NAME, UNSUPPORTED, (q, k, v), mask, offers=OFFERS, **others)
    batch, kv_length = k.shape[:2]
    if q.shape[1] != 1:
        phase = "prefill" if q.shape[1] < kv_length else "train"
        raise NotImplementedError(f"{NAME} does not support {phase} ({FEATURES[phase]}): it {UNSUPPORTED[phase]}")
    ranges = find_key_ranges(mask, batch, kv_length)
    if ranges is None:
        raise NotImplementedError(f"{NAME} does not support this call: it {_RANGE}")
    start, end = map(jnp.asarray, ranges)  # [B], [B]

    def kernel(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        room = ((0, 0), (0, -kv_length % (SPLITS * BLOCK)), (0, 0), (0, 0))
        return _load_module().gqa(
            q[:, 0],
            jnp.pad(k, room),
            jnp.pad(v, room),
            start,
            end,
            sm_scale=1 / math.sqrt(q.shape[3]) if scale is None else float(scale),
            block_k=BLOCK,
            k_splits=SPLITS,
            interpret=bool(resolve_interpret(interpret, "gpu")),
            return_residuals=True,
        )

    found, (total, maximum) = forbid_gradients(NAME, "has no gradients", kernel)(q, k, v)
    out = found[:, None].astype(q.dtype)  # [B, 1, N, H]
    if not save_residuals:
        return out
    return out, {"logsumexp": (maximum + jnp.log(total))[..., None]}  # [B, N, 1]


def find_key_ranges(mask: Mask, batch: int, kv_length: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Find the first key and one past the last that each query sees, int32 `[B]`; None if `mask` is no range."""
    start, end = np.zeros(batch, np.int32), np.full(batch, kv_length, np.int32)
    for part in list_conjuncts(mask):
        low: Any = 0
        high: Any = kv_length
        if isinstance(part, Causal):
            high = part.offset + 1
        elif isinstance(part, Lengths):
            high = np.asarray(part.lengths)
        elif isinstance(part, (Window, OwnWindow)):
            place = np.asarray(part.positions) if isinstance(part, OwnWindow) else part.offset
            low = 0 if part.left is None else place - part.left
            right = 0 if isinstance(part, OwnWindow) else part.right
            high = kv_length if right is None else place + right + 1
        elif not isinstance(part, Full):
            return None
        start, end = np.maximum(start, low), np.minimum(end, high)
    return start.astype(np.int32), np.maximum(end, 0).astype(np.int32)


def _load_module() -> Any:
    """Load the library's module when it is needed: some versions warn on import."""
    return importlib.import_module("jax.experimental.pallas.ops.gpu.decode_attention")


def _find_case_limit(case: Case) -> str | None:
    if find_key_ranges(build_case_mask(case), case.batch, case.kv_length) is None:
        return _RANGE
    if runs_on("gpu") and case.head_dim & (case.head_dim - 1):
        return f"needs a head depth that is a power of two; H is {case.head_dim}"
    return None


IMPLEMENTATIONS: tuple[Implementation, ...] = (
    Implementation(
        name=NAME,
        call=attention,
        description="jax.experimental.pallas.ops.gpu.decode_attention.gqa",
        unsupported=UNSUPPORTED,
        offers=OFFERS,
        supports_case=_find_case_limit,
        arithmetic=Arithmetic(products=get_default_products()),
        residuals=frozenset({"logsumexp"}),
        differentiable_residuals=frozenset(),
        gradients=frozenset(),
        empty_rows="zero",
        behind_mask="finite",
        accelerator=Accelerator(
            platform="gpu",
            interpreted=not runs_on("gpu"),
            native=functools.partial(attention, interpret=False),
        ),
    ),
)
