"""Levels agree with the cases whose ids they are found from, and their fields add and remove them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection

import pytest

from cases.case import Case
from cases.case_id import parse_case_id
from cases.grid import build_grid
from cases.mask_spec import KINDS
from cases.operand_registry import OPTIONAL, WITH_OWN_CASES
from cases.operand_values import draw_problem
from cases.size_model import MODEL
from conformance.checks import CHECKS
from reports.causes import root_causes
from reports.causes.case_levels import Level, find_levels, find_oddities, parse_fields
from reports.causes.finding import PLAIN_CALL

CASES = [
    case
    for made in (build_grid("quick", 0, lambda case: None), build_grid("quick", 0, lambda case: None, MODEL))
    for case in made.cases
]
PLAIN = Case()
ALL = sorted({level for case in CASES for level in find_levels(case.id)})


def name_levels(case: Case) -> set[str]:
    return {level.name for level in find_levels(case.id)}


def test_fields_are_those_of_the_case() -> None:
    known = {field.name for field in dataclasses.fields(Case)}
    for case in CASES:
        fields = parse_fields(case.id)
        assert fields is not None
        assert set(fields) <= known
        values = {name: getattr(case, name) for name in fields}
        sizes = {name: x for name, x in values.items() if isinstance(x, int) and not isinstance(x, bool)}
        assert {name: int(fields[name].removeprefix("s")) for name in sizes} == sizes
        assert (fields["dtype"], fields["mask"]) == (case.dtype, case.mask)
        assert {o.field for o in OPTIONAL if o.field in fields} == {
            o.field for o in OPTIONAL if getattr(case, o.field) != o.absent
        }
    assert {name for level in ALL for name in level.fields} <= known


def test_every_operand_and_kind_of_mask_is_a_level() -> None:
    found = {level.name for level in ALL}
    assert {operand.name for operand in OPTIONAL if not operand.has_own_cases} <= found
    assert {operand.name for operand in WITH_OWN_CASES} <= name_levels(Case(logit_scale=True))
    kinds = [kind for kind in KINDS if kind.example]
    assert {kind.name for kind in kinds} <= found.union(*(name_levels(Case(mask=kind.example)) for kind in kinds))


def test_a_plain_case_has_nothing_odd() -> None:
    assert find_oddities(PLAIN.id) == frozenset()
    assert find_oddities(parse_case_id("train/bf16/B1.T8.S16.N2.K1.H8.V8/causal/sinks/normal/s0").id) == {
        *("dtype", "mask", "sinks", "q_length", "num_q_heads")
    }


@pytest.mark.parametrize("level", [level for level in ALL if level.example], ids=lambda level: level.name)
def test_an_example_gives_a_plain_case_the_level(level: Level) -> None:
    assert level in find_levels(dataclasses.replace(PLAIN, **dict(level.example)).id)


@pytest.mark.parametrize("level", [level for level in ALL if level.counter], ids=lambda level: level.name)
def test_a_counter_takes_a_level_from_a_plain_case(level: Level) -> None:
    assert set(dict(level.counter)) <= set(level.fields)
    phase = "prefill" if "kv_cache" in dict(level.counter) else "train"  # a cache is read, not differentiated
    plain = dataclasses.replace(PLAIN, phase=phase)
    if level in find_levels(plain.id):
        assert level not in find_levels(dataclasses.replace(plain, **dict(level.counter)).id)


@pytest.mark.parametrize(
    ("mask", "has", "lacks"),
    [
        ("full", {"full"}, {"masked"}),
        ("window-l31-r0", {"window", "left side", "left side, no offset", "masked"}, {"right side", "causal"}),
        ("window-linf-r5-o3", {"window", "right side", "mask offset"}, {"left side", "window, no offset"}),
        ("causal_and_lengths-64", {"causal", "lengths", "joined masks", "row mask"}, {"window"}),
        ("full", {"later keys"}, {"causal of any kind"}),
        ("window-l31-r0", {"window"}, {"later keys", "causal of any kind"}),
        ("window-l31-r8", {"later keys"}, {"causal of any kind"}),
        ("chunked-32", {"causal of any kind"}, {"later keys"}),
        ("window-l9-r9_and_causal", {"causal of any kind"}, {"later keys"}),
        ("causal_or_spans-8-24", {"later keys", "causal"}, {"causal of any kind"}),
        ("dense-d60", {"later keys"}, {"causal of any kind"}),
    ],
)
def test_what_a_mask_is(mask: str, has: set[str], lacks: set[str]) -> None:
    found = name_levels(dataclasses.replace(PLAIN, mask=mask))
    assert has <= found
    assert not lacks & found


@pytest.mark.parametrize(
    ("case", "has"),
    [
        ("train/f32/B2.T16.S16.N2.K2.H16.V16/own-linf-16-0/packed-q9-0/normal/s0", True),
        ("train/f32/B2.T16.S16.N2.K2.H16.V16/own-linf-16-9/packed-q9-0/normal/s0", True),
        ("decode/f32/B2.T1.S128.N2.K2.H16.V16/lengths-0-128/normal/s0", True),
        ("decode/f32/B2.T1.S128.N2.K2.H16.V16/own-linf-30-100/paged16/normal/s0", False),
        ("train/f32/B2.T16.S16.N2.K2.H16.V16/window-l0-r0/normal/s0", False),
    ],
)
def test_a_sequence_without_queries_or_keys_is_a_level(case: str, has: bool) -> None:
    assert ("empty sequence" in name_levels(parse_case_id(case))) is has


@pytest.mark.parametrize(
    ("case", "has", "lacks"),
    [
        ("train/f32/B2.T16.S16.N2.K2.H16.V16/own-linf-16-9/packed-q9-0/normal/s0", {"no queries", "unequal rows"}, ()),
        ("train/f32/B2.T16.S16.N2.K2.H16.V16/own-linf-9-9/packed-q9-9/normal/s0", (), {"no queries", "unequal rows"}),
        ("decode/f32/B2.T1.S128.N2.K2.H16.V16/lengths-0-128/normal/s0", {"unequal rows"}, {"no queries"}),
        ("decode/f32/B2.T1.S128.N2.K2.H16.V16/lengths-64-64/normal/s0", (), {"unequal rows"}),
    ],
)
def test_rows_of_unequal_lengths_and_sequences_without_queries_are_levels(
    case: str, has: Collection[str], lacks: Collection[str]
) -> None:
    found = name_levels(parse_case_id(case))
    assert set(has) <= found
    assert not set(lacks) & found


@pytest.mark.parametrize(
    "case", [case for case in CASES if re.fullmatch("full|(causal|window)[^_]*", case.mask)], ids=lambda case: case.id
)
def test_rows_that_a_mask_leaves_empty_are_a_level(case: Case) -> None:
    if case.segments is None and case.storage is None and case.q_length * case.kv_length < 1 << 17:
        assert ("empty rows" in name_levels(case)) == draw_problem(case).empty_rows.any()


def test_checks_that_are_named_are_checks() -> None:
    known = {check.name for check in CHECKS}
    assert known >= root_causes.CHECKS_WITH_OWN_OPERANDS
    assert {signal.partition("/")[0] for signal in PLAIN_CALL} <= known
