"""Check `dropout`: judge results and gradients under the weights that the implementation drops, and which it drops.

The judge does not know the generator, but it sees the mask: if the values are one in one coordinate of one key, `out`
is a row of the weights after dropout. With that mask the oracle computes results and gradients. So a mask that differs
between passes, or that depends on the values, shows as wrong numbers.

If the call takes a mask in place of a key, the mask that is seen must be the mask that was given. Its rate and
independence are then those of the judge's own generator, and are not judged.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from cases.operand_values import Problem, draw_dropout_key, draw_problem
from conformance.check_api.judgement import Judgement, add_label, build_unsupported, catch_errors, run_subcheck
from conformance.check_api.subject import Subject
from conformance.checks.forward import check_forward, check_primal, check_residuals
from conformance.checks.gradients import check_gradients, check_gradients_lse
from conformance.checks.problem_pair import ProblemPair
from conformance.execution import kernel_errors, returned_values
from conformance.execution.executor import Result
from conformance.executor_tasks import call_sequences, program_inspection, sharded_calls, transformed_calls
from conformance.truth import mask_statistics, oracle
from conformance.truth.declared_formulas import reorder_terms
from conformance.truth.mask_statistics import Surprise
from reports import records

# Calls with one mask each, from which the rate and independence are judged.
_CALLS, _CALLS_INTERPRETED = 48, 8
# A weight is seen as dropped if `out` has less than this share of what a kept one gives. A dropped weight gives zero.
_SEEN_SHARE = 1 / 8
_OTHER_DEVICES = 2  # of a call that several devices share, beside the four of all other calls


def check_dropout(subject: Subject) -> Iterator[Judgement]:
    """Check results and gradients under the dropped weights, and the rate, the key and the independence of these."""
    if subject.problem.dropout_rate is None:
        return
    if generator := _find_generator_elsewhere(subject):
        reason = (
            f"the generator cannot be interpreted here: the kernel draws by {generator!r}, which only a TPU computes. "
            "JAX's interpreters refuse it or give zeros"
        )
        yield Judgement(observable="all", verdict=records.UNJUDGED, reason=reason)
        return
    masks = _Masks(subject)
    seen = subject.with_problem(masks.problem)
    yield from run_subcheck("results", lambda: _check_results(seen))
    for name, check in _LAWS.items():
        yield from run_subcheck(name, functools.partial(check, masks))


def _find_generator_elsewhere(subject: Subject) -> str:
    """Return the operation by which the call draws random numbers, if only a chip that is not here has it; else ""."""
    if subject.executor.backend == "tpu":
        return ""
    drawn = subject.cotangents.get("random")
    do = None if drawn is None else drawn.out
    return subject.executor.run(program_inspection.find_chip_generator, subject.problem, do)


@dataclasses.dataclass(frozen=True)
class _Masks:
    """The masks by which an implementation drops weights in one case."""

    subject: Subject

    @functools.cached_property
    def problem(self) -> Problem:
        """The problem of the case, with the weights that the implementation keeps."""
        return dataclasses.replace(self.subject.problem, kept_pairs=self.see(self.subject.problem))

    @functools.cached_property
    def flat(self) -> Problem:
        """The problem with queries and keys of zero, so that no weight is small."""
        problem = self.subject.problem
        return dataclasses.replace(problem, q=np.zeros_like(problem.q), k=np.zeros_like(problem.k))

    @property
    def are_given(self) -> bool:
        """Whether the call takes the mask in place of a key."""
        return self.subject.implementation.dropout_mask == "given"

    @functools.cached_property
    def visible(self) -> np.ndarray:
        """The pairs that may attend, booleans `[B, N, T, S]`."""
        problem = self.subject.problem
        shape = (problem.q.shape[0], problem.q.shape[2], problem.q.shape[1], problem.k.shape[1])
        return np.broadcast_to(problem.allowed, shape)

    @functools.cached_property
    def rate(self) -> float:
        """The dropout rate of the case."""
        assert self.subject.problem.dropout_rate is not None
        return self.subject.problem.dropout_rate

    @functools.cached_property
    def flat_weights(self) -> np.ndarray:
        """The weights of `flat` before dropout, `[B, N, T, S]`; the dropout key does not change them."""
        return oracle.compute_weights(self.flat, self.subject.empty_rows)

    @functools.cached_property
    def flat_mask(self) -> np.ndarray:
        """The mask of `flat`, booleans `[B, N, T, S]`."""
        return self.see(self.flat)

    def see(self, problem: Problem, forward: Callable[[Problem], Result] | None = None) -> np.ndarray:
        """See which weights are kept, booleans `[B, N, T, S]`, by values that are one in one coordinate of one key."""
        forward = forward or self.subject.executor.forward
        problem = reorder_terms(problem, self.subject.implementation.formulas)
        is_flat = problem.q is self.flat.q
        weights = self.flat_weights if is_flat else oracle.compute_weights(problem, self.subject.empty_rows)
        seen = np.empty(weights.shape)
        depth = problem.v.shape[-1]
        for first in range(0, weights.shape[-1], depth):
            values = np.zeros_like(problem.v)
            count = min(depth, weights.shape[-1] - first)
            values[:, first + np.arange(count), :, np.arange(count)] = 1
            out = forward(dataclasses.replace(problem, v=values)).values["out"]
            returned_values.check_shape("out", out, values.shape[:1] + problem.q.shape[1:3] + (depth,))
            seen[..., first : first + count] = out.transpose(0, 2, 1, 3)[..., :count].astype(np.float64)
        return ~(np.abs(seen) < _SEEN_SHARE * weights / (1 - (problem.dropout_rate or 0.0)))

    @functools.cached_property
    def many(self) -> np.ndarray:
        """The masks of several dropout keys, `[M, B, N, T, S]`, that of the case first; axes that share masks cut."""
        calls = _CALLS_INTERPRETED if self.subject.implementation.accelerator.interpreted else _CALLS
        per_mask = -(-self.flat.k.shape[1] // self.flat.v.shape[-1])
        keys = self._list_keys(max(3, min(16, calls // per_mask)))
        found = np.stack([self.see(dataclasses.replace(self.flat, dropout_key=key)) for key in keys])
        shared = self.subject.implementation.dropout_shared
        found = found[:, :1] if "batch" in shared else found
        return found[:, :, :1] if "heads" in shared else found

    @property
    def visible_of_many(self) -> np.ndarray:
        """The visible pairs of `many`, booleans `[B, N, T, S]`."""
        batch, heads = self.many.shape[1:3]
        return self.visible[:batch, :heads]

    def _list_keys(self, count: int) -> list[np.ndarray]:
        """List the key of the case, its two neighbours, and drawn ones."""
        key = self.subject.problem.dropout_key
        assert key is not None
        near = [key + np.array(step, np.uint32) for step in ((0, 1), (1, 0))]
        return [key, *near, *(draw_dropout_key(self.subject.case, n) for n in range(1, count - 2))][:count]


def _check_results(subject: Subject) -> Iterator[Judgement]:
    """Check what is offered of results and gradients, under the mask that was seen."""
    judged = itertools.chain(  # an exception of a later call leaves the judgements before it
        check_forward(subject),
        add_label("residuals", check_residuals(subject)),
        add_label("primal", check_primal(subject)),
        check_gradients(subject),
        add_label("lse", check_gradients_lse(subject)),
    )
    yield from (each for each in judged if each.verdict != records.UNSUPPORTED)


def _check_rate(masks: _Masks) -> Iterator[Judgement]:
    """Check that weights are dropped at the rate: overall, and for each key, head, batch row, query and block."""
    if masks.are_given:
        return
    yield _judge_surprise("kept", mask_statistics.judge_rate(masks.many, masks.visible_of_many, masks.rate), "are kept")


def _check_independence(masks: _Masks) -> Iterator[Judgement]:
    """Check that masks of other keys, heads, batch rows, queries and keys are independent."""
    if masks.are_given:
        return
    surprises = mask_statistics.judge_independence(masks.many, masks.visible_of_many, masks.rate)
    for name, surprise in zip(("masks", "places", "corners"), surprises, strict=True):
        yield _judge_surprise(name, surprise, "are alike")


def _judge_surprise(observable: str, surprise: Surprise, event: str) -> Judgement:
    """Judge the least probable of a family of counts."""
    reason = (
        f"{surprise.where}: {surprise.found:.4%} of {surprise.places:,} {event}, not {surprise.expected:.4%}; a "
        f"correct generator gives such a count with probability {surprise.probability:.1g}"
    )
    return Judgement(
        observable=observable,
        verdict=records.PASS if surprise.is_credible else records.FAIL,
        reason="" if surprise.is_credible else reason,
        figures={"share": surprise.found, "places": float(surprise.places)},
    )


def _check_shared(masks: _Masks) -> Iterator[Judgement]:
    """Check that masks are equal along the axes that are declared to share them."""
    for name, axis in (("batch", 0), ("heads", 1)):
        if name in masks.subject.implementation.dropout_shared:
            kept = masks.flat_mask
            yield _compare(name, kept, np.take(kept, [0], axis=axis), masks.visible, f"with other {name}")


def _check_given(masks: _Masks) -> Iterator[Judgement]:
    """Check that the weights of the mask that was given are dropped, also if it drops rows or broadcasts."""
    if not masks.are_given:
        return
    drawn = masks.subject.executor.draw_dropout_mask(masks.subject.problem)
    yield _compare("mask", masks.flat_mask, drawn, masks.visible, "than by the mask that was given")
    rows = drawn & (np.arange(drawn.shape[2]) % 3 != 1)[:, None]
    given = {"rows": rows, "batch": drawn[:1], "heads": drawn[:, :1], "batch_and_heads": drawn[:1, :1]}
    for name, mask in given.items():
        if name == "rows" or mask.shape != drawn.shape:
            yield from add_label(name, catch_errors("all", functools.partial(_check_mask, masks, mask)))


def _check_mask(masks: _Masks, mask: np.ndarray) -> Iterator[Judgement]:
    """Check which weights are dropped by a mask, `[B or 1, N or 1, T, S]`, and results and gradients under it."""
    seen = masks.see(dataclasses.replace(masks.flat, dropout_mask=mask))
    yield _compare("mask", seen, mask, masks.visible, "than by the mask that was given")
    problem = dataclasses.replace(masks.subject.problem, dropout_mask=mask)
    subject = masks.subject.with_problem(dataclasses.replace(problem, kept_pairs=np.broadcast_to(mask, seen.shape)))
    judged = itertools.chain(check_forward(subject), check_gradients(subject))
    yield from (each for each in judged if each.verdict != records.UNSUPPORTED)


def _check_same_key(masks: _Masks) -> Iterator[Judgement]:
    """Check that the same key drops the same weights in a program compiled anew, in another process if sandboxed."""
    fresh = masks.subject.executor.create_fresh(new_hashes=True)
    yield _compare(
        "mask", masks.see(masks.flat, fresh.forward), masks.flat_mask, masks.visible, "in a new program or process"
    )


def _check_values(masks: _Masks) -> Iterator[Judgement]:
    """Check that the mask does not depend on queries and keys."""
    assert masks.problem.kept_pairs is not None
    yield _compare("mask", masks.flat_mask, masks.problem.kept_pairs, masks.visible, "with queries and keys of zero")


def _compare(name: str, got: np.ndarray, expected: np.ndarray, visible: np.ndarray, change: str) -> Judgement:
    """Judge whether two masks are equal where they are visible."""
    wrong = int(((got != expected) & visible).sum())
    reason = f"{wrong:,} of {int(visible.sum()):,} weights are dropped differently {change}" if wrong else ""
    return Judgement(observable=name, verdict=records.FAIL if wrong else records.PASS, reason=reason)


def _check_rate_zero(masks: _Masks) -> Iterator[Judgement]:
    """Check that a rate of zero gives the bits of a call without dropout."""
    subject = masks.subject
    zero = dataclasses.replace(subject.problem, dropout_rate=0.0)
    without = dataclasses.replace(subject.problem, dropout_rate=None, dropout_key=None)
    run: Callable[[Problem], Mapping[str, np.ndarray]] = subject.run_results
    if "random" in subject.cotangents:
        drawn = subject.cotangents["random"]

        def run(problem: Problem) -> Mapping[str, np.ndarray]:
            return subject.executor.gradients(problem, drawn).values

    try:
        expected = run(without)
    except Exception as error:
        yield build_unsupported("out", f"without dropout, the call raises {kernel_errors.describe_kernel_error(error)}")
        return
    for name, got in run(zero).items():
        same = np.array_equal(got.view(np.uint8), expected[name].view(np.uint8))
        reason = "" if same else "other bits than without dropout"
        yield Judgement(observable=name, verdict=records.PASS if same else records.FAIL, reason=reason)


def _check_rate_one(masks: _Masks) -> Iterator[Judgement]:
    """Check that a rate of one is refused, or gives zeros, also outside `jit`, where XLA cannot remove a 0 / 0."""
    executor, problem = masks.subject.executor, dataclasses.replace(masks.subject.problem, dropout_rate=1.0)
    calls: dict[str, Callable[[], np.ndarray]] = {
        "": lambda: executor.forward(problem).values["out"],
        " outside jit": lambda: executor.run(call_sequences.run_eagerly, problem),
    }
    refused = ""
    for where, call in calls.items():
        try:
            out = call()
        except Exception as error:
            refused = kernel_errors.describe_kernel_error(error)
            continue
        if wrong := int((out != 0).sum()):
            reason = f"{wrong:,} of {out.size:,} elements{where} are not zero, {int(np.isnan(out).sum()):,} of them NaN"
            yield Judgement(observable="out", verdict=records.FAIL, reason=reason)
            return
    yield Judgement(observable="out", verdict=records.PASS, reason=refused)


def _check_eager(masks: _Masks) -> Iterator[Judgement]:
    """Check the call outside `jit`."""
    pair = _pair(masks)
    yield pair.judge_out(pair.run_eagerly(pair.problems[0]))


def _check_vmap(names: Sequence[str], masks: _Masks) -> Iterator[Judgement]:
    """Check `vmap` over dropout keys or masks, or over queries with one of them: each call drops as it does alone."""
    pair = _pair(masks)
    changed: dict[str, Any] = {name: getattr(pair.problems[1], name) for name in names}
    mixed = dataclasses.replace(pair.problems[0], **changed)
    problems = (pair.problems[0], dataclasses.replace(mixed, kept_pairs=masks.see(mixed)))
    mapped = ("dropout_mask",) if masks.are_given and names == ("dropout_key",) else names
    got = masks.subject.executor.run(transformed_calls.run_vmap_over, problems, mapped)
    yield pair.judge_out_for(got, problems, [masks.subject.expect(problem) for problem in problems])


def _check_checkpoint(masks: _Masks) -> Iterator[Judgement]:
    """Check gradients under `jax.checkpoint`, which computes the forward pass again."""
    pair = _pair(masks)
    if pair.cotangents:
        out, gradients = masks.subject.executor.run(
            transformed_calls.run_checkpoint, pair.problems[0], pair.cotangents[0].out, ()
        )
        yield pair.judge_out(out)
        yield from pair.judge_gradients(gradients)


def _check_scan(masks: _Masks) -> Iterator[Judgement]:
    """Check results and gradients of two layers under `lax.scan`, each with a key of its own."""
    pair = _pair(masks)
    if pair.cotangents:
        out, gradients = masks.subject.executor.run(
            transformed_calls.run_gradients, "scan", pair.problems, pair.stacked_cotangents
        )
        yield pair.judge_out(out, 2)
        yield from pair.judge_gradients(gradients, 2)


def _pair(masks: _Masks) -> ProblemPair:
    """Return the problem of the case and another, with the weights that each keeps."""
    pair = ProblemPair.draw(masks.subject)
    other = pair.problems[1]
    seen = dataclasses.replace(other, kept_pairs=masks.see(other))
    return dataclasses.replace(pair, problems=(masks.problem, seen))


def _check_variants(masks: _Masks) -> Iterator[Judgement]:
    """Check that variants, such as other block sizes, drop the same weights."""
    if masks.subject.implementation.dropout_mask == "blocks":
        return
    expected = masks.flat_mask
    for name in masks.subject.implementation.variants:
        got = masks.see(masks.flat, masks.subject.executor.variant(name).forward)
        yield _compare(name, got, expected, masks.visible, f"with the variant {name}")


def _check_places(masks: _Masks) -> Iterator[Judgement]:
    """Check that a larger call drops the same weights at the same places, if that is declared."""
    subject, case = masks.subject, masks.subject.case
    if subject.implementation.dropout_mask != "places":
        return
    sizes: dict[str, Any] = {"batch": case.batch + 1, "q_length": 2 * case.q_length, "kv_length": 2 * case.kv_length}
    plain: dict[str, Any] = {"segments": None, "bias": None, "sinks": False, "mask": "full"}
    larger = dataclasses.replace(case, **sizes, **plain)
    larger = larger if subject.implementation.supports(larger) is None else dataclasses.replace(larger, mask="causal")
    if (refusal := subject.implementation.supports(larger)) is not None:
        yield build_unsupported("mask", refusal)
        return
    problem = dataclasses.replace(draw_problem(larger), dropout_key=subject.problem.dropout_key)
    problem = dataclasses.replace(problem, q=np.zeros_like(problem.q), k=np.zeros_like(problem.k))
    part = np.s_[: case.batch, :, : case.q_length, : case.kv_length]
    full = (larger.batch, larger.num_q_heads, larger.q_length, larger.kv_length)
    visible = masks.visible & np.broadcast_to(problem.allowed, full)[part]
    yield _compare("mask", masks.see(problem)[part], masks.flat_mask, visible, "with more rows, queries and keys")


def _check_devices(masks: _Masks) -> Iterator[Judgement]:
    """Check that other numbers of devices that share the sequence drop the same weights, if places or a mask decide."""
    declared, executor = masks.subject.implementation, masks.subject.executor
    if declared.on_devices is None or declared.dropout_mask not in ("places", "given"):
        return

    def forward(problem: Problem) -> Result:
        check_vma = declared.check_vma is True
        return Result(executor.run(sharded_calls.run_on_devices, _OTHER_DEVICES, check_vma, problem, None))

    change = f"on {_OTHER_DEVICES} devices"
    yield _compare("mask", masks.see(masks.flat, forward), masks.flat_mask, masks.visible, change)


_LAWS: dict[str, Callable[[_Masks], Iterator[Judgement]]] = {
    "rate": _check_rate,
    "independence": _check_independence,
    "shared": _check_shared,
    "given": _check_given,
    "same_key": _check_same_key,
    "other_values": _check_values,
    "rate_zero": _check_rate_zero,
    "rate_one": _check_rate_one,
    "eager": _check_eager,
    "vmap_keys": functools.partial(_check_vmap, ("dropout_key",)),
    "vmap_queries": functools.partial(_check_vmap, ("q",)),
    "checkpoint": _check_checkpoint,
    "scan": _check_scan,
    "variants": _check_variants,
    "places": _check_places,
    "devices": _check_devices,
}
