"""Count how often a diagnosis names the right class of mistake, for planted bugs that it does not know."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

from cases.storage_forms.form_registry import FORMS
from conformance.sensitivity.diagnosis import SAME_SIMILARITY, SURROUNDING_FAMILIES, Similarity, find_nearest
from conformance.sensitivity.error_profiles import KnownBug

# These families name a storage form, not a kind of mistake. So bugs in them are grouped by their kind instead.
_STORAGE_FAMILIES = frozenset({*FORMS, "quantised caches"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Confusion:
    """How well diagnosis works for the bugs of one family, when each bug is compared with all other bugs of the bank.

    A named bug is right if it has the same family or kind, or the same wrong numbers. The wrong numbers count because
    families overlap: the derivative of a soft cap belongs to the family of the backward pass too.

    Attributes:
      family: name of the family.
      bugs: number of bugs of the family that are wrong on any error profile case; the other fields count among these.
      first: number of bugs for which the first named bug is right.
      named: number of bugs for which any of the (at most three) named bugs is right.
      none: number of bugs for which no bug is named.
      alone: number of bugs for which no right name exists, because no other bug has their family or kind.
      others: families of first named bugs that are not right, the most frequent family first.
    """

    family: str
    bugs: int
    first: int
    named: int
    none: int
    alone: int
    others: tuple[str, ...]


def measure_confusions(bank: Sequence[KnownBug]) -> list[Confusion]:
    """Diagnose each planted bug as if it were not in the bank, and count right and wrong names by family.

    Bugs in code around a kernel (`SURROUNDING_FAMILIES`) are left out.
    """
    visible = [bug for bug in bank if bug.profile.wrong and bug.family not in SURROUNDING_FAMILIES]
    named: dict[str, list[tuple[KnownBug, list[Similarity]]]] = {}
    for bug in visible:
        nearest = find_nearest(bug.profile, [other for other in visible if other is not bug])
        named.setdefault(bug.family, []).append((bug, nearest))
    return [_measure_confusion(family, diagnosed, visible) for family, diagnosed in sorted(named.items())]


def _measure_confusion(
    family: str, named: Sequence[tuple[KnownBug, Sequence[Similarity]]], visible: Sequence[KnownBug]
) -> Confusion:
    """Count right and wrong names for the bugs of one family.

    Args:
      family: name of the family.
      named: each bug of the family, with the bugs that its diagnosis names.
      visible: all bugs of the bank that are wrong on any error profile case.
    """
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
    """Check whether the diagnosis `named` is right for `bug`: the same class of mistake, or the same wrong numbers."""
    return _is_same_class(bug, named.bug) or named.similarity >= SAME_SIMILARITY


def _is_same_class(bug: KnownBug, other: KnownBug) -> bool:
    """Check whether two bugs have the same family or kind; if the family is a storage form, only the kind counts."""
    if bug.family in _STORAGE_FAMILIES:
        return _get_kind_prefix(bug) == _get_kind_prefix(other)
    return bug.kind == other.kind or bug.family == other.family


def _get_kind_prefix(bug: KnownBug) -> str:
    """Return the part of a bug's kind before the first dot: `kvscale` for `kvscale.twice`."""
    return bug.kind.partition(".")[0]
