"""What a case combines, coarsely, and which combinations nobody has asked about yet.

A mark is one thing that a case has: a kind of mask, an operand, how long it is and by what its length divides. The grid
combines levels of its own in pairs. What it leaves out are pairs of marks, which exploring goes for first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

from cases import mask_spec
from cases.case import Case
from cases.case_space.clue_numbers import Clues
from cases.operand_registry import OPTIONAL

Pair = tuple[str, str]
_BLOCKS = (256, 128, 64, 8)
# A size beside a clue that no case had yet is worth so many pairs.
_NEW_CLUE = 10


def find_marks(case: Case) -> frozenset[str]:
    """The marks of a case."""
    q, kv = case.q_length, case.kv_length
    order = "T=S" if q == kv else ("T<S" if q < kv else "T>S")
    group = case.num_q_heads // case.num_kv_heads
    found = {
        case.phase,
        case.dtype,
        case.distribution,
        order,
        _format_length("T", q),
        _format_length("S", kv),
        f"B{min(case.batch, 4)}",
        f"K{_round_down_to_power_of_two(case.num_kv_heads)}",
        f"group{_round_down_to_power_of_two(group)}",
        _format_depth("H", case.head_dim),
        "V=H" if case.v_head_dim == case.head_dim else _format_depth("V", case.v_head_dim),
        *mask_spec.list_mask_features(case.mask),
        *(["offset"] if "-o" in case.mask else []),
    }
    for operand in OPTIONAL:
        value = getattr(case, operand.field)
        if value == operand.absent:
            if not operand.is_quiet:
                found.add(f"no {operand.name}")
        elif operand.number is not None:
            found.add(f"{operand.name} 1e{math.floor(math.log10(value))}")
        else:
            found.add(f"{operand.name} {value}")
    return frozenset(found)


def find_clue_marks(case: Case, clues: Clues) -> frozenset[str]:
    """The clues that sizes of the case are beside, each with the size and on which side of the clue."""
    sizes = {
        "T": case.q_length,
        "S": case.kv_length,
        "H": case.head_dim,
        "V": case.v_head_dim,
        "N": case.num_q_heads,
        "B": case.batch,
    }
    found = {f"{name} {near}" for name, size in sizes.items() if (near := clues.near(size))}
    far = {*clues.far, *clues.exact}
    found |= {f"{name} {size}" for name, size in sizes.items() if size in far}
    if case.soft_cap in clues.levels:
        found.add(f"soft_cap {case.soft_cap:g}")
    return frozenset(found)


def pair_marks(found: Iterable[str]) -> frozenset[Pair]:
    """Pairs of marks."""
    return frozenset(itertools.combinations(sorted(found), 2))


class Novelty:
    """Which pairs of marks were met in the grids, and which since."""

    def __init__(self, grid: Iterable[Case], clues: Clues) -> None:
        """Nothing is met yet but what the cases of `grid` have."""
        self._clues = clues
        self._gridded = frozenset().union(*(pair_marks(find_marks(case)) for case in grid))
        self._met = set(self._gridded)
        self._beside: set[Pair] = set()  # a clue with a mark
        self.used: set[str] = set()
        """Clues that sizes of cases were beside, as `clues_in` writes them."""

    def count_new(self, case: Case) -> int:
        """How much a case has that none had so far."""
        found, clues = find_marks(case), find_clue_marks(case, self._clues)
        new = len(pair_marks(found) - self._met) + len(_pair_with_clues(clues, found) - self._beside)
        return new + _NEW_CLUE * len(clues - self.used)

    def best(self, among: Sequence[Case]) -> Case:
        """The case that has most; the first of several."""
        return max(among, key=self.count_new)

    def add_case(self, case: Case) -> None:
        """Count a case."""
        found, clues = find_marks(case), find_clue_marks(case, self._clues)
        self._met |= pair_marks(found)
        self._beside |= _pair_with_clues(clues, found)
        self.used |= clues

    @property
    def beyond(self) -> int:
        """How many pairs were met since that the grids do not have."""
        return len(self._met - self._gridded)


def _pair_with_clues(clues: Iterable[str], found: Iterable[str]) -> frozenset[Pair]:
    """Each clue with each mark, and with each other."""
    return frozenset(itertools.product(clues, found)) | pair_marks(clues)


def _format_length(name: str, length: int) -> str:
    if length <= 16:
        return f"{name}<=16" if length > 1 else f"{name}1"
    divisor = next((block for block in _BLOCKS if length % block == 0), 1)
    return f"{name}{_round_down_to_power_of_two(length)}/{divisor}"


def _format_depth(name: str, depth: int) -> str:
    return f"{name}{_round_down_to_power_of_two(depth)}" + (
        "" if depth & (depth - 1) == 0 else ("odd" if depth % 2 else "even")
    )


def _round_down_to_power_of_two(number: int) -> int:
    """The power of two that is not above."""
    return 1 << (number.bit_length() - 1)
