"""Seconds that probes may take: none is begun that is expected to take longer, and one that does is cut off.

What a probe will take is told by what the run took for the same kernel and check, on cases about as large. Records
leave out the oracle and how a process starts, so what they say is taken as many times as it was wrong by so far.
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

_NEAREST_CASES = 3  # cases that are nearest in size, the slowest of which counts


class ProbeBudget:
    """Judges probes until its seconds are over."""

    def __init__(self, runner: Runner, seconds: float, known: Iterable[Record] = ()) -> None:
        """`known` are records of the run, which say how long what was judged took."""
        self._runner, self.seconds = runner, seconds
        self._until = time.monotonic() + seconds
        self._seen: dict[tuple[str, str], dict[str, float]] = {}
        for record in known:
            if record.seconds:
                cases = self._seen.setdefault((record.implementation, record.check), {})
                cases[record.case] = cases.get(record.case, 0.0) + record.seconds
        self._told = self._took = 0.0
        self.declined = False  # whether there was a probe that there was no time for

    @property
    def left(self) -> float:
        """How many seconds are left."""
        return max(0.0, self._until - time.monotonic())

    def judge(self, job: Job, seconds: float = math.inf) -> list[Record] | None:
        """The records of a job; none if it would take longer than is left, or than `seconds`, or if it did.

        A kernel in a process of its own is cut off wherever it is, and its process ended; another at its next step of
        Python.
        """
        seconds, told = min(seconds, self.left), self._estimate_seconds(job)
        slower = max(1.0, self._took / self._told) if self._told else 1.0
        if slower * told >= seconds:
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
            self._told += told
            self._took += time.monotonic() - began

    def _estimate_seconds(self, job: Job) -> float:
        """Seconds that records say it will take; none at all of a kernel that no record is of."""
        name = job.implementation.name
        every = [cases for (implementation, _), cases in self._seen.items() if implementation == name]
        seen = (self._seen.get((name, check.name)) for check in job.checks)
        # A check that the run did not ask may take as long as any that it asked.
        return sum(_find_slowest_nearby(job.case, [cases] if cases else every) for cases in seen)


def _find_slowest_nearby(case: Case, seen: Iterable[dict[str, float]]) -> float:
    """What the slowest of the cases took that are nearest in size."""
    work = _estimate_work(case)
    others = [
        (_estimate_work(parse_case_id(other)) / work, took)
        for cases in seen
        for other, took in cases.items()
        if "/" in other
    ]
    near = sorted(others, key=lambda one: abs(math.log(one[0])))[:_NEAREST_CASES]
    return max((took for _, took in near), default=0.0)


def _estimate_work(case: Case) -> int:
    return case.batch * case.num_q_heads * case.q_length * case.kv_length * (case.head_dim + case.v_head_dim)
