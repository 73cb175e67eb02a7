"""Errors that look like rounding: values of fewer bits, or errors that are scattered evenly and have no sign."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from conformance.truth.patterns.fitting import EXPLAINED, Sample

_NARROW = (("bf16", ml_dtypes.bfloat16, 8), ("f16", np.float16, 11))
_FEWEST = 256
_LARGEST = 2.0**-5  # of the values: beyond, no rounding of a float that is in use reaches
_EVEN = 4.0  # how many times larger the error of one row in ten may be than that of another one in ten
_STRAY = 6.0  # the same of elements: 99 in 100 are smaller than so many times the root mean square
_SIGN = 0.2


def rounded(found: Sample) -> str:
    """`rounded to bf16`: every value is one that bf16 has, and near the right one."""
    if found.failure.got.dtype != np.float32 or found.got.size < _FEWEST or not np.isfinite(found.got).all():
        return ""
    for name, dtype, bits in _NARROW:
        with np.errstate(over="ignore"):
            kept = found.got.astype(np.float32).astype(dtype).astype(np.float64)
        near = np.abs(found.got - found.right) <= 2.0**-bits * np.abs(found.right) + found.tolerance(
            found.right, found.bound
        )
        if np.array_equal(kept, found.got) and near.mean() >= EXPLAINED and np.count_nonzero(found.got) >= _FEWEST:
            return f"rounded to {name}"
    return ""


def scattered(found: Sample) -> str:
    """`scattered like rounding`: as large in all rows, of either sign, without much that stands out."""
    error, right = found.got - found.right, found.right
    if found.got.size < _FEWEST or not np.isfinite(error).all() or not np.isfinite(right).all():
        return ""
    size = float(np.sqrt(np.mean(right**2)))
    rms = float(np.sqrt(np.mean(error**2)))
    if size == 0 or not 0 < rms <= _LARGEST * size:
        return ""
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = np.where(found.bound > 0, error / found.bound, 0.0)
    typical = float(np.sqrt(np.mean(scaled**2)))
    if abs(scaled.mean()) > _SIGN * typical or abs(np.corrcoef(error, right)[0, 1]) > _SIGN:
        return ""
    if np.quantile(np.abs(scaled), 0.99) > _STRAY * typical or not _even(found, scaled):
        return ""
    return f"scattered like rounding, about 2^{np.log2(rms / size):.0f} of the values"


def _even(found: Sample, scaled: np.ndarray) -> bool:
    """Whether rows have errors of like size."""
    failure = found.failure
    if failure.unit_letters == failure.letters:
        return True
    flat = np.ravel_multi_index(found.index[:-1], failure.got.shape[:-1])
    _, row, counts = np.unique(flat, return_inverse=True, return_counts=True)
    sizes = np.sqrt(np.bincount(row, scaled**2) / counts)
    low, high = np.quantile(sizes, (0.1, 0.9))
    return bool(high <= _EVEN * low)
