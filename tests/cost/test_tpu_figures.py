"""Cycles of whole calls of TPU kernels: simulated scalar code, scalar operands, and HBM traffic."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from cases.case_id import parse_case_id
from cases.masks import Causal, Full
from conformance import environment
from conformance.accelerators import compilation
from conformance.accelerators.targets import TPU, list_targets
from conformance.accelerators.tpus import TPUS, Tpu
from conformance.cost.tpu import pallas_calls, scalar_unit, tpu_figures
from conformance.cost.tpu.pallas_calls import PallasCall, lay_out_words
from conformance.cost.tpu.scalar_unit import UnknownPath, parse_instructions, run_schedule
from conformance.cost.tpu.tpu_schedule import parse_schedule
from conformance.execution.executor import Executor
from conformance.execution.implementation_registry import find_implementation
from conformance.executor_tasks import native_compilation
from impls.splash_tpu.attention import attention
from impls.splash_tpu.splash_plan import BlockSizes
from tests.cost.test_tpu_schedule import UNITS

# A grid of six steps, a list for which says which of two blocks runs, and none for 0. Bundles 8 to 10 are one block,
# 14 to 18 the other. The bundle after a branch runs whichever way it goes.
KERNEL = [
    "%s1_s0 = inlined_call_operand.vmem [shape: s8[6], index: 0, kind: input, shape index: {}] ;; %s9_s9 = smov 0",
    "%s2_s1 = sshll.u32 %s1_s0, 4  ;;  %s3_s1 = int_to_ptr.vmem [resolvable:$true] %s2_s1 /* a } comment */",
    "%7 = dma.vmem_to_smem /*vmem=*/%s3_s1, /*size_in_granules=*/16, /*smem=*/[#allocation6], /*sync=*/[#allocation5]",
    "%s4_s4 = sphi %s9_s9, %s8_s4 /* phi */  ;;  %s5_s5 = sshra.s32 %s4_s4, 7  ;;  %s6_s6 = sand.u32 127, %s4_s4",
    "%s11_s1 = sadd.s32 %s5_s5, %s6_s6  ;;  %v1_v1 = vld [vmem:[#allocation2] sm:$0xff]",
    "%s12_s1 = sld [smem:[#allocation6 + %s11_s1]]  ;;  %1 = sst [smem:[#allocation9_spill]] %s4_s4",
    "%s13_s1 = sand.u32 255, %s12_s1  ;;  %p1_p1 = scmp.ne.s32.totalorder %s13_s1, 1",
    "%2 = sbr.rel (%p1_p1) target bundleno = 12 (0xc), region = 1",
    "nop",
    "%3 = vmatmul.bf16.gmra.mxu0 %v1_v1",
    "nop",
    "nop",
    "%p2_p2 = scmp.eq.s32.totalorder %s13_s1, 2  ;;  %p3_p3 = pneg %p2_p2",
    "%4 = sbr.rel (%p3_p3) target bundleno = 19 (0x13), region = 2",
    "nop",
    "%5 = vmatmul.bf16.gmra.mxu0 %v1_v1",
    "nop",
    "nop",
    "nop",
    "%s14_s1 = sld [smem:[#allocation9_spill]]",
    "%s8_s4 = sadd.s32 1, %s14_s1",
    "%p4_p4 = scmp.ge.s32.totalorder %s8_s4, 6",
    "%6 = sbr.rel (!%p4_p4) target bundleno = 3 (0x3), region = 3",
    "nop",
]
LIST = np.array([1, 2, 0, 1, 1, 0], np.int8)
SLOW = dataclasses.replace(TPUS[0], hbm_gbps=TPUS[0].clock_ghz)  # one byte a cycle
CALL = PallasCall("kernel", (6,), {0: LIST}, 20)


def schedule(kernel: list[str]) -> tuple[str, str]:
    """The two texts of a kernel's schedule."""
    names = ["0" if at == 0 else f"{at:#x}" for at in range(len(kernel))]
    bundles = "\n".join(f" {name}  : > {{ {slots} }}" for name, slots in zip(names, kernel, strict=True))
    return bundles, UNITS + "\n".join("4 0 0" if "vmatmul" in slots else "0 0 0" for slots in kernel)


def test_a_schedule_runs_as_often_as_its_list_says() -> None:
    packed = lay_out_words(LIST, "{0:T(512)(128)(4,1)S(1)}").tolist()
    found = tpu_figures.compute_call_figures(parse_schedule(*schedule(KERNEL)), CALL, {0: packed}, SLOW)
    # Without its blocks, each of six steps takes 21 bundles less those that follow the branches' own.
    idle = 21 - 3 - 4
    assert found == {
        "call_cycles": 3 + 6 * idle + 3 * 3 + 1 * 4,
        "hbm_floor_cycles": 20,
        "steps": 6,
        "blocks": 4,
        "masked_blocks": 1,
    }


def test_a_call_takes_no_less_than_its_blocks_take_to_cross() -> None:
    packed = {0: lay_out_words(LIST, "{0:T(512)(128)(4,1)}").tolist()}
    found = tpu_figures.compute_call_figures(
        parse_schedule(*schedule(KERNEL)), dataclasses.replace(CALL, hbm_bytes=5000), packed, SLOW
    )
    assert found["call_cycles"] == found["hbm_floor_cycles"] == 5000


def test_what_is_copied_from_elsewhere_is_not_taken_for_what_was_there() -> None:
    other = "%s2_s1 = sshll.u32 %s99_s9, 4  ;;  %s3_s1 = int_to_ptr.vmem [resolvable:$true] %s2_s1"
    again = [*KERNEL[:3], other, KERNEL[2], *KERNEL[3:]]
    again[3:5] = [again[3].replace("%s2_s1", "%s20_s1").replace("%s3_s1", "%s30_s1"), again[4].replace("%s3_", "%s30_")]
    with pytest.raises(UnknownPath, match="p1_p1"):
        run_schedule([slots.replace("%7 =", "%70 =") for slots in again], {0: [0] * 128}, 1)


def test_numbers_are_of_32_bits() -> None:
    kernel = ["%s1 = sadd.s32 2147483647, 1", "%s2 = smin.u32 %s1, 5", "%s3 = smax.s32 %s1, -7"]
    kernel += ["%s4 = sshrl.u32 4294967295, 28", "%s5 = sadd.s32 %s2, %s3", "%s6 = sadd.s32 %s5, %s4"]
    kernel += ["%p1 = scmp.eq.s32.totalorder %s6, 13", "%1 = sbr.rel (%p1) target bundleno = 9", "nop", "nop"]
    assert run_schedule(kernel, {}, 0).cycles == 9


@pytest.mark.parametrize("call", [CALL, dataclasses.replace(CALL, hbm_bytes=None)], ids=["list", "bytes"])
def test_what_is_not_known_has_no_figure(call: PallasCall) -> None:
    assert tpu_figures.compute_call_figures(parse_schedule(*schedule(KERNEL)), call, {}, SLOW) == {}


def test_what_is_not_known_is_not_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnknownPath, match="depends on p1"):
        run_schedule(
            ["%s1 = spop %v1", "%p1 = scmp.ne.s32.totalorder %s1, 0", "%1 = sbr.rel (%p1) target bundleno = 0 (0)"],
            {},
            0,
        )
    monkeypatch.setattr(scalar_unit, "MAX_INSTRUCTIONS", 1000)
    with pytest.raises(UnknownPath, match="more than 1000 scalar"):
        run_schedule(["%1 = sbr.rel target bundleno = 0 (0)", "%s1 = smov 0"], {}, 1)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("%s1_s0 = smov (!%p1_p0, %s2_s0), 511", [("s1_s0", "smov", ("511",), "!p1_p0", "s2_s0")]),
        ("%s1 = sld [smem:[%s2 + $0x4]] (%p1)", [("s1", "sld", ("[smem:[%s2 + $0x4]]",), "p1", "")]),
        ("%s1 = scalar_select /*predicate=*/%p1, /*on_true=*/1, /*on_false=*/[#allocation7]",
         [("s1", "scalar_select", ("%p1", "1", "[#allocation7]"), "", "")]),
        ("%s1 = sld [smem:[#allocation0]] /* core id */", [("s1", "/* core id */", (), "", "")]),
        ("%s1 = scalar_lea.smem %s2, %s3 [#allocation4]", [("s1", "scalar_lea.smem", ("%s2", "%s3"), "", "")]),
        ("%v1 = vadd.f32 %v2, %v3  ;;  nop", []),
    ],
)  # fmt: skip
def test_instructions_are_read(text: str, expected: list[tuple[str, str, tuple[str, ...], str, str]]) -> None:
    assert [dataclasses.astuple(one) for one in parse_instructions(text)] == expected


def test_a_core_runs_its_own_part() -> None:
    kernel = ["%s1 = sld [smem:[#allocation0]] /* core id */", "%p1 = scmp.eq.s32.totalorder %s1, 1"]
    kernel += ["%1 = sbr.rel (%p1) target bundleno = 4 (0x4)", "nop", "nop"]
    assert [run_schedule(kernel, {}, 0, core).cycles for core in (0, 1)] == [5, 4]


@pytest.mark.parametrize(
    ("values", "layout", "expected"),
    [
        (np.arange(6, dtype=np.int8), "0:T(512)(128)(4,1)S(1)", {0: 0, 1: 1, 5: 5, 6: 0}),
        ((np.arange(130) % 100).astype(np.int8), "0:T(512)(128)(4,1)", {0: 28 << 8, 1: 1 + (29 << 8), 127: 27}),
        (np.arange(12, dtype=np.int8).reshape(1, 6, 2), "2,1,0:T(8,128)(4,1)", {0: 0x06040200, 128: 0x0A08}),
        (np.arange(6, dtype=np.int32), "0:T(128)S(6)", {0: 0, 5: 5}),
    ],
)  # fmt: skip
def test_lists_lie_in_scalar_memory_as_their_layout_says(
    values: np.ndarray, layout: str, expected: dict[int, int]
) -> None:
    found = lay_out_words(values, layout)
    assert {at: found[at] for at in expected} == expected


def test_an_unusual_layout_is_none_that_is_known() -> None:
    with pytest.raises(ValueError, match="innermost"):
        lay_out_words(np.zeros((2, 2), np.int32), "0,1:T(8,128)")


def visited(place: jax.Array, x: jax.Array, steps: Any = 4) -> jax.Array:
    """A kernel that visits the blocks of a list, two rows of a result each."""

    def kernel(place, x, out):  # type: ignore[no-untyped-def] # references of a kernel
        out[...] = x[...]

    block = pl.BlockSpec((8, 128), lambda step, place: (place[step], 0))
    spec = pltpu.PrefetchScalarGridSpec(num_scalar_prefetch=1, grid=(steps,), in_specs=[block], out_specs=block)
    call = pl.pallas_call(kernel, grid_spec=spec, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), name="visits")
    found: jax.Array = call(place, x)
    return found


def test_the_lists_of_a_call_are_found_through_calls_and_what_crosses_is_counted() -> None:
    places = np.array([0, 1, 1, 0], np.int32)
    traced = jax.jit(lambda x: jax.jit(visited)(jnp.asarray(places) + 1, x)).trace(jnp.zeros((64, 128)))
    (call,) = pallas_calls.find_pallas_calls(traced.jaxpr)
    assert (call.name, call.grid) == ("visits", (4,))
    np.testing.assert_array_equal(call.lists[0], places + 1)
    assert call.hbm_bytes == 2 * 3 * 8 * 128 * 4  # 0, 1 and 0 again, read and written


@pytest.mark.parametrize("space", [pl.ANY, pltpu.HBM])
def test_arrays_that_stay_in_hbm_are_no_blocks(space: Any) -> None:
    def copy(x: jax.Array, out: jax.Array, semaphore: Any) -> None:
        pltpu.make_async_copy(x, out, semaphore).start()
        pltpu.make_async_copy(x, out, semaphore).wait()

    spec, shape = pl.BlockSpec(memory_space=space), jax.ShapeDtypeStruct((64, 128), jnp.float32)
    call = pl.pallas_call(
        copy, in_specs=[spec], out_specs=spec, out_shape=shape, scratch_shapes=[pltpu.SemaphoreType.DMA(())]
    )
    (found,) = pallas_calls.find_pallas_calls(jax.jit(call).trace(shape).jaxpr)
    assert found.hbm_bytes == 0


def test_a_grid_is_known_whose_length_a_loop_finds() -> None:
    def call(x: jax.Array) -> jax.Array:
        return visited(jnp.arange(4), x, jnp.searchsorted(jnp.asarray([1, 2, 3, 5]), 3, side="right"))

    traced = jax.jit(call).trace(jnp.zeros((64, 128)))
    assert "while" in str(traced.jaxpr) or "scan" in str(traced.jaxpr)
    (found,) = pallas_calls.find_pallas_calls(traced.jaxpr)
    assert found.grid == (3,)
    assert {number: values.tolist() for number, values in found.lists.items()} == {0: 3, 1: [0, 1, 2, 3]}
    assert found.hbm_bytes == 2 * 3 * 8 * 128 * 4


def test_a_list_that_is_an_operand_is_not_known() -> None:
    traced = jax.jit(visited).trace(jnp.zeros(4, jnp.int32), jnp.zeros((64, 128)))
    (call,) = pallas_calls.find_pallas_calls(traced.jaxpr)
    assert (dict(call.lists), call.hbm_bytes) == ({}, None)


def test_the_bandwidth_of_a_generation_is_in_its_own_cycles() -> None:
    assert {tpu.name: round(tpu.bytes_a_cycle) for tpu in TPUS} == {
        "v4": 1144, "v5e": 545, "v5p": 1579, "v6e": 935, "7x": 1677,
    }  # fmt: skip


@pytest.mark.skipif(TPU.missing is not None, reason=str(TPU.missing))
@pytest.mark.skipif(environment.find_schedule_folder() is None, reason="libtpu is not asked to write schedules")
@pytest.mark.parametrize("tpu", TPUS, ids=lambda tpu: tpu.name)
def test_a_call_is_what_its_blocks_and_steps_are(tpu: Tpu) -> None:
    """Causal, of two heads: 6 of 16 pairs of blocks are full, 4 are cut by the diagonal, no other is visited."""
    (target,) = (target for target in list_targets("tpu") if target.name == tpu.name)
    sizes = BlockSizes.uniform(512, 512)
    found = {}
    for mask in (Causal(), Full()):
        call = functools.partial(attention, mask=mask, block_sizes=sizes, interpret=False)
        operand = jax.ShapeDtypeStruct((1, 2048, 2, 128), jnp.bfloat16)
        figures = compilation.compile_for(target, jax.jit(call), (operand,) * 3)
        found[type(mask)] = {name.partition(".")[2]: value for name, value in figures.items() if "splash" in name}
    causal, full = found[Causal], found[Full]
    # The longest are the 12 that are not cut: of those that are, the hidden parts are left out.
    assert (causal["steps"], causal["blocks"], causal["masked_blocks"]) == (20, 20, 12)
    assert (full["steps"], full["blocks"]) == (32, 32)
    blocks = 8 * causal["full_block_cycles"] + 12 * causal["masked_block_cycles"]
    work = (blocks + 20 * causal["step_cycles"]) / tpu.cores
    assert work < causal["call_cycles"] < 1.3 * work  # beside it each of eight blocks of queries begins and ends
    # Without a mask the kernel has one kind of block, which holds what its first and its last step do beside.
    assert 16 / tpu.cores < full["call_cycles"] / full["full_block_cycles"] < 32 / tpu.cores


@pytest.mark.skipif(
    TPU.missing is not None or environment.find_schedule_folder() is None, reason="no schedules are written here"
)
def test_the_lengths_of_a_cache_are_known_where_a_call_is_counted() -> None:
    """1,999 keys are four blocks of 512, and 300 are one."""
    case = parse_case_id("decode/bf16/B2.T1.S2000.N8.K2.H128.V128/lengths-1999-300/normal/s0")
    (target,) = (target for target in list_targets("tpu") if target.name == "v5e")
    found = native_compilation.compile_largest_program(
        Executor(find_implementation("ragged_tpu")), native_compilation.build_problem(case), target, gradients=False
    ).figures
    assert (found["ragged_decode.steps"], found["ragged_decode.blocks"]) == (5, 5)
