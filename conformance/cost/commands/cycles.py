"""Implement the command `cycles`: compare static cycles of kernels with recorded baselines, or with other kernels.

Static cycles are computed without a chip. For TPU kernels they are estimates from the compiler's schedules; for GPU
kernels they are lower bounds from the machine code. With `--save` the command records new baselines.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from rich.console import Console

from cases.case_id import parse_case_id
from conformance import environment
from conformance.accelerators.targets import TPU, CompileTarget, list_targets
from conformance.commands.progress_display import StepProgress
from conformance.cost.commands import cycle_comparison, gpu_cycles
from conformance.cost.static import cycle_baselines
from conformance.cost.static.cycle_baselines import CycleBaseline
from conformance.execution import implementation_registry
from conformance.execution.executor import Executor
from conformance.executor_tasks import native_compilation
from conformance.session import project_lookup
from conformance.session.failures import CannotJudge

NEW_FIGURES = "`python -m conformance cycles --save` records new figures"


def explain_unavailable(platform: str = "tpu") -> str | None:
    """Return the reason why static cycles of a platform cannot be computed on this machine; None if they can."""
    if platform == "gpu":
        return gpu_cycles.explain_gpu_unavailable()
    if TPU.missing is not None:
        return TPU.missing
    if environment.find_schedule_folder() is None:
        return "libtpu writes no schedules here: there is a TPU, or JAX was loaded before this project"
    return None


def run_cycles(arguments: argparse.Namespace) -> int:
    """Compile kernels, and compare or record their static cycles as the arguments say; return the exit code."""
    gpus = {target.name: target for target in list_targets("gpu")}
    platform = "gpu" if arguments.target and all(name in gpus for name in arguments.target) else "tpu"
    if (reason := explain_unavailable(platform)) is not None:
        raise CannotJudge(reason)
    known = gpus if platform == "gpu" else {target.name: target for target in list_targets("tpu")}
    if wrong := [name for name in arguments.target if name not in known]:
        raise CannotJudge(f"no TPU is called {wrong[0]}: known are {', '.join(known)}")
    targets = [known[name] for name in arguments.target or known]
    if arguments.case:
        return _compare_implementations(arguments, targets, platform)
    if arguments.knob:
        raise CannotJudge("--knob needs --case")
    return _compare_with_baselines(arguments, targets, platform)


def _compare_with_baselines(arguments: argparse.Namespace, targets: Sequence[CompileTarget], platform: str) -> int:
    """Compile the kernels that have baselines, and compare or record their static cycles; return the exit code."""
    all_bars = cycle_baselines.GPU_BASELINES if platform == "gpu" else cycle_baselines.TPU_BASELINES
    bars = [bar for bar in all_bars if not arguments.impl or bar.implementation in arguments.impl]
    if not bars:
        raise CannotJudge(f"nothing is recorded of {', '.join(arguments.impl)}")
    compiler = cycle_baselines.get_compiler_version(platform)
    recorded = cycle_baselines.read_baselines().get(compiler, {})
    shown, found, red = Console(), dict[str, cycle_baselines.Figures](), 0
    with StepProgress(Console(stderr=True)) as steps:
        for bar in bars:
            for target in (one for one in targets if bar.asks(one.name)):
                place = cycle_baselines.format_key(bar, target.name)
                steps.say(f"compiling {place}")
                found[place] = measure_baseline(bar, target)
                wrong = cycle_baselines.list_regressions(recorded.get(place, {}), found[place])
                red += bool(wrong)
                shown.print(_format_line(place, found[place], recorded.get(place)), highlight=False, soft_wrap=True)
                for line in wrong:
                    shown.print(f"  ✗ {line}", highlight=False, soft_wrap=True)
    if arguments.save:
        cycle_baselines.write_baselines(found, platform=platform)
        shown.print(f"{len(found)} entries of {compiler} written to {cycle_baselines.TABLE}", soft_wrap=True)
        return 0
    if not recorded:
        shown.print(f"nothing is recorded of {compiler}: {NEW_FIGURES}", soft_wrap=True)
        return 2
    return 1 if red else 0


def _compare_implementations(arguments: argparse.Namespace, targets: Sequence[CompileTarget], platform: str) -> int:
    """Print the static cycles of implementations side by side on the given cases; return the exit code."""
    if not arguments.impl or arguments.save:
        raise CannotJudge("--case compares implementations: name them by --impl, and leave out --save")
    if platform == "gpu" and arguments.knob:
        raise CannotJudge("--knob is for TPU kernels only")
    implementations = [implementation_registry.find_implementation(name) for name in arguments.impl]
    cases = [project_lookup.parse_case(text) for text in arguments.case]
    shown = Console()
    with StepProgress(Console(stderr=True)) as steps:
        if platform == "gpu":
            known = gpu_cycles.print_gpu_cycles(shown, implementations, cases, targets, steps.say)
        else:
            known = cycle_comparison.print_comparison(
                shown, implementations, cases, targets, arguments.knob or ["forward"], steps.say
            )
    return 0 if known else 2


def measure_baseline(bar: CycleBaseline, target: CompileTarget) -> cycle_baselines.Figures:
    """Compile a baseline's call for one chip, and return its static cycles by name. Raises `CannotJudge`."""
    case = parse_case_id(bar.case)
    executor = Executor(implementation_registry.find_implementation(bar.implementation))
    one = native_compilation.compile_largest_program(
        executor, native_compilation.build_problem(case), target, gradients=case.phase == "train"
    )
    if one.outcome != "compiled":
        raise CannotJudge(f"{bar.implementation} for {target.name}: {one.outcome}: {one.reason}")
    return cycle_baselines.select_estimates(one.figures)


def _format_line(place: str, now: Mapping[str, float], recorded: Mapping[str, float] | None) -> str:
    """Format the static cycles of one baseline as a line, each number with its change since it was recorded."""
    parts = []
    for name, value in now.items():
        before = (recorded or {}).get(name)
        parts.append(f"{name} {value:,.6g}" + ("" if before is None else f" ({value / before - 1:+.1%})"))
    return f"{place}: {', '.join(parts) or 'no static cycles were found'}"
