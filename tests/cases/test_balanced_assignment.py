"""Turns: whatever the cases, each alternative falls to as many as any other; and what is planned says so."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import balanced_assignment, feature_model
from cases.balanced_assignment import assign
from cases.case import Case
from cases.case_space.novelty import find_marks
from cases.covering_model import Model
from cases.feature_model import NAMES
from cases.grid import Grid, build_grid
from cases.operand_registry import ABSENCE_IGNORED, OPTIONAL
from conformance.check_api.scopes import ImplementationGrids
from conformance.check_api.subchecks import (
    ALL_SUBCHECKS,
    LAWS,
    PARTIAL_COTANGENTS,
    POISONS,
    PULLBACKS,
    Subchecks,
    list_partial_cotangents,
    list_pullbacks,
)
from conformance.checks import CHECKS
from conformance.execution.implementation_registry import find_implementation
from conformance.judging import parallel_judging, run_plan
from conformance.judging.subcheck_assignment import assign_subchecks
from conformance.sandbox.kernel_options import KernelOptions
from impls.contract.implementation import Implementation

SETTINGS = settings(derandomize=True, deadline=None, max_examples=80)


@dataclasses.dataclass(frozen=True)
class Cases:
    """What `assign` is asked: cases by their levels, what each can take, and which go together."""

    levels: tuple[tuple[int, ...], ...]
    allowed: tuple[tuple[int, ...], ...]
    count: int
    together: tuple[int, ...]

    @property
    def groups(self) -> list[list[int]]:
        """The cases that go together and have a choice."""
        found: dict[int, list[int]] = {}
        for case, label in enumerate(self.together):
            if self.allowed[case]:
                found.setdefault(label, []).append(case)
        return list(found.values())

    def assigned(self, first: int = 0) -> tuple[int | None, ...]:
        return assign(self.levels, self.allowed, count=self.count, together=self.together, first=first)


@st.composite
def drawn_cases(draw: st.DrawFn, *, free: bool) -> Cases:
    """Cases on three axes. If they are `free`, each takes any alternative, by itself."""
    size, count = draw(st.integers(1, 24)), draw(st.integers(2, 4))
    level = st.tuples(st.integers(0, 1), st.integers(0, 2), st.integers(0, 4))
    levels = draw(st.lists(level, min_size=size, max_size=size))
    everything = tuple(range(count))
    if free:
        return Cases(tuple(levels), (everything,) * size, count, tuple(range(size)))
    together = draw(st.lists(st.integers(0, 11), min_size=size, max_size=size))
    # Those that go together have an alternative in common, or none at all.
    sets = st.lists(st.sampled_from(everything), unique=True).map(lambda found: tuple(sorted(found)))
    allowed_by_label = draw(st.lists(sets, min_size=12, max_size=12))
    return Cases(tuple(levels), tuple(allowed_by_label[label] for label in together), count, tuple(together))


def counts(found: Sequence[int | None], count: int) -> list[int]:
    return [found.count(alternative) for alternative in range(count)]


@SETTINGS
@given(drawn_cases(free=True), st.integers(0, 5))
def test_of_cases_that_take_anything_each_alternative_has_as_many(cases: Cases, first: int) -> None:
    found = cases.assigned(first)
    assert max(counts(found, cases.count)) - min(counts(found, cases.count)) <= 1
    # Which of them goes first is but a name.
    plain = cases.assigned()
    assert list(found) == [(alternative + first) % cases.count for alternative in plain if alternative is not None]


@SETTINGS
@given(drawn_cases(free=False), st.integers(0, 3))
def test_each_case_takes_what_it_can_and_what_those_it_goes_with_take(cases: Cases, first: int) -> None:
    found = cases.assigned(first)
    for alternative, allowed in zip(found, cases.allowed, strict=True):
        assert alternative in (allowed or (None,))
    assert all(len({found[case] for case in group}) == 1 for group in cases.groups)


@SETTINGS
@given(drawn_cases(free=False))
def test_no_change_of_one_group_and_no_exchange_of_two_is_more_even(cases: Cases) -> None:
    found = cases.assigned()

    def squares(given: Sequence[int | None]) -> int:
        return sum(n**2 for n in counts(given, cases.count))

    def changed(*changes: tuple[list[int], int | None]) -> list[int | None]:
        whole = list(found)
        for group, alternative in changes:
            for case in group:
                whole[case] = alternative
        return whole

    for group in cases.groups:
        assert all(squares(found) <= squares(changed((group, other))) for other in cases.allowed[group[0]])
    for one, other in itertools.combinations(cases.groups, 2):
        places = found[one[0]], found[other[0]]
        if places[1] in cases.allowed[one[0]] and places[0] in cases.allowed[other[0]]:
            assert squares(found) <= squares(changed((one, places[1]), (other, places[0])))


@SETTINGS
@given(drawn_cases(free=False), st.integers(0, 3))
def test_the_same_cases_take_the_same_turns(cases: Cases, first: int) -> None:
    before = cases.assigned(first)
    balanced_assignment._assign.cache_clear()
    assert cases.assigned(first) == before


@pytest.mark.parametrize("count", [2, 4])
def test_every_level_has_as_many_of_each_where_that_can_be(count: int) -> None:
    levels = list(itertools.product(range(4), range(4), range(2)))
    found = assign(levels, [tuple(range(count))] * len(levels), count=count)
    for axis in range(3):
        pairs = collections.Counter((level[axis], taken) for level, taken in zip(levels, found, strict=True))
        assert len(set(pairs.values())) == 1
        assert len(pairs) == len({level[axis] for level in levels}) * count


def test_cases_that_go_together_and_have_nothing_in_common_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no alternative in common: \[\(0,\), \(1,\)\]"):
        assign([(0,), (0,)], [(0,), (1,)], count=2, together=["same", "same"])


def test_no_cases_take_no_turns() -> None:
    assert assign([], [], count=2) == ()
    assert assign([(0,)], [()], count=2) == (None,)


def never_called(*args: object, **kwargs: object) -> None:
    raise AssertionError("planning must not run the implementation")


def declared(**fields: Any) -> Implementation:
    return Implementation(**{"name": "declared", "call": never_called, **fields})


SUPPORTS = {
    "everything": declared(parts=never_called),
    "no gradient of logsumexp": declared(differentiable_residuals=frozenset()),
    "plain": declared(unsupported=dict.fromkeys(("sinks", "bias", "segment_ids", "soft_cap", "v_head_dim"), "small")),
    "forward only": declared(unsupported={"train": "no gradients"}, parts=never_called, behind_mask="finite"),
    "few masks": declared(unsupported=dict.fromkeys(("dense", "dense_head", "dense_batch", "window", "f16"), "few")),
    "one mask": declared(supports_case=lambda case: None if case.mask == "full" and case.dtype == "f32" else "other"),
    **{
        name: find_implementation(name)
        for name in ("dot_product", "ragged", "moba", "quantized_kv", "flash_gpu_mosaic", "auto")
    },
}
each_support = pytest.mark.parametrize("name", SUPPORTS)


@functools.cache
def turned(name: str, seed: int = 0) -> tuple[Grid, dict[Case, Subchecks]]:
    """The grid of `SUPPORTS[name]`, and the selections of its cases but for the plainest."""
    found = build_grid("quick", seed, SUPPORTS[name].supports)
    selections = assign_subchecks(SUPPORTS[name], found, seed)
    assert tuple(selections) == found.cases
    return found, {case: selection for case, selection in selections.items() if case != found.singles[0]}


@dataclasses.dataclass(frozen=True)
class Subcheck:
    """A costly subcheck: its alternatives for an implementation, and which falls to a case."""

    alternatives: Callable[[Implementation], tuple[Hashable, ...]]
    of: Callable[[Subchecks], tuple[Hashable, ...]]


def _pullbacks(implementation: Implementation) -> tuple[Hashable, ...]:
    trains = "train" not in implementation.unsupported and implementation.gradients
    if "logsumexp" in implementation.differentiable_residuals:
        return PULLBACKS if trains else ()
    return PULLBACKS[:1] if trains else ()


def _parts(implementation: Implementation) -> tuple[Hashable, ...]:
    return PARTIAL_COTANGENTS if "residuals" in _pullbacks(implementation) else PARTIAL_COTANGENTS[:2]


SUBCHECKS = {
    "pulled": Subcheck(_pullbacks, lambda selection: selection.pullbacks),
    "cotangents": Subcheck(_parts, lambda selection: selection.cotangents),
    "laws": Subcheck(lambda implementation: LAWS, lambda selection: selection.laws),
    "poisons": Subcheck(lambda implementation: POISONS, lambda selection: selection.poisons),
}


@each_support
@pytest.mark.parametrize("subcheck", SUBCHECKS)
def test_each_alternative_is_used_as_often_as_any_other(name: str, subcheck: str) -> None:
    asked = SUBCHECKS[subcheck]
    found = [asked.of(selection) for selection in turned(name)[1].values()]
    assert all(len(alternatives) <= 1 for alternatives in found)
    used = collections.Counter(itertools.chain.from_iterable(found))
    times = [used[alternative] for alternative in asked.alternatives(SUPPORTS[name])] if used else [0]
    assert sum(times) == used.total()
    assert max(times) - min(times) <= 1


@each_support
def test_parts_are_merged_in_one_case_of_four(name: str) -> None:
    selections = turned(name)[1]
    merged = sum(selection.merges for selection in selections.values())
    if SUPPORTS[name].parts is None:
        assert merged == 0
    else:
        # Tolerance: a quarter of a whole number is off by less than one.
        assert abs(merged - len(selections) / 4) < 1
        programs = {case.program for case, selection in selections.items() if selection.merges}
        # Tolerance: cases are balanced, and programs have different numbers of cases.
        assert abs(len(programs) - len({case.program for case in selections}) / 4) < 2


# By how much the counts of two alternatives differ at one level. Cases that share programs take one call, so that one
# mask of few programs may have nearly all of its cases in one of them; but never all.
@each_support
@pytest.mark.parametrize("axis", ["dtype", "mask"])
@pytest.mark.parametrize(("subcheck", "apart"), [("laws", 4), ("poisons", 4), ("cotangents", 4), ("pulled", 6)])
def test_each_alternative_meets_each_dtype_and_mask(name: str, axis: str, subcheck: str, apart: int) -> None:
    found, selections = turned(name)
    asked, place = SUBCHECKS[subcheck], NAMES.index(axis)
    met: dict[int, list[tuple[Case, Hashable]]] = {}
    for case, row in zip(found.cases, found.rows, strict=True):
        if case in selections and asked.of(selections[case]):
            met.setdefault(row[place], []).append((case, asked.of(selections[case])[0]))
    alternatives = asked.alternatives(SUPPORTS[name])
    for here in met.values():
        times = collections.Counter(alternative for _, alternative in here)
        assert max(times.values()) - min(times[alternative] for alternative in alternatives) <= apart
        if len({case.program for case, _ in here}) >= len(alternatives) + 1:
            assert set(times) == set(alternatives)


@each_support
def test_cases_that_share_programs_share_what_is_compiled(name: str) -> None:
    shared: dict[str, set[tuple[object, bool]]] = {}
    for case, selection in turned(name)[1].items():
        shared.setdefault(case.program, set()).add((selection.pullbacks, selection.merges))
    assert [program for program, compiled in shared.items() if len(compiled) > 1] == []


@each_support
def test_a_case_takes_only_what_there_is(name: str) -> None:
    for case, selection in turned(name)[1].items():
        assert set(selection.pullbacks) <= set(list_pullbacks(SUPPORTS[name], case))
        assert bool(selection.pullbacks) == bool(list_pullbacks(SUPPORTS[name], case))
        assert set(selection.cotangents) <= set(list_partial_cotangents(case, selection.pullbacks))
        assert bool(selection.cotangents) == bool(list_partial_cotangents(case, selection.pullbacks))


@pytest.mark.parametrize("name", ["everything", "no gradient of logsumexp"])
def test_who_lacks_an_operand_of_ignored_absence_has_the_cases_and_subchecks_from_before_it(name: str) -> None:
    def assemble(levels: Mapping[str, Any], seed: int) -> Case:
        absent = {operand.field: operand.absent for operand in OPTIONAL if operand.is_absence_ignored}
        return feature_model.assemble({**levels, **absent}, seed)

    earlier = Model(
        tuple(axis for axis in feature_model.AXES if axis.name not in ABSENCE_IGNORED),
        feature_model.are_compatible,
        assemble,
    )
    before, (now, _) = build_grid("quick", 0, SUPPORTS[name].supports, earlier), turned(name)
    assert before.cases == now.cases
    assert before.singles == now.singles
    assert set(before.declined) < set(now.declined)
    assert assign_subchecks(SUPPORTS[name], before, 0) == assign_subchecks(SUPPORTS[name], now, 0)
    ignored = {f"no {operand.name}" for operand in OPTIONAL if operand.is_absence_ignored}
    assert ignored
    assert not any(ignored & find_marks(case) for case in now.cases)


def test_another_seed_takes_the_other_turns() -> None:
    (_, zero), (_, one) = turned("everything", 0), turned("everything", 1)
    laws = [(zero[case].laws, one[dataclasses.replace(case, seed=1)].laws) for case in zero]
    # The first choice, where nothing was chosen before, is the very opposite. Later ones see other choices: of two that
    # are drawn anew half would differ, and of a grid with another kind of mask 54 of 146 do.
    pulled = [(zero[case].pullbacks, one[dataclasses.replace(case, seed=1)].pullbacks) for case in zero]
    assert all(before != after for before, after in pulled if before)
    assert sum(before != after for before, after in laws) > len(laws) / 4


def jobs_of(name: str, level: str = "quick", **narrowed: Any) -> dict[Case, Subchecks]:
    planned = run_plan.plan_run([SUPPORTS[name]], level=level, **narrowed).jobs
    return {job.case: job.selection for job in planned if job.is_on_grid}


def test_the_plan_has_these_turns_and_asks_the_plainest_case_everything() -> None:
    found, selections = turned("dot_product")
    jobs = jobs_of("dot_product")
    # Operands with cases of their own have grids of their own, whose selections are assigned in the same way.
    implementation = SUPPORTS["dot_product"]
    own: dict[Case, Subchecks] = {}
    for grid in ImplementationGrids(implementation, "quick", 0).operand_grids:
        own |= assign_subchecks(implementation, grid, 0)
    assert own
    assert {case: selection for case, selection in jobs.items() if case in own} == own
    jobs = {case: selection for case, selection in jobs.items() if case not in own}
    beside = {case: own for case, own in jobs.items() if case not in selections and case != found.singles[0]}
    assert jobs == {found.singles[0]: ALL_SUBCHECKS, **selections, **beside}
    assert ALL_SUBCHECKS not in selections.values()
    sizes = ImplementationGrids(SUPPORTS["dot_product"], "quick", 0).sizes
    assert {case for case in sizes.cases if case in beside} == beside.keys()
    assert {selection.laws + selection.cotangents + selection.poisons for selection in beside.values()} == {()}
    differentiated = collections.Counter(
        selection.pullbacks for case, selection in beside.items() if case.phase == "train"
    )
    assert max(differentiated.values()) - min(differentiated.values()) <= 1


def test_what_is_narrowed_to_cases_keeps_their_turns_and_what_is_named_is_asked_of_all() -> None:
    selections = turned("dot_product")[1]
    narrowed = jobs_of("dot_product", query="train/bf16")
    assert narrowed.items() & selections.items()
    assert narrowed.items() <= jobs_of("dot_product").items()
    assert set(jobs_of("dot_product", checks=CHECKS[:3]).values()) == {ALL_SUBCHECKS}
    assert set(jobs_of("one mask", "standard").values()) == {ALL_SUBCHECKS}


def test_a_case_alone_is_asked_everything() -> None:
    case = turned("dot_product")[0].cases[5]
    (job,) = run_plan.plan_case(SUPPORTS["dot_product"], case).jobs
    assert job.selection == ALL_SUBCHECKS


def test_a_turn_travels_to_other_processes_with_its_job() -> None:
    job = next(
        job for job in run_plan.plan_run([SUPPORTS["ragged"]], level="quick").jobs if job.selection != ALL_SUBCHECKS
    )
    assert parallel_judging._serialize_job(job, KernelOptions(), exploring=False).selection == job.selection
