"""The oracle against loops over single elements in fifty digits."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import mpmath
import numpy as np
import pytest

from cases.operand_values import Problem
from conformance.truth import oracle
from tests.comparison_asserts import assert_right
from tests.truth.test_oracle import NAMES, TINY, around, cotangents, elements, number_of, problem_of, rounding

Number = Any
"""An mpmath number: mpmath has no types."""


class Digits:
    """Attention in 50 digits, by loops over scalars. Rows are recomputed only where an operand reaches."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.operands = {
            x: {index: mpmath.mpf(float(v[index])) for index in np.ndindex(v.shape)}
            for x in NAMES.values()
            if (v := getattr(problem, x)) is not None
        }
        self.batch, self.q_length, self.heads, self.depth = problem.q.shape
        self.kv_length, self.kv_heads, self.v_depth = problem.v.shape[1:]
        self.allowed = np.broadcast_to(problem.allowed, (self.batch, self.heads, self.q_length, self.kv_length))

    def logit(self, b: int, n: int, i: int, j: int) -> Number:
        kv = n // (self.heads // self.kv_heads)
        q, k = self.operands["q"], self.operands["k"]
        scale = mpmath.mpf(self.problem.scale) if self.problem.scale else 1 / mpmath.sqrt(self.depth)
        x = scale * sum(q[b, i, n, h] * k[b, j, kv, h] for h in range(self.depth))
        if self.problem.bias is not None:
            place = zip((b, n, i, j), self.problem.bias.shape, strict=True)
            x += self.operands["bias"][tuple(at if size > 1 else 0 for at, size in place)]
        if self.problem.alibi_slopes is not None:
            x -= float(self.problem.alibi_slopes[n]) * abs(i + self.kv_length - self.q_length - j)
        if (score := self.problem.score_mod) is not None:
            number = float(number_of(score, b, n, i + self.kv_length - self.q_length - j))
            x = number * mpmath.tanh(x / number) if score.caps else x + number
        cap = self.problem.soft_cap
        return x if cap is None else cap * mpmath.tanh(x / cap)

    def row(self, b: int, n: int, i: int) -> tuple[list[Number], Number, Number]:
        """`out`, `logsumexp`, `max_logits` of one query."""
        z = {j: self.logit(b, n, i, j) for j in range(self.kv_length) if self.allowed[b, n, i, j]}
        total = sum((mpmath.exp(x) for x in z.values()), mpmath.mpf(0))
        if "sinks" in self.operands:
            total += mpmath.exp(self.operands["sinks"][n,])
        kv, v = n // (self.heads // self.kv_heads), self.operands["v"]
        out = [sum((mpmath.exp(z[j]) / total * v[b, j, kv, d] for j in z), mpmath.mpf(0)) for d in range(self.v_depth)]
        return out, mpmath.log(total) if total else mpmath.mpf("-inf"), max(z.values(), default=mpmath.mpf("-inf"))

    def loss(self, do: np.ndarray, dlse: np.ndarray) -> Number:
        total = mpmath.mpf(0)
        for b, n, i in itertools.product(range(self.batch), range(self.heads), range(self.q_length)):
            out, lse, _ = self.row(b, n, i)
            total += sum(float(do[b, i, n, d]) * out[d] for d in range(self.v_depth))
            if dlse[b, n, i]:
                total += float(dlse[b, n, i]) * lse
        return total

    def gradient(self, operand: str, index: tuple[int, ...], loss: Callable[[], Number]) -> float:
        """A central difference whose error, 1e-30, is nothing to float64."""
        values, step = self.operands[operand], mpmath.mpf(10) ** -16
        kept = values[index]
        values[index] = kept + step
        above = loss()
        values[index] = kept - step
        below = loss()
        values[index] = kept
        return float((above - below) / (2 * step))


@pytest.mark.parametrize("case_id", TINY)
def test_everything_agrees_with_loops_in_fifty_digits(case_id: str) -> None:
    problem, (do, dlse) = problem_of(case_id), cotangents(case_id)
    forward, gradients = oracle.compute_forward(problem), oracle.compute_backward(problem, do, dlse)
    expected = rounding(case_id, do, dlse)
    with mpmath.workdps(50):
        digits = Digits(problem)
        truth = {name: np.empty(x.value.shape) for name, x in expected.items()}
        for b, n, i in itertools.product(range(digits.batch), range(digits.heads), range(digits.q_length)):
            out, lse, top = digits.row(b, n, i)
            truth["out"][b, i, n] = [float(x) for x in out]
            truth["logsumexp"][b, n, i], truth["max_logits"][b, n, i] = float(lse), float(top)
        for name, index in elements(problem):
            truth[name][index] = digits.gradient(NAMES[name], index, lambda: digits.loss(do, dlse))
    assert_right({**dataclasses.asdict(forward), **gradients}, around(truth, expected))
