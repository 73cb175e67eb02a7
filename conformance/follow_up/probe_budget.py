"""Keep probes, which are judgements beside the plan of a run, within a number of seconds.

A probe is not started if it is expected to take longer than the time left. A probe that does take longer is cut off by
an alarm signal (SIGALRM). The expected time comes from the run's records of the same kernel and check, on cases of
about the same size. Cases on which a check judged its failures again are left out if there are others, since a probe is
judged once. The records do not have the time of the oracle and of starting processes. So the excess of the
probes so far is added: their mean excess, or their relative excess if that is less.
"""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from types import FrameType

from cases.case import Case
from cases.case_id import parse_case_id
from conformance.judging.job import Job
from conformance.judging.runner import Runner
from conformance.sandbox import sandboxed_executor
from conformance.sandbox.kernel_process import ProcessLost
from reports.records import DECLARATIONS_TRIED, RATIO_FAST_COMPILE, Record

_NEAREST_CASES = 3  # a probe is expected to take as long as the slowest of this many cases nearest in size
_JUDGED_AGAIN = frozenset({RATIO_FAST_COMPILE, DECLARATIONS_TRIED})
"""The figures of a record whose check judged the case again, by other flags or declarations."""
_MIN_SECONDS, _REPEAT_SECONDS = 1e-3, 1.0  # the shortest time until the alarm, and the time between its repetitions


class ProbeBudget:
    """Judge probes until the seconds are used up."""

    def __init__(self, runner: Runner, seconds: float, known: Iterable[Record] = ()) -> None:
        """Create a budget of `seconds` from now for all probes, whose times are estimated from the records `known`."""
        self._runner, self.seconds = runner, seconds
        self._until = time.monotonic() + seconds
        self._seen: dict[tuple[str, str], dict[str, float]] = {}
        known = list(known)
        repeated = {_get_key(record) for record in known if record.figures.keys() & _JUDGED_AGAIN}
        others = {(record.implementation, record.check) for record in known if _get_key(record) not in repeated}
        for record in known:
            of_check = record.implementation, record.check
            if record.seconds and not (of_check in others and _get_key(record) in repeated):
                cases = self._seen.setdefault(of_check, {})
                cases[record.case] = cases.get(record.case, 0.0) + record.seconds
        self._expected_seconds = self._used_seconds = 0.0
        self._probes = 0
        self.declined = False  # whether a probe was left out or cut off for lack of time

    @property
    def left(self) -> float:
        """The seconds that are left."""
        return max(0.0, self._until - time.monotonic())

    def judge(self, job: Job, seconds: float = math.inf, *, is_known: bool = False) -> list[Record] | None:
        """Judge a job and return its records; None if that would take, or took, too long.

        A job that `is_known` was judged before, so nothing is added to the recorded time.

        The limit is the time left, or `seconds` if that is less. A sandboxed kernel is cut off at any point, by ending
        its process. A kernel in the judge's process is cut off when the interpreter runs the next bytecode.
        """
        seconds, expected = min(seconds, self.left), self._estimate_seconds(job)
        likely = expected
        if self._expected_seconds and not is_known:
            excess = max(0.0, self._used_seconds - self._expected_seconds)
            likely += min(excess / self._probes, expected * excess / self._expected_seconds)
        if likely >= seconds:
            self.declined = True
            return None
        began = time.monotonic()
        try:
            with limit_seconds(seconds):
                return self._runner.judge(job)
        except DeadlineExceeded:
            sandboxed_executor.end_process(job.implementation)
            self.declined = True
            return None
        finally:
            self._probes += 1
            self._expected_seconds += expected
            self._used_seconds += time.monotonic() - began

    def _estimate_seconds(self, job: Job) -> float:
        """Estimate the seconds that a job takes, from records; zero for a kernel without records."""
        name = job.implementation.name
        every = [cases for (implementation, _), cases in self._seen.items() if implementation == name]
        seen = (self._seen.get((name, check.name)) for check in job.checks)
        # A check without records may take as long as any other check of this kernel.
        return sum(_find_slowest_nearby(job.case, [cases] if cases else every) for cases in seen)


def _get_key(record: Record) -> tuple[str, str, str]:
    return record.implementation, record.check, record.case


def _find_slowest_nearby(case: Case, seen: Iterable[dict[str, float]]) -> float:
    """Return the longest recorded time, in seconds, among the cases that are nearest in size to `case`."""
    work = _estimate_work(case)
    by_size = [
        (_estimate_work(parse_case_id(other)) / work, took)
        for cases in seen
        for other, took in cases.items()
        if "/" in other
    ]
    nearest = sorted(by_size, key=lambda one: abs(math.log(one[0])))[:_NEAREST_CASES]
    return max((took for _, took in nearest), default=0.0)


def _estimate_work(case: Case) -> int:
    """Return the number of multiplications in the two matrix products of attention on a case."""
    return case.batch * case.num_q_heads * case.q_length * case.kv_length * (case.head_dim + case.v_head_dim)


class DeadlineExceeded(ProcessLost):
    """Raised if a block exceeds its limit. As a `ProcessLost`, it makes code that awaits a kernel end its process."""


@contextlib.contextmanager
def limit_seconds(seconds: float) -> Iterator[None]:
    """Raise `DeadlineExceeded` in the block of this context manager after so many seconds.

    If the block waits for another process, the exception comes at once. Otherwise it comes when the interpreter runs
    the next bytecode, and again each second in case the block swallowed it. Only the main thread can be interrupted
    this way. If other code has set an alarm, it comes late, by no more than the time spent in the block.
    """
    if math.isinf(seconds) or threading.current_thread() is not threading.main_thread():
        yield
        return
    has_rung = is_within = False

    def handle_alarm(number: int, frame: FrameType | None) -> None:
        nonlocal has_rung
        has_rung = True
        if is_within:
            raise DeadlineExceeded

    started = time.monotonic()
    previous_handler = signal.signal(signal.SIGALRM, handle_alarm)
    try:
        try:
            is_within = True
            other_alarm, _ = signal.setitimer(signal.ITIMER_REAL, max(seconds, _MIN_SECONDS), _REPEAT_SECONDS)
            yield
        finally:
            is_within = False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous_handler)
        if other_alarm:
            signal.setitimer(signal.ITIMER_REAL, max(other_alarm - (time.monotonic() - started), _MIN_SECONDS))
    if has_rung:
        raise DeadlineExceeded
