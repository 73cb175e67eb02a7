"""Storage forms: ids, tables, shared pages, the grids, and a server's trace."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest

from cases import mask_spec, operand_values
from cases.case import Case, CaseIdError
from cases.case_id import parse_case_id
from cases.grid import build_grid
from cases.masks import Causal, Chunked, Full, Lengths, Listed, Mask, MaskFunction, OwnWindow, Window, place
from cases.storage_forms import storage_layout
from cases.storage_forms.form_cases import load_form_cases
from cases.storage_forms.form_registry import FORMS, find_form
from cases.storage_forms.mask_sides import Sides, find_sides
from cases.storage_forms.page_writes import find_write_refusal
from cases.storage_forms.server_traces import LENGTHS, STEPS, build_traces, iter_steps
from cases.storage_forms.stored_cases import find_refusal, list_other_masks, lower_stored_mask, with_length

MIXED = parse_case_id("prefill/f32/B4.T21.S64.N4.K2.H16.V16/own-linf-53-16-17-8/paged16-q21-1-1-8/normal/s0")
SHARED = dataclasses.replace(MIXED, storage="shared4-q21-1-1-8")
PACKED = parse_case_id("train/f32/B3.T12.S30.N2.K2.H16.V16/own-l5-30-7-0/packed-q12-9-2/normal/s0")
LATENT = dataclasses.replace(MIXED, num_kv_heads=1, head_dim=24, scale=0.3, storage="latent16-q21-1-1-8")


def of(case: Case) -> storage_layout.Storage:
    found = operand_values.draw_problem(case).storage
    assert found is not None
    return found


@pytest.mark.parametrize(
    "case", [MIXED, SHARED, PACKED, dataclasses.replace(PACKED, storage="packed"), LATENT], ids=str
)
def test_an_id_with_storage_parses_back(case: Case) -> None:
    assert parse_case_id(case.id) == case


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("paged16-q1-2", "for each of 4 sequences"),
        ("paged16-q22-1-1-8", "at most 21"),
        ("paged16-q0-0-0-0", "not all 0"),
        ("paged9999", "more than 4096"),
        ("paged16-q21-21-21-21", "leave them out"),
    ],
)
def test_storage_that_does_not_fit_is_named(written: str, message: str) -> None:
    with pytest.raises(CaseIdError, match=message):
        dataclasses.replace(MIXED, storage=written)


@pytest.mark.parametrize("name", FORMS)
def test_every_form_has_cases_that_its_kernels_can_be_asked_for(name: str) -> None:
    plain = load_form_cases(name).plain
    assert parse_case_id(plain.id) == plain
    assert plain.stored is not None
    assert plain.stored.form == name
    assert find_refusal(plain, name) is None
    assert dataclasses.replace(plain, storage=FORMS[name].example).stored is not None


@pytest.mark.parametrize("name", FORMS)
def test_a_form_is_found_by_the_parameters_that_it_needs(name: str) -> None:
    form = FORMS[name]
    assert find_form([*form.operands, *form.required]) is form
    assert find_form([*form.operands[:1], "k", "v", "causal"]) is None


def test_pages_are_not_trained_from() -> None:
    with pytest.raises(CaseIdError, match="is a cache"):
        dataclasses.replace(PACKED, storage="paged4")


@pytest.mark.parametrize("case", [MIXED, LATENT], ids=str)
@pytest.mark.parametrize(
    ("lengths", "queries", "reason"),
    [
        ("53-16-17-8", "21-1-1-9", "sequence 3 has 9 queries but 8 keys.* at least 9 keys or at most 8 queries"),
        ("53-1-17-8", "21-2-1-8", "sequence 1 has 2 queries but 1 keys"),
        ("53-0-17-8", "21-2-1-8", None),  # queries without any key
        ("53-0-17-8", "21-0-1-8", None),  # an empty sequence
        ("21-16-1-8", "21-0-1-8", None),  # whole prompts
    ],
)
def test_the_keys_in_pages_include_those_of_the_queries(
    case: Case, lengths: str, queries: str, reason: str | None
) -> None:
    assert case.storage is not None
    fields: dict[str, Any] = {"mask": f"own-linf-{lengths}", "storage": case.storage.replace("21-1-1-8", queries)}
    if reason is None:
        assert dataclasses.replace(case, **fields).storage == fields["storage"]
        return
    with pytest.raises(CaseIdError, match=reason):
        dataclasses.replace(case, **fields)


def test_packed_sequences_may_have_fewer_keys_than_queries() -> None:
    assert dataclasses.replace(PACKED, mask="own-l5-30-7-1").kv_lengths == (30, 7, 1)


def test_a_page_has_at_least_one_token() -> None:
    with pytest.raises(CaseIdError, match="paged0"):
        parse_case_id(MIXED.id.replace("paged16", "paged0"))


def test_features_say_what_a_kernel_must_have() -> None:
    assert MIXED.features == ("f32", "prefill", "gqa", "causal", "paged")
    assert PACKED.features == ("f32", "train", "mha", "window", "packed")
    full = dataclasses.replace(PACKED, mask="lengths-30-7-0")
    assert full.features == ("f32", "train", "mha", "full", "packed")


@pytest.mark.parametrize("case", [MIXED, SHARED], ids=str)
def test_the_table_leads_to_every_key(case: Case) -> None:
    found, problem = of(case), operand_values.draw_problem(case)
    size = found.held.shape[1]
    keys = problem.k.reshape(-1, *problem.k.shape[2:])
    assert tuple(found.tables["kv_lens"][: case.batch]) == case.kv_lengths
    for b, length in enumerate(case.kv_lengths):
        for j in range(length):
            held = found.held[found.tables["page_indices"][b, j // size], j % size]
            assert (keys[held] == problem.k[b, j]).all()


@pytest.mark.parametrize("case", [MIXED, SHARED, PACKED], ids=str)
def test_packed_queries_are_the_last_of_each_sequence(case: Case) -> None:
    found = of(case)
    assert found.tables["num_seqs"].tolist() == [case.batch]
    for b, (start, stop) in enumerate(itertools.pairwise(found.tables["cu_q_lens"][: case.batch + 1])):
        rows = b * case.q_length + np.arange(case.q_length - case.q_lengths[b], case.q_length)
        assert found.q_rows[start:stop].tolist() == rows.tolist()
        assert found.places.ravel()[rows].tolist() == list(range(start, stop))
    assert found.present.sum() == sum(case.q_lengths)


def test_pages_are_shuffled_and_some_are_nobodys() -> None:
    found = of(MIXED)
    used = [page for b, n in enumerate(MIXED.kv_lengths) for page in found.tables["page_indices"][b, : -(-n // 16)]]
    assert len(set(used)) == len(used)
    assert used != sorted(used)
    assert (found.held[sorted(set(range(len(found.held))) - set(used))] == storage_layout.NOBODY).all()
    assert len(found.held) > len(used)


def test_what_is_not_used_is_no_page() -> None:
    found = of(MIXED)
    unused = [
        *found.tables["page_indices"][1, 1:],
        *found.tables["page_indices"][2, 2:],
        *found.tables["page_indices"][4:].ravel(),
    ]
    assert min(unused) < 0
    assert max(unused) >= len(found.held)


def test_sequences_that_share_begin_alike() -> None:
    found, problem = of(SHARED), operand_values.draw_problem(SHARED)
    assert found.shares
    assert not of(MIXED).shares
    assert (
        found.tables["page_indices"][0, 0] == found.tables["page_indices"][1, 0] == found.tables["page_indices"][3, 0]
    )
    assert (problem.k[1, :8] == problem.k[0, :8]).all()
    assert (problem.k[1, 8:16] != problem.k[0, 8:16]).all()


def test_what_is_shared_stays_so_in_another_problem() -> None:
    problem = operand_values.draw_problem(SHARED)
    changed = dataclasses.replace(problem, v=problem.v + np.arange(4)[:, None, None, None].astype(np.float32))
    assert (changed.v[1, :8] == changed.v[0, :8]).all()
    assert (changed.v[1, 8] != changed.v[0, 8]).all()


def test_a_shared_key_is_dead_if_it_is_so_for_all() -> None:
    case = dataclasses.replace(SHARED, mask="own-l1-53-16-17-8", storage="shared4-q1-1-1-8", q_length=8)
    dead = operand_values.draw_problem(case).dead_keys
    # The last sequence reads its first keys, which are those of the others.
    assert not dead[:, 0].any()
    assert dead[0, 20:50].all()
    own = dataclasses.replace(case, storage="paged4-q1-1-1-8")
    assert operand_values.draw_problem(own).dead_keys[0, 0].all()


def test_queries_that_are_not_there_see_nothing() -> None:
    empty = operand_values.draw_problem(MIXED).empty_rows
    assert empty[1, :, :20].all()
    assert not empty[1, :, 20].any()


@pytest.mark.parametrize("case", [MIXED, SHARED, PACKED], ids=str)
def test_shapes_go_by_the_case_and_not_by_the_seed(case: Case) -> None:
    shapes = [
        {name: x.shape for name, x in of(dataclasses.replace(case, seed=seed)).arrays.items()} for seed in range(9)
    ]
    assert all(other == shapes[0] for other in shapes)


@pytest.mark.parametrize(
    ("mask", "seen"),
    [
        (Full(), Sides()),
        (Lengths((5, 3)), Sides()),
        (Causal(3), Sides(None, 0)),
        (Causal(2), None),
        (Window(4, 1, 3), Sides(4, 1)),
        (OwnWindow(None, (1, -1)) & Lengths((5, 3)), Sides(None, 0)),
        (OwnWindow(6, (1, -1)) & Lengths((5, 3)), Sides(6, 0)),
        (OwnWindow(6, (1, -1), 2) & Lengths((5, 3)), Sides(6, 0, 2)),
        (OwnWindow(None, (1, -1), 2) & Lengths((5, 3)), Sides(None, 0)),
        (OwnWindow(6, (1, -1), 2) & OwnWindow(6, (1, -1)) & Lengths((5, 3)), None),
        (OwnWindow(6, (1, -1), 2) & OwnWindow(None, (1, -1)) & Lengths((5, 3)), Sides(6, 0, 2)),
        (OwnWindow(6, (1, 0)) & Lengths((5, 3)), None),
        (Causal(3) & Lengths((5, 3)), None),
        (Window(4, None, 3) & Window(2, 9, 3), Sides(2, 9)),
    ],
)
def test_sides_of_masks(mask: Mask, seen: Sides | None) -> None:
    assert find_sides(mask, 4, 7) == seen


def test_how_masks_reach_stored_calls() -> None:
    own = OwnWindow(6, (1, -1)) & Lengths((5, 3))
    assert lower(own, "paged") == {"window": (6, 0)}
    assert lower(Causal(3), "paged") == {}
    assert lower(Causal(3), "packed") == {"causal": True}
    assert lower(Full(), "packed") == {}
    assert lower(Full(), "paged") == {"causal": False}
    assert lower(Causal(3), "paged", "causal") == {"causal": True}
    assert lower(KEPT, "ring") == {"window": (1, 0), "num_sink_tokens": 2}
    assert lower(own, "ring", "window", "num_sink_tokens") == {"window": (6, 0), "num_sink_tokens": 0}
    for mask, message in ((Full(), "ring"), (LISTS & own, "indices")):
        with pytest.raises(NotImplementedError, match=message):
            lower(mask, "ring")
    with pytest.raises(NotImplementedError, match="num_sink_tokens"):
        lower(KEPT, "ring", "window")


def lower(mask: Mask, form: str, *parameters: str) -> dict[str, Any]:
    static, arrays = lower_stored_mask(mask, 2, 1, 4, 7, form=form, parameters=parameters or None)
    return {**static, **arrays}


ENDS = Lengths((5, 3))
CHUNKS = place(Chunked(4), (1, -1)) & ENDS
AHEAD = place(Window(2, 1), (1, -1)) & ENDS
TREE = mask_spec.build_mask("tree-4-2_at-5-3", 2, 1, 4, 7, 0)
KEPT = OwnWindow(1, (1, -1), 2) & ENDS
LISTS = Listed(np.tile(np.array([6, 1, -1], np.int32), (2, 4, 1)))
STORED_LISTS = np.tile(np.array([-1, 1, -1], np.int32), (2, 4, 1))  # no sequence has a key 6


@pytest.mark.parametrize(
    ("mask", "parameters", "lowered"),
    [
        (CHUNKS, ("mask_mod", "mask"), {"mask_mod": MaskFunction(Chunked(4))}),
        (CHUNKS, ("mask",), {"mask": CHUNKS.dense(4, 7)}),
        (AHEAD, ("causal", "window", "mask_mod"), {"causal": False, "window": (2, 1)}),
        (AHEAD, ("causal", "mask_mod"), {"causal": False, "mask_mod": MaskFunction(Window(2, 1))}),
        (TREE, ("causal", "mask", "parents", "tree_mask"), {"causal": True, "tree_mask": TREE.dense(4, 7)}),
        (TREE, ("mask", "parents"), {"parents": TREE.dense(4, 7)}),
        (TREE, ("mask",), {"mask": TREE.dense(4, 7)}),
        (ENDS, ("causal",), {"causal": False}),
        # A call over pages has no parameter for first tokens, which a window would leave out.
        (KEPT, ("window", "mask_mod", "mask"), {"mask": KEPT.dense(4, 7)}),
        (LISTS & CHUNKS, ("indices", "mask_mod"), {"indices": STORED_LISTS, "mask_mod": MaskFunction(Chunked(4))}),
        (LISTS & CHUNKS, ("indices", "mask"), {"indices": STORED_LISTS, "mask": CHUNKS.dense(4, 7)}),
        (OwnWindow(1, (1, -1)) & LISTS & ENDS, ("indices", "window"), {"indices": STORED_LISTS, "window": (1, 0)}),
    ],
)
def test_other_masks_go_to_the_parameters_that_a_paged_call_has(
    mask: Mask, parameters: tuple[str, ...], lowered: dict[str, Any]
) -> None:
    found = lower(mask, "paged", *parameters)
    assert found.keys() == lowered.keys()
    assert all(np.all(found[name] == value) for name, value in lowered.items())


@pytest.mark.parametrize(
    ("mask", "parameters", "missing"),
    [
        (CHUNKS, ("window",), "mask_mod"),
        (KEPT, ("window",), "mask"),
        (LISTS & CHUNKS, ("mask",), "indices"),
        (AHEAD, ("window", "mask_mod"), "causal"),
        (TREE, ("mask_mod",), "tree_mask"),
        (ENDS, ("window",), "causal"),
    ],
)
def test_a_paged_call_without_the_parameter_does_not_support_the_mask(
    mask: Mask, parameters: tuple[str, ...], missing: str
) -> None:
    with pytest.raises(NotImplementedError, match=f"no parameter '{missing}'"):
        lower(mask, "paged", *parameters)


def test_a_drafted_token_sees_itself_its_ancestors_and_what_came_before() -> None:
    allowed = mask_spec.build_mask("tree-9-4_at-30-4", 2, 1, 9, 30, 3).dense(9, 30)[:, 0]
    assert allowed[0, :, :21].all()
    own = allowed[0, :, 21:]
    assert not np.triu(own, 1).any()
    assert own.diagonal().all()
    for t in range(9):  # what an ancestor sees, its descendants see
        assert all((own[t] >= own[above]).all() for above in np.flatnonzero(own[t]))
    assert (own != np.tri(9, dtype=bool)).any(), "no siblings"
    assert not allowed[1, :, 4:].any(), "past the second sequence"


def test_what_no_stored_call_is_asked_for() -> None:
    assert find_refusal(MIXED, "paged") is None
    assert "dense" in (find_refusal(dataclasses.replace(MIXED, storage=None), "paged") or "")
    assert "bias" in (find_refusal(dataclasses.replace(MIXED, bias="bias"), "paged") or "")
    assert "causal" in (find_refusal(dataclasses.replace(MIXED, mask="causal"), "paged") or "")
    assert all(
        find_refusal(dataclasses.replace(PACKED, mask=mask), "packed") is None for mask in list_other_masks(PACKED)
    )


@pytest.mark.parametrize(
    "case", [MIXED, PACKED, LATENT, dataclasses.replace(MIXED, storage=None, mask="causal")], ids=str
)
def test_a_case_of_another_length_is_stored_alike(case: Case) -> None:
    longer = parse_case_id(with_length(case, 512).id)
    assert (longer.batch, longer.q_length, longer.kv_lengths) == (1, 512, (512,))
    kinds = [None if x.stored is None else (x.stored.form, x.stored.size) for x in (longer, case)]
    assert kinds[0] == kinds[1]
    assert case.storage is not None or longer.mask == case.mask


@pytest.mark.parametrize("kind", ["paged", "packed", "latent_pages"])
def test_further_sequences_are_what_they_say(kind: str) -> None:
    base = {"paged": MIXED, "packed": PACKED, "latent_pages": LATENT}[kind]
    further = load_form_cases(kind).further_sequences
    cases = {name: dataclasses.replace(base, **changes) for name, changes in further.items()}
    assert all(parse_case_id(case.id) == case and find_refusal(case, kind) is None for case in cases.values())
    assert cases["forty"].batch == 40
    if kind != "packed":
        assert len(of(cases["forty"]).held) > 256
        if kind == "paged":
            prompt = cases["prompt"]
            assert find_write_refusal(prompt) is None  # kernels that write pages are asked too
            assert sum(prompt.q_lengths) * prompt.num_q_heads > 1248
            allowed = operand_values.build_hollow_problem(prompt).allowed
            assert not allowed[1, 0, 256:, :128].any()  # keys that the windows have passed
            assert cases["long"].kv_length > 2**15
        return
    chunk, alike = cases["one_chunk"], cases["as_many_in_all"]
    assert find_sides(operand_values.draw_problem(chunk).mask, chunk.q_length, chunk.kv_length) == Sides(None, 3)
    counts = alike.q_lengths
    assert sum(counts) == sum(alike.kv_lengths)
    assert all(q != kv for q, kv in zip(counts, alike.kv_lengths, strict=True))


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("place", [0, 1])
def test_grids_cover_all_pairs_and_their_ids_parse(kind: str, place: int) -> None:
    found = build_grid("quick", 0, model=load_form_cases(kind).models[place])
    assert found.coverage.covered == found.coverage.feasible
    assert all(parse_case_id(case.id) == case for case in found.cases)
    assert {case.storage is not None for case in found.cases} == {True}


def test_the_paged_grid_has_what_serving_has() -> None:
    cases = [case for model in load_form_cases("paged").models for case in build_grid("quick", 0, model=model).cases]
    layouts = [operand_values.build_hollow_problem(case).storage for case in cases]
    stored = [(case, layout) for case, layout in zip(cases, layouts, strict=True) if layout is not None]
    assert {1, 5, 16, 32, 64, 128, 256} <= {layout.held.shape[1] for _, layout in stored}
    assert any(layout.shares for _, layout in stored)
    assert {0, 1} <= {n % layout.held.shape[1] for case, layout in stored for n in case.kv_lengths if n}
    assert any(0 in case.kv_lengths for case in cases)
    assert any(1 in case.q_lengths and max(case.q_lengths) > 1 for case in cases)
    assert any(len(layout.tables["cu_q_lens"]) - 1 > case.batch for case, layout in stored)
    assert any(len(layout.tables["cu_q_lens"]) - 1 == case.batch for case, layout in stored)


@pytest.mark.parametrize(
    ("form", "writes"),
    [("packed", False), ("paged", False), ("paged", True), ("latent_pages", False), ("ring", False)],
)
def test_a_served_grid_has_long_batches_and_empty_sequences_anywhere(form: str, writes: bool) -> None:
    described = load_form_cases(form)
    model = (described.find_models(writes, frozenset()) if described.find_models else described.models)[0]
    levels = {axis.name: axis.levels for axis in model.axes}
    cases = build_grid("quick", 0, lambda case: find_refusal(case, form, writes=writes), model).cases
    # Long batches of single tokens, at every size of pages or rings and every distribution of values.
    tokens = [case for case in cases if case.q_length == 1 and case.batch > 16]
    sizes = {case.stored.size for case in tokens if case.stored is not None}
    assert sizes == set(levels.get("page", (None,)))
    assert {case.distribution for case in tokens} == set(levels["distribution"])
    assert all(case.batch % 16 for case in tokens)
    for case in tokens:
        size = (case.stored.size if case.stored is not None else None) or 16
        assert {n % size for n in case.kv_lengths} >= {0, 1 % size, size - 1}
    # Sequences without keys at the start, at the end, and only between others.
    empty = [[keys == 0 for keys in case.kv_lengths] for case in cases]
    assert any(row[0] and not all(row) for row in empty)
    assert any(row[-1] and not all(row) for row in empty)
    assert any(any(row) and not row[0] and not row[-1] for row in empty)
    groups = {case.num_q_heads // case.num_kv_heads for case in cases}
    assert any(group > 1 and group % 2 for group in groups)


def test_the_packed_grid_has_what_training_has() -> None:
    cases = [
        case
        for model in load_form_cases("packed").models
        for case in build_grid("quick", 0, model=model).cases
        if case.phase == "train"
    ]
    lengths = [(of(case), case.q_lengths, case.kv_lengths) for case in cases]
    assert any(0 in q and 0 in kv for _, q, kv in lengths)
    assert any(1 in q and 1 in kv for _, q, kv in lengths)
    assert any(max(kv) > 10 * np.median(kv) for _, _, kv in lengths)
    assert any(
        np.abs(stored.tables["cu_q_lens"] - stored.tables["cu_kv_lens"])[: len(q)].max() > 128
        for stored, q, _ in lengths
    )
    assert any(len(stored.tables["cu_q_lens"]) - 1 > len(q) for stored, q, _ in lengths)
    assert any((stored.q_rows == storage_layout.NOBODY).any() for stored, _, _ in lengths)


def test_in_a_life_sequences_take_pages_of_others() -> None:
    case = build_traces()[0]
    whole = operand_values.draw_problem(case)
    life = list(iter_steps(case, whole))
    assert [step.queries for step in life] == list(STEPS)
    shapes = {tuple((name, x.shape) for name, x in (step.problem.storage or of(case)).arrays.items()) for step in life}
    assert len(shapes) == 1
    owners: dict[int, set[int]] = {}
    for step in life:
        stored = step.problem.storage
        assert stored is not None
        for n, (row, _, stop) in enumerate(step.queries):
            for page in stored.tables["page_indices"][n, : -(-stop // stored.held.shape[1])]:
                owners.setdefault(int(page), set()).add(row)
    assert any(len(rows) > 1 for rows in owners.values())


def test_what_a_page_held_before_is_still_behind_the_length() -> None:
    case = build_traces()[0]
    stored = list(iter_steps(case, operand_values.draw_problem(case)))[5].problem.storage
    assert stored is not None
    page = stored.held[stored.tables["page_indices"][1, 1]]  # of the fourth, with four of its own tokens
    assert set(page[:4] // case.kv_length) == {3}
    assert set(page[4:] // case.kv_length) == {1}


def test_every_token_of_a_life_is_computed_once() -> None:
    computed = [(row, i) for step in STEPS for row, start, stop in step for i in range(start, stop)]
    assert sorted(computed) == [
        (row, i) for row, length in enumerate(LENGTHS) for i in range(length) if (row, i) in set(computed)
    ]
    assert len(computed) == len(set(computed))
