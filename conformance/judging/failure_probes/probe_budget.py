"""Keep probes within a number of seconds.

None is begun that is expected to take longer, and one that does is cut off. The expected time of a probe is what the
run took for the same kernel and check, on cases of about the same size. Records leave out the time of the oracle and of
starting processes. So the expected time is multiplied by how wrong it has been so far.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

from cases.case import Case, parse_case_id
from conformance.judging.failure_probes import deadline
from conformance.judging.job import Job
from conformance.judging.runner import Runner
from conformance.records import Record
from conformance.sandbox import sandboxed_executor

_NEAREST_CASES = 3  # cases nearest in size, of which the slowest counts


class ProbeBudget:
    """Judge probes until the seconds are used up."""

    def __init__(self, runner: Runner, seconds: float, known: Iterable[Record] = ()) -> None:
        """Create a budget; `known` are records of the run, which say how long judging took."""
        self._runner, self.seconds = runner, seconds
        self._until = time.monotonic() + seconds
        self._seen: dict[tuple[str, str], dict[str, float]] = {}
        for record in known:
            if record.seconds:
                cases = self._seen.setdefault((record.implementation, record.check), {})
                cases[record.case] = cases.get(record.case, 0.0) + record.seconds
        self._expected_seconds = self._used_seconds = 0.0
        self.declined = False  # whether a probe was left out or cut off for lack of time

    @property
    def left(self) -> float:
        """Number of seconds that are left."""
        return max(0.0, self._until - time.monotonic())

    def judge(self, job: Job, seconds: float = math.inf) -> list[Record] | None:
        """Judge a job and return its records; None if it would take, or took, too long.

        Too long is longer than is left, or than `seconds`. A sandboxed kernel is cut off wherever it is, and its
        process ended. Another one is cut off at the next step of Python.
        """
        seconds, expected = min(seconds, self.left), self._estimate_seconds(job)
        underestimate = max(1.0, self._used_seconds / self._expected_seconds) if self._expected_seconds else 1.0
        if underestimate * expected >= seconds:
            self.declined = True
            return None
        began = time.monotonic()
        try:
            with deadline.limit_seconds(seconds):
                return self._runner.judge(job)
        except deadline.DeadlineExceeded:
            sandboxed_executor.end_process(job.implementation)
            self.declined = True
            return None
        finally:
            self._expected_seconds += expected
            self._used_seconds += time.monotonic() - began

    def _estimate_seconds(self, job: Job) -> float:
        """Estimate the seconds of a job from records; zero for a kernel without records."""
        name = job.implementation.name
        every = [cases for (implementation, _), cases in self._seen.items() if implementation == name]
        seen = (self._seen.get((name, check.name)) for check in job.checks)
        # A check that the run did not have may take as long as any that it had.
        return sum(_find_slowest_nearby(job.case, [cases] if cases else every) for cases in seen)


def _find_slowest_nearby(case: Case, seen: Iterable[dict[str, float]]) -> float:
    """Return the longest time among the cases that are nearest in size."""
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
    """Return the number of multiplications of attention on a case."""
    return case.batch * case.num_q_heads * case.q_length * case.kv_length * (case.head_dim + case.v_head_dim)
