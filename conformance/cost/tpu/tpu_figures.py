"""What a whole call of a TPU kernel costs, by its schedule and the mask of its case. Nobody has checked that on a chip.

The schedule's scalar code is run over the grid with the lists that the kernel fetches (`tpu_scalars`, `tpu_calls`).
So every step, every block and every step that is left out counts as often as the mask has it, and a loop as often as it
goes round. It is never less than the time in which HBM gives and takes the blocks that cross.
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
    """The figures of each kernel whose schedule lies in the folder, by `<kernel>.<figure>`.

    Args:
      folder: where the compiler wrote the schedules.
      calls: of kernels, in the program before it was compiled.
      program: its text afterwards.
      tpu: what it was compiled for.

    Returns:
      those of the kernel's parts (`tpu_schedule.compute_schedule_figures`), and those of its call (`compute_call_figures`) if the program has
      one call of that name. Of several calls the parts are those of the one with the longest block.
    """
    found: dict[str, float] = {}
    kernels = tpu_schedule.read_schedules(folder)
    alone = len(kernels) == len(calls) == 1  # then a name that only the program has is no matter
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
    """What a call of a kernel costs; nothing where the way that it takes hangs on what is not known.

    Args:
      schedule: of the kernel.
      call: its grid, and the bytes that cross.
      lists: those of its lists that are known, as they lie in scalar memory.
      tpu: whose cycles they are.

    Returns:
      `call_cycles`, the estimate, of the core that takes longest; `hbm_floor_cycles`, in which HBM gives and takes the
      blocks that cross, and below which the estimate never is; `steps` of the grid; `blocks` that run, and of these
      `masked_blocks`, the longest, where there are several kinds.
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
    """The lists of a call as the compiled program lays them out, but for those of which that cannot be told."""
    line = re.search(rf"%{re.escape(kernel)}(?:\.\d+)? = [^\n]*? custom-call\(([^)]*)\)", program)
    if line is None:
        return {}
    found = {}
    for number, name in enumerate(_OPERAND.findall(line[1])):
        if number not in lists:
            continue
        if lists[number].ndim == 0:  # how long an axis of the grid is
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
