"""Calls that follow each other in one process: none may see what another one left behind."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from cases import mask_spec
from cases.inputs import Problem, draw
from cases.masks import Causal, Dense, Mask
from cases.operands import REMOVABLE
from cases.serving.calls import FURTHER, other_masks
from conformance import records
from conformance.asking import few_operands
from conformance.asking.judgement import Judgement, apart, unsupported
from conformance.asking.subject import Subject
from conformance.asking.turn import Turn, pullbacks_of
from conformance.checks.forward import primal
from conformance.checks.gradients import judge_gradients, right_on
from conformance.checks.pair import Pair
from conformance.driving import alone, sequences

# Two of a kind that is numbers, one of them 0, two of one that is an array, a window that is as good as causal, and
# arrays beside a window, beside both flags, and of batch rows and heads together.
_OTHER_MASKS = (
    "window-l9-r0",
    "window-l0-r2",
    "window-linf-r0",
    "dense-d60",
    "dense-d30",
    "window-l9-r20_and_dense-d60",
    "causal_and_window-l30-r0_and_dense-d60",
    "densehead-d60_and_densebatch-d60",
)
# How often one program is called: what goes wrong once in a few hundred calls shows. Interpreted kernels take longer.
_CALLS = 1000
_CALLS_INTERPRETED = 10

# Beyond what the grids have: more batch rows, with a bias of each, and heads of each kind than 8, more than 16 heads in
# a group, for one query too, more than 40 heads, a depth beyond 256 and one below 16, fewer keys than any tile, one
# key, a cache of 512, one that no split divides (2593 is a prime, of which more than half of 1024 is left; long caches
# of the grids are multiples of 8) and of which each key has some weight, and tens of sequences in a row, over 512
# positions each way. An odd number of heads of a usual depth, each with its own keys. Blocks that leave three if they
# are taken by fours: seven of 64 each way, eleven of 128 of keys and of queries. And a step whose queries' windows
# begin on both sides of key 512, where blocks of any usual size meet. Each in the first lengths that an implementation
# takes.
# Beside that, heads that leave a rest if they are taken by fours or eights, and such that do not, with keys of their
# own and in groups, and values deeper than keys. Each would be a program of its own, so that these calls have them.
_SHORT: tuple[dict[str, Any], ...] = tuple({"q_length": n, "kv_length": n} for n in (16, 128))
_UNCUT: dict[str, Any] = {"batch": 1, "segments": None}
_FULL: dict[str, Any] = {**_UNCUT, "mask": "full"}
_CACHE: dict[str, Any] = {"segments": None, "mask": "full", "phase": "decode", "q_length": 1}


def _heads(num_q_heads: int, num_kv_heads: int) -> dict[str, Any]:
    return {"num_q_heads": num_q_heads, "num_kv_heads": num_kv_heads}


def _depths(head_dim: int, v_head_dim: int) -> dict[str, Any]:
    return {"head_dim": head_dim, "v_head_dim": v_head_dim}


# Values deeper than queries and keys, by sixteen and by eight, where that is taken.
_DEEPER = _depths(24, 40), _depths(32, 40)
_SIZES: dict[str, tuple[dict[str, Any], ...]] = {
    # Segments would leave the query one key.
    "few": tuple(
        {"batch": b, "q_length": 1, "kv_length": 5, "segments": None, **more}
        for heads in ({**_heads(12, 12), **_depths(8, 4)}, _heads(12, 12), {})
        for b, more in ((33, {**heads, "bias": "biasbatch"}), (33, heads), (1, heads))
    ),
    "one": tuple(
        {"q_length": 1, "kv_length": 1, "segments": None, **more} for more in ({"batch": 8, **_heads(16, 16)}, {})
    ),
    "cache": tuple({**_CACHE, "kv_length": 512, **heads} for heads in (_heads(42, 6), {})),
    "rest": tuple(
        {**_CACHE, "batch": 1, "kv_length": 2593, "soft_cap": None, **heads} for heads in (_heads(17, 1), {})
    ),
    "many": tuple({**_heads(n, k), **short} for n, k in ((153, 9), (45, 45)) for short in _SHORT),
    "packed": ({"batch": 1, "segments": "segmany", "q_length": 512, "kv_length": 512},),
    "deep": tuple({**_depths(h, v), **short} for h, v in ((320, 288), (512, 512)) for short in _SHORT),
    "odd": tuple({**_heads(n, n), **_depths(64, 64), **short} for n in (7, 3) for short in _SHORT),
    "seven": tuple({**_UNCUT, "q_length": 448, "kv_length": 448, **depths} for depths in (_DEEPER[0], {})),
    "eleven": (
        {**_FULL, "q_length": 16, "kv_length": 1408, **_heads(14, 2), **_DEEPER[1]},
        *({**_FULL, "q_length": n, "kv_length": 1408} for n in (16, 128)),
    ),
    "eleven_of_queries": (
        {**_FULL, "q_length": 1408, "kv_length": 16, **_heads(24, 2)},
        *({**_FULL, "q_length": 1408, "kv_length": n} for n in (16, 128)),
    ),
    "border": ({**_UNCUT, "phase": "prefill", "mask": "window-l638-r0-o1148", "q_length": 4, "kv_length": 1152},),
}


def calls(subject: Subject) -> Iterator[Judgement]:
    """Calls that follow each other with other masks, values, shapes and types, or a thousand times the same, agree."""
    pair = Pair.of(subject)
    for name, sequence in _SEQUENCES.items():
        yield from apart(name, functools.partial(sequence, pair))
    if "alibi_slopes" in subject.implementation.offers:
        for name, call in few_operands.SLOPED.items():
            yield from apart(name, functools.partial(_of_few_operands, call, pair))
    kind = subject.implementation.storage
    for name, changes in FURTHER[kind].items() if kind is not None else ():
        yield from apart(name, functools.partial(_of_further_sequences, changes, pair))


def _eagerly(pair: Pair, problem: Problem) -> np.ndarray:
    return pair.subject.executor.run(sequences.eagerly, problem)


def _other_masks(pair: Pair) -> Iterator[Judgement]:
    """Other masks of the same shapes, outside `jit`, then the first one again."""
    case = pair.subject.case
    specs = _OTHER_MASKS if case.storage is None else other_masks(case)
    possible = (dataclasses.replace(case, mask=spec) for spec in specs)
    others = [other for other in possible if pair.subject.implementation.supports(other) is None]
    sizes = (case.batch, case.num_q_heads, case.q_length, case.kv_length, case.seed)
    problems = [dataclasses.replace(pair.problems[0], mask=mask_spec.build(other.mask, *sizes)) for other in others]
    if others and others[-1].mask == _OTHER_MASKS[-1]:
        problems.append(dataclasses.replace(pair.problems[0], mask=_alike(problems[-1])))
    beside = dataclasses.replace(case, mask="causal_and_dense-d60")
    if case.storage is None and pair.subject.implementation.supports(beside) is None:
        problems.append(dataclasses.replace(pair.problems[0], mask=_hiding_nothing(pair.problems[0])))
    for problem in [*problems, pair.problems[0]] if problems else []:
        got = _eagerly(pair, problem)
        yield pair.judge_out_of(got, (problem,), (pair.subject.expect(problem),))


def _alike(problem: Problem) -> Dense:
    """A mask with the first row of the problem's, and as many pairs: other rows come in reverse."""
    allowed = problem.resolved_mask.dense(problem.q.shape[1], problem.k.shape[1])
    return Dense(np.concatenate([allowed[:, :, :1], allowed[:, :, :0:-1]], axis=2))


def _hiding_nothing(problem: Problem) -> Mask:
    """A causal mask beside an array that is true throughout."""
    return Causal() & Dense(np.ones((1, 1, problem.q.shape[1], problem.k.shape[1]), bool))


def _other_values(pair: Pair) -> Iterator[Judgement]:
    """Other operands, segment ids among them, outside `jit`, then the first ones again.

    The results are looked at last: no call may write into what an earlier one has returned.
    """
    turns = (0, 1, 0)
    found = pair.subject.executor.run(sequences.eagerly_in_turn, [pair.problems[n] for n in turns])
    for n, got in zip(turns, found, strict=True):
        yield pair.judge_out_of(got, (pair.problems[n],), (pair.expected[n],))


def _other_bias(pair: Pair) -> Iterator[Judgement]:
    """A bias of batch rows and heads, outside `jit`, with zeros in its first row: that of the case is for all rows."""
    case = dataclasses.replace(pair.subject.case, bias="biasbatch")
    refusal = pair.subject.implementation.supports(case)
    if pair.problems[0].bias is None or refusal is not None:
        yield unsupported("out", refusal or "the case has no bias")
        return
    bias = draw(case).bias
    assert bias is not None
    bias[:, :, 0] = 0
    problem = dataclasses.replace(pair.problems[0], bias=bias)
    yield pair.judge_out_of(_eagerly(pair, problem), (problem,), (pair.subject.expect(problem),))


def _other_shapes(pair: Pair) -> Iterator[Judgement]:
    """Another dtype, other lengths in that dtype first, outside `jit`, then the first ones again."""
    case, supports = pair.subject.case, pair.subject.implementation.supports
    dtype = {"dtype": "bf16" if case.dtype == "f32" else "f32"}
    # One more than a whole number of blocks of any power of two, where that is taken.
    longer: dict[str, Any] = {"q_length": 2 * case.q_length + 1, "kv_length": 2 * case.kv_length + 1}
    if supports(dataclasses.replace(case, **longer)) is not None:
        longer = {"q_length": 2 * case.q_length, "kv_length": 2 * case.kv_length}
    changes: tuple[dict[str, Any], ...] = (dtype, longer | dtype, longer, {})
    others = [dataclasses.replace(case, **change) for change in changes]
    for other in others:
        if pair.subject.implementation.supports(other) is None:
            subject = dataclasses.replace(pair.subject, case=other)
            got = _eagerly(pair, subject.problem)
            yield subject.judge("out", got, subject.expectation.forward["out"], subject.judged_out)


def _of_size(changes: Sequence[Mapping[str, Any]], pair: Pair) -> Iterator[Judgement]:
    """A call of a size that no case of the grids has, the first that is supported, with its gradients."""
    subject = pair.subject
    if subject.case.storage is not None:
        yield unsupported("out", "the lengths of stored sequences are those of the case")
        return
    mask = subject.case.mask if subject.case.mask == "causal" else "full"
    refusals = []
    for change in changes:
        sized: dict[str, Any] = {"mask": mask, **change}
        case = dataclasses.replace(subject.case, **sized)
        if (refusal := subject.implementation.supports(case)) is None:
            other = dataclasses.replace(subject, case=case)
            yield from right_on(other, other.problem)
            return
        refusals.append(refusal)
    yield unsupported("out", refusals[0])


def _of_further_sequences(changes: Mapping[str, Any], pair: Pair) -> Iterator[Judgement]:
    """A call of stored sequences of other lengths, or of more of them or of heads, than a case of the grids has.

    Where so many heads are not taken, those of the case.
    """
    subject = pair.subject
    told = dataclasses.replace(subject.case, **changes)
    heads = {name: getattr(subject.case, name) for name in ("num_q_heads", "num_kv_heads")}
    refusals = []
    for case in (told, dataclasses.replace(told, **heads)):
        if (refusal := subject.implementation.supports(case)) is None:
            other = dataclasses.replace(subject, case=case)
            yield from right_on(other, other.problem)
            return
        refusals.append(refusal)
    yield unsupported("out", refusals[-1])


def _of_few_operands(call: Mapping[str, Any], pair: Pair) -> Iterator[Judgement]:
    """A call of one operand or none, the first form that is supported; results and gradients out of one program."""
    subject = pair.subject
    if subject.case.storage is not None:
        yield unsupported("out", "the operands of stored sequences are those of the case")
        return
    refusals = []
    for case in few_operands.forms_of(subject.case, call):
        if (refusal := subject.implementation.supports(case)) is not None:
            refusals.append(refusal)
            continue
        pulled = pullbacks_of(subject.implementation, case)[-1:]
        other = dataclasses.replace(subject, case=case, turn=Turn(pulled=pulled, cotangents=(), laws=(), poisons=()))
        if not other.with_gradients:
            yield from right_on(other, other.problem)
            return
        yield from primal(other)
        name = other.any_random
        yield from judge_gradients(other, other.gradients(name), other.expected_gradients(name))
        return
    yield unsupported("out", refusals[0])


def _numpy(pair: Pair) -> Iterator[Judgement]:
    """Operands that are NumPy arrays, outside `jit`, then other values in the same arrays.

    The first result is looked at after the second call, which must not change it.
    """
    for problem, other in (pair.problems, *_with_mask_arrays(pair)):
        refused, found = pair.subject.executor.run(sequences.numpy_operands, problem, other)
        if refused:
            yield unsupported("out", refused)
            return
        for got, meant in zip(found, (problem, other), strict=True):
            yield pair.judge_out_of(got, (meant,), (pair.subject.expect(meant),))


def _numpy_views(pair: Pair) -> Iterator[Judgement]:
    """NumPy arrays whose numbers do not lie behind each other, outside `jit`."""
    refused, got = pair.subject.executor.run(sequences.numpy_views, pair.problems[0])
    yield unsupported("out", refused) if refused else pair.judge_out(got)


def _with_mask_arrays(pair: Pair) -> list[tuple[Problem, Problem]]:
    """The two problems with masks that are arrays, where such a mask reaches the call as one."""
    case, subject = pair.subject.case, pair.subject
    sizes = (case.batch, case.num_q_heads, case.q_length, case.kv_length, case.seed)
    one, other = (
        dataclasses.replace(problem, mask=mask_spec.build(spec, *sizes))
        for problem, spec in zip(pair.problems, ("dense-d60", "dense-d30"), strict=True)
    )
    refused = case.storage is not None or subject.implementation.supports(dataclasses.replace(case, mask="dense-d60"))
    return [] if refused or not subject.executor.run(alone.flags, one)["mask"] else [(one, other)]


def _in_a_thread(pair: Pair) -> Iterator[Judgement]:
    """The call outside `jit`, made in a thread of its own."""
    yield pair.judge_out(pair.subject.executor.run(sequences.in_a_thread, pair.problems[0]))


def _same_ids(pair: Pair) -> Iterator[Judgement]:
    """One array for the segment ids of queries and keys, as in self-attention, with ids that come back."""
    case = dataclasses.replace(pair.subject.case, segments="segwild")
    refusal = pair.subject.implementation.supports(case)
    if refusal is not None or case.q_length != case.kv_length:
        yield unsupported("out", refusal or "the lengths differ")
        return
    problem = draw(case)
    assert problem.segment_ids is not None
    shared = dataclasses.replace(problem, segment_ids=(problem.segment_ids[1],) * 2)
    got = pair.subject.executor.run(sequences.of_one_array_of_ids, shared)
    yield pair.judge_out_of(got, (shared,), (pair.subject.expect(shared),))


def _one_array(pair: Pair) -> Iterator[Judgement]:
    """One array for queries, keys and values, as layers without projections have, outside `jit`; it ends with zeros."""
    case = pair.subject.case
    if case.storage is not None:
        yield unsupported("out", "the operands of stored sequences lie elsewhere")
        return
    alike: dict[str, Any] = {operand.field: operand.absent for operand in REMOVABLE}
    alike |= {
        "kv_cache": None,
        "kv_length": case.q_length,
        "num_kv_heads": case.num_q_heads,
        "v_head_dim": case.head_dim,
    }
    plain = dataclasses.replace(case, **alike)
    possible = (dataclasses.replace(plain, mask=mask) for mask in ("full", "causal", case.mask))
    refusals = []
    for other in possible:
        if (refusal := pair.subject.implementation.supports(other)) is None:
            problem = draw(other)
            tokens = problem.q.copy()
            tokens[:, 1:][:, -1:] = 0  # a token of padding, like any other where no mask hides it; never the only one
            shared = dataclasses.replace(problem, q=tokens, k=tokens, v=tokens)
            subject = dataclasses.replace(pair.subject, case=other)
            got = pair.subject.executor.run(sequences.of_one_array, shared)
            yield subject.judge("out", got, subject.expect(shared).forward["out"], subject.judged_out_of(shared))
            return
        refusals.append(refusal)
    yield unsupported("out", refusals[0])


def _a_thousand(pair: Pair) -> Iterator[Judgement]:
    """The same program on the same operands, again and again, gives the same bits."""
    count = _CALLS_INTERPRETED if pair.subject.implementation.accelerator.interpreted else _CALLS
    different = pair.subject.executor.run(sequences.again_and_again, pair.problems[0], count)
    reason = "" if not different else f"{different} of {count:,} calls give other bits than the first"
    yield Judgement(observable="bits", verdict=records.FAIL if different else records.PASS, reason=reason)


_SEQUENCES: dict[str, Callable[[Pair], Iterator[Judgement]]] = {
    "other_masks": _other_masks,
    "other_values": _other_values,
    "other_bias": _other_bias,
    "other_shapes": _other_shapes,
    "numpy": _numpy,
    "numpy_views": _numpy_views,
    "thread": _in_a_thread,
    "same_ids": _same_ids,
    "one_array": _one_array,
    "a_thousand": _a_thousand,
    **{name: functools.partial(_of_size, changes) for name, changes in _SIZES.items()},
    **{name: functools.partial(_of_few_operands, call) for name, call in few_operands.CALLS.items()},
}
