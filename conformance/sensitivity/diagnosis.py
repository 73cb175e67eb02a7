"""Name the planted bugs whose failures are most similar to those of a kernel.

Both are described by how wrong they are on the same cases (`conformance.sensitivity.failure_signatures`). They are
compared by Tversky's index of two sets (Tversky, 1977, "Features of similarity"): the weight of what both have, divided
by the weight of what either has. The elements are the wrong results.

- What a bug shows and the kernel does not counts in full: it speaks against the bug.
- What the kernel shows beyond the bug counts less, since a kernel may have several faults.
- What both show counts by how close the sizes are: the same wrong numbers have the same ratio.

A backward pass repeats most of the forward pass, and each gradient may do so by itself. So if only gradients are wrong,
they are compared a second time, with what each bug shows in the same gradients: that may be the same mistake in another
place.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from cases.storage_forms.form_registry import FORMS
from conformance.sensitivity.failure_signatures import CHECK_SEPARATOR, Element, KnownBug, Signature

MAX_NAMED = 3
"""The largest number of bugs that are named for a fault, and of faults that are told apart."""
MIN_SIMILARITY = 0.3
"""The least similarity at which a bug is named; `measure_confusions` measures how often that is wrong."""
MIN_SIMILARITY_EVERYWHERE, MORE_FOR_FEW_CASES = 0.4, 0.4
"""Two numbers for a kernel that is wrong in every judged case, whose least similarity must be higher.

Such a kernel is wrong in the same places as half of the bank. The least similarity is the first number, plus the second
divided by the root of the number of cases.
"""
SAME_SIMILARITY = 0.97
"""A bug of this similarity is wrong by the same numbers, except for rounding."""
# Families that name a storage form and not a mistake: a kernel with such storage is compared with these bugs only.
_STORAGE_FAMILIES = frozenset({*FORMS, "quantised caches"})
# Families of code around a kernel: how devices share a sequence, which kernel a call is dispatched to, and attempts to
# cheat the judge. Their numbers are similar to those of the mistake that they cause, and that is the one to name.
_SURROUNDING_FAMILIES = frozenset({"context parallelism", "dispatch", "gaming"})
# The weight of what the kernel shows beyond the bug. What the bug shows beyond the kernel has weight 1.
_EXTRA_WEIGHT = 0.4
# The factor of the second comparison, with what a bug shows in the wrong gradients alone.
_SHARED_RESULT_WEIGHT = 0.75
# The closeness of two wrong results at one place has a constant share, a share that falls slowly with the difference of
# their sizes, and the rest, which falls fast. The decays are differences of logarithms that leave 1/e of a share.
_SAME_PLACE_SHARE = 0.35
_ORDER_SHARE, _ORDER_DECAY = 0.1, 0.5
_SIZE_DECAY = 0.1


@dataclasses.dataclass(frozen=True)
class Similarity:
    """A planted bug, and how similar a kernel's failures are to it: 1 means the same numbers everywhere.

    Attributes:
      bug: the planted bug.
      similarity: Tversky's index.
      shared: the wrong results that both have.
      rest: number of further wrong results of the kernel.
    """

    bug: KnownBug
    similarity: float
    shared: tuple[Element, ...]
    rest: int


def diagnose(signature: Signature, bank: Sequence[KnownBug]) -> list[list[Similarity]]:
    """Find, for each fault that can be told apart, the bugs that it is most similar to.

    At most `MAX_NAMED` faults are found. The first is that of the kernel as a whole. Then the cases that its most
    similar bug fails are left out, and the rest is compared again: a kernel with two faults is similar to two bugs.
    """
    faults: list[list[Similarity]] = []
    while len(faults) < MAX_NAMED and (nearest := find_nearest(signature, bank)):
        faults.append(nearest)
        shown = {case for case, _ in nearest[0].bug.signature.wrong}
        signature = Signature({case: sizes for case, sizes in signature.sizes.items() if case not in shown})
    return faults


@dataclasses.dataclass(frozen=True, kw_only=True)
class Confusion:
    """How the bugs of one family are diagnosed, each by all other bugs of the bank.

    It is right to name a bug of the same family or kind, or one that is wrong by the same numbers. Families overlap:
    the derivative of a soft cap belongs to the backward pass too.

    Attributes:
      family: the family.
      bugs: number of its bugs that are wrong on any of the cases.
      first: number of bugs for which the first name is right.
      named: number of bugs for which the first, second or third name is right.
      none: number of bugs for which none is named.
      alone: number of bugs without another one of their family, or of their kind where that counts: no right name
        exists.
      others: the other families that were wrongly named first, the most frequent first.
    """

    family: str
    bugs: int
    first: int
    named: int
    none: int
    alone: int
    others: tuple[str, ...]


def measure_confusions(bank: Sequence[KnownBug]) -> list[Confusion]:
    """Measure by family which bugs are named for each bug, if that bug itself were not in the bank.

    Bugs around a kernel are neither diagnosed nor named.
    """
    visible = [bug for bug in bank if bug.signature.wrong and bug.family not in _SURROUNDING_FAMILIES]
    named: dict[str, list[tuple[KnownBug, list[Similarity]]]] = {}
    for bug in visible:
        nearest = find_nearest(bug.signature, [other for other in visible if other is not bug])
        named.setdefault(bug.family, []).append((bug, nearest))
    return [_measure_confusion(family, diagnosed, visible) for family, diagnosed in sorted(named.items())]


def _measure_confusion(
    family: str, named: Sequence[tuple[KnownBug, Sequence[Similarity]]], visible: Sequence[KnownBug]
) -> Confusion:
    """Count right and wrong names for the bugs of one family."""
    rightness = [[_is_right(bug, each) for each in nearest] for bug, nearest in named]
    wrong = (
        nearest[0].bug.family
        for (_, nearest), is_right in zip(named, rightness, strict=True)
        if nearest and not is_right[0]
    )
    return Confusion(
        family=family,
        bugs=len(named),
        first=sum(any(is_right[:1]) for is_right in rightness),
        named=sum(map(any, rightness)),
        none=sum(not nearest for _, nearest in named),
        alone=sum(not any(_is_same_class(bug, other) for other in visible if other is not bug) for bug, _ in named),
        others=tuple(other for other, _ in Counter(wrong).most_common()),
    )


def _is_right(bug: KnownBug, named: Similarity) -> bool:
    """Tell whether it is right to name a bug for another one."""
    return _is_same_class(bug, named.bug) or named.similarity >= SAME_SIMILARITY


def _is_same_class(bug: KnownBug, other: KnownBug) -> bool:
    """Tell whether two bugs share their family or kind; where the family is a storage form, their kind."""
    if bug.family in _STORAGE_FAMILIES:
        return _get_kind_prefix(bug) == _get_kind_prefix(other)
    return bug.kind == other.kind or bug.family == other.family


def _get_kind_prefix(bug: KnownBug) -> str:
    """Return the kind, or the first part of a kind with two: `kvscale` of `kvscale.twice`."""
    return bug.kind.partition(".")[0]


def find_nearest(signature: Signature, bank: Iterable[KnownBug]) -> list[Similarity]:
    """Find the bugs, each of another kind, most similar to a kernel; empty if none is similar enough."""
    named: dict[str, Similarity] = {}
    minimum = _compute_min_similarity(signature)
    for each in rank_bugs(signature, bank):
        if each.similarity < minimum or len(named) == MAX_NAMED:
            break
        named.setdefault(each.bug.kind, each)
    return list(named.values())


def _compute_min_similarity(signature: Signature) -> float:
    """Compute the least similarity at which a bug is named."""
    everywhere = all(any(size is not None for size in sizes.values()) for sizes in signature.sizes.values())
    return (
        MIN_SIMILARITY_EVERYWHERE + MORE_FOR_FEW_CASES / math.sqrt(len(signature.sizes))
        if everywhere and signature.sizes
        else MIN_SIMILARITY
    )


def rank_bugs(signature: Signature, bank: Iterable[KnownBug]) -> list[Similarity]:
    """Rank the bugs that share any wrong result with a kernel, the most similar first."""
    compared = (compare_signatures(signature, bug) for bug in bank if bug.family not in _SURROUNDING_FAMILIES)
    return sorted((each for each in compared if each.shared), key=lambda each: (-each.similarity, each.bug.name))


def compare_signatures(signature: Signature, bug: KnownBug) -> Similarity:
    """Compare a kernel with a planted bug, on the cases and results that both have."""
    of_kernel, of_bug = _select_comparable(signature, bug.signature), _select_comparable(bug.signature, signature)
    index = _compute_tversky_index(of_kernel, of_bug)
    wrong = {_get_result_name(element) for element in of_kernel}
    if all(name.startswith("d") for name in wrong):
        in_same_gradients = {element: size for element, size in of_bug.items() if _get_result_name(element) in wrong}
        index = max(index, _SHARED_RESULT_WEIGHT * _compute_tversky_index(of_kernel, in_same_gradients))
    both = sorted(of_kernel.keys() & of_bug.keys())
    return Similarity(bug, index, tuple(both), len(signature.wrong) - len(both))


def _compute_tversky_index(kernel: Mapping[Element, float], bug: Mapping[Element, float]) -> float:
    """Compute Tversky's index of what is wrong with a kernel and with a bug."""
    weights = _compute_weights(kernel.keys() | bug.keys())
    both = {element: _compute_closeness(kernel[element], bug[element]) for element in kernel.keys() & bug.keys()}
    common = sum(weights[element] * close for element, close in both.items())
    differing = sum(weights[element] * (1 - close) for element, close in both.items())
    bug_only = sum(weights[element] for element in bug.keys() - kernel.keys())
    # Where the forward pass is wrong the gradients follow: a bug in these gradients alone explains neither.
    unexplained = {case for case, name in kernel.keys() - bug.keys() if name == "out"} & {case for case, _ in bug}
    kernel_elements = kernel.keys() - bug.keys()
    kernel_only = sum(weights[one] * (1 if one[0] in unexplained else _EXTRA_WEIGHT) for one in kernel_elements)
    total = common + differing + bug_only + kernel_only
    return common / total if total else 0.0


def _get_result_name(element: Element) -> str:
    """Return the name of the result, without the check that found it wrong."""
    return element[1].partition(CHECK_SEPARATOR)[0]


def _select_comparable(one: Signature, other: Signature) -> dict[Element, float]:
    """Return what is wrong with `one`, on the cases and results that `other` has too."""
    return {
        (case, name): size
        for (case, name), size in one.wrong.items()
        if case in other.sizes and _get_result_name((case, name)) in {"all", *other.sizes[case]}
    }


def _compute_weights(elements: Iterable[Element]) -> Mapping[Element, float]:
    """Compute the weight of each element.

    Many wrong results of one case count more than few, but less than in proportion.
    """
    count = Counter(case for case, _ in elements)
    return {(case, name): 1 / math.sqrt(count[case]) for case, name in elements}


def _compute_closeness(one: float, other: float) -> float:
    """Compute from 0 to 1 how close two sizes of the same wrong result are."""
    difference = abs(one - other)
    fast_share = 1 - _SAME_PLACE_SHARE - _ORDER_SHARE
    return (
        _SAME_PLACE_SHARE
        + _ORDER_SHARE * math.exp(-difference / _ORDER_DECAY)
        + fast_share * math.exp(-difference / _SIZE_DECAY)
    )
