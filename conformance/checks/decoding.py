"""Decoding: a sequence that is computed piece by piece is what one pass over all of it gives.

The keys and values of the whole sequence are known. Each piece gets a cache that is filled with them up to the piece's
own last token. The rest of the cache is NaN, or a large number where NaN behind a mask is declared to matter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from cases.decoding_cases import PIECES, cut_problem
from cases.operand_values import Problem
from cases.storage_forms.page_writes import PAGE_ARRAYS, Writing, build_writing
from cases.storage_forms.server_traces import Step, iter_steps
from conformance.check_api.judgement import Judgement, add_label
from conformance.check_api.subject import Subject
from conformance.checks import page_comparison
from conformance.executor_tasks import page_write_calls as driven
from conformance.truth.rounding_bounds import Bounded

# What memory may hold that nothing wrote, where it must be finite.
_STALE = 2.0**6


def check_decoding(subject: Subject) -> Iterator[Judgement]:
    """Chunks of a prompt, then token by token into a cache that is longer, give the rows of one pass.

    In pages several sequences live so at once, and later ones take the pages of those that have ended. A call that
    writes pages gets at each step those that it returned at the step before.
    """
    if subject.problem.storage is not None:
        yield from _check_server_trace(subject)
        return
    # A row that averages all of v sees what is behind the last key, and rightly: it is left out.
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
    """Each step of a server's life gives the rows of one pass, of all its sequences together."""
    whole = subject.expectation.forward
    life = tuple(iter_steps(subject.case, subject.problem))
    written = _run_page_writes(subject, life) if subject.implementation.writes_pages else ()
    for number, step in enumerate(life):
        if written:
            what, got = written[number]
            yield from add_label(f"step{number}", page_comparison.judge_pages(what, got))
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


def _run_page_writes(subject: Subject, life: tuple[Step, ...]) -> tuple[tuple[Writing, Mapping[str, np.ndarray]], ...]:
    """What each step of a call that writes pages must write, and what it returned, results in their dense places."""
    finite = subject.implementation.behind_mask == "finite"
    expected: list[Writing] = []
    for step in life:
        before = expected[-1].after if expected else None
        expected.append(build_writing(step.problem, subject.case.seed, finite=finite, before=before))
    problems, tokens = [step.problem for step in life], [what.tokens for what in expected]
    found = subject.executor.run(driven.run_steps, problems, tokens, expected[0].before)
    return tuple(
        (what, {**_unpack_results(got, step.problem), **{name: got[name] for name in PAGE_ARRAYS}})
        for what, got, step in zip(expected, found, life, strict=True)
    )


def _unpack_results(got: Mapping[str, np.ndarray], problem: Problem) -> dict[str, np.ndarray]:
    """Packed results `[total_q, N, ...]` as `out [B, T, N, V]` and residuals `[B, N, T]`, zeros where nobody is."""
    assert problem.storage is not None
    places = problem.storage.places
    dense = {}
    for name in got.keys() - set(PAGE_ARRAYS):
        x = np.where((places >= 0).reshape(*places.shape, *(1,) * (got[name].ndim - 1)), got[name][places], 0)
        dense[name] = x.astype(got[name].dtype) if name == "out" else np.moveaxis(x, 1, 2)
    return dense


def _select_step_rows(whole: Bounded, step: Step, *, axis: int, shape: tuple[int, ...]) -> Bounded:
    """The rows of one pass that a step has, each sequence's last in its place."""
    value, bound = np.zeros(shape), np.zeros(shape)
    for row, start, stop in step.queries:
        behind = step.count_remaining(row, stop)  # later tokens of the sequence stand behind these in the one pass
        for into, of in ((value, whole.value), (bound, whole.bound)):
            last = of.shape[axis] - behind
            rows = of[row].take(range(last - (stop - start), last), axis - 1)
            np.moveaxis(into[row], axis - 1, 0)[shape[axis] - (stop - start) :] = np.moveaxis(rows, axis - 1, 0)
    return Bounded(value, bound)
