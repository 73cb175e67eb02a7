"""Pages that a call writes: they are compared bit for bit, row by row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from cases.storage_forms.page_writes import PAGE_ARRAYS, Writing, build_writing, view_bits
from conformance import records
from conformance.check_api.judgement import Judgement
from conformance.check_api.subject import Subject
from conformance.executor_tasks import page_write_calls as driven

_CONTENTS = {"k_pages": "keys", "v_pages": "values"}


def check_pages(subject: Subject, *, save_residuals: bool) -> Iterator[Judgement]:
    """The pages that a call returns: new tokens in their rows, and every other bit as it was."""
    what = build_page_writing(subject)
    got = subject.executor.run(
        driven.run_page_write, subject.problem, what.tokens, what.before, save_residuals=save_residuals
    )
    yield from judge_pages(what, got)


def build_page_writing(subject: Subject) -> Writing:
    """What the call of the case writes, into pages that hold anything where that is allowed."""
    return build_writing(subject.problem, subject.case.seed, finite=subject.implementation.behind_mask == "finite")


def judge_pages(what: Writing, got: Mapping[str, np.ndarray]) -> Iterator[Judgement]:
    """The verdict on each of the pools that came."""
    for name in PAGE_ARRAYS:
        reason = _describe_difference(name, what, got[name])
        yield Judgement(observable=name, verdict=records.FAIL if reason else records.PASS, reason=reason)


def _describe_difference(name: str, what: Writing, got: np.ndarray) -> str:
    """What is wrong of a pool, in words; empty if nothing is."""
    must, before = what.after[name], what.before[name]
    if (got.shape, got.dtype) != (must.shape, must.dtype):
        return f"must be {must.dtype}{list(must.shape)} as before the call, and is {got.dtype}{list(got.shape)}"
    differs = (view_bits(got) != view_bits(must)).any(axis=(2, 3))  # [pages, page_size]
    if not differs.any():
        return ""
    missing, stray = differs & what.written, differs & ~what.written
    found = []
    if missing.any():
        count = f"{missing.sum()} of {what.written.sum()} rows do not hold the new {_CONTENTS[name]}"
        found.append(
            f"{count}: {_describe_first(missing, got, must)}{_describe_unchanged(missing, got, before)}{_describe_misplaced(missing, got, must)}"
        )
    if stray.any():
        count = f"{stray.sum()} of {(~what.written).sum()} rows that nothing is written to have changed"
        found.append(f"{count}: {_describe_first(stray, got, must)}")
    return "; ".join(found)


def _describe_first(rows: np.ndarray, got: np.ndarray, must: np.ndarray) -> str:
    """The first element of the first of `rows` that differs."""
    page, row = np.argwhere(rows)[0]
    mine, theirs = view_bits(got)[page, row], view_bits(must)[page, row]
    head, depth = np.argwhere(mine != theirs)[0]
    at = (page, row, head, depth)
    digits = 2 * got.dtype.itemsize
    here, there = mine[head, depth], theirs[head, depth]
    return (
        f"page {page}, row {row}, head {head}, element {depth} is {float(got[at]):.6g} (0x{here:0{digits}x}), "
        f"must be {float(must[at]):.6g} (0x{there:0{digits}x})"
    )


def _describe_unchanged(rows: np.ndarray, got: np.ndarray, before: np.ndarray) -> str:
    same = not (view_bits(got)[rows] != view_bits(before)[rows]).any()
    return "; all of them are as before the call" if same else ""


def _describe_misplaced(rows: np.ndarray, got: np.ndarray, must: np.ndarray) -> str:
    """Where the first missing row is instead, if it is anywhere."""
    page, row = np.argwhere(rows)[0]
    there = np.argwhere((view_bits(got) == view_bits(must)[page, row]).all(axis=(2, 3)))
    return f"; what must be there is in page {there[0][0]}, row {there[0][1]}" if len(there) else ""
