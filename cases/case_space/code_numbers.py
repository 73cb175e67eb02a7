"""Define code numbers: numbers found in a kernel at which its behaviour may change, and the sizes near them to test.

The command `explore` finds code numbers in a kernel's source and compiled program. `case_strategies` draws sizes near
them.
"""

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
class CodeNumbers:
    """The numbers found in a kernel, the most promising first.

    Attributes:
      integers: possible block sizes, lengths and counts; all are above 2.
      floats: possible thresholds; all are positive.
      in_source: those of the numbers that occur in the source; the others occur only in the compiled program.
    """

    integers: tuple[int, ...] = ()
    floats: tuple[float, ...] = ()
    in_source: frozenset[float] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.integers or self.floats)

    @functools.cached_property
    def lengths(self) -> tuple[int, ...]:
        """The first multiples of each integer, and their neighbours one more and one less, shortest first."""
        near = {c * n + d for c in self.integers for n in _TIMES for d in _BESIDE}
        return tuple(sorted(x for x in near if 0 < x <= _LONGEST))

    @functools.cached_property
    def exact(self) -> tuple[int, ...]:
        """The first multiples of each integer, and the lengths that fill blocks above other integers, shortest first.

        Each integer of at least 16 counts as a block size. For each greater integer, the first multiple of the block
        size above it is included.
        """
        pairs = itertools.product((c for c in self.integers if c >= _LEAST_BLOCK), self.integers)
        above = {(c // block + 1) * block for block, c in pairs if c > block}
        found = {c * n for c in self.integers for n in _TIMES} | above
        return tuple(sorted(x for x in found if x <= _LONGEST))

    @functools.cached_property
    def far(self) -> tuple[int, ...]:
        """Lengths one token or block above `block * count`, shortest first, for integers `block` of 16 or more."""
        pairs = itertools.product((c for c in self.integers if c >= _LEAST_BLOCK), self.integers)
        beside = {block * count + more for block, count in pairs for more in (1, block)}
        return tuple(sorted(x for x in beside if 1000 <= x <= _LONGEST))

    def list_counts(self, most: int) -> tuple[int, ...]:
        """List the integers and their neighbours up to `most`, as numbers of heads, batch rows or channels."""
        return tuple(sorted({c + d for c in self.integers for d in _BESIDE if 0 < c + d <= most}))

    @functools.cached_property
    def levels(self) -> tuple[float, ...]:
        """Numbers below, at and above each code number, to be used for soft caps and scales."""
        found = [*self.floats, *map(float, self.integers)]
        beside = (float(f"{x * by:.6g}") for x in found for by in _LEVELS if _LEAST < x < _MOST)
        return tuple(sorted(set(beside)))

    def describe_size(self, size: int) -> str:
        """Describe a size by the code number that it is near: `128` or `2*128+1`; empty if it is near none."""
        for c, n, d in itertools.product(self.integers, _TIMES, _BESIDE):
            if size == c * n + d:
                return (f"{n}*" if n > 1 else "") + f"{c}" + (f"{d:+d}" if d else "")
        return ""

    def format_numbers(self) -> str:
        """Format the numbers as text, with where each was found: in the source or in the compiled program."""
        ours = [f"{x:g}" for x in (*self.integers, *self.floats) if x in self.in_source]
        theirs = [f"{x:g}" for x in (*self.integers, *self.floats) if x not in self.in_source]
        parts = [f"{', '.join(xs)} ({where})" for xs, where in ((ours, "source"), (theirs, "program")) if xs]
        return "; ".join(parts) or "none"


NO_CODE_NUMBERS = CodeNumbers()
