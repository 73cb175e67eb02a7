"""Implement `cycles --case` for TPUs: compare the static cycles of kernels, each at its best block sizes.

Static cycles are estimates from the compiler's schedules. `print_comparison` prints a table with one row for each
kernel and one column for each TPU generation.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console

from cases.case import Case
from conformance.accelerators.targets import CompileTarget
from conformance.cost.static import static_tuning
from conformance.cost.static.static_tuning import CompileCall, CompileResult, Estimate
from conformance.execution.executor import Executor
from conformance.executor_tasks import native_compilation
from impls.contract.implementation import Implementation
from impls.contract.tunable import TuningParameter

ALL_KERNELS = "all kernels"


@dataclasses.dataclass(frozen=True)
class ComparisonRow:
    """A row of the table: one kernel of one implementation on one case.

    Attributes:
      case: the case.
      implementation: name of the implementation.
      parameter: name of the parameter that sets the kernel's block sizes, or `ALL_KERNELS`.
      best: for each TPU generation, the estimate at the best block sizes.
    """

    case: Case
    implementation: str
    parameter: str
    best: tuple[Estimate, ...]

    def line(self, baseline: ComparisonRow) -> str:
        """Format the row in Markdown, with the ratio of its cycles to those of a baseline row."""
        cells = [self.case.id, f"`{self.implementation}`", self.parameter]
        cells += [_format_cell(one, other) for one, other in zip(self.best, baseline.best, strict=True)]
        return f"| {' | '.join(cells)} |"


def print_comparison(
    shown: Console,
    implementations: Sequence[Implementation],
    cases: Sequence[Case],
    targets: Sequence[CompileTarget],
    parameters: Sequence[str],
    on_step: Callable[[str], None],
) -> int:
    """Print a table of static cycles; each row is printed as soon as it is known.

    Args:
      shown: the console to print to.
      implementations: the implementations to compare; ratios are relative to the first one.
      cases: the cases to compile.
      targets: the TPU generations, one column each.
      parameters: names of the parameters whose kernels are shown, such as `forward`.
      on_step: function that is called with a description of each step, for the progress display.

    Returns:
      the number of cells with known cycles.
    """
    shown.print("Static kilocycles of a whole call at its best blocks, never checked on a chip; (ratio to first row)\n")
    heads = ["case", "implementation", "kernel", *(target.name for target in targets)]
    for line in (heads, ["---"] * 3 + ["---:"] * len(targets)):
        shown.print(f"| {' | '.join(line)} |", highlight=False, soft_wrap=True)
    known = 0
    for case in cases:
        first: dict[str, ComparisonRow] = {}
        for implementation in implementations:
            for row in iter_rows(implementation, case, targets, parameters, on_step):
                text = row.line(first.setdefault(row.parameter, row))
                shown.print(text, highlight=False, soft_wrap=True, markup=False)
                known += sum(one.cycles is not None for one in row.best)
    return known


def iter_rows(
    implementation: Implementation,
    case: Case,
    targets: Sequence[CompileTarget],
    parameters: Sequence[str],
    on_step: Callable[[str], None],
) -> Iterator[ComparisonRow]:
    """Yield a row for each kernel that has block sizes to choose.

    If no kernel has block sizes to choose, yield one row for all kernels together.
    """
    if (reason := implementation.supports(case)) is not None:
        best = tuple(Estimate({}, None, reason) for _ in targets)
        yield ComparisonRow(case, implementation.name, ALL_KERNELS, best)
        return
    declared = implementation.tunable
    known = () if declared is None else declared.parameters
    asked = [one for one in known if one.name in parameters and (one.kernel or one.ways)]
    told: CompileCall = functools.partial(_compile_call, gradients=any(name != "forward" for name in parameters))
    found = [_find_best(implementation, case, target, asked, told, on_step) for target in targets]
    for number, name in enumerate([parameter.name for parameter in asked] or [ALL_KERNELS]):
        yield ComparisonRow(case, implementation.name, name, tuple(each[number] for each in found))


def _find_best(
    implementation: Implementation,
    case: Case,
    target: CompileTarget,
    parameters: Sequence[TuningParameter],
    told: CompileCall,
    on_step: Callable[[str], None],
) -> list[Estimate]:
    """Return for each parameter the estimate of the candidate with the fewest cycles, for one TPU generation.

    Without parameters, return one estimate of the whole implementation. An estimate without cycles contains the reason.
    """
    on_step(f"compiling {implementation.name} for {target.name}, {case.id}")
    if not parameters or implementation.tunable is None:
        return [_estimate_fixed(told(Executor(implementation), native_compilation.build_problem(case), target))]
    choices = static_tuning.tune_statically(
        implementation, implementation.tunable, case, target, told, parameters=parameters, on_step=on_step
    )
    return [min(choice.estimates, key=lambda one: one.whole) for choice in choices]


def _estimate_fixed(told: CompileResult) -> Estimate:
    """Estimate an implementation without parameters as the sum of the cycles of its kernel calls.

    `told` is the result of compiling it.
    """
    if isinstance(told, str):
        return Estimate({}, None, told)
    calls = [value for name, value in told.items() if name.endswith(".call_cycles")]
    return Estimate({}, sum(calls) if calls else None, "" if calls else "the cycles of its call are not known")


def _compile_call(executor: Executor, problem: object, target: CompileTarget, *, gradients: bool) -> CompileResult:
    one = native_compilation.compile_largest_program(executor, problem, target, gradients=gradients)  # type: ignore[arg-type] # a problem
    return one.figures if one.outcome == "compiled" else f"{one.outcome}: {one.reason}"


def _format_cell(one: Estimate, baseline: Estimate) -> str:
    if one.cycles is None:
        return one.reason
    ratio = "" if one is baseline or not baseline.cycles else f" ({one.whole / baseline.whole:.2f})"
    beside = f" + {one.beside / 1000:,.1f}" if one.beside else ""
    named = len(one.setting) == 1  # show the name of a single number; several are shown without names
    chosen = ", ".join(f"{name}={value}" if named else str(value) for name, value in one.setting.items())
    return f"{one.cycles / 1000:,.1f}{beside}{ratio}" + (f" at {chosen}" if chosen else "")
