"""Build the covering-array models for kernels that write pages, from the models for paged kernels.

Only the shapes (lengths of sequences) change. A call that writes pages gets new tokens, which are both its queries and
its last keys, so no sequence may have more queries than keys. No call may write a page that sequences share. So
sequences with a common prefix have whole pages of that prefix before their new tokens, as in servers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from cases.covering_model import Model
from cases.storage_forms.sequence_shapes import SequenceLengths, Shape, list_token_lengths


def _mix_lengths(p: int) -> SequenceLengths:
    """Return `(queries, keys)` of four sequences, for pages of `p` tokens.

    The sequences are a chunk that starts on a page border, a token that fills a page, a token that starts a page, and a
    prompt shorter than a page. If `p` is 1, no prompt is shorter than a page, so a chunk replaces the prompt.
    """
    short = min(9, p - 1)
    return (13, 13 + 2 * p), (1, 2 * p), (1, 2 * p + 1), (short, short) if short else (2, 4)


WRITE_SHAPES = (
    Shape("mixed", _mix_lengths),
    Shape("decode", lambda p: ((1, 3 * p), (0, p), (1, 2 * p + 1), (1, max(2, p - 1))), phase="decode"),
    Shape("prompts", lambda p: ((23, 23), (1, 1), (p + 1 if p < 60 else 40, p + 1))),
    # New tokens that fill whole pages, from one page border to another.
    Shape("whole", lambda p: ((min(p, 32), 3 * p), (2 * min(p, 16), 4 * p), (1, p + 2))),
    Shape("chunk", lambda p: ((16, 17 + 2 * p),)),
    # Sequences without queries, and with neither queries nor keys, among others. New tokens that begin a page.
    Shape("gaps", lambda p: ((0, 0), (1, p + 2), (0, 2 * p), (5, 5 + 2 * p), (0, 0), (1, 2), (0, 0))),
    # One page more than in other grids, so that no token is written to a page that sequences share.
    Shape("tokens", lambda p: tuple((1, keys + p) for _, keys in list_token_lengths(p)), phase="decode"),
    Shape("alike", lambda p: ((4, 4 * p + 4), (1, 4 * p), (7, 4 * p + 9))),
)
"""Sequences of calls that write pages."""
# Lengths that replace those of the shapes of paged kernels, by name of the shape. They are chunks in place of whole
# prompts, so that the pages before a chunk can be shared.
_OTHER_LENGTHS: Mapping[str, SequenceLengths] = {
    "borders": ((128, 256), (127, 255), (1, 129), (129, 257)),
    "heads": ((17, 49), (1, 40)),
    "odd_heads": ((6, 38), (3, 50), (1, 9)),
}


def build_write_models(paged: tuple[Model, Model]) -> tuple[Model, Model]:
    """Build the models of features and of sizes for kernels that write pages, from the two for paged kernels."""
    features, sizes = paged
    return _replace_shapes(features, lambda shapes: WRITE_SHAPES), _replace_shapes(
        sizes, lambda shapes: tuple(map(_replace_lengths, shapes))
    )


def _replace_shapes(model: Model, change: Callable[[tuple[Shape, ...]], tuple[Shape, ...]]) -> Model:
    axes = (
        dataclasses.replace(axis, levels=change(axis.levels)) if axis.name == "shape" else axis for axis in model.axes
    )
    return dataclasses.replace(model, axes=tuple(axes))


def _replace_lengths(shape: Shape) -> Shape:
    lengths = _OTHER_LENGTHS.get(shape.name)
    return shape if lengths is None else dataclasses.replace(shape, lengths=lambda p: lengths)
