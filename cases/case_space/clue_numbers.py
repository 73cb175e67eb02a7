"""Numbers at which a kernel may do something else, and the sizes beside them that are worth a try."""

from __future__ import annotations

import dataclasses
import functools
import itertools

_TIMES = (1, 2, 3)
_BESIDE = (0, 1, -1)
_LEAST_BLOCK = 16
_LONGEST = 66_000
_LEVELS = (0.5, 0.99, 1, 1.01, 2)
_LEAST, _MOST = 1e-3, 1e5


@dataclasses.dataclass(frozen=True)
class Clues:
    """Numbers that a kernel shows, those first by which more is likely to be decided.

    Attributes:
      integers: blocks, lengths, counts; all above 2.
      floats: thresholds; all positive.
      in_source: those of both that stand in the source; the others stand in the program alone.
    """

    integers: tuple[int, ...] = ()
    floats: tuple[float, ...] = ()
    in_source: frozenset[float] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.integers or self.floats)

    @functools.cached_property
    def lengths(self) -> tuple[int, ...]:
        """Lengths beside each number and its multiples, shortest first."""
        near = {c * n + d for c in self.integers for n in _TIMES for d in _BESIDE}
        return tuple(sorted(x for x in near if 0 < x <= _LONGEST))

    @functools.cached_property
    def exact(self) -> tuple[int, ...]:
        """Each number and its multiples, and the first multiple of a block above each other number, shortest first."""
        pairs = itertools.product((c for c in self.integers if c >= _LEAST_BLOCK), self.integers)
        above = {(c // block + 1) * block for block, c in pairs if c > block}
        found = {c * n for c in self.integers for n in _TIMES} | above
        return tuple(sorted(x for x in found if x <= _LONGEST))

    @functools.cached_property
    def far(self) -> tuple[int, ...]:
        """Lengths beside a number of blocks, where one clue is the block and another how many, shortest first."""
        pairs = itertools.product((c for c in self.integers if c >= _LEAST_BLOCK), self.integers)
        beside = {block * count + more for block, count in pairs for more in (1, block)}
        return tuple(sorted(x for x in beside if 1000 <= x <= _LONGEST))

    def counts(self, most: int) -> tuple[int, ...]:
        """Numbers of heads, batch rows or channels beside a clue, at most `most`."""
        return tuple(sorted({c + d for c in self.integers for d in _BESIDE if 0 < c + d <= most}))

    @functools.cached_property
    def levels(self) -> tuple[float, ...]:
        """Numbers below, at and above each float, and each integer that is no length alone."""
        found = [*self.floats, *map(float, self.integers)]
        beside = (float(f"{x * by:.6g}") for x in found for by in _LEVELS if _LEAST < x < _MOST)
        return tuple(sorted(set(beside)))

    def near(self, size: int) -> str:
        """The clue that a length is beside, as text: `128`, `2*128+1`; empty if there is none."""
        for c, n, d in itertools.product(self.integers, _TIMES, _BESIDE):
            if size == c * n + d:
                return (f"{n}*" if n > 1 else "") + f"{c}" + (f"{d:+d}" if d else "")
        return ""

    def told(self) -> str:
        """The numbers with where they stand."""
        ours = [f"{x:g}" for x in (*self.integers, *self.floats) if x in self.in_source]
        theirs = [f"{x:g}" for x in (*self.integers, *self.floats) if x not in self.in_source]
        parts = [f"{', '.join(xs)} ({where})" for xs, where in ((ours, "source"), (theirs, "program")) if xs]
        return "; ".join(parts) or "none"


NO_CLUES = Clues()
