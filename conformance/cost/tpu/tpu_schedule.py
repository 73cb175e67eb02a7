"""Cycles of TPU kernels, counted in the schedule that their compiler writes down.

A TPU runs the bundles of a program in order, one a cycle unless it waits, and which instructions share a bundle is
settled when the program is compiled. So the schedule tells the cycles of a kernel's parts without a chip. It tells
nothing of waits for copies, and no figure of it was ever checked on a chip.

libtpu writes three files for each kernel into the folder that it was told of before it was loaded
(`conformance.environment.find_schedule_folder`): what it was made of, its bundles, and the units that each of these uses.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

FULL_BLOCK_FIGURE = "full_block_cycles"
"""The figure that says which of several schedules of a kernel is shown."""
_BUNDLES = "packed-bundles-post-ra"
_UNITS = "pre-delay_hlo-static-per-bundle-utilization"
_BUNDLES_FILE = re.compile(rf"(?P<program>\d+)-(?P<kernel>[\w.\-]+?)(\.\d+)?-\d+-{_BUNDLES}\.txt")
_ANALYSIS = "schedule-analysis"
_CUSTOM_CALL = " custom-call("  # XLA's own programs are fusions
_BUNDLE = re.compile(r"^\s*(0x[0-9a-f]+|0)\s[^:]*:[\s>]*\{(?P<slots>.*)")
_JUMP = re.compile(r"= sbr\.rel (?:\(!?%\w+\) )?target bundleno = (\d+)")
_MATRIX, _SPILLS = "MXU", ("VLOAD:FILL", "VSTORE:SPILL")


@dataclasses.dataclass(frozen=True)
class TpuSchedule:
    """The bundles of a kernel, in order.

    Attributes:
      bundles: the text of what each holds.
      jumps: by the number of a bundle that may jump, the number of the one that it jumps to.
      units: what each bundle uses of each unit.
      capacity: what a bundle can use of each unit.
    """

    bundles: tuple[str, ...]
    jumps: Mapping[int, int]
    units: tuple[Mapping[str, int], ...]
    capacity: Mapping[str, int]

    def used(self, unit: str, part: range) -> int:
        """What a part of the bundles uses of a unit."""
        return sum(self.units[bundle].get(unit, 0) for bundle in part)


def parse_schedule(bundles: str, units: str) -> TpuSchedule:
    """A schedule from the texts of its two files. Raises `ValueError` if they are not as this expects."""
    held: list[str] = []
    for line in bundles.splitlines():
        if found := _BUNDLE.match(line):
            if int(found[1], 16) != len(held):
                raise ValueError(f"bundle {len(held)} is missing")
            held.append(found["slots"])
        elif held:  # what the compiler says beside an instruction may take several lines
            held[-1] += f"\n{line}"
    jumps = {at: int(jump[1]) for at, slots in enumerate(held) if (jump := _JUMP.search(slots))}
    names, capacity, *rows = _iter_rows(units)
    if not held or len(rows) != len(held):
        raise ValueError(f"{len(held)} bundles, and {len(rows)} lines of what they use")
    used = tuple(dict(zip(names, map(int, row), strict=True)) for row in rows)
    return TpuSchedule(tuple(held), jumps, used, dict(zip(names, map(int, capacity), strict=True)))


def _iter_rows(units: str) -> Iterator[list[str]]:
    for line in units.splitlines():
        if line.strip() and not line.startswith("=="):
            yield line.replace(",", " ").split()


def read_schedules(folder: Path) -> dict[str, list[TpuSchedule]]:
    """The schedules that lie in the folder of kernels that multiply matrices, by kernel: one for each call of it."""
    found: dict[str, list[TpuSchedule]] = {}
    for path in sorted(folder.glob(f"*-{_BUNDLES}.txt")):
        if (named := _BUNDLES_FILE.fullmatch(path.name)) is None:
            continue
        try:
            made_of, units = (_read_sibling(path, named["program"], kind) for kind in (f"{_ANALYSIS}*", _UNITS))
            schedule = parse_schedule(path.read_text(), units) if _CUSTOM_CALL in made_of else None
        except ValueError:
            continue  # another version writes them in another form
        if schedule is not None and compute_schedule_figures(schedule):
            found.setdefault(named["kernel"], []).append(schedule)
    return found


def _read_sibling(path: Path, program: str, kind: str) -> str:
    """The text of another file of the same program. Raises `ValueError` if there is not one."""
    (other,) = path.parent.glob(f"{program}-*-{kind}.txt")
    return other.read_text()


def compute_schedule_figures(schedule: TpuSchedule) -> dict[str, float]:
    """What a schedule says of a kernel that multiplies matrices; nothing for another.

    A kernel is a loop over its grid. A step of it runs parts under conditions. Those with matrix products, and no such
    part within, are its blocks.

    Returns:
      `full_block_cycles` and `masked_block_cycles`, those of the shortest block and of the longest, the latter where
      there are several; `step_cycles` of a step whose parts are all left out; `mxu_share`, of the shortest block, the
      part of its cycles times matrix units that is used; `spill_slots`, its loads and stores of spilled registers;
      `inner_loops`, how many loops its blocks hold: their cycles count once, however often they run.
    """
    step, blocks = find_step_and_blocks(schedule)
    if not schedule.used(_MATRIX, step):
        return {}
    parts = _find_conditional_parts(schedule, step)
    full, masked = min(blocks, key=len), max(blocks, key=len)
    found = {
        FULL_BLOCK_FIGURE: float(len(full)),
        "mxu_share": round(schedule.used(_MATRIX, full) / (schedule.capacity[_MATRIX] * len(full)), 3),
        "spill_slots": float(sum(schedule.used(unit, full) for unit in _SPILLS)),
    }
    if len(blocks) > 1:
        found["masked_block_cycles"] = float(len(masked))
    if step not in blocks:
        around = [part for part in parts if part not in blocks and schedule.used(_MATRIX, part)]
        left_out = [part for part in parts if part not in around]
        found["step_cycles"] = float(len(step) - len(set().union(*left_out)))
    loops = [at for at, to in schedule.jumps.items() if to <= at and any(at in block for block in blocks)]
    if inner := [at for at in loops if not (step in blocks and at == step.stop - 1)]:
        found["inner_loops"] = float(len(inner))
    return found


def find_step_and_blocks(schedule: TpuSchedule) -> tuple[range, list[range]]:
    """The bundles of a step of the grid, and of each block in it; the step itself is the block where it has none."""
    step = _find_grid_loop(schedule)
    multiplying = [part for part in _find_conditional_parts(schedule, step) if schedule.used(_MATRIX, part)]
    return step, [part for part in multiplying if not any(_is_within(other, part) for other in multiplying)] or [step]


def _find_conditional_parts(schedule: TpuSchedule, step: range) -> list[range]:
    """Bundles of a step that run under a condition."""
    return [range(at + 1, to) for at, to in schedule.jumps.items() if to > at + 1 and at in step and to <= step.stop]


def _find_grid_loop(schedule: TpuSchedule) -> range:
    """The bundles of the outermost loop that holds the most matrix products; all bundles if none holds any."""
    whole = range(len(schedule.units))
    loops = [range(to, at + 1) for at, to in schedule.jumps.items() if to <= at]
    return max((loop for loop in loops if schedule.used(_MATRIX, loop)), key=len, default=whole)


def _is_within(part: range, other: range) -> bool:
    return part != other and other.start <= part.start and part.stop <= other.stop
