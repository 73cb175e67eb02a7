"""Define `CHECKS`, the list of all checks in the order in which they run.

A check is a function that takes a `Subject` (an implementation, a case and limits) and yields `Judgement`s. No check
knows a particular implementation. README.md in this folder says how checks work and how to add one.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from conformance.check_api.scopes import (
    BASE,
    BATCHED,
    COMBINED,
    COMPILED,
    DECLINED,
    DECODED,
    DROPPED,
    ENSEMBLE,
    EXACT,
    FEATURE,
    FIRST,
    FRONT,
    GRID,
    INDEXED,
    INTERPRETED,
    SEARCHED,
    TANGENT,
    Scope,
)
from conformance.extensions import load_attribute

if TYPE_CHECKING:  # they load JAX, and reports need only the names, scopes and descriptions of checks
    from conformance.check_api.judgement import Judgement
    from conformance.check_api.subject import Subject


@dataclasses.dataclass(frozen=True)
class Check:
    """A check: its name, its function, and the cases that it runs on."""

    name: str  # the name of the check, as users type it after `--check=`
    scope: Scope  # which cases the check runs on
    module: str = ""  # the module in this folder with the function `check_NAME`, if it is not the module `NAME`
    # Starts the kernel's work in its own process, so that the kernel runs while the judge runs the oracle.
    start: Callable[[Subject], None] = lambda subject: None
    # Whether results are compared with the oracle. If not, the check runs without the oracle, and also on cases that a
    # simple wrong result, such as zeros, would pass.
    compares: bool = True

    @functools.cached_property
    def run(self) -> Callable[[Subject], Iterable[Judgement]]:
        """The check's function, which yields the judgements of one subject. The first use imports it, and JAX."""
        return load_attribute(f"{__name__}.{self.module or self.name}:check_{self.name}")

    @functools.cached_property
    def about(self) -> str:
        """The first line of the function's docstring, which `list checks` shows. It is read without an import."""
        file = Path(__file__).with_name(f"{self.module or self.name}.py")
        module = compile(file.read_bytes(), file, "exec", dont_inherit=True, optimize=0)  # keeps docstrings
        codes = (constant for constant in module.co_consts if isinstance(constant, types.CodeType))
        function = next(code for code in codes if code.co_name == f"check_{self.name}")
        return inspect.cleandoc(str(function.co_consts[0])).split("\n")[0]


CHECKS: tuple[Check, ...] = (
    Check("forward", GRID, start=lambda subject: subject.begin_forward()),
    Check("residuals", GRID, module="forward"),
    Check("gradients", GRID, start=lambda subject: subject.begin_gradients("random")),
    Check("gradients_lse", GRID, "gradients", start=lambda subject: subject.begin_gradients("random_lse")),
    Check("gradients_part", GRID, module="gradients"),
    Check("primal", GRID, module="forward"),
    Check("poison", GRID),
    Check("independence", GRID),
    Check("linearity", GRID),
    Check("parts", GRID),
    Check("first_calls", FIRST),
    Check("branches", SEARCHED, compares=False),
    Check("refusals", DECLINED),
    Check("arguments", FEATURE),
    Check("forms", FEATURE),
    Check("errors", BASE),
    Check("memory", BASE),
    Check("program", BASE),
    Check("aliasing", COMBINED),
    Check("invariance", COMBINED),
    Check("limits", COMBINED),
    Check("differentiation", COMBINED),
    Check("tangents", TANGENT),
    Check("transforms", COMBINED),
    Check("calls", COMBINED),
    Check("sharding", COMBINED),
    Check("front_end", FRONT),
    Check("dropout", DROPPED),
    Check("decoding", DECODED),
    Check("batch_invariance", BATCHED, compares=False),
    Check("index_scores", INDEXED),
    Check("ensemble", ENSEMBLE),
    Check("algorithm", EXACT),
    Check("interpreter", INTERPRETED),
    Check("compiles", COMPILED, compares=False),
)
CHECKS_BY_NAME = {check.name: check for check in CHECKS}
