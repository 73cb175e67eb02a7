"""Convert masks to the mask objects of splash attention, which have the same names and meanings in JAX and tokamax."""

from __future__ import annotations

from typing import Any

from cases.masks import And, Causal, Chunked, Full, Mask, Or, Window

BLOCK = 128  # The default block of both libraries. Key blocks must be multiples of 128, the number of TPU lanes.


def build_library_mask(library: Any, mask: Mask, shape: tuple[int, int]) -> Any:
    """Build the library's mask of the same meaning for lengths `(T, S)`, or an array where the library has none.

    `mask` is the same for all heads and batch rows. `Window` and `LocalMask` agree: both count the keys on each side
    without the query's own.
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
    """Return why the library's blocks do not fit the lengths, or None if they do."""
    for name, length in (("T", q_length), ("S", kv_length)):
        if length % BLOCK:
            return f"needs lengths that are multiples of {BLOCK}, its smallest block; {name} is {length}"
    return None
