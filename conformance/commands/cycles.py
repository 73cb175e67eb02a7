"""`cycles`: what kernels cost by what their compilers made of them.

Of TPU kernels schedules, against what was recorded or other kernels; new figures. Of GPU kernels bounds, side by side.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from rich.console import Console

from cases.case import parse
from conformance import environment
from conformance.accelerators import speed_bar
from conformance.accelerators.speed_bar import Bar
from conformance.accelerators.targets import TPU, CompileTarget, targets_of
from conformance.calling import registry
from conformance.calling.execution import Executor
from conformance.commands import cycles_beside, cycles_gpu, lookup
from conformance.commands.errors import CannotJudge
from conformance.commands.progress import Steps
from conformance.driving import compiled

NEW_FIGURES = "new figures are asked for by `python -m conformance cycles --save`"


def why_not(platform: str = "tpu") -> str | None:
    """Why there are no schedules of TPU kernels here, or no GPU kernel can be taken apart; or None."""
    if platform == "gpu":
        return cycles_gpu.why_not()
    if TPU.missing is not None:
        return TPU.missing
    if environment.schedules() is None:
        return "libtpu writes no schedules here: there is a TPU, or JAX was loaded before this project"
    return None


def cycles(arguments: argparse.Namespace) -> int:
    """`cycles`: compile, show, and compare or keep."""
    gpus = {target.name: target for target in targets_of("gpu")}
    platform = "gpu" if arguments.target and all(name in gpus for name in arguments.target) else "tpu"
    if (reason := why_not(platform)) is not None:
        raise CannotJudge(reason)
    known = gpus if platform == "gpu" else {target.name: target for target in targets_of("tpu")}
    if wrong := [name for name in arguments.target if name not in known]:
        raise CannotJudge(f"no TPU is called {wrong[0]}: known are {', '.join(known)}")
    targets = [known[name] for name in arguments.target or known]
    if arguments.case:
        return _beside(arguments, targets, platform)
    if arguments.knob:
        raise CannotJudge("--knob is of --case")
    return _against_recorded(arguments, targets, platform)


def _against_recorded(arguments: argparse.Namespace, targets: Sequence[CompileTarget], platform: str) -> int:
    """What is recorded, compiled again; or recorded anew."""
    all_bars = speed_bar.GPU_BARS if platform == "gpu" else speed_bar.BARS
    bars = [bar for bar in all_bars if not arguments.impl or bar.implementation in arguments.impl]
    if not bars:
        raise CannotJudge(f"nothing is recorded of {', '.join(arguments.impl)}")
    compiler = speed_bar.compiler(platform)
    recorded = speed_bar.read().get(compiler, {})
    shown, found, red = Console(), dict[str, speed_bar.Figures](), 0
    with Steps(Console(stderr=True)) as steps:
        for bar in bars:
            for target in (one for one in targets if bar.asks(one.name)):
                place = speed_bar.key(bar, target.name)
                steps.say(f"compiling {place}")
                found[place] = measured(bar, target)
                wrong = speed_bar.slower(recorded.get(place, {}), found[place])
                red += bool(wrong)
                shown.print(_line(place, found[place], recorded.get(place)), highlight=False, soft_wrap=True)
                for line in wrong:
                    shown.print(f"  ✗ {line}", highlight=False, soft_wrap=True)
    if arguments.save:
        speed_bar.write(found, platform=platform)
        shown.print(f"{len(found)} entries of {compiler} written to {speed_bar.TABLE}", soft_wrap=True)
        return 0
    if not recorded:
        shown.print(f"nothing is recorded of {compiler}: {NEW_FIGURES}", soft_wrap=True)
        return 2
    return 1 if red else 0


def _beside(arguments: argparse.Namespace, targets: Sequence[CompileTarget], platform: str) -> int:
    """Kernels side by side on the cases that are named."""
    if not arguments.impl or arguments.save:
        raise CannotJudge("--case compares implementations, which --impl names, and keeps nothing")
    if platform == "gpu" and arguments.knob:
        raise CannotJudge("no --knob of GPU kernels is tried")
    implementations = [registry.find(name) for name in arguments.impl]
    cases = [lookup.case(text) for text in arguments.case]
    shown = Console()
    with Steps(Console(stderr=True)) as steps:
        if platform == "gpu":
            known = cycles_gpu.show(shown, implementations, cases, targets, steps.say)
        else:
            known = cycles_beside.show(shown, implementations, cases, targets, arguments.knob or ["forward"], steps.say)
    return 0 if known else 2


def measured(bar: Bar, target: CompileTarget) -> speed_bar.Figures:
    """The figures of a bar for a generation, static ones. Raises `CannotJudge` if it does not compile."""
    case = parse(bar.case)
    executor = Executor(registry.find(bar.implementation))
    one = compiled.fullest(executor, compiled.problem_of(case), target, gradients=case.phase == "train")
    if one.outcome != "compiled":
        raise CannotJudge(f"{bar.implementation} for {target.name}: {one.outcome}: {one.reason}")
    return speed_bar.estimates(one.figures)


def _line(place: str, now: Mapping[str, float], recorded: Mapping[str, float] | None) -> str:
    """One place on a line: each kernel with its cycles, and what it had."""
    parts = []
    for name, value in now.items():
        before = (recorded or {}).get(name)
        parts.append(f"{name} {value:,.6g}" + ("" if before is None else f" ({value / before - 1:+.1%})"))
    return f"{place}: {', '.join(parts) or 'no figure was read'}"
