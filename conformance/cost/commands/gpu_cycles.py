"""Implement `cycles --case` for GPUs: print lower bounds on the cycles of GPU kernels side by side.

The bounds are computed from the kernels' machine code (`conformance.cost.gpu`). No GPU is needed, but NVIDIA's compiler
and disassembler are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from rich.console import Console

from cases.case import Case
from conformance.accelerators import targets
from conformance.accelerators.targets import CompileTarget
from conformance.cost.gpu import gpu_cycle_bounds
from conformance.execution.executor import Executor
from conformance.executor_tasks import native_compilation
from impls.contract.implementation import Implementation

COLUMNS = ("case", "implementation", "kernel", "at least", "masked", "issue", "masked", "tensor", "shared")
RESOURCE_COLUMNS = ("registers", "spilled", "warps")
_EXPLANATION = (
    f"Least cycles of a multiprocessor for {gpu_cycle_bounds.PAIRS_PER_FIGURE:,} pairs of a query and a key: of the "
    "busiest unit, and of three units; for full blocks, and for masked blocks. They are computed from machine code: no "
    "chip has confirmed them, and waits are not included."
)


def explain_gpu_unavailable() -> str | None:
    """Return the reason why this machine cannot compile or disassemble GPU kernels; None if it can."""
    if targets.GPU.missing is not None:
        return targets.GPU.missing
    if targets.find_disassembler() is None:
        return f"nvdisasm, which disassembles kernels, is not installed: {targets.GPU.install}"
    return None


def print_gpu_cycles(
    shown: Console,
    implementations: Sequence[Implementation],
    cases: Sequence[Case],
    chosen: Sequence[CompileTarget],
    on_step: Callable[[str], None],
) -> int:
    """Print a table of cycle bounds for each GPU; return the number of kernels whose bounds are known.

    Each row is printed as soon as it is known. Cases of phase `train` include the kernels of the backward pass.
    """
    known = 0
    for target in chosen:
        shown.print(f"{target.name}. {_EXPLANATION}\n", highlight=False, soft_wrap=True)
        heads = (*COLUMNS, *RESOURCE_COLUMNS)
        for row in (heads, ("---",) * 3 + ("---:",) * (len(heads) - 3)):
            shown.print(f"| {' | '.join(row)} |", highlight=False, soft_wrap=True)
        for case in cases:
            for implementation in implementations:
                on_step(f"compiling {implementation.name} for {target.name}, {case.id}")
                for cells in iter_gpu_rows(implementation, case, target):
                    line = f"| {case.id} | `{implementation.name}` | {' | '.join(cells)} |"
                    shown.print(line, highlight=False, soft_wrap=True, markup=False)
                    known += len(cells) > 1
        shown.print()
    return known


def iter_gpu_rows(implementation: Implementation, case: Case, target: CompileTarget) -> Iterator[tuple[str, ...]]:
    """Yield a row of cells for each kernel; if no bound is known, yield one row with a single cell, the reason."""
    reason = implementation.supports(case)
    if implementation.accelerator.native is None:
        reason = reason or implementation.accelerator.absent or "it declares no `native` call to compile"
    if reason is not None:
        yield (reason,)
        return
    gradients = case.phase == "train"
    one = native_compilation.compile_largest_program(
        Executor(implementation), native_compilation.build_problem(case), target, gradients=gradients
    )
    kernels = [
        name.removesuffix(f".{gpu_cycle_bounds.BOUND_FIGURE}")
        for name in one.figures
        if name.endswith(f".{gpu_cycle_bounds.BOUND_FIGURE}")
    ]
    if not kernels:
        yield (f"{one.outcome}: {one.reason}" if one.reason else "no loop with matrix products was found",)
    for kernel in kernels:
        yield (kernel, *iter_cells({name: one.figures.get(f"{kernel}.{name}", 0.0) for name in _NEEDED_FIGURES}))


_NEEDED_FIGURES = (
    *(gpu_cycle_bounds.BOUND_FIGURE, f"masked_{gpu_cycle_bounds.BOUND_FIGURE}", "masked_issue_cycles"),
    *(f"{unit}_cycles" for unit in gpu_cycle_bounds.UNITS),
    *("registers", "spilled_bytes", "occupancy"),
)


def iter_cells(told: Mapping[str, float]) -> Iterator[str]:
    """Yield the bounds, registers, spills and resident warps of a kernel as cells of the table."""
    unit = max(gpu_cycle_bounds.UNITS, key=lambda unit: told[f"{unit}_cycles"])
    yield f"{told[gpu_cycle_bounds.BOUND_FIGURE]:.1f} ({unit})"
    for name in (
        f"masked_{gpu_cycle_bounds.BOUND_FIGURE}",
        "issue_cycles",
        "masked_issue_cycles",
        "tensor_cycles",
        "shared_cycles",
    ):
        yield f"{told[name]:.1f}"
    yield f"{told['registers']:.0f}"
    yield f"{told['spilled_bytes']:.0f}"
    yield f"{gpu_cycle_bounds.MAX_WARPS * told['occupancy']:.0f}"
