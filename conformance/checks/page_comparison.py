"""Compare the pages that a call writes with the expected pages, bit for bit, and its scales within their roundings.

The checks `forward`, `residuals`, `aliasing`, `calls` and `decoding` use this module. A row of a page holds one token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from cases.operand_registry import RESIDUALS
from cases.operand_values import Problem
from cases.quantization import SCALE_ERROR, STORED
from cases.storage_forms.page_writes import Writing, build_writing, view_bits
from cases.storage_forms.paged_form import SCALES
from conformance.check_api.judgement import Judgement, add_label
from conformance.check_api.subject import Subject
from conformance.executor_tasks import page_write_calls
from reports import records

# What each array holds, and its axes after those of pages and rows.
_CONTENTS = {
    "k_pages": ("keys", ("head", "element")),
    "v_pages": ("values", ("head", "element")),
    "k_scales": ("scales of keys", ("head",)),
    "v_scales": ("scales of values", ("head",)),
    "latent_pages": ("latents", ("element",)),
}


def check_pages(subject: Subject, *, save_residuals: bool) -> Iterator[Judgement]:
    """Check that the pages that a call returns hold the new tokens in their rows, with every other bit unchanged."""
    writing = build_page_writing(subject)
    got = subject.executor.run(
        page_write_calls.run_page_write, subject.problem, writing.tokens, writing.before, save_residuals=save_residuals
    )
    yield from judge_pages(writing, got)


def check_pages_without_update(subject: Subject, *, save_residuals: bool) -> Iterator[Judgement]:
    """Check `out`, residuals and pages of a call with `update_kv_cache=False`, if the implementation takes that.

    The pages already hold the new tokens. The tokens that the call gets beside them hold what it must not read: NaN, or
    64 if the implementation declares `behind_mask="finite"`.
    """
    given = build_page_writing(subject)
    stale = 64.0 if subject.implementation.behind_mask == "finite" else np.nan
    tokens = {name: np.full_like(x, stale) for name, x in given.tokens.items()}
    writing = Writing(tokens, given.after, given.after, np.zeros_like(given.written))
    got = subject.executor.run(
        page_write_calls.run_without_update,
        subject.problem,
        writing.tokens,
        writing.before,
        save_residuals=save_residuals,
    )
    if got is None:
        return
    expected, results = subject.expectation.forward, unpack_results(got, subject.problem)
    yield from add_label("no_update", [subject.judge("out", results["out"], expected["out"], subject.judged_out)])
    assert subject.problem.storage is not None
    rows = subject.judged_residuals & (subject.problem.storage.places >= 0)[:, None]
    for name in (name for name in RESIDUALS if name in results and name in subject.implementation.residuals):
        yield from add_label("no_update", [subject.judge_residual(name, results[name], expected[name], rows)])
    yield from add_label("no_update", judge_pages(writing, got))


def unpack_results(got: Mapping[str, np.ndarray], problem: Problem) -> dict[str, np.ndarray]:
    """Unpack results `[total_q, N, ...]` to `out [B, T, N, V]` and residuals `[B, N, T]`, padded with zeros."""
    assert problem.storage is not None
    places = problem.storage.places
    dense = {}
    for name in got.keys() & {"out", *RESIDUALS}:
        rows = np.where((places >= 0).reshape(*places.shape, *(1,) * (got[name].ndim - 1)), got[name][places], 0)
        dense[name] = rows.astype(got[name].dtype) if name == "out" else np.moveaxis(rows, 1, 2)
    return dense


def build_page_writing(subject: Subject) -> Writing:
    """Build the pages before and after the case's call, and the new tokens.

    Unwritten rows hold arbitrary bits, or finite numbers if the implementation declares `behind_mask="finite"`.
    """
    return build_writing(subject.problem, subject.case.seed, finite=subject.implementation.behind_mask == "finite")


def judge_pages(writing: Writing, got: Mapping[str, np.ndarray]) -> Iterator[Judgement]:
    """Judge each returned array of pages, and of computed scales, by the expected one."""
    for name in writing.after:
        reason = _describe_difference(name, writing, got[name])
        yield Judgement(observable=name, verdict=records.FAIL if reason else records.PASS, reason=reason)


def _describe_difference(name: str, writing: Writing, got: np.ndarray) -> str:
    """Describe how a page array differs from the expected one; return "" if it does not."""
    expected, before = writing.after[name], writing.before[name]
    if (got.shape, got.dtype) != (expected.shape, expected.dtype):
        return f"must be {expected.dtype}{list(expected.shape)} as before the call, and is {got.dtype}{list(got.shape)}"
    wrong = _find_differences(name, got, expected, writing.written)
    if not wrong.any():
        return ""
    differs = wrong.any(axis=tuple(range(2, wrong.ndim)))  # [pages, page_size]
    missing, stray = differs & writing.written, differs & ~writing.written
    differences = []
    content, axes = _CONTENTS[name]
    if missing.any():
        count = f"{missing.sum()} of {writing.written.sum()} rows do not hold the new {content}"
        first = _describe_first(missing, wrong, got, expected, axes)
        where = _describe_unchanged(missing, got, before) + _describe_misplaced(missing, got, expected)
        differences.append(f"{count}: {first}{where}")
    if stray.any():
        count = f"{stray.sum()} of {(~writing.written).sum()} rows that nothing is written to have changed"
        differences.append(f"{count}: {_describe_first(stray, wrong, got, expected, axes)}")
    return "; ".join(differences)


def _find_differences(name: str, got: np.ndarray, expected: np.ndarray, written: np.ndarray) -> np.ndarray:
    """Find elements that are wrong, booleans of the shape of `got`: those whose bits differ from the expected ones.

    In a written row, both zeros of fp8 are right. So is a scale within `SCALE_ERROR` and one rounding of the expected
    one, and any finite scale of a token that is zero.
    """
    same = view_bits(got) == view_bits(expected)
    rows = written.reshape(*written.shape, *(1,) * (same.ndim - 2))
    if got.dtype == STORED["fp8"]:
        same |= (got == 0) & (expected == 0) & rows
    if name in SCALES:
        with np.errstate(invalid="ignore"):
            error = np.abs(got.astype(np.float64) - expected)
        near = error <= (SCALE_ERROR + 2.0**-24) * expected.astype(np.float64)
        same |= np.where(expected == 0, np.isfinite(got), near) & rows
    return ~same


def _describe_first(
    rows: np.ndarray, wrong: np.ndarray, got: np.ndarray, expected: np.ndarray, axes: tuple[str, ...]
) -> str:
    """Describe the first of the `wrong` elements in the first of `rows`; `axes` names the axes of a row."""
    page, row = np.argwhere(rows)[0]
    got_bits, expected_bits = view_bits(got)[page, row], view_bits(expected)[page, row]
    place = tuple(np.argwhere(wrong[page, row])[0])
    at = (page, row, *place)
    digits = 2 * got.dtype.itemsize
    got_element, expected_element = got_bits[place], expected_bits[place]
    where = "".join(f", {axis} {n}" for axis, n in zip(axes, place, strict=True))
    return (
        f"page {page}, row {row}{where} is {float(got[at]):.6g} (0x{got_element:0{digits}x}), "
        f"must be {float(expected[at]):.6g} (0x{expected_element:0{digits}x})"
    )


def _describe_unchanged(rows: np.ndarray, got: np.ndarray, before: np.ndarray) -> str:
    """Return a remark if the call changed none of `rows`, else ""."""
    same = not (view_bits(got)[rows] != view_bits(before)[rows]).any()
    return "; all of them are as before the call" if same else ""


def _describe_misplaced(rows: np.ndarray, got: np.ndarray, expected: np.ndarray) -> str:
    """Return a remark that names the row where the first missing row's content is instead, or ""."""
    page, row = np.argwhere(rows)[0]
    matches = np.argwhere((view_bits(got) == view_bits(expected)[page, row]).all(axis=tuple(range(2, got.ndim))))
    return f"; what must be there is in page {matches[0][0]}, row {matches[0][1]}" if len(matches) else ""
