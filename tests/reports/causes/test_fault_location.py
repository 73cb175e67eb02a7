"""Faults that are planted in the covering array of the grid are found by which of its rows are red."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence

import hypothesis
import pytest
from hypothesis import strategies

from cases.grid import build_grid
from cases.size_model import MODEL
from reports.causes.case_levels import Level, find_levels
from reports.causes.fault_location import Candidate, Combination, Signal, explains, find_clearest_signal, locate

Fault = frozenset[str]
"""The names of the levels that a case needs to fail."""

# Levels that faults of kernels need, alone and in pairs.
SINGLE = ("sinks", "soft_cap", "bias", "segment_ids", "scale", "bf16", "f16", "groups", "window", "causal", "T != S")
PAIRS = (("soft_cap", "bias"), ("sinks", "causal"), ("bf16", "groups"), ("window", "T != S"), ("segment_ids", "sinks"))
FAULTS: tuple[Fault, ...] = (*(frozenset({name}) for name in SINGLE), *map(frozenset, PAIRS))


@functools.cache
def build_array() -> tuple[list[str], list[Level], list[Candidate]]:
    """Build the rows of both grids at `quick`, their levels, and which rows have each."""
    made = build_grid("quick", 0, lambda case: None), build_grid("quick", 0, lambda case: None, MODEL)
    ids = list(dict.fromkeys(case.id for one in made for case in one.cases if case.kv_cache is None))
    rows: dict[Level, int] = {}
    for place, case in enumerate(ids):
        for level in find_levels(case):
            rows[level] = rows.get(level, 0) | 1 << place
    levels = sorted(rows)
    return ids, levels, [Candidate(rows[level], level.odds) for level in levels]


def find_rows(fault: Fault) -> int:
    ids, _, _ = build_array()
    return sum(1 << n for n, case in enumerate(ids) if fault <= {level.name for level in find_levels(case)})


def hide_rows(rows: int, share: float, seed: int) -> int:
    """Remove a share of the rows, drawn at random: there the fault is hidden by chance."""
    drawn = random.Random(seed)
    return sum(1 << n for n in range(rows.bit_length()) if rows >> n & 1 and drawn.random() >= share)


def locate_faults(faults: Sequence[Fault], *, share: float = 0.0, seed: int = 0) -> list[Combination]:
    ids, _, candidates = build_array()
    red = 0
    for number, fault in enumerate(faults):
        red |= hide_rows(find_rows(fault), share, seed + number)
    return locate(candidates, {"out": Signal(red, (1 << len(ids)) - 1 & ~red)})


def name_levels(found: Combination) -> set[Fault]:
    """Name the levels of a combination, and those that no row distinguishes from them."""
    _, levels, _ = build_array()
    return {frozenset(levels[number].name for number in numbers) for numbers in (found.levels, *found.others)}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: "-and-".join(sorted(fault)).replace(" ", ""))
def test_a_fault_is_found_alone(fault: Fault) -> None:
    (found,) = locate_faults([fault])
    assert fault in name_levels(found)
    assert found.rows & find_rows(fault) == find_rows(fault)


@hypothesis.given(strategies.sampled_from(FAULTS), strategies.sampled_from((0.1, 0.3)), strategies.integers(0, 999))
@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
def test_a_fault_that_chance_hides_in_some_rows_is_named_first(fault: Fault, share: float, seed: int) -> None:
    rows = hide_rows(find_rows(fault), share, seed)
    hypothesis.assume(rows.bit_count() >= 6)
    found = locate_faults([fault], share=share, seed=seed)
    assert len(found) == 1
    # Chance may remove a level from the combination or add one, but never replaces all.
    (one,) = found
    assert any(fault & name for name in name_levels(one))


def count_own_rows(fault: Fault, others: Sequence[Fault]) -> int:
    """Count the rows that a fault makes red and no other fault does."""
    rows = find_rows(fault)
    for other in others:
        rows &= ~find_rows(other)
    return rows.bit_count()


@pytest.mark.long
@pytest.mark.parametrize(("share", "least"), [(0.0, 38), (0.1, 32)])
def test_three_faults_at_once_are_three_findings_nearly_always(share: float, least: int) -> None:
    drawn = random.Random(0)
    right = tried = 0
    while tried < 40:
        chosen = drawn.sample(FAULTS, 3)
        # A fault that the others nearly hide is found once they are mended. Both 16-bit dtypes are one level.
        seen = all(count_own_rows(fault, [other for other in chosen if other is not fault]) >= 6 for fault in chosen)
        if not seen or {"bf16", "f16"} <= frozenset().union(*chosen):
            continue
        found = locate_faults(chosen, share=share, seed=tried)
        right += len(found) == 3 and all(any(fault in name_levels(one) for one in found) for fault in chosen)
        tried += 1
    assert right >= least, right


def test_a_kernel_that_is_wrong_everywhere_has_one_finding_that_names_nothing() -> None:
    ids, _, candidates = build_array()
    every = (1 << len(ids)) - 1
    for share in (0.0, 0.05):
        red = hide_rows(every, share, 0)
        (found,) = locate(candidates, {"out": Signal(red, every & ~red)})
        assert found.levels == ()
        assert found.rows == every


def test_nothing_is_found_where_rows_fail_at_random() -> None:
    ids, _, candidates = build_array()
    every = (1 << len(ids)) - 1
    wrong = 0
    for seed in range(30):
        red = hide_rows(every, 0.97, seed)
        wrong += bool(locate(candidates, {"out": Signal(red, every & ~red)}))
    assert wrong <= 2, wrong


def test_combinations_that_no_row_distinguishes_are_returned_together() -> None:
    first, second = Candidate(0b0011), Candidate(0b0011)
    (found,) = locate([first, second, Candidate(0b0101)], {"out": Signal(0b0011, 0b1111_1100)})
    assert {found.levels, *found.others} == {(0,), (1,)}
    other = locate([Candidate(0b1_0011), second], {"out": Signal(0b0011, 0b1111_1100)})
    assert [(one.levels, one.others) for one in other] == [((1,), ())]


def test_the_same_is_found_whatever_order_levels_and_signals_have() -> None:
    ids, _, candidates = build_array()
    red = find_rows(frozenset({"sinks"})) | find_rows(frozenset({"soft_cap", "bias"}))
    signals = {"out": Signal(red, (1 << len(ids)) - 1 & ~red), "none": Signal(0, 1)}
    forward = locate(candidates, signals)
    backward = locate(candidates[::-1], dict(reversed(signals.items())))
    assert forward == locate(candidates, signals)
    assert {one.rows for one in forward} == {one.rows for one in backward}
    assert all(explains(one, signals["out"]) for one in forward)
    assert {find_clearest_signal(one, signals) for one in forward} == {"out"}


def test_a_combination_that_no_signal_shows_has_a_clearest_one() -> None:
    assert find_clearest_signal(Combination((0,), 0b0011), {"out": Signal(red=0b1100, green=0b0011)}) == "out"


def test_what_is_explained_already_is_not_sought() -> None:
    ids, _, candidates = build_array()
    red = find_rows(frozenset({"sinks"}))
    signals = {"out": Signal(red, (1 << len(ids)) - 1 & ~red)}
    before = locate(candidates, signals)
    assert locate(candidates, signals, before) == []
