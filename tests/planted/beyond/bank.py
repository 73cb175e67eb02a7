"""The bugs of this package, which were written before the grids that are to see them."""

from __future__ import annotations

import json
from pathlib import Path

from reports.records import FAIL
from tests.bank import PlantedBug
from tests.bank.examination import Detection
from tests.planted.beyond import (
    argument_bugs,
    borders,
    call_forms,
    callers,
    combined,
    derivatives,
    ends,
    exact_sets,
    fast_paths,
    few_operands,
    further_calls,
    long_caches,
    long_sequences,
    narrow_paths,
    precision,
    precision_backward,
    segment_ids,
    sizes,
    state,
    unseen,
    values,
    whole_blocks,
)

_MODULES = (
    whole_blocks,
    fast_paths,
    long_caches,
    long_sequences,
    sizes,
    argument_bugs,
    segment_ids,
    values,
    precision,
    precision_backward,
    narrow_paths,
    derivatives,
    state,
    combined,
    ends,
    callers,
    few_operands,
    exact_sets,
    further_calls,
    unseen,
    borders,
    call_forms,
)

BEYOND: tuple[PlantedBug, ...] = tuple(bug for module in _MODULES for bug in module.BUGS)

# Check, observable and case, and the level where that is not `quick`. For bugs that are not seen: the reason.
_FILE = Path(__file__).with_name("detections.json")
_DETECTIONS: dict[str, list[str] | str] = json.loads(_FILE.read_text(encoding="utf-8"))

# By which check, observable and case each was seen, of those that were seen.
SEEN = {
    name: {one[0]: Detection(one[1], one[2], FAIL, None)} for name, one in _DETECTIONS.items() if isinstance(one, list)
}
# At which level each was seen.
LEVELS = {name: one[3] if len(one) > 3 else "quick" for name, one in _DETECTIONS.items() if isinstance(one, list)}
# Those that were judged at `quick` for half a minute of processor time, or to the end, and were not seen. What
# `standard` asks beyond that and could see them was asked too.
UNSEEN = tuple(name for name, one in _DETECTIONS.items() if isinstance(one, str))
