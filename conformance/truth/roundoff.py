"""Unit roundoffs: what each declaration of an arithmetic means for operands of one dtype."""

from __future__ import annotations

import dataclasses

import numpy as np

from cases.operand_values import Problem
from conformance.contract import Arithmetic

# Unit roundoff 2**-p for p significand bits.
UNIT_ROUNDOFF = {"f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8, "tf32": 2.0**-11}
U = UNIT_ROUNDOFF["f32"]
# Half the smallest subnormal of f16, which hardware keeps; f32 and bf16 subnormals are flushed by GPUs and TPUs.
_TINY = {"f32": 2.0**-126, "bf16": 2.0**-126, "f16": 2.0**-25}


@dataclasses.dataclass(frozen=True)
class Roundoff:
    """Unit roundoffs of an arithmetic on operands of one dtype."""

    products: float
    coarse: float  # of operands of a product that are rounded to fewer bits than they have
    logits: float
    softmax: float
    group_sums: float
    block_sums: float
    block: int | None  # keys or queries between two such roundings
    probabilities: float
    scaled_q: float
    residuals: float
    out: float
    bias: float
    cache: float
    tiny: float
    # What is in f32 whatever is declared, by what rounds: one number, so that each can be looked at alone.
    depth: float = U  # the sum of a logit over the head dimension
    exponent: float = U  # logits as they are stored, shifted and exponentiated
    cap: float = U  # the tanh of a soft cap, and its slope
    sums: float = U  # over keys, queries and the depth of values
    log: float = U  # of the softmax's denominator
    backward: float = U  # differences and products of the backward pass

    @classmethod
    def of(cls, arithmetic: Arithmetic, problem: Problem, dtype: str | None = None) -> Roundoff:
        """The roundoffs that `arithmetic` means for operands of `dtype`, by default that of `problem`."""
        dtype = get_dtype_name(problem.q.dtype) if dtype is None else dtype
        u_in = UNIT_ROUNDOFF[dtype]
        single = dtype == "f32"
        exact = arithmetic.products == "exact"
        in_input = arithmetic.softmax == "input"
        below = 0.0 if single else u_in
        power_of_two = np.frexp(problem.effective_scale)[0] == 0.5
        return cls(
            products=U if single and exact else 0.0,
            coarse=UNIT_ROUNDOFF[arithmetic.products] if single and not exact else 0.0,
            logits=below if arithmetic.logits == "input" and not in_input else 0.0,  # it is in `softmax`
            softmax=below if in_input else 0.0,
            group_sums=below if arithmetic.group_sums == "input" else 0.0,
            block_sums=below if arithmetic.block_sums is not None else 0.0,
            block=arithmetic.block_sums,
            probabilities=below if arithmetic.probabilities == "input" or in_input else 0.0,
            scaled_q=u_in if arithmetic.scaled_q and not power_of_two else 0.0,
            residuals=below if arithmetic.residuals == "input" else 0.0,
            out=u_in,
            bias=UNIT_ROUNDOFF[get_dtype_name(problem.bias.dtype)] if problem.bias is not None else U,
            cache=0.0 if problem.kv_scales is None else max(U, u_in if arithmetic.cache == "input" else 0.0),
            tiny=_TINY[dtype],
        )

    def gamma(self, terms: int) -> float:
        """`gamma` as far as sums round."""
        return self.sums * compute_walk_steps(terms)

    def blocks(self, length: int) -> int:
        """How many sums over blocks of `length` keys or queries there are; one if sums stay in f32."""
        return 1 if self.block is None else -(-length // self.block)

    def bound_block_sums(self, length: int) -> float:
        """Relative error of rounding a sum of `length` terms after each block, against the sum of magnitudes."""
        count = self.blocks(length)
        return self.block_sums * compute_walk_steps(count) if count > 1 else 0.0

    def bound_head_sums(self, count: int) -> float:
        """The same of a sum over the heads of a group."""
        return self.group_sums * compute_walk_steps(count) if count > 1 else 0.0


def get_dtype_name(dtype: np.dtype) -> str:
    """`f32`, `bf16` or `f16`."""
    return {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}[np.dtype(dtype).name]


def compute_gamma(terms: int) -> float:
    """Relative error of an f32 sum of `terms` terms, against the sum of their magnitudes (module docstring)."""
    return U * compute_walk_steps(terms)


def compute_walk_steps(terms: int) -> float:
    """By how much the roundings of `terms` partial sums exceed one of the sum of magnitudes."""
    return float(max(1.0, np.sqrt(terms) / 4))
