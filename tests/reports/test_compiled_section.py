"""The section on compiled programs has the largest figures of each target, and names what did not compile."""

from __future__ import annotations

from typing import Any

from reports.compiled_kernels import call_estimates, gpu_kernel_bounds, tpu_kernel_schedules
from reports.compiled_section import build_compiled_section
from reports.record_groups import group_records
from reports.records import (
    FAIL,
    UNJUDGED,
    Record,
)
from tests.reports.report_samples import make_record, make_run_info, render_html


def make_compilation(**changes: Any) -> Record:
    """Make the record of a program that compiled, but for what is changed."""
    figures = {"compile_seconds": 2.5, "temporary_bytes": 3 * 2.0**20, "live_bytes": 2.0**24, "vmem_bytes": 2.0**19}
    values = {"check": "compiles", "observable": "v5e.forward", "ratio": None, "limit": None, "figures": figures}
    return make_record(**values | changes)


def test_what_compiled_is_a_table_by_target_with_the_largest_of_each_figure() -> None:
    small = {"compile_seconds": 0.5, "temporary_bytes": 1.0, "vmem_bytes": 1.0}
    records = [
        make_compilation(),
        make_compilation(observable="v5e.gradients", figures=small),
        make_compilation(observable="v4.forward", figures={}, verdict=FAIL, reason="scoped vmem limit exceeded"),
        make_compilation(observable="h100.forward", figures={"shared_bytes": 2.0**17, "registers": 168.0}),
        make_compilation(observable="h100.gradients", figures={"registers": 255.0, "spilled_bytes": 408.0}),
        make_compilation(implementation="other", observable="all", figures={}, verdict=UNJUDGED, reason="no compiler"),
    ]
    table = build_compiled_section(group_records(records).compilations)
    assert table is not None
    assert table.targets == ("v5e", "v4", "h100")
    cell = table.cells[table.implementations[0], "v5e"]
    assert (cell.compiled, cell.failed, cell.seconds, cell.temporaries) == (2, 0, 2.5, 3 * 2.0**20)
    assert table.cells[table.implementations[0], "v4"].state == "fail"
    assert table.programs == ()
    page = render_html(records, make_run_info())
    section = page[page.index('id="compiled"') :].split("<h2")[0]
    for text in (
        "2.5 s",
        "3 MiB HBM",
        "16 MiB at once",
        "512 KiB VMEM",
        "128 KiB shared",
        "255 registers",
        "408 B spilled",
        "scoped vmem limit exceeded",
        "not compiled",
        "no compiler",
    ):
        assert text in section


def test_the_same_program_of_two_implementations_is_shown_side_by_side() -> None:
    larger = {"compile_seconds": 9.0, "temporary_bytes": 0.0, "live_bytes": 2.0**25}
    records = [
        make_compilation(),
        make_compilation(observable="v4.forward", figures=larger),
        make_compilation(implementation="other"),
    ]
    table = build_compiled_section(group_records(records).compilations)
    assert table is not None
    (row,) = table.programs
    assert (row.case, row.program) == (records[0].case, "forward")
    one, other = (row.cells[implementation] for implementation in table.implementations)
    assert (one.live, one.temporaries, one.seconds) == (2.0**25, 3 * 2.0**20, 9.0)
    assert other.live == 2.0**24
    assert "32 MiB at once, 3 MiB HBM, 9.0 s" in render_html(records, make_run_info())


def test_a_run_that_compiles_nothing_says_so() -> None:
    assert build_compiled_section(group_records([make_record()]).compilations) is None
    assert "Nothing in this run was compiled for an accelerator." in render_html([make_record()], make_run_info())


def test_cycles_of_kernels_are_a_table_of_the_case_where_blocks_take_longest() -> None:
    short = {"kernel.full_block_cycles": 900.0, "kernel.mxu_share": 0.5, "kernel.spill_slots": 0.0}
    long = {
        **short,
        "kernel.full_block_cycles": 1292.0,
        "kernel.masked_block_cycles": 1409.0,
        "kernel.step_cycles": 134.0,
    }
    records = [
        make_compilation(figures=short),
        make_compilation(figures=long, case="train/bf16/long"),
        make_compilation(figures={**long, "kernel.inner_loops": 2.0}, case="train/bf16/long", observable="v6e.forward"),
    ]
    table = tpu_kernel_schedules.build_schedule_table(records)
    assert table is not None
    assert table.targets == ("v5e", "v6e")
    (row,) = table.rows
    assert (row.case, row.kernel, row.cells["v5e"].full) == ("train/bf16/long", "kernel", 1292)
    page = render_html(records, make_run_info())
    section = page[page.index('id="compiled"') :].split("<h2")[0]
    for text in ("1,292", "1,409 masked", "134 step", "50% of MXU", "2 loops within, counted once"):
        assert text in section
    assert tpu_kernel_schedules.build_schedule_table([make_compilation()]) is None


CALL = {
    "fwd.full_block_cycles": 9.0,
    "fwd.call_cycles": 117_364.0,
    "fwd.hbm_floor_cycles": 41_493.0,
    "fwd.steps": 80.0,
    "fwd.blocks": 72.0,
    "fwd.masked_blocks": 16.0,
}
BOUND = {"dq.full_block_cycles": 9.0, "dq.call_cycles": 50_000.0, "dq.hbm_floor_cycles": 50_000.0}


def test_whole_calls_are_in_the_table_and_side_by_side() -> None:
    other = {"implementation": "other", "case": "train/bf16/long"}
    records = [
        make_compilation(figures=CALL, case="train/bf16/long"),
        make_compilation(figures={**CALL, **BOUND}, **other),
        make_compilation(figures={**CALL, "dq.full_block_cycles": 9.0}, observable="v6e.forward", **other),
        make_compilation(figures=CALL, case="train/bf16/alone"),
    ]
    long, alone = call_estimates.build_call_charts(records)
    assert (long.case, long.program, long.targets) == ("train/bf16/long", "forward", ("v5e",))
    assert [long.cells[implementation, "v5e"].total for implementation in long.implementations] == [117_364, 167_364]
    assert [long.cells[implementation, "v5e"].bound for implementation in long.implementations] == [frozenset(), {"dq"}]
    assert alone.case == "train/bf16/alone"
    page = render_html(records, make_run_info())
    section = page[page.index('id="compiled"') :].split("<h2")[0]
    for text in (
        "117,364 call, HBM 41,493",
        "72 blocks, 16 masked, in 80 steps",
        "call not known",
        "never checked on a chip",
        "v5e, kilocycles",
        "167, HBM",
    ):
        assert text in section
    assert call_estimates.build_call_charts([make_compilation()]) == ()


BOUND_OF_GPU = {
    "forward.pair_cycles": 102.7,
    "forward.masked_pair_cycles": 133.0,
    "forward.issue_cycles": 102.7,
    "forward.tensor_cycles": 62.5,
    "forward.masked_issue_cycles": 133.0,
    "forward.registers": 255.0,
    "forward.spilled_bytes": 48.0,
    "forward.spill_slots": 2.0,
    "forward.occupancy": 0.125,
}


def test_bounds_of_gpu_kernels_are_a_table_and_side_by_side() -> None:
    less = {**BOUND_OF_GPU, "forward.pair_cycles": 64.5, "forward.mufu_cycles": 64.5, "forward.issue_cycles": 50.0}
    records = [
        make_compilation(figures=BOUND_OF_GPU, observable="h100.forward"),
        make_compilation(figures=less, observable="h100.forward", case="train/bf16/other"),
        make_compilation(figures=less, observable="h100.forward", implementation="other"),
    ]
    found = gpu_kernel_bounds.build_bound_table(records)
    assert found is not None
    assert found.targets == ("h100",)
    first, other = found.rows
    assert (first.case, first.cells["h100"].least, first.cells["h100"].unit) == (records[0].case, 102.7, "issue")
    assert (other.implementation.name, other.cells["h100"].unit) == ("other", "mufu")
    chart = found.charts[0]
    assert [cell.total for cell in chart.cells.values()] == [102_700, 64_500]
    page = render_html(records, make_run_info())
    section = page[page.index('id="compiled"') :].split("<h2")[0]
    for text in (
        "102.7",
        "133.0 masked",
        "255 registers, 12% of warps",
        "48 B spilled, 2 in the loop",
        "ever checked on a chip",
        "h100, kilocycles",
    ):
        assert text in section
    assert gpu_kernel_bounds.build_bound_table([make_compilation()]) is None
