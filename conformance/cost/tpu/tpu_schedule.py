"""Count the cycles of a TPU kernel's parts in the schedule that its compiler writes.

A bundle is a set of instructions that a TPU core starts in the same cycle. A TPU runs the bundles of a program in
order, one per cycle unless it waits. The compiler decides which instructions share a bundle. So the schedule gives the
cycles of a kernel's parts without a chip. It does not show waits for copies, and no chip has confirmed these cycles.

libtpu writes three files for each kernel: the HLO that the kernel was compiled from, its bundles, and the units that
each bundle uses. The folder of these files is set before libtpu is loaded
(`conformance.environment.find_schedule_folder`). `tpu_figures` extends the counts here to a whole call.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

FULL_BLOCK_FIGURE = "full_block_cycles"
"""The measurement that chooses among several schedules of a kernel: the one whose full block takes longest is used."""
_BUNDLES = "packed-bundles-post-ra"
_UNITS = "pre-delay_hlo-static-per-bundle-utilization"
_BUNDLES_FILE = re.compile(rf"(?P<program>\d+)-(?P<kernel>[\w.\-]+?)(\.\d+)?-\d+-{_BUNDLES}\.txt")
_ANALYSIS = "schedule-analysis"
_CUSTOM_CALL = " custom-call("  # marks a Pallas kernel in the HLO; XLA's own kernels are fusions
_BUNDLE = re.compile(r"^\s*(0x[0-9a-f]+|0)\s[^:]*:[\s>]*\{(?P<slots>.*)")
_JUMP = re.compile(r"= sbr\.rel (?:\(!?%\w+\) )?target bundleno = (\d+)")
_MATRIX, _SPILLS = "MXU", ("VLOAD:FILL", "VSTORE:SPILL")


@dataclasses.dataclass(frozen=True)
class TpuSchedule:
    """The schedule of one TPU kernel."""

    bundles: tuple[str, ...]  # text of each bundle, in order
    jumps: Mapping[int, int]  # by index of a bundle with a jump, the index of the bundle that it jumps to
    # For each bundle, the number of slots that it uses of each unit, by name of the unit.
    units: tuple[Mapping[str, int], ...]
    capacity: Mapping[str, int]  # by name of a unit, the number of its slots in a bundle

    def used(self, unit: str, part: range) -> int:
        """Count the slots of a unit that the bundles in `part` use."""
        return sum(self.units[bundle].get(unit, 0) for bundle in part)


def parse_schedule(bundles: str, units: str) -> TpuSchedule:
    """Parse a schedule from texts with its bundles and their units. Raises `ValueError` for an unexpected form."""
    held: list[str] = []
    for line in bundles.splitlines():
        if found := _BUNDLE.match(line):
            if int(found[1], 16) != len(held):
                raise ValueError(f"bundle {len(held)} is missing")
            held.append(found["slots"])
        elif held:  # an instruction's comment may span several lines
            held[-1] += f"\n{line}"
    jumps = {at: int(jump[1]) for at, slots in enumerate(held) if (jump := _JUMP.search(slots))}
    names, capacity, *rows = _iter_rows(units)
    if not held or len(rows) != len(held):
        raise ValueError(f"{len(held)} bundles, but {len(rows)} lines with the units of a bundle")
    used = tuple(dict(zip(names, map(int, row), strict=True)) for row in rows)
    return TpuSchedule(tuple(held), jumps, used, dict(zip(names, map(int, capacity), strict=True)))


def _iter_rows(units: str) -> Iterator[list[str]]:
    """Yield the cells of each row of the compiler's table of units: names, capacities, and one row for each bundle."""
    for line in units.splitlines():
        if line.strip() and not line.startswith("=="):
            yield line.replace(",", " ").split()


def read_schedules(folder: Path) -> dict[str, list[TpuSchedule]]:
    """Read a folder's schedules: map each kernel with matrix products to a list of one schedule for each call."""
    found: dict[str, list[TpuSchedule]] = {}
    for path in sorted(folder.glob(f"*-{_BUNDLES}.txt")):
        if (named := _BUNDLES_FILE.fullmatch(path.name)) is None:
            continue
        try:
            made_of, units = (_read_sibling(path, named["program"], kind) for kind in (f"{_ANALYSIS}*", _UNITS))
            schedule = parse_schedule(path.read_text(), units) if _CUSTOM_CALL in made_of else None
        except ValueError:
            continue  # another version of the compiler may write the files in another form
        if schedule is not None and compute_schedule_figures(schedule):
            found.setdefault(named["kernel"], []).append(schedule)
    return found


def _read_sibling(path: Path, program: str, kind: str) -> str:
    """Read the compiler's file of another kind for the same program; raise `ValueError` unless exactly one exists."""
    (other,) = path.parent.glob(f"{program}-*-{kind}.txt")
    return other.read_text()


def compute_schedule_figures(schedule: TpuSchedule) -> dict[str, float]:
    """Compute the cycles of a kernel's blocks, which contain its matrix products; empty for kernels without any.

    A kernel is a loop over its grid. Each step of the loop runs some parts only under a condition. The *blocks* are the
    smallest conditional parts that contain matrix products. The shortest block is taken as the one without a mask, and
    the longest as the one with a mask.

    Returns:
      numbers by name. `full_block_cycles`: cycles of the shortest block. `masked_block_cycles`: cycles of the longest
      block, if there are several. `step_cycles`: cycles of a step that skips all parts. `mxu_share`: share of the
      matrix units' slots that the shortest block uses. `spill_slots`: number of loads and stores of spilled registers
      in the shortest block. `inner_loops`: number of loops inside blocks; the cycles of such a loop are counted once,
      however often it runs.
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
    """Find the bundles of one step of the grid, and of each block in the step; without blocks, the step is the block.

    A block is a conditional part of the step that contains matrix products and no smaller such part.
    """
    step = _find_grid_loop(schedule)
    multiplying = [part for part in _find_conditional_parts(schedule, step) if schedule.used(_MATRIX, part)]
    return step, [
        part
        for part in multiplying
        if not any(part.start <= other.start and other.stop <= part.stop and other != part for other in multiplying)
    ] or [step]


def _find_conditional_parts(schedule: TpuSchedule, step: range) -> list[range]:
    """Find the parts of a step that run only under a condition, as ranges of bundles; a jump skips each of them."""
    return [range(at + 1, to) for at, to in schedule.jumps.items() if to > at + 1 and at in step and to <= step.stop]


def _find_grid_loop(schedule: TpuSchedule) -> range:
    """Find the loop over the grid: the longest with matrix products, or all bundles if there is none."""
    whole = range(len(schedule.units))
    loops = [range(to, at + 1) for at, to in schedule.jumps.items() if to <= at]
    return max((loop for loop in loops if schedule.used(_MATRIX, loop)), key=len, default=whole)
