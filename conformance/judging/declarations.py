"""Which declarations might explain a failure, each by itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from cases.case import Case
from conformance.contract import Arithmetic, Implementation

# Each weakens what it is declared beside; those that ask for most come first. Of f32 operands, of the others, of all.
_OF_F32: tuple[dict[str, object], ...] = ({"products": "tf32"}, {"products": "bf16"})
_OF_SIXTEEN_BITS: tuple[dict[str, object], ...] = (
    {"group_sums": "input"},
    {"logits": "input"},
    {"residuals": "input"},
    {"softmax": "input"},
    {"block_sums": 128},
    {"block_sums": 32},
)
_OF_ANY: tuple[dict[str, object], ...] = ({"scaled_q": True},)


def weaker(implementation: Implementation, case: Case) -> Iterator[tuple[str, Implementation]]:
    """The implementation under each declaration that it does not make and that could matter here, and what it is."""
    if implementation.behind_mask == "any":
        yield 'behind_mask="finite"', dataclasses.replace(implementation, behind_mask="finite")
    declared = implementation.arithmetic
    for fields in (*(_OF_F32 if case.dtype == "f32" else _OF_SIXTEEN_BITS), *_OF_ANY):
        ((name, value),) = fields.items()
        if getattr(declared, name) == getattr(Arithmetic(), name):
            arithmetic = dataclasses.replace(declared, **{name: value})  # type: ignore[arg-type]
            yield f"{name}={value!r}".replace("'", '"'), dataclasses.replace(implementation, arithmetic=arithmetic)
