"""Find the planted bugs whose failures are most similar to those of a kernel, to suggest what is wrong with the kernel.

The input is the kernel's error profile and the error profiles of all planted bugs: the sizes of their errors on the
same cases (`conformance.sensitivity.error_profiles`). A run with failures reports the bugs that `diagnose` returns.

Error profiles are compared by Tversky's index of two sets (Tversky, 1977, "Features of similarity"). The elements of a
set are the wrong results. The index is the weight of the common elements, divided by the weight of all elements.

- An element that only the bug has counts in full: it is evidence against the bug.
- An element that only the kernel has counts less, since a kernel may have several faults.
- An element that both have counts by how close the two sizes are: the same mistake gives the same ratio.

A backward pass recomputes most of the forward pass, and may do so separately for each gradient. So a bug of the forward
pass may also occur in the code of one gradient. If only gradients are wrong, they are therefore compared a second time.
The second comparison uses only those elements of a bug that are in the same gradients.

A mistake may also be made in fewer cases than that of a bug: a window's right side is ignored unless it is zero. Then
every wrong result of the kernel has the bug's size, and the bug is wrong in further cases. So many equal sizes are no
coincidence, and such a bug has `_SAME_WHERE_WRONG` as its least similarity.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from conformance.sensitivity.error_profiles import CHECK_SEPARATOR, INFINITE_SIZE, Element, ErrorProfile, KnownBug

MAX_NAMED = 3
"""The largest number of bugs that are named for one fault, and the largest number of faults of a kernel."""
MIN_SIMILARITY = 0.3
"""Bugs with a lower similarity are not named. `tests.bank.confusions` measures how often a named bug is wrong."""
MIN_SIMILARITY_EVERYWHERE, MORE_FOR_FEW_CASES = 0.4, 0.4
"""Minimum similarity for a kernel that is wrong in every judged case: the first + the second / sqrt(number of cases).

It is higher than `MIN_SIMILARITY`, because half of the planted bugs are wrong in the same places as such a kernel.
"""
SAME_SIMILARITY = 0.97
"""From this similarity on, a bug and a kernel compute the same wrong numbers, except for rounding."""
# These families are about code around a kernel: how devices share a sequence, which kernel a call is dispatched to, and
# attempts to cheat the judge. Such a bug causes the same errors as a mistake in a kernel. The mistake is named instead.
SURROUNDING_FAMILIES = frozenset({"context parallelism", "dispatch", "gaming"})
# Weight of elements that only the kernel has. Elements that only the bug has weigh 1.
_EXTRA_WEIGHT = 0.4
# Factor on the index of the second comparison, which uses only the bug's elements in the wrong gradients.
_SHARED_RESULT_WEIGHT = 0.75
# The least similarity of a bug with the kernel's own sizes wherever the kernel is wrong, and the fewest such results.
_SAME_WHERE_WRONG, _FEWEST_SAME = 0.5, 3
# The closeness of two sizes of the same wrong result is a sum of three shares: a constant share, a share that falls
# slowly with the difference of the sizes, and a share that falls fast. Sizes are base-10 logarithms. A decay is the
# difference at which 1/e of the share is left.
_SAME_PLACE_SHARE = 0.35
_ORDER_SHARE, _ORDER_DECAY = 0.1, 0.5
_SIZE_DECAY = 0.1


@dataclasses.dataclass(frozen=True)
class Similarity:
    """A planted bug, and how similar its failures are to those of a kernel."""

    bug: KnownBug
    similarity: float  # Tversky's index, from 0 to 1; at 1 all errors of the bug and the kernel have the same sizes
    shared: tuple[Element, ...]  # the results that are wrong in both the bug and the kernel
    rest: int  # number of the kernel's wrong results that are right in the bug
    is_wrong_alike: bool  # whether both are wrong in the same results of the same cases, of those that both judged


def diagnose(profile: ErrorProfile, bank: Sequence[KnownBug]) -> list[list[Similarity]]:
    """Return one list of most similar bugs for each fault of a kernel; at most `MAX_NAMED` faults.

    The first list is for all failures of the kernel. Then the cases that its most similar bug fails are removed, and
    the remaining failures are compared again. So a kernel with two faults gets two lists.
    """
    faults: list[list[Similarity]] = []
    while len(faults) < MAX_NAMED and (nearest := find_nearest(profile, bank)):
        faults.append(nearest)
        shown = {case for case, _ in nearest[0].bug.profile.wrong}
        profile = ErrorProfile({case: sizes for case, sizes in profile.sizes.items() if case not in shown})
    return faults


def find_nearest(
    profile: ErrorProfile, bank: Iterable[KnownBug], is_possible: Callable[[KnownBug], bool] = lambda bug: True
) -> list[Similarity]:
    """Find the possible bugs most similar to a kernel, at most one of each kind; empty if none is similar enough."""
    named: dict[str, Similarity] = {}
    minimum = _compute_min_similarity(profile)
    for each in rank_bugs(profile, bank):
        if each.similarity < minimum or len(named) == MAX_NAMED:
            break
        if each.bug.kind not in named and is_possible(each.bug):
            named[each.bug.kind] = each
    return list(named.values())


def _compute_min_similarity(profile: ErrorProfile) -> float:
    """Compute the similarity that a bug must have to be named for a kernel with this error profile."""
    everywhere = all(any(size is not None for size in sizes.values()) for sizes in profile.sizes.values())
    return (
        MIN_SIMILARITY_EVERYWHERE + MORE_FOR_FEW_CASES / math.sqrt(len(profile.sizes))
        if everywhere and profile.sizes
        else MIN_SIMILARITY
    )


def rank_bugs(profile: ErrorProfile, bank: Iterable[KnownBug]) -> list[Similarity]:
    """Sort the planted bugs that have a wrong result in common with a kernel, the most similar first."""
    compared = (compare_profiles(profile, bug) for bug in bank if bug.family not in SURROUNDING_FAMILIES)
    return sorted((each for each in compared if each.shared), key=lambda each: (-each.similarity, each.bug.name))


def compare_profiles(profile: ErrorProfile, bug: KnownBug) -> Similarity:
    """Compare the errors of a kernel (its error profile) with those of a planted bug, where both were judged."""
    of_kernel, of_bug = _select_comparable(profile, bug.profile), _select_comparable(bug.profile, profile)
    index = _compute_tversky_index(of_kernel, of_bug)
    wrong = {get_result_name(element) for element in of_kernel}
    if all(name.startswith("d") for name in wrong):
        in_same_gradients = {element: size for element, size in of_bug.items() if get_result_name(element) in wrong}
        index = max(index, _SHARED_RESULT_WEIGHT * _compute_tversky_index(of_kernel, in_same_gradients))
    if len(of_kernel) == len(profile.wrong) and _has_same_sizes(of_kernel, of_bug):
        index = max(index, _SAME_WHERE_WRONG)
    both = sorted(of_kernel.keys() & of_bug.keys())
    is_wrong_alike = len(both) == len(profile.wrong) == len(of_bug)
    return Similarity(bug, index, tuple(both), len(profile.wrong) - len(both), is_wrong_alike)


def _compute_tversky_index(kernel: Mapping[Element, float], bug: Mapping[Element, float]) -> float:
    """Compute Tversky's index of two sets of wrong results, given as the size of each wrong result."""
    weights = _compute_weights(kernel.keys() | bug.keys())
    both = {element: _compute_closeness(kernel[element], bug[element]) for element in kernel.keys() & bug.keys()}
    common = sum(weights[element] * close for element, close in both.items())
    differing = sum(weights[element] * (1 - close) for element, close in both.items())
    bug_only = sum(weights[element] for element in bug.keys() - kernel.keys())
    # If `out` is wrong in a case, the gradients are wrong as a consequence. A bug that is wrong only in these gradients
    # does not explain the case. So all elements that only the kernel has in this case count in full.
    unexplained = {case for case, name in kernel.keys() - bug.keys() if name == "out"} & {case for case, _ in bug}
    kernel_elements = kernel.keys() - bug.keys()
    kernel_only = sum(weights[one] * (1 if one[0] in unexplained else _EXTRA_WEIGHT) for one in kernel_elements)
    total = common + differing + bug_only + kernel_only
    return common / total if total else 0.0


def _has_same_sizes(kernel: Mapping[Element, float], bug: Mapping[Element, float]) -> bool:
    """Return whether a bug has the sizes of all wrong results of a kernel, and enough of these sizes are finite."""
    if not kernel.keys() <= bug.keys() or sum(size < INFINITE_SIZE for size in kernel.values()) < _FEWEST_SAME:
        return False
    return sum(_compute_closeness(kernel[one], bug[one]) for one in kernel) >= SAME_SIMILARITY * len(kernel)


def get_result_name(element: Element) -> str:
    """Return the name of an element's result, without the suffix that names a check: `dq` for `dq@poison`."""
    return element[1].partition(CHECK_SEPARATOR)[0]


def _select_comparable(one: ErrorProfile, other: ErrorProfile) -> dict[Element, float]:
    """Return the wrong results of `one` with their sizes, for the cases and results that `other` also contains."""
    return {
        (case, name): size
        for (case, name), size in one.wrong.items()
        if case in other.sizes and get_result_name((case, name)) in {"all", *other.sizes[case]}
    }


def _compute_weights(elements: Iterable[Element]) -> Mapping[Element, float]:
    """Compute each element's weight, 1 / sqrt(n) if its case has n elements, so that the case weighs sqrt(n)."""
    count = Counter(case for case, _ in elements)
    return {(case, name): 1 / math.sqrt(count[case]) for case, name in elements}


def _compute_closeness(one: float, other: float) -> float:
    """Compute how close two sizes of the same wrong result are, from `_SAME_PLACE_SHARE` (far apart) to 1 (equal)."""
    difference = abs(one - other)
    fast_share = 1 - _SAME_PLACE_SHARE - _ORDER_SHARE
    return (
        _SAME_PLACE_SHARE
        + _ORDER_SHARE * math.exp(-difference / _ORDER_DECAY)
        + fast_share * math.exp(-difference / _SIZE_DECAY)
    )
