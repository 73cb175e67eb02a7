"""Masks as the objects that splash attention takes, in JAX and in tokamax, which name and mean them alike."""

from __future__ import annotations

from typing import Any

from cases.masks import And, Causal, Chunked, Full, Mask, Or, Window

BLOCK = 128  # In both the default block; the key block must be a multiple of 128, the number of TPU lanes.


def build_library_mask(library: Any, mask: Mask, shape: tuple[int, int]) -> Any:
    """The library's own mask of the same meaning where it has one, else an array.

    `Window` and `LocalMask` agree: both count the keys on each side without the query's own.

    Args:
      library: the module with its masks.
      mask: the same for all heads and batch rows.
      shape: lengths `(T, S)`.
    """
    match mask:
        case Full():
            return library.FullMask(shape)
        case Causal(offset):
            return library.CausalMask(shape, offset)
        case Window(left, right, offset):
            return library.LocalMask(shape, (left, right), offset)
        case Chunked(size, 0):
            return library.ChunkedCausalMask(shape, size)
        case And():
            return build_library_mask(library, mask.left, shape) & build_library_mask(library, mask.right, shape)
        case Or():
            return build_library_mask(library, mask.left, shape) | build_library_mask(library, mask.right, shape)
        case _:
            return library.NumpyMask(mask.dense(*shape)[0, 0])


def find_length_limit(q_length: int, kv_length: int) -> str | None:
    """Why the lengths do not fit, or None."""
    for name, length in (("T", q_length), ("S", kv_length)):
        if length % BLOCK:
            return f"needs lengths that are multiples of {BLOCK}, its smallest block; {name} is {length}"
    return None
