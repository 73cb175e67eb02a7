"""Count the pairs of a query and a key that a case's mask allows, and the floating-point operations that they require.

`bench` divides these operations by the measured time. Operations are counted from the allowed pairs, not from the
kernel's own work. A kernel that visits blocks which the mask leaves empty gets no credit for them. A multiplication and
an addition are two operations. For each pair and query head (H and V are the head dimensions of keys and of values):

    forward             2 H for <q, k>, 2 V for p v
    forward+backward    in addition, 2 H each for recomputed logits, dq and dk, and 2 V each for dp and dv

Forward and backward together are 3.5 times the forward pass for H = V (the convention of Dao 2023, arXiv:2307.08691,
section 4.1). An implementation that stores its probabilities need not recompute the logits. The recomputation is
counted for such an implementation too. Exponentials, masks and the softmax's sums do not count.

The module also lists the cases that `bench` times by default.
"""

from __future__ import annotations

import numpy as np

from cases.case import Case
from cases.operand_values import Problem
from reports.records.measurement import FORWARD

_PAIRS_AT_A_TIME = 1 << 24  # pairs of the mask in memory at a time

# Batch size times length of a default case on an accelerator. This is enough work for every core at any length.
_TOKENS = 16384
_WIDTH = 1024  # number of query heads times head dimension, in a default case on an accelerator


def count_allowed_pairs(problem: Problem) -> int:
    """Count the pairs of a query and a key that mask and segment ids allow, over all batch rows and query heads."""
    batch, q_length, num_q_heads, _ = problem.q.shape
    kv_length = problem.k.shape[1]
    step = max(1, _PAIRS_AT_A_TIME // kv_length)
    return sum(
        _count_pairs(problem, np.arange(start, min(start + step, q_length)), batch, num_q_heads)
        for start in range(0, q_length, step)
    )


def _count_pairs(problem: Problem, rows: np.ndarray, batch: int, num_q_heads: int) -> int:
    allowed = compute_allowed(problem, rows)
    return int(np.count_nonzero(allowed)) * (batch // allowed.shape[0]) * (num_q_heads // allowed.shape[1])


def compute_allowed(problem: Problem, rows: np.ndarray) -> np.ndarray:
    """Compute which keys `rows` may attend to by mask and segment ids, as booleans `[B or 1, N or 1, rows, S]`."""
    kv_length = problem.k.shape[1]
    allowed = np.asarray(problem.mask.allowed(rows[:, None], np.arange(kv_length)[None, :]), bool)
    leading = (1, 1) if allowed.ndim <= 2 else allowed.shape[:2]
    allowed = np.broadcast_to(allowed, (*leading, len(rows), kv_length))
    if problem.segment_ids is not None:
        q_ids, kv_ids = problem.segment_ids
        allowed = allowed & (q_ids[:, None, rows, None] == kv_ids[:, None, None, :])
    return allowed


def count_flops(pairs: int, case: Case, phase: str) -> float:
    """Count the floating-point operations of a case with `pairs` allowed pairs, as the module docstring defines."""
    forward = 2 * (case.head_dim + case.v_head_dim)
    backward = 2 * (3 * case.head_dim + 2 * case.v_head_dim)
    return float(pairs) * (forward if phase == FORWARD else forward + backward)


def list_default_cases(platform: str) -> tuple[Case, ...]:
    """List the default cases of `bench`: causal self-attention at common lengths and depths, small on a CPU."""
    if platform == "cpu":
        return tuple(
            _build_case("f32", length, depth, batch=1, heads=256 // depth)
            for length in (1024, 4096)
            for depth in (64, 128)
        )
    return tuple(
        _build_case("bf16", length, depth, batch=_TOKENS // length, heads=_WIDTH // depth)
        for length in (1024, 4096, 16384)
        for depth in (64, 128)
    )


def _build_case(dtype: str, length: int, depth: int, *, batch: int, heads: int) -> Case:
    return Case(
        dtype=dtype,
        batch=batch,
        q_length=length,
        kv_length=length,
        num_q_heads=heads,
        num_kv_heads=heads,
        head_dim=depth,
        v_head_dim=depth,
        mask="causal",
    )
