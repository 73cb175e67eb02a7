"""Check `decoding`: a sequence computed piece by piece gives the rows of one pass over all of it.

The keys and values of the whole sequence are known. Each piece gets a cache that holds them up to the piece's own last
token. The rest of the cache is NaN, or a large number if the kernel declares that memory behind the mask is finite.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from cases.decoding_cases import PIECES, cut_problem
from cases.operand_values import Problem
from cases.storage_forms.page_writes import Writing, build_writing
from cases.storage_forms.server_traces import Step, iter_steps
from conformance.check_api.judgement import Judgement, add_label
from conformance.check_api.subject import Subject
from conformance.checks import page_comparison
from conformance.executor_tasks import page_write_calls
from conformance.truth.rounding_bounds import Bounded

# The number in unwritten cache memory, for kernels that declare that memory behind the mask is finite.
_STALE = 2.0**6


def check_decoding(subject: Subject) -> Iterator[Judgement]:
    """Check that prompt chunks, then single tokens, give the rows of one pass over the sequence.

    The cache is longer than the sequence. With pages, several sequences are decoded at once, and later ones reuse the
    pages of finished ones. A call that writes pages gets the pages that it returned at the step before.
    """
    if subject.problem.storage is not None:
        yield from _check_server_trace(subject)
        return
    # A row that averages all of v also averages unwritten memory, as declared, so it is not judged.
    averages = subject.problem.empty_rows & (subject.implementation.empty_rows == "mean")
    judged_out = subject.judged_out & ~averages.transpose(0, 2, 1)[..., None]
    stale = np.nan if subject.implementation.behind_mask == "any" else _STALE
    for start, stop in PIECES:
        got = subject.run_results(cut_problem(subject.problem, start, stop, stale=stale))
        place = f"token{start}" if stop - start == 1 else f"chunk{start}"
        for name, axis, judged in (
            ("out", 1, judged_out),
            ("logsumexp", 2, subject.judged_residuals),
            ("max_logits", 2, subject.judged_residuals),
        ):
            if name in got:
                whole = subject.expectation.forward[name]
                rows = (slice(None),) * axis + (slice(start, stop),)
                expected = Bounded(whole.value[rows], whole.bound[rows])
                yield subject.judge(name, got[name], expected, judged[rows], label=f"{name}.{place}")


def _check_server_trace(subject: Subject) -> Iterator[Judgement]:
    """Check that each step of a server's decoding gives the rows of one pass over all sequences.

    A server trace is the list of steps: at each, some sequences add a prompt chunk or a token to a cache of pages.
    """
    whole = subject.expectation.forward
    trace = tuple(iter_steps(subject.case, subject.problem))
    writes = _run_page_writes(subject, trace) if subject.implementation.writes_pages else ()
    for number, step in enumerate(trace):
        if writes:
            writing, got = writes[number]
            yield from add_label(f"step{number}", page_comparison.judge_pages(writing, got))
        else:
            got = subject.run_results(step.problem)
        for name, judged in (
            ("out", subject.find_judged_rows(step.problem)),
            ("logsumexp", ~step.problem.empty_rows),
            ("max_logits", ~step.problem.empty_rows),
        ):
            if name in got:
                expected = _select_step_rows(whole[name], step, axis=1 if name == "out" else 2, shape=got[name].shape)
                yield subject.judge(name, got[name], expected, judged, label=f"{name}.step{number}")


def _run_page_writes(subject: Subject, trace: tuple[Step, ...]) -> tuple[tuple[Writing, Mapping[str, np.ndarray]], ...]:
    """Run all steps of a call that writes pages; return each step's expected page writes, and its results.

    The results are `out` and residuals in dense form, and the page arrays.
    """
    finite = subject.implementation.behind_mask == "finite"
    writings: list[Writing] = []
    for step in trace:
        before = writings[-1].after if writings else None
        writings.append(build_writing(step.problem, subject.case.seed, finite=finite, before=before))
    problems, tokens = [step.problem for step in trace], [writing.tokens for writing in writings]
    results = subject.executor.run(page_write_calls.run_steps, problems, tokens, writings[0].before)
    return tuple(
        (writing, {**_unpack_results(got, step.problem, writing), **{name: got[name] for name in writing.after}})
        for writing, got, step in zip(writings, results, trace, strict=True)
    )


def _unpack_results(got: Mapping[str, np.ndarray], problem: Problem, writing: Writing) -> dict[str, np.ndarray]:
    """Unpack results `[total_q, N, ...]`, apart from pages, to `out [B, T, N, V]` and residuals `[B, N, T]`.

    Places without a query hold zeros.
    """
    assert problem.storage is not None
    places = problem.storage.places
    dense = {}
    for name in got.keys() - writing.after.keys():
        rows = np.where((places >= 0).reshape(*places.shape, *(1,) * (got[name].ndim - 1)), got[name][places], 0)
        dense[name] = rows.astype(got[name].dtype) if name == "out" else np.moveaxis(rows, 1, 2)
    return dense


def _select_step_rows(whole: Bounded, step: Step, *, axis: int, shape: tuple[int, ...]) -> Bounded:
    """Select the rows of the single pass that belong to the queries of a step.

    The rows of each sequence are aligned to the end of the result, of shape `shape`. Places without a query hold zeros.

    Args:
      whole: exact values and bounds of the single pass, with one batch row for each sequence.
    """
    value, bound = np.zeros(shape), np.zeros(shape)
    for row, start, stop in step.queries:
        later = step.count_remaining(row, stop)  # number of the sequence's tokens after this step
        for target, source in ((value, whole.value), (bound, whole.bound)):
            last = source.shape[axis] - later
            rows = source[row].take(range(last - (stop - start), last), axis - 1)
            np.moveaxis(target[row], axis - 1, 0)[shape[axis] - (stop - start) :] = np.moveaxis(rows, axis - 1, 0)
    return Bounded(value, bound)
