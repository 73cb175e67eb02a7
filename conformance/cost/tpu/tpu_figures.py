"""Estimate the cycles of a whole call of a TPU kernel from its schedule and the mask. No chip has confirmed them.

The inputs are the schedules that libtpu wrote (`tpu_schedule`) and the kernel's calls in the traced program
(`pallas_calls`). The schedule's scalar code is simulated over the grid (`scalar_unit`). Its inputs are the lists of
blocks that the kernel fetches, which depend on the mask. So every step, block and loop counts as often as the mask
requires. The estimate is at least the time that HBM takes to transfer the blocks. Records store the results.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from conformance.accelerators.tpus import Tpu
from conformance.cost.tpu import pallas_calls, scalar_unit, tpu_schedule
from conformance.cost.tpu.pallas_calls import PallasCall
from conformance.cost.tpu.tpu_schedule import TpuSchedule

_OPERAND = re.compile(r"%([\w.\-]+)")


def compute_tpu_figures(folder: Path, calls: Sequence[PallasCall], program: str, tpu: Tpu) -> dict[str, float]:
    """Estimate the cycles of each kernel whose schedule is in the folder.

    Args:
      program: HLO text of the compiled program.

    Returns:
      numbers named `<kernel>.<figure>`. Every kernel has the cycles of its parts
      (`tpu_schedule.compute_schedule_figures`). A kernel that is called once also has the cycles of the whole call
      (`compute_call_figures`). If a kernel is called several times, its parts are those of the call with the longest
      full block.
    """
    found: dict[str, float] = {}
    kernels = tpu_schedule.read_schedules(folder)
    # A single schedule belongs to a single call, even if the compiler gave the kernel another name.
    alone = len(kernels) == len(calls) == 1
    for kernel, schedules in kernels.items():
        parts = max(
            map(tpu_schedule.compute_schedule_figures, schedules), key=lambda told: told[tpu_schedule.FULL_BLOCK_FIGURE]
        )
        asked = [call for call in calls if call.name == kernel or alone]
        if len(asked) == len(schedules) == 1:
            parts |= compute_call_figures(schedules[0], asked[0], lay_out_lists(kernel, asked[0].lists, program), tpu)
        found |= {f"{kernel}.{name}": value for name, value in parts.items()}
    return found


def compute_call_figures(
    schedule: TpuSchedule, call: PallasCall, lists: Mapping[int, Sequence[int]], tpu: Tpu
) -> dict[str, float]:
    """Estimate the cycles of one kernel call; empty if the kernel's path depends on values that are not known.

    Args:
      lists: by index of a known scalar operand, its words in the order in which they lie in scalar memory.

    Returns:
      numbers by name. `call_cycles`: estimated cycles of the call, on the core that takes longest. `hbm_floor_cycles`:
      cycles in which HBM transfers the blocks, which is a lower bound of the estimate. `steps`: number of steps of the
      grid. `blocks`: number of conditional parts with matrix products that run. `masked_blocks`: how many of these are
      of the longest kind, if there are several kinds.
    """
    if call.hbm_bytes is None:
        return {}
    try:
        runs = [scalar_unit.run_schedule(schedule.bundles, lists, tpu.delay, core) for core in range(tpu.cores)]
    except scalar_unit.UnknownPath:
        return {}
    floor = call.hbm_bytes / tpu.bytes_a_cycle
    found = {
        "call_cycles": float(round(max(floor, *(run.cycles for run in runs)))),
        "hbm_floor_cycles": float(round(floor)),
        "steps": float(np.prod(call.grid)),
    }
    step, blocks = tpu_schedule.find_step_and_blocks(schedule)
    if step not in blocks:
        entered = {len(block): 0 for block in blocks}
        for block in blocks:
            entered[len(block)] += sum(run.entries.get(block.start + tpu.delay, 0) for run in runs)
        found["blocks"] = float(sum(entered.values()))
        if len(blocks) > 1:
            found["masked_blocks"] = float(entered[max(entered)])
    return found


def lay_out_lists(kernel: str, lists: Mapping[int, np.ndarray], program: str) -> dict[int, list[int]]:
    """Compute the words of a call's scalar operands, by operand index, as they lie in scalar memory.

    The layouts are read from `program`, the compiled program's HLO text. Operands without a known layout are left out.
    """
    line = re.search(rf"%{re.escape(kernel)}(?:\.\d+)? = [^\n]*? custom-call\(([^)]*)\)", program)
    if line is None:
        return {}
    found = {}
    for number, name in enumerate(_OPERAND.findall(line[1])):
        if number not in lists:
            continue
        if lists[number].ndim == 0:  # a scalar is the length of an axis of the grid
            found[number] = [int(lists[number])]
            continue
        made = re.search(rf"%{re.escape(name)} = \w+\[([\d,]*)\](\{{[^}}]*\}})", program)
        values = lists[number]
        if made is not None and made[1] == ",".join(map(str, values.shape)):
            try:
                found[number] = pallas_calls.lay_out_words(values, made[2].strip("{}")).tolist()
            except ValueError:
                continue
    return found
