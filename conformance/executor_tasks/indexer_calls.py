"""Tasks that run a lightning indexer itself, not the attention that is made of it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cases.lightning_mask import Lightning, split_indexer_operands
from cases.operand_values import Problem
from conformance.execution.executor import Executor, Values
from conformance.execution.indexer_functions import IndexerCall


def run_scores(executor: Executor, problem: Problem, cotangent: np.ndarray) -> Values | None:
    """Return lists, their scores and the gradients of these by name; None if the indexer returns no scores.

    The arrays are `indices` and `scores [B, T, top_k]`, `dq [B, T, N, D]`, `dk [B, S, D]` and `dweights [B, T, N]`.
    Entries of -1 have a cotangent of zero.
    """
    call, mask = executor.implementation.call, problem.mask
    assert isinstance(mask, Lightning)
    if not isinstance(call, IndexerCall) or not call.returns_scores:
        return None

    def run(q: Any, k: Any, cotangent: Any) -> tuple[Any, ...]:
        weights, own, keys = split_indexer_operands(q, k)

        def score(*operands: Any) -> tuple[Any, Any]:
            indices, scores = call.score(*operands, top_k=mask.topk, causal=mask.causal)
            return scores, indices

        scores, pull, indices = jax.vjp(score, own, keys, weights, has_aux=True)
        return indices, scores, *pull(jnp.where(indices >= 0, cotangent, 0))

    found = executor.jit(run)(problem.q, problem.k, cotangent)
    names = ("indices", "scores", "dq", "dk", "dweights")
    return {name: np.asarray(x) for name, x in zip(names, found, strict=True)}
