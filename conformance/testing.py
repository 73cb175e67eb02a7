"""Judge a kernel by ordinary pytest tests in a test file of yours.

    # test_flash.py
    from conformance.testing import conformance_tests
    from my_kernels import flash_attention

    test_flash = conformance_tests(flash_attention, level="smoke")

`pytest test_flash.py` then has one test for each case, such as `test_flash[train/f32/B1.T128.../causal/normal/s0]`. The
tests are selected, deselected and repeated as any others.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any, Unpack

from conformance.gate import kernel_suite
from conformance.gate.kernel_suite import KernelSuite
from conformance.session.failures import CannotJudge
from conformance.session.process_setup import prepare_process
from conformance.session.run_spec import RunSpec, SuiteOptions, list_options, reject_empty

if TYPE_CHECKING:
    from conformance.api.argument_checks import SuiteArguments
    from conformance.judging.job import Job
    from impls.contract.implementation import Implementation
    from reports.records import Record

__all__ = ["conformance_tests"]


@list_options(SuiteOptions)
def conformance_tests(
    kernel: Callable[..., Any] | Implementation | str,
    *,
    name: str | None = None,
    sandbox: bool = False,
    **options: Unpack[SuiteArguments],
) -> Callable[..., None]:
    """Return a parametrized pytest test that judges a kernel, one test for each case.

    Assign it to a name that begins with `test_` in a test file:

        test_flash = conformance_tests(flash_attention, level="quick", products="tf32")

    Each test runs all checks of its case, and fails if one of them does. The text of a failure says what is wrong and
    where, and ends with the command that repeats it. A case that the kernel does not support is skipped with the
    reason. A kernel of which nothing was judged fails the run. An expected failure of `pyproject.toml` is an xfail.
    After the tests, pytest's summary has the findings: the few causes that explain all failures.

    The usual flags of pytest work:

    - Printed ids can be pasted, as `pytest 'test_flash.py::test_flash[train/f32/...]'`. The id of any other case works
      too, in place of the one in brackets.
    - `-k` selects by case (`-k "bf16 and causal"`), and by check: `-k forward` runs the check `forward` alone.
    - `--lf`, `--deselect`, `-x` and `-n auto` of pytest-xdist.

    Collecting compiles nothing. It loads JAX, and plans the cases by what the kernel supports.

    The gate's options of the command line apply too (`pytest --help`): `--conformance-level`, `--conformance-cases`
    and `--conformance-seed` replace the arguments here. `--conformance-report=FILE.html` and `--conformance-json=FILE`
    cover all kernels of the run. `--conformance-resume` and `--conformance-baseline` are for
    `pytest --pyargs conformance` only.

    The kernel runs in pytest's own process, where breakpoints and prints work. A call that crashes or hangs takes the
    run with it. With `sandbox=True` it has a confined process of its own, as on the command line. A function that no
    module has, such as a closure, is sent there by cloudpickle, which must be installed.

    Args:
      kernel: the function to judge, which may be a closure, a lambda or a `functools.partial`. It takes the parameters
        that it supports, as docs/contract.md describes. Or an `Implementation`, or a name as `--impl` takes it, such as
        `"my_kernels.flash:attention"`.
      name: what reports call the kernel; `module:function` if left out.
      sandbox: whether the kernel runs in a confined process of its own.
      **options: those of `SuiteOptions`, and declarations, as `conformance.declare` takes them, such as
        `behind_mask="finite"`. They replace those that the function has by the decorator.

    Raises:
      TypeError: for an argument that neither this function nor `conformance.declare` has, one of a wrong type, and
        declarations of a kernel that has its own.
      ValueError: for a level, check, seed or value of a declaration that does not exist.
    """
    prepare_process(judging=False)
    from conformance.api import argument_checks, subject_lookup  # imported late, as the others: they load JAX
    from conformance.api.argument_checks import SuiteArguments
    from impls.contract.argument_validation import check_arguments
    from impls.contract.implementation import Implementation

    given = check_arguments(
        conformance_tests,
        {"kernel": kernel, "name": name, "sandbox": sandbox, **options},
        Implementation=Implementation,
        SuiteArguments=SuiteArguments,
    )
    declarations = argument_checks.select_declarations(given)
    argument_checks.check_declarations(declarations, kernel)
    try:
        reject_empty("name", name)
        spec = RunSpec(**argument_checks.read_options(given), use_listed=True, option_prefix="")
    except CannotJudge as error:
        raise ValueError(str(error)) from error
    suite = KernelSuite(
        kernel=kernel,
        options=spec,
        name=name if name is not None else subject_lookup.describe_function_with_module(kernel),
        declarations=declarations,
        sandbox=sandbox,
        line=_find_line(),
    )

    def judge_case(conformance_job: Job, conformance_judge: Callable[[Job], list[Record]]) -> None:
        from conformance.gate.outcome import report_outcome

        report_outcome(conformance_judge(conformance_job))

    judge_case.__doc__ = f"Judge {suite.name} on one case."
    judge_case.__module__ = sys._getframe(1).f_globals.get("__name__", __name__)
    kernel_suite.mark_function(judge_case, suite)
    assert isinstance(judge_case, FunctionType)
    return judge_case


def _find_line() -> int:
    """Return the line, counted from 0, that calls `conformance_tests`."""
    return sys._getframe(2).f_lineno - 1
