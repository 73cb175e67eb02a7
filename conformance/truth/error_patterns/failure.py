"""Hold a failed comparison: the wrong result, the right one, the meaning of the axes, and the problem.

Every other module of this package takes a `Failure`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import numpy as np

from cases.operand_registry import OPERANDS, RESIDUALS
from cases.operand_values import Problem
from conformance.truth.comparison import compute_ratios
from conformance.truth.rounding_bounds import Bounded

AXIS_LETTERS: Mapping[str, str] = {
    "out": "BTNV",
    **dict.fromkeys(RESIDUALS, "BNT"),
    "head_max_logits": "N",
    **dict.fromkeys(("weights", "dropped_weights"), "BNTS"),
    **{operand.gradient: "".join(operand.arrays[0]) for operand in OPERANDS if operand.gradient},
}
"""Axes of each observable, in the letters of the contract."""
DEPTH_LETTERS = "HV"
"""Axes of depth: `H` of queries and keys, `V` of values."""


@dataclasses.dataclass(frozen=True, eq=False)
class Failure:
    """A wrong result beside the right one."""

    observable: str
    letters: str  # the letters of the axes, such as `BTNV`
    got: np.ndarray
    expected: Bounded
    judged: np.ndarray  # booleans of the same shape, true for judged elements
    limit: float
    problem: Problem
    # Whether the result belongs to the whole, unchanged problem. Only then does the mask apply to its rows.
    is_core: bool = False
    # All right results of the problem, by name, to recognise one in place of another; empty unless `is_core`.
    others: Mapping[str, Bounded] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def values(self) -> np.ndarray:
        """The wrong result in float64."""
        return self.got.astype(np.float64)

    @functools.cached_property
    def ratios(self) -> np.ndarray:
        """Errors in units of the bound; -1 where nothing is judged."""
        return compute_ratios(self.values, self.expected, self.judged)

    @functools.cached_property
    def wrong(self) -> np.ndarray:
        """Elements whose ratio exceeds the limit."""
        return self.ratios > self.limit

    @functools.cached_property
    def informative(self) -> np.ndarray:
        """Judged elements, except right ones that do not depend on the attention weights and so prove nothing.

        Exceptions are exact zeros and infinities. Without sinks, they are also `out` and `dq` of rows that see one key.
        """
        nothing = (self.expected.value == 0) & (self.expected.bound == 0) | np.isinf(self.expected.value)
        if self.is_core and self.observable in ("out", "dq") and self.problem.sinks is None:
            seen = self.problem.allowed.sum(axis=-1).swapaxes(1, 2)[..., None]
            nothing = nothing | (seen == 1)
        return self.judged & (self.wrong | ~nothing)

    @functools.cached_property
    def errors(self) -> np.ndarray:
        """Absolute errors of informative elements; 0 for other elements, and where an error is not finite."""
        with np.errstate(invalid="ignore", over="ignore"):
            errors = np.where(self.informative, np.abs(self.values - self.expected.value), 0.0)
        return np.nan_to_num(errors, posinf=0.0)

    @property
    def group(self) -> int:
        """Number of query heads that share a key/value head."""
        return self.problem.q.shape[2] // self.problem.k.shape[2]

    @property
    def unit_letters(self) -> str:
        """Letters of the axes without the depth. They index the units of a result: its rows, keys or pairs."""
        return self.letters.rstrip(DEPTH_LETTERS)

    def reduce_to_units(self, elements: np.ndarray) -> np.ndarray:
        """Reduce `elements` to one value for each unit (row, key or pair): the largest along the depth."""
        return elements.max(axis=-1) if self.unit_letters != self.letters else elements

    def to_elements(self, units: np.ndarray) -> np.ndarray:
        """Give booleans of units a last axis, if the result has a depth, so that they broadcast to the elements."""
        return units[..., None] if self.unit_letters != self.letters else units


def build_failure(
    observable: str,
    got: object,
    expected: Bounded,
    judged: np.ndarray | None,
    *,
    limit: float,
    problem: Problem,
    core: Mapping[str, Bounded] | None = None,
) -> Failure | None:
    """Build the failure of a comparison; None if the meaning of the axes is not known.

    Args:
      judged: booleans broadcastable to the shape; all by default.
      limit: the largest ratio that passes.
      core: right results of the whole, unchanged problem. If `expected` is not one of them, the result belongs to a
        changed problem, to which the mask does not apply.
    """
    array = np.asarray(got)
    letters = AXIS_LETTERS.get(observable, "")
    if array.shape != expected.value.shape or not array.size or not _has_axes(letters, array.shape, problem):
        return None
    every = np.ones(array.shape, bool) if judged is None else np.broadcast_to(judged, array.shape)
    others = core or {}
    is_core = any(one.value is expected.value for one in others.values())
    return Failure(observable, letters, array, expected, every, limit, problem, is_core, others if is_core else {})


def _has_axes(letters: str, shape: tuple[int, ...], problem: Problem) -> bool:
    """Check whether an array may have these axes; a check may select some batch rows, rows or keys of a problem."""
    _, _, q_heads, depth = problem.q.shape
    sizes = {"N": q_heads, "K": problem.k.shape[2], "H": depth, "V": problem.v.shape[3]}
    return len(letters) == len(shape) and all(
        size in (1, sizes[letter]) for letter, size in zip(letters, shape, strict=True) if letter in sizes
    )
