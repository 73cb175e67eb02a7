"""The task of the check `algorithm`: the call and its gradients, with every float in float64."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np

from cases.operand_registry import GRADIENT_OF
from cases.operand_values import Problem
from conformance.execution import returned_values
from conformance.execution.common_subexpressions import eliminate_common_subexpressions
from conformance.execution.exact_evaluation import NoExactEvaluation, build_exact
from conformance.execution.executor import Arrays, Executor, Values, call_plain, pull_back


def run_exactly(
    executor: Executor, problem: Problem, do: np.ndarray | None, dlse: np.ndarray | None
) -> tuple[str, Values]:
    """Evaluate the call, its residuals and its gradients with every float in float64.

    Args:
      do: the cotangent of `out`; None if no gradient is evaluated.
      dlse: the cotangent of `logsumexp`; None if the call without residuals is differentiated.

    Returns:
      - Why the call has no such evaluation, or "".
      - `out`, the residuals and the gradients by name, as float64; empty if the call has no such evaluation.
    """
    statics, arrays = executor.arguments(problem)
    implementation = executor.implementation
    plain = functools.partial(call_plain, implementation.call, statics)

    def with_residuals(arrays: Arrays) -> Any:
        return returned_values.check_residuals(implementation.call(**arrays, **statics, save_residuals=True))

    def with_lse(arrays: Arrays) -> Any:
        out, residuals = with_residuals(arrays)
        return out, returned_values.get_residual(residuals, "logsumexp")

    def compute(arrays: Arrays, do: Any, dlse: Any) -> dict[str, Any]:
        results = dict(with_residuals(arrays)[1]) if implementation.residuals else {}
        results["out"] = plain(arrays)
        if dlse is not None:
            results |= _rename(pull_back(with_lse, arrays, (do, dlse))[1])
        elif do is not None:
            results |= _rename(pull_back(plain, arrays, do)[1])
        return results

    evaluate = build_exact(eliminate_common_subexpressions(compute), executor.jit)
    try:
        results = evaluate(arrays, do, dlse)
    except NoExactEvaluation as error:
        return str(error), {}
    return "", {name: np.asarray(x) for name, x in jax.device_get(results).items()}


def _rename(gradients: Arrays) -> dict[str, Any]:
    return {GRADIENT_OF[name]: x for name, x in gradients.items()}
