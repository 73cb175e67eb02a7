"""Test lists of keys: how they are drawn, the mask that they are, and how stored calls get them."""

from __future__ import annotations

import numpy as np
import pytest

from cases import mask_spec
from cases.case_id import parse_case_id
from cases.covering_model import Model
from cases.list_model import build_list_models, build_union_model
from cases.masks import (
    Causal,
    Full,
    Lengths,
    Listed,
    ListParts,
    Mask,
    Or,
    Window,
    list_conjuncts,
    replace_lists,
    split_lists,
)
from cases.operand_values import draw_problem
from cases.storage_forms.mask_sides import find_lists
from conformance.execution.executor import Executor
from conformance.execution.stored_calls import StoredCall
from impls.listed.implementation import IMPLEMENTATIONS

PAGED = "prefill/f32/B3.T6.S30.N2.K1.H8.V8/own-linf-30-11-1_and_listed-k7/paged4-q6-2-1/normal/s3"


def draw(count: int, q_length: int = 60, kv_length: int = 40, batch: int = 2) -> np.ndarray:
    mask = mask_spec.build_mask(f"listed-k{count}", batch, 1, q_length, kv_length, 0)
    assert isinstance(mask, Listed)
    return mask.indices


@pytest.mark.parametrize("count", [1, 5, 16, 70])
def test_a_list_names_distinct_keys_and_is_padded_anywhere(count: int) -> None:
    lists = draw(count)
    assert lists.shape == (2, 60, count)
    assert lists.dtype == np.int32
    lengths = [len(row[row >= 0]) for row in lists.reshape(-1, count)]
    for row in lists.reshape(-1, count):
        named = row[row >= 0]
        assert len(set(named)) == len(named)
        assert (named < 40).all()
    assert {0, min(count, 40)} <= set(lengths)
    if count in (5, 16):
        assert len(set(lengths)) > 3
        short = lists[((lists >= 0).sum(axis=-1) > 1) & ((lists < 0).any(axis=-1))]
        assert any((np.diff(row[row >= 0]) < 0).any() for row in short)  # not sorted
        assert any(row[0] < 0 for row in short)
        assert any(row[-1] < 0 for row in short)


def test_a_single_query_has_a_key() -> None:
    for seed in range(20):
        mask = mask_spec.build_mask("listed-k4", 1, 1, 1, 9, seed)
        assert mask.dense(1, 9).any()


def test_the_mask_allows_the_listed_keys() -> None:
    mask = Listed(np.array([[[2, -1, 0], [-1, -1, -1]]], np.int32))
    dense = mask.dense(2, 4)
    assert dense.tolist() == [[[[True, False, True, False], [False] * 4]]]
    assert (mask.allowed(np.arange(2)[:, None], np.arange(4)) == dense).all()
    cut = mask.select_keys(1, 3)
    assert cut is not None
    assert cut.dense(2, 2).tolist() == [[[[False, True], [False, False]]]]
    assert mask.select_queries(1, 2, (2, 4)).dense(1, 4).sum() == 0
    assert mask == Listed(mask.indices.copy())
    assert len({mask, Listed(mask.indices.copy())}) == 1


@pytest.mark.parametrize(
    ("indices", "said"),
    [
        (np.zeros((2, 3), np.int32), "must be \\[B, T, k\\]"),
        (np.zeros((1, 2, 3), np.float32), "must be signed integers"),
    ],
)
def test_an_array_that_is_no_list_is_refused(indices: np.ndarray, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Listed(indices)


@pytest.mark.parametrize("wrong", [-2, 4])
def test_an_entry_that_names_no_key_is_refused(wrong: int) -> None:
    with pytest.raises(ValueError, match="places of the 4 keys"):
        Listed(np.full((1, 1, 1), wrong, np.int32)).check_operands(1, 1, 1, 4)


def test_stored_lists_follow_their_queries_and_name_keys_of_their_sequence() -> None:
    problem = draw_problem(parse_case_id(PAGED))
    executor = Executor(next(one for one in IMPLEMENTATIONS if one.name == "listed_paged"))
    _, arrays = executor.arguments(problem)
    call = executor.implementation.call
    assert isinstance(call, StoredCall)
    names = ("q", "k", "v", "storage", "indices")
    stored = np.asarray(call.store(**{name: arrays[name] for name in names})["indices"])
    assert problem.storage is not None
    lists = next(part.indices for part in list_conjuncts(problem.mask) if isinstance(part, Listed))
    rows = problem.storage.q_rows
    for row, query in zip(stored, rows, strict=True):
        if query < 0:
            assert set(row) - {-1, 0, 1}, "padding has junk"
            continue
        b, i = divmod(int(query), 6)
        end = (30, 11, 1)[b]
        assert (row == np.where(lists[b, i] < end, lists[b, i], -1)).all()


def test_lists_are_found_beside_other_masks() -> None:
    mask = mask_spec.build_mask("own-l3-9-4_and_listed-k5", 2, 1, 3, 9, 0)
    lists = find_lists(mask, (9, 4))
    assert lists is not None
    assert lists[1].max() < 4
    assert find_lists(mask_spec.build_mask("own-l3-9-4", 2, 1, 3, 9, 0), (9, 4)) is None


@pytest.mark.parametrize("form", [None, "packed", "paged", "latent", "latent_pages"])
def test_every_case_of_the_models_has_lists(form: str | None) -> None:
    def find_first(model: Model) -> dict[str, int]:
        return {axis.name: 0 for axis in model.axes}

    for model in build_list_models(form):
        for count in range(3):
            row = {**find_first(model), "listed": count}
            case = model.assemble(model.levels(tuple(row.values())), 0)
            assert "indices" in case.features
            assert case.mask.endswith(f"listed-k{model.axes[-1].levels[count]}")


LISTS = Listed(np.array([[[2, -1, 0], [-1, -1, -1]]], np.int32))
NEAR = Window(1, 0)


@pytest.mark.parametrize(
    ("mask", "parts"),
    [
        (LISTS, ListParts(Full(), LISTS, None)),
        (Causal() & LISTS, ListParts(Causal(), LISTS, None)),
        (LISTS | NEAR, ListParts(Full(), LISTS, NEAR)),
        (NEAR | LISTS, ListParts(Full(), LISTS, NEAR)),
        ((Causal() & LISTS) | NEAR, ListParts(Causal(), LISTS, NEAR)),
        (Lengths((3,)) & (LISTS | NEAR), ListParts(Lengths((3,)), LISTS, NEAR)),
        (
            (Lengths((3,)) & LISTS) | (Lengths((3,)) & NEAR),
            ListParts(Lengths((3,)), LISTS, NEAR),
        ),
        (Full(), None),
        ((Lengths((3,)) & LISTS) | NEAR, None),
        (LISTS | (Lengths((3,)) & NEAR), None),
        ((Causal(1) & LISTS) | NEAR, None),
        ((Causal() & LISTS) | Window(1, 1), None),
        (LISTS | Causal(), None),
    ],
    ids=str,
)
def test_a_mask_with_lists_is_split(mask: Mask, parts: ListParts | None) -> None:
    found = split_lists(mask)
    assert found == parts
    if found is not None:
        beside = found.lists if found.local is None else Or(found.lists, found.local)
        assert (mask.dense(2, 4) == (found.rest & beside).dense(2, 4)).all()


def test_the_lists_of_a_union_are_replaced() -> None:
    mask = replace_lists(Causal() & (LISTS | NEAR), lambda lists: Listed(lists.indices[:, ::-1]))
    found = split_lists(mask)
    assert found is not None
    assert found.lists == Listed(LISTS.indices[:, ::-1])


@pytest.mark.parametrize("form", [None, "packed", "paged", "latent", "latent_pages"])
def test_every_case_of_the_union_model_has_a_window_beside_its_lists(form: str | None) -> None:
    model = build_union_model(form)
    for axis in range(len(model.axes)):
        for level in range(model.sizes[axis]):
            row = [0] * len(model.axes)
            row[axis] = level
            levels = model.levels(tuple(row))
            if model.compatible(levels):
                case = model.assemble(levels, 0)
                assert {"indices", "local_window"} <= set(case.features)
                mask = mask_spec.build_mask(
                    case.mask, case.batch, case.num_q_heads, case.q_length, case.kv_length, case.seed
                )
                parts = split_lists(mask)
                assert parts is not None
                assert parts.local is not None
