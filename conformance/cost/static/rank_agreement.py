"""Compare the order of a knob's candidates by static cycles with their order by time."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from conformance.cost.static.static_tuning import MIN_SAVING


def describe_rank_agreement(static: Mapping[str, float], seconds: Mapping[str, float]) -> str:
    """Say how many pairs of candidates have the same order by static cycles and by time.

    Only pairs count whose static cycles differ clearly. If there are none, the text is empty.

    Args:
      static: static cycles of a call by candidate.
      seconds: median seconds of a call on the chip by candidate. Candidates in both mappings are compared.
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
