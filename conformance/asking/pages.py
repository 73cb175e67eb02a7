"""Pages that a call writes: they are compared bit for bit, row by row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from cases.serving.written import POOLS, Writing, bits, writing
from conformance import records
from conformance.asking.judgement import Judgement
from conformance.asking.subject import Subject
from conformance.driving import written as driven

_OF_POOL = {"k_pages": "keys", "v_pages": "values"}


def pages(subject: Subject, *, save_residuals: bool) -> Iterator[Judgement]:
    """The pages that a call returns: new tokens in their rows, and every other bit as it was."""
    what = writing_of(subject)
    got = subject.executor.run(driven.pages, subject.problem, what.tokens, what.before, save_residuals=save_residuals)
    yield from judged(what, got)


def writing_of(subject: Subject) -> Writing:
    """What the call of the case writes, into pages that hold anything where that is allowed."""
    return writing(subject.problem, subject.case.seed, finite=subject.implementation.behind_mask == "finite")


def judged(what: Writing, got: Mapping[str, np.ndarray]) -> Iterator[Judgement]:
    """The verdict on each of the pools that came."""
    for name in POOLS:
        reason = _wrong(name, what, got[name])
        yield Judgement(observable=name, verdict=records.FAIL if reason else records.PASS, reason=reason)


def _wrong(name: str, what: Writing, got: np.ndarray) -> str:
    """What is wrong of a pool, in words; empty if nothing is."""
    must, before = what.after[name], what.before[name]
    if (got.shape, got.dtype) != (must.shape, must.dtype):
        return f"must be {must.dtype}{list(must.shape)} as before the call, and is {got.dtype}{list(got.shape)}"
    differs = (bits(got) != bits(must)).any(axis=(2, 3))  # [pages, page_size]
    if not differs.any():
        return ""
    missing, stray = differs & what.written, differs & ~what.written
    found = []
    if missing.any():
        count = f"{missing.sum()} of {what.written.sum()} rows do not hold the new {_OF_POOL[name]}"
        found.append(
            f"{count}: {_first(missing, got, must)}{_kept(missing, got, before)}{_elsewhere(missing, got, must)}"
        )
    if stray.any():
        count = f"{stray.sum()} of {(~what.written).sum()} rows that nothing is written to have changed"
        found.append(f"{count}: {_first(stray, got, must)}")
    return "; ".join(found)


def _first(rows: np.ndarray, got: np.ndarray, must: np.ndarray) -> str:
    """The first element of the first of `rows` that differs."""
    page, row = np.argwhere(rows)[0]
    mine, theirs = bits(got)[page, row], bits(must)[page, row]
    head, depth = np.argwhere(mine != theirs)[0]
    at = (page, row, head, depth)
    digits = 2 * got.dtype.itemsize
    here, there = mine[head, depth], theirs[head, depth]
    return (
        f"page {page}, row {row}, head {head}, element {depth} is {float(got[at]):.6g} (0x{here:0{digits}x}), "
        f"must be {float(must[at]):.6g} (0x{there:0{digits}x})"
    )


def _kept(rows: np.ndarray, got: np.ndarray, before: np.ndarray) -> str:
    same = not (bits(got)[rows] != bits(before)[rows]).any()
    return "; all of them are as before the call" if same else ""


def _elsewhere(rows: np.ndarray, got: np.ndarray, must: np.ndarray) -> str:
    """Where the first missing row is instead, if it is anywhere."""
    page, row = np.argwhere(rows)[0]
    there = np.argwhere((bits(got) == bits(must)[page, row]).all(axis=(2, 3)))
    return f"; what must be there is in page {there[0][0]}, row {there[0][1]}" if len(there) else ""
