"""Bound the rounding error of each result, element by element, for the arithmetic that an implementation declares.

For each exact result `y*` the bound `E(y)` says how far a correct implementation's `y` may be from it, to first order.
The ratio `|y - y*| / E(y)` is then around 1 for correct kernels, whatever the shape, the mask, the magnitudes and the
cancellation. So one limit on the ratio judges all of them.

Notation is that of docs/contract.md, section 2: `x` are logits, `z` capped logits, `p` probabilities, `m` the row's
maximum, `g = dz/dx`. docs/numerics.md explains the bounds term by term.

The derivation, with `s|x| = scale sum_d |q||k| + sum |term|` over the added terms (bias, ALiBi, score) and `u` the f32
unit roundoff. `scale` is the magnitude of the fixed scale times the factors by query head, of which there are `n_f`:

    err(x)   = u_prod s|x| + u max(s|x|, 3/4 sqrt(H) max(sqrt(sum_d (scale q k)^2), |x|)) + u |alibi|
               + (n_f u + u_q) scale |q||k|
    err(z)   = g err(x) + u_logits |z| + 4u |c| (capped) + u (|z| + |z - m|)
               + u (|c| + sum |t| + |alibi|)           with c the capped logit, if terms t are added after the cap
    err(l)   = sum_j p err(z) + p_sink u |sink| + gamma(S)                                            (relative)
    err(p)   = p expm1(err(z) + err(l) + 2u), never more than max(p, 1 - p)
    E(lse)   = err(l) + u (|lse| + |m|) + u_residual |lse|
    E(max)   = max_j err(z) + u_residual |max|                       of a head: the largest E(max) of its rows
    E(p)     = err(p) + u_residual p + tiny                          with dropout: k err(p) + (u_residual + u_drop) k p
    E(out)   = sum_j [err(p) + (u_p + u_prod + gamma(S)) p] |v| + u_out |out| + tiny
    err(dp)  = (u_prod + gamma(V)) sum |do||v| + u_p |dp|
    err(D)   = sum_j [(err(p) + (u_p + gamma(S)) p) |dp| + p err(dp)] + sum_d [(u_out + gamma(V)) |o| + tiny] |do|
    err(g)   = (2 / cap) |tanh| g err(x) + (8 tanh^2 + 1) u                                           (capped)
    err(dx)  = (g + err(g)) [err(p) |r| + p (err(dp) + err(D) + u (|dp| + |D| + |dlse|))]
               + |p r| err(g) + (u_p + u_prod + u) |dx| + tiny (1 + |r|)
               with r = dp - D + dlse
    E(dq)    = scale sum_j [err(dx) + gamma(S) |dx|] |k| + (u_out + u_q) |dq| + tiny
               + scale u max(0, m / 2 - gamma(S) / u) sum_j |dx k|    (if do = 0, where m terms are equal)
    E(dk)    = scale sum_i [err(dx) + gamma(GT) |dx|] |q| + u_out (sum over the group of |dk of the head| + |dk|) + tiny
    E(dv)    = sum_i [err(p) + (u_p + u_prod + gamma(GT)) p] |do| + u_out (group sum of |dv| + |dv|) + tiny
    err(ds)  = err(p_sink) |D - dlse| + p_sink (err(D) + u |dlse|)                                    (of one row)
    E(dsink) = 2 sqrt(sum_{b,i} err(ds)^2) + gamma(BT) sum_{b,i} |p_sink (D - dlse)| + u |dsink|
    E(dbias) = sum [err(dx) + gamma(n) |dx|] over the broadcast axes + u_bias |dbias|
               with dz for dx, whose error lacks g and err(g), if the bias is added after the cap
    E(df)    = 2 sqrt(sum_{b,i} (sum_j [err(dx) |y| + |dx| err(y)])^2) + gamma(BTS) sum |dx y| + u |df|
               for a factor f of each query head; y = x / f without added terms is the logit without f
    with dropout, factors k of the probabilities: err(p) k and p k for err(p) and p in E(out) and E(dv), dp k for dp in
               D and dx, and there u_drop (3u, or 3u of the operands' dtype with such logits) more, for the difference
               1 - rate, the factor and its product
    E(dtable) = 2 sqrt(sum_{b,i} (sum_j err(dc))^2) + gamma(TS) sum |dc|' + u |dtable|
               over the pairs with the same entry c of a table that a score function captures, with dc = w dx for a term
               w c, and for a soft cap dc = dz h, h = tanh - (x/c) g, |dc|' = |dz| (|tanh| + |x/c| g),
               err(h) = (2 / c) |x/c| |tanh| g err(x) + u (4 |tanh| + |x/c| (8 tanh^2 + 1 + 5 g) + |h|)
    E(dk)    = E(dk) + E(dv) + u_out |dk + dv|         if the values are the first coordinates of the keys

These terms go beyond the usual first-order bound, for these reasons:

* `gamma(n) = u max(1, sqrt(n) / 4)`. Each partial sum of n terms of one sign rounds by up to u/2, uniformly, and the
  errors add like a random walk, to about 0.23 sqrt(n) u of the sum. If the signs are random, the error stays near u
  times the sum of magnitudes. Measured constants are in `conformance/truth/tolerances.py`.
* `3/4 sqrt(H) max(...)` in `err(x)`. If one coordinate dominates, all partial sums stay near one large value, and every
  step rounds at that size: 0.58 sqrt(H) u of it by root mean square. The extremes of thousands of elements are 4.5
  times the root mean square. With the factor 3/4 they stay at 3.5 times the bound. Sums of random signs keep the
  smaller bound.
* `expm1`, and the cap at `max(p, 1 - p)`. With logits of 1e5 in f32, `err(z)` is no longer small against 1.
* `u_prod` in `E(out)`, `err(dx)` and `E(dv)`. Products in tf32 and bf16 round `p` and `dx` as well as `q` and `k`.
* `u_out` once more over the group. An implementation may round the dk and dv of each head before it sums the group.
* Quadrature over the rows in `E(dsink)` and `E(df)`. Errors of rows are independent. Adding thousands of rows by
  magnitude would hide a gradient that is wrong altogether.
* `err(g)` beside `g` in `err(dx)`, a product of two errors. At the flat end of a cap, `g` is far below the rounding of
  `1 - tanh^2`. If `r` is zero too, as for the only key of a row, all terms of first order vanish. A computed `r` and a
  computed `g` have their roundings, and their product is not zero.
* `tiny` in `err(D)`. A flash backward pass takes D from the stored `out`, which may be subnormal in f16, for instance
  if a sink takes all the weight.
* `tiny |r|` in `err(dx)`. A probability that underflows is off by `tiny`, and is multiplied by `r`.
* A quantised cache adds `u_cache s|x|` to `err(x)` and `u_cache p` to `E(out)`: keys and values round when they are
  multiplied by their scales. Quantisation itself moves them by up to half a step, which counts as an error of the
  operands (`OperandErrors`).
* The underflow floor `tiny` counts only terms that exist. So structural zeros, such as a key that no query sees or the
  bias behind the mask, have a bound of exactly zero and must be exactly zero.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

import numpy as np

from cases.operand_registry import GRADIENT_OF
from cases.operand_values import Cotangent, Problem
from conformance.truth.equal_terms import compute_equal_term_excess
from conformance.truth.low_precision_softmax import LowPrecisionSoftmax, SoftmaxGradientErrors
from conformance.truth.oracle import (
    Array,
    EmptyRows,
    Gradients,
    HeadGroup,
    compute_cap_slope,
    iter_head_groups,
    pad_value_gradient,
    pull_back_factors,
    pull_back_table,
)
from conformance.truth.roundoff import Roundoff, U
from impls.contract.declarations import Arithmetic


@dataclasses.dataclass(frozen=True)
class Bounded:
    """Exact values with an error bound for each element; both arrays are float64 and have the same shape.

    Attributes:
      value: the exact values.
      bound: how far a correct implementation may be from each of them.
    """

    value: Array
    bound: Array


@dataclasses.dataclass(frozen=True)
class OperandErrors:
    """Errors of the operands themselves: how far q, k and v of the implementation may be from those of the problem.

    To first order, an error of an operand adds to every product that the operand enters. With `dq`, `dk` and `dv` for
    the errors of q, k and v, it adds `scale (dq |k| + |q| dk)` to err(x), `sum_j p dv` to E(out), `sum_d |do| dv` to
    err(dp), `scale sum |dx| dk` to E(dq), and `scale sum |dx| dq` to E(dk).

    Attributes:
      dtype: the dtype that the implementation computes in (`f32`, `bf16`, `f16`).
      q: largest error of each query, `[B, T, N, H]`.
      k: largest error of each key, `[B, S, K, H]`.
      v: largest error of each value, `[B, S, K, V]`.
    """

    dtype: str
    q: Array
    k: Array
    v: Array

    def of(self, group: HeadGroup, rows: Array | slice = slice(None)) -> OperandErrors:
        """Select the errors of one group's operands: q `[G, T, H]`, k `[S, H]`, v `[S, V]`.

        Args:
          group: the group.
          rows: which queries of the problem the group holds.
        """
        q = self.q[group.batch, :, group.heads].transpose(1, 0, 2)[:, rows]
        place = (group.batch, slice(None), group.kv_head)
        return OperandErrors(self.dtype, q, self.k[place], self.v[place])


@dataclasses.dataclass(frozen=True)
class Expectation:
    """Exact results with their bounds.

    Attributes:
      forward: `out [B, T, N, V]`, `logsumexp [B, N, T]` and `max_logits [B, N, T]` by name, and the further results
        that were asked for: `head_max_logits [N]`, `weights` and `dropped_weights [B, N, T, S]`.
      gradients: gradients by name (`dq`, `dk`, ...), one mapping for each cotangent, in the order of the cotangents.
    """

    forward: dict[str, Bounded]
    gradients: tuple[dict[str, Bounded], ...]


def compute_expectation(
    problem: Problem,
    arithmetic: Arithmetic,
    cotangents: Sequence[Cotangent] = (),
    *,
    empty_rows: EmptyRows = "zero",
    rounds_out: bool = True,
    inexact: OperandErrors | None = None,
) -> Expectation:
    """Compute the exact results of a problem and their error bounds.

    Args:
      problem: the operands.
      arithmetic: the arithmetic that the implementation declares.
      cotangents: cotangents of the outputs; gradients are computed for each of them.
      empty_rows: what the implementation declares to return for a query that may attend to nothing.
      rounds_out: whether `out` is rounded to the operands' dtype at the end, rather than left in f32.
      inexact: how far the implementation's operands may be from the operands of `problem`; None if they are equal. If
        it is given, the operands of `problem` may be float64.
    """
    u = Roundoff.of(arithmetic, problem, None if inexact is None else inexact.dtype)
    u = u if rounds_out else dataclasses.replace(u, out=U)
    return compute_expectation_for_roundoff(problem, u, cotangents, empty_rows=empty_rows, inexact=inexact)


def compute_expectation_for_roundoff(
    problem: Problem,
    u: Roundoff,
    cotangents: Sequence[Cotangent] = (),
    *,
    empty_rows: EmptyRows = "zero",
    inexact: OperandErrors | None = None,
    further: Collection[str] = (),
) -> Expectation:
    """Compute the exact results of a problem and their error bounds for given unit roundoffs.

    `further` names the further results that are computed too.
    """
    batch, q_length, num_q_heads, _ = problem.q.shape
    rows = (batch, num_q_heads, q_length)
    shapes = {"out": (batch, q_length, num_q_heads, problem.v.shape[-1]), "logsumexp": rows, "max_logits": rows}
    shapes |= {name: (*rows, problem.k.shape[1]) for name in ("weights", "dropped_weights") if name in further}
    forward = {name: Bounded(np.empty(shape), np.empty(shape)) for name, shape in shapes.items()}
    totals = [(Gradients.zeros(problem), Gradients.zeros(problem)) for _ in cotangents]
    for group in iter_head_groups(problem, empty_rows):
        errors = ForwardErrors.of(group, u, None if inexact is None else inexact.of(group))
        _store_forward(forward, group, errors, u)
        for cotangent, (values, bounds) in zip(cotangents, totals, strict=True):
            _add_gradients(values, bounds, group, errors, cotangent, u, inexact)
    if "head_max_logits" in further:
        top = forward["max_logits"]  # the maxima of rows are off by no more than the largest bound of a row
        forward["head_max_logits"] = Bounded(top.value.max(axis=(0, 2)), top.bound.max(axis=(0, 2)))
    return Expectation(
        forward,
        tuple(_finish_gradients(values, bounds, u, tied=problem.tied) for values, bounds in totals),
    )


@dataclasses.dataclass(frozen=True)
class ForwardErrors:
    """Errors of the forward pass inside one group, in the notation of the module docstring.

    Attributes:
      x: err(x), the error of the logits before the soft cap, `[G, T, S]`.
      z: err(z), the error of the logits after the soft cap, `[G, T, S]`; 0 where attending is not allowed.
      total: err(l), the relative error of the softmax's denominator, `[G, T]`.
      p: err(p), `[G, T, S]`.
      p_sink: err(p_sink), `[G, T]`.
      out: E(out) without the final rounding, `[G, T, V]`.
      operands: errors of the group's operands; None if the operands are exact.
      narrow: errors of a softmax in the operands' dtype; None if the softmax is in f32.
    """

    x: Array
    z: Array
    total: Array
    p: Array
    p_sink: Array
    out: Array
    operands: OperandErrors | None
    narrow: LowPrecisionSoftmax | None

    @classmethod
    def of(cls, group: HeadGroup, u: Roundoff, operands: OperandErrors | None) -> ForwardErrors:
        """Bound the errors of one group's forward pass."""
        keys = group.k.shape[0]
        x = bound_logit_errors(group, u)
        if operands is not None:
            x = x + _bound_operand_errors(group, operands)
        z = np.abs(group.z)
        capped = 0.0 if group.soft_cap is None else 4 * u.cap * np.abs(group.capped)
        err_z = (
            group.cap_derivative * x
            + capped
            + _bound_later_terms(group, u)
            + (u.logits + u.exponent) * z
            + u.exponent * np.abs(group.z - group.pivot[..., None])
        )
        err_z = np.where(group.allowed, err_z, 0.0)
        fine = err_z
        if u.coarse:
            coarse = bound_coarse_logits(group, u)
            off = np.where(group.allowed, group.cap_derivative * coarse, 0.0)
            x, err_z = x + coarse, err_z + off
        err_l = (group.p * err_z).sum(axis=-1) + u.gamma(keys)
        err_sink = np.zeros_like(err_l)
        if group.sinks is not None:
            sink = np.abs(group.sinks)[:, None]
            err_l = err_l + group.p_sink * u.exponent * sink
            below = np.abs(group.sinks[:, None] - group.logsumexp)
            err_sink = group.p_sink * np.expm1(np.minimum(err_l + u.exponent * (sink + below + 2), 50.0))
        err_p = _bound_probability_errors(group, err_z + err_l[..., None] + 2 * u.exponent)
        rounding = u.probabilities + u.products + u.cache + u.gamma(keys) + u.bound_block_sums(keys) + u.dropout
        added = rounding * group.averaging + u.tiny * (group.allowed & (group.dropout != 0))
        err_out = (group.drop(err_p) + added) @ np.abs(group.v)
        if group.v_sizes is not None:  # roundings are relative to the parts of which values are sums
            err_out = err_out + added @ (group.v_sizes - np.abs(group.v))
        if u.coarse:
            fine_p = _bound_probability_errors(
                group, fine + (err_l - (group.p * off).sum(axis=-1))[..., None] + 2 * u.exponent
            )
            fine_out = (group.drop(fine_p) + added) @ np.abs(group.v)
            err_out = np.minimum(err_out, fine_out + _bound_out_shift(group, off))
            err_out = err_out + bound_coarse_products(u, np.abs(group.out), group.averaging**2 @ group.v**2)
        if (narrow := LowPrecisionSoftmax.of(group, u)) is not None:
            err_out, err_l = err_out + narrow.out, err_l + narrow.share
            err_sink = err_sink + group.p_sink * np.minimum(narrow.share + 4 * u.softmax, 1.0)
            err_z = err_z + narrow.off
        if operands is not None:
            err_out = err_out + group.averaging @ operands.v
        return cls(x, err_z, err_l, err_p, err_sink, err_out, operands, narrow)


def _bound_probability_errors(group: HeadGroup, exponent: Array) -> Array:
    """Bound err(p), `[G, T, S]`, for exponents that are off by `exponent [G, T, S]`."""
    err_p = group.p * np.expm1(np.minimum(exponent, 50.0))
    return np.minimum(err_p, np.maximum(group.p, 1 - group.p))


def bound_coarse_products(u: Roundoff, size: Array, squares: Array) -> Array:
    """Bound the error of a sum of products whose operands are rounded to fewer bits.

    Args:
      u: the unit roundoffs.
      size: magnitude of the sum.
      squares: sum of the squares of the products.
    """
    return u.coarse * (2 * size + np.sqrt(2 * squares))


def _bound_out_shift(group: HeadGroup, off: Array) -> Array:
    """Bound the error of `out`, `[G, T, V]`, if logits are off by `off [G, T, S]`: by Cauchy-Schwarz over the keys."""
    grown = np.expm1(np.minimum(off, 50.0))
    size = np.sqrt((group.p * grown**2).sum(axis=-1)) * np.exp(np.minimum((group.p * off).sum(axis=-1), 50.0))
    kept = group.drop(group.p)
    variance = group.drop(kept) @ group.v**2 - (kept @ group.v) ** 2
    return size[..., None] * np.sqrt(np.maximum(variance, 0.0))


def bound_logit_errors(group: HeadGroup, u: Roundoff) -> Array:
    """Bound err(x), `[G, T, S]`, except for the errors of rounding q and k to fewer bits (tf32, bf16)."""
    products = group.abs_scale * (np.abs(group.q) @ group.abs_k.T)
    magnitude: Array = products
    rounded_terms: Array | float = 0.0  # terms that round while they are computed
    for term in group.terms:
        magnitude = magnitude + np.abs(term.value)
        if term.rounding.products:
            rounded_terms = rounded_terms + term.rounding.products * np.abs(term.value)
    spread = group.abs_scale * np.sqrt(group.q**2 @ (group.abs_k**2).T)
    running = 0.75 * np.sqrt(group.q.shape[-1]) * np.maximum(spread, np.abs(group.x))
    rounded = u.products * magnitude + u.depth * (np.maximum(magnitude, running) + rounded_terms)
    if group.head_factors:
        rounded = rounded + u.depth * len(group.head_factors) * products
    return rounded + (u.scaled_q + u.cache) * products


def _bound_later_terms(group: HeadGroup, u: Roundoff) -> Array | float:
    """Bound the error of adding the terms after the soft cap, `[G, T, S]`; 0 if there are none."""
    if not group.later_terms:
        return 0.0
    magnitude: Array = np.abs(group.capped)
    for term in group.later_terms:
        magnitude = magnitude + (1 + term.rounding.products) * np.abs(term.value)
    return u.depth * magnitude


def _bound_operand_errors(group: HeadGroup, operands: OperandErrors) -> Array:
    """Bound what the errors of the operands q and k add to err(x), `[G, T, S]`."""
    found: Array = group.abs_scale * (operands.q @ np.abs(group.k).T + np.abs(group.q) @ operands.k.T)
    return found


def bound_coarse_logits(group: HeadGroup, u: Roundoff) -> Array:
    """Bound what rounding q and k to fewer bits (tf32, bf16) adds to err(x), `[G, T, S]`."""
    found: Array = group.abs_scale * bound_coarse_products(u, np.abs(group.q @ group.k.T), group.q**2 @ (group.k**2).T)
    return found


def _store_forward(forward: dict[str, Bounded], group: HeadGroup, errors: ForwardErrors, u: Roundoff) -> None:
    """Write one group's results and their bounds into `forward`, which holds those of the whole problem."""
    out, lse, top = (forward[name] for name in ("out", "logsumexp", "max_logits"))
    out.value[group.batch, :, group.heads] = group.out.transpose(1, 0, 2)
    sees = np.any(group.allowed, axis=-1) | np.any(group.averaging, axis=-1)
    err_out = errors.out + u.out * np.abs(group.out) + u.tiny * sees[..., None]
    out.bound[group.batch, :, group.heads] = err_out.transpose(1, 0, 2)
    finite = np.isfinite(group.logsumexp)
    lse_size = np.abs(np.where(finite, group.logsumexp, 0.0))
    err_lse = errors.total + u.log * (lse_size + np.abs(group.pivot)) + u.residuals * lse_size
    lse.value[group.batch, group.heads] = group.logsumexp
    lse.bound[group.batch, group.heads] = np.where(finite, err_lse, 0.0)
    seen = np.isfinite(group.max_logits)
    top_size = np.abs(np.where(seen, group.max_logits, 0.0))
    top.value[group.batch, group.heads] = group.max_logits
    top.bound[group.batch, group.heads] = errors.z.max(axis=-1) + u.residuals * top_size + u.tiny * seen
    for name, drops in (("weights", False), ("dropped_weights", True)):
        if name in forward:
            weights, bound = _bound_weights(group, errors, u, drops=drops)
            forward[name].value[group.batch, group.heads] = weights
            forward[name].bound[group.batch, group.heads] = bound


def _bound_weights(group: HeadGroup, errors: ForwardErrors, u: Roundoff, *, drops: bool) -> tuple[Array, Array]:
    """Return the weights, `[G, T, S]`, before or after dropout, and their bound: `E(p)` in the module docstring."""
    err_p, weights, tiny = errors.p, group.undropped, u.tiny * group.allowed
    if errors.narrow is not None:
        err_p = err_p + errors.narrow.bound_weights()
    if not drops:
        return weights, err_p + u.residuals * weights + tiny
    dropped = group.averaging
    return dropped, group.drop(err_p) + (u.residuals + u.dropout) * dropped + tiny * (group.dropout != 0)


@dataclasses.dataclass(frozen=True)
class _BackwardErrors:
    """The backward pass of one group for one cotangent, with its errors.

    Attributes:
      dx: gradient of the logits before the soft cap, `[G, T, S]`.
      dz: gradient of the logits after the soft cap, `[G, T, S]`.
      err_dx: err(dx), `[G, T, S]`.
      err_dz: err(dz), `[G, T, S]`.
      err_dsink: err(ds), the error of each row's part of the gradient of the sink, `[G, T]`.
      dsink: each row's part of the gradient of the sink, `[G, T]`.
      live: allowed pairs whose row has a cotangent, booleans `[G, T, S]`.
      narrow: errors that a softmax in the operands' dtype adds; None if the softmax is in f32.
    """

    dx: Array
    dz: Array
    err_dx: Array
    err_dz: Array
    err_dsink: Array
    dsink: Array
    live: Array
    narrow: SoftmaxGradientErrors | None

    @classmethod
    def of(cls, group: HeadGroup, errors: ForwardErrors, do: Array, dlse: Array, u: Roundoff) -> _BackwardErrors:
        """Compute one group's backward pass for `do [G, T, V]` and `dlse [G, T]`, and bound its errors."""
        keys, v_depth = group.v.shape
        p, abs_do = group.p, np.abs(do)
        dp = group.dp(do)
        d = (group.undropped * dp).sum(axis=-1)
        r = dp - d[..., None] + dlse[..., None]
        dz = p * r
        dx = group.cap_derivative * dz
        err_dp = (u.products + u.gamma(v_depth)) * (abs_do @ np.abs(group.v).T)
        if u.coarse:
            err_dp = err_dp + bound_coarse_products(u, np.abs(do @ group.v.T), do**2 @ (group.v**2).T)
        if errors.operands is not None:
            err_dp = err_dp + abs_do @ errors.operands.v.T
        err_dp = group.drop(err_dp) + (u.probabilities + u.dropout) * np.abs(dp)
        err_d = ((errors.p + (u.probabilities + u.gamma(keys)) * p) * np.abs(dp) + p * err_dp).sum(axis=-1)
        err_d += (((u.out + u.gamma(v_depth)) * np.abs(group.out) + u.tiny) * abs_do).sum(axis=-1)
        shift = u.backward * (np.abs(dp) + np.abs(d)[..., None] + np.abs(dlse)[..., None])
        shift = shift + u.base * np.abs(dlse)[..., None]
        err_dz = errors.p * np.abs(r) + p * (err_dp + err_d[..., None] + shift)
        err_g = bound_cap_derivative_errors(group, errors, u)
        err_dx = (group.cap_derivative + err_g) * err_dz + np.abs(dz) * err_g
        live = group.allowed & (do.any(axis=-1) | (dlse != 0))[..., None]
        rounding, tiny = u.probabilities + u.products + u.backward, u.tiny * live * (1 + np.abs(r))
        err_dx, err_dz = err_dx + rounding * np.abs(dx) + tiny, err_dz + rounding * np.abs(dz) + tiny
        err_dsink = errors.p_sink * np.abs(d - dlse) + group.p_sink * (err_d + (u.backward + u.base) * np.abs(dlse))
        narrow = None if errors.narrow is None else errors.narrow.backward(do, dp, d, dlse)
        if narrow is not None:
            err_dsink = err_dsink + narrow.dsink
        return cls(dx, dz, err_dx, err_dz, err_dsink, group.p_sink * (dlse - d), live, narrow)


def bound_cap_derivative_errors(group: HeadGroup, errors: ForwardErrors, u: Roundoff) -> Array | float:
    """Bound err(g), the error of the soft cap's derivative, `[G, T, S]`; 0 without a cap."""
    if group.tanh is None or group.soft_cap is None:
        return 0.0
    tanh = np.abs(group.tanh)
    return (2 / group.soft_cap) * tanh * group.cap_derivative * errors.x + (8 * tanh**2 + 1) * u.cap


def _add_gradients(
    values: Gradients,
    bounds: Gradients,
    group: HeadGroup,
    errors: ForwardErrors,
    cotangent: Cotangent,
    u: Roundoff,
    inexact: OperandErrors | None,
) -> None:
    """Add one group's gradients for one cotangent to `values`, and their bounds to `bounds`."""
    do = cotangent.out[group.batch, :, group.heads].astype(np.float64).transpose(1, 0, 2)  # [G, T, V]
    dlse: Array = np.zeros(group.pivot.shape)
    if cotangent.logsumexp is not None:
        dlse = cotangent.logsumexp[group.batch, group.heads].astype(np.float64)
    rows = np.flatnonzero(do.any(axis=(0, 2)) | dlse.any(axis=0))
    if len(rows) == 0:
        return
    if len(rows) < dlse.shape[1]:
        # Only queries with a cotangent are computed: the others have no gradient, and so no error.
        group, do, dlse = group.only(rows), do[:, rows], dlse[:, rows]
        errors = ForwardErrors.of(group, u, None if inexact is None else inexact.of(group, rows))
    back = _BackwardErrors.of(group, errors, do, dlse, u)
    dk_by_head = group.scale * (back.dx.transpose(0, 2, 1) @ group.q)  # [G, S, H]
    dv_by_head = group.averaging.transpose(0, 2, 1) @ do  # [G, S, V]
    dq = group.scale * (back.dx @ group.k)
    values.add(
        group,
        dq=dq,
        dk=dk_by_head.sum(axis=0),
        dv=dv_by_head.sum(axis=0),
        by_head={
            "dsinks": back.dsink.sum(axis=-1),
            **pull_back_factors(group, back.dx),
            **pull_back_table(group, back.dx, back.dz),
        },
        dx=back.dx,
        dz=back.dz,
        rows=rows,
    )
    num_heads, queries = dlse.shape
    terms = u.gamma(num_heads * queries) + u.bound_block_sums(queries)
    along_keys = u.gamma(group.k.shape[0]) + u.bound_block_sums(group.k.shape[0])
    abs_dx = np.abs(back.dx)
    err_dk = _sum_scaled(group, (back.err_dx + terms * abs_dx).transpose(0, 2, 1) @ np.abs(group.q))
    err_dq = group.abs_scale * ((back.err_dx + along_keys * abs_dx) @ np.abs(group.k))
    if not do.any():
        excess = group.abs_scale * u.sums * compute_equal_term_excess(back.dx, group.k)
        err_dq = err_dq + excess * (abs_dx @ np.abs(group.k))
    if errors.operands is not None:
        err_dk = err_dk + _sum_scaled(group, abs_dx.transpose(0, 2, 1) @ errors.operands.q)
        err_dq = err_dq + group.abs_scale * (abs_dx @ errors.operands.k)
    rounding = u.probabilities + u.products + terms + u.dropout
    err_pv = group.drop(errors.p) + rounding * group.averaging + u.tiny * (back.live & (group.dropout != 0))
    err_dv = (err_pv.transpose(0, 2, 1) @ np.abs(do)).sum(axis=0)
    if u.coarse:
        dx2 = group.scale**2 * back.dx**2
        err_dq = err_dq + bound_coarse_products(u, np.abs(dq), dx2 @ group.k**2)
        err_dk = err_dk + bound_coarse_products(u, np.abs(dk_by_head), dx2.transpose(0, 2, 1) @ group.q**2).sum(axis=0)
        p2 = group.averaging.transpose(0, 2, 1) ** 2
        err_dv = err_dv + bound_coarse_products(u, np.abs(dv_by_head), p2 @ do**2).sum(axis=0)
    err_dx, err_dz = back.err_dx + terms * abs_dx, back.err_dz + terms * np.abs(back.dz)
    if back.narrow is not None:
        err_dq, err_dx, err_dz = err_dq + back.narrow.dq, err_dx + back.narrow.dx, err_dz + back.narrow.dz
        err_dk, err_dv = err_dk + back.narrow.dk.sum(axis=0), err_dv + back.narrow.dv.sum(axis=0)
    by_head = (u.out if num_heads > 1 else 0.0) + u.bound_head_sums(num_heads)
    sink_sum = u.gamma(queries) * np.abs(back.dsink).sum(axis=-1)
    bounds.add(
        group,
        dq=err_dq,
        dk=err_dk + by_head * np.abs(dk_by_head).sum(axis=0),
        dv=err_dv + by_head * np.abs(dv_by_head).sum(axis=0),
        by_head={
            "dsinks": 2 * np.sqrt((back.err_dsink**2).sum(axis=-1)) + sink_sum,
            **{GRADIENT_OF[name]: _bound_factor_gradient(group, name, back, errors, u) for name in group.head_factors},
            **_bound_table_gradient(group, back, errors, u),
        },
        dx=err_dx,
        dz=err_dz,
        rows=rows,
    )


def _sum_scaled(group: HeadGroup, by_head: Array) -> Array:
    """Multiply an array `[G, ...]` by the magnitude of the scale, and sum it over the query heads of the group."""
    if not group.head_factors:  # one scale for all heads, so one product after the sum
        found: Array = group.abs_scale * by_head.sum(axis=0)
        return found
    return np.asarray((group.abs_scale * by_head).sum(axis=0))


def _bound_factor_gradient(
    group: HeadGroup, operand: str, back: _BackwardErrors, errors: ForwardErrors, u: Roundoff
) -> Array:
    """Bound the gradient's error of a factor that differs by query head, `[G]`: `E(df)` in the module docstring."""
    others = group.drop_factor(operand)
    err_logit = bound_logit_errors(others, u)
    if errors.operands is not None:
        err_logit = err_logit + _bound_operand_errors(others, errors.operands)
    if u.coarse:
        err_logit = err_logit + bound_coarse_logits(others, u)
    err_dx = back.err_dx if back.narrow is None else back.err_dx + back.narrow.dx
    by_row = (err_dx * np.abs(others.x) + np.abs(back.dx) * err_logit).sum(axis=-1)
    terms = np.abs(back.dx * others.x)
    return np.asarray(2 * np.sqrt((by_row**2).sum(axis=-1)) + u.gamma(terms[0].size) * terms.sum(axis=(1, 2)))


def _bound_table_gradient(
    group: HeadGroup, back: _BackwardErrors, errors: ForwardErrors, u: Roundoff
) -> dict[str, Array]:
    """Bound the error of the gradient of a captured table, `[L, G]`, by its name: `E(dtable)` in the docstring."""
    table = group.table
    if table is None:
        return {}
    if table.caps:
        assert group.tanh is not None
        slope, err_slope, parts = bound_cap_slope(group, errors, u)
        err_dz = back.err_dz if back.narrow is None else back.err_dz + back.narrow.dz
        err_each, size = err_dz * np.abs(slope) + np.abs(back.dz) * err_slope, np.abs(back.dz) * parts
    else:
        err_dx = back.err_dx if back.narrow is None else back.err_dx + back.narrow.dx
        weights = np.abs(table.weights)
        err_each, size = err_dx * weights, np.abs(back.dx) * weights
    by_row = table.sum_by_row(np.where(group.allowed, err_each + u.backward * size, 0.0))
    sums = table.sum_by_row(size).sum(axis=1)
    rounding = u.gamma(size[0].size) + u.bound_block_sums(size.shape[1])
    return {"dscore_table": (2 * np.sqrt((by_row**2).sum(axis=1)) + rounding * sums).T}


def bound_cap_slope(group: HeadGroup, errors: ForwardErrors, u: Roundoff) -> tuple[Array, Array, Array]:
    """Compute the derivative of the capped logits by the soft cap, its error, and the sum of its parts' magnitudes.

    All three are `[G, T, S]`.
    """
    assert group.tanh is not None
    assert group.soft_cap is not None
    tanh, g = np.abs(group.tanh), group.cap_derivative
    ratio = np.abs(group.x / group.soft_cap)
    slope = compute_cap_slope(group)
    moved = (2 / group.soft_cap) * ratio * tanh * g * errors.x
    rounded = u.cap * (4 * tanh + ratio * (8 * tanh**2 + 1 + 5 * g) + np.abs(slope))
    return slope, moved + rounded, tanh + ratio * g


def _finish_gradients(values: Gradients, bounds: Gradients, u: Roundoff, *, tied: bool) -> dict[str, Bounded]:
    """Add the final rounding to the bounds, except to those that are exactly zero."""
    rounding = {"dq": u.out + u.scaled_q, "dk": u.out, "dv": u.out, "dbias": u.bias}  # other gradients stay in f32
    finished = {}
    for name, value in values.arrays.items():
        bound = bounds.arrays[name]
        finished[name] = Bounded(value, bound + rounding.get(name, u.backward) * np.abs(value) + u.tiny * (bound > 0))
    if tied:
        finished["dk"] = _add_value_gradient(finished["dk"], finished.pop("dv"), u)
    return finished


def _add_value_gradient(dk: Bounded, dv: Bounded, u: Roundoff) -> Bounded:
    """Add the gradient of the values to the gradient of the keys, if the values are the keys' first coordinates.

    An implementation may round each part before it adds them.
    """
    depth, keys = dv.value.shape[-1], dk.value.shape[-1]
    value = dk.value + pad_value_gradient(dv.value, keys)
    added = np.arange(keys) < depth  # only these coordinates are values
    return Bounded(value, dk.bound + pad_value_gradient(dv.bound, keys) + u.out * np.abs(value) * added)
