"""Whether a clock puts the candidates of a knob in the order in which their static cycles do."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from conformance.cost.static.static_tuning import MIN_SAVING


def describe_rank_agreement(static: Mapping[str, float], seconds: Mapping[str, float]) -> str:
    """How many pairs of candidates that static cycles tell apart are in the same order by time; "" if there are none.

    Args:
      static: cycles of a call by candidate, counted without the chip.
      seconds: median seconds of a call by candidate, on the chip; of those in both, pairs are compared.
    """
    both = sorted((cycles, name) for name, cycles in static.items() if name in seconds)
    told = [
        (one, other) for (few, one), (many, other) in itertools.combinations(both, 2) if many > (1 + MIN_SAVING) * few
    ]
    if not told:
        return ""
    alike = sum(seconds[one] < seconds[other] for one, other in told)
    pairs = f"{alike} of {len(told)} pairs of candidates"
    return f"static cycles that differ by more than {MIN_SAVING:.0%} put {pairs} in the order of the clock"
