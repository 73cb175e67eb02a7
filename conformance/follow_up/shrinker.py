"""Shrink findings (`--shrink`): search for the smallest case that fails in the same way, by Hypothesis.

A smaller case has plainer values in some of its fields. Hypothesis draws these fields and values; in most draws, most
fields keep their values. Hypothesis then shrinks the first drawn case that fails like the given one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import hypothesis
from hypothesis import strategies

from cases import mask_spec
from cases.case import Case, CaseIdError
from cases.case_id import parse_case_id
from cases.operand_registry import OPTIONAL
from conformance.check_api.scopes import GRID
from conformance.checks import CHECKS_BY_NAME
from conformance.follow_up.confirmation import Prober, build_suspicion
from conformance.follow_up.probe_budget import ProbeBudget
from conformance.judging.explorer import OutOfTime, WrongCase, compute_plainness, run_batch, use_temporary_home
from conformance.judging.job import Job
from conformance.judging.journal import Journal
from conformance.judging.runner import Runner
from conformance.sandbox.sandboxed_executor import SupportQueryFailed
from conformance.truth import disk_cache
from impls.contract.implementation import Implementation
from reports.causes import root_causes
from reports.causes.case_levels import Level, find_levels
from reports.records import RED, Record

_MAX_DRAWS = 100
_KEPT_ODDS = 10  # a field changes in about one of this many draws
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_HEADS = ((1, 1), (2, 2), (2, 1), (4, 2))

Alternatives = tuple[Mapping[str, Any], ...]
MAX_SHRUNK = 3
"""The number of findings that `--shrink` shrinks: the first ones of the report."""
SHRINK_SECONDS = 60.0
"""The most seconds for shrinking one finding."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShrunkCase:
    """The smallest case that fails in the same way, its records, and how many other cases were tried.

    `is_finished` tells whether shrinking ended by itself: neither the time limit nor Ctrl-C stopped it.
    """

    case: Case
    records: tuple[Record, ...]
    tried: int
    is_finished: bool


def shrink(
    implementation: Implementation,
    runner: Runner,
    failing: Case,
    record: Record,
    *,
    seconds: float,
    keeps: Callable[[Case], bool] = lambda case: True,
    on_case: Callable[[Sequence[Record]], None] = lambda case_records: None,
) -> ShrunkCase:
    """Find the smallest case that fails like `failing`: in the same check, result and verdict as its `record`.

    After Ctrl-C or the time limit, return the smallest such case so far.

    Args:
      seconds: time after which shrinking stops. A case whose judging has begun is finished.
      keeps: tells whether a smaller case still has the properties that the failure is known to need. Other cases are
        skipped, since shrinking could wander to another failure.
    """
    started = time.monotonic()
    wrong: dict[Case, tuple[Record, ...]] = {failing: (record,)}
    right: set[Case] = set()

    def raise_if_failing(case: Case) -> None:
        if case not in wrong and case not in right and keeps(case):
            if time.monotonic() - started >= seconds:
                raise OutOfTime
            case_records = tuple(runner.judge(Job(implementation, case, (CHECKS_BY_NAME[record.check],))))
            on_case(case_records)
            if any(_fails_alike(one, record) for one in case_records):
                wrong[case] = case_records
            else:
                right.add(case)
        if case in wrong:
            raise WrongCase

    has_ended = False
    with use_temporary_home(), disk_cache.disable_cache(), contextlib.suppress(OutOfTime, KeyboardInterrupt):
        run_batch(_draw_smaller_cases(failing, implementation), 0, raise_if_failing, examples=_MAX_DRAWS)
        has_ended = True
    smallest = min(wrong, key=compute_plainness)
    return ShrunkCase(case=smallest, records=wrong[smallest], tried=len(wrong) + len(right) - 1, is_finished=has_ended)


def _fails_alike(one: Record, other: Record) -> bool:
    """Tell whether both records are red, with the same verdict for the same result (`dq` of `dq.row.nan`)."""
    same = one.observable.partition(".")[0] == other.observable.partition(".")[0] and one.verdict == other.verdict
    return one.verdict in RED and same


def _draw_smaller_cases(case: Case, implementation: Implementation) -> strategies.SearchStrategy[Case]:
    """Return a Hypothesis strategy for supported cases that have plainer values in some fields of `case`."""
    choices = [(*plainer_values, {}) for plainer_values in iter_alternatives(case) if plainer_values]

    @strategies.composite
    def draw_case(draw: strategies.DrawFn) -> Case:
        changes: dict[str, Any] = {}
        for plainer_values in choices:
            number = draw(strategies.integers(0, _KEPT_ODDS * len(plainer_values)))
            changes |= plainer_values[min(number, len(plainer_values) - 1)]
        try:
            smaller = dataclasses.replace(case, **changes)
            hypothesis.assume(implementation.supports(smaller) is None)
        except (CaseIdError, SupportQueryFailed):
            hypothesis.reject()
        return smaller

    return draw_case()


def iter_alternatives(case: Case) -> Iterator[Alternatives]:
    """Yield, for each property of a case, plainer values of the fields that decide it, the plainest first."""
    default = Case()
    for name in ("front_end", "distribution", "dtype", "phase", "seed"):
        if getattr(case, name) != getattr(default, name):
            yield ({name: getattr(default, name)},)
    for operand in OPTIONAL:
        if getattr(case, operand.field) != operand.absent:
            yield ({operand.field: operand.absent},)
    yield tuple({"mask": mask} for mask in _iter_plainer_masks(case.mask))
    yield tuple({"batch": batch} for batch in (1, 2) if batch < case.batch)
    heads = (case.num_q_heads, case.num_kv_heads)
    fewer = [pair for pair in _HEADS if pair != heads and math.prod(pair) < math.prod(heads)]
    yield tuple({"num_q_heads": q, "num_kv_heads": kv} for q, kv in fewer)
    yield tuple(_iter_smaller_pairs("q_length", case.q_length, "kv_length", case.kv_length))
    yield tuple(_iter_smaller_pairs("head_dim", case.head_dim, "v_head_dim", case.v_head_dim))


def _iter_plainer_masks(mask: str) -> Iterator[str]:
    """Yield plainer masks, the plainest first."""
    if mask == "full":
        return
    if (placed := mask_spec.split_ends(mask))[1]:  # masks of stored sequences stay at their places
        whole, ends = placed
        yield f"lengths{ends}"
        yield f"own-linf{ends}"
        yield from (f"{term}_at{ends}" for part in whole.split("_or_") for term in part.split("_and_") if term != whole)
        return
    yield "full"
    terms = [term for part in mask.split("_or_") for term in part.split("_and_")]
    if mask not in ("causal", "full"):
        yield "causal"
    if len(terms) > 1:
        yield from (term for term in terms if term != "causal")
    if mask.startswith("window"):
        yield from (smaller for smaller in ("window-l0-r0", "window-l1-r0", "window-l0-r1") if smaller != mask)


def _iter_smaller_pairs(one: str, first: int, other: str, second: int) -> Iterator[dict[str, int]]:
    """Yield smaller sizes of two fields, `2**n` or `2**n + 1`: first equal for both fields, then for one alone."""
    sizes = sorted({size + more for size in _SIZES for more in (0, 1)})
    for size in sizes:
        if size <= max(first, second) and (size, size) != (first, second):
            yield {one: size, other: size}
    for size in sizes:
        if size < first:
            yield {one: size}
        if size < second:
            yield {other: size}


def shrink_findings(
    journal: Journal, implementations: Sequence[Implementation], runner: Runner, say: Callable[[str], None]
) -> Iterator[str]:
    """Shrink the first findings' smallest failing cases, record them as uncounted probes, and yield report lines."""
    kernels = {implementation.name: implementation for implementation in implementations}
    prober = Prober(ProbeBudget(runner, math.inf), implementations, math.inf, journal.add_probes)
    for number, finding in enumerate(
        root_causes.find_root_causes(journal.recorded.records, journal.recorded.probes)[:MAX_SHRUNK], 1
    ):
        smallest = finding.smallest
        if smallest.check not in CHECKS_BY_NAME or CHECKS_BY_NAME[smallest.check].scope is not GRID:
            yield f"finding {number} is not shrunk: {smallest.check} runs on cases of its own only"
            continue
        say(f"shrinking finding {number}; Ctrl-C stops with the smallest case so far")
        shrunk = shrink(
            kernels[smallest.implementation],
            runner,
            parse_case_id(smallest.case),
            smallest,
            seconds=SHRINK_SECONDS,
            keeps=functools.partial(_has_levels, frozenset(finding.levels or ())),
        )
        stopped = "" if shrunk.is_finished else ", stopped before the end"
        yield f"smallest of finding {number}: {shrunk.case} ({shrunk.tried} others tried{stopped})"
        yield from (record.reproduce for record in shrunk.records[:1])
        if shrunk.tried:
            journal.add_probes(shrunk.records)
        if shrunk.tried and finding.levels:
            prober.remember([*journal.recorded.records, *journal.recorded.probes])
            prober.confirm_failing_case(dataclasses.replace(build_suspicion(finding), failing=shrunk.case.id))


def _has_levels(levels: frozenset[Level], case: Case) -> bool:
    return levels <= find_levels(case.id)
