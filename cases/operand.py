"""What an operand of the canonical call is: its arrays, how case ids write it, and what it does to the logits.

Each optional operand is a module of `cases.optional_operands`; `cases.operand_registry` lists them. Logits are made in
this order, which `conformance.truth.oracle` follows (docs/contract.md, section 2):

    x = product of the factors * <q, k> + sum of the terms        z = cap * tanh(x / cap)
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:  # a case and a problem have operands, so that their modules import this one
    from cases.case import Case
    from cases.operand_validation import CallSizes
    from cases.operand_values import Problem

Axes = tuple[str, ...]
"""What the axes of an array go along, in the contract's letters: `B`, `T`, `S`, `N`, `K`, `H`, `V`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operand:
    """An operand of the canonical call.

    Attributes:
      name: the keyword of the call, and the field of `cases.operand_values.Problem`.
      arrays: the axes of its array, or of each array of a pair. It is empty for a number or a function, for which the
        call is compiled.
      broadcasts: whether an axis of length 1 stands for the whole axis.
      gradient: the name of its gradient; empty if it has none.
    """

    name: str
    arrays: tuple[Axes, ...]
    broadcasts: bool = False
    gradient: str = ""

    def map_along(self, value: Any, letter: str, change: Callable[[np.ndarray, int], Any]) -> Any:
        """Replace each array of `value` that varies along the axis `letter` by `change(array, axis)`."""

        def change_if_varying(x: np.ndarray, axes: Axes) -> Any:
            axis = self.find_axis(x, axes, letter)
            return x if axis is None else change(x, axis)

        return self.map_arrays(value, change_if_varying)

    def find_axis(self, x: np.ndarray, axes: Axes, letter: str) -> int | None:
        """Return the axis of `x` that goes along `letter`, or None if `x` is constant along it."""
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
    """How a kernel rounds a term while it computes it, before it is added to the logit.

    Attributes:
      integers: whole numbers in the term, which f32 holds exactly and 16 bits do not.
      products: products in the term, which round in every dtype.
    """

    integers: int = 0
    products: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class OptionalOperand(Operand):
    """An operand that a call may lack; each is equal to itself alone.

    In a case id:

    Attributes:
      field: the field of `cases.case.Case` that asks for it.
      form: its part of a case id, as messages write it. The last letter stands for the number, if it has one.
      levels: the values of the field beside its default; of a number, one usual value.
      number: the pattern of a number's part in a case id; None if a case id writes the level itself.

    In words:

      description: what it is, as the description of the feature `name`. It is empty if its features go by its value.
      words: what findings call it: "a soft cap".

    In the plan of a run:

      opt_in: whether an implementation has it only by declaring it. The call of the others has no such parameter.
      stored: whether a call that takes packed or paged operands may have it (docs/contract.md, section 8).
      is_quiet: whether its absence is left out where cases are compared, so that cases that lack it are planned,
        ordered and explored as if it did not exist.
      is_positional: whether it depends on the positions of queries and keys, which no axis of its arrays says. Some of
        the queries or keys alone are then another problem.
      has_own_cases: whether it has a covering array of its own (`cases.operand_model`) instead of an axis in that of
        all features. The cases of other operands then stay as they are.
      vmap: the name of the transform that gives it a batch axis of its own (`kv` if k and v get one with it).
      grid_levels: the levels on its axis of `cases.feature_model`, beside its absence.
      rich_level: the level in the case that has every supported operand.
      is_rare: whether few implementations support it; grids of the others leave its axis out.
      calls: changes to a usual case, by label, for the check `calls`.
      decoding: fields of cases that are decoded token by token.

    What it does:

      draw: `(case, problem, spread) -> value`, for a case that has the operand. `problem` has what was drawn before it,
        and `spread` is the standard deviation of the logits. By default the value is the case's field.
      validate: `(name, value, sizes, dtypes)`: raise `ValueError` or `TypeError`, naming the operand, for a wrong
        value. `dtypes` are the names of the dtypes that floating-point operands may have.
      null: `problem -> value`: the value at which the operand changes nothing; None if there is no such value.
      factor: `problem -> number or float64 [N]`: what multiplies `<q, k>`.
      term: `problem -> float64 array`, broadcastable to `[B, N, T, S]`: what is added to scaled logits.
      term_rounding: how the term rounds.
      cap: `problem -> number or float64 [B, N, T, S]`: the soft cap.

    `factor`, `term` and `cap` are asked only where the problem has the operand, and give None where it has no such
    effect.
    """

    field: str
    form: str
    levels: tuple[Any, ...]
    number: re.Pattern[str] | None = None
    description: str = ""
    words: str
    opt_in: bool = False
    stored: bool = False
    is_quiet: bool = False
    is_positional: bool = False
    has_own_cases: bool = False
    vmap: str = ""
    grid_levels: tuple[Any, ...] = ()
    rich_level: Any = None
    is_rare: bool = False
    calls: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    decoding: tuple[Mapping[str, Any], ...] = ()
    draw: Callable[[Case, Problem, float], Any] | None = None
    validate: Callable[[str, Any, CallSizes, Any], None]
    null: Callable[[Problem], Any] | None = None
    factor: Callable[[Problem], Any] | None = None
    term: Callable[[Problem], np.ndarray | None] | None = None
    term_rounding: TermRounding = TermRounding()
    cap: Callable[[Problem], Any] | None = None

    @property
    def is_flag(self) -> bool:
        """Whether a case either has the operand or not, with nothing else to say."""
        return self.levels == (True,)

    @property
    def is_function(self) -> bool:
        """Whether it is a function of batch row, query head and positions."""
        return not self.arrays and self.number is None

    @property
    def absent(self) -> Any:
        """The value of the case's field without the operand."""
        return False if self.is_flag else None

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of a case id that ask for it, as a message lists them."""
        return (self.form,) if self.is_flag or self.number else self.levels

    def write(self, value: Any) -> str:
        """Return the part of a case id that asks for `value`."""
        if self.number is None:
            return self.form if self.is_flag else str(value)
        # The shortest digits that parse back to the same number, without an exponent: ids have no `+`.
        return self.form[:-1] + np.format_float_positional(float(value), trim="-")

    def read(self, part: str) -> Any:
        """Return the value that a part of a case id asks for, or None if the part is about something else."""
        if self.number is not None:
            found = self.number.fullmatch(part)
            return float(found[1]) if found else None
        if part not in self.parts:
            return None
        return True if self.is_flag else part
