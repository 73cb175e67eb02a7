"""Covering arrays by brute force on small systems, and the grids that are built from them."""

from __future__ import annotations

import collections
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import covering_array
from cases.case import OPT_IN, Case
from cases.case_id import parse_case_id
from cases.feature_model import AXES, MODEL, NAMES, are_compatible, assemble
from cases.grid import Grid, build_grid
from cases.operand_registry import OPTIONAL

SETTINGS = settings(derandomize=True, deadline=None, max_examples=80)
Item = tuple[int, int]
LEVELS: dict[str, tuple[Any, ...]] = {axis.name: axis.levels for axis in AXES}
FIELDS = ("distribution", "dtype", *(operand.field for operand in OPTIONAL))
RARE = tuple(OPT_IN - {"moba"})  # features that the levels of rare axes ask for
CONSTRAINED = ("lengths", "mask", "heads", "distribution", "soft_cap", "sinks", "kv_cache", "own_window")
# Axes that exclude levels of few others: enumerated with them, it would take five times as long.
CONSTRAINED_BY_SCORE = ("distribution", "soft_cap", "score", "bias")


@st.composite
def systems(draw: st.DrawFn) -> tuple[tuple[int, ...], int, frozenset[frozenset[Item]]]:
    """Axis sizes, a strength, and sets of `(axis, level)` that must not stand in one row."""
    sizes = tuple(draw(st.lists(st.integers(1, 4), min_size=3, max_size=5)))
    items = st.sampled_from([(a, level) for a, size in enumerate(sizes) for level in range(size)])
    conflicts = draw(st.frozensets(st.frozensets(items, min_size=1, max_size=3), max_size=6))
    return sizes, draw(st.sampled_from([2, 3])), conflicts


def feasibility(conflicts: frozenset[frozenset[Item]]) -> Callable[[covering_array.Partial], bool]:
    def feasible(partial: covering_array.Partial) -> bool:
        assigned = {(a, level) for a, level in enumerate(partial) if level is not None}
        return not any(conflict <= assigned for conflict in conflicts)

    return feasible


@SETTINGS
@given(systems())
def test_rows_contain_every_combination_that_some_feasible_row_contains(
    system: tuple[tuple[int, ...], int, frozenset[frozenset[Item]]],
) -> None:
    sizes, strength, conflicts = system
    feasible = feasibility(conflicts)

    def contained(rows: list[covering_array.Row]) -> set[tuple[Item, ...]]:
        return {c for row in rows for c in itertools.combinations(tuple(enumerate(row)), strength)}

    rows = covering_array.build_rows(sizes, strength, feasible)
    possible = [row for row in itertools.product(*map(range, sizes)) if feasible(row)]
    assert set(rows) <= set(possible)
    assert contained(rows) == contained(possible)
    assert covering_array.build_rows(sizes, strength, feasible) == rows
    counted = covering_array.count_coverage(rows, sizes, strength, feasible)
    assert (counted.feasible, counted.covered) == (len(contained(possible)),) * 2
    if rows:
        fewer = covering_array.count_coverage(rows[:-1], sizes, strength, feasible)
        assert fewer.covered == len(contained(rows[:-1]))
        assert fewer.feasible == counted.feasible


@SETTINGS
@given(systems(), st.data())
def test_with_a_cheap_axis_and_rows_to_start_with_every_combination_is_contained_as_well(
    system: tuple[tuple[int, ...], int, frozenset[frozenset[Item]]], data: st.DataObject
) -> None:
    sizes, strength, conflicts = system
    feasible = feasibility(conflicts)
    cheap = data.draw(st.integers(0, len(sizes) - 1))
    start = covering_array.build_rows(sizes, strength - 1, feasible, cheap=cheap)
    rows = covering_array.build_rows(sizes, strength, feasible, start=start, cheap=cheap)
    possible = [row for row in itertools.product(*map(range, sizes)) if feasible(row)]
    assert set(start) <= set(rows) <= set(possible)
    assert len(set(rows)) == len(rows)
    counted = covering_array.count_coverage(rows, sizes, strength, feasible)
    assert (
        counted.covered
        == counted.feasible
        == covering_array.count_coverage(possible, sizes, strength, feasible).covered
    )
    groups = [group for group, _ in itertools.groupby(rows, lambda row: (*row[:cheap], *row[cheap + 1 :]))]
    assert len(groups) == len(set(groups))


def test_a_cheap_axis_adds_no_rows_that_differ_in_others() -> None:
    rows = covering_array.build_rows((9, 8, 7, 2), 2, lambda partial: True, cheap=0)
    assert len({row[1:] for row in rows}) == 8 * 7
    assert 9 * 8 <= len(rows) < 9 * 8 + 9


def test_rows_are_far_fewer_than_all_combinations() -> None:
    assert len(covering_array.build_rows((4,) * 8, 2, lambda partial: True)) <= 48  # of 65,536; at least 16


def levels_of(case: Case) -> dict[str, Any]:
    """The level of every axis that the case was assembled from."""
    found = {name: getattr(case, name) for name in FIELDS}
    q, kv = case.q_length, case.kv_length
    lengths = [
        x for x in LEVELS["lengths"] if x.phase == case.phase and ((x.q, x.kv) == (q, kv) or (x.may_swap and x.q == kv))
    ]
    found["heads"] = (case.batch, case.num_q_heads, case.num_kv_heads)
    found["depths"] = (case.head_dim, case.v_head_dim)
    own = case.mask.split("-")[1][1:] if case.mask.startswith("own-") else None
    found["own_window"] = next(x for x in LEVELS["own_window"] if str(x) == str(own))
    found["lengths"] = lengths[0]
    masks = [m for m in LEVELS["mask"] if buildable({**found, "mask": m}) and remade(found, m, case.seed) == case]
    assert len(lengths) == len(masks) == 1, f"{case} belongs to {lengths} and {masks}"
    return {**found, "mask": masks[0]}


def buildable(levels: dict[str, Any]) -> bool:
    return are_compatible({name: levels[name] for name in ("lengths", "mask", "heads", "own_window")})


def remade(levels: dict[str, Any], mask: str, seed: int) -> Case:
    return assemble({**levels, "mask": mask}, seed)


def pairs_in(grid: Grid) -> set[tuple[tuple[str, Any], ...]]:
    """All pairs of levels in the rows of a grid, from which its cases must be assembled."""
    rows = [MODEL.levels(row) for row in grid.rows]
    assert tuple(assemble(levels, 0) for levels in rows) == grid.cases
    return {pair for levels in rows for pair in itertools.combinations([(name, levels[name]) for name in NAMES], 2)}


@functools.cache
def pairs_among(axes: tuple[str, ...]) -> set[tuple[tuple[str, Any], ...]]:
    """Pairs of levels of these axes that stand in one row, beside the first level of every other axis."""
    plain = {name: LEVELS[name][0] for name in NAMES}
    rows = (dict(zip(axes, row, strict=True)) for row in itertools.product(*(LEVELS[name] for name in axes)))
    fitting = (row for row in rows if are_compatible({**plain, **row}))
    return {pair for row in fitting for pair in itertools.combinations([(n, row[n]) for n in axes], 2)}


@functools.cache
def feasible_pairs() -> set[tuple[tuple[str, Any], ...]]:
    """All pairs of levels that a full row may contain, by enumeration of the axes that exclude one another.

    Stand-ins are in none: what supports all levels, or all but few, needs none.
    """
    among = pairs_among(CONSTRAINED) | pairs_among(CONSTRAINED_BY_SCORE)
    single = {item for pair in among for item in pair}
    free = {(name, level) for name in NAMES if name not in {name for name, _ in single} for level in LEVELS[name]}
    rest = {(x, y) for x in free for y in free | single if x[0] != y[0]}
    scores = {item for item in single if item[0] in ("score", "bias")}
    rest |= {(x, y) for x in scores for y in single if y[0] not in CONSTRAINED_BY_SCORE}
    stand_ins = {("lengths", level) for level in LEVELS["lengths"] if level.instead_of is not None}
    pairs = {pair for pair in among | rest if not stand_ins & {*pair}}
    return {tuple(sorted(pair, key=lambda item: NAMES.index(item[0]))) for pair in pairs}


@pytest.fixture(scope="module")
def quick() -> Grid:
    return build_grid("quick", 0)


@pytest.mark.long
def test_the_quick_grid_contains_every_feasible_pair_of_levels(quick: Grid) -> None:
    expected = feasible_pairs()
    assert pairs_in(quick) == expected
    assert quick.coverage == covering_array.Coverage(2, len(expected), len(expected))


def test_the_constraints_touch_only_the_axes_that_the_count_enumerates() -> None:
    used: collections.Counter[str] = collections.Counter()

    class Watched(dict[str, Any]):
        def __getitem__(self, key: str) -> Any:
            used[key] += 1
            return super().__getitem__(key)

        def get(self, key: str, default: Any = None) -> Any:
            used[key] += 1
            return super().get(key, default)

    for distribution, mask in itertools.product(LEVELS["distribution"], LEVELS["mask"]):
        for lengths in LEVELS["lengths"]:
            are_compatible(
                Watched({"lengths": lengths, "mask": mask, "distribution": distribution, "soft_cap": None, "sinks": 0})
            )
    assert set(used) <= {*CONSTRAINED, *CONSTRAINED_BY_SCORE}


def test_every_case_of_a_grid_has_an_id_of_its_own_that_parses(quick: Grid) -> None:
    for cases in (quick.cases, quick.singles):
        ids = [case.id for case in cases]
        assert len(set(ids)) == len(ids)
        assert [parse_case_id(text) for text in ids] == list(cases)
    assert quick.declined == ()


def test_the_grid_depends_on_nothing_but_level_and_seed(quick: Grid) -> None:
    assert build_grid("quick", 0) == quick
    other = build_grid("quick", 1)
    assert [case.seed for case in other.cases] == [1] * len(other.cases)
    assert [c.id.removesuffix("s1") for c in other.cases] == [c.id.removesuffix("s0") for c in quick.cases]


@pytest.mark.long
def test_standard_has_the_cases_of_quick() -> None:
    def square(case: Case) -> str | None:
        return None if case.q_length == case.kv_length == 128 and case.bias is None else "one length only"

    few, more = (set(build_grid(level, 0, square).cases) for level in ("quick", "standard"))
    assert few < more


def test_singles_start_with_the_plainest_case_and_add_one_thing_each(quick: Grid) -> None:
    plainest, *others = quick.singles
    assert plainest.id.endswith("/full/normal/s0")
    for case in others:
        changed = [n for n in NAMES if levels_of(case)[n] != levels_of(plainest)[n]]
        if "own_window" in changed:  # a window in lengths
            changed.remove("mask")
        added = [n for n in changed if n != "lengths" or len(changed) == 1]
        assert len(added) == 1, case.id
        with_plain_lengths = {**levels_of(plainest), added[0]: levels_of(case)[added[0]]}
        assert changed == added or not are_compatible(with_plain_lengths), case.id


def declining(*features: str) -> Callable[[Case], str | None]:
    def supports(case: Case) -> str | None:
        return next((f"{f} is not supported" for f in features if f in case.features), None)

    return supports


@pytest.mark.long
@pytest.mark.parametrize(
    ("features", "declined_levels"),
    [
        (("sinks",), [("sinks", True), ("sinks", "sinksedge")]),
        (("f16", "bias"), [("dtype", "f16"), *(("bias", level) for level in LEVELS["bias"] if level is not None)]),
        (("soft_cap",), [("soft_cap", 2.0), ("soft_cap", 30.0), ("distribution", "knee")]),
        (("full", "f32"), [("mask", "full"), ("dtype", "f32")]),
        (("mha", "balanced"), [("heads", (1, 2, 2)), ("mask", "balanced")]),
    ],
)
def test_unsupported_levels_stay_out_of_the_grid_and_are_shown_once_each(
    features: tuple[str, ...], declined_levels: list[tuple[str, Any]]
) -> None:
    supports = declining(*features)
    found = build_grid("quick", 0, supports)
    assert found.cases
    assert found.coverage.covered == found.coverage.feasible
    assert not [case.id for case in (*found.cases, *found.singles) if supports(case)]
    assert all(supports(case) for case in found.declined)
    assert len(found.declined) == len(declined_levels)
    for name, level in declined_levels:
        assert any(levels_of(case)[name] == level for case in found.declined), (name, level)
    wanted = [p for p in feasible_pairs() if not {*p} & {*declined_levels}]
    assert pairs_in(found) == set(wanted)


def test_a_pair_that_is_unsupported_only_together_is_left_out() -> None:
    def supports(case: Case) -> str | None:
        return "no sinks with a soft cap" if case.sinks and case.soft_cap else None

    found = build_grid("quick", 0, supports)
    assert found.declined == ()
    assert {(bool(c.sinks), c.soft_cap is not None) for c in found.cases} == {
        (False, False),
        (False, True),
        (True, False),
    }


def test_beyond_quick_what_is_asked_of_a_combined_case_is_asked_of_two_that_share_no_size() -> None:
    def plain(case: Case) -> str | None:
        return "sinks" if case.sinks else _no_values(case)

    (combined,) = build_grid("quick", 0, plain).combined
    first, second = build_grid("standard", 0, plain).combined
    assert first == combined
    assert second.program != first.program
    for name in ("dtype", "num_q_heads", "head_dim", "v_head_dim", "bias", "segments", "soft_cap"):
        assert getattr(second, name) != getattr(first, name), name
    assert second.mask == first.mask


def test_the_second_combined_case_has_what_is_supported_of_it() -> None:
    def narrow(case: Case) -> str | None:
        return "one dtype, one depth" if case.dtype != "f32" or case.head_dim != 64 else None

    first, second = build_grid("standard", 0, lambda case: narrow(case) or _no_values(case)).combined
    assert (first.dtype, first.head_dim) == (second.dtype, second.head_dim) == ("f32", 64)
    assert second.num_q_heads != first.num_q_heads


def _no_values(case: Case) -> str | None:
    return "other values" if case.distribution != "normal" else None


def test_an_implementation_that_declines_everything_gets_no_cases() -> None:
    found = build_grid("quick", 0, lambda case: "never")
    assert found.cases == found.singles == ()
    assert found.declined


def test_lengths_that_stand_in_for_others_are_asked_of_what_does_not_support_those() -> None:
    def short(case: Case) -> str | None:
        return "longer than a block" if max(case.q_length, case.kv_length) > 128 else None

    def lengths_of(supports: Callable[[Case], str | None]) -> set[tuple[int, int]]:
        return {(case.q_length, case.kv_length) for case in build_grid("quick", 0, supports).cases}

    assert lengths_of(short) == {(128, 128), (1, 72), (100, 100)}
    assert (321, 321) in lengths_of(declining("sinks"))
    assert (100, 100) not in lengths_of(declining("sinks"))
    neither = build_grid(
        "quick", 0, lambda case: "one length" if (case.q_length, case.kv_length) != (128, 128) else None
    )
    shown = {(case.q_length, case.kv_length) for case in neither.declined}
    assert (321, 321) in shown
    assert not {(100, 100), (384, 384)} & shown, "a stand-in is not shown as declined"


def blocks_of(block: int) -> Callable[[Case], str | None]:
    def supports(case: Case) -> str | None:
        whole = case.kv_length % block == 0 and (case.q_length % block == 0 or case.phase == "decode")
        return None if whole else f"lengths must be multiples of {block}"

    return supports


@pytest.mark.parametrize("block", [64, 128, 256, 512])
@pytest.mark.parametrize("level", ["quick", pytest.param("standard", marks=pytest.mark.nightly)])
def test_kernels_that_take_whole_blocks_only_are_asked_about_three_of_them_each_way(level: str, block: int) -> None:
    found = build_grid(level, 0, blocks_of(block)).cases
    trained = [case for case in found if case.phase == "train"]
    several = [case for case in trained if min(case.q_length, case.kv_length) >= 3 * block]
    assert {levels_of(case)["mask"] for case in several} >= {"causal", "window", "dense", "full"}
    assert {case.dtype for case in several} == {"f32", "bf16", "f16"}
    assert any(case.phase == "decode" and case.kv_length >= 2 * block for case in found)


def test_a_rare_axis_stays_out_of_the_arrays_of_those_that_have_none_of_it() -> None:
    without = build_grid("quick", 0, declining(*RARE))
    rare = {axis.name: axis.levels for axis in AXES if axis.rare}
    for name, levels in rare.items():
        assert {levels_of(case)[name] for case in without.cases} == {levels[0]}
        assert {levels_of(case)[name] for case in without.declined} == set(levels)
    assert without.coverage.covered == without.coverage.feasible
    others = math.prod(len(levels) for levels in (LEVELS["lengths"], LEVELS["mask"]))
    assert len({case.program for case in without.cases}) < others


@pytest.mark.long
def test_the_longest_lengths_are_judged_both_ways_round() -> None:
    def masks_at(level: str, q: int, kv: int) -> set[str]:
        cases = build_grid(level, 0, declining(*RARE)).cases
        return {levels_of(case)["mask"] for case in cases if (case.q_length, case.kv_length) == (q, kv)}

    long_kv, long_q = masks_at("quick", 40, 1500), masks_at("quick", 1500, 40)
    moba = {"moba", "moba_fine", "moba_one", "moba_all"}
    assert moba <= long_kv
    assert long_kv | long_q == {*LEVELS["mask"]} - {"lengths_edges"}
    assert min(len(long_kv - moba), len(long_q)) >= 4
    assert masks_at("standard", 40, 1500) == masks_at("standard", 1500, 40) | moba


@pytest.mark.parametrize("level", ["quick", "standard"])
def test_cases_that_share_compiled_programs_stand_together(level: str) -> None:
    programs = [case.program for case in build_grid(level, 0, declining("moba", "kv_int8", "kv_int4", "kv_fp8")).cases]
    groups = [program for program, _ in itertools.groupby(programs)]
    assert len(groups) == len(set(groups)) < 0.8 * len(programs)
