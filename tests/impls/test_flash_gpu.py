"""Flash attention for GPUs beyond the checks of every kernel: schedule, last blocks, back ends, lowering."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, PartitionSpec

from cases.case_id import parse_case_id
from cases.masks import Bidirectional, Causal, Chunked, Dense, Full, Lengths, LoadBalancedCausal, Mask, Window
from cases.operand_values import draw_cotangent, draw_problem
from impls import flash_gpu
from impls.flash_gpu import tile_schedule
from impls.flash_gpu.block_sizes import TABLE, BlockSizes, Tiles, look_up
from impls.flash_gpu.implementation import build_uniform_sizes
from impls.flash_gpu.tile_schedule import BlockKind, FlashGpuPlan
from tests.comparison_asserts import assert_attention
from tests.impls.test_attention import check, compiled, operands, run

JOINT = (
    "train/{}/B2.T50.S70.N4.K2.H24.V40/densebatch-d40_and_window-l40-r60/seg/softcap5/sinks/biashead/scale0.3/normal/s1"
)
LOWERING = "__gpu$xla.gpu.triton"


def small(block_q: int = 16, block_kv: int = 32, **options: Any) -> Any:
    return flash_gpu.build_implementation(
        "small", block_sizes=build_uniform_sizes(block_q, block_kv), on_gpu=False, **options
    )


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_all_features_together_match_the_oracle(dtype: str) -> None:
    check(small(), JOINT.format(dtype))


@pytest.mark.parametrize("products", ["exact", "tf32"])
def test_a_head_depth_beyond_one_tile_of_sixteen(products: Any) -> None:
    check(small(products=products), "train/f32/B1.T33.S65.N2.K1.H100.V256/causal-o32/normal/s1")


def plan(mask: Mask, length: int, block: int = 128, **changes: Any) -> FlashGpuPlan:
    given: dict[str, Any] = {
        "mask": mask,
        "num_q_heads": 2,
        "num_kv_heads": 1,
        "q_length": length,
        "kv_length": length,
        "head_dim": 64,
        "v_head_dim": 64,
        "scale": 1.0,
        "soft_cap": None,
        "segmented": False,
        "exact": True,
        "sizes": build_uniform_sizes(block, block),
        "interpret": True,
    }
    return FlashGpuPlan(**{**given, **changes})


def visited(found: FlashGpuPlan, axis: Any = "q") -> dict[str, int]:
    visits = found.build_visits(found.sizes.forward, axis)
    return {"full": int(visits.table[..., 1].sum()), "partial": int(visits.table[..., 3].sum())}


@pytest.mark.long
def test_a_window_visits_a_number_of_blocks_that_is_linear_in_the_length() -> None:
    length, block, left = 32768, 256, 1023
    found = plan(Window(left, 0), length, block)
    rows = np.arange(length // block)
    # Keys from the first query's leftmost to the last query's own.
    first = np.maximum(rows * block - left, 0) // block
    holding_a_pair = (rows - first + 1).sum()
    for axis in ("q", "kv"):
        assert sum(visited(found, axis).values()) == holding_a_pair
    assert holding_a_pair < 6 * len(rows)


@pytest.mark.parametrize(
    ("mask", "full", "partial"),
    [
        (Full(), 16, 0),
        (Causal(), 6, 4),
        (Window(31, 0), 0, 7),
        (Dense(np.kron(np.eye(4, dtype=bool), np.ones((32, 32), bool))), 4, 0),
        (Lengths((0, 40)), 4, 4),
    ],
    ids=repr,
)
def test_full_blocks_are_not_masked_and_empty_ones_not_visited(mask: Mask, full: int, partial: int) -> None:
    found = plan(mask, 128, 32)
    assert visited(found) == visited(found, "kv") == {"full": full, "partial": partial}
    assert set(found.build_visits(found.sizes.forward, "q").lists) == {
        kind for kind, count in (("full", full), ("partial", partial)) if count
    }


def test_blocks_are_listed_only_where_they_are_not_contiguous() -> None:
    def lists(mask: Mask) -> dict[str, bool]:
        found = plan(mask, 256, 32)
        return {kind: x is not None for kind, x in found.build_visits(found.sizes.forward, "q").lists.items()}

    assert lists(Causal()) == {"full": False, "partial": False}
    assert lists(Window(95, 0)) == {"full": False, "partial": True}


@pytest.mark.parametrize("axis", ["q", "kv"])
def test_every_block_of_the_mask_is_visited_once(axis: Any) -> None:
    rng = np.random.default_rng(0)
    kinds = rng.integers(0, 3, (2, 4, 4, 4))
    array = np.kron(kinds, np.ones((16, 16))).astype(int)
    array = np.where(array == 1, np.tile(np.eye(16, dtype=bool), (4, 4)), array == 2)
    found = plan(Dense(array), 64, 16, num_q_heads=4)
    visits = found.build_visits(found.sizes.forward, axis)
    kinds_of_block: tuple[tuple[int, BlockKind], ...] = ((0, "full"), (2, "partial"))
    for column, kind in kinds_of_block:
        want = kinds == {"full": 2, "partial": 1}[kind]
        want = want if axis == "q" else want.swapaxes(-1, -2)
        blocks = visits.lists[kind]
        got = np.zeros_like(want, int)
        for at in np.ndindex(got.shape[:3]):
            first, count = visits.table[at][column : column + 2]
            listed = range(first, first + count) if blocks is None else blocks[first : first + count]
            for block in listed:
                got[at][block] += 1
        np.testing.assert_array_equal(got, want.astype(int))


@pytest.mark.long
def test_nothing_beyond_the_arrays_is_read() -> None:
    """The interpreter pads with NaN what a block has beyond its array: a tile that reads it without a guard shows."""
    case = parse_case_id("train/f32/B1.T33.S41.N2.K1.H17.V19/causal-o8/seg/sinks/biashead/normal/s4")
    problem, cotangent = draw_problem(case), draw_cotangent(case)
    for block_q, block_kv in ((16, 32), (64, 64)):
        got = run(small(block_q, block_kv), problem, cotangent)
        assert all(np.isfinite(x).all() for x in got.values())
        assert_attention(got, problem, cotangent)


@pytest.mark.long
def test_memory_is_linear_in_the_length() -> None:
    def temporaries(length: int) -> int:
        def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return flash_gpu.attention(q, k, v, mask=Causal(), interpret=True).sum()

        q, k = (jax.ShapeDtypeStruct((1, length, n, 64), jnp.float32) for n in (2, 1))
        step = compiled(jax.grad(loss, argnums=(0, 1, 2)))
        return step.lower(q, k, k).compile().memory_analysis().temp_size_in_bytes

    one, two, four = (temporaries(length) for length in (1024, 2048, 4096))
    assert (four - two) / 2048 < 1.1 * (two - one) / 1024


@pytest.mark.long
def test_an_unused_gradient_of_the_bias_costs_nothing() -> None:
    case = parse_case_id("train/f32/B1.T40.S40.N2.K2.H16.V16/causal/biashead/normal/s0")
    problem = draw_problem(case)
    x = operands(problem)

    def kernels(*names: str) -> int:
        def loss(moving: dict[str, jax.Array]) -> jax.Array:
            out = small().call(**{**x, **moving}, mask=problem.mask)
            return jnp.sum(out, dtype=jnp.float32)

        moving = {name: x[name] for name in names}
        text = jax.jit(jax.grad(loss)).lower(moving).compile().as_text()
        assert text is not None
        return text.count("flash_gpu_dbias")

    assert kernels("q", "k", "v") == 0
    assert kernels("bias") > 0


def test_k_and_v_are_not_copied_to_the_query_heads() -> None:
    q, k = (jax.ShapeDtypeStruct((1, 64, n, 16), jnp.float32) for n in (8, 2))
    step = jax.vjp(functools.partial(small().call, mask=Causal()), *(jnp.zeros(x.shape) for x in (q, k, k)))[1]
    jaxpr = str(jax.make_jaxpr(step)(jnp.zeros(q.shape)))
    assert "repeat" not in jaxpr
    assert "gather" not in jaxpr


def test_under_shard_map_outputs_differ_over_the_axes_that_operands_do() -> None:
    """Traced, not run: Pallas's interpreter itself cannot be used under `check_vma=True`."""
    mesh = jax.make_mesh((1,), ("heads",), axis_types=(AxisType.Auto,))
    heads = PartitionSpec(None, None, "heads")
    call = functools.partial(flash_gpu.attention, mask=Causal(), interpret=False)
    sharded = jax.shard_map(call, mesh=mesh, in_specs=(heads, PartitionSpec(), PartitionSpec()), out_specs=heads)
    q, k = (jax.ShapeDtypeStruct((1, 64, n, 16), jnp.float32) for n in (4, 1))
    gradients = jax.eval_shape(jax.grad(lambda *x: sharded(*x).sum(), argnums=(0, 1, 2)), q, k, k)
    assert [x.shape for x in gradients] == [q.shape, k.shape, k.shape]


def test_there_is_no_third_back_end() -> None:
    x = jnp.ones((1, 8, 2, 4))
    with pytest.raises(ValueError, match="backend must be 'triton', 'mosaic' or None"):
        flash_gpu.attention(x, x, x, backend="cuda")  # type: ignore[arg-type] # the mistake tested


def test_options_are_checked() -> None:
    x = jnp.ones((1, 8, 2, 4))
    with pytest.raises(ValueError, match="block_q must be a power of two of at least 16, got 48"):
        Tiles(block_q=48, block_kv=32)
    with pytest.raises(ValueError, match="block_kv must be a power of two of at least 16, got 8"):
        Tiles(block_q=16, block_kv=8)
    with pytest.raises(ValueError, match="num_warps must be a power of two, got 3"):
        Tiles(block_q=16, block_kv=16, num_warps=3)
    with pytest.raises(ValueError, match="products must be 'exact' or 'tf32', got 'bf16'"):
        flash_gpu.attention(x, x, x, products="bf16")  # type: ignore[arg-type] # the mistake tested
    with pytest.raises(ValueError, match="mask must be a"):
        flash_gpu.attention(x, x, x, mask=np.ones((8, 8), bool))  # type: ignore[arg-type] # the mistake tested
    with pytest.raises(ValueError, match="k has head_dim 3"):
        flash_gpu.attention(x, x[..., :3], x)
    with pytest.raises(ValueError, match=r"q, k and v must have dtype float32 .* got int8"):
        flash_gpu.attention(*(x.astype(jnp.int8),) * 3)


def test_the_table_has_an_entry_for_every_depth_and_dtype() -> None:
    for depth in (1, 16, 64, 80, 128, 200, 256, 512):
        for itemsize in (2, 4):
            entry = look_up("NVIDIA H200", depth, itemsize)
            assert entry.provenance
            assert entry.max_depth >= depth
    assert len({id(entry) for entry in TABLE}) == len(TABLE)


def test_tiles_are_cut_to_short_lengths() -> None:
    sizes: BlockSizes = build_uniform_sizes(128, 64).cut_to(33, 5)
    assert (sizes.forward.block_q, sizes.forward.block_kv) == (64, 16)


MASKS = {
    "full": Full(),
    "window": Window(20, 3) & Causal(),
    "chunked": Chunked(50),
    "spans": Causal() | Bidirectional(((8, 24), (40, 99))),
    "balanced": LoadBalancedCausal(2, 200),
    "lengths": Lengths((100, 200)) & Causal(3),
    "dense": Dense(np.tri(200, 200, dtype=bool)),
}


def lowered(dtype: Any, mask: Mask, **options: Any) -> int:
    """Count the kernels of forward and gradient, lowered for CUDA with every feature; this needs no GPU."""

    def loss(x: dict[str, Any], ids: jax.Array) -> jax.Array:
        out, residuals = flash_gpu.attention(
            **x, mask=mask, segment_ids=(ids, ids), soft_cap=5.0, save_residuals=True, interpret=False, **options
        )
        return out.astype(jnp.float32).sum() + residuals["logsumexp"].sum()

    shapes = {"q": (2, 200, 4, 80), "k": (2, 200, 2, 80), "v": (2, 200, 2, 48)}
    x = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}
    x["sinks"] = jax.ShapeDtypeStruct((4,), jnp.float32)
    x["bias"] = jax.ShapeDtypeStruct((1, 4, 1, 200), jnp.float32)
    ids = jax.ShapeDtypeStruct((2, 200), jnp.int32)
    device = AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132)
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        exported = jax.export.export(
            jax.jit(jax.value_and_grad(loss)),
            platforms=["cuda"],
            disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(LOWERING)],
        )(x, ids)
    return exported.mlir_module().count(LOWERING)


@pytest.mark.parametrize("name", MASKS)
def test_every_mask_lowers_for_cuda(name: str) -> None:
    assert lowered(jnp.bfloat16, MASKS[name]) == 4  # out, dq, dk with dv, dbias


@pytest.mark.parametrize(("dtype", "products"), [("float32", "exact"), ("float32", "tf32"), ("float16", "exact")])
def test_every_dtype_lowers_for_cuda(dtype: str, products: str) -> None:
    assert lowered(dtype, Causal(), products=products) == 4


def test_dropout_lowers_for_cuda() -> None:
    key = jax.random.PRNGKey(0)
    assert lowered(jnp.bfloat16, Causal(), dropout_rate=0.1, dropout_key=key) == 4


def test_lowering_for_cuda_under_x64() -> None:
    with jax.enable_x64(True):
        assert lowered(jnp.float32, Chunked(30)) == 4


@pytest.mark.parametrize(
    "mask",
    [
        Full(),
        Causal(),
        Causal(5),
        Causal(-200),
        Window(31, 0),
        Window(3, 3),
        Chunked(40),
        Causal() & Lengths((40, 300)),
        Lengths((300, 300)),
        Window(0, 0) | Chunked(100),
    ],
    ids=str,
)
@pytest.mark.parametrize("lengths", [(300, 300), (300, 170), (170, 300)])
def test_keys_of_nobody_are_known_to_be_there(mask: Mask, lengths: tuple[int, int]) -> None:
    """They may hold NaN, so that where there are some, their rows are zeroed."""
    seen = mask.dense(*lengths).any(axis=-2)
    assert tile_schedule.has_dead_keys(mask, *lengths) == (not seen.all())
