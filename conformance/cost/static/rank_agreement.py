"""Compare the order of a knob's candidate settings by static cycles with their order by measured time.

`tune` prints and stores the result, so that users see how far static cycles can be trusted on a chip.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from conformance.cost.static.static_tuning import MIN_SAVING


def describe_rank_agreement(static: Mapping[str, float], seconds: Mapping[str, float]) -> str:
    """Describe in one sentence how many pairs of candidates have the same order by static cycles and by time.

    Only pairs count whose static cycles differ by more than `MIN_SAVING`. If there are no such pairs, the text is
    empty. Only candidates that are in both mappings are compared.

    Args:
      static: static cycles of a call, by name of the candidate.
      seconds: median seconds of a call on the chip, by name of the candidate.
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
