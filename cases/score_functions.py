"""Define score functions (`score_mod`): formulas that change a scaled logit by batch row, query head and positions.

A kernel gets a score function `(score, b, n, i, j) -> score` and applies it to each logit that it computes. `b` and `n`
are the batch row and the query head. `i` and `j` are the positions of query and key along their axes, from 0. All are
integers, or integer arrays that broadcast with `score`. A score function captures no array. It works on arrays of any
library that has a namespace of the array API (NumPy, JAX, a Pallas tile).

Each function computes a whole number times a power of two, so that f32 holds it exactly. This number is either added to
the logit or is its soft cap.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import numpy as np

LEVELS = ("score-relative", "score-alibi", "score-rows", "score-cap")
"""Names of the score functions in case ids: `Relative`, `Alibi`, `Rows` and `Cap`, in this order."""
CAPPING = "score-cap"
"""The name of the score function that is a soft cap."""
_REACH = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score:
    """Base class of score functions: `step` times a whole number, which is added to the logit or is its soft cap."""

    step: float  # a power of two
    offset: int = 0  # `S - T`, which aligns the last query with the last key
    caps: ClassVar[bool] = False  # whether the number is a soft cap; otherwise it is added to the logit

    def _compute_integer(self, library: Any, b: Any, n: Any, i: Any, j: Any) -> Any:
        """Compute the whole number, in the array library of the arguments."""
        raise NotImplementedError

    def __call__(self, score: Any, b: Any, n: Any, i: Any, j: Any) -> Any:
        """Return the changed logit, in the dtype of the scaled logit `score`."""
        library = score.__array_namespace__()
        whole = self._compute_integer(library, b, n, i, j)
        number = (whole.astype(score.dtype) if hasattr(whole, "astype") else whole) * self.step
        return number * library.tanh(score / number) if self.caps else score + number

    def align_to(self, q_length: int, kv_length: int) -> Score:
        """Return the score function for these lengths: the last query stands at the position of the last key."""
        return dataclasses.replace(self, offset=kv_length - q_length)

    def dense(self, batch: int, num_q_heads: int, q_length: int, kv_length: int) -> np.ndarray:
        """Compute the number that is added to each logit, or its soft cap, `[B, N, T, S]` in float64."""
        b, n, i, j = np.ogrid[:batch, :num_q_heads, :q_length, :kv_length]
        found = self.step * np.asarray(self._compute_integer(np, b, n, i, j), np.float64)
        return np.broadcast_to(found, (batch, num_q_heads, q_length, kv_length))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Relative(Score):
    """A bias by how far the key is behind the query, constant from `reach` on (Raffel et al., arXiv:1910.10683)."""

    reach: int

    def _compute_integer(self, library: Any, b: Any, n: Any, i: Any, j: Any) -> Any:
        return library.minimum(library.maximum(i + self.offset - j, -self.reach), self.reach)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Alibi(Score):
    """A bias that falls with the distance of the key, with a slope for each query head (ALiBi, arXiv:2108.12409)."""

    def _compute_integer(self, library: Any, b: Any, n: Any, i: Any, j: Any) -> Any:
        return -(n + 1) * abs(i + self.offset - j)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows(Score):
    """A bias that repeats every eight positions of distance, shifted by batch row and by query head."""

    def _compute_integer(self, library: Any, b: Any, n: Any, i: Any, j: Any) -> Any:
        return (i + self.offset - j + 3 * n + 5 * b) & 7


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cap(Score):
    """A soft cap that grows with how far the key is behind the query.

    It ranges from half its value at equal positions, for keys far ahead, to twice that value. Its derivative is not 1,
    so a backward pass must use it. A kernel that exchanges the two positions gets wrong values.
    """

    caps: ClassVar[bool] = True

    def _compute_integer(self, library: Any, b: Any, n: Any, i: Any, j: Any) -> Any:
        behind = library.maximum(i + self.offset - j, -(_REACH // 2))
        return _REACH + library.minimum(behind, _REACH)


@dataclasses.dataclass(frozen=True)
class ThenCapped:
    """A score function, if there is one, followed by a soft cap: for kernels without a parameter for a soft cap."""

    score: Score | None
    soft_cap: float

    def __call__(self, score: Any, b: Any, n: Any, i: Any, j: Any) -> Any:
        """Return the changed logit, in the dtype of the scaled logit `score`."""
        found = score if self.score is None else self.score(score, b, n, i, j)
        return self.soft_cap * score.__array_namespace__().tanh(found / self.soft_cap)


def build_score(level: str, *, num_q_heads: int, q_length: int, kv_length: int, spread: float) -> Score:
    """Build the score function that a case id names, large enough to matter for logits of the given spread.

    Raises `ValueError` if `level` is not one of `LEVELS`.
    """
    longest, size = max(q_length, kv_length), max(1.0, spread / 2)
    score: Score
    if level == "score-relative":
        reach = max(2, min(_REACH // 2, longest // 8))
        score = Relative(step=_round_down_to_power_of_two(2 * size / reach), reach=reach)
    elif level == "score-alibi":
        score = Alibi(step=_round_down_to_power_of_two(6 * size / (num_q_heads * longest)))
    elif level == "score-rows":
        score = Rows(step=_round_down_to_power_of_two(size) / 4)
    elif level == CAPPING:
        score = Cap(step=_round_down_to_power_of_two(2 * size) / _REACH)
    else:
        raise ValueError(f"score must be one of {', '.join(LEVELS)}, got {level!r}")
    return score.align_to(q_length, kv_length)


def _round_down_to_power_of_two(number: float) -> float:
    """Return the largest power of two that is at most `number`."""
    return 2.0 ** math.floor(math.log2(number))
