"""Bugs of sliding windows and chunks."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from cases.masks import Chunked, Full, Window
from conformance.mutation.kernels.mask_steps import each, mask_is, mask_starts, whole
from conformance.mutation.kernels.plain import planted
from conformance.mutation.kernels.triggers import both, has
from conformance.mutation.planted_bug import PlantedBug

_bug = functools.partial(planted, "windows")
_FORWARD = "out logsumexp max_logits"
_window = has("window")


@dataclasses.dataclass(frozen=True)
class _ChunkedFromZero(Chunked):
    """Chunks that end one position late."""

    def allowed(self, i: Any, j: Any) -> Any:
        position = i + self.offset
        return ((position - 1) // self.size == (j - 1) // self.size) & (j <= position)


BUGS: tuple[PlantedBug, ...] = (
    _bug(
        "window-one-key-too-few",
        says="A window has one key less on its left than asked for.",
        kind="window.off-by-one",
        reference="zml issue 763",
        shows=_FORWARD,
        trigger=_window,
        steps=each(Window, lambda mask, call: dataclasses.replace(mask, left=max(0, mask.left - 1))),
    ),
    _bug(
        "window-without-other-mask-ignored",
        says="A window is ignored unless it is combined with another mask.",
        kind="mask.window-ignored-nomask",
        reference="jax commit 099f0a1708",
        shows=_FORWARD,
        trigger=_window,
        steps=whole(lambda mask, call: Full() if isinstance(mask, Window) else mask),
    ),
    _bug(
        "window-left-side-ignored",
        says="The left bound of a window is ignored.",
        kind="window.sign",
        reference="hippogriff issue 7; keras-hub issue 2186",
        shows=_FORWARD,
        trigger=_window,
        steps=each(Window, lambda mask, call: dataclasses.replace(mask, left=None)),
    ),
    _bug(
        "window-right-side-ignored",
        says="The right bound of a window is ignored.",
        kind="window.right",
        reference="inferred from ejkernel commit 3ed3b1f",
        shows=_FORWARD,
        trigger=mask_starts("window-l17-r5"),
        steps=each(Window, lambda mask, call: dataclasses.replace(mask, right=None)),
    ),
    _bug(
        "window-zero-is-unbounded",
        says="A window with 0 keys on its right is unbounded on that side.",
        kind="window.sentinel-mixup",
        reference="inferred from TransformerEngine issue 3528",
        shows=_FORWARD,
        trigger=both(_window, lambda case: "-r0" in case.mask),
        steps=each(Window, lambda mask, call: dataclasses.replace(mask, right=mask.right or None)),
    ),
    _bug(
        "window-without-offset",
        says="The query offset of a window is ignored.",
        kind="decode.window-q-offset",
        reference="MaxText commit 8f82f2d02",
        shows=_FORWARD,
        trigger=mask_starts("window", offset=True),
        steps=each(Window, lambda mask, call: dataclasses.replace(mask, offset=0)),
    ),
    _bug(
        "window-leaks-into-full",
        says="A call without a mask gets a window of 127 keys to the left.",
        kind="window.leak-to-global",
        reference="MaxText commit b2530831d",
        shows=_FORWARD,
        trigger=both(mask_is("full"), lambda case: case.kv_length > 128),
        steps=whole(lambda mask, call: Window(127, None) if mask == Full() else mask),
    ),
    _bug(
        "chunk-without-offset",
        says="Chunked attention ignores the offset of the queries.",
        kind="chunk.local-vs-abs",
        reference="vllm issue 47300, PR 47332",
        shows=_FORWARD,
        trigger=mask_starts("chunked", offset=True),
        steps=each(Chunked, lambda mask, call: dataclasses.replace(mask, offset=0)),
    ),
    _bug(
        "chunk-boundary-one-late",
        says="Chunks begin and end one position too late.",
        kind="chunk.boundary",
        reference="inferred from MaxText commit 8bb104777",
        shows=_FORWARD,
        trigger=mask_starts("chunked"),
        steps=each(Chunked, lambda mask, call: _ChunkedFromZero(mask.size, mask.offset)),
    ),
    _bug(
        "chunk-as-window",
        says="Chunked attention is computed as a sliding window of the chunk size.",
        kind="chunk.boundary",
        reference="inferred from MaxText commit 8f82f2d02",
        shows=_FORWARD,
        trigger=mask_starts("chunked"),
        steps=each(Chunked, lambda mask, call: Window(mask.size - 1, 0, mask.offset)),
    ),
)
