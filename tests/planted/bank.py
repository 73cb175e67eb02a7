"""The bank: the planted bugs that every check is measured on.

Bugs of one check, of captured arrays and of further results are tried by the tests of these (`tests/checks`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from cases.case import Case
from conformance.mutation.mutant_list import MUTANTS
from conformance.sensitivity import detection_table
from impls.contract.implementation import Implementation
from tests.bank import PlantedBug, detection_results
from tests.planted.beyond.bank import BEYOND
from tests.planted.computing import (
    below_rounding,
    dispatch,
    far_values,
    first_minute,
    gaming,
    laws,
    pallas_tpu,
    splash_tpu,
    transformation_bugs,
)
from tests.planted.features import (
    alibi,
    caches,
    context,
    decode,
    dropout,
    front,
    functions,
    index_scores,
    logit_scale,
    merging,
    moba,
    refusing,
    shared_sequences,
    tangents,
)
from tests.planted.serving import (
    batches,
    extreme_values,
    latent,
    packed,
    packed_gradients,
    page_scales,
    page_writes,
    paged,
    paged_queries,
    paged_softmax,
    ring,
)

_MODULES = (
    alibi,
    logit_scale,
    functions,
    below_rounding,
    far_values,
    transformation_bugs,
    first_minute,
    laws,
    gaming,
    context,
    dispatch,
    front,
    decode,
    merging,
    pallas_tpu,
    moba,
    caches,
    paged,
    paged_queries,
    paged_softmax,
    page_writes,
    page_scales,
    packed,
    packed_gradients,
    latent,
    ring,
    batches,
    extreme_values,
    splash_tpu,
    refusing,
    shared_sequences,
)

# Of the bugs that were written beyond the grid, some that only one check sees.
_BEYOND = (
    "dq-product-at-default-precision",
    "eager-mask-kept-by-shape",
    "logits-in-the-dtype-of-a-narrow-bias",
    "scale-of-zero-is-the-usual",
    "window-in-a-list-ignored",
)


def _judge_dropout_alone(bug: PlantedBug) -> PlantedBug:
    """Return the bug of a kernel that refuses calls without dropout: it has no bug there, and judging takes hours."""

    def build() -> Implementation:
        found = bug.build()

        def call(*operands: Any, dropout_rate: Any = None, **options: Any) -> Any:
            if dropout_rate is None:
                raise NotImplementedError("a call without dropout")
            return found.call(*operands, dropout_rate=dropout_rate, **options)

        def find_refusal(case: Case) -> str | None:
            return None if case.dropout_rate is not None else "a call without dropout"

        return dataclasses.replace(found, call=call, supports_case=find_refusal, refuses_by_signature=False)

    return dataclasses.replace(bug, build=build)


# Of the bugs that one check sees, some. The tests of their checks have all of them.
_OF_ONE_CHECK = (
    *(bug for bug in index_scores.BUGS if bug.name == "index-scores-weights-are-constants"),
    *(bug for bug in tangents.BUGS if bug.name == "tangent-of-logsumexp-not-divided"),
    *(
        _judge_dropout_alone(bug)
        for bug in dropout.BUGS
        if bug.name in ("dropout-lost-in-dv", "dropout-same-for-all-heads")
    ),
)

BANK: tuple[PlantedBug, ...] = (
    *MUTANTS,  # of dense attention
    *(bug for module in _MODULES for bug in module.BUGS),
    *(bug for bug in BEYOND if bug.name in _BEYOND),
    *_OF_ONE_CHECK,
)

# By which checks, and on which cases, each bug died when the bank was measured: it is looked for there first.
SEEN = {
    found.bug: found.detections
    for found in detection_results.parse_examinations(detection_table.load_table(), {bug.name for bug in BANK})
}
