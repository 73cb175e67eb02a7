"""Measure the novelty of a case: how many pairs of its marks no earlier case had.

A mark is a coarse property of a case: a kind of mask, an operand, or a range of lengths and the block size that divides
the length. The command `explore` judges the drawn cases with the most new pairs first, since the fixed grid has covered
many pairs already.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Sequence

from cases import mask_spec
from cases.case import Case
from cases.case_space.code_numbers import CodeNumbers
from cases.moba_mask import depends_on_data
from cases.operand_registry import OPTIONAL

Pair = tuple[str, str]
_BLOCKS = (256, 128, 64, 8)
# How many new pairs of marks a size near a new code number counts as.
_NEW_NUMBER = 10


def find_marks(case: Case) -> frozenset[str]:
    """Return the marks of a case."""
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
        *(["rows without keys"] if _hides_whole_rows(case) else []),
    }
    for operand in OPTIONAL:
        value = getattr(case, operand.field)
        if value == operand.absent:
            if not operand.is_absence_ignored:
                found.add(f"no {operand.name}")
        elif operand.number is not None:
            found.add(f"{operand.name} 1e{math.floor(math.log10(value))}")
        else:
            found.add(f"{operand.name} {value}")
    return frozenset(found)


@functools.lru_cache(maxsize=1 << 14)
def _hides_whole_rows(case: Case) -> bool:
    """Return whether the mask of a case with dense operands hides all keys from some query."""
    if case.storage is not None:
        return False
    mask = mask_spec.build_mask(case.mask, case.batch, case.num_q_heads, case.q_length, case.kv_length, case.seed)
    if depends_on_data(mask):
        return False
    return not mask.dense(case.q_length, case.kv_length).any(axis=-1).all()


def find_number_marks(case: Case, code_numbers: CodeNumbers) -> frozenset[str]:
    """Return the code numbers that sizes of the case are near, each as text with the name of the size: `T 2*128+1`."""
    sizes = {
        "T": case.q_length,
        "S": case.kv_length,
        "H": case.head_dim,
        "V": case.v_head_dim,
        "N": case.num_q_heads,
        "B": case.batch,
    }
    found = {f"{name} {near}" for name, size in sizes.items() if (near := code_numbers.describe_size(size))}
    far = {*code_numbers.far, *code_numbers.exact}
    found |= {f"{name} {size}" for name, size in sizes.items() if size in far}
    if case.soft_cap in code_numbers.levels:
        found.add(f"soft_cap {case.soft_cap:g}")
    return frozenset(found)


def pair_marks(found: Iterable[str]) -> frozenset[Pair]:
    """Return all pairs of marks."""
    return frozenset(itertools.combinations(sorted(found), 2))


class Novelty:
    """The pairs of marks that occurred in the grid's cases and in the cases judged since."""

    def __init__(self, grid: Iterable[Case], code_numbers: CodeNumbers) -> None:
        """Start with the pairs of marks of all cases of `grid`; `code_numbers` are the numbers found in the kernel."""
        self._code_numbers = code_numbers
        self._gridded = frozenset().union(*(pair_marks(find_marks(case)) for case in grid))
        self._met = set(self._gridded)
        self._beside: set[Pair] = set()  # pairs of a code number with a mark or another code number
        self.used: set[str] = set()
        """The code numbers that sizes of judged cases were near, as `find_number_marks` writes them."""

    def count_new(self, case: Case) -> int:
        """Count the pairs of marks that no earlier case had; each new code number counts as several pairs."""
        found, code_numbers = find_marks(case), find_number_marks(case, self._code_numbers)
        new = len(pair_marks(found) - self._met) + len(_pair_with_numbers(code_numbers, found) - self._beside)
        return new + _NEW_NUMBER * len(code_numbers - self.used)

    def find_best(self, among: Sequence[Case]) -> Case:
        """Return the case with the highest count of `count_new`; of equal ones, the first."""
        return max(among, key=self.count_new)

    def add_case(self, case: Case) -> None:
        """Record the marks and code numbers of a case that was judged."""
        found, code_numbers = find_marks(case), find_number_marks(case, self._code_numbers)
        self._met |= pair_marks(found)
        self._beside |= _pair_with_numbers(code_numbers, found)
        self.used |= code_numbers

    @property
    def beyond(self) -> int:
        """The number of pairs of marks that judged cases had and no case of the grid has."""
        return len(self._met - self._gridded)


def _pair_with_numbers(code_numbers: Iterable[str], found: Iterable[str]) -> frozenset[Pair]:
    """Return the pairs of each code number with each mark, and of each code number with each other code number."""
    return frozenset(itertools.product(code_numbers, found)) | pair_marks(code_numbers)


def _format_length(name: str, length: int) -> str:
    """Format a length as a mark: the power of two at or below it, and the largest usual block that divides it."""
    if length <= 16:
        return f"{name}<=16" if length > 1 else f"{name}1"
    divisor = next((block for block in _BLOCKS if length % block == 0), 1)
    return f"{name}{_round_down_to_power_of_two(length)}/{divisor}"


def _format_depth(name: str, depth: int) -> str:
    """Format a depth as a mark: the power of two at or below it, and whether a larger depth is odd or even."""
    return f"{name}{_round_down_to_power_of_two(depth)}" + (
        "" if depth & (depth - 1) == 0 else ("odd" if depth % 2 else "even")
    )


def _round_down_to_power_of_two(number: int) -> int:
    """Return the largest power of two that is at most `number`."""
    return 1 << (number.bit_length() - 1)
