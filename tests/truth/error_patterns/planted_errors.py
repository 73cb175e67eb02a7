"""Take right results of real cases and plant errors in them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np

from cases.case_id import parse_case_id
from cases.operand_values import Cotangent, Problem, draw_cotangent, draw_problem
from conformance.truth.error_patterns.failure import Failure, build_failure
from conformance.truth.error_patterns.pattern import Pattern, find_pattern
from conformance.truth.rounding_bounds import Bounded, compute_expectation
from impls.contract.declarations import Arithmetic

Plant = Callable[[np.ndarray, SimpleNamespace], np.ndarray]
"""Makes a wrong array of a right one, given all right ones by name and the `problem`."""

LIMIT = 4.0
CAUSAL = "train/f32/B2.T150.S150.N4.K2.H64.V64/causal/normal/s0"
FULL = "train/f32/B2.T128.S128.N8.K2.H16.V16/full/softcap30/sinks/bias/normal/s0"
LENGTHS = "train/f32/B2.T100.S160.N4.K4.H64.V64/lengths-0-100/normal/s0"
WINDOW = "train/f32/B1.T256.S256.N2.K2.H32.V24/window-l31-r0/normal/s0"
BF16 = "train/bf16/B1.T128.S128.N4.K2.H64.V64/causal/normal/s0"
SQUARE = "train/f32/B4.T64.S64.N4.K2.H64.V64/causal/normal/s0"
ONE_HEAD = "train/f32/B1.T64.S64.N1.K1.H64.V64/causal/normal/s0"


@functools.cache
def truth(case_id: str) -> tuple[Problem, dict[str, Bounded]]:
    """The problem of a case, and its right results with their bounds."""
    case = parse_case_id(case_id)
    problem = draw_problem(case)
    drawn = draw_cotangent(case)
    live = ~problem.empty_rows.transpose(0, 2, 1)[..., None]
    cotangent = Cotangent("random", np.where(live, drawn.out, np.zeros_like(drawn.out)))
    found = compute_expectation(problem, Arithmetic(), [cotangent])
    return problem, {**found.forward, **found.gradients[0]}


def failure(case_id: str, observable: str, plant: Plant, *, dtype: type = np.float32) -> Failure:
    """A result with an error planted into it."""
    problem, core = truth(case_id)
    right = {name: bounded.value.copy() for name, bounded in core.items()}
    given = SimpleNamespace(problem=problem, **{name: value.copy() for name, value in right.items()})
    got: np.ndarray = plant(right[observable], given).astype(dtype)
    found = build_failure(observable, got, core[observable], None, limit=LIMIT, problem=problem, core=core)
    assert found is not None
    return found


def seen(case_id: str, observable: str, plant: Plant, *, dtype: type = np.float32) -> Pattern:
    """What is said of a planted error."""
    return find_pattern(failure(case_id, observable, plant, dtype=dtype))


def noise(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Normal numbers, the same for the same seed."""
    return np.random.default_rng(seed).standard_normal(shape)
