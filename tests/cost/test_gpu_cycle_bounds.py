"""Loops, pairs and bounds from machine code: of hand-written code, and of our kernels if the tools are installed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cases.case_id import parse_case_id
from conformance.accelerators import targets
from conformance.accelerators.gpus import GPUS
from conformance.accelerators.targets import GPU, list_targets
from conformance.cost.gpu import gpu_cycle_bounds, sass_loops, tensor_core_products
from conformance.execution import implementation_registry
from conformance.execution.executor import Executor
from conformance.executor_tasks import native_compilation

A100, H100, B200 = GPUS
NO_TOOLS = GPU.missing or (None if targets.find_disassembler() else "nvdisasm is not installed")


def code(*lines: str) -> str:
    """A kernel as the disassembler prints it: instructions, and labels, which begin with a dot."""
    text, at = ['\t.section\t.text.kernel,"ax",@progbits', "\t.align\t128", "kernel:", ".text.kernel:"], 0
    for line in lines:
        if line.startswith("."):
            text.append(f"{line}:")
        else:
            text.append(f"        /*{at:04x}*/                   {line} ;")
            at += 16
    return "\n".join(text)


def only(*lines: str) -> sass_loops.Loop:
    (loop,) = sass_loops.find_loops(sass_loops.parse_sass(code(*lines))["kernel"])
    return loop


def near(value: float) -> object:
    """A figure, which is kept to three digits behind the point."""
    return pytest.approx(value, rel=0, abs=1e-3)  # Tolerance: what rounding to three digits leaves, and float64's own


def names(way: Sequence[sass_loops.Instruction]) -> list[str]:
    return [one.name for one in way]


MMA = "HMMA.16816.F32.BF16 R8, R4.reuse, R6, R8"


def test_what_is_not_in_a_loop_over_products_is_left_out() -> None:
    loop = only(
        *("MOV R1, c[0x0][0x28]", "@!P0 BRA `(.L_x_2)"),
        *(".L_x_0", "IADD3 R2, R2, 0x1, RZ", "@P1 BRA `(.L_x_0)"),  # multiplies nothing
        *(".L_x_1", MMA, "MUFU.EX2 R3, R3", "@P0 BRA `(.L_x_1)"),
        *(".L_x_2", MMA, "EXIT", ".L_x_3", "BRA `(.L_x_3)"),
    )
    assert names(loop.shortest) == names(loop.longest) == ["HMMA", "MUFU", "BRA"]


def test_the_innermost_loop_counts_and_two_of_them_are_two() -> None:
    text = code(
        *(".L_x_0", "IADD3 R2, R2, 0x1, RZ"),
        *(".L_x_1", MMA, "@P0 BRA `(.L_x_1)"),
        *(".L_x_2", MMA, "FSEL R3, R3, R4, P0", "@P0 BRA `(.L_x_2)"),
        *("@P1 BRA `(.L_x_0)", "EXIT"),
    )
    assert [names(loop.shortest) for loop in sass_loops.find_loops(sass_loops.parse_sass(text)["kernel"])] == [
        ["HMMA", "BRA"],
        ["HMMA", "FSEL", "BRA"],
    ]


def test_of_a_condition_within_the_cheapest_and_the_dearest_way_are_told() -> None:
    loop = only(
        *(".L_x_0", MMA, "@!P0 BRA `(.L_x_1)", "FSEL R3, R3, R4, P0", "FSEL R5, R5, R4, P0"),
        *(".L_x_1", "@P1 BRA `(.L_x_0)", "EXIT"),
    )
    assert names(loop.shortest) == ["HMMA", "BRA", "BRA"]
    assert names(loop.longest) == ["HMMA", "BRA", "FSEL", "FSEL", "BRA"]


def test_a_way_that_multiplies_less_is_no_turn() -> None:
    loop = only(*(".L_x_0", "@!P0 BRA `(.L_x_1)", MMA), *(".L_x_1", "@P1 BRA `(.L_x_0)", "EXIT"))
    assert names(loop.shortest) == ["BRA", "HMMA", "BRA"]
    assert names(loop.idle) == ["BRA", "BRA"]


def test_waiting_again_is_not_in_a_turn_and_waiting_once_is() -> None:
    """A barrier is tried where it is needed, and tried again out of line."""
    loop = only(
        *(".L_x_0", "SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4], R3", "@!P1 BRA `(.L_x_8)"),
        *(".L_x_1", MMA, "@P0 BRA `(.L_x_0)", "EXIT"),
        *(".L_x_8", "SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4], R3", "@!P1 BRA `(.L_x_8)", "BRA `(.L_x_1)"),
    )
    assert names(loop.shortest) == names(loop.longest) == ["SYNCS", "BRA", "HMMA", "BRA"]
    # A barrier that every turn tries.
    always = only(*(".L_x_0", ".L_x_1", "SYNCS P1, [UR4]", "@!P1 BRA `(.L_x_1)", MMA, "@P0 BRA `(.L_x_0)", "EXIT"))
    assert names(always.shortest) == ["SYNCS", "BRA", "HMMA", "BRA"]


def test_a_loop_that_is_left_by_a_conditional_call_is_one() -> None:
    """As the assembler writes it for Ampere."""
    loop = only(".L_x_0", MMA, "@!P0 CALL.REL.NOINC `(.L_x_1)", "BRA `(.L_x_0)", ".L_x_1", "EXIT")
    assert names(loop.shortest) == ["HMMA", "CALL", "BRA"]


def test_code_that_multiplies_nothing_has_no_loops() -> None:
    text = code(".L_x_0", "IADD3 R2, R2, 0x1, RZ", "@P1 BRA `(.L_x_0)", "EXIT")
    assert list(sass_loops.iter_kernels_with_loops(sass_loops.parse_sass(text))) == []
    assert sass_loops.parse_sass("nothing") == {}


@pytest.mark.parametrize(
    ("opcode", "operands", "products", "bits", "shared"),
    [
        ("HMMA.16816.F32.BF16", "R8, R4.reuse, R6, R8", 16 * 8 * 16, 16, 0),
        ("HMMA.1688.F32.TF32", "R8, R4, R6, R8", 16 * 8 * 8, 32, 0),
        ("IMMA.16832.S8.S8", "R8, R4.ROW, R6.COL, R8", 16 * 8 * 32, 8, 0),
        # Both operands in shared memory, then the second one only.
        ("HGMMA.64x128x16.F32.BF16", "R24, gdesc[UR32], RZ, !UPT", 64 * 128 * 16, 16, (64 + 128) * 16 * 2),
        ("HGMMA.64x64x16.F32", "R56, R24, gdesc[UR8].tnspB, R56, gsb0", 64 * 64 * 16, 16, 64 * 16 * 2),
        ("QGMMA.64x64x32.F32.E4M3.E4M3", "R24, gdesc[UR32], RZ", 64 * 64 * 32, 8, (64 + 64) * 32),
    ],
)
def test_the_shape_of_a_product_stands_in_its_opcode(
    opcode: str, operands: str, products: int, bits: int, shared: int
) -> None:
    found = tensor_core_products.parse_product(opcode, operands, {})
    assert found is not None
    assert (found.multiplications, found.bits, found.shared_bytes) == (products, bits, shared)


def test_on_blackwell_it_stands_in_a_constant_and_without_that_nobody_knows() -> None:
    """The descriptor of 128 by 64 for bf16 with sums in f32 (PTX ISA, tcgen05: N >> 3 from bit 17, M >> 4 from 24)."""
    descriptor = (128 >> 4) << 24 | (64 >> 3) << 17 | 1 << 10 | 1 << 7 | 1 << 4
    lines = (
        f"UMOV UR39, {descriptor:#x}",
        "UTCHMMA gdesc[UR6], gdesc[UR16], tmem[UR12], tmem[UR38], idesc[UR39], !UPT",
        "UIADD3 UR39, UPT, UPT, UR39, 0x1, URZ",
        "UTCHMMA gdesc[UR6], gdesc[UR16], tmem[UR12], tmem[UR38], idesc[UR39], !UPT",
    )
    _, known, _, unknown = sass_loops.parse_sass(code(*lines))["kernel"]
    assert known.product == tensor_core_products.MatrixProduct(128, 64, 16, 16, 0, True, True)
    assert unknown.product is None


def test_no_other_instruction_multiplies_matrices() -> None:
    for opcode in ("IMAD.WIDE", "FFMA", "UTCBAR", "MUFU.EX2", "HFMA2.MMA"):
        assert tensor_core_products.parse_product(opcode, "R1, R2, R3, R4", {}) is None


# 64 by 64 pairs of a warpgroup at depth 64: a warp has 1024 of them, 32 in each thread.
WARP = 64 * 64 // 4


@pytest.mark.parametrize(
    ("kind", "products", "more", "rounded", "depths"),
    [
        ("forward", 64 + 64, 2, 1, (64, 64)),  # which rescales rows
        ("forward", 128 + 128, 16, 1, (128, 128)),  # as many as there are pairs in two rows of 16 keys
        ("dq", 64 + 64 + 64, 0, 1, (64, 64)),
        ("dkv", 2 * 64 + 2 * 64, 0, 2, (64, 64)),
        ("all", 3 * 128 + 2 * 128, 0, 2, (128, 128)),
        ("forward", 128 + 128, 2, 1, (80, 80)),  # filled up to what the tensor cores take
        ("forward", 256 + 128, 2, 1, (192, 128)),
        ("forward", 192 + 128, 2, 1, (192, 128)),
        ("dq", 256 + 128 + 256, 0, 1, (192, 128)),
        ("dkv", 2 * 192 + 2 * 128, 0, 2, (192, 128)),
        ("dq", 3 * 64, 0, 0, (64, 64)),  # of f32, nothing of which is rounded to 16 bits
    ],
)
def test_pairs_come_of_products_and_of_what_is_computed_of_each(
    kind: str, products: int, more: int, rounded: int, depths: tuple[int, int]
) -> None:
    found = gpu_cycle_bounds.count_pairs(WARP * products, WARP / 32 + more, rounded * WARP / 32, depths)
    assert found == (kind, WARP)


@pytest.mark.parametrize(
    ("times", "kind", "sums", "rounded"), [(2, "dkv", 256, 2), (2, "dq", 128, 1), (4, "dkv", 256, 2)]
)
def test_pairs_that_several_warps_compute_are_shared_among_them(times: int, kind: str, sums: int, rounded: int) -> None:
    """Two warpgroups that each own half of the columns of dk and dv compute p and dx of all pairs, both of them."""
    found = gpu_cycle_bounds.count_pairs(WARP * (256 + sums / times), WARP / 32, rounded * WARP / 32, (128, 128))
    assert found == (kind, WARP / times)


def test_where_exponentials_are_not_those_of_the_pairs_nobody_knows() -> None:
    assert gpu_cycle_bounds.count_pairs(WARP * 128, 0.7 * WARP / 32, WARP / 32, (64, 64)) is None
    assert gpu_cycle_bounds.count_pairs(WARP * 128, 3 * WARP / 32, WARP / 32, (64, 64)) is None


def test_a_loop_of_dk_alone_is_known_beside_the_loop_of_the_weights_only() -> None:
    assert gpu_cycle_bounds.count_pairs(WARP * 128, 0, WARP / 32, (64, 64)) == ("dk", WARP)
    products = ["HGMMA.64x64x16.F32.BF16 R24, gdesc[UR32], R24"] * 8
    alone = only(".L_x_0", *products, "@P0 BRA `(.L_x_0)", "EXIT")
    assert gpu_cycle_bounds.compute_kernel_figures([alone], H100, 12, (64, 64)) == {}
    both = gpu_cycle_bounds.compute_kernel_figures([forward(), alone], H100, 12, (64, 64))
    assert both["tensor_cycles"] == near(1000 * 4 * 64 / 2048)  # four products in all


def forward(*more: str) -> sass_loops.Loop:
    """A turn of 64 by 64 pairs of a warpgroup at depth 64, of 52 instructions and what is added."""
    first = ["HGMMA.64x64x16.F32.BF16 R24, gdesc[UR32], R24"] * 4
    second = ["HGMMA.64x64x16.F32.BF16 R56, R24, gdesc[UR8].tnspB, R56"] * 4
    return only(".L_x_0", *first, *["MUFU.EX2 R3, R3"] * 34, *second, *more, "@P0 BRA `(.L_x_0)", "EXIT")


def test_the_bound_is_that_of_the_unit_which_takes_longest() -> None:
    found = gpu_cycle_bounds.bound_loop(forward("LDS.128 R4, [R2]"), H100, 12, (64, 64))
    assert found is not None
    full, masked = found
    assert full == masked
    assert (full.pairs, full.kind, full.unit) == (WARP, "forward", "mufu")
    thousand = 1000 / WARP
    assert full.cycles["mufu"] == near(34 * 32 / 16 * thousand)
    # 2 * 64 multiplications a pair, 2,048 a cycle.
    assert full.cycles["tensor"] == near(1000 * 2 * 64 / 2048)
    assert full.cycles["issue"] == near(44 / 4 * thousand)
    # Of a warpgroup both operands of the first product and one of the second, 2 KiB each; of a warp 16 bytes a thread.
    assert full.cycles["shared"] == near((4 * 3 * 2048 / 4 + 512) / 128 * thousand)


def test_more_instructions_make_the_schedulers_the_bound() -> None:
    found = gpu_cycle_bounds.bound_loop(forward(*["FMUL R3, R3, R4"] * 400), H100, 12, (64, 64))
    assert found is not None
    assert found[0].unit == "issue"
    assert found[0].cycles["issue"] == near(443 / 4 * 1000 / WARP)
    ampere = gpu_cycle_bounds.bound_loop(forward(*["FMUL R3, R3, R4"] * 400), A100, 12, (64, 64))
    assert ampere is not None
    assert ampere[0].cycles["f32"] == 2 * found[0].cycles["f32"]


def test_of_a_blocks_products_each_warp_has_its_part_and_one_asks_for_them() -> None:
    descriptor = (128 >> 4) << 24 | (64 >> 3) << 17 | 1 << 10 | 1 << 7 | 1 << 4
    asks = ["UTCHMMA gdesc[UR6], gdesc[UR16], tmem[UR12], tmem[UR38], idesc[UR39], UPT"] * 8
    loop = only(
        f"UMOV UR39, {descriptor:#x}",
        *(".L_x_0", "BRA.U !UP0, `(.L_x_1)", *asks),
        *(".L_x_1", *["MUFU.EX2 R3, R3"] * 64, "@P0 BRA `(.L_x_0)", "EXIT"),
    )
    found = gpu_cycle_bounds.bound_loop(loop, B200, 4, (64, 64))
    assert found is not None
    assert found[0].pairs == 128 * 64 / 4
    assert found[0].counts["instructions"] == 66 + 8 / 4
    assert found[0].cycles["tensor"] == near(1000 * 2 * 64 / 4096)


def test_loops_of_one_kind_are_full_and_masked_and_those_of_two_add_up() -> None:
    plain, masked = forward(), forward(*["FSEL R3, R3, R4, P0"] * 300)
    found = gpu_cycle_bounds.compute_kernel_figures([plain, masked], H100, 12, (64, 64))
    alone = gpu_cycle_bounds.compute_kernel_figures([plain], H100, 12, (64, 64))
    assert found["pair_cycles"] == alone["pair_cycles"] == alone["masked_pair_cycles"] < found["masked_pair_cycles"]
    assert found["tensor_64x64x16"] == 8
    third = ["HGMMA.64x64x16.F32.BF16 R24, gdesc[UR32], R24"] * 12
    of_queries = only(".L_x_0", *third, *["MUFU.EX2 R3, R3"] * 32, "@P0 BRA `(.L_x_0)", "EXIT")
    both = gpu_cycle_bounds.compute_kernel_figures([plain, of_queries], H100, 12, (64, 64))
    assert both["tensor_cycles"] == near(1000 * 5 * 64 / 2048)
    assert both["pairs"] == 2 * WARP


def test_spills_are_told_wherever_they_are() -> None:
    found = gpu_cycle_bounds.compute_kernel_figures(
        [forward(), forward("LDL R3, [R1]", "STL [R1], R3")], H100, 12, (64, 64)
    )
    assert (found["spill_slots"], found["spill_instructions"]) == (2, 0)


@pytest.mark.parametrize(
    ("gpu", "threads", "registers", "shared", "warps"),
    [
        (A100, 128, 255, 49_664, 8),  # registers: 256 * 32 of 65,536 for a warp, so 8 warps
        (A100, 128, 64, 49_664, 12),  # shared memory: 3 blocks
        (H100, 384, 168, 69_696, 12),  # one of three warpgroups: a second needs 24 warps of 5,376 registers
        (H100, 32, 16, 0, 32),  # as many blocks as there may be
        (B200, 1024, 32, 0, 64),
    ],
)
def test_occupancy_is_what_fits(gpu: object, threads: int, registers: int, shared: int, warps: int) -> None:
    found = gpu_cycle_bounds.compute_occupancy(gpu, threads=threads, registers=registers, shared_bytes=shared)  # type: ignore[arg-type]
    assert found == warps / 64


CASE = parse_case_id("train/bf16/B1.T512.S512.N1.K1.H64.V64/causal/normal/s0")


@pytest.mark.long
@pytest.mark.skipif(NO_TOOLS is not None, reason=str(NO_TOOLS))
@pytest.mark.parametrize("name", ["flash_gpu", "flash_gpu_mosaic"])
def test_our_kernels_have_figures_on_every_gpu(name: str) -> None:
    """Pairs, products and exponentials are those that the kernels' tiles come to, and no unit beats its peak."""
    implementation = implementation_registry.find_implementation(name)
    for target, gpu in zip(list_targets("gpu"), GPUS, strict=True):
        if name == "flash_gpu_mosaic" and gpu.name != "h100":
            continue
        one = native_compilation.compile_largest_program(
            Executor(implementation), native_compilation.build_problem(CASE), target, gradients=True
        )
        assert one.outcome == "compiled", one.reason
        by = "flash_gpu_mosaic" if gpu.name == "h100" else "flash_gpu"  # as was measured there
        for kernel, products in {"forward": 2, "dq": 3, "dkv": 4}.items():
            told = {
                figure.rpartition(".")[2]: value
                for figure, value in one.figures.items()
                if figure.startswith(f"{by}_{kernel}.")
            }
            assert told["tensor_cycles"] == near(1000 * products * 64 / gpu.products_per_core)
            assert told["pair_cycles"] == max(told[f"{unit}_cycles"] for unit in gpu_cycle_bounds.UNITS)
            assert told["mufu_cycles"] >= 1000 / 16  # an exponential each
            assert told["masked_pair_cycles"] >= told["pair_cycles"]
            assert 0 < told["occupancy"] <= 1
            assert 0 < told["registers"] <= 255
