"""The grid of sizes: which lengths, heads, depths and forms of arguments it has, and that they go together in pairs."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest

from cases import size_model
from cases.case import Case
from cases.case_id import parse_case_id
from cases.grid import Grid, Supports, build_grid
from cases.operand_values import draw_problem
from cases.optional_operands.bias_operand import HIDING

BLOCK = 128


@pytest.fixture(scope="module")
def found() -> Grid:
    return build_grid("quick", 0, model=size_model.MODEL)


def whole(case: Case) -> bool:
    return case.q_length % BLOCK == case.kv_length % BLOCK == 0


def test_every_pair_of_levels_that_can_stand_together_does(found: Grid) -> None:
    assert found.coverage.covered == found.coverage.feasible > 600
    assert [parse_case_id(case.id) for case in found.cases] == list(found.cases)


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_gradients_are_asked_over_several_whole_blocks_each_way_in_every_dtype(found: Grid, dtype: str) -> None:
    trained = [case for case in found.cases if case.phase == "train" and case.dtype == dtype and whole(case)]
    shapes = {(case.q_length // BLOCK, case.kv_length // BLOCK) for case in trained}
    assert {(3, 3), (2, 4), (4, 2), (18, 1), (1, 18), (9, 9)} <= shapes
    for q, kv in ((3, 3), (2, 4), (4, 2), (9, 9)):
        masks = {case.mask.split("-")[0] for case in trained if (case.q_length, case.kv_length) == (128 * q, 128 * kv)}
        assert masks, (q, kv)


def test_caches_are_long_and_are_read_by_one_to_sixteen_queries(found: Grid) -> None:
    read = [case for case in found.cases if case.phase != "train"]
    assert {case.q_length for case in read} == {1, 4, 16}
    assert min(case.kv_length for case in read) > 1000
    assert max(case.kv_length for case in read) > 2**15, "positions beyond int16"
    for operand in ("sinks", "bias", "segment_ids", "soft_cap", "lengths", "window"):
        assert any(operand in case.features for case in read), operand


def test_heads_and_depths_are_of_every_kind(found: Grid) -> None:
    groups = {case.num_q_heads // case.num_kv_heads for case in found.cases}
    assert {1, 2, 3, 8} <= groups
    assert {1, 2, 3, 8, 32} <= {case.num_q_heads for case in found.cases}
    assert max(case.batch for case in found.cases) > 3
    assert {33, 80, 96, 192, 256} <= {case.head_dim for case in found.cases}


def test_kernels_of_the_usual_depths_alone_are_asked_the_same_lengths_and_heads() -> None:
    def shapes_of(supports: Supports) -> set[tuple[int, int, int]]:
        cases = build_grid("quick", 0, supports, size_model.MODEL).cases
        return {(case.q_length, case.kv_length, case.num_q_heads) for case in cases}

    everything = shapes_of(lambda case: None)
    for depth in (64, 128):
        usual = functools.partial(_only_depth, depth)
        assert shapes_of(usual) == everything, depth


def _only_depth(depth: int, case: Case) -> str | None:
    return None if case.head_dim == case.v_head_dim == depth else f"depths are {depth}"


def test_wild_ids_are_the_same_in_narrow_types_and_come_back() -> None:
    problem = draw_problem(Case(segments="segwild", q_length=256, kv_length=256))
    assert problem.segment_ids is not None
    ids = problem.segment_ids[1][0]
    different = list(itertools.combinations(np.unique(ids), 2))
    for narrow in (np.uint8, np.int8, np.int16, np.uint16, np.float32):
        with np.errstate(over="ignore"):
            assert any(narrow(a) == narrow(b) for a, b in np.array(different, np.int32).astype(narrow)), narrow
    assert 0 in ids
    assert {-(2**31), -1, 2**31 - 1} <= {*map(int, ids)}
    runs = [int(key) for key, _ in itertools.groupby(ids)]
    assert len(runs) > len(set(runs)), "no id comes back"


def test_a_hiding_bias_leaves_every_row_something() -> None:
    hiding = [case for case in build_grid("quick", 0, model=size_model.MODEL).cases if case.bias in HIDING]
    assert {case.bias for case in hiding} == {*HIDING}
    for case in hiding:
        problem = draw_problem(case)
        assert problem.bias is not None
        assert np.isneginf(problem.bias).any()
        left = (problem.allowed & (problem.bias > -1e8)).any(axis=-1)
        assert (left == problem.allowed.any(axis=-1)).all(), case.id


def test_levels_of_logits_reach_what_kernels_clip_at() -> None:
    problem = draw_problem(Case(distribution="levels", q_length=64))
    logits = np.einsum("btnh,bsnh->bnts", problem.q.astype(float), problem.k.astype(float)) * problem.effective_scale
    middle = np.median(logits, axis=-1).ravel()
    for threshold in (80, 88, 104, 128, 1e3, 1e4):
        assert (middle > threshold).any(), threshold
        assert (middle < -threshold).any(), threshold
    assert (problem.q == 0).all(axis=-1).any()
