"""The checks: what is asked of an implementation on a case.

A check takes a `Subject` and yields `Judgement`s; it knows no particular implementation. `CHECKS` names them in the
order in which they run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from conformance.checks import (
    aliasing,
    compiles,
    decoding,
    differentiation,
    ensemble,
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
    refusals,
    sharding,
    transforms,
)
from conformance.checks.judgement import Judgement
from conformance.checks.subject import Subject


@dataclasses.dataclass(frozen=True)
class Check:
    """A named question. `scope` says which cases it is asked of.

    `"grid"`: every supported case; `"declined"`: one case for each unsupported feature; `"feature"`: one plain case for
    each supported feature; `"base"`: the plainest supported case; `"rich"`: the case with every supported operand;
    `"front"`: cases whose operands come out of a model's front end;
    `"decoded"`: a sequence under each mask that has a meaning token by token, of those who support its pieces;
    `"ensemble"`: one plain, long case in bf16 and one in f16; `"compiled"`: a few long cases of kernels for a platform
    that has a compiler here (`conformance.accelerators.targets`); `"interpreted"`: two cases of TPU kernels, one
    of Mosaic GPU kernels.

    `compares` is false for a question that no value answers: its cases need not discriminate, and have no oracle.
    """

    name: str
    scope: str
    run: Callable[[Subject], Iterable[Judgement]]
    compares: bool = True

    @property
    def asks(self) -> str:
        """First sentence of the check's description."""
        return (self.run.__doc__ or "").strip().split("\n")[0]


CHECKS: tuple[Check, ...] = (
    Check("forward", "grid", forward.forward),
    Check("residuals", "grid", forward.residuals),
    Check("gradients", "grid", gradients.gradients),
    Check("gradients_lse", "grid", gradients.gradients_lse),
    Check("gradients_part", "grid", gradients.gradients_part),
    Check("primal", "grid", forward.primal),
    Check("poison", "grid", poison.poison),
    Check("independence", "grid", independence.independence),
    Check("linearity", "grid", linearity.linearity),
    Check("parts", "grid", parts.parts),
    Check("refusals", "declined", refusals.refusals),
    Check("arguments", "feature", operands.arguments),
    Check("errors", "base", operands.errors),
    Check("memory", "base", memory.memory),
    Check("aliasing", "base", aliasing.aliasing),
    Check("invariance", "rich", invariance.invariance),
    Check("limits", "rich", limits.limits),
    Check("differentiation", "rich", differentiation.differentiation),
    Check("transforms", "rich", transforms.transforms),
    Check("sharding", "rich", sharding.sharding),
    Check("front_end", "front", front_end.front_end),
    Check("decoding", "decoded", decoding.decoding),
    Check("ensemble", "ensemble", ensemble.ensemble),
    Check("interpreter", "interpreted", interpreter.interpreter),
    Check("compiles", "compiled", compiles.compiles, compares=False),
)
BY_NAME = {check.name: check for check in CHECKS}
