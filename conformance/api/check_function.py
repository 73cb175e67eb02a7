"""Judge a function: `conformance.check` and `conformance.assert_conforms`."""

from __future__ import annotations

import contextlib
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Unpack

from conformance import environment, interrupts, packages
from conformance.adaptation.adapting import adapt as adapt_function
from conformance.adaptation.questions import Answer
from conformance.api import argument_checks
from conformance.api.progress import choose_display
from conformance.api.report import Report, build_report
from conformance.api.subject_lookup import describe_expression, describe_function, load_subject
from conformance.checks import CHECKS_BY_NAME
from conformance.sandbox import kernel_process
from conformance.session.failures import CannotJudge
from conformance.session.job_judging import FIRST_FAILURE
from conformance.session.planned_run import describe_unasked
from conformance.session.process_setup import isolate_settings
from conformance.session.project_lookup import build_kernel_options
from conformance.session.resolved_run import Caller
from conformance.session.run_spec import CheckOptions, RunSpec, list_options
from conformance.session.session import run_session
from impls.contract.argument_validation import validate_arguments
from impls.contract.implementation import Implementation
from reports import terminal
from reports.records import INTERRUPTED, Record

_PULLBACK = re.compile(r" --pullback=(\w+)")
_IN_PROCESS = (
    "{name} runs in this process, unprotected: a crash or an endless loop of its ends or hangs this process. "
    "sandbox=True runs it in a process of its own"
)


class CheckInterrupted(KeyboardInterrupt):
    """Ctrl-C stopped `check`. What was judged until then is in `report`.

    Attributes:
      report: the report of what was judged.
    """

    def __init__(self, report: Report) -> None:
        super().__init__(f"{report.reason}; what was judged is in the exception's attribute `report`")
        self.report = report


class NotJudgedError(RuntimeError):
    """Raised by `assert_conforms` for a kernel that could not be judged. Nothing is known to be wrong or right.

    The usual causes: no case of the selection is supported, or the kernel needs an accelerator that is not here.

    Attributes:
      report: the report, with the reason.
    """

    def __init__(self, report: Report) -> None:
        super().__init__(f"{report.name} could not be judged: {report.reason}")
        self.report = report


def _say_answer(answer: Answer) -> None:
    print(f"{answer.question}: {answer.answer}", file=sys.stderr)


@list_options(CheckOptions)
@validate_arguments
def check(
    function: Callable[..., Any] | Implementation | str,
    *,
    name: str | None = None,
    adapt: bool = False,
    sandbox: bool = False,
    progress: bool = True,
    **options: Unpack[argument_checks.CheckArguments],
) -> Report:
    """Judge an attention function, and return what is wrong with it and why.

    The function takes `q`, `k` and `v`, and by keyword whatever else it supports: `causal`, `window`, `mask`, `bias`,
    `soft_cap`, `scale`, `segment_ids`, `sinks` and so on (docs/contract.md). What it has no parameter for is shown as
    unsupported. It may be a closure, a lambda, a `functools.partial`, a jitted function, a callable object, or a
    function of a notebook.

    It runs in this process. JAX's settings, environment variables, signal handlers and warning filters are afterwards
    what they were. Programs are judged under JAX's defaults of `jax_enable_x64`, the NaN checks, the promotion of
    dtypes, the precision of products and random keys, whatever the caller has set; the check `transforms` turns
    `jax_enable_x64` on. JAX's caches of compiled programs are cleared on the way.

    The check `sharding` needs four devices, and is unjudged where this process has fewer.

    Examples:
      >>> import conformance
      >>> import jax
      >>> def attention(q, k, v):
      ...     x = jax.numpy.einsum("btnh,bsnh->bnts", q, k)  # the scale is missing
      ...     return jax.numpy.einsum("bnts,bsnh->btnh", jax.nn.softmax(x), v)
      >>> plain = "train/f32/B1.T128.S128.N2.K2.H64.V64/full/normal/s0"
      >>> report = conformance.check(attention, case=plain, checks="forward", progress=False)
      >>> report.conforms
      False
      >>> report.findings[0].cause
      'out is wrong'
      >>> print(report.findings[0].code)
      conformance.check(attention, case='train/f32/B1.T128.S128.N2.K2.H64.V64/full/normal/s0', checks='forward')

    Args:
      function: the function; or an `Implementation`; or a name as `--impl` takes it, such as `"kernel.py:attention"`.
      name: how the report names the function; its own name by default.
      adapt: whether to find out first what the function computes (`conformance.adapt`), and to judge the adapter.
      sandbox: whether it runs in a confined process of its own, as from the command line. A function that no module
        has is sent there by cloudpickle, which must be installed. `timeout` and `max_gib` limit that process.
      progress: whether progress is shown on stderr, or in the output of a notebook's cell.
      **options: those of `CheckOptions`, and declarations, as `conformance.declare` takes them. They replace those of
        the function's own.

    Returns:
      The report. It is true if the function conforms.

    Raises:
      TypeError: for an unknown argument, one of a wrong type, and what cannot be judged as attention or sent to a
        sandbox.
      ValueError: for a level, case, check or declaration that does not exist, and for arguments that contradict.
      RuntimeError: if JAX compiles nothing here, for example under `jax.disable_jit`.
      CheckInterrupted: on Ctrl-C. It is a `KeyboardInterrupt`, and its attribute `report` has what was judged.
    """
    declarations, given = argument_checks.select_declarations(options), argument_checks.read_options(options)
    argument_checks.check_declarations(declarations, function)
    if given.get("case") is not None:
        argument_checks.parse_case_argument(given["case"])
        given["level"] = None
    if not sandbox and (given.get("timeout"), given.get("memory")) != (None, None):
        raise ValueError("timeout and max_gib go with sandbox=True: in this process a call cannot be limited")
    packages.claim_names()
    if environment.find_disabled_jit() is not None:
        raise RuntimeError(
            "JIT compilation is off here (jax.disable_jit, or JAX_DISABLE_JIT): kernels would be judged without being "
            "compiled. Leave jax.disable_jit, or unset the variable"
        )
    if adapt and not isinstance(function, Implementation):
        adapted = adapt_function(function, on_answer=_say_answer if progress else lambda answer: None)
        name, function = name or describe_function(function), adapted.function
    label = name if name is not None else describe_function(function)
    expression = repr(function) if isinstance(function, str) else describe_expression(label)
    repeat = _build_repetition(expression, {"sandbox": True} if sandbox else {}, declarations)
    show_progress, say = choose_display(progress)
    try:
        spec = RunSpec(
            **given, implementations=(label,), in_process=not sandbox, command=repeat(None), option_prefix=""
        )
        kernels = build_kernel_options(spec)
        with isolate_settings(), _end_processes(), load_subject(function, name, declarations, kernels) as subject:
            if not subject.is_sandboxed:
                say(_IN_PROCESS.format(name=label))
            for line in describe_unasked([subject.implementation]):
                say(line)
            caller = Caller(
                implementations=[subject.implementation],
                format_repetition=repeat,
                compiler_options={} if subject.is_sandboxed else environment.build_fast_options(),
                writes_step_summary=False,
            )
            result = run_session(spec, caller, show_progress=show_progress, say=say)
    except CannotJudge as error:
        raise ValueError(str(error)) from None
    found = build_report(subject.implementation.name, result)
    if result.how == INTERRUPTED and result.reason != FIRST_FAILURE:
        if (stopped := interrupts.get_received_signal()) not in (None, signal.SIGINT):
            signal.raise_signal(stopped)  # it was kept until here, so that nothing is lost
        raise CheckInterrupted(found)
    return found


@list_options(CheckOptions)
@validate_arguments
def assert_conforms(
    function: Callable[..., Any] | Implementation | str,
    *,
    name: str | None = None,
    sandbox: bool = False,
    progress: bool = True,
    **options: Unpack[argument_checks.CheckArguments],
) -> None:
    """Judge an attention function, and raise `AssertionError` with the findings unless it conforms.

    One line in a test of your own. Known failures that the project's settings list do not fail it.

    Examples:
      >>> import conformance
      >>> import jax
      >>> plain = "train/f32/B1.T128.S128.N2.K2.H64.V64/full/normal/s0"
      >>> def attention(q, k, v):
      ...     return jax.nn.dot_product_attention(q, k, v)
      >>> conformance.assert_conforms(attention, case=plain, checks="forward", progress=False)

    Args:
      function: as for `check`, and so are all others.
      name: how the text names the function.
      sandbox: whether it runs in a confined process of its own.
      progress: whether progress is shown.
      **options: as for `check`.

    Raises:
      AssertionError: if it does not conform. The text has the findings as the command line prints them: the cause of
        each, its plainest case, ratio and worst element, the likeliest planted bug, and the code that repeats it. If
        the run ended early, the last line says why.
      NotJudgedError: if nothing was judged, which is neither a pass nor a failure.
      TypeError: as `check`.
      ValueError: as `check`.
    """
    __tracebackhide__ = True
    found = check(function, name=name, sandbox=sandbox, progress=progress, **options)
    if found.conforms:
        return
    if not found.is_judged:
        raise NotJudgedError(found)
    text = "\n".join(terminal.format_findings(found.session.summary)).rstrip()
    raise AssertionError("\n\n".join(filter(None, (found.session.summary.headline, text, found.reason))))


def _build_repetition(
    expression: str, arguments: Mapping[str, Any], declarations: Mapping[str, Any]
) -> Callable[[Record | None], str]:
    """Return a function that formats the call which repeats the judgement of a record; of None, the call as such."""

    def format_call(record: Record | None) -> str:
        asked: dict[str, Any] = {}
        if record is not None:
            asked["case"] = record.case
            if record.check in CHECKS_BY_NAME:
                asked["checks"] = record.check
            if (found := _PULLBACK.search(record.reproduce)) is not None:
                asked["pullback"] = found[1]
        words = [f"{name}={value!r}" for name, value in {**asked, **arguments, **declarations}.items()]
        return f"conformance.check({', '.join([expression, *words])})"

    return format_call


@contextlib.contextmanager
def _end_processes() -> Iterator[None]:
    """End the processes of sandboxed kernels with the block, also those of a run that did not begin."""
    try:
        yield
    finally:
        kernel_process.end_all_processes()
