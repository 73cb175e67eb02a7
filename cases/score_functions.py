"""Scores by formula: what becomes of a scaled logit, by its batch row, its query head and its places along the axes.

A kernel gets such a score as a function `(score, b, n, i, j) -> score` and calls it where it has the logit. `b` and `n`
are the batch row and the query head, `i` and `j` the places of query and key along their axes, from 0; all are integers
or integer arrays that broadcast with `score`. A score captures no array, and works on arrays of any library that has a
namespace of the array API (NumPy, JAX, a Pallas tile).

Each is a whole number times a power of two, so that f32 holds it exactly. It is added to the logit, or is its soft cap.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import numpy as np

LEVELS = ("score-relative", "score-alibi", "score-rows", "score-cap")
"""What a case id may ask for, the names of `Relative`, `Alibi`, `Rows` and `Cap`."""
CAPPING = "score-cap"
"""The level that bends logits, as a soft cap does."""
_REACH = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score:
    """Base of all scores: `step` times a whole number, added to the logit or its soft cap.

    Attributes:
      step: a power of two.
      offset: `S - T`, by which queries are moved: the last query stands at the last key.
      caps: whether it bends the logit; if not, it is added.
    """

    step: float
    offset: int = 0
    caps: ClassVar[bool] = False

    def _whole(self, library: Any, b: Any, n: Any, i: Any, j: Any) -> Any:
        """The whole number, of whatever library the arguments are."""
        raise NotImplementedError

    def __call__(self, score: Any, b: Any, n: Any, i: Any, j: Any) -> Any:
        """What becomes of the scaled logit `score`, in its dtype."""
        library = score.__array_namespace__()
        whole = self._whole(library, b, n, i, j)
        number = (whole.astype(score.dtype) if hasattr(whole, "astype") else whole) * self.step
        return number * library.tanh(score / number) if self.caps else score + number

    def between(self, q_length: int, kv_length: int) -> Score:
        """The score for these lengths."""
        return dataclasses.replace(self, offset=kv_length - q_length)

    def dense(self, batch: int, num_q_heads: int, q_length: int, kv_length: int) -> np.ndarray:
        """What is added, or the soft cap, `[B, N, T, S]` in float64."""
        b, n, i, j = np.ogrid[:batch, :num_q_heads, :q_length, :kv_length]
        found = self.step * np.asarray(self._whole(np, b, n, i, j), np.float64)
        return np.broadcast_to(found, (batch, num_q_heads, q_length, kv_length))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Relative(Score):
    """A bias by how far the key is behind the query, the same from `reach` on (Raffel et al., arXiv:1910.10683)."""

    reach: int

    def _whole(self, library: Any, b: Any, n: Any, i: Any, j: Any) -> Any:
        return library.minimum(library.maximum(i + self.offset - j, -self.reach), self.reach)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Alibi(Score):
    """Logits fall with the distance, by a slope that is made from the query head (Press et al., arXiv:2108.12409)."""

    def _whole(self, library: Any, b: Any, n: Any, i: Any, j: Any) -> Any:
        return -(n + 1) * abs(i + self.offset - j)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows(Score):
    """A pattern of eight steps along the diagonals, moved by batch row and by query head."""

    def _whole(self, library: Any, b: Any, n: Any, i: Any, j: Any) -> Any:
        return (i + self.offset - j + 3 * n + 5 * b) & 7


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cap(Score):
    """A soft cap that grows with how far the key is behind the query, from half as much ahead of it to twice as much.

    Its derivative is what else a backward pass needs of a score, and says which of the places is the query's.
    """

    caps: ClassVar[bool] = True

    def _whole(self, library: Any, b: Any, n: Any, i: Any, j: Any) -> Any:
        behind = library.maximum(i + self.offset - j, -(_REACH // 2))
        return _REACH + library.minimum(behind, _REACH)


@dataclasses.dataclass(frozen=True)
class ThenCapped:
    """A score, if there is one, and a soft cap of what it gives: for kernels that know no other soft cap."""

    score: Score | None
    soft_cap: float

    def __call__(self, score: Any, b: Any, n: Any, i: Any, j: Any) -> Any:
        """What becomes of the scaled logit `score`, in its dtype."""
        found = score if self.score is None else self.score(score, b, n, i, j)
        return self.soft_cap * score.__array_namespace__().tanh(found / self.soft_cap)


def build_score(level: str, *, num_q_heads: int, q_length: int, kv_length: int, spread: float) -> Score:
    """The score that a level of a case means, large enough to be seen beside logits of this spread."""
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
    return score.between(q_length, kv_length)


def _round_down_to_power_of_two(number: float) -> float:
    """The largest power of two that is not above `number`."""
    return 2.0 ** math.floor(math.log2(number))
