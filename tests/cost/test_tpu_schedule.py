"""Cycles of a TPU kernel's parts, from hand-written schedules, and from the compiler's if it is installed."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from conformance import environment
from conformance.accelerators import compilation
from conformance.accelerators.targets import TPU, list_targets
from conformance.accelerators.tpus import TPUS
from conformance.cost.tpu import tpu_figures
from conformance.cost.tpu.tpu_schedule import compute_schedule_figures, parse_schedule

UNITS = "== CAPACITY:\nMXU, VLOAD:FILL, VSTORE:SPILL\n 4 3 1\n== UTILIZATION:\n"


def bundles(jumps: dict[int, tuple[str, int]], count: int) -> str:
    """The text of so many bundles, some of which jump: under a condition, if one is given, and to where."""
    lines = []
    for at in range(count):
        name = "0" if at == 0 else f"{at:#x}"
        condition, to = jumps.get(at, ("", 0))
        slots = f"%{at} = sbr.rel {condition} target bundleno = {to} ({to:#x}), region = 1" if at in jumps else "nop"
        lines.append(
            f" {name:>5} LB: > > {{ %1 = smov 0 /* a: {{ }} */  ;;  {slots} }}" if at % 2 else f"{name} : {{ {slots} }}"
        )
    return "= control target key start\nLH: loop header\n\n" + "\n".join(lines)


def units(rows: dict[int, str], count: int) -> str:
    return UNITS + "\n".join(rows.get(at, "0 0 0") for at in range(count)) + "\n"


# Bundle 0 comes before the grid's loop, which 29 ends. A step runs 4 to 27 but for the last; in there one part sets
# up, two multiply (8 bundles, and 5), and one has results to write.
JUMPS = {
    3: ("(%p1)", 28),
    4: ("(%p2)", 7),
    8: ("(!%p3)", 17),
    17: ("(%p3)", 23),
    24: ("(%p4)", 27),
    29: ("(!%p5)", 1),
}
USED = {9: "4 0 0", 10: "4 1 1", 12: "2 0 0", 18: "4 0 0", 19: "1 0 1"}


def test_blocks_are_the_parts_that_multiply_and_a_step_is_what_runs_without_any_part() -> None:
    assert compute_schedule_figures(parse_schedule(bundles(JUMPS, 30), units(USED, 30))) == {
        "full_block_cycles": 5,
        "mxu_share": 0.25,
        "spill_slots": 1,
        "masked_block_cycles": 8,
        "step_cycles": 29 - 8 - 5 - 2 - 2,
    }


def test_a_loop_within_a_block_counts_once_and_is_told() -> None:
    jumps = {**JUMPS, 14: ("(%p6)", 11)}
    assert compute_schedule_figures(parse_schedule(bundles(jumps, 30), units(USED, 30)))["inner_loops"] == 1


def test_a_kernel_without_conditions_is_one_block() -> None:
    found = compute_schedule_figures(parse_schedule(bundles({29: ("(%p0)", 2)}, 30), units(USED, 30)))
    assert found == {"full_block_cycles": 28, "mxu_share": round(15 / 112, 3), "spill_slots": 3}


def test_a_kernel_that_multiplies_nothing_has_no_blocks() -> None:
    assert compute_schedule_figures(parse_schedule(bundles(JUMPS, 30), units({}, 30))) == {}


def write(folder: Path, number: int, name: str, made_of: str, used: dict[int, str], count: int = 30) -> None:
    """The three files of a program."""
    files = {
        "00-schedule-analysis_packed-bundles-post-ra": f"30 bundles: %{name} = f32[8] {made_of}(%a)",
        "01-packed-bundles-post-ra": bundles(JUMPS, 30),
        "02-pre-delay_hlo-static-per-bundle-utilization": units(used, count),
    }
    for way, text in files.items():
        (folder / f"{number}-{name}-{way}.txt").write_text(text)


def test_kernels_are_told_by_name_and_of_several_calls_the_longest(tmp_path: Path) -> None:
    write(tmp_path, 11, "kernel.1", "custom-call", {9: "4 0 0"})
    write(tmp_path, 12, "kernel.2", "custom-call", {18: "4 0 0"})
    write(tmp_path, 13, "fusion.3", "fusion", USED)
    found = tpu_figures.compute_tpu_figures(tmp_path, [], "", TPUS[0])
    assert {name.partition(".")[0] for name in found} == {"kernel"}
    assert found["kernel.full_block_cycles"] == 8


def test_what_is_written_in_another_form_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, 11, "kernel.1", "custom-call", USED, count=7)
    (tmp_path / "5-other.1-01-packed-bundles-post-ra.txt").write_text("0 : { nop }")
    assert tpu_figures.compute_tpu_figures(tmp_path, [], "", TPUS[0]) == {}
    with pytest.raises(ValueError, match="30 bundles, but 7 lines"):
        parse_schedule(bundles({}, 30), units({}, 7))


@pytest.mark.skipif(TPU.missing is not None, reason=str(TPU.missing))
@pytest.mark.skipif(environment.find_schedule_folder() is None, reason="libtpu is not asked to write schedules")
def test_a_matrix_product_takes_at_least_what_the_matrix_units_need() -> None:
    """Each multiplies 128 by 128 numbers a cycle: of the four of a v5e, 1,024^3 products take 16,384 cycles or more."""

    def multiply(a, b, out):  # type: ignore[no-untyped-def] # references of a kernel
        out[...] = jnp.dot(a[...], b[...], preferred_element_type=jnp.float32)

    shape = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    product = jax.jit(pl.pallas_call(multiply, out_shape=shape, name="product"))
    operand = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)
    (target,) = (target for target in list_targets("tpu") if target.name == "v5e")
    found = compilation.compile_for(target, product, (operand, operand))
    assert 16384 <= found["product.full_block_cycles"] <= 1.2 * 16384
    assert found["product.mxu_share"] > 0.8
    folder = environment.find_schedule_folder()
    assert folder is not None
    assert not folder.exists()
