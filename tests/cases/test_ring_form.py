"""Ring buffers: ids, the token in each slot, masks that a ring can hold, the grids, and a server's trace."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from cases.case import Case, CaseIdError
from cases.case_id import parse_case_id
from cases.grid import build_grid
from cases.operand_values import draw_problem
from cases.storage_forms.ring_cases import CASES
from cases.storage_forms.server_traces import STEPS, build_traces, iter_steps
from cases.storage_forms.storage_layout import NOBODY, Storage
from cases.storage_forms.stored_cases import find_refusal, with_length

DECODE = parse_case_id("decode/f32/B4.T1.S45.N4.K2.H16.V16/own-l9-45-16-17-5/ring16/normal/s0")
CHUNK = parse_case_id("prefill/f32/B3.T4.S45.N4.K2.H16.V16/own-l9-45-16-2/ring16/normal/s0")


def draw_storage(case: Case) -> Storage:
    found = draw_problem(case).storage
    assert found is not None
    return found


@pytest.mark.parametrize("case", [DECODE, CHUNK], ids=str)
def test_an_id_with_a_ring_parses_back(case: Case) -> None:
    assert parse_case_id(case.id) == case
    assert case.features[-1] == "ring"


@pytest.mark.parametrize(("storage", "message"), [("ring0", "ring0"), ("ring9999", "more than 4096")])
def test_a_ring_that_cannot_be_is_named(storage: str, message: str) -> None:
    with pytest.raises(CaseIdError, match=message):
        parse_case_id(DECODE.id.replace("ring16", storage))


def test_rings_are_not_trained_from() -> None:
    with pytest.raises(CaseIdError, match="is a cache"):
        dataclasses.replace(DECODE, phase="train")


@pytest.mark.parametrize("case", [DECODE, CHUNK], ids=str)
def test_a_token_lies_in_its_slot_modulo_the_slots(case: Case) -> None:
    storage = draw_storage(case)
    lengths = storage.tables["cache_seqlens"]
    assert tuple(lengths[: case.batch]) == case.kv_lengths
    for b, length in enumerate(case.kv_lengths):
        for p in range(max(0, length - 16), length):
            assert storage.held[b, p % 16] == b * case.kv_length + p
        assert (storage.held[b] != NOBODY).sum() == min(length, 16)
    assert (storage.held[case.batch :] == NOBODY).all()
    assert (lengths[case.batch :] == 0).all()


def test_the_first_tokens_keep_their_slots_and_the_others_turn_behind_them() -> None:
    case = dataclasses.replace(DECODE, mask="own-l9-f4-45-16-17-3")
    assert "first_tokens" in case.features
    storage = draw_storage(case)
    for b, length in enumerate(case.kv_lengths):
        in_ring = range(max(4, length - 12), length)
        for p, slot in [*((p, p) for p in range(min(4, length))), *((p, 4 + (p - 4) % 12) for p in in_ring)]:
            assert storage.held[b, slot] == b * case.kv_length + p
        assert (storage.held[b] != NOBODY).sum() == min(length, 16)


def test_every_row_has_all_queries() -> None:
    storage = draw_storage(CHUNK)
    assert storage.q_rows.ravel()[:12].tolist() == list(range(12))
    assert (storage.q_rows[3:] == NOBODY).all()
    assert storage.present.all()
    with pytest.raises(CaseIdError, match="only packed ones"):
        dataclasses.replace(CHUNK, storage="ring16-q4-1-0")


@pytest.mark.parametrize(
    ("mask", "refused"),
    [
        ("own-l9-45-16-17-5", False),
        ("own-l15-45-16-17-5", False),
        ("own-l16-45-16-17-5", True),
        ("own-linf-45-16-17-5", True),
        ("own-linf-16-16-3-5", False),
        ("own-l11-f4-45-16-17-5", False),
        ("own-l12-f4-45-16-17-5", True),
        ("own-l0-f16-45-16-17-5", True),
        ("lengths-16-16-3-5", True),
    ],
)
def test_a_ring_holds_all_keys_that_are_seen(mask: str, refused: bool) -> None:
    reason = find_refusal(dataclasses.replace(DECODE, mask=mask), "ring")
    assert (reason is not None) == refused
    assert reason is None or "mask" in reason


def test_another_form_is_refused() -> None:
    assert "ring operands" in (find_refusal(DECODE, "paged") or "")
    assert "bias" in (find_refusal(dataclasses.replace(DECODE, bias="bias"), "ring") or "")


def test_a_longer_sequence_has_more_slots() -> None:
    longer = with_length(DECODE, 512)
    assert longer.storage == "ring512"
    assert find_refusal(longer, "ring") is None


@pytest.mark.parametrize("place", [0, 1])
def test_the_grids_cover_all_pairs(place: int) -> None:
    found = build_grid("quick", 0, lambda case: find_refusal(case, "ring"), CASES.models[place])
    assert found.coverage.covered == found.coverage.feasible
    assert all(parse_case_id(case.id) == case for case in found.cases)
    assert [case.id for case in found.cases if find_refusal(case, "ring")] == []
    stored = [(case, case.stored) for case in found.cases]
    turns = {n > spec.size for case, spec in stored if spec and spec.size for n in case.kv_lengths}
    assert turns == {False, True}


def test_further_sequences_can_be_asked_for() -> None:
    for changes in CASES.further_sequences.values():
        case = dataclasses.replace(DECODE, **changes)
        assert parse_case_id(case.id) == case
        assert find_refusal(case, "ring") is None


def test_in_a_trace_rings_turn_and_rows_hold_tokens_of_others() -> None:
    (case, *_) = build_traces(0, lambda case: find_refusal(case, "ring"))
    steps = list(iter_steps(case, draw_problem(case)))
    assert [step.queries for step in steps] == list(STEPS)
    layouts = [step.problem.storage for step in steps]
    assert len({tuple((name, x.shape) for name, x in x.arrays.items()) for x in layouts if x}) == 1
    owners, turned = set(), False
    for layout in layouts:
        assert layout is not None
        for row, length in enumerate(layout.tables["cache_seqlens"]):
            rows = set((layout.held[row][layout.held[row] != NOBODY] // case.kv_length).tolist())
            owners.add(len(rows))
            turned |= bool(length > layout.held.shape[1])
    assert turned
    assert max(owners) > 1


def test_a_trace_computes_what_the_whole_does() -> None:
    """Attention over the keys in the slots of each step, by positions, is that of the whole."""
    case = build_traces(0, lambda case: find_refusal(case, "ring"))[0]
    whole = draw_problem(case)
    for step in iter_steps(case, whole):
        problem, layout = step.problem, step.problem.storage
        assert layout is not None
        seen = np.flatnonzero(problem.allowed.any(axis=(1, 2)).ravel())
        assert set(seen) <= set(layout.held.ravel().tolist())
