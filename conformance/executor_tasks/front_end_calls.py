"""The task of the check `front_end`: run a model's front end and attention in one compiled program.

The front end computes queries, keys and values from raw projections, by rotary embedding, norms and factors.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from cases.operand_values import Problem
from conformance.execution.executor import Executor, Values
from conformance.reference.front_end_reference import apply_front_end as reference


def run_front_end(
    executor: Executor,
    problem: Problem,
    steps: tuple[str, ...],
    given: Mapping[str, np.ndarray],
    places: tuple[np.ndarray, np.ndarray],
    do: np.ndarray | None,
) -> tuple[np.ndarray, Values]:
    """Return `out` and, if a cotangent is given, the gradients of the front end's inputs.

    The implementation's own front end is run if it has one, else the reference.

    Args:
      problem: the operands of attention. Its q, k and v are replaced by those that the front end computes.
      steps: the steps of the front end (`cases.front_ends`).
      given: raw projections and the weights of norms, by name.
      do: the cotangent of `out`; None without gradients.
    """
    call, arrays = executor.bind(problem)
    function = executor.implementation.front_end or reference
    q_positions, kv_positions = places

    def run_composed(moving: Mapping[str, Any]) -> Any:
        norms = {name: moving[name] for name in ("q_norm", "k_norm") if name in moving}
        q, k, v = function(
            steps,
            moving["q"],
            moving["k"],
            moving.get("v"),
            q_positions=q_positions,
            kv_positions=kv_positions,
            **norms,
        )
        return call({**arrays, "q": q, "k": k, "v": v})

    if do is None:
        return np.asarray(executor.jit(run_composed)(given)), {}
    out, gradients = executor.jit(functools.partial(_pull_back, run_composed))(given, do)
    return np.asarray(out), {name: np.asarray(x) for name, x in gradients.items()}


def _pull_back(function: Any, moving: Mapping[str, Any], cotangent: Any) -> tuple[Any, Mapping[str, Any]]:
    out, pullback = jax.vjp(function, moving)
    return out, pullback(cotangent)[0]
