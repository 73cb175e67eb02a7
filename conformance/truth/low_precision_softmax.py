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
    rnd   = u (2 p |dp| + p |D| + 4 |dz|), and err(g) (|dz| + e + row) (capped)                       of one pair
            with err(g) = u (8 tanh^2 + 1), whose product with e and row counts where g is nearly zero
    err D = u |D| + Q(p |dp| (off + 2u)) + share |D|
    out   + Q(p off |v - out|) + 2u |out| + Q(u p v) + p_sink share |out|
    lse   + share
    p     + err(p) + p (share + 2u)                                  of a weight that is returned
    dx    + e,                     e = p |r| off + rnd,  with row = |dz| share + p err D beside it
    dq    + s [Q(e k) + share |sum_j dz k| + err D |k'|]
    dk    + s Q([e + row] q)       dv + Q(p (off + share + 2u) do)

With dropout, `k` is the factor of a probability, and dp includes it. Its two roundings are shared by all pairs, and its
product rounds for each pair: `out + 2u |out| + Q(u p k v)`, `dz + 2u |p (dp - D)|` and `rnd + u p |dp|`.

Quadrature needs small errors. If the logits of a row may be off by so much that its weights change by half or more
(`sum_j p expm1(off)`), its errors are added by magnitude instead, with `err(p)` at most `max(p, 1 - p)`.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from conformance.truth.oracle import Array, HeadGroup
from conformance.truth.roundoff import Roundoff

_MAX_SMALL_CHANGE = 0.5


@dataclasses.dataclass(frozen=True)
class LowPrecisionSoftmax:
    """Errors of one group's softmax if it is computed in the operands' dtype.

    Attributes:
      group: the group.
      u: unit roundoff of the operands' dtype.
      off: error of each logit, `[G, T, S]`.
      share: relative error of each row's sum, `[G, T]`.
      p: err(p), the error of each probability, `[G, T, S]`. In rows that are not `small` it includes `share`.
      small: booleans `[G, T]`, true for rows whose errors are added in quadrature.
    """

    group: HeadGroup
    u: float
    off: Array
    share: Array
    p: Array
    small: Array

    @classmethod
    def of(cls, group: HeadGroup, u: Roundoff) -> LowPrecisionSoftmax | None:
        """Bound the errors of the group's softmax; None if the softmax is in f32."""
        if not u.softmax:
            return None
        sums = [group.x]  # the logit after each term is added, the final logit first
        for term in reversed(group.terms):
            sums.append(sums[-1] - term.value)
        before_cap = (2 + len(group.head_factors)) * np.abs(sums.pop())  # the product, the scale and other factors
        for term in group.terms:
            if roundings := term.rounding.integers + term.rounding.products:
                before_cap = before_cap + roundings * np.abs(term.value)
            before_cap = before_cap + np.abs(sums.pop())
        off = group.cap_derivative * before_cap + np.abs(group.z)
        if group.soft_cap is not None:
            off = off + 4.0 * np.abs(group.capped)
        after = group.capped  # the logit after each later term is added
        for term in group.later_terms:
            after = after + term.value
            roundings = term.rounding.integers + term.rounding.products
            off = off + roundings * np.abs(term.value) + np.abs(after)
        off = np.where(group.allowed, u.softmax * (off + np.abs(group.z - group.pivot[..., None]) + 1), 0.0)
        share = 2 * u.softmax + _sum_in_quadrature(group.p * off)
        if group.sinks is not None:
            sink = group.sinks[:, None]
            share = share + group.p_sink * u.softmax * (2 * np.abs(sink) + np.abs(sink - group.pivot) + 1)
        grown = group.p * np.expm1(np.minimum(off, 50.0))
        small = grown.sum(axis=-1) < _MAX_SMALL_CHANGE
        share = np.where(small, share, (group.p * off).sum(axis=-1) + share)
        p = np.where(small[..., None], grown, group.p * np.expm1(np.minimum(off + share[..., None], 50.0)))
        return cls(group, u.softmax, off, share, np.minimum(p, np.maximum(group.p, 1 - group.p)), small)

    @property
    def drops(self) -> bool:
        """Whether the group has dropout: its factors are then an array."""
        return not isinstance(self.group.dropout, float)

    def bound_weights(self) -> Array:
        """Bound what the softmax adds to the error of each weight, `[G, T, S]`: its own, the sum, two roundings."""
        return self.p + self.group.p * (self.share[..., None] + 2 * self.u)

    @property
    def out(self) -> Array:
        """What the softmax adds to the error of `out`, `[G, T, V]`."""
        group, by_pair = self.group, self._squares(self.p)
        p2, v2, out2 = group.averaging**2, group.v**2, group.out**2
        dropped = group.drop(by_pair)
        moved = (
            group.drop(dropped) @ v2 - 2 * group.out * (dropped @ group.v) + out2 * by_pair.sum(axis=-1, keepdims=True)
        )
        found = np.sqrt(2 * np.maximum(moved, 0.0)) + group.drop(self._magnitudes(self.p)) @ np.abs(group.v)
        rounded = (2 + 2 * self.drops) * self.u * np.abs(group.out)
        rounded = rounded + (1 + self.drops) * self.u * np.sqrt(2 * (p2 @ v2))
        return found + rounded + (group.p_sink * self.share)[..., None] * np.abs(group.out)

    def backward(self, do: Array, dp: Array, d: Array, dlse: Array) -> SoftmaxGradientErrors:
        """Bound what the softmax adds to the errors of gradients.

        Args:
          do: cotangent of `out`, `[G, T, V]`.
          dp: `<do_i, v_j>`, `[G, T, S]`.
          d: D of each row, `[G, T]`.
          dlse: cotangent of `logsumexp`, `[G, T]`.
        """
        group, u = self.group, self.u
        r = dp - d[..., None] + dlse[..., None]
        dz = group.p * r
        pair = self.p * np.abs(r) + u * (
            group.p * ((2 + self.drops) * np.abs(dp) + np.abs(d)[..., None]) + 3 * np.abs(dz)
        )
        err_d = u * np.abs(d) + self.share * np.abs(d)
        by_key = (self.p + 2 * u * group.p) * np.abs(dp)
        err_d = err_d + np.where(self.small, _sum_in_quadrature(by_key), by_key.sum(axis=-1))
        row = np.abs(dz) * self.share[..., None] + group.p * err_d[..., None]
        g = group.cap_derivative
        err_g = 0.0 if group.tanh is None else u * (8 * group.tanh**2 + 1)
        err_dz = pair + row + u * np.abs(dz)
        pair, row = g * (pair + u * np.abs(dz)) + err_g * (np.abs(dz) + pair + row), g * row
        shared = self.share[..., None] * np.abs((g * dz) @ group.k) + err_d[..., None] * np.abs((g * group.p) @ group.k)
        dq = np.sqrt(2 * (self._squares(pair) @ group.k**2)) + self._magnitudes(pair) @ np.abs(group.k) + shared
        both = pair + row
        p_both = group.drop(self.p) + group.averaging * (self.share[..., None] + (2 + self.drops) * u)
        dk = self._over_rows(both, group.q)
        dv = self._over_rows(p_both, do)
        err_dsink = group.p_sink * (self.share + 4 * u) * np.abs(d - dlse) + group.p_sink * err_d
        if self.drops:  # the factor of dropout is off by the same share in all rows
            moved = group.p * (dp - d[..., None])
            dq = dq + 2 * u * np.abs((g * moved) @ group.k)
            dk = dk + 2 * u * np.abs((g * moved).transpose(0, 2, 1) @ group.q)
            dv = dv + 2 * u * np.abs(group.averaging.transpose(0, 2, 1) @ do)
            both, err_dz = both + 2 * u * np.abs(g * moved), err_dz + 2 * u * np.abs(moved)
            err_dsink = err_dsink + 2 * u * group.p_sink * np.abs(d)
        return SoftmaxGradientErrors(group.abs_scale * dq, group.abs_scale * dk, dv, both, err_dz, err_dsink)

    def _squares(self, x: Array) -> Array:
        """Return the squares of errors `x [G, T, S]` in rows that are added in quadrature, and 0 in other rows."""
        return np.where(self.small[..., None], x, 0.0) ** 2

    def _magnitudes(self, x: Array) -> Array:
        """Return errors `x [G, T, S]` in rows whose errors are summed as absolute values, and 0 in other rows."""
        return np.where(self.small[..., None], 0.0, x)

    def _over_rows(self, x: Array, y: Array) -> Array:
        """Bound the errors of `x^T y`, `[G, S, .]`, from errors `x [G, T, S]` and factors `y [G, T, .]`.

        The errors of different rows are added in quadrature, or by magnitude for rows that are not `small`.
        """
        squares, magnitudes = (z.transpose(0, 2, 1) for z in (self._squares(x), self._magnitudes(x)))
        return np.sqrt(2 * (squares @ y**2)) + magnitudes @ np.abs(y)


@dataclasses.dataclass(frozen=True)
class SoftmaxGradientErrors:
    """Errors that a softmax in the operands' dtype adds to gradients. dk and dv are by query head, dsink by row."""

    dq: Array
    dk: Array
    dv: Array
    dx: Array
    dz: Array
    dsink: Array


def _sum_in_quadrature(x: Array) -> Array:
    """Add errors in quadrature over the last axis."""
    return np.sqrt(2 * (x**2).sum(axis=-1))
