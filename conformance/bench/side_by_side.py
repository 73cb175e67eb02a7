"""Implementations side by side: each compiled, looked at, and timed in turn with the others on the same operands."""

from __future__ import annotations

import dataclasses
import functools
import gc
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import numpy as np

from cases.case import Case
from cases.inputs import Problem, draw, draw_cotangent
from conformance import interrupts
from conformance.accelerators.compilation import first_words
from conformance.bench import work
from conformance.bench.agreement import Finding, Sample
from conformance.bench.ceiling import Product
from conformance.bench.measurements import AGREES, BACKWARD, DIFFERS, Measurement, Quartiles
from conformance.bench.programs import Program, compile_program, device_peak
from conformance.bench.sampling import Sampled, interleave, paired
from conformance.calling import mishaps
from conformance.calling.execution import Executor
from conformance.contract import Implementation
from conformance.records import ERROR, UNJUDGED, UNSUPPORTED
from conformance.truth.tolerances import Tolerances

# On an accelerator a call returns before it is done: samples of several calls hide what dispatching each costs. On CPU
# calls could overlap, so that each is waited for.
_LEAST_SECONDS = {"cpu": 0.0}
_LEAST_ELSEWHERE = 5e-3
_PRODUCT = "the matrix product"  # no implementation is called so


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """How long to measure: most rounds of each comparison, and most seconds of timing over all of them."""

    rounds: int = 30
    seconds: float = math.inf


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A case with its operands, and what does not depend on the implementation."""

    case: Case
    problem: Problem
    cotangent: np.ndarray
    sample: Sample

    @classmethod
    def of(cls, case: Case, tolerances: Tolerances) -> Drawn:
        """Draw the operands of `case`."""
        problem, cotangent = draw(case), draw_cotangent(case).out
        return cls(case, problem, cotangent, Sample(case, problem, cotangent, tolerances))

    @functools.cached_property
    def pairs(self) -> int:
        """How many pairs the mask allows."""
        return work.allowed_pairs(self.problem)


@dataclasses.dataclass(frozen=True)
class Entrant:
    """An implementation that can be timed: its program, what a look at its results found, and its memory."""

    implementation: Implementation
    program: Program
    finding: Finding
    memory: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Compared:
    """What a comparison gave, and whether Ctrl-C ended it."""

    measurements: list[Measurement]
    interrupted: bool


def compare_all(
    implementations: Sequence[Implementation],
    comparisons: Sequence[tuple[Case, str]],
    limits: Limits,
    tolerances: Tolerances,
    *,
    on_step: Callable[[str], None] = lambda text: None,
    on_compared: Callable[[list[Measurement]], None] = lambda found: None,
) -> Compared:
    """Time implementations on each case and phase of `comparisons`.

    Args:
      implementations: what to time; the first is the baseline wherever it runs.
      comparisons: cases, each with a phase.
      limits: how long; the seconds that a comparison leaves over go to those after it.
      tolerances: the gate's limits, which errors are told in.
      on_step: told what happens now.
      on_compared: told what one comparison gave.
    """
    found: list[Measurement] = []
    left = limits.seconds
    drawn: Drawn | None = None
    try:
        for position, (case, phase) in enumerate(comparisons):
            if drawn is None or drawn.case != case:
                on_step(f"drawing the operands of {case.id}")
                drawn = Drawn.of(case, tolerances)
            share = dataclasses.replace(limits, seconds=left / (len(comparisons) - position))
            compared, spent = compare_one(implementations, drawn, phase, share, on_step=on_step)
            left = max(0.0, left - spent)
            found += compared.measurements
            on_compared(compared.measurements)
            if compared.interrupted:
                return Compared(found, True)
    except KeyboardInterrupt:
        return Compared(found, True)
    return Compared(found, False)


def compare_one(
    implementations: Sequence[Implementation],
    drawn: Drawn,
    phase: str,
    limits: Limits,
    *,
    on_step: Callable[[str], None] = lambda text: None,
) -> tuple[Compared, float]:
    """Time implementations on one case in one phase; also gives the seconds that timing took."""
    declined: list[Measurement] = []
    entrants: dict[str, Entrant] = {}
    for implementation in implementations:
        on_step(f"compiling {implementation.name}, {phase} of {drawn.case.id}")
        entered = enter(implementation, drawn, phase)
        if isinstance(entered, Entrant):
            entrants[implementation.name] = entered
        else:
            declined.append(entered)
    started = time.perf_counter()
    found, interrupted = take_turns(
        entrants,
        drawn,
        phase,
        limits,
        on_round=lambda done: on_step(f"round {done} of {limits.rounds}, {phase} of {drawn.case.id}"),
    )
    spent = time.perf_counter() - started
    entrants.clear()
    forget_programs()
    order = [implementation.name for implementation in implementations]
    rows = sorted([*declined, *found], key=lambda measurement: order.index(measurement.implementation))
    return Compared(rows, interrupted), spent


def take_turns(
    entrants: Mapping[str, Entrant],
    drawn: Drawn,
    phase: str,
    limits: Limits,
    *,
    on_round: Callable[[int], None] = lambda done: None,
) -> tuple[list[Measurement], bool]:
    """Time what can be timed, with a large matrix product among them; also says whether Ctrl-C ended it."""
    functions = {name: entrant.program.run for name, entrant in entrants.items()}
    product = Product(drawn.case.dtype)
    if functions:
        with interrupts.held():
            product.run(1)  # compiles it
        functions[_PRODUCT] = product.run
    backend = jax.default_backend()
    sampled = interleave(
        functions,
        rounds=limits.rounds,
        seconds=limits.seconds,
        least=_LEAST_SECONDS.get(backend, _LEAST_ELSEWHERE),
        on_round=on_round,
    )
    products = sampled.seconds.get(_PRODUCT)
    ceiling = product.flops / Quartiles.of(products).median if products else None
    return list(_measured(entrants, sampled, drawn, phase, ceiling)), sampled.interrupted


def forget_programs() -> None:
    """Let go of compiled programs and of the operands that they hold."""
    gc.collect()
    jax.clear_caches()  # type: ignore[no-untyped-call] # untyped upstream


def why_not(implementation: Implementation, case: Case, phase: str) -> tuple[str, str] | None:
    """Outcome and reason if the implementation is not to be timed on this case here."""
    accelerator = implementation.accelerator
    if accelerator.absent is not None:
        return UNJUDGED, accelerator.absent
    if accelerator.interpreted:
        platform = (accelerator.platform or "accelerator").upper()
        return UNJUDGED, f"no {platform} in this machine: timing the interpreter says nothing of the kernel"
    if (reason := implementation.supports(case)) is not None:
        return UNSUPPORTED, reason
    if phase == BACKWARD and case.phase != "train":
        return UNSUPPORTED, f"a case of phase {case.phase!r} has no gradients"
    if phase == BACKWARD and not implementation.gradients:
        return UNSUPPORTED, "offers no gradients"
    return None


def enter(
    implementation: Implementation, drawn: Drawn, phase: str, compiled: Callable[[], Program] | None = None
) -> Entrant | Measurement:
    """Compile, run once, and look at the results; or the reason why not.

    `compiled` gives the program, or raises what compiling it raised, where that was done before.
    """
    if (declined := why_not(implementation, drawn.case, phase)) is not None:
        return _untimed(implementation, drawn, phase, *declined)
    try:
        program = compiled() if compiled else compile_program(implementation, drawn.problem, drawn.cotangent, phase)
        peak = device_peak(lambda: program.run(1))
        results = program.results(drawn.sample.cotangent(implementation))
    except NotImplementedError as error:
        return _untimed(implementation, drawn, phase, UNSUPPORTED, first_words(error))
    except (Exception, SystemExit) as error:  # whatever an implementation raises is its row, not the end of the run
        # A result of another shape has no gradients for the cotangent that there is: the shape is what to say.
        wrong = _misshapen(implementation, drawn) if phase == BACKWARD else ""
        return _untimed(implementation, drawn, phase, *((DIFFERS, wrong) if wrong else (ERROR, _said(error))))
    finding = drawn.sample.judge(implementation, results)
    memory = dict(program.memory) if peak is None else {**program.memory, "device_peak": peak}
    return Entrant(implementation, program, finding, memory)


def _misshapen(implementation: Implementation, drawn: Drawn) -> str:
    """What is wrong with the shape of `out`, found without running anything; empty if nothing is."""
    plain, arrays = Executor(implementation).bind(drawn.problem)
    try:
        return drawn.sample.misshapen("out", jax.eval_shape(plain, arrays).shape)
    except Exception:  # then what was raised first is what to say
        return ""


def _said(error: BaseException) -> str:
    """What was raised, and where in the user's code."""
    if isinstance(error, mishaps.WrongReturn):
        return mishaps.told(error)
    place = mishaps.place_of(error)
    return first_words(error) if place is None else f"{first_words(error)} ({place})"


def _measured(
    entrants: Mapping[str, Entrant], sampled: Sampled, drawn: Drawn, phase: str, ceiling: float | None
) -> Iterable[Measurement]:
    """What sampling gave, as measurements; the first entrant that was timed and agrees is the baseline."""
    for name, error in sampled.failures.items():
        if name in entrants:
            yield _untimed(entrants[name].implementation, drawn, phase, ERROR, _said(error))
    timed = [name for name in entrants if name in sampled.seconds]
    baseline = next((name for name in timed if entrants[name].finding.agrees), "")
    for name in timed:
        entrant = entrants[name]
        ratio = paired(sampled.seconds[baseline], sampled.seconds[name]) if baseline else None
        yield dataclasses.replace(
            _row(entrant.implementation, drawn, phase),
            outcome=AGREES if entrant.finding.agrees else DIFFERS,
            reason=entrant.finding.reason,
            baseline=baseline,
            samples=sampled.seconds[name],
            calls=sampled.calls[name],
            speed=ratio,
            flops=work.flops(drawn.pairs, drawn.case, phase),
            ceiling=ceiling,
            error=entrant.finding.error,
            compile_seconds=entrant.program.compile_seconds,
            memory=entrant.memory,
        )


def _untimed(implementation: Implementation, drawn: Drawn, phase: str, outcome: str, reason: str) -> Measurement:
    row = _row(implementation, drawn, phase)
    platform = implementation.accelerator.platform if outcome == UNJUDGED else None
    return dataclasses.replace(row, outcome=outcome, reason=reason, platform=platform or row.platform)


def _row(implementation: Implementation, drawn: Drawn, phase: str) -> Measurement:
    return Measurement(
        implementation=implementation.name,
        platform=jax.default_backend(),
        device=jax.devices()[0].device_kind,
        case=drawn.case.id,
        phase=phase,
        outcome=UNJUDGED,
        jax=jax.__version__,
    )
