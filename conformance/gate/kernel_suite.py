"""Describe the tests of one kernel in a user's test file, and plan them.

Test files import this module through `conformance.testing`, and every pytest run loads it, so it imports nothing heavy.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conformance.session.failures import CannotJudge
from conformance.session.run_spec import OPTIONS, RunSpec

if TYPE_CHECKING:
    from conformance.session.planned_run import PlannedRun
    from impls.contract.declarations import Declarations
    from reports.records import Record

_ATTRIBUTE = "conformance_suite"
# Options of the command line that hold for the run of pytest as a whole.
_OF_WHOLE_RUN = frozenset({"implementations", "require_platform", "report", "json", "resume", "baseline"})


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class KernelSuite:
    """The tests that `conformance.testing.conformance_tests` was asked for.

    Attributes:
      kernel: a function, an `Implementation`, or the name of one, as `conformance.check` takes it.
      options: what to judge, and where the kernel runs. Options of the command line replace these.
      name: what reports call the kernel.
      declarations: what `conformance.declare` would be given.
      sandbox: whether the kernel runs in a sandbox.
      line: the line of the test file that asks for the tests, counted from 0; None if it is not known.
    """

    kernel: Any
    options: RunSpec
    name: str
    declarations: Declarations
    sandbox: bool
    line: int | None = None


def mark_function(function: Callable[..., None], suite: KernelSuite) -> None:
    """Make a test function judge a kernel."""
    setattr(function, _ATTRIBUTE, suite)


def find_suite(function: object) -> KernelSuite | None:
    """Return the suite of a test function; None for any other function."""
    found = getattr(function, _ATTRIBUTE, None)
    return found if isinstance(found, KernelSuite) else None


def plan_suite(
    suite: KernelSuite,
    given: RunSpec,
    *,
    resources: contextlib.ExitStack,
    folder: Path,
    format_repetition: Callable[[Record], str],
    is_worker: bool,
) -> PlannedRun:
    """Plan the jobs of a suite.

    Args:
      suite: the tests that are asked for.
      given: the options of the command line.
      resources: removes the files of a sandboxed kernel when it is closed.
      folder: where the project's settings are.
      format_repetition: returns the command that repeats a record.
      is_worker: whether another process reports the results.

    Raises:
      CannotJudge: in one line, if the kernel cannot be judged.
    """
    from conformance import environment, packages
    from conformance.session.process_setup import isolate_settings, prepare_process

    try:
        prepare_process()
    except packages.NameTaken as error:
        raise CannotJudge(str(error)) from error
    from conformance.api.subject_lookup import load_subject  # imported late, as the others: they load JAX
    from conformance.execution.kernel_errors import describe_kernel_error
    from conformance.session.planned_run import plan_jobs
    from conformance.session.project_lookup import build_kernel_options
    from conformance.session.resolved_run import Caller, resolve_run

    options = _choose_options(suite, given)
    kernels = build_kernel_options(
        dataclasses.replace(options, option_prefix=given.option_prefix), hidden_files=given.named_files
    )
    try:
        with isolate_settings():
            loading = load_subject(suite.kernel, suite.name, suite.declarations, kernels)
            subject = resources.enter_context(loading)
    except (ImportError, TypeError, ValueError) as error:
        raise CannotJudge(str(error)) from error
    except CannotJudge:
        raise
    except Exception as error:  # reading its signature runs code that raises
        raise CannotJudge(f"{suite.name} cannot be judged: {describe_kernel_error(error)}") from error
    caller = Caller(
        implementations=[subject.implementation],
        folder=folder,
        is_worker=is_worker,
        format_repetition=format_repetition,
        compiler_options={} if subject.is_sandboxed else environment.build_fast_options(),
        writes_step_summary=False,
    )
    return plan_jobs(resolve_run(options, caller))


def _choose_options(suite: KernelSuite, given: RunSpec) -> RunSpec:
    """Return the options of a suite, in part replaced by those of the command line."""
    values = {
        field: value
        for field, each in OPTIONS.items()
        if each.pytest and field not in _OF_WHOLE_RUN and (value := getattr(given, field)) != each.default
    }
    if not suite.sandbox or given.in_process:
        values |= {"in_process": True, "timeout": None, "memory": None, "require_sandbox": False}
    values |= {"implementations": (suite.name,), "command": given.command, "query": given.query}
    return dataclasses.replace(suite.options, **values, selection=given.selection)
