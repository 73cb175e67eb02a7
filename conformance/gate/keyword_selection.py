"""Select the checks of a job by an expression of `pytest -k`.

One pytest test of the gate runs all checks of a job. So `-k gradients` must select checks within a test.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from _pytest.mark.expression import Expression

from conformance.checks import CHECKS, Check
from conformance.judging.job import Job
from conformance.judging.runner import find_platform

_WORD = re.compile(r"[\w.:/\[\]+*=-]+")
_OPERATORS = frozenset({"and", "or", "not"})
PLATFORMS = frozenset({"cpu", "gpu", "tpu"})


def mentions_checks(expression: str) -> bool:
    """Tell whether an expression of `-k` has a word that is a check's name or part of a check's name."""
    return any(_is_check_word(word) for word in _WORD.findall(expression or "") if word not in _OPERATORS)


def select_checks(expression: str, job: Job, keywords: Sequence[str]) -> tuple[Check, ...]:
    """Return the checks of a job that an expression of `-k` selects.

    A word that is part of a check's name matches names of checks, implementations and cases, but not the test's name:
    `forms` must not match every `test_conforms`. The name of a platform matches the platform that the kernel is written
    for: `gpu` does not match a TPU kernel that is interpreted on a GPU. Any other word also matches `keywords`.

    Args:
      expression: the expression, in pytest's syntax.
      job: the job that the test judges.
      keywords: the keywords of the test, as pytest matches them.
    """
    compiled = Expression.compile(expression)

    platform = find_target_platform(job)

    def is_selected(check: Check) -> bool:
        names = [job.implementation.name, job.case.id, check.name]

        def matches(word: str, /, **_: object) -> bool:
            if word.lower() in PLATFORMS:
                return word.lower() == platform or word.lower() in job.implementation.name.lower()
            candidates = names if _is_check_word(word) else [*names, *keywords]
            return any(word.lower() in name.lower() for name in candidates)

        return bool(compiled.evaluate(matches))

    return tuple(check for check in job.checks if is_selected(check))


def find_target_platform(job: Job) -> str:
    """Return the platform that the kernel is written for, or where it runs if that is not declared."""
    return job.implementation.accelerator.platform or find_platform(job.implementation).partition("-")[0]


def _is_check_word(word: str) -> bool:
    return any(word.lower() in check.name for check in CHECKS)
