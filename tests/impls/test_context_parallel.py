"""Context parallelism: the distribution of a sequence, the masks of devices, and results equal to one device's."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any, get_args

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _pytest.mark import ParameterSet
from hypothesis import given, settings

from cases.case_id import parse_case_id
from cases.masks import Causal, Chunked, Dense, Full, Indexer, Lengths, LoadBalancedCausal, Mask, Window
from conformance.check_api.subchecks import ALL_SUBCHECKS, Subchecks
from conformance.checks import CHECKS_BY_NAME
from conformance.judging.job import Job
from conformance.judging.runner import Runner
from conformance.judging.settings import Settings
from impls import context_parallel, dot_product
from impls.context_parallel import Layout
from impls.context_parallel.attention import Method
from impls.context_parallel.sequence_layout import TokenOrder, build_schedule, restrict_mask
from impls.contract.implementation import Implementation
from reports import records
from reports.records import RED, UNJUDGED

ORDERS = get_args(TokenOrder)
layouts = st.builds(Layout, st.integers(1, 40), st.integers(1, 5), st.sampled_from(ORDERS), st.integers(1, 3))


@settings(max_examples=15, deadline=None)  # each shape compiles
@given(layouts, st.integers(0, 1))
def test_what_is_dealt_is_collected_again(layout: Layout, axis: int) -> None:
    x = np.arange(3 * layout.length).reshape((layout.length, 3) if axis == 0 else (3, layout.length)) + 1
    dealt = np.asarray(layout.deal(x, axis))
    assert dealt.shape[axis] == layout.local * layout.devices
    np.testing.assert_array_equal(layout.collect(dealt, axis), x)


@settings(max_examples=15, deadline=None)
@given(layouts)
def test_places_say_where_what_a_device_holds_comes_from(layout: Layout) -> None:
    dealt = np.asarray(layout.deal(np.arange(layout.length) + 1, 0)).reshape(layout.devices, -1)
    for rank in range(layout.devices):
        places = layout.places(rank)
        position = places.position(np.arange(places.size))
        np.testing.assert_array_equal(dealt[rank], np.where(position < layout.length, position + 1, 0))


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_balanced_order_is_that_of_the_mask_of_this_name(devices: int) -> None:
    layout = Layout(24, devices)
    local = np.arange(layout.local)
    found = np.concatenate([layout.places(rank).position(local) for rank in range(devices)])
    np.testing.assert_array_equal(found, LoadBalancedCausal(devices, 24).compute_position(np.arange(24)))


@st.composite
def masks(draw: st.DrawFn, q_length: int, kv_length: int) -> Mask:
    batch = 2
    array = np.random.default_rng(draw(st.integers(0, 99))).random((batch, 1, q_length, kv_length)) < 0.4
    plain: list[Mask] = [
        Full(),
        Causal(draw(st.integers(-3, 9))),
        Window(draw(st.integers(0, 9)), draw(st.integers(0, 9)), draw(st.integers(-3, 3))),
        Chunked(draw(st.integers(1, 9))),
        Lengths((draw(st.integers(0, kv_length)), kv_length)),
        Dense(array),
    ]
    one, other = draw(st.sampled_from(plain)), draw(st.sampled_from(plain))
    return draw(st.sampled_from([one, one & other, one | other]))


@settings(max_examples=80, deadline=None)
@given(st.data(), layouts, layouts)
def test_the_parts_of_a_mask_are_the_mask(data: st.DataObject, queries: Layout, keys: Layout) -> None:
    keys = dataclasses.replace(keys, devices=queries.devices)
    mask = data.draw(masks(queries.length, keys.length))
    dense = mask.dense(queries.length, keys.length)
    plan = build_schedule(mask, queries, keys)
    for rank, source in np.ndindex(queries.devices, keys.devices):
        rows, columns = queries.places(rank), keys.places(source)
        i, j = rows.position(np.arange(rows.size)), columns.position(np.arange(columns.size))
        there = np.ix_(range(dense.shape[0]), range(dense.shape[1]), i[i < queries.length], j[j < keys.length])
        local = restrict_mask(mask, rows, columns).dense(rows.size, columns.size)
        shape = np.broadcast_shapes(local.shape[:2], dense.shape[:2])
        cut = np.broadcast_to(local, (*shape, *local.shape[2:]))[..., i < queries.length, :]
        np.testing.assert_array_equal(
            cut[..., j < keys.length], np.broadcast_to(dense[there], cut.shape[:2] + dense[there].shape[2:])
        )
        assert not cut[..., j >= keys.length].any()
        chosen = plan.masks[plan.table[rank][source]]
        assert (chosen is None) == (not local.any())
        assert isinstance(chosen, Full) == bool(local.all())


def test_a_causal_ring_in_balanced_order_has_three_kinds_of_steps_with_equal_work() -> None:
    layout = Layout(64, 4)
    plan = build_schedule(Causal(), layout, layout)
    assert len(plan.masks) == 3
    pairs = np.asarray([[_pairs(plan.masks[index], layout) for index in row] for row in plan.table])
    assert len(set(pairs[~np.eye(4, dtype=bool)])) == 1
    assert pairs.sum() == 64 * 65 // 2


def _pairs(mask: Mask | None, layout: Layout) -> int:
    return 0 if mask is None else int(mask.dense(layout.local, layout.local).sum())


def test_a_step_with_nothing_allowed_has_no_kernel() -> None:
    layout = Layout(64, 4, "contiguous")
    plan = build_schedule(Causal(), layout, layout)
    assert sum(mask is None for mask in plan.masks) == 1
    assert np.sum([[plan.masks[i] is None for i in row] for row in plan.table]) == 6
    called = []

    def counted(*args: Any, **options: Any) -> Any:
        called.append(options["mask"])
        return dot_product.attention(*args, **options)

    q = jnp.ones((1, 64, 1, 4))
    call = functools.partial(context_parallel.attention, mask=Causal(), kernel=counted, order="contiguous")
    jax.eval_shape(call, q, q, q)
    assert len({id(mask) for mask in called}) == 2  # the diagonal and the full block, whatever the devices


# Every operand.
FEW = ("train/f32/B2.T48.S48.N4.K2.H16.V24/causal/seg/softcap5/sinks/bias/scale0.3/normal/s1",)
# A window and a chunk that leave steps empty, and lengths that the devices do not divide; rows without keys, and a
# batch row without any; one query.
MORE = (
    "train/bf16/B1.T50.S70.N2.K2.H16.V16/window-l9-r0-o20/segpad/sinks/normal/s2",
    "train/f32/B2.T48.S48.N2.K1.H16.V16/chunked-13/biaskey/normal/s3",
    "train/f32/B3.T50.S70.N2.K2.H16.V16/causal-o20_and_lengths-0-33-70/sinks/normal/s4",
    "train/f32/B1.T50.S50.N4.K2.H16.V16/densehead-d40/biashead/dominant/s5",
    "train/f16/B1.T64.S64.N2.K2.H16.V16/causal/huge/s6",
    "train/bf16/B1.T64.S64.N4.K2.H16.V8/balanced-2/softcap2/knee/s7",
    "decode/f32/B2.T1.S70.N4.K1.H16.V16/lengths-33-70/sinks/normal/s8",
)
JUDGED = {impl.name: impl for impl in context_parallel.IMPLEMENTATIONS}


# One of the two calls differentiated, that with everything in it: the rest costs no compilation.
ONE_CALL = Subchecks(pullbacks=("residuals",))


def red(impl: Implementation, case_id: str, *checks: str, selection: Subchecks = ALL_SUBCHECKS) -> list[records.Record]:
    chosen = tuple(CHECKS_BY_NAME[name] for name in checks)
    found = Runner(Settings()).judge(Job(impl, parse_case_id(case_id), chosen, selection))
    assert any(record.verdict == records.PASS for record in found)
    return [record for record in found if record.verdict in RED]


GRID = ("forward", "residuals", "gradients", "gradients_lse", "gradients_part", "poison", "independence")


@pytest.mark.parametrize("name", JUDGED)
@pytest.mark.parametrize("case_id", FEW)
def test_results_and_gradients_are_right(name: str, case_id: str) -> None:
    assert red(JUDGED[name], case_id, *GRID, selection=ONE_CALL) == []


def _in_turn() -> list[ParameterSet]:
    """Each case with one of the two in turn for the bank, and with the other at night."""
    supported = [
        pair for pair in itertools.product(MORE, JUDGED) if not JUDGED[pair[1]].supports(parse_case_id(pair[0]))
    ]
    pairs = enumerate(supported)
    marks = (pytest.mark.bank, pytest.mark.nightly)
    return [pytest.param(*pair, marks=marks[(number // 2 + number) % 2]) for number, pair in pairs]


@pytest.mark.parametrize(("case_id", "name"), _in_turn())
def test_results_and_gradients_are_right_on_more_cases(name: str, case_id: str) -> None:
    assert red(JUDGED[name], case_id, *GRID, selection=ONE_CALL) == []


@pytest.mark.bank
@pytest.mark.parametrize("name", JUDGED)
@pytest.mark.parametrize(
    "check", ["memory", pytest.param("transforms", marks=pytest.mark.nightly), "invariance", "errors"]
)
def test_the_other_checks_of_the_gate_pass(name: str, check: str) -> None:
    case = "train/f32/B1.T128.S128.N2.K2.H64.V64/full/normal/s0" if check in ("memory", "errors") else FEW[0]
    assert red(JUDGED[name], case, check) == []


@pytest.mark.bank
@pytest.mark.parametrize(("name", "dtype"), list(zip(JUDGED, ["bf16", "f16"] * 2, strict=True)))
def test_what_several_devices_find_for_a_key_is_added_up_in_f32(name: str, dtype: str) -> None:
    assert red(JUDGED[name], f"train/{dtype}/B1.T128.S512.N8.K1.H64.V64/full/normal/s0", "ensemble") == []


@pytest.mark.parametrize("method", ["ulysses", "usp"])
def test_query_heads_that_the_devices_do_not_divide_are_refused(method: Method) -> None:
    q = jnp.ones((1, 16, 3, 4))
    with pytest.raises(NotImplementedError, match="multiple of the 2 devices"):
        jax.eval_shape(functools.partial(context_parallel.attention, method=method, devices=2), q, q, q)


def test_groups_that_do_not_divide_the_devices_are_refused() -> None:
    q = jnp.ones((1, 16, 4, 4))
    with pytest.raises(ValueError, match="multiple of group"):
        context_parallel.attention(q, q, q, method="usp", devices=3)


def test_too_few_devices_are_shown_as_unjudged() -> None:
    many = context_parallel.build_implementation("many", dot_product.IMPLEMENTATIONS[0], "ring", devices=64)
    (record,) = Runner(Settings()).judge(Job(many, parse_case_id(FEW[0]), (CHECKS_BY_NAME["forward"],)))
    assert record.verdict == UNJUDGED
    assert "64 devices are needed" in record.reason
    assert "--xla_force_host_platform_device_count=64" in record.reason


def test_what_cannot_be_shared_is_refused_by_name() -> None:
    q = jnp.ones((1, 8, 1, 4))
    with pytest.raises(NotImplementedError, match="indexer"):
        context_parallel.attention(q, q, q, mask=Indexer(np.ones((1, 1, 8, 8), bool)))
    with pytest.raises(ValueError, match="method must be one of"):
        context_parallel.attention(q, q, q, method="tree")  # type: ignore[arg-type]  # on purpose
    with pytest.raises(ValueError, match="devices must be at most the number of devices, got 99"):
        context_parallel.attention(q, q, q, devices=99)
    silent = dataclasses.replace(dot_product.IMPLEMENTATIONS[0], differentiable_residuals=frozenset())
    with pytest.raises(ValueError, match="must return max_logits and a differentiable logsumexp"):
        context_parallel.build_implementation("x", silent, "ring")


def test_inside_another_shard_map_the_call_says_what_to_do() -> None:
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("x")
    call = jax.shard_map(lambda q: context_parallel.attention(q, q, q), mesh=mesh, in_specs=spec, out_specs=spec)
    with pytest.raises(NotImplementedError, match="inside another one call ring or all_gather"):
        jax.eval_shape(call, jnp.ones((2, 8, 1, 4)))
