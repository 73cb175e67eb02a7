"""Measure which wrong functions a suite catches."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import datetime
import inspect
import json
import os
import platform
import random
import shlex
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from cases.case import Case
from cases.parameter_names import find_operand
from conformance import interrupts, packages, temporary_folders
from conformance.execution.implementation_registry import ImplementationNotFound, load_attribute
from conformance.mutation import smallest_cases, visibility
from conformance.mutation.mutant_list import MUTANTS, find_mutant, find_operands, is_by_hand
from conformance.mutation.planted_bug import PlantedBug
from conformance.mutation.substitution import load_through, read_recorded_calls
from conformance.mutation.suite import Suite, SuiteRun
from conformance.mutation.visibility import SeenCall
from conformance.session.failures import CannotJudge
from impls.contract.implementation import Implementation
from reports.mutant_results import (
    CAUGHT,
    NOT_RUN,
    PASSED,
    UNSEEN,
    MutantOutcome,
    MutantResults,
    read_results,
    write_results,
)

_LEAST_LIMIT, _LIMIT_FACTOR = 60.0, 5.0  # a suite may take this long with a wrong function, in seconds and in its time
_INTERRUPTED = "interrupted"
_NOT_LOOKED_FOR = "which input is lacking was not looked for (--inputs-seconds)"
FAMILIES = tuple(dict.fromkeys(bug.family for bug in MUTANTS))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a measurement.

    Attributes:
      command: the command of the suite and its arguments.
      function: `module:name` of the function that is replaced.
      through: `file.py:name` of a function that turns its calls into calls of the contract; empty to read them by name.
      families: the families of wrong functions to try; all if empty.
      every: whether each wrong function is tried, and not one of each kind.
      sample: how many kinds of each family are drawn, always the same ones; all if None.
      seconds: wrong functions are tried for this long; None without end.
      inputs_seconds: for this long it is looked for what the inputs lack.
      jobs: how many suites run at once.
      environment: the environment variables of the suite.
      save: a file that gets the results one by one; one that is there is continued.
    """

    command: Sequence[str]
    function: str
    through: str = ""
    families: Collection[str] = ()
    every: bool = False
    sample: int | None = None
    seconds: float | None = None
    inputs_seconds: float = 60.0
    jobs: int = 1
    save: Path | None = None
    environment: Mapping[str, str] = dataclasses.field(default_factory=lambda: dict(os.environ))


def mutants(
    function: str,
    command: str | Sequence[str],
    *,
    through: str = "",
    families: Collection[str] = (),
    every: bool = False,
    sample: int | None = None,
    seconds: float | None = None,
    inputs_seconds: float = 60.0,
    jobs: int = 1,
    save: str | Path | None = None,
) -> MutantResults:
    """Measure which wrong versions of a function its tests let through, as `python -m conformance mutants` does.

    Args:
      function: `module:function`, where the tests look it up.
      command: the command that runs the tests, such as `"pytest test_flash.py"`.
      through: `file.py:name` of a function that turns its calls into calls of the contract; calls are read by the names
        of parameters without it.
      families: the families of wrong functions to try; all if empty.
      every: whether each wrong function is tried, and not one of each kind.
      sample: how many kinds of each family are drawn, always the same ones; all if None.
      seconds: the time after which no further one is tried.
      inputs_seconds: for this long it is looked for what the inputs lack.
      jobs: how many suites run at once.
      save: a file that gets the results one by one; one that is there is continued.

    Raises:
      CannotJudge: if the tests fail with the true function, or with correct attention in its place.
    """
    packages.claim_names()
    words = shlex.split(command) if isinstance(command, str) else tuple(command)
    return measure(
        Options(
            command=words,
            function=function,
            through=through,
            families=families,
            every=every,
            sample=sample,
            seconds=seconds,
            inputs_seconds=inputs_seconds,
            jobs=jobs,
            save=None if save is None else Path(save),
        )
    )


def measure(options: Options, *, say: Callable[[str], None] = lambda line: None) -> MutantResults:
    """Measure which wrong functions the suite catches.

    Args:
      options: what is measured.
      say: is called with a line about each step.

    Raises:
      CannotJudge: if the suite fails with the true function, or with correct attention in its place.
    """
    with temporary_folders.use_temporary_folder("mutants") as folder:
        suite = Suite(options.command, options.function, options.through, Path(folder.path), options.environment)
        try:
            return _measure(options, suite, say)
        finally:
            suite.stop()


def _measure(options: Options, suite: Suite, say: Callable[[str], None]) -> MutantResults:
    done = _read_done(options)
    true = suite.run("true")
    if true.code != 0 and "compilation cache" in true.output:  # JAX's own tests refuse one
        suite.environment = {**suite.environment, "JAX_ENABLE_COMPILATION_CACHE": "false"}
        true = suite.run("true")
    if true.code != 0:
        raise CannotJudge(f"the suite fails as it is (exit code {true.code}):\n{_quote(true)}")
    suite.callers = suite.list_callers(true)
    if not true.reasons and not true.was_replaced:
        raise CannotJudge(
            f"the suite passes and never calls {options.function}: name the function where its tests look it up"
        )
    say(f"as it is, the suite passes in {true.seconds:.0f} s{_count_callers(suite)}")
    right = _run_right(suite, say)
    recorded = read_recorded_calls(right.folder)
    calls = visibility.describe_calls(recorded)
    if not calls:
        reasons = "; ".join(right.reasons) or "none was made with values"
        raise CannotJudge(f"no call of {options.function} could be read: {reasons}")
    left = {reason: count for reason, count in right.reasons.items() if not reason.startswith("broken")}
    say(f"{len(recorded)} calls recorded, of {len(calls)} kinds" + "".join(f"; {n} left: {r}" for r, n in left.items()))
    results = MutantResults(
        function=options.function,
        command=shlex.join(options.command),
        date=datetime.date.today().isoformat(),
        environment={
            "jax": jax.__version__,
            "python": platform.python_version(),
            "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        },
        calls=(len(recorded), len(calls)),
        left=left,
    )
    bugs = _select_bugs(options, suite.by_hand)
    say(f"comparing {len(bugs)} wrong functions with exact results on these calls")
    visible = visibility.find_visible(bugs, calls)
    supported = _build_supported(options)
    chosen = _choose(bugs, visible, every=options.every)
    say(f"{len(chosen)} wrong functions to try: {len(visible)} of {len(bugs)} differ on these calls")
    outcomes = _run_wrong(chosen, visible, suite, right.seconds, options, done, results, say)
    kinds = {(bug.family, bug.kind) for bug in bugs if bug.name in visible}
    unseen = {(bug.family, bug.kind): bug for bug in reversed(bugs) if (bug.family, bug.kind) not in kinds}
    stopped = any(one.detail == _INTERRUPTED for one in outcomes)
    if not stopped:
        say("looking for the smallest cases that catch what passed, and for what the inputs lack")
    cases = [] if stopped else smallest_cases.list_cases(supported)
    start, few = time.monotonic(), smallest_cases.choose_few_sizes(cases)
    for bug in reversed(unseen.values()):
        if not smallest_cases.list_possible(bug, few):
            continue
        if time.monotonic() - start > options.inputs_seconds:
            outcomes.append(_describe(bug, UNSEEN, detail=_NOT_LOOKED_FOR))
        elif (found := smallest_cases.find_smallest_case(bug, few, calls)) is not None:
            detail = visibility.say_lacking(found[1], calls)
            outcomes.append(_describe(bug, UNSEEN, detail=detail, case=found[0].id))
    outcomes = [_add_case(one, cases) if one.state == PASSED and cases else one for one in outcomes]
    results = dataclasses.replace(results, outcomes=tuple(outcomes), interrupted=stopped)
    if options.save is not None:
        write_results(options.save, results)
    return results


def _quote(run: SuiteRun) -> str:
    return "\n".join(f"  {line}" for line in run.output.rstrip().splitlines()[-15:])


def _count_callers(suite: Suite) -> str:
    return f"; {len(suite.callers)} of its tests call the function" if suite.callers else ""


def _run_right(suite: Suite, say: Callable[[str], None]) -> SuiteRun:
    """Run the suite with correct attention. Without a backward pass by hand, it can be differentiated forwards."""
    for suite.by_hand in (True, False):
        right = suite.run("right")
        if right.code == 0:
            note = "" if suite.by_hand else ", with a backward pass by JAX: wrong ones written by hand are not tried"
            say(f"with correct attention in its place it passes in {right.seconds:.0f} s{note}")
            return right
    raise CannotJudge(
        "with correct attention in its place the suite fails: it compares bits or messages, looks inside the function, "
        f"or the function is not what its names say\n{_quote(right)}"
    )


def _select_bugs(options: Options, by_hand: bool) -> list[PlantedBug]:
    if unknown := [name for name in options.families if name not in FAMILIES]:
        raise CannotJudge(f"there is no family {unknown[0]!r}: there are {', '.join(FAMILIES)}")
    bugs = [bug for bug in MUTANTS if not options.families or bug.family in options.families]
    if options.sample is not None:
        rng = random.Random(0)
        kinds = {family: dict.fromkeys(bug.kind for bug in bugs if bug.family == family) for family in FAMILIES}
        drawn = {name: rng.sample(list(own), min(options.sample, len(own))) for name, own in kinds.items()}
        bugs = [bug for bug in bugs if bug.kind in drawn[bug.family]]
    return bugs if by_hand else [bug for bug in bugs if not is_by_hand(bug)]


def _build_supported(options: Options) -> Implementation:
    """Build an implementation with the operands that the function has, as far as its names say it."""
    if options.through:
        module = load_through(options.through)[1]
        return smallest_cases.build_stub(getattr(module, "PARAMETERS", smallest_cases.PARAMETERS))
    try:
        signature = inspect.signature(load_attribute(options.function))
    except ImplementationNotFound as error:
        raise CannotJudge(str(error)) from error
    operands = find_operands(signature)
    roles = {find_operand(name) for name in signature.parameters if name not in operands}
    roles |= {"mask"} if "kv_lengths" in roles else set()
    roles |= {"bias"} if "alibi_slopes" in roles else set()
    return smallest_cases.build_stub(roles)


def _choose(bugs: Sequence[PlantedBug], visible: dict[str, SeenCall], *, every: bool) -> list[PlantedBug]:
    """Choose one visible wrong function of each kind, or all."""
    seen = [bug for bug in bugs if bug.name in visible]
    if every:
        return seen
    return list({(bug.family, bug.kind): bug for bug in reversed(seen)}.values())[::-1]


def _run_wrong(
    bugs: Sequence[PlantedBug],
    visible: dict[str, SeenCall],
    suite: Suite,
    seconds: float,
    options: Options,
    done: dict[str, MutantOutcome],
    results: MutantResults,
    say: Callable[[str], None],
) -> list[MutantOutcome]:
    """Run the suite with one wrong function after another; keep what is done when a signal arrives.

    They are in random order, so that an end of the time leaves some of each family.
    """
    start = time.monotonic()
    limit = max(_LEAST_LIMIT, _LIMIT_FACTOR * seconds)
    found: dict[str, MutantOutcome] = {bug.name: done[bug.name] for bug in bugs if bug.name in done}
    lock = threading.Lock()
    stopped = threading.Event()

    def try_one(bug: PlantedBug) -> None:
        late = bool(found) and options.seconds is not None and time.monotonic() - start > options.seconds
        if late or stopped.is_set():
            return
        run = suite.run(bug.name, seconds=limit)
        outcome = _build_outcome(bug, run, visible[bug.name], is_pytest=suite.is_pytest)
        if stopped.is_set():
            return
        with lock:
            found[bug.name] = outcome
            if options.save is not None:
                write_results(options.save, dataclasses.replace(results, outcomes=tuple(found.values())))
            text = outcome.detail or f"{outcome.seconds:.0f} s"
            say(f"[{len(found)}/{len(bugs)}] {outcome.state:<7} {bug.family}: {outcome.sentence} ({text})")

    with concurrent.futures.ThreadPoolExecutor(max_workers=options.jobs) as pool:
        left = [bug for bug in bugs if bug.name not in found]
        waiting = [pool.submit(try_one, bug) for bug in random.Random(0).sample(left, len(left))]
        try:
            for future in concurrent.futures.as_completed(waiting):
                future.result()
        except KeyboardInterrupt:
            interrupts.stop_raising()
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            suite.stop()
            say("interrupted: what was found is kept")
    reason = _INTERRUPTED if stopped.is_set() else "the time was over"
    return [found.get(bug.name, _describe(bug, NOT_RUN, detail=reason)) for bug in bugs]


def _describe(bug: PlantedBug, state: str, **more: str | float) -> MutantOutcome:
    described: dict[str, Any] = {**more, "sentence": bug.says}
    return MutantOutcome(bug.name, bug.family, bug.reference, state, **described)


def _build_outcome(bug: PlantedBug, run: SuiteRun, seen: SeenCall, *, is_pytest: bool) -> MutantOutcome:
    call = ", ".join(sorted(fact for fact in seen.facts if not fact.startswith("a gradient of ")))
    broken = [reason for reason in run.reasons if reason.startswith("broken")]
    if broken:
        return _describe(bug, NOT_RUN, call=call, detail=broken[0], seconds=run.seconds)
    if run.code is None:  # no test has judged it, and a slow machine is no verdict
        return _describe(bug, NOT_RUN, call=call, detail="it ran past its time", seconds=run.seconds)
    if run.code == 0:
        return _describe(bug, PASSED, call=call, seconds=run.seconds)
    if is_pytest and run.code != 1 and not run.first_failure:  # it could not run the tests
        return _describe(bug, NOT_RUN, call=call, detail=f"pytest ended with {run.code}", seconds=run.seconds)
    return _describe(bug, CAUGHT, call=call, detail=run.first_failure or f"exit code {run.code}", seconds=run.seconds)


def _add_case(outcome: MutantOutcome, cases: Sequence[Case]) -> MutantOutcome:
    """Return the outcome with the smallest case that catches it."""
    found = smallest_cases.find_smallest_case(find_mutant(outcome.name), cases)
    return dataclasses.replace(outcome, case="" if found is None else found[0].id)


def _read_done(options: Options) -> dict[str, MutantOutcome]:
    """Read what an earlier run has found, if it was of the same suite."""
    if options.save is None or not options.save.exists() or not options.save.stat().st_size:
        return {}
    try:
        before = read_results(options.save)
    except (OSError, ValueError, json.JSONDecodeError) as error:
        raise CannotJudge(f"--save={options.save}: {error}: name another file") from error
    if (before.function, before.command) != (options.function, shlex.join(options.command)):
        raise CannotJudge(f"--save={options.save} is about `{before.command}`: name another file")
    return {one.name: one for one in before.outcomes if one.state in (CAUGHT, PASSED)}
