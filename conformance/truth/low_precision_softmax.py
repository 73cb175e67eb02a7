"""Bound the errors that a softmax in the operands' dtype (bf16, f16) adds to `conformance.truth.rounding_bounds`.

Every logit, weight and probability rounds by itself, up to `u` of the operands' dtype. So does each product of the
backward pass. Added by magnitude, hundreds of such roundings would hide a result of zeros. They are independent from
one pair to the next, so they are added in quadrature: `Q(x) = sqrt(2 sum x^2)`. That is 3.3 standard deviations if
every rounding is as large as it can be. Errors that a whole row shares (of the rounded sum, and of D) are added by
magnitude to dq, and in quadrature over the rows to dk and dv. The notation is that of
`conformance.truth.rounding_bounds`, with `k' = sum_j p k`. `y` is the logit before terms are added, `y_t` the logit
after term `t`, and `r_t` the number of roundings of the term itself.

    off   = g u ((2 + n_f) |y| + sum_t (r_t |t| + |y_t|) + 4 |c| (capped)) + u (|z| + |z - m| + 1)      of one logit
            + u sum_t (r_t |t| + |z_t|)                                  with terms t that are added after the cap, to c
    share = 2u + Q(p off) + p_sink u (2 |sink| + |sink - m| + 1)                                     of the row's sum
    rnd   = u (2 p |dp| + p |D| + 4 |dz|), and u (8 tanh^2 + 1) |dz| (capped)                         of one pair
    err D = u |D| + Q(p |dp| (off + 2u)) + share |D|
    out   + Q(p off |v - out|) + 2u |out| + Q(u p v) + p_sink share |out|
    lse   + share
    dx    + e,                     e = p |r| off + rnd,  with row = |dz| share + p err D beside it
    dq    + s [Q(e k) + share |sum_j dz k| + err D |k'|]
    dk    + s Q([e + row] q)       dv + Q(p (off + share + 2u) do)

Quadrature needs small errors. If the logits of a row may be off by so much that its weights change by half or more
(`sum_j p expm1(off)`), its errors are added by magnitude instead, with `err(p)` at most `max(p, 1 - p)`.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from conformance.truth.oracle import Array, Slab
from conformance.truth.roundoff import Roundoff

_MAX_SMALL_CHANGE = 0.5


@dataclasses.dataclass(frozen=True)
class LowPrecisionSoftmax:
    """Errors of one slab's softmax if it is computed in the operands' dtype.

    Attributes:
      slab: the slab.
      u: unit roundoff of the operands' dtype.
      off: error of each logit, `[G, T, S]`.
      share: relative error of each row's sum, `[G, T]`.
      p: err(p), the error of each probability, `[G, T, S]`. In rows that are not `small` it includes `share`.
      small: booleans `[G, T]`, true for rows whose errors are added in quadrature.
    """

    slab: Slab
    u: float
    off: Array
    share: Array
    p: Array
    small: Array

    @classmethod
    def of(cls, slab: Slab, u: Roundoff) -> LowPrecisionSoftmax | None:
        """Bound the errors of the slab's softmax; None if the softmax is in f32."""
        if not u.softmax:
            return None
        sums = [slab.x]  # the logit after each term is added, the final logit first
        for term in reversed(slab.terms):
            sums.append(sums[-1] - term.value)
        before_cap = (2 + len(slab.head_factors)) * np.abs(sums.pop())  # the product, the scale and other factors
        for term in slab.terms:
            if roundings := term.rounding.integers + term.rounding.products:
                before_cap = before_cap + roundings * np.abs(term.value)
            before_cap = before_cap + np.abs(sums.pop())
        off = slab.cap_derivative * before_cap + np.abs(slab.z)
        if slab.soft_cap is not None:
            off = off + 4.0 * np.abs(slab.capped)
        after = slab.capped  # the logit after each later term is added
        for term in slab.later_terms:
            after = after + term.value
            roundings = term.rounding.integers + term.rounding.products
            off = off + roundings * np.abs(term.value) + np.abs(after)
        off = np.where(slab.allowed, u.softmax * (off + np.abs(slab.z - slab.pivot[..., None]) + 1), 0.0)
        share = 2 * u.softmax + _sum_in_quadrature(slab.p * off)
        if slab.sinks is not None:
            sink = slab.sinks[:, None]
            share = share + slab.p_sink * u.softmax * (2 * np.abs(sink) + np.abs(sink - slab.pivot) + 1)
        grown = slab.p * np.expm1(np.minimum(off, 50.0))
        small = grown.sum(axis=-1) < _MAX_SMALL_CHANGE
        share = np.where(small, share, (slab.p * off).sum(axis=-1) + share)
        p = np.where(small[..., None], grown, slab.p * np.expm1(np.minimum(off + share[..., None], 50.0)))
        return cls(slab, u.softmax, off, share, np.minimum(p, np.maximum(slab.p, 1 - slab.p)), small)

    @property
    def out(self) -> Array:
        """What the softmax adds to the error of `out`, `[G, T, V]`."""
        slab, by_pair = self.slab, self._squares(self.p)
        p2, v2, out2 = slab.averaging**2, slab.v**2, slab.out**2
        moved = by_pair @ v2 - 2 * slab.out * (by_pair @ slab.v) + out2 * by_pair.sum(axis=-1, keepdims=True)
        found = np.sqrt(2 * np.maximum(moved, 0.0)) + self._magnitudes(self.p) @ np.abs(slab.v)
        rounded = 2 * self.u * np.abs(slab.out) + self.u * np.sqrt(2 * (p2 @ v2))
        return found + rounded + (slab.p_sink * self.share)[..., None] * np.abs(slab.out)

    def backward(self, do: Array, dp: Array, d: Array, dlse: Array) -> SoftmaxGradientErrors:
        """Bound what the softmax adds to the errors of gradients.

        Args:
          do: cotangent of `out`, `[G, T, V]`.
          dp: `<do_i, v_j>`, `[G, T, S]`.
          d: D of each row, `[G, T]`.
          dlse: cotangent of `logsumexp`, `[G, T]`.
        """
        slab, u = self.slab, self.u
        r = dp - d[..., None] + dlse[..., None]
        dz = slab.p * r
        pair = self.p * np.abs(r) + u * (slab.p * (2 * np.abs(dp) + np.abs(d)[..., None]) + 3 * np.abs(dz))
        err_d = u * np.abs(d) + self.share * np.abs(d)
        by_key = (self.p + 2 * u * slab.p) * np.abs(dp)
        err_d = err_d + np.where(self.small, _sum_in_quadrature(by_key), by_key.sum(axis=-1))
        row = np.abs(dz) * self.share[..., None] + slab.p * err_d[..., None]
        g = slab.cap_derivative
        slope = 1.0 if slab.tanh is None else g + 8 * slab.tanh**2 + 1
        err_dz = pair + row + u * np.abs(dz)
        pair, row = pair * g + u * slope * np.abs(dz), row * g
        shared = self.share[..., None] * np.abs((g * dz) @ slab.k) + err_d[..., None] * np.abs((g * slab.p) @ slab.k)
        dq = np.sqrt(2 * (self._squares(pair) @ slab.k**2)) + self._magnitudes(pair) @ np.abs(slab.k) + shared
        both, p_both = pair + row, self.p + slab.averaging * (self.share[..., None] + 2 * u)
        dk = self._over_rows(both, slab.q)
        dv = self._over_rows(p_both, do)
        err_dsink = slab.p_sink * (self.share + 4 * u) * np.abs(d - dlse) + slab.p_sink * err_d
        return SoftmaxGradientErrors(slab.abs_scale * dq, slab.abs_scale * dk, dv, both, err_dz, err_dsink)

    def _squares(self, x: Array) -> Array:
        """Return the squares of errors `x [G, T, S]` in rows that are added in quadrature, and 0 in other rows."""
        return np.where(self.small[..., None], x, 0.0) ** 2

    def _magnitudes(self, x: Array) -> Array:
        """Return errors `x [G, T, S]` in rows whose errors are summed as absolute values, and 0 in other rows."""
        return np.where(self.small[..., None], 0.0, x)

    def _over_rows(self, x: Array, y: Array) -> Array:
        """Bound errors of `x^T y [G, S, .]` from errors `x [G, T, S]`, in quadrature over `small` rows."""
        squares, magnitudes = (z.transpose(0, 2, 1) for z in (self._squares(x), self._magnitudes(x)))
        return np.sqrt(2 * (squares @ y**2)) + magnitudes @ np.abs(y)


@dataclasses.dataclass(frozen=True)
class SoftmaxGradientErrors:
    """Errors that a softmax in the operands' dtype adds to gradients: dk and dv by query head, dsink by row."""

    dq: Array
    dk: Array
    dv: Array
    dx: Array
    dz: Array
    dsink: Array


def _sum_in_quadrature(x: Array) -> Array:
    """Add errors in quadrature over the last axis."""
    return np.sqrt(2 * (x**2).sum(axis=-1))
