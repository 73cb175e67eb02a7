"""The checks: what is asked of an implementation on a case.

A check takes a `Subject` and yields `Judgement`s; it knows no particular implementation. `CHECKS` names them in the
order in which they run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from conformance.asking.judgement import Judgement
from conformance.asking.scopes import (
    BASE,
    COMPILED,
    DECLINED,
    DECODED,
    ENSEMBLE,
    FEATURE,
    FRONT,
    GRID,
    INTERPRETED,
    RICH,
    Scope,
)
from conformance.asking.subject import Subject
from conformance.checks import (
    aliasing,
    calls,
    compiles,
    decoding,
    differentiation,
    ensemble,
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
    operands,
    parts,
    poison,
    program,
    refusals,
    sharding,
    transforms,
)


@dataclasses.dataclass(frozen=True)
class Check:
    """A named question, asked of the cases of its `scope`.

    `begins` has a kernel in another process start on what it will be asked, before the judge finds out what to expect.
    `compares` is false for a question that no value answers: its cases need not discriminate, and have no oracle.
    """

    name: str
    scope: Scope
    run: Callable[[Subject], Iterable[Judgement]]
    begins: Callable[[Subject], None] = lambda subject: None
    compares: bool = True

    @property
    def asks(self) -> str:
        """First sentence of the check's description."""
        return (self.run.__doc__ or "").strip().split("\n")[0]


CHECKS: tuple[Check, ...] = (
    Check("forward", GRID, forward.forward, begins=Subject.begin_forward),
    Check("residuals", GRID, forward.residuals),
    Check("gradients", GRID, gradients.gradients, begins=lambda subject: subject.begin_gradients("random")),
    Check("gradients_lse", GRID, gradients.gradients_lse, begins=lambda subject: subject.begin_gradients("random_lse")),
    Check("gradients_part", GRID, gradients.gradients_part),
    Check("primal", GRID, forward.primal),
    Check("poison", GRID, poison.poison),
    Check("independence", GRID, independence.independence),
    Check("linearity", GRID, linearity.linearity),
    Check("parts", GRID, parts.parts),
    Check("refusals", DECLINED, refusals.refusals),
    Check("arguments", FEATURE, operands.arguments),
    Check("forms", FEATURE, forms.forms),
    Check("errors", BASE, operands.errors),
    Check("memory", BASE, memory.memory),
    Check("program", BASE, program.program),
    Check("aliasing", RICH, aliasing.aliasing),
    Check("invariance", RICH, invariance.invariance),
    Check("limits", RICH, limits.limits),
    Check("differentiation", RICH, differentiation.differentiation),
    Check("transforms", RICH, transforms.transforms),
    Check("calls", RICH, calls.calls),
    Check("sharding", RICH, sharding.sharding),
    Check("front_end", FRONT, front_end.front_end),
    Check("decoding", DECODED, decoding.decoding),
    Check("ensemble", ENSEMBLE, ensemble.ensemble),
    Check("interpreter", INTERPRETED, interpreter.interpreter),
    Check("compiles", COMPILED, compiles.compiles, compares=False),
)
BY_NAME = {check.name: check for check in CHECKS}
