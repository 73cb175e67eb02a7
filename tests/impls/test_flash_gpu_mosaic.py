"""The kernels for Hopper: when they are chosen, and their results in JAX's interpreter."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
import types
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh, PartitionSpec

from cases.accelerator_cases import select_interpreted_cases
from cases.case import Case
from cases.case_id import parse_case_id
from cases.masks import Causal, Dense, Full, Lengths, Mask, Window
from conformance.accelerators import interpreters
from conformance.checks import CHECKS_BY_NAME
from conformance.execution import implementation_registry
from conformance.fork_server.forked_process import ForkedProcess
from conformance.judging import run_plan
from conformance.judging.runner import Runner
from conformance.judging.settings import Settings
from impls import flash_gpu
from impls.flash_gpu import block_sizes, pallas_backends
from impls.flash_gpu.block_sizes import Kernel, Tiles
from impls.flash_gpu.mosaic import mosaic_launch
from impls.flash_gpu.tile_schedule import FlashGpuPlan, Operands
from impls.pallas_gpu import mosaic_tiles
from reports.records import FAIL, PASS, Record
from tests.process_helpers import COMMAND_TIMEOUT

OF_ANY = block_sizes.look_up("any", 64, 2)
CAUSAL = Causal()
LONG_RINGS = dataclasses.replace(
    block_sizes.TABLE[0].sizes, mosaic_dkv=flash_gpu.Ring(block=128, num_stages=4), mosaic_forward=flash_gpu.Ring()
)
MOSAIC, TRITON = "mosaic_gpu_v2", "__gpu$xla.gpu.triton"


@pytest.fixture(autouse=True)
def _fresh_traces() -> Iterator[None]:
    """Clear JAX's caches, so that traces with and without a planted bug are not confused."""
    jax.clear_caches()
    yield
    jax.clear_caches()


@contextlib.contextmanager
def tracing_for(kind: str) -> Iterator[None]:
    device = AbstractDevice(device_kind=kind, platform="gpu", num_cores=132)
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        yield


def kernels(
    kind: str,
    mask: Mask = CAUSAL,
    dtype: str = "bfloat16",
    depth: int = 64,
    v_depth: int | None = None,
    *,
    lowered: bool = False,
    **options: Any,
) -> list[int]:
    """Count the Mosaic and the Triton kernels of a gradient, traced or lowered for a GPU of this kind."""

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        out = flash_gpu.attention(q, k, v, mask=mask, interpret=False, **options)
        return out.astype(jnp.float32).sum()

    sizes = ((4, depth), (2, depth), (2, v_depth or depth))
    shapes = [jax.ShapeDtypeStruct((2, 200, *size), dtype) for size in sizes]
    gradients = jax.grad(loss, argnums=(0, 1, 2))
    with tracing_for(kind):
        if not lowered:
            names = set(re.findall(r"name=flash_gpu_(\w+)", str(jax.make_jaxpr(gradients)(*shapes))))
            mosaic = sum(name.startswith("mosaic_") for name in names)
            return [mosaic, len(names) - mosaic]
        exported = jax.export.export(
            jax.jit(gradients),
            platforms=["cuda"],
            disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(name) for name in (MOSAIC, TRITON)],
        )(*shapes)
    text = exported.mlir_module()
    return [text.count(f"@{MOSAIC}"), text.count(f"@{TRITON}")]


@pytest.fixture
def _measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a table in which every Mosaic kernel was measured to be correct and faster, at any depth."""
    ring = flash_gpu.Ring(preferred=True)
    sizes = dataclasses.replace(OF_ANY.sizes, mosaic_forward=ring, mosaic_dq=ring, mosaic_dkv=ring)
    entry = dataclasses.replace(OF_ANY, max_depth=256, max_itemsize=4, sizes=sizes)
    monkeypatch.setattr(block_sizes, "TABLE", (entry,))


@pytest.mark.parametrize("depth", [64, 128])
def test_what_nobody_measured_is_not_the_default(depth: int) -> None:
    assert kernels("NVIDIA H100 PCIe", depth=depth) == [0, 3]
    assert kernels("NVIDIA H100 PCIe", depth=depth, backend="mosaic") == [3, 0]


@pytest.mark.parametrize(
    ("kind", "depth"),
    [("NVIDIA H200", 64), ("NVIDIA H100 80GB HBM3", 128)],
)
def test_where_it_was_measured_it_is_the_default(kind: str, depth: int) -> None:
    assert kernels(kind, depth=depth) == [3, 0]
    assert kernels(kind, depth=192) == [0, 3]


def test_each_kernel_goes_by_its_own_measurement() -> None:
    sizes = dataclasses.replace(OF_ANY.sizes, mosaic_dkv=flash_gpu.Ring(num_stages=3, preferred=True))
    assert kernels("NVIDIA H200", block_sizes=sizes) == [1, 2]


@pytest.mark.usefixtures("_measured")
@pytest.mark.parametrize(
    ("kind", "options", "mosaic"),
    [
        ("NVIDIA H200", {}, 3),
        ("NVIDIA H100 80GB HBM3", {"mask": Window(30, 3) & Lengths((40, 200)), "soft_cap": 5.0, "dtype": "float16"}, 3),
        ("NVIDIA H200", {"depth": 192, "v_depth": 128}, 3),
        ("NVIDIA A100-SXM4-80GB", {}, 0),
        ("NVIDIA B200", {}, 0),
        ("NVIDIA H200", {"backend": "triton"}, 0),
        ("NVIDIA H200", {"dtype": "float32"}, 0),
        ("NVIDIA H200", {"mask": Dense(np.tri(200, dtype=bool))}, 0),
        ("NVIDIA H200", {"depth": 256}, 3),
    ],
)
def test_hopper_gets_its_own_kernels_where_they_were_measured_and_support_the_call(
    kind: str, options: dict[str, Any], mosaic: int
) -> None:
    assert kernels(kind, **options) == [mosaic, 3 - mosaic]  # out, dq, dk with dv


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("NVIDIA A100-SXM4-80GB", {}, "GPUs other than Hopper, which 'NVIDIA A100-SXM4-80GB' is not"),
        ("NVIDIA H200", {"dtype": "float32"}, "q, k and v in float32: it multiplies bfloat16 and float16"),
        ("NVIDIA H200", {"mask": Dense(np.tri(200, dtype=bool))}, "masks that are arrays"),
        ("NVIDIA H200", {"bias": jnp.zeros((1, 1, 200, 200))}, "bias"),
        (
            "NVIDIA H200",
            {"depth": 256, "block_sizes": dataclasses.replace(OF_ANY.sizes, mosaic_dq=flash_gpu.Ring())},
            r"head depths 256 and 256 with 2 tiles of 64 in flight \(dq\): they take 265216 bytes of shared "
            "memory, of which a block has 232448",
        ),
        ("NVIDIA H200", {"depth": 320}, "head depths 320 and 320, beyond 256"),
        (
            "NVIDIA H200",
            {"depth": 128, "block_sizes": LONG_RINGS},
            r"head depths 128 and 128 with 4 tiles of 128 in flight \(dkv\): they take 332800 bytes",
        ),
    ],
)
def test_what_it_does_not_support_it_refuses_when_forced(kind: str, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(NotImplementedError, match=f"backend='mosaic' for {reason}.*; take backend='triton' or None"):
        kernels(kind, backend="mosaic", **options)


@pytest.mark.parametrize(
    ("depths", "options"),
    [
        ((256, 256), {}),
        ((192, 128), {"mask": Lengths((40, 200))}),
        ((256, 256), {"segment_ids": (np.zeros((2, 200), np.int32),) * 2, "soft_cap": 5.0}),
    ],
    ids=["causal", "lengths", "segments"],
)
def test_deep_heads_are_served_under_every_mask(depths: tuple[int, int], options: dict[str, Any]) -> None:
    """The table's rings are made to fit: with one tile of keys in flight where there are segment ids."""
    found = kernels("NVIDIA H200", depth=depths[0], v_depth=depths[1], backend="mosaic", lowered=True, **options)
    assert found == [3, 0]


def fit(kernel: Kernel, ring: flash_gpu.Ring, depth: int, *, segmented: bool = False) -> flash_gpu.Ring:
    return pallas_backends.fit_ring(kernel, ring, depths=(depth, depth), segmented=segmented, dead_keys=segmented)


def test_a_ring_is_made_to_fit_the_call() -> None:
    """Calls without segment ids have room for larger tiles; those with them get more of the smaller ones."""
    wide = flash_gpu.Ring(block=128, num_stages=2, preferred=True)
    assert fit("forward", wide, 128) == wide
    assert fit("forward", wide, 128, segmented=True) == dataclasses.replace(wide, block=64, num_stages=4)
    ahead = dataclasses.replace(wide, persistent=True, early_copies=True, num_q_stages=2)
    assert fit("forward", ahead, 128) == ahead
    assert fit("forward", ahead, 256) == dataclasses.replace(ahead, block=64, num_stages=2, num_q_stages=1)
    deep = flash_gpu.Ring(early_copies=True, num_v_stages=1)
    assert fit("dq", deep, 256) == deep
    assert fit("dq", deep, 256, segmented=True) == dataclasses.replace(deep, num_stages=1)
    turns = flash_gpu.Ring(early_copies=True, ping_pong=True)
    uneven = pallas_backends.fit_ring("forward", turns, depths=(256, 192), segmented=True, dead_keys=True)
    assert uneven == dataclasses.replace(turns, num_v_stages=1)  # a tile of values less, before turns are given up
    assert fit("dq", flash_gpu.Ring(), 256) == deep  # early copies need fewer tiles
    one = flash_gpu.Ring(block=128, num_stages=1, early_copies=True)
    assert fit("dq", one, 64) == one


@given(
    kernel=st.sampled_from(block_sizes.KERNELS),
    block=st.sampled_from(block_sizes.RING_BLOCKS),
    stages=st.integers(2, 6),
    early=st.booleans(),
    depths=st.tuples(st.integers(1, 256), st.integers(1, 256)),
    segmented=st.booleans(),
    dead_keys=st.booleans(),
)
def test_a_fitted_ring_fits_or_is_the_old_one(
    kernel: Kernel, block: int, stages: int, early: bool, depths: tuple[int, int], segmented: bool, dead_keys: bool
) -> None:
    ring = flash_gpu.Ring(block=block, num_stages=stages, early_copies=early)
    found = pallas_backends.fit_ring(kernel, ring, depths=depths, segmented=segmented, dead_keys=dead_keys)
    misfit = functools.partial(
        pallas_backends.find_misfit, kernel, head_dim=depths[0], v_head_dim=depths[1], segmented=segmented
    )
    if misfit(ring=ring, dead_keys=dead_keys) is None:
        assert found == ring
    elif found != ring:
        assert misfit(ring=found, dead_keys=dead_keys) is None
        assert found.block <= ring.block


def test_an_entry_for_full_masks_serves_only_them(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = dataclasses.replace(OF_ANY.sizes, mosaic_forward=flash_gpu.Ring(block=128))
    of_full = dataclasses.replace(OF_ANY, sizes=sizes, full_mask=True)
    monkeypatch.setattr(block_sizes, "TABLE", (OF_ANY, of_full))
    assert block_sizes.look_up("NVIDIA H200", 64, 2, full_mask=True) is of_full
    assert block_sizes.look_up("NVIDIA H200", 64, 2) is OF_ANY
    measured = dataclasses.replace(OF_ANY, device="NVIDIA H200")
    monkeypatch.setattr(block_sizes, "TABLE", (of_full, measured))
    assert block_sizes.look_up("NVIDIA H200", 64, 2, full_mask=True) is measured


def judged(case: Case) -> dict[str, Record]:
    """Run the check `interpreter`, and return its records by observable."""
    jobs = run_plan.plan_case(
        implementation_registry.find_implementation("flash_gpu_mosaic"), case, [CHECKS_BY_NAME["interpreter"]]
    ).jobs
    return {record.observable: record for record in Runner(Settings()).run(jobs)}


@pytest.mark.long
@pytest.mark.parametrize("at_depth", [128, pytest.param(256, marks=pytest.mark.nightly)])
def test_it_is_right_in_the_interpreter_and_nothing_races(at_depth: int) -> None:
    supports = implementation_registry.find_implementation("flash_gpu_mosaic").supports
    (case,) = (case for case in select_interpreted_cases(0, supports, "gpu") if case.head_dim == at_depth)
    found = judged(case)
    names = ("out_with_residuals", "logsumexp", "max_logits", "primal", "dq", "dk", "dv", "dsinks")
    assert set(found) == {f"{name}.seed0" for name in names} | {"races.residuals", "races.gradients_lse"}
    assert {record.verdict for record in found.values()} == {PASS}


@pytest.mark.long
def test_gradients_are_right_where_every_key_is_somebodys() -> None:
    """There logits are hidden, or differences of logits, and nothing is set to zero afterwards."""
    found = judged(parse_case_id("train/bf16/B1.T128.S128.N1.K1.H64.V64/causal/normal/s0"))
    assert {"dq.seed0", "dk.seed0", "dv.seed0"} <= set(found)
    assert {record.verdict for record in found.values()} == {PASS}


def judges_careless(pipe: int) -> None:
    """Say whether fetching without waiting is red. Three tiles, two slots: the third comes while the first is read."""
    careless = types.SimpleNamespace(**vars(plgpu))
    careless.barrier_wait = lambda barrier: None  # only the fetching warpgroup waits there
    vars(mosaic_launch)["plgpu"] = careless
    case = parse_case_id("prefill/f16/B1.T128.S192.N1.K1.H128.V128/full/normal/s0")
    os.write(pipe, b"red" if FAIL in {record.verdict for record in judged(case).values()} else b"green")


@pytest.mark.long
def test_a_slot_filled_before_it_is_let_go_of_is_a_race() -> None:
    """Who does not wait can also be a whole round ahead: others then wait for ever, here as on a chip."""
    for _ in range(3):
        reading, writing = os.pipe()
        process = ForkedProcess(judges_careless, pass_fds=(writing,))
        os.close(writing)
        ended = process.wait(COMMAND_TIMEOUT / 3)
        process.release()
        said = os.read(reading, 8) if ended == 0 else b""
        os.close(reading)
        if said:
            assert said == b"red"
            return
    pytest.fail("it hung each time, so that nobody could say whether it races")


@pytest.mark.long
def test_what_no_query_may_attend_to_does_not_spread() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(1, 60, 1, 64)), jnp.float16) for _ in range(3))
    poisoned = [x.at[:, 40:].set(jnp.nan) for x in (k, v)]
    mask, parameters = Lengths((40,)), interpreters.build_parameters(0, "gpu")
    clean, got = (
        flash_gpu.attention(q, *x, mask=mask, backend="mosaic", interpret=parameters) for x in ((k, v), poisoned)
    )
    assert np.isfinite(np.asarray(got)).all()
    np.testing.assert_array_equal(np.asarray(got), np.asarray(clean))


def build_plan(mask: Mask, q_length: int, kv_length: int, depth: int = 64, *, segmented: bool = False) -> FlashGpuPlan:
    tiles = Tiles(block_q=64, block_kv=32)
    return FlashGpuPlan(
        mask=mask,
        num_q_heads=1,
        num_kv_heads=1,
        q_length=q_length,
        kv_length=kv_length,
        head_dim=depth,
        v_head_dim=depth,
        scale=1.0,
        soft_cap=None,
        segmented=segmented,
        exact=True,
        sizes=flash_gpu.BlockSizes(forward=tiles, dq=tiles, dkv=tiles),
        interpret=True,
    )


@pytest.mark.parametrize("segmented", [False, True])
@pytest.mark.parametrize("mask", [Causal(), Lengths((40, 200)), Causal(-100) & Lengths((150, 90)), Window(3, 0)])
def test_keys_that_nobody_attends_to_are_zeroed_at_large_depths(mask: Mask, segmented: bool) -> None:
    """Exactly those: a key that some query of its batch row attends to keeps its values."""
    q_length, kv_length, rng = 150, 200, np.random.default_rng(0)
    q_ids, kv_ids = (jnp.sort(jnp.asarray(rng.integers(0, 4, (2, n)), jnp.int32)) for n in (q_length, kv_length))
    plan = build_plan(mask, q_length, kv_length, depth=256, segmented=segmented)
    q, k = (jnp.ones((2, n, 1, 256), jnp.bfloat16) for n in (q_length, kv_length))
    known, found = mosaic_launch.zero_dead_keys(
        plan, Operands(q, k, k, None, None, (q_ids, kv_ids) if segmented else None)
    )
    i, j = np.ogrid[:q_length, :kv_length]
    allowed = np.broadcast_to(np.asarray(mask.allowed(i, j)), (2, 1, q_length, kv_length))[:, 0]
    if segmented:
        allowed = allowed & np.asarray(q_ids[:, :, None] == kv_ids[:, None, :])
    assert not known.has_dead_keys
    for x in (found.k, found.v):
        np.testing.assert_array_equal(np.asarray(x[:, :, 0, 0] != 0), allowed.any(axis=1))


@pytest.mark.parametrize(
    "mask", [Full(), Causal(), Window(95, 0), Dense(np.eye(4, dtype=bool).repeat(64, 0).repeat(64, 1))]
)
def test_the_list_of_blocks_is_that_of_the_schedule(mask: Mask) -> None:
    found = build_plan(mask, 256, 256)
    visits = found.build_visits(found.sizes.forward, "q")
    table, blocks = mosaic_launch.list_visits(visits)
    kinds = mask.blocks(256, 256, 64, 32)
    for program, (start, full, total) in enumerate(table[0, 0]):
        mine = blocks[start : start + total].tolist()
        assert sorted(mine[:full]) == np.nonzero(kinds[0, 0, program] == 2)[0].tolist()
        assert sorted(mine[full:]) == np.nonzero(kinds[0, 0, program] == 1)[0].tolist()


@pytest.mark.parametrize(("cuda", "mosaic"), [(12060, 3), (12080, 0), (12090, 0), (13000, 3)])
@pytest.mark.usefixtures("_measured")
def test_releases_of_cuda_that_miscompile_masks_are_avoided(
    monkeypatch: pytest.MonkeyPatch, cuda: int, mosaic: int
) -> None:
    monkeypatch.setattr(mosaic_tiles, "get_cuda_version", lambda: cuda)
    assert kernels("NVIDIA H200") == [mosaic, 3 - mosaic]
    assert kernels("NVIDIA H200", mask=Full()) == [3, 0]
    if not mosaic:
        with pytest.raises(NotImplementedError, match=rf"masks under CUDA 12\.{cuda % 1000 // 10}, whose `ptxas`"):
            kernels("NVIDIA H200", backend="mosaic")


def test_shards_of_a_mesh_are_differentiated(monkeypatch: pytest.MonkeyPatch) -> None:
    """`shard_map` demands that gradients differ over the mesh axes that the operands differ over."""
    monkeypatch.setattr(pallas_backends, "get_device_kind", lambda platform: "NVIDIA H200")
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=PartitionSpec("x"), out_specs=PartitionSpec("x"))
    def sharded(q: jax.Array) -> Any:
        return flash_gpu.attention(q, q, q, mask=Causal(), save_residuals=True, backend="mosaic", interpret=False)

    def loss(q: jax.Array) -> jax.Array:
        out, residuals = sharded(q)
        return out.astype(jnp.float32).sum() + residuals["logsumexp"].sum()

    text = str(jax.make_jaxpr(jax.grad(loss))(jax.ShapeDtypeStruct((2, 100, 2, 64), jnp.bfloat16)))
    assert all(f"flash_gpu_mosaic_{kernel}" in text for kernel in ("forward", "dq", "dkv"))


@pytest.mark.parametrize("ring", [flash_gpu.Ring(), flash_gpu.Ring(ping_pong=True, persistent=True)], ids=["", "both"])
def test_it_lowers_under_x64(ring: flash_gpu.Ring) -> None:
    sizes = dataclasses.replace(block_sizes.TABLE[0].sizes, mosaic_forward=ring)
    with jax.enable_x64(True):
        options: dict[str, Any] = {"mask": Window(30, 3), "soft_cap": 5.0, "block_sizes": sizes}
        found = kernels("NVIDIA H200", backend="mosaic", lowered=True, **options)
    assert found == [3, 0]


def test_a_persistent_kernel_has_a_program_for_each_multiprocessor() -> None:
    sizes = dataclasses.replace(OF_ANY.sizes, mosaic_forward=flash_gpu.Ring(persistent=True))
    call = functools.partial(flash_gpu.attention, mask=CAUSAL, backend="mosaic", interpret=False, block_sizes=sizes)
    with tracing_for("NVIDIA H200"):
        for length, programs in ((128 * 50, 132), (128 * 10, 40)):  # of four heads
            x = jax.ShapeDtypeStruct((1, length, 4, 64), "bfloat16")
            assert f"grid=({programs},)" in str(jax.make_jaxpr(call)(x, x, x))
