"""The operands of a call, one row for each, and the names of what a call gives.

A new optional operand is a row here, a field of `cases.case.Case` and one of `cases.operand_values.Problem` with values for it,
levels in `cases.feature_model`, and what it does to the logits in `conformance.truth`, with its error. Whatever passes operands
on, cuts them, shards them or leaves one out goes by this table.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from cases import score_functions
from cases.quantization import KV_CACHES, WHOLE_CACHES

SEGMENTS = ("seg", "segpad", "segwild", "segmany", "segamid")
BIASES = ("bias", "biashead", "biaskey", "biasbatch", "biaspair", "biasslope", "biasinf")

Axes = tuple[str, ...]
"""What the axes of an array go along, in the contract's letters: `B`, `T`, `S`, `N`, `K`, `H`, `V`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operand:
    """An operand of the canonical call.

    Attributes:
      name: the keyword of the call, and the field of `cases.operand_values.Problem`.
      arrays: the axes of its array, or of each array of a pair; empty if it is a number or a function that the call is
        compiled for.
      broadcasts: whether an axis of length 1 stands for all there are.
      gradient: the name of its gradient, empty if it has none.
    """

    name: str
    arrays: tuple[Axes, ...]
    broadcasts: bool = False
    gradient: str = ""

    def along(self, value: Any, letter: str, change: Callable[[np.ndarray, int], Any]) -> Any:
        """`value` with `change(array, axis)` in place of each array that differs along the axis `letter`."""

        def changed(x: np.ndarray, axes: Axes) -> Any:
            axis = self.find_axis(x, axes, letter)
            return x if axis is None else change(x, axis)

        return self.each(value, changed)

    def find_axis(self, x: np.ndarray, axes: Axes, letter: str) -> int | None:
        """Which axis of `x` goes along `letter`, none if it is the same all along."""
        if letter not in axes or x.ndim == 0 or (self.broadcasts and x.shape[axes.index(letter)] == 1):
            return None
        return axes.index(letter)

    def each(self, value: Any, change: Callable[[np.ndarray, Axes], Any]) -> Any:
        """`value` with `change(array, axes)` in place of each array; a number stays, and so does none."""
        if value is None or not self.arrays:
            return value
        if len(self.arrays) == 1:
            return change(value, self.arrays[0])
        return tuple(change(x, axes) for x, axes in zip(value, self.arrays, strict=True))


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptionalOperand(Operand):
    """An operand that a call may lack.

    Attributes:
      field: the field of `cases.case.Case` that asks for it.
      form: how a case id writes it, in messages; the last letter is the number, if it has one.
      levels: what the field may be, beside its default; of a number, one that is usual.
      number: what a case id writes of a number; none where it writes a level as it is.
      says: what it is, as the description of the feature `name`; empty if its features go by its value.
      opt_in: whether an implementation has it only if it says so; the call of the others has no such parameter.
      stored: whether a call that takes its operands packed or in pages may have it (docs/contract.md, section 8).
      quiet: whether calls without it take turns, are ordered and are explored as if there were no such operand.
      placed: whether it goes by where queries and keys stand, which no axis of its arrays says: some of the queries or
        keys alone are then another problem.
      vmap: the name of the transform that gives it a batch axis of its own (`kv` if k and v get one with it).
    """

    field: str
    form: str
    levels: tuple[Any, ...]
    number: re.Pattern[str] | None = None
    says: str = ""
    opt_in: bool = False
    stored: bool = False
    is_quiet: bool = False
    is_positional: bool = False
    vmap: str = ""

    @property
    def is_flag(self) -> bool:
        """Whether a case has it or not, and there is nothing else to say."""
        return self.levels == (True,)

    @property
    def is_function(self) -> bool:
        """Whether it is a function of batch row, query head and places: some of these alone are another problem."""
        return not self.arrays and self.number is None

    @property
    def absent(self) -> Any:
        """The field's value without it."""
        return False if self.is_flag else None

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of a case id that ask for it, as a message lists them."""
        return (self.form,) if self.is_flag or self.number else self.levels

    def write(self, value: Any) -> str:
        """The part of a case id that asks for `value`."""
        if self.number is None:
            return self.form if self.is_flag else str(value)
        # The shortest digits that read back as the same number, without an exponent: ids have no `+`.
        return self.form[:-1] + np.format_float_positional(float(value), trim="-")

    def read(self, part: str) -> Any:
        """The value that a part of a case id asks for, none if it is about something else."""
        if self.number is not None:
            found = self.number.fullmatch(part)
            return float(found[1]) if found else None
        if part not in self.parts:
            return None
        return True if self.is_flag else part


REQUIRED = (
    Operand(name="q", arrays=(("B", "T", "N", "H"),), gradient="dq"),
    Operand(name="k", arrays=(("B", "S", "K", "H"),), gradient="dk"),
    Operand(name="v", arrays=(("B", "S", "K", "V"),), gradient="dv"),
)
OPTIONAL = (
    OptionalOperand(
        name="segment_ids",
        arrays=(("B", "T"), ("B", "S")),
        field="segments",
        form="segments",
        levels=SEGMENTS,
        says="segment ids of q and kv",
        vmap="segments",
    ),
    OptionalOperand(
        name="soft_cap",
        arrays=(),
        field="soft_cap",
        form="softcapC",
        levels=(30.0,),
        number=re.compile(r"(?:soft)?cap(\d+(?:\.\d+)?)"),
        says="soft cap of the logits",
        stored=True,
    ),
    OptionalOperand(
        name="sinks",
        arrays=(("N",),),
        gradient="dsinks",
        field="sinks",
        form="sinks",
        levels=(True,),
        says="one learned sink logit for each query head",
        stored=True,
        vmap="sinks",
    ),
    OptionalOperand(
        name="bias",
        arrays=(("B", "N", "T", "S"),),
        broadcasts=True,
        gradient="dbias",
        field="bias",
        form="bias",
        levels=BIASES,
        says="additive bias",
        vmap="kv",
    ),
    OptionalOperand(
        name="scale",
        arrays=(),
        field="scale",
        form="scaleX",
        levels=(0.3,),
        number=re.compile(r"scale(\d+(?:\.\d+)?)"),
        says="a scale other than 1/sqrt(H)",
        stored=True,
    ),
    OptionalOperand(
        name="kv_scales",
        arrays=(("B", "S", "K"), ("B", "S", "K")),
        broadcasts=True,
        field="kv_cache",
        form="kvKIND-BY",
        levels=(*KV_CACHES, *WHOLE_CACHES),
        opt_in=True,
        vmap="kv",
    ),
    OptionalOperand(
        name="alibi_slopes",
        arrays=(("N",),),
        field="alibi",
        form="alibi",
        levels=(True,),
        says="ALiBi: logits fall with the distance of query and key, by a slope for each query head",
        opt_in=True,
        is_quiet=True,
        is_positional=True,
        vmap="alibi_slopes",
    ),
    OptionalOperand(
        name="score_mod",
        arrays=(),
        field="score",
        form="score-NAME",
        levels=score_functions.LEVELS,
        says="scaled logits changed by a function of batch row, query head and places",
        opt_in=True,
        is_quiet=True,
        is_positional=True,
    ),
)
OPERANDS: tuple[Operand, ...] = (*REQUIRED, *OPTIONAL)

GRADIENT_OF = {operand.name: operand.gradient for operand in OPERANDS if operand.gradient}
"""The gradient's name by the operand's, of those that have one."""
RESIDUALS = ("logsumexp", "max_logits")
GRADIENTS = tuple(GRADIENT_OF.values())
OBSERVABLES = ("out", *RESIDUALS, *GRADIENTS)
"""What a call gives, with its residuals and its gradients, in the contract's order."""
REMOVABLE = tuple(operand for operand in OPTIONAL if operand.says)
"""Those that a problem has a meaning without: stored keys and values have none without their scales."""
QUIET = frozenset(operand.field for operand in OPTIONAL if operand.is_quiet)
"""Fields of those whose absence says nothing of a case: kernels that lack one are judged as before there was one."""
PLACED = tuple(operand.name for operand in OPTIONAL if operand.is_positional)
"""Those that go by where queries and keys stand."""
