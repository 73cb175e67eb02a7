"""Define score functions (`score_mod`): formulas that change a scaled logit by batch row, query head and positions.

A kernel gets a score function `(score, b, n, i, j) -> score` and applies it to each logit that it computes. `b` and `n`
are the batch row and the query head. `i` and `j` are the positions of query and key along their axes, from 0. All are
integers, or integer arrays that broadcast with `score`. It works on arrays of any library that has a namespace of the
array API (NumPy, JAX, a Pallas tile).

Each function computes a number that is either added to the logit or is its soft cap. It is a whole number times a power
of two, so that f32 holds it exactly. The functions of `CAPTURED` take the number from a table of f32 numbers instead,
which they capture: the operand `score_table`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar, Self

import numpy as np

LEVELS = ("score-relative", "score-alibi", "score-rows", "score-cap")
"""Names of the score functions that capture no array: `Relative`, `Alibi`, `Rows` and `Cap`, in this order."""
CAPTURED = ("score-buckets", "score-slopes", "score-caps")
"""Names of the score functions that capture an array: `Buckets`, `Slopes` and `Caps`, in this order."""
CAPPING = ("score-cap", "score-caps")
"""The names of the score functions that are soft caps."""
_REACH = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score:
    """Base class of score functions, which add a number to the logit, or have one as its soft cap."""

    step: float  # the size of the number; a power of two if the function captures no array
    offset: int = 0  # `S - T`, which aligns the last query with the last key
    caps: ClassVar[bool] = False  # whether the number is a soft cap; otherwise it is added to the logit

    def align_to(self, q_length: int, kv_length: int) -> Self:
        """Return the score function for these lengths: the last query stands at the position of the last key."""
        return dataclasses.replace(self, offset=kv_length - q_length)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FormulaScore(Score):
    """Base class of score functions that capture no array: the number is `step` times a whole number."""

    def _compute_integer(self, library: Any, b: Any, n: Any, i: Any, j: Any) -> Any:
        """Compute the whole number, in the array library of the arguments."""
        raise NotImplementedError

    def __call__(self, score: Any, b: Any, n: Any, i: Any, j: Any) -> Any:
        """Return the changed logit, in the dtype of the scaled logit `score`."""
        library = score.__array_namespace__()
        whole = self._compute_integer(library, b, n, i, j)
        number = (whole.astype(score.dtype) if hasattr(whole, "astype") else whole) * self.step
        return number * library.tanh(score / number) if self.caps else score + number

    def dense(self, batch: int, num_q_heads: int, places: np.ndarray, kv_length: int) -> np.ndarray:
        """Compute the number that is added to each logit, or its soft cap, `[B, N, T, S]` in float64.

        Args:
          places: the place `i` of each query, `[B or 1, T]`.
        """
        b, n, _, j = np.ogrid[:batch, :num_q_heads, :1, :kv_length]
        found = self.step * np.asarray(self._compute_integer(np, b, n, places[:, None, :, None], j), np.float64)
        return np.broadcast_to(found, (batch, num_q_heads, places.shape[1], kv_length))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Relative(FormulaScore):
    """A bias by how far the key is behind the query, constant from `reach` on (Raffel et al., arXiv:1910.10683)."""

    reach: int

    def _compute_integer(self, library: Any, b: Any, n: Any, i: Any, j: Any) -> Any:
        return library.minimum(library.maximum(i + self.offset - j, -self.reach), self.reach)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Alibi(FormulaScore):
    """A bias that falls with the distance of the key, with a slope for each query head (ALiBi, arXiv:2108.12409)."""

    def _compute_integer(self, library: Any, b: Any, n: Any, i: Any, j: Any) -> Any:
        return -(n + 1) * abs(i + self.offset - j)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows(FormulaScore):
    """A bias that repeats every eight positions of distance, shifted by batch row and by query head."""

    def _compute_integer(self, library: Any, b: Any, n: Any, i: Any, j: Any) -> Any:
        return (i + self.offset - j + 3 * n + 5 * b) & 7


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cap(FormulaScore):
    """A soft cap that grows with how far the key is behind the query.

    It ranges from half its value at equal positions, for keys far ahead, to twice that value. Its derivative is not 1,
    so a backward pass must use it. A kernel that exchanges the two positions gets wrong values.
    """

    caps: ClassVar[bool] = True

    def _compute_integer(self, library: Any, b: Any, n: Any, i: Any, j: Any) -> Any:
        behind = library.maximum(i + self.offset - j, -(_REACH // 2))
        return _REACH + library.minimum(behind, _REACH)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableScore(Score):
    """Base class of score functions that capture a table: the number is a whole number times an entry of the table.

    The table, f32 `[L, N]`, has a column for each query head. A kernel gets the function with its table as one object
    that it may call or take apart: a `jax.tree_util.Partial`, whose leaf is the table. The leaf is `[N]` if `L` is 1.
    """

    num_entries: ClassVar[int] = 1  # `L`

    def find_entries(self, library: Any, i: Any, j: Any) -> Any:
        """Find the row of the table for queries `i` and keys `j`."""
        return 0

    def compute_weights(self, library: Any, i: Any, j: Any) -> Any:
        """Compute the whole number that the entry is multiplied by, for queries `i` and keys `j`."""
        return 1

    def draw_table(self, noise: np.ndarray) -> np.ndarray:
        """Make the table, f32 `[L, N]`, of normal random numbers."""
        return (self.step * noise).astype(np.float32)

    def get_leaf(self, table: Any) -> Any:
        """Return the array that the function captures, from a table `[L, N]`."""
        return table if self.num_entries > 1 else table[0]

    def __call__(self, leaf: Any, score: Any, b: Any, n: Any, i: Any, j: Any) -> Any:
        """Return the changed logit, in the dtype of the scaled logit `score`; `leaf` is the captured array."""
        library = score.__array_namespace__()
        number = leaf[n] if leaf.ndim == 1 else leaf[self.find_entries(library, i, j), n]
        number = number.astype(score.dtype)
        if self.caps:
            return number * library.tanh(score / number)
        weights = self.compute_weights(library, i, j)
        return score + number * (weights.astype(score.dtype) if hasattr(weights, "astype") else weights)

    def dense_table(self, table: np.ndarray, q_length: int, kv_length: int) -> np.ndarray:
        """Compute the number of each logit for a table `[L, N]`, `[1, N, T, S]` in float64."""
        entries, weights = self.dense_places(q_length, kv_length)
        return (table.astype(np.float64)[entries] * weights[..., None]).transpose(2, 0, 1)[None]

    def dense_places(self, q_length: int, kv_length: int) -> tuple[np.ndarray, np.ndarray]:
        """Compute the row of the table for each pair, and the number that it is multiplied by, both `[T, S]`."""
        i, j = np.ogrid[:q_length, :kv_length]
        shape = (q_length, kv_length)
        found = (self.find_entries(np, i, j), self.compute_weights(np, i, j))
        return np.broadcast_to(found[0], shape), np.broadcast_to(found[1], shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buckets(TableScore):
    """A learned bias for each head and bucket of relative positions (T5; Raffel et al. 2020, arXiv:1910.10683).

    Half of the 32 buckets are for keys after the query. Of each half, eight buckets are for single distances, and eight
    grow by the factor `2 ** 0.5`, up to a distance of 128.
    """

    num_entries: ClassVar[int] = 32
    _single: ClassVar[int] = 8
    _borders: ClassVar[tuple[int, ...]] = tuple(math.ceil(8 * 2 ** (power / 2)) for power in range(1, 8))

    def find_entries(self, library: Any, i: Any, j: Any) -> Any:
        """Find the bucket of each relative position."""
        ahead = j - i - self.offset
        distance = abs(ahead)
        bucket = library.minimum(distance, self._single)
        for border in self._borders:
            bucket = bucket + (distance >= border)
        return bucket + (self.num_entries // 2) * (ahead > 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slopes(TableScore):
    """A bias that falls with the distance of the key, with a learned slope for each query head (arXiv:2108.12409)."""

    def compute_weights(self, library: Any, i: Any, j: Any) -> Any:
        """Compute the distance of each key, negative."""
        return -abs(i + self.offset - j)

    def draw_table(self, noise: np.ndarray) -> np.ndarray:
        """Make slopes that are positive and differ between heads."""
        return (self.step * 2 ** (noise / 2)).astype(np.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Caps(TableScore):
    """A soft cap with a learned value for each query head: linear neither in the logit nor in the leaf."""

    caps: ClassVar[bool] = True

    def draw_table(self, noise: np.ndarray) -> np.ndarray:
        """Make caps that are positive and differ between heads."""
        return (self.step * 2 ** (noise / 4)).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class ThenCapped:
    """A score function, if there is one, followed by a soft cap: for kernels without a parameter for a soft cap."""

    score: Score | None
    soft_cap: float

    def __call__(self, *given: Any) -> Any:
        """Return the changed logit, in its dtype; `given` is what the score function takes."""
        *_, score, _b, _n, _i, _j = given
        function: Any = self.score
        found = score if function is None else function(*given)
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
    elif level == "score-cap":
        score = Cap(step=_round_down_to_power_of_two(2 * size) / _REACH)
    elif level == "score-buckets":
        score = Buckets(step=size)
    elif level == "score-slopes":
        score = Slopes(step=4 * size / longest)
    elif level == "score-caps":
        score = Caps(step=2 * size)
    else:
        raise ValueError(f"score must be one of {', '.join((*LEVELS, *CAPTURED))}, got {level!r}")
    return score.align_to(q_length, kv_length)


def _round_down_to_power_of_two(number: float) -> float:
    """Return the largest power of two that is at most `number`."""
    return 2.0 ** math.floor(math.log2(number))
