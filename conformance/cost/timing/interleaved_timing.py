"""Time implementations side by side: compile each one, check its results, and time it alternately with the others.

The inputs are implementations, cases and phases (forward, or forward and backward). The output is one `Measurement` for
each combination. The command `bench` uses `compare_all`, and `tune` uses `prepare_entrant` and `time_entrants`.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import msgspec
import numpy as np

from cases.case import Case
from cases.operand_values import Problem, draw_cotangent, draw_problem
from conformance import interrupts
from conformance.accelerators.compilation import format_first_line
from conformance.cost.timing import attention_flops
from conformance.cost.timing.agreement import Agreement, SampledRows
from conformance.cost.timing.matmul_ceiling import CeilingProduct
from conformance.cost.timing.sampling import Samples, compare_pairs, interleave
from conformance.cost.timing.timed_programs import TimedProgram, compile_program, measure_device_peak
from conformance.execution import kernel_errors
from conformance.execution.executor import Executor
from conformance.truth.tolerances import Tolerances
from impls.contract.implementation import Implementation
from reports.records import ERROR, UNJUDGED, UNSUPPORTED
from reports.records.measurement import AGREES, BACKWARD, DIFFERS, Measurement, Quartiles

# On an accelerator a call returns before it is finished. So a sample consists of several successive calls, which hides
# the cost of dispatching them. On a CPU successive calls could overlap, so each sample is a single call.
_MIN_SAMPLE_SECONDS = {"cpu": 0.0}
_MIN_SAMPLE_ELSEWHERE = 5e-3
_PRODUCT_NAME = "the matrix product"  # key of the large matrix product among the timed functions


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimingLimits:
    """Limits on timing: rounds of each comparison, and seconds over all comparisons."""

    rounds: int = 30
    seconds: float = math.inf


@dataclasses.dataclass(frozen=True)
class DrawnCase:
    """A case with the data that all timed implementations share; `cotangent` is that of `out`, `[B, T, N, V]`."""

    case: Case
    problem: Problem
    cotangent: np.ndarray
    sample: SampledRows

    @classmethod
    def of(cls, case: Case, tolerances: Tolerances) -> DrawnCase:
        """Draw the operands and the cotangent of `case`, and sample the queries to check against `tolerances`."""
        problem, cotangent = draw_problem(case), draw_cotangent(case).out
        return cls(case, problem, cotangent, SampledRows(case, problem, cotangent, tolerances))

    @functools.cached_property
    def pairs(self) -> int:
        """Number of pairs of a query and a key that the mask allows, over batch rows and query heads."""
        return attention_flops.count_allowed_pairs(self.problem)


@dataclasses.dataclass(frozen=True)
class Entrant:
    """An implementation that is compiled and ready to be timed; `memory` is in bytes, as in `Measurement.memory`."""

    implementation: Implementation
    program: TimedProgram
    finding: Agreement
    memory: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class ComparisonResult:
    """Result of timing implementations side by side."""

    measurements: list[Measurement]
    interrupted: bool


def compare_all(
    implementations: Sequence[Implementation],
    comparisons: Sequence[tuple[Case, str]],
    limits: TimingLimits,
    tolerances: Tolerances,
    *,
    on_step: Callable[[str], None] = lambda text: None,
    on_compared: Callable[[list[Measurement]], None] = lambda found: None,
) -> ComparisonResult:
    """Time implementations side by side on each case and phase.

    Args:
      implementations: the implementations; the first is the baseline if it can be timed.
      comparisons: pairs of a case and a phase. Each pair is one comparison of all implementations.
      limits: limits on how long to measure. Seconds that a comparison does not use go to later comparisons.
      tolerances: limits of the checks; errors are reported as multiples of them.
      on_compared: function that is called with the measurements of each comparison.
    """
    found: list[Measurement] = []
    left = limits.seconds
    drawn: DrawnCase | None = None
    try:
        for position, (case, phase) in enumerate(comparisons):
            if drawn is None or drawn.case != case:
                on_step(f"drawing the operands of {case.id}")
                drawn = DrawnCase.of(case, tolerances)
            share = dataclasses.replace(limits, seconds=left / (len(comparisons) - position))
            compared, spent = compare_one(implementations, drawn, phase, share, on_step=on_step)
            left = max(0.0, left - spent)
            found += compared.measurements
            on_compared(compared.measurements)
            if compared.interrupted:
                return ComparisonResult(found, True)
    except KeyboardInterrupt:
        return ComparisonResult(found, True)
    return ComparisonResult(found, False)


def compare_one(
    implementations: Sequence[Implementation],
    drawn: DrawnCase,
    phase: str,
    limits: TimingLimits,
    *,
    on_step: Callable[[str], None] = lambda text: None,
) -> tuple[ComparisonResult, float]:
    """Time implementations on one case in one phase; also return the seconds that timing took, without compiling."""
    declined: list[Measurement] = []
    entrants: dict[str, Entrant] = {}
    for implementation in implementations:
        on_step(f"compiling {implementation.name}, {phase} of {drawn.case.id}")
        entered = prepare_entrant(implementation, drawn, phase)
        if isinstance(entered, Entrant):
            entrants[implementation.name] = entered
        else:
            declined.append(entered)
    started = time.perf_counter()
    found, interrupted = time_entrants(
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
    return ComparisonResult(rows, interrupted), spent


def time_entrants(
    entrants: Mapping[str, Entrant],
    drawn: DrawnCase,
    phase: str,
    limits: TimingLimits,
    *,
    on_round: Callable[[int], None] = lambda done: None,
) -> tuple[list[Measurement], bool]:
    """Time entrants and a large matrix product alternately; also return whether Ctrl-C ended the timing.

    The rate of the matrix product is the ceiling that the entrants' rates are compared with.
    """
    functions = {name: entrant.program.run for name, entrant in entrants.items()}
    product = CeilingProduct(drawn.case.dtype)
    if functions:
        with interrupts.delay_signals():
            product.run(1)  # the first call compiles the product
        functions[_PRODUCT_NAME] = product.run
    backend = jax.default_backend()
    sampled = interleave(
        functions,
        rounds=limits.rounds,
        seconds=limits.seconds,
        least=_MIN_SAMPLE_SECONDS.get(backend, _MIN_SAMPLE_ELSEWHERE),
        on_round=on_round,
    )
    products = sampled.seconds.get(_PRODUCT_NAME)
    ceiling = product.flops / Quartiles.of(products).median if products else None
    return list(_build_measurements(entrants, sampled, drawn, phase, ceiling)), sampled.interrupted


def forget_programs() -> None:
    """Free the memory of compiled programs and of their operands."""
    gc.collect()
    jax.clear_caches()


def explain_not_timed(implementation: Implementation, case: Case, phase: str) -> tuple[str, str] | None:
    """Return (outcome, reason) if an implementation cannot be timed on a case on this machine; otherwise None."""
    accelerator = implementation.accelerator
    if accelerator.absent is not None:
        return UNJUDGED, accelerator.absent
    if accelerator.interpreted:
        platform = (accelerator.platform or "accelerator").upper()
        return UNJUDGED, f"no {platform} in this machine: timing its interpreter says nothing about the kernel"
    if (reason := implementation.supports(case)) is not None:
        return UNSUPPORTED, reason
    if phase == BACKWARD and case.phase != "train":
        return UNSUPPORTED, f"a case of phase {case.phase!r} has no gradients"
    if phase == BACKWARD and not implementation.gradients:
        return UNSUPPORTED, "offers no gradients"
    return None


def prepare_entrant(
    implementation: Implementation, drawn: DrawnCase, phase: str, compiled: Callable[[], TimedProgram] | None = None
) -> Entrant | Measurement:
    """Compile an implementation, run it once, and check its results.

    Args:
      phase: one of `PHASES` in `reports.records.measurement`.
      compiled: function that returns the program if it was compiled before, or raises the exception that compiling it
        raised. If None, the program is compiled here.

    Returns:
      the entrant, or a measurement that says why the implementation cannot be timed.
    """
    if (declined := explain_not_timed(implementation, drawn.case, phase)) is not None:
        return _build_untimed(implementation, drawn, phase, *declined)
    try:
        program = compiled() if compiled else compile_program(implementation, drawn.problem, drawn.cotangent, phase)
        peak = measure_device_peak(lambda: program.run(1))
        results = program.results(drawn.sample.cotangent(implementation))
    except NotImplementedError as error:
        return _build_untimed(implementation, drawn, phase, UNSUPPORTED, format_first_line(error))
    except (Exception, SystemExit) as error:  # one implementation's failure must not end the run
        # If `out` has a wrong shape, JAX raises because the cotangent does not fit. Then report the shape instead.
        wrong = _describe_misshapen(implementation, drawn) if phase == BACKWARD else ""
        return _build_untimed(
            implementation, drawn, phase, *((DIFFERS, wrong) if wrong else (ERROR, _format_error(error)))
        )
    finding = drawn.sample.judge(implementation, results)
    memory = dict(program.memory) if peak is None else {**program.memory, "device_peak": peak}
    return Entrant(implementation, program, finding, memory)


def _describe_misshapen(implementation: Implementation, drawn: DrawnCase) -> str:
    """Describe what is wrong with the shape of `out`, without running a kernel; empty if the shape is right."""
    plain, arrays = Executor(implementation).bind(drawn.problem)
    try:
        return drawn.sample.describe_misshapen("out", jax.eval_shape(plain, arrays).shape)
    except Exception:  # the caller reports its own exception instead
        return ""


def _format_error(error: BaseException) -> str:
    """Format an exception as one line, with the place in the user's code that raised it if it is known."""
    if isinstance(error, kernel_errors.WrongReturn):
        return kernel_errors.describe_kernel_error(error)
    place = kernel_errors.find_place(error)
    return format_first_line(error) if place is None else f"{format_first_line(error)} ({place})"


def _build_measurements(
    entrants: Mapping[str, Entrant], sampled: Samples, drawn: DrawnCase, phase: str, ceiling: float | None
) -> Iterable[Measurement]:
    """Yield one measurement for each entrant; the baseline is the first timed entrant that agrees with the oracle.

    Args:
      sampled: seconds of each entrant, and exceptions of those that raised.
      ceiling: rate of the large matrix product in floating-point operations per second; None if it was not timed.
    """
    for name, error in sampled.failures.items():
        if name in entrants:
            yield _build_untimed(entrants[name].implementation, drawn, phase, ERROR, _format_error(error))
    timed = [name for name in entrants if name in sampled.seconds]
    baseline = next((name for name in timed if entrants[name].finding.agrees), "")
    for name in timed:
        entrant = entrants[name]
        ratio = compare_pairs(sampled.seconds[baseline], sampled.seconds[name]) if baseline else None
        yield msgspec.structs.replace(
            _build_row(entrant.implementation, drawn, phase),
            outcome=AGREES if entrant.finding.agrees else DIFFERS,
            reason=entrant.finding.reason,
            baseline=baseline,
            samples=sampled.seconds[name],
            calls=sampled.calls[name],
            speed=ratio,
            flops=attention_flops.count_flops(drawn.pairs, drawn.case, phase),
            ceiling=ceiling,
            error=entrant.finding.error,
            compile_seconds=entrant.program.compile_seconds,
            memory=entrant.memory,
        )


def _build_untimed(
    implementation: Implementation, drawn: DrawnCase, phase: str, outcome: str, reason: str
) -> Measurement:
    """Build the measurement of an implementation that was not timed, with the outcome and the reason."""
    row = _build_row(implementation, drawn, phase)
    platform = implementation.accelerator.platform if outcome == UNJUDGED else None
    return msgspec.structs.replace(row, outcome=outcome, reason=reason, platform=platform or row.platform)


def _build_row(implementation: Implementation, drawn: DrawnCase, phase: str) -> Measurement:
    """Build a measurement that names implementation, device, case and phase, but has no results."""
    return Measurement(
        implementation=implementation.name,
        platform=jax.default_backend(),
        device=jax.devices()[0].device_kind,
        case=drawn.case.id,
        phase=phase,
        outcome=UNJUDGED,
        samples=(),
        speed=None,
        error=None,
        jax=jax.__version__,
    )
