"""Define the operands of the canonical call: their arrays, how case ids write them, and their effect on the logits.

Each optional operand is a module of `cases.optional_operands`; `cases.operand_registry` lists them. Logits are made in
this order, which `conformance.truth.oracle` follows (docs/contract.md, section 2):

    x = product of the factors * <q, k> + sum of the terms        z = cap * tanh(x / cap)
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from cases.case_fields import CallOperands, CaseFields
from cases.operand_validation import CallSizes

Axes = tuple[str, ...]
"""The axes of an array, by the letters of docs/contract.md: `B`, `T`, `S`, `N`, `K`, `H`, `V`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operand:
    """An operand of the canonical call."""

    name: str  # the keyword of the call, and the field of `cases.case_fields.CallOperands`
    # The axes of its array, or of each array of a pair. It is empty for a number or a function, which is fixed when the
    # call is compiled.
    arrays: tuple[Axes, ...]
    broadcasts: bool = False  # whether an axis of length 1 stands for the whole axis
    gradient: str = ""  # the name of its gradient; empty if it has none

    def map_along(self, value: Any, letter: str, change: Callable[[np.ndarray, int], Any]) -> Any:
        """Replace each array of `value` that varies along the axis `letter` by `change(array, axis)`."""

        def change_if_varying(x: np.ndarray, axes: Axes) -> Any:
            axis = self.find_axis(x, axes, letter)
            return x if axis is None else change(x, axis)

        return self.map_arrays(value, change_if_varying)

    def find_axis(self, x: np.ndarray, axes: Axes, letter: str) -> int | None:
        """Return the index of the axis `letter` in `x`, or None if `x` does not vary along this axis."""
        if letter not in axes or x.ndim == 0 or (self.broadcasts and x.shape[axes.index(letter)] == 1):
            return None
        return axes.index(letter)

    def map_arrays(self, value: Any, change: Callable[[np.ndarray, Axes], Any]) -> Any:
        """Replace each array of `value` by `change(array, axes)`; numbers, functions and None stay."""
        if value is None or not self.arrays:
            return value
        if len(self.arrays) == 1:
            return change(value, self.arrays[0])
        return tuple(change(x, axes) for x, axes in zip(value, self.arrays, strict=True))


@dataclasses.dataclass(frozen=True)
class TermRounding:
    """Count the roundings that a kernel may make in a term before it adds the term to the logit."""

    integers: int = 0  # number of whole numbers in the term. They are exact in f32, and are rounded in bf16 and f16.
    products: int = 0  # number of products in the term. They are rounded in every dtype.


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LogitOperand(Operand):
    """An operand that a call may lack, and its effect on the logits. Two instances are never equal.

    Attributes:
      vmap: the name of the transform that gives the operand a batch axis of its own (`kv` if k and v get one too).
      factor: `problem -> number or float64 [N]`: the factor of `<q, k>`.
      term: `problem -> float64 array`, broadcastable to `[B, N, T, S]`: the term added to scaled logits.
      term_rounding: how a kernel may round the term.
      cap: `problem -> number or float64 [B, N, T, S]`: the soft cap.

    `factor`, `term` and `cap` are called only for problems that have the operand. They return None if the operand has
    no such effect in the problem.
    """

    vmap: str = ""
    factor: Callable[[CallOperands], Any] | None = None
    term: Callable[[CallOperands], np.ndarray | None] | None = None
    term_rounding: TermRounding = TermRounding()
    cap: Callable[[CallOperands], Any] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class OptionalOperand(LogitOperand):
    """An operand that a call may lack, and that a case asks for.

    In a case id:

    Attributes:
      field: the field of `cases.case_fields.CaseFields` that asks for the operand.
      form: the operand's component of a case id, as messages show it. If it has a number, the last letter stands for
        the number.
      levels: the values of the field other than its default; for a number, one usual value. True stands for `form`.
      stored_levels: further values of the field, for cases with stored operands only.
      number: regular expression of a component that holds a number; None if the component is the level itself.

    In words:

      description: the description of the feature `name`. It is empty if the features depend on the operand's value.
      words: the noun phrase that findings use, such as "a soft cap".
      traits: for values of the field, noun phrases for what a fault may depend on, such as "a bias that hides keys".

    In the plan of a run:

      opt_in: whether an implementation supports the operand only if it declares it. Other implementations are called
        without this parameter.
      stored: whether a call that takes packed or paged operands may have it (docs/contract.md, section 8).
      is_absence_ignored: whether comparisons of cases ignore that a case lacks the operand. Cases without it are then
        planned, ordered and explored as if the operand did not exist.
      is_positional: whether the operand depends on the positions of queries and keys although its arrays have no such
        axes. Results then change if only some of the queries or keys are kept.
      has_own_cases: whether the operand has a covering array of its own (`cases.operand_model`) instead of an axis in
        `cases.feature_model`. The cases of other operands then stay as they are.
      grid_levels: the levels on its axis of `cases.feature_model`, other than its absence.
      combined_level: the level in the combined case, which has every supported operand.
      is_rare: whether few implementations support the operand. For others, the covering array leaves its axis out.
      calls: fields that the check `calls` changes in a usual case, by the label of the change.
      decoding: fields of additional cases for the check `decoding`.

    What it does:

      draw: `(case, problem, spread) -> value`, for a case that has the operand. `problem` has the operands drawn so
        far, and `spread` is the standard deviation of the logits. By default the value is the case's field.
      validate: `(name, value, sizes, dtypes)`: raise `ValueError` or `TypeError`, naming the operand, for a wrong
        value. `dtypes` are the names of the dtypes that floating-point operands may have.
      null: `problem -> value`: the value at which the operand changes nothing; None if there is no such value.
      special: a number for which kernels may have a program of their own, in arrays at every place; None if there is
        none.
    """

    field: str
    form: str
    levels: tuple[Any, ...]
    stored_levels: tuple[str, ...] = ()
    number: re.Pattern[str] | None = None
    description: str = ""
    words: str
    traits: Mapping[Any, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    opt_in: bool = False
    stored: bool = False
    is_absence_ignored: bool = False
    is_positional: bool = False
    has_own_cases: bool = False
    grid_levels: tuple[Any, ...] = ()
    combined_level: Any = None
    special: float | None = None
    is_rare: bool = False
    calls: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    decoding: tuple[Mapping[str, Any], ...] = ()
    draw: Callable[[CaseFields, CallOperands, float], Any] | None = None
    validate: Callable[[str, Any, CallSizes, Any], None]
    null: Callable[[CallOperands], Any] | None = None

    @property
    def is_flag(self) -> bool:
        """Whether a case asks for the operand with True; a name in its place asks for a variant of the values."""
        return True in self.levels

    @property
    def is_function(self) -> bool:
        """Whether the operand is a function of batch row, query head and positions."""
        return not self.arrays and self.number is None

    @property
    def absent(self) -> Any:
        """The value of the case's field if the case lacks the operand."""
        return False if self.is_flag else None

    @property
    def id_components(self) -> tuple[str, ...]:
        """The components of a case id that ask for the operand, as messages list them."""
        if self.number is not None:
            return (self.form,)
        return tuple(self.form if level is True else level for level in (*self.levels, *self.stored_levels))

    def write(self, value: Any) -> str:
        """Return the component of a case id that asks for `value`."""
        if self.number is None:
            return self.form if value is True else str(value)
        # The shortest digits that parse back to the same number, without an exponent: ids have no `+`.
        return self.form[:-1] + np.format_float_positional(float(value), trim="-")

    def read(self, component: str) -> Any:
        """Return the value that a component of a case id asks for, or None if it is about something else."""
        if self.number is not None:
            found = self.number.fullmatch(component)
            return float(found[1]) if found else None
        if component not in self.id_components:
            return None
        return True if self.is_flag and component == self.form else component
