"""Mixture of block attention: the definition, and both forms of it."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cases.case import CaseIdError
from cases.case_id import parse_case_id
from cases.grid import build_grid
from cases.masks import Causal, Dense
from cases.moba_mask import Moba, depends_on_data, list_choices, resolve_choices
from cases.operand_values import Problem, draw_problem
from conformance.checks import CHECKS_BY_NAME
from conformance.execution import implementation_registry
from conformance.judging import run_plan
from conformance.judging.discrimination import MAX_UNDECIDED_SHARE
from conformance.judging.runner import Runner
from conformance.judging.settings import Settings
from conformance.truth.rounding_bounds import Bounded
from impls import dot_product
from impls.moba import attention, dense_attention, moba_tpu
from impls.moba.moba_plan import MobaPlan, divide_work
from reports.records import PASS, UNJUDGED, Record
from tests.comparison_asserts import assert_attention, assert_right, compute_expected

SETTINGS = settings(derandomize=True, deadline=None, max_examples=60)
FORMS = {"block_sparse": attention, "dense": dense_attention}
ON_A_TPU = functools.partial(attention, backend="tpu", keys_together=128)


def by_definition(mask: Moba, q: np.ndarray, k: np.ndarray, b: int, n: int, i: int) -> set[int]:
    """Compute the keys that query `i` of head `n` attends to, literally by the contract."""
    keys = k[b, :, n // (q.shape[2] // k.shape[2])]
    position = i + mask.offset
    own = position // mask.chunk
    chunks = [range(start, min(start + mask.chunk, len(keys))) for start in range(0, len(keys), mask.chunk)]
    gates = {c: float(np.dot(q[b, i, n], np.mean([keys[j] for j in chunks[c]], axis=0))) for c in range(own)}
    best = sorted(gates, key=lambda c: (-gates[c], c))[: mask.topk - 1]
    return {j for c in [own, *best] for j in chunks[c] if j <= position}


@st.composite
def problems(draw: st.DrawFn) -> tuple[Moba, np.ndarray, np.ndarray]:
    """Draw small integers, so that gates are exact and often tie."""
    batch, group, num_kv_heads, kv_length = (draw(st.integers(1, n)) for n in (2, 2, 2, 9))
    q_length = draw(st.integers(1, kv_length))
    offset = draw(st.integers(0, kv_length - q_length))
    mask = Moba(draw(st.sampled_from((1, 2, 4, 8))), draw(st.integers(1, 5)), offset)
    numbers = np.random.default_rng(draw(st.integers(0, 999)))
    q = numbers.integers(-2, 3, (batch, q_length, group * num_kv_heads, 2)).astype(np.float32)
    return mask, q, numbers.integers(-1, 2, (batch, kv_length, num_kv_heads, 2)).astype(np.float32)


@SETTINGS
@given(problems())
def test_the_mask_is_the_definition_wherever_rounding_leaves_no_doubt(
    problem: tuple[Moba, np.ndarray, np.ndarray],
) -> None:
    mask, q, k = problem
    resolved = resolve_choices(mask, q, k)
    allowed = resolved.dense(q.shape[1], k.shape[1])
    (choice,) = list_choices(resolved)
    for b, n, i in np.ndindex(*allowed.shape[:3]):
        if choice.decided[b, n, i]:
            assert set(np.flatnonzero(allowed[b, n, i])) == by_definition(mask, q, k, b, n, i)


def test_equal_chunks_tie_and_the_first_ones_are_taken() -> None:
    k = np.tile(np.random.default_rng(0).standard_normal((1, 3, 1, 8), np.float32), (1, 5, 1, 1))
    q = np.random.default_rng(1).standard_normal((1, 15, 1, 8)).astype(np.float32)
    (choice,) = list_choices(resolve_choices(Moba(3, 3), q, k))
    assert choice.decided.all()
    np.testing.assert_array_equal(np.flatnonzero(choice.array[0, 0, 14]), [0, 1, 2, 3, 4, 5, 12, 13, 14])


def test_a_choice_that_rounding_may_change_is_not_decided() -> None:
    k = np.zeros((1, 6, 1, 1), np.float32)
    k[0, :, 0, 0] = [1, 1, 1 + 2**-22, 1, 0, 0]
    q = np.ones((1, 6, 1, 1), np.float32)
    (choice,) = list_choices(resolve_choices(Moba(2, 2), q, k))
    np.testing.assert_array_equal(choice.decided[0, 0], [True, True, True, True, False, False])
    (apart,) = list_choices(
        resolve_choices(Moba(2, 2), q, k * np.array([1, 1, 2, 2, 1, 1], np.float32).reshape(1, 6, 1, 1))
    )
    assert apart.decided.all()


def test_every_case_of_the_grid_has_one_right_choice() -> None:
    supports = implementation_registry.find_implementation("moba").supports
    for case in build_grid("quick", 0, supports).cases:
        if case.kv_length < 1000:
            assert draw_problem(case).decided.all(), case.id


def test_keys_that_choose_are_read_though_nobody_attends_to_them() -> None:
    problem = draw_problem(parse_case_id("prefill/f32/B1.T4.S40.N1.K1.H8.V8/moba-8-2-o36/normal/s0"))
    assert not problem.choosing[0, 0, 0, 32:].any()
    assert problem.choosing[0, 0, 0, :32].all()
    assert problem.dead_keys[0, :32].any()
    assert not problem.unread_keys.any()
    alone = dataclasses.replace(problem, mask=Moba(8, 1, 36))
    np.testing.assert_array_equal(alone.unread_keys, alone.dead_keys)
    assert alone.unread_keys[0, :32].all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Moba(0, 1), "moba chunk must be at least 1, got 0"),
        (lambda: Moba(4, 0), "moba topk must be at least 1, got 0"),
        (lambda: Moba(4, 1, -1), "moba offset must be at least 0, got -1"),
        (lambda: Moba(4, 1, 3).check_lengths(6, 8), "position 8, beyond the last of 8 keys"),
    ],
)
def test_what_is_no_mask_is_named(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_case_without_a_chunk_for_every_query_has_no_id() -> None:
    with pytest.raises(CaseIdError, match="every query needs a chunk of its own"):
        parse_case_id("train/f32/B1.T9.S8.N1.K1.H8.V8/moba-4-2/normal/s0")


def test_the_mask_alone_does_not_say_what_is_allowed() -> None:
    for mask in (Moba(4, 2), Moba(4, 2) & Causal()):
        assert depends_on_data(mask)
        with pytest.raises(NotImplementedError, match="depends on q and k"):
            mask.dense(8, 8)


@functools.cache
def compiled(form: str, mask: Moba) -> Any:
    return jax.jit(functools.partial(FORMS[form], mask=mask, save_residuals=True))


@pytest.mark.parametrize("form", FORMS)
def test_chunked_prefill_and_decode_are_rows_of_one_pass(form: str) -> None:
    problem = draw_problem(parse_case_id("train/f32/B1.T45.S45.N4.K2.H8.V4/moba-10-3/normal/s3"))
    q, k, v = problem.q, problem.k, problem.v
    whole, residuals = compiled(form, Moba(10, 3))(q, k, v)
    truth = compute_expected(problem)
    assert_right({"out": whole, **residuals}, truth)
    for start, stop in ((20, 45), (44, 45)):
        found = compiled(form, Moba(10, 3, start))(q[:, start:stop], k, v)
        rows = {name: np.s_[:, start:stop] if name == "out" else np.s_[..., start:stop] for name in truth}
        only = {name: Bounded(x.value[rows[name]], x.bound[rows[name]]) for name, x in truth.items()}
        assert_right({"out": found[0], **found[1]}, only)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mask", [Moba(8, 1), Moba(8, 99), Moba(64, 2), Moba(1, 3)], ids=str)
def test_one_chunk_all_chunks_one_key_a_chunk_and_one_long_chunk(form: str, mask: Moba) -> None:
    problem = dataclasses.replace(
        draw_problem(parse_case_id("train/f32/B1.T30.S30.N2.K1.H8.V8/causal/normal/s5")), mask=mask
    )
    assert problem.decided.all()
    out, residuals = compiled(form, mask)(problem.q, problem.k, problem.v)
    assert_attention({"out": out, **residuals}, problem)


@pytest.mark.parametrize("form", FORMS)
def test_equal_gates_go_to_the_earlier_chunk(form: str) -> None:
    k = jnp.tile(jax.random.normal(jax.random.key(0), (1, 4, 1, 8)), (1, 6, 1, 1))
    v = jax.random.normal(jax.random.key(1), (1, 24, 1, 8))
    q = jnp.concatenate([jax.random.normal(jax.random.key(2), (1, 12, 1, 8)), jnp.zeros((1, 12, 1, 8))], axis=1)
    problem = Problem(q=np.asarray(q), k=np.asarray(k), v=np.asarray(v), mask=Moba(4, 3))
    out, _ = compiled(form, Moba(4, 3))(q, k, v)
    assert_attention({"out": out}, problem)


@pytest.mark.parametrize("form", FORMS)
def test_what_is_refused_is_named(form: str) -> None:
    q = jnp.ones((1, 8, 2, 4))
    ids = (jnp.zeros((1, 8), jnp.int32),) * 2
    with pytest.raises(NotImplementedError, match="segment_ids"):
        FORMS[form](q, q, q, mask=Moba(4, 2), segment_ids=ids)
    for mask, name in ((Causal(), "Causal"), (Dense(np.ones((8, 8), bool)), "Dense"), (Moba(4, 2) & Causal(), "moba")):
        with pytest.raises(NotImplementedError, match=name):
            FORMS[form](q, q, q, mask=mask)
    with pytest.raises(ValueError, match="beyond the last of 8 keys"):
        FORMS[form](q, q, q, mask=Moba(4, 2, 1))


def test_others_refuse_the_mask() -> None:
    q = jnp.ones((1, 8, 2, 4))
    with pytest.raises(NotImplementedError, match="moba"):
        dot_product.attention(q, q, q, mask=Moba(4, 2))


PLAN = MobaPlan(
    moba=Moba(4, 3),
    batch=2,
    num_q_heads=4,
    num_kv_heads=2,
    q_length=24,
    kv_length=24,
    scale=1.0,
    soft_cap=None,
    bias_shape=None,
    most_rows=16,
)
_DIVIDE = jax.jit(functools.partial(divide_work, PLAN))


@settings(SETTINGS, max_examples=25)
@given(st.integers(0, 10**6), st.sampled_from((0.0, 0.3, 1.0)), st.integers(1, PLAN.chunks))
def test_every_pair_has_one_place_in_a_block_of_its_chunk(seed: int, empty: float, kinds: int) -> None:
    numbers = np.random.default_rng(seed)
    shape = (PLAN.lanes, PLAN.rows, PLAN.slots)
    chosen = np.where(numbers.random(shape) < empty, PLAN.chunks, numbers.integers(0, kinds, shape)).astype(np.int32)
    work = jax.tree.map(np.asarray, _DIVIDE(chosen))
    assert work.in_use <= PLAN.most_blocks
    flat = chosen.reshape(-1, PLAN.slots)
    lane = np.arange(PLAN.lanes * PLAN.rows) // PLAN.rows
    nowhere = PLAN.most_blocks * PLAN.block_rows
    np.testing.assert_array_equal(work.places == nowhere, flat == PLAN.chunks)
    used = work.places[work.places < nowhere]
    assert len(set(used)) == len(used)
    assert set(np.flatnonzero(work.rows.ravel() < PLAN.lanes * PLAN.rows)) == set(used)
    for row, slot in zip(*np.nonzero(work.places < nowhere), strict=True):
        block, within = divmod(work.places[row, slot], PLAN.block_rows)
        assert block < work.in_use
        assert work.rows[block, within] == row
        assert work.bins[block] == lane[row] * PLAN.chunks + flat[row, slot]


def test_the_work_follows_what_is_chosen() -> None:
    """Rows that blocks have room for: the pairs that exist, and less than one block to spare for each chunk."""
    lengths = (512, 2048)
    rooms = []
    for length in lengths:
        plan = dataclasses.replace(PLAN, moba=Moba(64, 3), q_length=length, kv_length=length, most_rows=256)
        rooms.append(plan.most_blocks * plan.block_rows)
        assert rooms[-1] <= plan.pairs + plan.bins * plan.block_rows
        assert rooms[-1] * plan.moba.chunk < 0.75 * plan.lanes * plan.rows * length
    assert rooms[1] == 4 * rooms[0]


def judged(case: str) -> list[Record]:
    planned = run_plan.plan_case(
        implementation_registry.find_implementation("moba"), parse_case_id(case), [CHECKS_BY_NAME["forward"]]
    )
    return Runner(Settings()).run(planned.jobs)


def test_rows_that_rounding_leaves_in_doubt_are_counted_in_the_records() -> None:
    case = "prefill/f32/B1.T70.S70.N2.K1.H16.V16/moba-32-2/huge/s0"
    doubtful = int(np.count_nonzero(~draw_problem(parse_case_id(case)).decided))
    assert doubtful
    found = judged(case)
    assert {record.verdict for record in found} == {PASS}
    assert [record.figures for record in found] == [{"undecided_rows": doubtful, "rows": 140}]
    (sure,) = judged(case.replace("huge", "normal"))
    assert not sure.figures


def test_a_case_with_too_many_rows_in_doubt_is_unjudged_and_says_so() -> None:
    (record,) = judged("train/f32/B1.T128.S128.N2.K1.H16.V16/moba-16-3/huge/s0")
    assert (record.verdict, record.check) == (UNJUDGED, "discrimination")
    share = record.figures["undecided_rows"] / record.figures["rows"]
    assert share > MAX_UNDECIDED_SHARE
    assert f"in {record.figures['undecided_rows']} of 256 rows" in record.reason


@pytest.mark.parametrize("form", FORMS)
def test_equal_chunks_tie_in_whatever_place_they_are(form: str) -> None:
    """17 chunks: one more than a whole number of vector lanes, so that a product over all has a last column apart."""
    numbers = np.random.default_rng(0)
    k = np.tile(numbers.standard_normal((1, 2, 1, 64)).astype(np.float32), (1, 18, 1, 1))
    q = numbers.standard_normal((1, 36, 1, 64)).astype(np.float32)
    v = numbers.standard_normal((1, 36, 1, 8)).astype(np.float32)
    problem = Problem(q, k, v, Moba(2, 3))
    assert problem.decided.all()
    out = jax.jit(functools.partial(FORMS[form], mask=problem.mask))(q, k, v)
    assert_attention({"out": out}, problem)


@pytest.mark.parametrize("mask", [Moba(100, 1, 0), Moba(1, 4, 60), Moba(500, 2, 60)], ids=repr)
def test_on_a_tpu_chunks_of_any_length_are_right(mask: Moba) -> None:
    """Of one key; of all; of more than are computed at a time, and than there are."""
    numbers = np.random.default_rng(1)
    q, k, v = (numbers.standard_normal((1, n, 2, 16)).astype(np.float32) for n in (140, 200, 200))
    problem = Problem(q, k, v, mask)
    out = jax.jit(functools.partial(ON_A_TPU, mask=mask))(q, k, v)
    assert_attention({"out": out}, problem)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"keys_together": 100}, ValueError, "keys_together must be a multiple of 128, got 100"),
        ({"backend": "gpu"}, ValueError, "backend must be 'portable' or 'tpu', got 'gpu'"),
        ({"bias": np.zeros((1, 1, 8, 8), np.float32)}, NotImplementedError, "does not support bias with backend='tpu'"),
        ({"dtype": np.float16}, NotImplementedError, "does not support q, k and v in float16"),
        ({"mask": Moba(2**16, 1)}, NotImplementedError, r"chunks of 65536 keys .*take backend='portable'"),
    ],
    ids=str,
)
def test_what_no_tpu_kernel_takes_is_named(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    options = {"mask": Moba(4, 2), **changes}
    q = jnp.zeros((1, 8, 2, 16), options.pop("dtype", np.float32))
    with pytest.raises(error, match=message):
        ON_A_TPU(q, q, q, **options)


def test_blocks_of_long_chunks_have_fewer_queries_where_vmem_is_small() -> None:
    few = MobaPlan(Moba(4096, 2), 1, 4, 1, 8192, 8192, 1.0, None, None, most_rows=512, backend="tpu")
    assert moba_tpu.fit_block_rows(few, (128, 128), 2).most_rows == 512
    assert moba_tpu.fit_block_rows(dataclasses.replace(few, moba=Moba(1024, 2)), (256, 256), 4).most_rows < 512
