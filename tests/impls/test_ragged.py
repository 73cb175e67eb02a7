"""Decode attention beyond the checks of every kernel: work by length, positions, decoding, refusals."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections import Counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, PartitionSpec

from cases.case_id import parse_case_id
from cases.masks import Causal, Chunked, Dense, Full, Indexer, Lengths, LoadBalancedCausal, Mask, OwnWindow, Window
from cases.operand_values import Problem as Operands
from cases.operand_values import draw_problem
from conformance.truth.rounding_bounds import compute_expectation
from impls import ragged
from impls.ragged import ragged_tpu
from impls.ragged.attention import Backend
from impls.ragged.ragged_plan import Operands as Arrays
from impls.ragged.ragged_plan import RaggedPlan, find_block_range, find_key_range, flatten_queries, lower_lengths
from impls.ragged.ragged_tpu import RaggedSteps, build_steps
from impls.softmax_merge import Part
from tests.comparison_asserts import assert_attention, assert_right

OPTIONS: dict[Backend, dict[str, Any]] = {
    "portable": {"block_kv": 16},
    "tpu": {"block_kv": 16},
    "gpu": {"block_kv": 16, "num_splits": 2},
}
IMPLEMENTATIONS = {implementation.name: implementation for implementation in ragged.IMPLEMENTATIONS}


EVERY = Full()


class Traffic(NamedTuple):
    """Work of a schedule for one group of heads: steps, computed blocks, and blocks fetched to VMEM."""

    steps: int
    computed: int
    fetched: int


def traffic(steps: RaggedSteps) -> Traffic:
    """Count the work from the lists. A block is fetched when it differs from that of the step before."""
    total = int(steps.total)
    blocks = list(zip(steps.kv_row[:total].tolist(), steps.kv_block[:total].tolist(), strict=True))
    fetched = sum(number == 0 or block != blocks[number - 1] for number, block in enumerate(blocks))
    return Traffic(total, int(steps.blocks.sum()), fetched)


def fixed(kv_length: int, mask: Mask = EVERY, q_length: int = 1, group: int = 1) -> RaggedPlan:
    return RaggedPlan(mask=mask, q_length=q_length, group=group, kv_length=kv_length, scale=1.0, soft_cap=None)


def int32(*values: int) -> jax.Array:
    return jnp.asarray(values, jnp.int32)


@pytest.mark.long
@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 50), min_size=4, max_size=4), st.sampled_from([1, 7, 16, 50]))
def test_blocks_follow_the_lengths_and_not_the_size_of_the_cache(lengths: list[int], block: int) -> None:
    steps = build_steps(fixed(50), int32(*lengths), int32(0, 0, 0, 0), block)
    blocks = [-(-length // block) for length in lengths]
    found = traffic(steps)
    assert found.computed == sum(blocks)
    assert found.fetched == max(1, sum(blocks))
    assert found.steps == sum(max(1, n) for n in blocks)
    rows = steps.row[: found.steps].tolist()
    assert rows == [row for row, n in enumerate(blocks) for _ in range(max(1, n))]
    wanted = [(row, number) for row, n in enumerate(blocks) for number in range(n)]
    pointed = zip(steps.kv_row[: found.steps].tolist(), steps.kv_block[: found.steps].tolist(), strict=True)
    assert list(dict.fromkeys(pointed)) == (wanted or [(0, 0)])


@pytest.mark.parametrize(
    ("mask", "blocks"),
    [
        (Window(31, 0), [0, 1, 2, 3]),  # keys 0..0, 0..19, 69..100
        (Chunked(40), [0, 1, 2, 2]),  # keys 80..100
        (Causal(), [0, 1, 2, 7]),
        (Causal(-40), [0, 0, 0, 4]),
        (Window(31, 0) & Chunked(40), [0, 1, 2, 2]),
    ],
    ids=repr,
)
def test_blocks_before_a_window_are_left_out_as_well(mask: Mask, blocks: list[int]) -> None:
    lengths, positions = int32(0, 1, 20, 128), int32(5, 0, 19, 100)
    steps = build_steps(fixed(128, mask), lengths, positions, 16)
    assert steps.blocks.tolist() == blocks
    assert traffic(steps).computed == sum(blocks)


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from([Full(), Causal(), Window(3, 0), Window(None, 2), Chunked(5), Window(4, 1) & Chunked(6)]),
    st.integers(-3, 20),
    st.integers(0, 16),
    st.integers(1, 3),
)
def test_the_run_of_keys_is_what_the_mask_allows(mask: Mask, position: int, length: int, queries: int) -> None:
    plan = fixed(16, mask, queries)
    i, j = position + np.arange(queries)[:, None] + 100 * 30, np.arange(16)[None, :] + 100 * 30  # `allowed` from 0 on
    want = np.asarray(mask.allowed(i, j)) & (np.arange(16) < length)
    runs = [find_key_range(plan, jnp.int32(length), jnp.int32(position + t)) for t in range(queries)]
    got = np.array([(np.arange(16) >= int(low)) & (np.arange(16) < int(high)) for low, high in runs])
    np.testing.assert_array_equal(got, want)
    first, count = find_block_range(plan, int32(length), int32(position), 4)
    hit = np.flatnonzero(want.any(axis=0)) // 4
    assert set(hit) <= set(range(int(first[0]), int(first[0] + count[0])))
    assert len(hit) == 0 or (int(first[0]), int(first[0] + count[0]) - 1) == (hit[0], hit[-1])


def arrays(batch: int, kv_length: int, q_length: int = 1, heads: tuple[int, int] = (4, 2)) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    shapes = {"q": (batch, q_length, heads[0], 16), "k": (batch, kv_length, heads[1], 16)}
    shapes["v"] = (batch, kv_length, heads[1], 24)
    return {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}


@pytest.mark.long
def test_the_interpreter_fetches_and_computes_what_the_schedule_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted where the TPU interpreter copies blocks, and where the kernel reads them."""
    module = importlib.import_module("jax._src.pallas.mosaic.interpret.interpret_pallas_call")
    fetched: list[tuple[str, tuple[int, ...]]] = []
    shapes_read: Counter[tuple[int, ...]] = Counter()
    get = module.get

    def counting(*args: Any, input_name: str | None = None, **options: Any) -> Any:
        token, value = get(*args, input_name=input_name, **options)
        if input_name is None:
            shapes_read[np.shape(value)] += 1
        else:
            fetched.append((input_name, tuple(int(n) for n in args[6])))
        return token, value

    monkeypatch.setattr(module, "get", counting)
    lengths = [0, 17, 0, 0, 1, 64, 16, 0]
    x = arrays(len(lengths), 70)
    options: dict[str, Any] = {"backend": "tpu", "block_kv": 16, "interpret": pltpu.InterpretParams()}
    q, k, v = (np.asarray(x[name]) for name in "qkv")
    problem = Operands(q, k, v, mask=Lengths(tuple(lengths)))
    assert_attention({"out": ragged.attention(**x, lengths=int32(*lengths), **options)}, problem)
    expected = traffic(build_steps(fixed(70), int32(*lengths), int32(*(0 for _ in lengths)), 16))
    blocks = [(row, 0, number, 0) for row, length in enumerate(lengths) for number in range(-(-length // 16))]
    assert expected.computed == expected.fetched == len(blocks) == 8  # and not 8 rows of 5 blocks
    for name in ("k_ref", "v_ref"):
        assert [at for who, at in fetched if who == name] == blocks
    heads = k.shape[2]  # each is read by itself
    assert shapes_read[16, 16] == shapes_read[16, 24] == heads * expected.computed


def per_row(mask: Mask, lengths: list[int], positions: list[int], queries: int, kv_length: int) -> Dense:
    """Compute what each batch row sees, as booleans."""
    rows = []
    for length, position in zip(lengths, positions, strict=True):
        i, j = position + np.arange(queries)[:, None], np.arange(kv_length)[None, :]
        rows.append(np.asarray(mask.allowed(i, j)) & (j < length))
    return Dense(np.stack(rows)[:, None])


@pytest.mark.long
@pytest.mark.parametrize("backend", OPTIONS)
@pytest.mark.parametrize("mask", [Window(20, 0), Chunked(24) & Window(30, 2)], ids=repr)
def test_a_window_moves_with_the_position_of_each_sequence(backend: Backend, mask: Mask) -> None:
    problem = draw_problem(parse_case_id("prefill/f32/B4.T3.S70.N4.K2.H16.V24/full/softcap20/sinks/normal/s1"))
    lengths, positions = [5, 70, 33, 16], [2, 67, 30, 13]
    rows = dataclasses.replace(problem, mask=per_row(mask, lengths, positions, 3, 70))
    truth = compute_expectation(rows, IMPLEMENTATIONS["ragged"].arithmetic).forward
    behind = np.array(lengths)[:, None] <= np.arange(70)
    k, v = (np.where(behind[..., None, None], np.nan, x) for x in (problem.k, problem.v))
    out, residuals = ragged.attention(
        jnp.asarray(problem.q),
        jnp.asarray(k),
        jnp.asarray(v),
        mask=mask,
        lengths=int32(*lengths),
        positions=int32(*positions),
        soft_cap=20.0,
        sinks=sinks_of(problem),
        save_residuals=True,
        backend=backend,
        **OPTIONS[backend],
    )
    assert_right({"out": out, **residuals}, truth)


def sinks_of(problem: Operands) -> jax.Array:
    assert problem.sinks is not None
    return jnp.asarray(problem.sinks)


@pytest.mark.parametrize("backend", OPTIONS)
def test_the_part_of_an_empty_cache_is_nothing(backend: Backend) -> None:
    x = arrays(2, 40)
    found = ragged.compute_parts(**x, lengths=int32(0, 40), backend=backend, **OPTIONS[backend])
    assert not np.asarray(found.out[0]).any()
    assert not np.asarray(found.sum[0]).any()
    assert (np.asarray(found.max[0]) == -np.inf).all()
    assert [a.dtype for a in found] == [jnp.float32] * 3
    assert [a.shape for a in found] == [(2, 1, 4, 24), (2, 1, 4, 1), (2, 1, 4, 1)]


def test_a_cache_with_heads_first_is_used_as_it_is() -> None:
    x = arrays(2, 40)
    given = Arrays(flatten_queries(x["q"], 2), x["k"], x["v"], int32(40, 3), int32(0, 0))
    plan = fixed(40, group=2)
    run = functools.partial(ragged_tpu.attend, plan, block_kv=16, interpret=True)
    turned = given._replace(k=x["k"].swapaxes(1, 2), v=x["v"].swapaxes(1, 2))
    for one, other in zip(run(operands=given), run(operands=turned, heads_first=True), strict=True):
        np.testing.assert_array_equal(one, other)
    jaxpr = jax.make_jaxpr(functools.partial(run, heads_first=True))(operands=turned)
    assert "transpose" not in {equation.primitive.name for equation in jaxpr.eqns}


def test_lengths_that_are_traced_are_clipped_to_the_cache() -> None:
    x = arrays(2, 40)
    call = jax.jit(lambda lengths: ragged.attention(**x, lengths=lengths))
    np.testing.assert_array_equal(call(int32(-3, 99)), call(int32(0, 40)))


def test_one_program_decodes_at_every_position() -> None:
    """Offsets and lengths are arrays, so that masks which differ only in them have one static form."""
    forms = [lower_lengths(Causal(n) & Window(7, 0, n) & Lengths((n + 1, 1)), 2, 50)[0] for n in (3, 49)]
    assert forms[0] == forms[1] == Causal() & Window(7, 0)
    assert lower_lengths(Causal(3) & Window(7, 0, 5), 1, 50)[0] == Causal(3) & Window(7, 0, 5)


def test_what_is_not_one_run_of_keys_is_refused() -> None:
    x = arrays(1, 40, q_length=4)
    dense = np.ones((4, 40), bool)
    for mask in (Dense(dense), Indexer(dense), Causal() | Window(3, 0), LoadBalancedCausal(1, 4)):
        with pytest.raises(NotImplementedError, match=f"does not support {type(mask).__name__} masks"):
            ragged.attention(**x, mask=mask)


def test_a_window_of_each_sequence_has_one_place_and_no_other_mask_beside_it() -> None:
    x = arrays(2, 40)
    assert lower_lengths(OwnWindow(7, (3, 29)) & Lengths((4, 30)), 2, 40)[0] == Window(7, 0)
    with pytest.raises(NotImplementedError, match="own_window combined with another mask"):
        ragged.attention(**x, mask=OwnWindow(7, (3, 29)) & Causal(39))
    with pytest.raises(ValueError, match="the mask must have 2 positions, one for each batch row, got 1"):
        ragged.attention(**x, mask=OwnWindow(7, (3,)))


def test_operands_that_are_not_supported_are_refused() -> None:
    x = arrays(1, 40)
    with pytest.raises(NotImplementedError, match="does not support segment_ids"):
        ragged.attention(**x, segment_ids=(jnp.zeros((1, 1), jnp.int32), jnp.zeros((1, 40), jnp.int32)))
    with pytest.raises(NotImplementedError, match="does not support bias"):
        ragged.attention(**x, bias=jnp.zeros((1, 1, 1, 40)))
    with pytest.raises(NotImplementedError, match="in float16 with backend 'tpu'"):
        ragged.attention(**{name: a.astype(jnp.float16) for name, a in x.items()}, backend="tpu")
    with pytest.raises(NotImplementedError, match=r"2000 rows .* cut the queries in chunks"):
        ragged.attention(**arrays(1, 40, q_length=1000), backend="tpu")
    for differentiate in (jax.grad, jax.jacfwd):
        with pytest.raises(NotImplementedError, match="does not support train"):
            differentiate(lambda q: ragged.attention(q, x["k"], x["v"]).sum())(x["q"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": int32(1, 2)}, r"lengths must have shape \(1,\), one a batch row, got \(2,\)"),
        ({"lengths": int32(41)}, r"lengths must be in 0..40, the size of the cache, got \[41\]"),
        ({"lengths": int32(-1)}, r"lengths must be in 0..40"),
        ({"lengths": jnp.ones(1)}, "lengths must be integers, got float32"),
        ({"positions": int32(1, 2)}, "positions must have shape"),
        ({"mask": Lengths((41,))}, "mask lengths must be at most the key length 40"),
        ({"backend": "cuda"}, "backend must be one of portable, tpu, gpu"),
        ({"backend": "tpu", "block_kv": 12}, "block_kv must be a positive multiple of 8"),
        ({"backend": "gpu", "block_kv": 48}, "block_kv must be a power of two"),
        ({"backend": "mosaic", "block_kv": 128}, "block_kv must be 64 for backend 'mosaic'"),
        ({"block_kv": 0}, "block_kv must be a positive multiple of 1"),
        ({"num_splits": 0}, "num_splits must be positive"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ragged.attention(**arrays(1, 40), **options)


@pytest.mark.parametrize("backend", ["portable", "gpu"])
def test_under_shard_map_outputs_differ_over_the_axes_that_operands_do(backend: Backend) -> None:
    mesh = jax.make_mesh((1,), ("heads",), axis_types=(AxisType.Auto,))
    heads = PartitionSpec(None, None, "heads")
    call = functools.partial(ragged.attention, backend=backend, interpret=False)
    sharded = jax.shard_map(call, mesh=mesh, in_specs=(heads, heads, heads), out_specs=heads)
    x = arrays(1, 40)
    assert jax.eval_shape(sharded, x["q"], x["k"], x["v"]).shape == (1, 1, 4, 24)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
@pytest.mark.parametrize("mask", [Full(), Chunked(30)], ids=repr)
def test_the_gpu_kernel_lowers_for_cuda(dtype: str, mask: Mask) -> None:
    def call(q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array, sinks: jax.Array) -> Any:
        options: dict[str, Any] = {
            "mask": mask,
            "lengths": lengths,
            "positions": lengths - 2,
            "sinks": sinks,
            "soft_cap": 5.0,
        }
        return ragged.attention(q, k, v, **options, backend="gpu", interpret=False)

    shapes = [(2, 2, 8, 80), (2, 200, 2, 80), (2, 200, 2, 48)]
    x = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape in shapes]
    x += [jax.ShapeDtypeStruct((2,), jnp.int32), jax.ShapeDtypeStruct((8,), jnp.float32)]
    device = AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132)
    target = "__gpu$xla.gpu.triton"
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        exported = jax.export.export(
            jax.jit(call), platforms=["cuda"], disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(target)]
        )(*x)
    assert exported.mlir_module().count(target) == 1


def test_heads_share_a_step_as_far_as_vmem_goes() -> None:
    assert ragged_tpu.choose_num_heads(8, 8, 512, (128, 128), 2) in (1, 2, 4, 8)
    assert ragged_tpu.choose_num_heads(32, 8, 128, (128, 128), 2) > 4
    assert ragged_tpu.choose_num_heads(7, 1024, 512, (256, 256), 4) == 1


def test_each_core_that_shares_a_call_has_some_of_the_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    together = functools.partial(ragged_tpu.choose_num_heads, rows=8, block=512, depths=(128, 128), itemsize=2)
    assert together(8) == 8
    monkeypatch.setattr(ragged_tpu, "count_tpu_cores", lambda: 2)
    assert together(8) == 4
    assert together(1) == 1


def test_parts_are_named_tuples_of_the_contract() -> None:
    assert Part._fields == ("out", "max", "sum")
