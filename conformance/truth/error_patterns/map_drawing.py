"""Draw a coarse picture of where a result is wrong, as lines of digits that a record stores.

`reports.records` defines the picture and shows it in reports.
"""

from __future__ import annotations

import numpy as np

from conformance.truth.error_patterns.failure import DEPTH_LETTERS, Failure
from reports.records import MAX_CELLS, ErrorMap

_LARGEST_SHADE = 8  # the shade of the largest ratios, and of all ratios beyond them
_NOT_FINITE_SHADE = 9  # the shade of wrong elements that are NaN or infinite


def draw_error_map(failure: Failure, blocks: tuple[int, int] = (0, 0)) -> ErrorMap | None:
    """Draw the picture of a wrong result; None if the result has neither rows nor keys.

    `blocks` are the sizes of the blocks of queries and of keys whose borders the error follows, 0 for none.
    """
    letters = failure.letters
    along = next((letter for letter in "TS" if letter in letters), "")
    if not along:
        return None
    ratios = np.where(failure.judged, failure.ratios, -1.0)
    lost = ~np.isfinite(failure.values)
    worst = np.unravel_index(int(np.argmax(ratios)), ratios.shape)
    batch, head = _find_worst_head(failure, worst)
    axes = _choose_axes(failure, ratios, along)
    panel, panel_lost = _project(ratios, letters, axes), _project(lost & failure.judged, letters, axes)
    mask: tuple[str, ...] = ()
    mask_shape, marks = (0, 0), ""
    if failure.is_core and letters != "BNTS":
        allowed = failure.problem.allowed
        pairs = allowed[min(batch, allowed.shape[0] - 1), min(head, allowed.shape[1] - 1)]
        mask, mask_shape = _draw_mask(pairs), pairs.shape
        slice_, slice_lost = (_project_slice(failure, x, along, batch, head) for x in (ratios, lost & failure.judged))
        marks = _draw_cells(slice_[None], slice_lost[None], failure.limit)[0]
    return ErrorMap(
        axes=axes,
        shape=panel.shape,
        cells=_draw_cells(panel, panel_lost, failure.limit),
        at=(batch, head),
        mask=mask,
        mask_shape=mask_shape,
        marks=marks,
        along=along if marks else "",
        blocks=blocks,
    )


def _find_worst_head(failure: Failure, worst: tuple[np.intp, ...]) -> tuple[int, int]:
    """Return batch row and query head of the worst element; a key/value head counts as the first head that reads it."""
    places = {letter: int(n) for letter, n in zip(failure.letters, worst, strict=True)}
    return places["B"], places["N"] if "N" in places else places["K"] * failure.group


def _choose_axes(failure: Failure, ratios: np.ndarray, along: str) -> tuple[str, str]:
    """Choose the two axes of the picture.

    Rows or keys are drawn against heads if there are several heads or batch rows, and against columns otherwise.
    Results with an entry for each pair are drawn as queries against keys.
    """
    sizes = dict(zip(failure.letters, ratios.shape, strict=True))
    if failure.letters == "BNTS":
        return ("T", "S")
    heads = "K" if along == "S" else "N"
    if sizes["B"] * sizes[heads] == 1 and failure.letters[-1] in DEPTH_LETTERS:
        return (along, failure.letters[-1])
    return (along, f"B{heads}")


def _project(values: np.ndarray, letters: str, axes: tuple[str, str]) -> np.ndarray:
    """Reduce an array to two axes by the largest value along all others. A pair of letters is flattened to one axis."""
    order = [letters.index(letter) for letter in "".join(axes)]
    rest = [n for n in range(len(letters)) if n not in order]
    kept = values.transpose([*order, *rest]).max(axis=tuple(range(len(order), len(letters))))
    return kept.reshape(kept.shape[0], -1)


def _project_slice(failure: Failure, values: np.ndarray, along: str, batch: int, head: int) -> np.ndarray:
    """Reduce an array to the largest value of each row or key, in one batch row and one head."""
    letters = failure.letters
    heads = head if "N" in letters else head // failure.group
    one = [batch if x == "B" else heads if x in "NK" else slice(None) for x in letters]
    part = values[tuple(one)]
    return part if part.ndim == 1 else part.max(axis=-1)


def _draw_cells(ratios: np.ndarray, lost: np.ndarray, limit: float) -> tuple[str, ...]:
    """Draw `ratios [rows, columns]` with a digit for each decade beyond the limit, and `-` for -1 (not judged)."""
    with np.errstate(divide="ignore", invalid="ignore"):
        decades = np.ceil(np.log10(np.where(ratios > 0, ratios, 0.0) / limit))
    shades = np.clip(
        np.nan_to_num(decades, nan=_LARGEST_SHADE, posinf=_LARGEST_SHADE, neginf=-1) + 1, 0, _LARGEST_SHADE
    )
    shades = np.where(ratios < 0, -1, np.where(lost & (ratios > limit), _NOT_FINITE_SHADE, shades))
    for axis in (0, 1):
        shades = np.maximum.reduceat(shades, _compute_cell_starts(shades.shape[axis]), axis=axis)
    return tuple("".join("-" if n < 0 else str(int(n)) for n in line) for line in shades)


def _draw_mask(pairs: np.ndarray) -> tuple[str, ...]:
    """Draw a mask as lines of digits: 0 if a cell allows no pair, 2 if it allows all, otherwise 1."""
    low, high = pairs, pairs
    for axis in (0, 1):
        starts = _compute_cell_starts(pairs.shape[axis])
        low, high = np.logical_and.reduceat(low, starts, axis=axis), np.logical_or.reduceat(high, starts, axis=axis)
    return tuple("".join(map(str, line)) for line in low.astype(int) + high.astype(int))


def _compute_cell_starts(length: int) -> np.ndarray:
    """Compute the index at which each cell begins if an axis is drawn as at most `MAX_CELLS` cells."""
    cells = min(length, MAX_CELLS)
    return np.arange(cells) * length // cells
