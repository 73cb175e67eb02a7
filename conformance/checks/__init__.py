"""Define `CHECKS`, the list of all checks in the order in which they run.

A check is a function that takes a `Subject` (an implementation, a case and limits) and yields `Judgement`s. No check
knows a particular implementation. README.md in this folder says how checks work and how to add one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from conformance.check_api.judgement import Judgement
from conformance.check_api.scopes import (
    BASE,
    COMBINED,
    COMPILED,
    DECLINED,
    DECODED,
    ENSEMBLE,
    FEATURE,
    FIRST,
    FRONT,
    GRID,
    INTERPRETED,
    Scope,
)
from conformance.check_api.subject import Subject
from conformance.checks import (
    aliasing,
    arguments,
    calls,
    compiles,
    decoding,
    differentiation,
    ensemble,
    errors,
    first_calls,
    forms,
    forward,
    front_end,
    gradients,
    independence,
    interpreter,
    invariance,
    limits,
    linearity,
    memory,
    parts,
    poison,
    program,
    refusals,
    sharding,
    transforms,
)


@dataclasses.dataclass(frozen=True)
class Check:
    """A check: its name, its function, and the cases that it runs on."""

    name: str  # the name of the check, as users type it after `--check=`
    scope: Scope  # which cases the check runs on
    # Yields the judgements of one subject. The first line of its docstring describes the check in `list checks`.
    run: Callable[[Subject], Iterable[Judgement]]
    # Starts the kernel's work in its own process, so that the kernel runs while the judge runs the oracle.
    start: Callable[[Subject], None] = lambda subject: None
    # Whether results are compared with the oracle. If not, the check runs without the oracle, and also on cases that a
    # simple wrong result, such as zeros, would pass.
    compares: bool = True

    @property
    def about(self) -> str:
        """The first line of the check function's docstring, which `list checks` shows."""
        return (self.run.__doc__ or "").strip().split("\n")[0]


CHECKS: tuple[Check, ...] = (
    Check("forward", GRID, forward.check_forward, start=Subject.begin_forward),
    Check("residuals", GRID, forward.check_residuals),
    Check("gradients", GRID, gradients.check_gradients, start=lambda subject: subject.begin_gradients("random")),
    Check(
        "gradients_lse",
        GRID,
        gradients.check_gradients_lse,
        start=lambda subject: subject.begin_gradients("random_lse"),
    ),
    Check("gradients_part", GRID, gradients.check_gradients_part),
    Check("primal", GRID, forward.check_primal),
    Check("poison", GRID, poison.check_poison),
    Check("independence", GRID, independence.check_independence),
    Check("linearity", GRID, linearity.check_linearity),
    Check("parts", GRID, parts.check_parts),
    Check("first_calls", FIRST, first_calls.check_first_calls),
    Check("refusals", DECLINED, refusals.check_refusals),
    Check("arguments", FEATURE, arguments.check_arguments),
    Check("forms", FEATURE, forms.check_forms),
    Check("errors", BASE, errors.check_errors),
    Check("memory", BASE, memory.check_memory),
    Check("program", BASE, program.check_program),
    Check("aliasing", COMBINED, aliasing.check_aliasing),
    Check("invariance", COMBINED, invariance.check_invariance),
    Check("limits", COMBINED, limits.check_limits),
    Check("differentiation", COMBINED, differentiation.check_differentiation),
    Check("transforms", COMBINED, transforms.check_transforms),
    Check("calls", COMBINED, calls.check_calls),
    Check("sharding", COMBINED, sharding.check_sharding),
    Check("front_end", FRONT, front_end.check_front_end),
    Check("decoding", DECODED, decoding.check_decoding),
    Check("ensemble", ENSEMBLE, ensemble.check_ensemble),
    Check("interpreter", INTERPRETED, interpreter.check_interpreter),
    Check("compiles", COMPILED, compiles.check_compiles, compares=False),
)
CHECKS_BY_NAME = {check.name: check for check in CHECKS}
