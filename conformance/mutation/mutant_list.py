"""List the wrong attention functions that stand in for a user's, and build correct ones."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp

from cases.masks import Full
from conformance.adaptation.target import build_target
from conformance.mutation.bugs import (
    backward,
    bias,
    blocks,
    cotangents,
    empty_rows,
    epilogue,
    heads,
    masks,
    online,
    operands,
    precision,
    residuals,
    scale,
    segments,
    sinks,
    soft_cap,
    softmax,
    sums,
    tails,
    windows,
)
from conformance.mutation.kernels import plain
from conformance.mutation.planted_bug import PlantedBug
from impls.contract.implementation import Implementation

_MODULES = (
    *(masks, windows, segments, empty_rows, heads, scale, soft_cap, bias, sinks, softmax, residuals, precision),
    *(online, blocks, tails, sums, operands, epilogue, backward, cotangents),
)

MUTANTS: tuple[PlantedBug, ...] = tuple(bug for module in _MODULES for bug in module.BUGS)
"""The wrong functions, by family."""


@functools.cache
def find_mutant(name: str) -> PlantedBug:
    """Return the wrong function of this name."""
    return next(bug for bug in MUTANTS if bug.name == name)


def build_right(*, by_hand: bool) -> Implementation:
    """Build correct attention, with a backward pass written by hand or by JAX."""
    return plain.implementation("right", back=plain.BackwardSteps() if by_hand else None)


@functools.cache
def is_by_hand(bug: PlantedBug) -> bool:
    """Return whether a wrong function has a backward pass written by hand, so that forward mode cannot take it."""
    x = jnp.ones((1, 2, 1, 2))
    implementation = bug.build()
    try:
        jax.jvp(lambda q: implementation.call(q, x, x, **_lower(implementation)), (x,), (x,))
    except TypeError:
        return True
    except Exception:  # any: it fails in a call that small; then it is tried as the others
        return False
    return False


def _lower(implementation: Implementation) -> dict[str, Any]:
    static, arrays = implementation.lower_mask(Full(), 1, 1, 2, 2)
    return {**static, **arrays}


def find_operands(signature: inspect.Signature) -> tuple[str, str, str]:
    """Find the parameters of queries, keys and values. Raises `CannotAdapt` if there are none."""

    def function() -> None:
        """Have the signature."""

    parameters = [p for p in signature.parameters.values() if p.name != "self"]
    vars(function)["__signature__"] = signature.replace(parameters=parameters)
    return build_target(function, "the function", (), "").operands
