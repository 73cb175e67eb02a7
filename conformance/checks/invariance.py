"""Check `invariance`: equivalent computations give the same results, within rounding.

Two results of the implementation are compared with each other, within the bounds of both. The equivalent computations
are: permuted keys; keys split in two, with results merged by `logsumexp`; padding that no query may attend to; other
block sizes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from cases.masks import Full, list_conjuncts
from cases.operand_registry import POSITIONAL, RESIDUALS
from cases.operand_values import Problem
from conformance.check_api.judgement import Judgement, build_unsupported
from conformance.check_api.subject import Subject
from conformance.truth.declared_formulas import convert_to_contract
from conformance.truth.rounding_bounds import Bounded, Expectation

Values = Mapping[str, np.ndarray]


def check_invariance(subject: Subject) -> Iterator[Judgement]:
    """Check that permuted keys, merged halves, padding and other block sizes give the same results."""
    if subject.problem.storage is None:
        yield from _check_full_mask(subject)
        yield from _check_padding(subject)
    else:
        for name in ("permuted", "merged", "padded"):
            yield build_unsupported(
                name, "tables say where stored keys are: the keys cannot be permuted, split or padded"
            )
    yield from _check_variants(subject)


def _check_full_mask(subject: Subject) -> Iterator[Judgement]:
    """Check permuted keys, and merged halves of the keys, without a mask or operands that tell positions apart."""
    if (reason := subject.implementation.supports(dataclasses.replace(subject.case, mask="full"))) is not None:
        yield build_unsupported("permuted", reason)
        yield build_unsupported("merged", reason)
        return
    problem = dataclasses.replace(subject.problem.without(*POSITIONAL), mask=Full())
    whole = subject.run_results(problem)
    expected = subject.expect(problem)
    yield from _compare_results(subject, "permuted", subject.run_results(_permute_keys(problem)), whole, expected)
    if "logsumexp" not in subject.implementation.residuals:
        yield build_unsupported("merged", "logsumexp is not offered")
        return
    bare = problem.without("sinks")
    if problem.sinks is not None:
        whole, expected = subject.run_results(bare), subject.expect(bare)
    # One half has the even keys, the other the odd keys, so that both have keys of every segment.
    halves = [_select_keys(bare, slice(start, None, 2)) for start in (0, 1)]
    merged = _merge([_run_part(subject, half) for half in halves])
    if not subject.implementation.formulas.has_contract_logsumexp:  # parts merge by the contract's
        whole = _convert_results(subject, whole)
        subject = subject.with_declarations(subject.implementation.with_contract_logsumexp())
        expected = subject.expect(bare)
    yield from _compare_results(
        subject, "merged", merged, whole, expected, _compute_merged_bounds(list(map(subject.expect, halves)))
    )


def _run_part(subject: Subject, problem: Problem) -> Values:
    """Return the results for a problem with some of the keys, to be merged by `_merge`.

    Empty rows get `out` 0 and `logsumexp` -inf, the values of no keys. If the implementation declares that empty rows
    are zero, its own values stay.
    """
    part = _convert_results(subject, subject.run_results(problem))
    if subject.implementation.empty_rows == "zero":
        return part
    empty = problem.empty_rows
    return {
        "out": np.where(empty.transpose(0, 2, 1)[..., None], 0, part["out"]),
        "logsumexp": np.where(empty, -np.inf, part["logsumexp"]),
    }


def _convert_results(subject: Subject, results: Values) -> Values:
    """Return results of a call without sinks, with `logsumexp` converted to the contract's if another is declared."""
    formulas = subject.implementation.formulas
    if formulas.has_contract_logsumexp or "logsumexp" not in results:
        return results
    return {**results, "logsumexp": convert_to_contract(results["logsumexp"], formulas)}


def _permute_keys(problem: Problem) -> Problem:
    order = np.random.Generator(np.random.Philox(0)).permutation(problem.k.shape[1])
    return _select_keys(problem, order)


def _select_keys(problem: Problem, keys: np.ndarray | slice) -> Problem:
    """Return the problem that has the keys `keys` and no others, in the order of `keys`."""
    return problem.map_along("S", lambda x, axis: x[(slice(None),) * axis + (keys,)])


def _merge(parts: Sequence[Values]) -> Values:
    """Merge normalised parts by their `logsumexp` (docs/contract.md, section 4)."""
    weights, merged = _compute_weights([part["logsumexp"] for part in parts])
    out = sum(_align_with_out(w) * part["out"].astype(np.float64) for w, part in zip(weights, parts, strict=True))
    return {"out": np.asarray(out), "logsumexp": merged}


def _compute_weights(logsumexps: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return each part's weight in the merged `out`, `[parts, B, N, T]`, and the merged `logsumexp`, `[B, N, T]`."""
    lse = np.stack(logsumexps).astype(np.float64)
    top = lse.max(axis=0)
    weight = np.exp(lse - np.where(np.isfinite(top), top, 0.0))
    total = weight.sum(axis=0)
    with np.errstate(divide="ignore"):
        return weight / np.where(total == 0, 1, total), np.where(np.isfinite(top), top, 0.0) + np.log(total)


def _align_with_out(x: np.ndarray) -> np.ndarray:
    """Transpose `[B, N, T]` to `[B, T, N, 1]`, to be multiplied with `out`."""
    return x.transpose(0, 2, 1)[..., None]


def _compute_merged_bounds(parts: Sequence[Expectation]) -> dict[str, np.ndarray]:
    """Return first-order bounds of the merged `out` and `logsumexp`.

    An error `e_i` in `out_i`, the output of part `i`, changes the merged `out` by `w_i e_i`, where `w_i` is the part's
    weight. An error `d_i` in the part's `logsumexp` changes `w_i` by `w_i (d_i - sum_j w_j d_j)`. So it changes the
    merged `out` by `w_i d_i (out_i - out)`.
    """
    found = [part.forward for part in parts]
    weights, _ = _compute_weights([part["logsumexp"].value for part in found])
    off = [np.where(w > 0, part["logsumexp"].bound, 0.0) for w, part in zip(weights, found, strict=True)]
    whole = sum(_align_with_out(w) * part["out"].value for w, part in zip(weights, found, strict=True))
    out = sum(
        _align_with_out(w) * (part["out"].bound + np.abs(part["out"].value - whole) * _align_with_out(d))
        for w, part, d in zip(weights, found, off, strict=True)
    )
    return {"out": np.asarray(out), "logsumexp": np.asarray(sum(w * d for w, d in zip(weights, off, strict=True)))}


def _check_padding(subject: Subject) -> Iterator[Judgement]:
    """Check that padding changes no other result: one query and one key, in segments of their own.

    The padding comes first, and lengths become odd. So the last key, which may then be alone in its block, is a real
    key, and results change if the kernel skips it.
    """
    problem = subject.problem
    if not all(part.relative for part in list_conjuncts(problem.mask)):
        yield build_unsupported("padded", "the mask of this case depends on absolute positions")
        return
    if (reason := subject.implementation.supports(dataclasses.replace(subject.case, segments="seg"))) is not None:
        yield build_unsupported("padded", reason)
        return
    batch, q_length = problem.q.shape[:2]
    kv_length = problem.k.shape[1]
    ids = problem.segment_ids or (np.zeros((batch, q_length), np.int32), np.zeros((batch, kv_length), np.int32))
    q_ids, kv_ids = (np.pad(x, [(0, 0), (1, 0)], constant_values=n) for x, n in zip(ids, (-1, -2), strict=True))
    longer = problem.map_along("T", _prepend_first).map_along("S", _prepend_first)
    longer = dataclasses.replace(longer, segment_ids=(q_ids, kv_ids))
    got = subject.run_results(longer)
    kept = {name: x[:, 1:] if name == "out" else x[..., 1:] for name, x in got.items()}
    yield from _compare_results(subject, "padded", kept, subject.run_results(problem), subject.expectation)


def _prepend_first(x: np.ndarray, axis: int) -> np.ndarray:
    return np.concatenate([x.take([0], axis), x], axis)


def _check_variants(subject: Subject) -> Iterator[Judgement]:
    """Check the results and gradients of each declared variant, such as other block sizes."""
    clean = subject.run_results(subject.problem)
    for name in subject.implementation.variants:
        variant = dataclasses.replace(subject, executor=subject.executor.variant(name))
        got = variant.run_results(subject.problem)
        yield from _compare_results(subject, name, got, clean, subject.expectation)
        if not subject.has_gradients:
            continue
        cotangent = subject.full_cotangent
        plain, varied = subject.gradients(cotangent), variant.gradients(cotangent)
        for gradient, expected in subject.get_expected_gradients(cotangent).items():
            if gradient in subject.implementation.gradients:
                yield _judge_agreement(
                    subject, gradient, name, varied.values[gradient], plain.values[gradient], expected
                )


def _compare_results(
    subject: Subject,
    how: str,
    got: Values,
    whole: Values,
    expected: Expectation,
    bounds: Mapping[str, np.ndarray] | None = None,
) -> Iterator[Judgement]:
    """Judge the results of an equivalent computation by those of the usual call, within the sum of their bounds.

    Args:
      how: what the other computation is called in records.
      got: its results.
      whole: the results of the usual call.
      expected: exact values and bounds of `whole`.
      bounds: the bounds of `got`; None if they are those of `whole`.
    """
    for name in ("out", *RESIDUALS):
        if name in got and name in whole:
            bound = None if bounds is None else bounds[name]
            yield _judge_agreement(subject, name, how, got[name], whole[name], expected.forward[name], bound)


def _judge_agreement(
    subject: Subject,
    name: str,
    how: str,
    got: np.ndarray,
    whole: np.ndarray,
    expected: Bounded,
    bound: np.ndarray | None = None,
) -> Judgement:
    """Judge `got` by `whole`, within the sum of their bounds; `bound` is that of `got`, or None if it is the same."""
    together = expected.bound + (expected.bound if bound is None else bound)
    both = Bounded(whole.astype(np.float64), np.where(np.isfinite(expected.value), together, 0.0))
    judged = {"out": subject.judged_out, **dict.fromkeys(RESIDUALS, subject.judged_residuals)}.get(name)
    return subject.judge(name, got, both, judged, label=f"{name}.{how}")
