"""`cycles --target=h100`: bounds of GPU kernels side by side, by the instructions of their loops."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from rich.console import Console

from cases.case import Case
from conformance.accelerators import gpu_bound, targets
from conformance.accelerators.targets import CompileTarget
from conformance.calling.execution import Executor
from conformance.contract import Implementation
from conformance.driving import compiled

HEADS = ("case", "implementation", "kernel", "at least", "masked", "issue", "masked", "tensor", "shared")
RESOURCES = ("registers", "spilled", "warps")
_SAID = (
    f"Cycles of a multiprocessor for {gpu_bound.PAIRS:,} pairs of a query and a key, at least: the unit that takes "
    "longest, and three units; of full blocks, and of masked ones. Static: no chip was asked, and no wait is in it."
)


def why_not() -> str | None:
    """Why no GPU kernel can be taken apart here, or None."""
    if targets.GPU.missing is not None:
        return targets.GPU.missing
    if targets.disassembler() is None:
        return f"nvdisasm is not installed, which takes kernels apart: {targets.GPU.install}"
    return None


def show(
    shown: Console,
    implementations: Sequence[Implementation],
    cases: Sequence[Case],
    chosen: Sequence[CompileTarget],
    on_step: Callable[[str], None],
) -> int:
    """Print a table for each target, a row as soon as it is known; how many kernels have figures.

    Args:
      shown: where to.
      implementations: whose kernels, with those of the backward pass in cases of training.
      cases: what is compiled.
      chosen: for which GPUs.
      on_step: told what happens now.
    """
    known = 0
    for target in chosen:
        shown.print(f"{target.name}. {_SAID}\n", highlight=False, soft_wrap=True)
        heads = (*HEADS, *RESOURCES)
        for row in (heads, ("---",) * 3 + ("---:",) * (len(heads) - 3)):
            shown.print(f"| {' | '.join(row)} |", highlight=False, soft_wrap=True)
        for case in cases:
            for implementation in implementations:
                on_step(f"compiling {implementation.name} for {target.name}, {case.id}")
                for cells in rows(implementation, case, target):
                    line = f"| {case.id} | `{implementation.name}` | {' | '.join(cells)} |"
                    shown.print(line, highlight=False, soft_wrap=True, markup=False)
                    known += len(cells) > 1
        shown.print()
    return known


def rows(implementation: Implementation, case: Case, target: CompileTarget) -> Iterator[tuple[str, ...]]:
    """The cells of each kernel, or one that says why there are none."""
    reason = implementation.supports(case)
    if implementation.accelerator.native is None:
        reason = reason or implementation.accelerator.absent or "it says nothing that its compiler takes"
    if reason is not None:
        yield (reason,)
        return
    gradients = case.phase == "train"
    one = compiled.fullest(Executor(implementation), compiled.problem_of(case), target, gradients=gradients)
    kernels = [name.removesuffix(f".{gpu_bound.LEAST}") for name in one.figures if name.endswith(f".{gpu_bound.LEAST}")]
    if not kernels:
        yield (f"{one.outcome}: {one.reason}" if one.reason else "no loop of products was found",)
    for kernel in kernels:
        yield (kernel, *cells_of({name: one.figures.get(f"{kernel}.{name}", 0.0) for name in _NEEDED}))


_NEEDED = (
    *(gpu_bound.LEAST, f"masked_{gpu_bound.LEAST}", "masked_issue_cycles"),
    *(f"{unit}_cycles" for unit in gpu_bound.UNITS),
    *("registers", "spilled_bytes", "occupancy"),
)


def cells_of(told: Mapping[str, float]) -> Iterator[str]:
    """A kernel's figures as the table has them."""
    unit = max(gpu_bound.UNITS, key=lambda unit: told[f"{unit}_cycles"])
    yield f"{told[gpu_bound.LEAST]:.1f} ({unit})"
    for name in (f"masked_{gpu_bound.LEAST}", "issue_cycles", "masked_issue_cycles", "tensor_cycles", "shared_cycles"):
        yield f"{told[name]:.1f}"
    yield f"{told['registers']:.0f}"
    yield f"{told['spilled_bytes']:.0f}"
    yield f"{gpu_bound.WARPS * told['occupancy']:.0f}"
