"""Compare the pages that a call writes with the expected pages, bit for bit.

The checks `forward`, `residuals`, `aliasing`, `calls` and `decoding` use this module. A row of a page holds one token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from cases.storage_forms.page_writes import Writing, build_writing, view_bits
from conformance.check_api.judgement import Judgement
from conformance.check_api.subject import Subject
from conformance.executor_tasks import page_write_calls
from reports import records

_CONTENTS = {"k_pages": "keys", "v_pages": "values", "latent_pages": "latents"}


def check_pages(subject: Subject, *, save_residuals: bool) -> Iterator[Judgement]:
    """Check that the pages that a call returns hold the new tokens in their rows, with every other bit unchanged."""
    writing = build_page_writing(subject)
    got = subject.executor.run(
        page_write_calls.run_page_write, subject.problem, writing.tokens, writing.before, save_residuals=save_residuals
    )
    yield from judge_pages(writing, got)


def build_page_writing(subject: Subject) -> Writing:
    """Build the pages before and after the case's call, and the new tokens.

    Unwritten rows hold arbitrary bits, or finite numbers if the implementation declares `behind_mask="finite"`.
    """
    return build_writing(subject.problem, subject.case.seed, finite=subject.implementation.behind_mask == "finite")


def judge_pages(writing: Writing, got: Mapping[str, np.ndarray]) -> Iterator[Judgement]:
    """Judge each returned page array by the expected one."""
    for name in writing.after:
        reason = _describe_difference(name, writing, got[name])
        yield Judgement(observable=name, verdict=records.FAIL if reason else records.PASS, reason=reason)


def _describe_difference(name: str, writing: Writing, got: np.ndarray) -> str:
    """Describe how a page array differs from the expected one; return "" if it does not."""
    expected, before = writing.after[name], writing.before[name]
    if (got.shape, got.dtype) != (expected.shape, expected.dtype):
        return f"must be {expected.dtype}{list(expected.shape)} as before the call, and is {got.dtype}{list(got.shape)}"
    differs = _find_different_rows(view_bits(got), view_bits(expected))
    if not differs.any():
        return ""
    missing, stray = differs & writing.written, differs & ~writing.written
    differences = []
    if missing.any():
        count = f"{missing.sum()} of {writing.written.sum()} rows do not hold the new {_CONTENTS[name]}"
        first = _describe_first(missing, got, expected)
        where = _describe_unchanged(missing, got, before) + _describe_misplaced(missing, got, expected)
        differences.append(f"{count}: {first}{where}")
    if stray.any():
        count = f"{stray.sum()} of {(~writing.written).sum()} rows that nothing is written to have changed"
        differences.append(f"{count}: {_describe_first(stray, got, expected)}")
    return "; ".join(differences)


def _describe_first(rows: np.ndarray, got: np.ndarray, expected: np.ndarray) -> str:
    """Describe the first element that differs, in the first of `rows`."""
    page, row = np.argwhere(rows)[0]
    got_bits, expected_bits = view_bits(got)[page, row], view_bits(expected)[page, row]
    element = tuple(np.argwhere(got_bits != expected_bits)[0])  # a head and a coordinate; of latents, a coordinate
    at = (page, row, *element)
    digits = 2 * got.dtype.itemsize
    got_element, expected_element = got_bits[element], expected_bits[element]
    head = f"head {element[0]}, " if len(element) > 1 else ""
    return (
        f"page {page}, row {row}, {head}element {element[-1]} is {float(got[at]):.6g} (0x{got_element:0{digits}x}), "
        f"must be {float(expected[at]):.6g} (0x{expected_element:0{digits}x})"
    )


def _find_different_rows(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return whether two arrays of pages `[pages, page_size, ...]` differ in each row, `[pages, page_size]`."""
    return (one != other).any(axis=tuple(range(2, one.ndim)))


def _describe_unchanged(rows: np.ndarray, got: np.ndarray, before: np.ndarray) -> str:
    """Return a remark if the call changed none of `rows`, else ""."""
    same = not (view_bits(got)[rows] != view_bits(before)[rows]).any()
    return "; all of them are as before the call" if same else ""


def _describe_misplaced(rows: np.ndarray, got: np.ndarray, expected: np.ndarray) -> str:
    """Return a remark that names the row where the first missing row's content is instead, or ""."""
    page, row = np.argwhere(rows)[0]
    matches = np.argwhere(~_find_different_rows(view_bits(got), view_bits(expected)[page, row]))
    return f"; what must be there is in page {matches[0][0]}, row {matches[0][1]}" if len(matches) else ""
