"""The contract under its public name, for implementations of users: what `impls.contract.implementation` defines."""

from __future__ import annotations

from conformance import packages

packages.claim_names()  # a user's module called `impls` would be loaded without it

from impls.contract.implementation import (  # noqa: E402 -- after the claim
    FLOATS,
    Accelerator,
    Arithmetic,
    BehindMask,
    CausalFrom,
    EmptyRows,
    Formulas,
    Implementation,
    Lowering,
    NegativeIds,
    OpenSide,
    Products,
    Refuses,
    ScaledQ,
    mask_function,
    structured_mask,
    validate_mask,
    validate_operands,
)

__all__ = [
    "FLOATS",
    "Accelerator",
    "Arithmetic",
    "BehindMask",
    "CausalFrom",
    "EmptyRows",
    "Formulas",
    "Implementation",
    "Lowering",
    "NegativeIds",
    "OpenSide",
    "Products",
    "Refuses",
    "ScaledQ",
    "mask_function",
    "structured_mask",
    "validate_mask",
    "validate_operands",
]
