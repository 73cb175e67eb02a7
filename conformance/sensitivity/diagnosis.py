"""Diagnosis: which planted bugs a kernel is wrong most like.

Both are known by how wrong they are on the same cases (`conformance.sensitivity.failure_signatures`). They are compared by
Tversky's index of two sets (Tversky, 1977, "Features of similarity"), whose elements are the results that are wrong:
what both have, for what both or one of them has. What a bug shows and the kernel does not counts in full, for it speaks
against the bug. What the kernel shows beyond the bug counts less, for a kernel may have several faults. An element that
both have counts by how close the sizes are: the same wrong numbers have the same ratio.

A backward pass does most things once more than the forward pass does, and each gradient may do them by itself. So what
is wrong in gradients alone is compared a second time, with what bugs show in these gradients: the same mistake there.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from cases.storage_forms.form_registry import FORMS
from conformance.sensitivity.failure_signatures import CHECK_SEPARATOR, Element, KnownBug, Signature

MAX_NAMED = 3
"""So many bugs are named of a fault, and so many faults are told apart, at most."""
MIN_SIMILARITY = 0.3
"""What is less like than this is called like none; `confusions` measures what that lets through."""
MIN_SIMILARITY_EVERYWHERE, MORE_FOR_FEW_CASES = 0.4, 0.4
"""A kernel that is wrong in every case that was asked is in the same places as half the bank. So it must be more like
than the first, and more by the second over the root of how many cases that were."""
SAME_SIMILARITY = 0.97
"""What is as like as this is wrong by the same numbers, but for rounding."""
# Families that say how operands lie, and not what is wrong: a kernel that takes them so is compared with no others.
_STORAGE_FAMILIES = frozenset({*FORMS, "quantised caches"})
# Families of what is around a kernel: how devices share a sequence, which kernel a call is given to, and what tries to
# be called right. By their numbers they are like whatever they get wrong, and that is what there is to name.
_SURROUNDING_FAMILIES = frozenset({"context parallelism", "dispatch", "gaming"})
# What the kernel shows beyond the bug, against 1 for what the bug shows beyond the kernel.
_EXTRA_WEIGHT = 0.4
# By so much less counts what a bug shows in the gradients that are wrong, if it shows in other results as well.
_SHARED_RESULT_WEIGHT = 0.75
# Two results that are wrong at the same place are alike by so much whatever their sizes, by some more if these are of
# the same order, and by the rest if they agree: a third is left where the logarithms to base 10 differ by so much.
_SAME_PLACE_SHARE = 0.35
_ORDER_SHARE, _ORDER_DECAY = 0.1, 0.5
_SIZE_DECAY = 0.1


@dataclasses.dataclass(frozen=True)
class Similarity:
    """A planted bug, and how like it a kernel is wrong: 1 is by the same numbers everywhere.

    `shared` are the wrong results that both have; `rest` is how many more the kernel has.
    """

    bug: KnownBug
    similarity: float
    shared: tuple[Element, ...]
    rest: int


def diagnose(found: Signature, bank: Sequence[KnownBug]) -> list[list[Similarity]]:
    """For each fault that can be told apart the bugs that it is most like; at most `MOST` faults.

    The first are those of the kernel as a whole. What the first of them shows is then left out, case by case, and the
    rest is compared anew: a kernel with two faults is like two bugs.
    """
    faults: list[list[Similarity]] = []
    while len(faults) < MAX_NAMED and (near := find_nearest(found, bank)):
        faults.append(near)
        shown = {case for case, _ in near[0].bug.signature.wrong}
        found = Signature({case: sizes for case, sizes in found.sizes.items() if case not in shown})
    return faults


@dataclasses.dataclass(frozen=True, kw_only=True)
class Confusion:
    """How the bugs of a family are diagnosed, each by all others of the bank.

    It is right to name a bug of the family or of the kind, or one that is wrong by the same numbers: families overlap,
    since the derivative of a soft cap is of the backward pass too.

    Attributes:
      family: of the bugs.
      bugs: how many of them are wrong on any of the cases.
      first: of how many it is right what is named first.
      named: of how many it is right what is named first, second or third.
      none: how many are called like none.
      alone: how many have no other of their family, or of their kind where that counts: nothing right can be named.
      others: the other families that were named first where that was not right, the most frequent ahead.
    """

    family: str
    bugs: int
    first: int
    named: int
    none: int
    alone: int
    others: tuple[str, ...]


def measure_confusions(bank: Sequence[KnownBug]) -> list[Confusion]:
    """What is named for each bug that is wrong on any of the cases if the bug itself were not known, by family.

    Bugs around a kernel are neither asked nor named.
    """
    visible = [bug for bug in bank if bug.signature.wrong and bug.family not in _SURROUNDING_FAMILIES]
    named: dict[str, list[tuple[KnownBug, list[Similarity]]]] = {}
    for bug in visible:
        near = find_nearest(bug.signature, [other for other in visible if other is not bug])
        named.setdefault(bug.family, []).append((bug, near))
    return [_measure_confusion(family, found, visible) for family, found in sorted(named.items())]


def _measure_confusion(
    family: str, named: Sequence[tuple[KnownBug, Sequence[Similarity]]], visible: Sequence[KnownBug]
) -> Confusion:
    right = [[_is_right(bug, each) for each in near] for bug, near in named]
    wrong = (near[0].bug.family for (_, near), known in zip(named, right, strict=True) if near and not known[0])
    return Confusion(
        family=family,
        bugs=len(named),
        first=sum(any(known[:1]) for known in right),
        named=sum(map(any, right)),
        none=sum(not near for _, near in named),
        alone=sum(not any(_is_same_class(bug, other) for other in visible if other is not bug) for bug, _ in named),
        others=tuple(other for other, _ in Counter(wrong).most_common()),
    )


def _is_right(bug: KnownBug, named: Similarity) -> bool:
    return _is_same_class(bug, named.bug) or named.similarity >= SAME_SIMILARITY


def _is_same_class(bug: KnownBug, other: KnownBug) -> bool:
    if bug.family in _STORAGE_FAMILIES:
        return _get_kind_prefix(bug) == _get_kind_prefix(other)
    return bug.kind == other.kind or bug.family == other.family


def _get_kind_prefix(bug: KnownBug) -> str:
    """Its kind, or of a kind that is written in two parts the first: `kvscale.twice` is about scales."""
    return bug.kind.partition(".")[0]


def find_nearest(found: Signature, bank: Iterable[KnownBug]) -> list[Similarity]:
    """The bugs, each of another kind, that a kernel is wrong most like; none where it is like none of the bank."""
    named: dict[str, Similarity] = {}
    least = _compute_min_similarity(found)
    for each in rank_bugs(found, bank):
        if each.similarity < least or len(named) == MAX_NAMED:
            break
        named.setdefault(each.bug.kind, each)
    return list(named.values())


def _compute_min_similarity(found: Signature) -> float:
    """How like a bug must be to be named."""
    everywhere = all(any(size is not None for size in sizes.values()) for sizes in found.sizes.values())
    return (
        MIN_SIMILARITY_EVERYWHERE + MORE_FOR_FEW_CASES / math.sqrt(len(found.sizes))
        if everywhere and found.sizes
        else MIN_SIMILARITY
    )


def rank_bugs(found: Signature, bank: Iterable[KnownBug]) -> list[Similarity]:
    """The bugs of kernels that share anything with a kernel's signature, the most alike first."""
    compared = (compare_signatures(found, bug) for bug in bank if bug.family not in _SURROUNDING_FAMILIES)
    return sorted((each for each in compared if each.shared), key=lambda each: (-each.similarity, each.bug.name))


def compare_signatures(found: Signature, bug: KnownBug) -> Similarity:
    """How like a planted bug a kernel is wrong, by what both were asked and judged by."""
    mine, other = _select_comparable(found, bug.signature), _select_comparable(bug.signature, found)
    alike = _compute_tversky_index(mine, other)
    wrong = {_get_result_name(element) for element in mine}
    if all(name.startswith("d") for name in wrong):
        there = {element: size for element, size in other.items() if _get_result_name(element) in wrong}
        alike = max(alike, _SHARED_RESULT_WEIGHT * _compute_tversky_index(mine, there))
    both = sorted(mine.keys() & other.keys())
    return Similarity(bug, alike, tuple(both), len(found.wrong) - len(both))


def _compute_tversky_index(mine: Mapping[Element, float], other: Mapping[Element, float]) -> float:
    """Tversky's index of what is wrong with a kernel and with a bug."""
    weights = _compute_weights(mine.keys() | other.keys())
    both = {element: _compute_closeness(mine[element], other[element]) for element in mine.keys() & other.keys()}
    common = sum(weights[element] * close for element, close in both.items())
    apart = sum(weights[element] * (1 - close) for element, close in both.items())
    alone = sum(weights[element] for element in other.keys() - mine.keys())
    # Where the forward pass is wrong the gradients follow: a bug in these gradients alone explains neither.
    unexplained = {case for case, name in mine.keys() - other.keys() if name == "out"} & {case for case, _ in other}
    further = mine.keys() - other.keys()
    beyond = sum(weights[one] * (1 if one[0] in unexplained else _EXTRA_WEIGHT) for one in further)
    whole = common + apart + alone + beyond
    return common / whole if whole else 0.0


def _get_result_name(element: Element) -> str:
    """The result, whichever check found it wrong."""
    return element[1].partition(CHECK_SEPARATOR)[0]


def _select_comparable(one: Signature, other: Signature) -> dict[Element, float]:
    """What is wrong with `one`, of the cases that `other` was asked and the results that it gave too."""
    return {
        (case, name): size
        for (case, name), size in one.wrong.items()
        if case in other.sizes and _get_result_name((case, name)) in {"all", *other.sizes[case]}
    }


def _compute_weights(elements: Iterable[Element]) -> Mapping[Element, float]:
    """The weight of each element: many wrong results of one case count more than few, but not as many times."""
    count = Counter(case for case, _ in elements)
    return {(case, name): 1 / math.sqrt(count[case]) for case, name in elements}


def _compute_closeness(one: float, other: float) -> float:
    apart = abs(one - other)
    equal = 1 - _SAME_PLACE_SHARE - _ORDER_SHARE
    return _SAME_PLACE_SHARE + _ORDER_SHARE * math.exp(-apart / _ORDER_DECAY) + equal * math.exp(-apart / _SIZE_DECAY)
