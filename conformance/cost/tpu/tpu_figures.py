"""Estimate the cycles of a whole call of a TPU kernel from its schedule and the mask. No chip has confirmed them.

The schedule's scalar code runs over the grid with the lists that the kernel fetches (`tpu_scalars`, `tpu_calls`). So
every step, block and loop counts as often as the mask requires. The estimate is at least the time that HBM takes to
transfer the blocks.
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
    """Compute the figures of each kernel whose schedule is in the folder, by `<kernel>.<figure>`.

    Args:
      folder: the folder that the compiler wrote schedules to.
      calls: calls of kernels in the traced program.
      program: text of the compiled program.
      tpu: the TPU that it was compiled for.

    Returns:
      the figures of the kernel's parts (`tpu_schedule.compute_schedule_figures`). If the program has one call of that
      name, also the figures of the call (`compute_call_figures`). If it has several, the parts are those of the call
      with the longest block.
    """
    found: dict[str, float] = {}
    kernels = tpu_schedule.read_schedules(folder)
    alone = len(kernels) == len(calls) == 1  # then they belong together, whatever the compiler named the kernel
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
    """Estimate the cost of one call; empty if the path that the kernel takes depends on unknown values.

    Args:
      schedule: the kernel's schedule.
      call: the call.
      lists: known scalar operands as they lie in scalar memory, by index of the operand.
      tpu: the TPU.

    Returns:
      `call_cycles`: the estimate, for the core that takes longest; `hbm_floor_cycles`: cycles in which HBM transfers
      the blocks, the least possible estimate; `steps`: steps of the grid; `blocks`: blocks that run; `masked_blocks`:
      those of the longest kind, if there are several kinds.
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
    """Lay out the scalar operands of a call as the compiled program does; those of unknown layout are left out."""
    line = re.search(rf"%{re.escape(kernel)}(?:\.\d+)? = [^\n]*? custom-call\(([^)]*)\)", program)
    if line is None:
        return {}
    found = {}
    for number, name in enumerate(_OPERAND.findall(line[1])):
        if number not in lists:
            continue
        if lists[number].ndim == 0:  # the length of an axis of the grid
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
