"""Check `calls`: calls that follow each other in one process do not affect each other.

The check also runs single calls that the usual cases do not contain: calls with unusual sizes or few operands, and
stored sequences (packed, paged or in a ring buffer) of unusual lengths.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from cases import mask_spec
from cases.case import Case, CaseIdError
from cases.masks import Causal, Dense
from cases.operand import OptionalOperand
from cases.operand_registry import OPTIONAL, REMOVABLE
from cases.operand_values import Problem, draw_problem
from cases.score_functions import CAPPING
from cases.storage_forms.form_cases import load_form_cases
from cases.storage_forms.form_registry import FORMS
from cases.storage_forms.stored_cases import list_other_masks
from conformance.check_api.judgement import Judgement, build_unsupported, run_subcheck
from conformance.check_api.subchecks import Subchecks, list_pullbacks
from conformance.check_api.subject import Subject
from conformance.checks import few_operand_calls, page_comparison
from conformance.checks.forward import check_primal, judge_further
from conformance.checks.gradients import check_problem, judge_gradients
from conformance.checks.problem_pair import ProblemPair
from conformance.executor_tasks import call_sequences, single_calls
from reports import records

# Masks for calls that follow each other with the same shapes, in this order:
# - windows, which are given by numbers, of which one is 0: two that differ only on the right, two only on the left;
# - a window that equals a causal mask;
# - two masks that are given as arrays;
# - an array combined with a window, and an array combined with `causal` and a window;
# - an array with a plane for each head, combined with an array with a plane for each batch row.
_OTHER_MASKS = (
    "window-l9-r0",
    "window-l9-r2",
    "window-l0-r2",
    "window-linf-r0",
    "dense-d60",
    "dense-d30",
    "window-l9-r20_and_dense-d60",
    "causal_and_window-l30-r0_and_dense-d60",
    "densehead-d60_and_densebatch-d60",
)
# The number of equal calls. A thousand show an error that occurs once in a few hundred calls. Interpreted kernels are
# too slow for so many, and get ten.
_REPEATS = 1000
_REPEATS_INTERPRETED = 10
_VALUE_ORDERS = {2: (True, False, True), 3: (False, True)}
"""The order of calls with a special value of an operand (True) and its usual one, by the factor of numbers of heads."""

# Sizes that the usual cases (the grid of each level) lack, by subcheck. Each subcheck has several alternatives and uses
# the first one that the implementation supports.
# - `few`, `one`: 5 keys, fewer than any tile, or a single key. They also have more than 8 heads, 33 batch rows with a
#   bias for each row, and head dimensions below 16.
# - `cache`, `rest`: one query over a cache of 512 keys, and over a cache of 2593 keys. 2593 is a prime, so no number of
#   splits divides it, and its last block of 1024 holds 545 keys. All long caches of the grids are multiples of 8. The
#   mask is full, so each key has some weight.
# - `many`: more than 40 heads, and more than 16 query heads in a group. `rest` has such a group for a single query.
# - `packed`: tens of sequences in one batch row of 512 positions, separated by segment ids.
# - `group`: a single query whose groups have 64 heads, for several key/value heads.
# - `deep`, `deep_query`, `deep_queries`: head dimensions above 256, for many queries, for one and for five.
# - `odd`: an odd number of heads of the usual dimension 64, each with its own key/value head.
# - `seven`, `eleven`, `eleven_of_queries`: seven blocks of 64 along both axes, eleven blocks of 128 keys, or eleven
#   blocks of 128 queries. A loop that takes four blocks at a time has three blocks left over.
# - `border`: four queries whose windows begin on both sides of key 512, where blocks of any usual size meet.
# To save compilation, some of these calls combine unusual sizes. They have a number of heads that four or eight does
# not divide, with grouped heads or without, or values deeper than keys.
_SHORT: tuple[dict[str, Any], ...] = tuple({"q_length": n, "kv_length": n} for n in (16, 128))
_UNCUT: dict[str, Any] = {"batch": 1, "segments": None}
_FULL: dict[str, Any] = {**_UNCUT, "mask": "full"}
_CACHE: dict[str, Any] = {"segments": None, "mask": "full", "phase": "decode", "q_length": 1}


def _build_heads(num_q_heads: int, num_kv_heads: int) -> dict[str, Any]:
    """Return the fields of a case for numbers of query heads and key/value heads."""
    return {"num_q_heads": num_q_heads, "num_kv_heads": num_kv_heads}


def _build_depths(head_dim: int, v_head_dim: int) -> dict[str, Any]:
    """Return the fields of a case for head dimensions of keys (H) and values (V)."""
    return {"head_dim": head_dim, "v_head_dim": v_head_dim}


# Head dimensions in which values are deeper than queries and keys, by sixteen and by eight.
_DEEPER = _build_depths(24, 40), _build_depths(32, 40)
_SIZES: dict[str, tuple[dict[str, Any], ...]] = {
    # No segment ids: with them, the query would attend to a single key.
    "few": tuple(
        {"batch": b, "q_length": 1, "kv_length": 5, "segments": None, **more}
        for heads in ({**_build_heads(12, 12), **_build_depths(8, 4)}, _build_heads(12, 12), {})
        for b, more in ((33, {**heads, "bias": "biasbatch"}), (33, heads), (1, heads))
    ),
    "one": tuple(
        {"q_length": 1, "kv_length": 1, "segments": None, **more} for more in ({"batch": 8, **_build_heads(16, 16)}, {})
    ),
    "cache": tuple({**_CACHE, "kv_length": 512, **heads} for heads in (_build_heads(42, 6), {})),
    "rest": tuple(
        {**_CACHE, "batch": 1, "kv_length": 2593, "soft_cap": None, **heads} for heads in (_build_heads(17, 1), {})
    ),
    "group": ({**_CACHE, "batch": 1, "kv_length": 100, **_build_heads(192, 3)},),
    "many": tuple({**_build_heads(n, k), **short} for n, k in ((153, 9), (45, 45)) for short in _SHORT),
    "packed": ({"batch": 1, "segments": "segmany", "q_length": 512, "kv_length": 512},),
    "deep": tuple({**_build_depths(h, v), **short} for h, v in ((320, 288), (512, 512)) for short in _SHORT),
    "deep_query": ({**_CACHE, "kv_length": 100, **_build_depths(512, 512)},),
    "deep_queries": ({**_FULL, "q_length": 5, "kv_length": 100, **_build_depths(512, 512)},),
    "odd": tuple({**_build_heads(n, n), **_build_depths(64, 64), **short} for n in (7, 3) for short in _SHORT),
    "seven": tuple({**_UNCUT, "q_length": 448, "kv_length": 448, **depths} for depths in (_DEEPER[0], {})),
    "eleven": (
        {**_FULL, "q_length": 16, "kv_length": 1408, **_build_heads(14, 2), **_DEEPER[1]},
        *({**_FULL, "q_length": n, "kv_length": 1408} for n in (16, 128)),
    ),
    "eleven_of_queries": (
        {**_FULL, "q_length": 1408, "kv_length": 16, **_build_heads(24, 2)},
        *({**_FULL, "q_length": 1408, "kv_length": n} for n in (16, 128)),
    ),
    "border": ({**_UNCUT, "phase": "prefill", "mask": "window-l638-r0-o1148", "q_length": 4, "kv_length": 1152},),
}


def check_calls(subject: Subject) -> Iterator[Judgement]:
    """Check consecutive calls with other masks, values, shapes and dtypes, and a thousand equal calls."""
    pair = ProblemPair.draw(subject)
    form, elsewhere = subject.implementation.storage, few_operand_calls.are_made_elsewhere(subject.case)
    few = {} if elsewhere else _FEW_OPERANDS
    maxima = {"own_maxima": _check_own_maxima} if "head_max_logits" in subject.implementation.further_results else {}
    left_out = _SPECIAL_VALUES if elsewhere and form is not None else {}
    for name, sequence in {**_SUBCHECKS, **maxima, **few}.items():
        if name not in left_out:
            yield from run_subcheck(name, functools.partial(sequence, pair))
    for operand in few_operand_calls.list_operands_with_calls(subject.implementation, subject.case):
        for name, call in operand.calls.items():
            yield from run_subcheck(name, functools.partial(_check_few_operands, call, pair))
    for name, changes in load_form_cases(form).further_sequences.items() if form is not None and not elsewhere else ():
        yield from run_subcheck(name, functools.partial(_check_stored_sequences, changes, pair))


def _check_other_masks(pair: ProblemPair) -> Iterator[Judgement]:
    """Check calls outside `jit` that differ only in the mask, then the first mask again."""
    case = pair.subject.case
    specs = _OTHER_MASKS if case.storage is None else list_other_masks(case)
    candidates = (dataclasses.replace(case, mask=spec) for spec in specs)
    others = [other for other in candidates if pair.subject.implementation.supports(other) is None]
    sizes = (case.batch, case.num_q_heads, case.q_length, case.kv_length, case.seed)
    problems = [
        dataclasses.replace(pair.problems[0], mask=mask_spec.build_mask(other.mask, *sizes)) for other in others
    ]
    if others and others[-1].mask == _OTHER_MASKS[-1]:
        problems.append(dataclasses.replace(pair.problems[0], mask=_reverse_rows(problems[-1])))
    combined = dataclasses.replace(case, mask="causal_and_dense-d60")
    if case.storage is None and pair.subject.implementation.supports(combined) is None:
        everywhere = np.ones((1, 1, pair.problems[0].q.shape[1], pair.problems[0].k.shape[1]), bool)
        problems.append(dataclasses.replace(pair.problems[0], mask=Causal() & Dense(everywhere)))
    for problem in [*problems, pair.problems[0]] if problems else []:
        got = pair.run_eagerly(problem)
        yield pair.judge_out_for(got, (problem,), (pair.subject.expect(problem),))


def _reverse_rows(problem: Problem) -> Dense:
    """Return the mask with all rows but the first in reverse order.

    The first row and the number of allowed pairs stay the same, to expose kernels that cache masks by these alone.
    """
    allowed = problem.resolved_mask.dense(problem.q.shape[1], problem.k.shape[1])
    return Dense(np.concatenate([allowed[:, :, :1], allowed[:, :, :0:-1]], axis=2))


def _check_other_values(pair: ProblemPair) -> Iterator[Judgement]:
    """Check calls outside `jit` on the first problem, on one with other values and segment ids, and on the first again.

    All calls are made before any result is read: no call may overwrite the result of an earlier one.
    """
    order = (0, 1, 0)
    results = pair.subject.executor.run(call_sequences.run_sequence_eagerly, [pair.problems[n] for n in order])
    for n, got in zip(order, results, strict=True):
        yield pair.judge_out_for(got, (pair.problems[n],), (pair.expected[n],))


def _check_other_bias(pair: ProblemPair) -> Iterator[Judgement]:
    """Check a call outside `jit` with a bias `[B, 1, T, S]` that differs by batch row and is zero for query 0."""
    case = dataclasses.replace(pair.subject.case, bias="biasbatch")
    refusal = pair.subject.implementation.supports(case)
    if pair.problems[0].bias is None or refusal is not None:
        yield build_unsupported("out", refusal or "the case has no bias")
        return
    bias = draw_problem(case).bias
    assert bias is not None
    bias[:, :, 0] = 0
    problem = dataclasses.replace(pair.problems[0], bias=bias)
    yield pair.judge_out_for(pair.run_eagerly(problem), (problem,), (pair.subject.expect(problem),))


def _check_other_shapes(pair: ProblemPair) -> Iterator[Judgement]:
    """Check calls outside `jit` with another dtype and other lengths, then the case's own call again."""
    case, supports = pair.subject.case, pair.subject.implementation.supports
    dtype = {"dtype": "bf16" if case.dtype == "f32" else "f32"}
    # Twice the length plus one: for block sizes that divide twice the length, the last block holds one position. If
    # such lengths are not supported, twice the length is used.
    longer: dict[str, Any] = {"q_length": 2 * case.q_length + 1, "kv_length": 2 * case.kv_length + 1}
    if supports(dataclasses.replace(case, **longer)) is not None:
        longer = {"q_length": 2 * case.q_length, "kv_length": 2 * case.kv_length}
    changes: tuple[dict[str, Any], ...] = (dtype, longer | dtype, longer, {})
    others = [dataclasses.replace(case, **change) for change in changes]
    for other in others:
        if pair.subject.implementation.supports(other) is None:
            subject = dataclasses.replace(pair.subject, case=other)
            got = pair.run_eagerly(subject.problem)
            yield subject.judge("out", got, subject.expectation.forward["out"], subject.judged_out)


def _check_special_values(operand: OptionalOperand, pair: ProblemPair) -> Iterator[Judgement]:
    """Check calls outside `jit` with an operand at its special value, before its usual value and after it.

    A kernel may have a program for the special value, such as a scale of 1, which it must not keep for other values. A
    program that is kept by shapes is that of the first call, so each order of the values has its own number of heads.
    """
    for factor, order in _VALUE_ORDERS.items():
        refusals = []
        for case in _iter_cases_with(operand, factor, pair.subject.case):
            if (refusal := pair.subject.implementation.supports(case)) is None:
                usual = draw_problem(case)
                problems = [_set_special(operand, usual) if special else usual for special in order]
                subject = dataclasses.replace(pair.subject, case=case)
                results = subject.executor.run(call_sequences.run_sequence_eagerly, problems)
                for problem, got in zip(problems, results, strict=True):
                    expected = subject.expect(problem).forward["out"]
                    yield subject.judge("out", got, expected, subject.find_judged_rows(problem))
                break
            refusals.append(refusal)
        else:
            refusals.append(f"no {pair.subject.case.storage} case has {operand.field}")
            yield build_unsupported("out", refusals[0])
            return


def _iter_cases_with(operand: OptionalOperand, factor: int, case: Case) -> Iterator[Case]:
    """Yield cases with `factor` times as many heads that have the operand: alone, or for stored operands as `case`."""
    for level in operand.levels:
        with_operand: dict[str, Any] = {operand.field: level}
        if operand.field == "soft_cap" and case.score in CAPPING:
            with_operand["score"] = None
        if case.stored is None:
            for phase in ("prefill", "decode"):
                call = {"phase": phase, "mask": "causal", "times_heads": factor, **with_operand}
                yield from few_operand_calls.iter_variants(case, call)
        else:
            kv_factor = 1 if FORMS[case.stored.form].is_tied else factor  # a latent has one head
            heads = _build_heads(factor * case.num_q_heads, kv_factor * case.num_kv_heads)
            is_cache = operand.field == "kv_cache" and case.phase == "train"  # a cache is read, not differentiated
            phase = "prefill" if is_cache else case.phase
            try:
                changed = dataclasses.replace(case, **heads, **with_operand, phase=phase)
            except CaseIdError:  # a form may have some of the levels only
                continue
            yield changed


def _set_special(operand: OptionalOperand, problem: Problem) -> Problem:
    """Return the problem with the operand at its special value."""
    value: Any = operand.special
    if operand.arrays:
        value = operand.map_arrays(getattr(problem, operand.name), lambda x, axes: np.full_like(x, operand.special))
    return dataclasses.replace(problem, **{operand.name: value})


def _check_own_maxima(pair: ProblemPair) -> Iterator[Judgement]:
    """Check further results of a call with negative logits that follows a usual call, compiled and outside `jit`.

    A maximum that is kept from the call before, or that begins at zero, is too large.
    """
    subject, usual = pair.subject, pair.problems[0].without("score_mod")
    bias = None if usual.bias is None else -np.abs(usual.bias)
    low = dataclasses.replace(usual, q=np.abs(usual.q), k=-np.abs(usual.k), bias=bias)
    expected = subject.expect(low)
    for problem in (usual, low):
        compiled = subject.run_residuals(problem).further
    yield from judge_further(subject, low, expected, compiled)
    for problem in (usual, low):
        eager = subject.executor.run(call_sequences.run_residuals_eagerly, problem)
    yield from judge_further(subject, low, expected, eager)


def _check_size(changes: Sequence[Mapping[str, Any]], pair: ProblemPair) -> Iterator[Judgement]:
    """Check results and gradients for the first supported alternative of one entry of `_SIZES`."""
    subject = pair.subject
    if subject.case.storage is not None:
        yield build_unsupported("out", "this call needs other lengths, which the storage layout of the case fixes")
        return
    mask = subject.case.mask if subject.case.mask == "causal" else "full"
    refusals = []
    for change in changes:
        sized: dict[str, Any] = {"mask": mask, **change}
        case = dataclasses.replace(subject.case, **sized)
        if (refusal := subject.implementation.supports(case)) is None:
            other = dataclasses.replace(subject, case=case)
            yield from check_problem(other, other.problem)
            return
        refusals.append(refusal)
    yield build_unsupported("out", refusals[0])


def _check_stored_sequences(changes: Mapping[str, Any], pair: ProblemPair) -> Iterator[Judgement]:
    """Check results and gradients for stored sequences whose lengths and number the usual cases lack.

    If the implementation does not support the requested number of heads, the case's own number is used.
    """
    subject = pair.subject
    requested = dataclasses.replace(subject.case, **changes)
    heads = {name: getattr(subject.case, name) for name in ("num_q_heads", "num_kv_heads")}
    refusals = []
    for case in (requested, dataclasses.replace(requested, **heads)):
        if (refusal := subject.implementation.supports(case)) is None:
            other = dataclasses.replace(subject, case=case)
            yield from check_problem(other, other.problem)
            if subject.implementation.writes_pages:
                yield from page_comparison.check_pages(other, save_residuals=False)
            return
        refusals.append(refusal)
    yield build_unsupported("out", refusals[-1])


def _check_few_operands(call: Mapping[str, Any], pair: ProblemPair) -> Iterator[Judgement]:
    """Check a call of `few_operand_calls`, in the first variant that the implementation supports.

    With gradients, `out` is taken from the program that computes them, so that one compiled program suffices.
    """
    subject = pair.subject
    if subject.case.storage is not None:
        yield build_unsupported("out", "this call needs dense operands, and the implementation takes stored ones")
        return
    refusals = []
    for case in few_operand_calls.iter_variants(subject.case, call):
        if (refusal := subject.implementation.supports(case)) is not None:
            refusals.append(refusal)
            continue
        pullbacks = list_pullbacks(subject.implementation, case)[-1:]
        selection = Subchecks(pullbacks=pullbacks, cotangents=(), laws=(), poisons=(), visible_nan=False)
        other = dataclasses.replace(subject, case=case, selection=selection)
        if not other.has_gradients:
            yield from check_problem(other, other.problem)
            return
        yield from check_primal(other)
        name = other.full_cotangent
        yield from judge_gradients(other, other.gradients(name), other.get_expected_gradients(name))
        return
    yield build_unsupported("out", refusals[0])


def _check_numpy(pair: ProblemPair) -> Iterator[Judgement]:
    """Check a call on NumPy arrays outside `jit`, whose result must survive a call on the same, changed arrays."""
    for problem, other in (pair.problems, *_add_dense_masks(pair)):
        refused, results = pair.subject.executor.run(call_sequences.run_on_reused_numpy_arrays, problem, other)
        if refused:
            yield build_unsupported("out", refused)
            return
        for got, given in zip(results, (problem, other), strict=True):
            yield pair.judge_out_for(got, (given,), (pair.subject.expect(given),))


def _add_dense_masks(pair: ProblemPair) -> list[tuple[Problem, Problem]]:
    """Return a list of the pair with its masks as arrays; empty if the kernel does not take this mask as an array."""
    case, subject = pair.subject.case, pair.subject
    sizes = (case.batch, case.num_q_heads, case.q_length, case.kv_length, case.seed)
    first, second = (
        dataclasses.replace(problem, mask=mask_spec.build_mask(spec, *sizes))
        for problem, spec in zip(pair.problems, ("dense-d60", "dense-d30"), strict=True)
    )
    refused = case.storage is not None or subject.implementation.supports(dataclasses.replace(case, mask="dense-d60"))
    if refused or not subject.executor.run(single_calls.find_mask_arguments, first)["mask"]:
        return []
    return [(first, second)]


def _check_thread(pair: ProblemPair) -> Iterator[Judgement]:
    """Check a call outside `jit` that a new thread makes."""
    yield pair.judge_out(pair.subject.executor.run(call_sequences.run_in_thread, pair.problems[0]))


def _check_shared_ids(pair: ProblemPair) -> Iterator[Judgement]:
    """Check a call with one array of unsorted segment ids, shared by queries and keys as in self-attention."""
    case = dataclasses.replace(pair.subject.case, segments="segwild")
    refusal = pair.subject.implementation.supports(case)
    if refusal is not None or case.q_length != case.kv_length:
        yield build_unsupported("out", refusal or "the lengths differ")
        return
    problem = draw_problem(case)
    assert problem.segment_ids is not None
    shared = dataclasses.replace(problem, segment_ids=(problem.segment_ids[1],) * 2)
    got = pair.subject.executor.run(call_sequences.run_on_shared_ids, shared)
    yield pair.judge_out_for(got, (shared,), (pair.subject.expect(shared),))


def _check_shared_array(pair: ProblemPair) -> Iterator[Judgement]:
    """Check a call outside `jit` with one array, whose last token is zero, for queries, keys and values."""
    case = pair.subject.case
    if case.storage is not None:
        yield build_unsupported("out", "stored queries, keys and values cannot be one array")
        return
    changes: dict[str, Any] = {operand.field: operand.absent for operand in REMOVABLE}
    changes |= {
        "kv_cache": None,
        "kv_length": case.q_length,
        "num_kv_heads": case.num_q_heads,
        "v_head_dim": case.head_dim,
    }
    plain = dataclasses.replace(case, **changes)
    candidates = (dataclasses.replace(plain, mask=mask) for mask in ("full", "causal", case.mask))
    refusals = []
    for other in candidates:
        if (refusal := pair.subject.implementation.supports(other)) is None:
            problem = draw_problem(other)
            tokens = problem.q.copy()
            tokens[:, 1:][:, -1:] = 0  # a padded last token that no mask hides; a single token stays as it is
            shared = dataclasses.replace(problem, q=tokens, k=tokens, v=tokens)
            subject = dataclasses.replace(pair.subject, case=other)
            got = pair.subject.executor.run(call_sequences.run_on_shared_array, shared)
            yield subject.judge("out", got, subject.expect(shared).forward["out"], subject.find_judged_rows(shared))
            return
        refusals.append(refusal)
    yield build_unsupported("out", refusals[0])


def _check_repetition(pair: ProblemPair) -> Iterator[Judgement]:
    """Check that a thousand calls of one program on the same operands give the same bits."""
    count = _REPEATS_INTERPRETED if pair.subject.implementation.accelerator.interpreted else _REPEATS
    count_different = pair.subject.executor.run(call_sequences.count_differing_calls, pair.problems[0], count)
    reason = "" if not count_different else f"{count_different} of {count:,} calls give other bits than the first"
    yield Judgement(observable="bits", verdict=records.FAIL if count_different else records.PASS, reason=reason)


_SPECIAL_VALUES: dict[str, Callable[[ProblemPair], Iterator[Judgement]]] = {
    f"special_{operand.name}": functools.partial(_check_special_values, operand)
    for operand in OPTIONAL
    if operand.special is not None
}
_SUBCHECKS: dict[str, Callable[[ProblemPair], Iterator[Judgement]]] = {
    "other_masks": _check_other_masks,
    "other_values": _check_other_values,
    "other_bias": _check_other_bias,
    "other_shapes": _check_other_shapes,
    **_SPECIAL_VALUES,
    "numpy": _check_numpy,
    "thread": _check_thread,
    "same_ids": _check_shared_ids,
    "one_array": _check_shared_array,
    "a_thousand": _check_repetition,
    **{name: functools.partial(_check_size, changes) for name, changes in _SIZES.items()},
}
_FEW_OPERANDS: dict[str, Callable[[ProblemPair], Iterator[Judgement]]] = {
    name: functools.partial(_check_few_operands, call) for name, call in few_operand_calls.CALLS.items()
}
