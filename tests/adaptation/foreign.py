"""Give an implementation of the contract the signature, layout and conventions of a foreign function."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from cases.masks import Causal, Full, Indexer, Mask, Window
from impls.contract.implementation import Implementation


@dataclasses.dataclass(frozen=True)
class Style:
    """Conventions of a library.

    Attributes:
      layout: the order of axes, `"BTNH"`, `"BNTH"` or `"TBNH"`.
      causal: where `causal` is aligned.
      window: `"pair"` with -1 for open sides, or `"own"` for one number that counts the query's own key.
      mask: `"keep"`, `"drop"` or `"add"`: what True means, or that numbers are added.
      scale: the scale by default; None for `1 / sqrt(H)`.
      logsumexp: `"BNT"` or `"BTN"`, and its base.
    """

    layout: str = "BTNH"
    causal: str = "start"
    window: str = "pair"
    mask: str = "keep"
    scale: float | None = None
    logsumexp: tuple[str, int | str] = ("BNT", "e")


STYLES = {
    "flash-attention": Style(causal="end"),
    "heads first": Style(layout="BNTH", mask="add", scale=1.0),
    "sequence first": Style(layout="TBNH", mask="drop", window="own", logsumexp=("BTN", 2)),
}


def make_foreign(implementation: Implementation, style: Style) -> Callable[..., Any]:
    """Return the function as a library of this style would have it."""

    def build_mask(q_length: int, kv_length: int, causal: bool, window: Any, attn_mask: Any) -> Mask:
        first = 0 if style.causal == "start" else kv_length - q_length
        mask: Mask = Full()
        if causal:
            mask = mask & Causal(first)
        if style.window == "own" and window is not None:
            mask = mask & Window(window - 1, 0, first)
        if style.window == "pair" and window != (-1, -1):
            left, right = (None if side < 0 else side for side in window)
            mask = mask & Window(left, right, first)
        if attn_mask is None:
            return mask
        if style.mask == "add":
            return mask & Indexer(attn_mask > -1e20)
        return mask & Indexer(attn_mask if style.mask == "keep" else ~attn_mask)

    swap = {"BTNH": lambda x: x, "BNTH": lambda x: x.swapaxes(1, 2), "TBNH": lambda x: x.swapaxes(0, 1)}[style.layout]
    off = (-1, -1) if style.window == "pair" else None

    def foreign_attention(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        is_causal: bool = False,
        softmax_scale: Any = None,
        window_size: Any = off,
        softcap: float = 0.0,
        return_lse: bool = False,
    ) -> Any:
        """Attention in foreign conventions."""
        q, k, v = map(swap, (query, key, value))
        options = {"soft_cap": softcap or None, "scale": style.scale if softmax_scale is None else softmax_scale}
        mask = build_mask(q.shape[1], k.shape[1], is_causal, window_size, attn_mask)
        static, arrays = implementation.lower_mask(mask, q.shape[0], q.shape[2], q.shape[1], k.shape[1])
        attend = functools.partial(implementation.call, q, k, v, **options, **static, **arrays)
        if not return_lse:
            return swap(attend())
        out, residuals = attend(save_residuals=True)
        logsumexp = residuals["logsumexp"] / (1 if style.logsumexp[1] == "e" else jnp.log(2.0))
        return swap(out), logsumexp.swapaxes(1, 2) if style.logsumexp[0] == "BTN" else logsumexp

    return foreign_attention
