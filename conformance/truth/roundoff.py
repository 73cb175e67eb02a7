"""Translate a declared arithmetic into unit roundoffs for operands of one dtype."""

from __future__ import annotations

import dataclasses

import numpy as np

from cases.operand_values import Problem
from cases.quantization import SCALE_ERROR
from impls.contract.declarations import Arithmetic

# Unit roundoff 2**-p for p significand bits.
UNIT_ROUNDOFF = {"f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8, "tf32": 2.0**-11}
U = UNIT_ROUNDOFF["f32"]
# Largest absolute error of a result that underflows. In f16 it is half the smallest subnormal, since hardware keeps
# f16 subnormals. In f32 and bf16 it is the smallest normal number, since GPUs and TPUs flush subnormals to zero.
_TINY = {"f32": 2.0**-126, "bf16": 2.0**-126, "f16": 2.0**-25}


@dataclasses.dataclass(frozen=True)
class Roundoff:
    """Unit roundoffs of a declared arithmetic on operands of one dtype: one field for each step that may round.

    A field is 0 if its step does not round. The last fields are roundoffs of f32, whatever is declared. They are
    separate fields so that `conformance.truth.bound_sources` can compute the term of each in a bound.
    """

    products: float  # rounding the products of f32 operands to f32
    coarse: float  # rounding f32 operands of a product to fewer bits (tf32, bf16)
    logits: float  # rounding logits to the operands' dtype
    softmax: float  # rounding every step of a softmax to the operands' dtype
    group_sums: float  # rounding sums over the heads of a group to the operands' dtype
    block_sums: float  # rounding sums over keys or queries to the operands' dtype after each block
    block: int | None  # number of keys or queries in such a block; None if sums are not rounded after blocks
    probabilities: float  # rounding probabilities to the operands' dtype
    scaled_q: float  # rounding `q * scale`, or `q * scale * log2(e)`, to the operands' dtype
    residuals: float  # rounding residuals to the operands' dtype
    out: float  # rounding results to the operands' dtype
    bias: float  # rounding dbias to the dtype of the bias
    cache: float  # rounding keys and values after they are multiplied by the scales of a quantised cache
    dropout: float  # rounding `1 / (1 - rate)` and its product with a weight; 0 without dropout
    tiny: float  # absolute error by underflow in the operands' dtype
    depth: float = U  # rounding the sum of a logit over the head dimension
    exponent: float = U  # rounding logits when they are stored, shifted and exponentiated
    cap: float = U  # rounding the tanh of a soft cap and its derivative
    sums: float = U  # rounding sums over keys, queries and the depth of values
    log: float = U  # rounding the logarithm of the softmax's denominator
    backward: float = U  # rounding differences and products of the backward pass
    base: float = 0.0  # converting logarithms to base 2, and cotangents of them; 0 if they are natural

    @classmethod
    def of(cls, arithmetic: Arithmetic, problem: Problem, dtype: str | None = None) -> Roundoff:
        """Return the roundoffs of `arithmetic` for operands of `dtype`, by default the dtype of `problem`."""
        dtype = get_dtype_name(problem.q.dtype) if dtype is None else dtype
        u_in = UNIT_ROUNDOFF[dtype]
        single = dtype == "f32"
        exact = arithmetic.products == "exact"
        in_input = arithmetic.softmax == "input"
        below = 0.0 if single else u_in
        # A power of two as the scale rounds nothing, but its product with log2(e) does.
        is_power = np.frexp(problem.effective_scale)[0] == 0.5 and not problem.head_factors
        exact_scale = is_power and arithmetic.scaled_q != "base2"
        return cls(
            products=U if single and exact else 0.0,
            coarse=UNIT_ROUNDOFF[arithmetic.products] if single and not exact else 0.0,
            logits=below if arithmetic.logits == "input" and not in_input else 0.0,  # else part of `softmax`
            softmax=below if in_input else 0.0,
            group_sums=below if arithmetic.group_sums == "input" else 0.0,
            block_sums=below if arithmetic.block_sums is not None else 0.0,
            block=arithmetic.block_sums,
            probabilities=below if arithmetic.probabilities == "input" or in_input else 0.0,
            scaled_q=(u_in if arithmetic.scaled_q and not exact_scale else 0.0)
            + (0.0 if problem.q_scale is None and problem.q_descale is None else U),  # their product with a scale
            residuals=below if arithmetic.residuals == "input" else 0.0,
            out=u_in,
            bias=(UNIT_ROUNDOFF[get_dtype_name(problem.bias.dtype)] if problem.bias is not None else U)
            + (U if "bias" in problem.scaled_terms else 0.0),
            cache=0.0
            if problem.kv_scales is None
            else max(U, u_in if arithmetic.cache == "input" else 0.0)
            + (0.0 if problem.kv_global_scales is None and problem.kv_zeros is None else U)  # a product or a sum more
            + (SCALE_ERROR + U if problem.computes_scales else 0.0),  # U: the peak of a token is rounded
            dropout=0.0
            if problem.dropout_rate is None
            else 3 * max(U, below if arithmetic.logits == "input" and not in_input else 0.0),
            tiny=_TINY[dtype],
        )

    @classmethod
    def of_constants(cls, arithmetic: Arithmetic, problem: Problem) -> Roundoff:
        """Return the roundoffs of an evaluation in float64, where only constants of the program are rounded.

        Such constants are a kernel's `log2(e)`, its soft cap and the inverse of it, and their products with the scale.
        Each was rounded once, when the program was traced: to f32, or to the operands' dtype where the declared
        arithmetic has values of that dtype. Each multiplies values that belong to one of the fields below. All other
        steps round nothing. docs/numerics.md derives which constant meets which step.
        """
        declared = cls.of(arithmetic, problem)
        narrow = UNIT_ROUNDOFF[get_dtype_name(problem.q.dtype)]
        in_softmax = narrow if arithmetic.softmax == "input" else U
        return cls(
            products=0.0,
            coarse=0.0,
            logits=0.0,
            softmax=0.0,
            group_sums=0.0,
            block_sums=0.0,
            block=None,
            probabilities=0.0,
            scaled_q=declared.scaled_q,
            residuals=declared.residuals,
            out=U,
            bias=U,
            cache=declared.cache,
            dropout=declared.dropout,
            tiny=_TINY["f32"],
            depth=max(in_softmax, declared.logits),
            exponent=max(in_softmax, declared.logits),
            cap=max(in_softmax, declared.logits),
            sums=0.0,
            backward=in_softmax,
        )

    def gamma(self, terms: int) -> float:
        """Bound the relative error of a sum of `terms` terms, with the roundoff of `sums`."""
        return self.sums * compute_walk_steps(terms)

    def blocks(self, length: int) -> int:
        """Return the number of blocks that hold `length` keys or queries; one if sums are not rounded after blocks."""
        return 1 if self.block is None else -(-length // self.block)

    def bound_block_sums(self, length: int) -> float:
        """Bound the error of rounding a sum of `length` terms after each block, relative to the sum of magnitudes."""
        count = self.blocks(length)
        return self.block_sums * compute_walk_steps(count) if count > 1 else 0.0

    def bound_head_sums(self, count: int) -> float:
        """Bound the error of rounding a sum over the heads of a group, relative to the sum of magnitudes."""
        return self.group_sums * compute_walk_steps(count) if count > 1 else 0.0


def get_dtype_name(dtype: np.dtype) -> str:
    """Return the name of a NumPy dtype: `f32`, `bf16` or `f16`."""
    return {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}[np.dtype(dtype).name]


def compute_gamma(terms: int) -> float:
    """Bound an f32 sum's error relative to the sum of magnitudes (derived in `conformance.truth.rounding_bounds`)."""
    return U * compute_walk_steps(terms)


def compute_walk_steps(terms: int) -> float:
    """Compute how many unit roundoffs a sum of `terms` terms may be off by: `max(1, sqrt(terms) / 4)`.

    The roundings of the partial sums add like a random walk (`conformance.truth.rounding_bounds`).
    """
    return float(max(1.0, np.sqrt(terms) / 4))
