"""Faults that are planted in the covering array of the grid are found by which of its rows are red."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence

import hypothesis
import pytest
from hypothesis import strategies

from cases.grid import grid
from cases.sizes import MODEL
from reports.causes.levels import Level, levels_of
from reports.causes.locating import Candidate, Combination, Signal, clearest, explains, locate

Fault = frozenset[str]
"""The names of the levels that a case needs to fail."""

# What kernels get wrong, one level each; and two that a fault needs together.
SINGLE = ("sinks", "soft_cap", "bias", "segment_ids", "scale", "bf16", "f16", "groups", "window", "causal", "T != S")
PAIRS = (("soft_cap", "bias"), ("sinks", "causal"), ("bf16", "groups"), ("window", "T != S"), ("segment_ids", "sinks"))
FAULTS: tuple[Fault, ...] = (*(frozenset({name}) for name in SINGLE), *map(frozenset, PAIRS))


@functools.cache
def array() -> tuple[list[str], list[Level], list[Candidate]]:
    """The rows of both grids at `quick`, their levels, and which rows have each."""
    made = grid("quick", 0, lambda case: None), grid("quick", 0, lambda case: None, MODEL)
    ids = list(dict.fromkeys(case.id for one in made for case in one.cases if case.kv_cache is None))
    rows: dict[Level, int] = {}
    for place, case in enumerate(ids):
        for level in levels_of(case):
            rows[level] = rows.get(level, 0) | 1 << place
    levels = sorted(rows)
    return ids, levels, [Candidate(rows[level], level.odds) for level in levels]


def rows_of(fault: Fault) -> int:
    ids, _, _ = array()
    return sum(1 << n for n, case in enumerate(ids) if fault <= {level.name for level in levels_of(case)})


def hidden(rows: int, share: float, seed: int) -> int:
    """Those rows of which a share, drawn at random, is right by chance."""
    drawn = random.Random(seed)
    return sum(1 << n for n in range(rows.bit_length()) if rows >> n & 1 and drawn.random() >= share)


def located(faults: Sequence[Fault], *, share: float = 0.0, seed: int = 0) -> list[Combination]:
    ids, _, candidates = array()
    red = 0
    for number, fault in enumerate(faults):
        red |= hidden(rows_of(fault), share, seed + number)
    return locate(candidates, {"out": Signal(red, (1 << len(ids)) - 1 & ~red)})


def named(found: Combination) -> set[Fault]:
    """Its levels, and those that no row tells from them."""
    _, levels, _ = array()
    return {frozenset(levels[number].name for number in numbers) for numbers in (found.levels, *found.others)}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: "-and-".join(sorted(fault)).replace(" ", ""))
def test_a_fault_is_found_alone(fault: Fault) -> None:
    (found,) = located([fault])
    assert fault in named(found)
    assert found.rows & rows_of(fault) == rows_of(fault)


@hypothesis.given(strategies.sampled_from(FAULTS), strategies.sampled_from((0.1, 0.3)), strategies.integers(0, 999))
@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
def test_a_fault_that_chance_hides_in_some_rows_is_named_first(fault: Fault, share: float, seed: int) -> None:
    rows = hidden(rows_of(fault), share, seed)
    hypothesis.assume(rows.bit_count() >= 6)
    found = located([fault], share=share, seed=seed)
    assert len(found) == 1
    # What is hidden may leave fewer levels than there are, or more of them: never others.
    (one,) = found
    assert any(fault & name for name in named(one))


def alone(fault: Fault, others: Sequence[Fault]) -> int:
    """How many rows a fault makes red that none of the others does."""
    rows = rows_of(fault)
    for other in others:
        rows &= ~rows_of(other)
    return rows.bit_count()


@pytest.mark.long
@pytest.mark.parametrize(("share", "least"), [(0.0, 38), (0.1, 32)])
def test_three_faults_at_once_are_three_findings_nearly_always(share: float, least: int) -> None:
    drawn = random.Random(0)
    right = tried = 0
    while tried < 40:
        chosen = drawn.sample(FAULTS, 3)
        # What others hide nearly all of is found once they are mended. Both kinds of 16 bits are one level.
        seen = all(alone(fault, [other for other in chosen if other is not fault]) >= 6 for fault in chosen)
        if not seen or {"bf16", "f16"} <= frozenset().union(*chosen):
            continue
        found = located(chosen, share=share, seed=tried)
        right += len(found) == 3 and all(any(fault in named(one) for one in found) for fault in chosen)
        tried += 1
    assert right >= least, right


def test_a_kernel_that_is_wrong_everywhere_has_one_finding_that_names_nothing() -> None:
    ids, _, candidates = array()
    every = (1 << len(ids)) - 1
    for share in (0.0, 0.05):
        red = hidden(every, share, 0)
        (found,) = locate(candidates, {"out": Signal(red, every & ~red)})
        assert found.levels == ()
        assert found.rows == every


def test_nothing_is_found_where_rows_fail_at_random() -> None:
    ids, _, candidates = array()
    every = (1 << len(ids)) - 1
    wrong = 0
    for seed in range(30):
        red = hidden(every, 0.97, seed)
        wrong += bool(locate(candidates, {"out": Signal(red, every & ~red)}))
    assert wrong <= 2, wrong


def test_what_no_row_tells_apart_is_said() -> None:
    first, second = Candidate(0b0011), Candidate(0b0011)
    (found,) = locate([first, second, Candidate(0b0101)], {"out": Signal(0b0011, 0b1111_1100)})
    assert {found.levels, *found.others} == {(0,), (1,)}
    told = locate([Candidate(0b1_0011), second], {"out": Signal(0b0011, 0b1111_1100)})
    assert [(one.levels, one.others) for one in told] == [((1,), ())]


def test_the_same_is_found_whatever_order_levels_and_signals_have() -> None:
    ids, _, candidates = array()
    red = rows_of(frozenset({"sinks"})) | rows_of(frozenset({"soft_cap", "bias"}))
    signals = {"out": Signal(red, (1 << len(ids)) - 1 & ~red), "none": Signal(0, 1)}
    forward = locate(candidates, signals)
    backward = locate(candidates[::-1], dict(reversed(signals.items())))
    assert forward == locate(candidates, signals)
    assert {one.rows for one in forward} == {one.rows for one in backward}
    assert all(explains(one, signals["out"]) for one in forward)
    assert {clearest(one, signals) for one in forward} == {"out"}


def test_a_combination_that_no_signal_shows_has_a_clearest_one() -> None:
    assert clearest(Combination((0,), 0b0011), {"out": Signal(red=0b1100, green=0b0011)}) == "out"


def test_what_is_explained_already_is_not_looked_for() -> None:
    ids, _, candidates = array()
    red = rows_of(frozenset({"sinks"}))
    signals = {"out": Signal(red, (1 << len(ids)) - 1 & ~red)}
    before = locate(candidates, signals)
    assert locate(candidates, signals, before) == []
