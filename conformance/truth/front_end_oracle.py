"""Compute a model's front end and its vector-Jacobian product in float64, with bounds for f32.

A front end is what a model applies to the projections before attention: norms, rotary positions, scales. The steps are
written from the definitions in `cases.front_ends`, each with its derivative worked out by hand:

    rms, l2    y = w x', x' = x / r, r = sqrt(mean(x^2) + eps)    dx = (w dy - x' mean(w dy x')) / r,  dw = sum dy x'
    rotary     y = R x                                            dx = R^T dy
    factors    y = s x                                            dx = s dy
    share      y_n = x_1 in the last third, for all heads n       dx_1 = sum_n dy_n there, dx_n = 0 for all others
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from cases.front_ends import (
    EPSILON,
    PRE_SCALE,
    SHARE,
    TEMPERATURE_FLOOR,
    TEMPERATURE_SCALE,
    Raw,
    build_rotation,
    compute_positions,
    compute_temperature,
    list_key_steps,
    slice_last_third,
)
from conformance.truth.oracle import Array
from conformance.truth.rounding_bounds import Bounded
from conformance.truth.roundoff import U
from conformance.truth.running_error import BoundedNumber, replace_last_axis

_NORMS = ("rms", "l2")
_FACTORS = ("prescale", "temperature")


@dataclasses.dataclass(frozen=True)
class Stream:
    """A projection (q or k) before each step of a front end and after all, with positions `[3, L]` and norm weights."""

    steps: tuple[str, ...]
    at: Array
    norm: BoundedNumber | None
    before: tuple[BoundedNumber, ...]
    after: BoundedNumber

    def pull_back(self, cotangent: BoundedNumber) -> tuple[BoundedNumber, BoundedNumber | None]:
        """Compute the gradients of the raw projection and of the norm's weights from a cotangent of `after`."""
        weights: BoundedNumber | None = None
        for step, x in zip(reversed(self.steps), reversed(self.before), strict=True):
            if step in _NORMS:
                root = _compute_norm(x)
                unit = x / root
                if step == "rms" and self.norm is not None:
                    weights = (cotangent * unit).sum_independent(axis=(0, 1, 2))
                    cotangent = cotangent * self.norm
                mean = (cotangent * unit).sum(axis=-1, keepdims=True) / BoundedNumber.exact(x.value.shape[-1])
                cotangent = (cotangent - unit * mean) / root
            elif step in _FACTORS:
                cotangent = cotangent * _compute_factor(step, self.at)
            elif step == SHARE:
                cotangent = _pull_back_shared_head(cotangent)
            else:
                cotangent = _rotate(step, cotangent, self.at, back=True)
        return cotangent, weights


@dataclasses.dataclass(frozen=True)
class FrontEnd:
    """The operands that a front end made from raw projections; `shared` says that the values are the raw keys."""

    q: Stream
    k: Stream
    v: BoundedNumber
    shared: bool

    @classmethod
    def of(cls, steps: tuple[str, ...], raw: Raw) -> FrontEnd:
        """Apply the steps to raw projections."""
        at_q, at_kv = compute_positions(raw.q.shape[1], raw.k.shape[1])
        shared = "shared" in steps
        steps = tuple(step for step in steps if step != "shared")
        return cls(
            q=_apply_steps(steps, raw.q, at_q, raw.q_norm),
            k=_apply_steps(list_key_steps(steps), raw.k, at_kv, raw.k_norm),
            v=BoundedNumber.exact(raw.k if raw.v is None else raw.v),
            shared=shared,
        )

    def pull_back(self, dq: Bounded, dk: Bounded, dv: Bounded, roundoff: float, tiny: float) -> dict[str, Bounded]:
        """Compute the gradients of the raw projections and of the norms' weights.

        Args:
          dq: gradient of q after the front end, with its bound, as attention returns it.
          roundoff: unit roundoff of the dtype in which gradients of projections are stored.
          tiny: underflow of that dtype.

        Returns:
          gradients by name: `q`, `k`, `v` unless the values are the raw keys, and `q_norm` and `k_norm` if there are
          such weights.
        """
        raw_q, q_norm = self.q.pull_back(BoundedNumber(dq.value, dq.bound))
        raw_k, k_norm = self.k.pull_back(BoundedNumber(dk.value, dk.bound))
        found: dict[str, BoundedNumber | None] = {"q": raw_q.stored(roundoff, tiny), "k": raw_k.stored(roundoff, tiny)}
        v = BoundedNumber(dv.value, dv.bound)
        if self.shared:
            # The two gradients of the raw keys are stored before they are added.
            assert found["k"] is not None
            found["k"] = (found["k"] + v).stored(roundoff, tiny)
        else:
            found["v"] = v
        found |= {"q_norm": q_norm, "k_norm": k_norm}
        return {name: Bounded(x.value, x.error) for name, x in found.items() if x is not None}


def _apply_steps(steps: tuple[str, ...], x: Array, at: Array, norm: Any) -> Stream:
    """Apply the steps to one raw projection `[B, L, heads, H]`."""
    weights = None if norm is None else BoundedNumber.exact(norm)
    current = BoundedNumber.exact(x)
    before = []
    for step in steps:
        before.append(current)
        if step in _NORMS:
            current = current / _compute_norm(current)
            current = current * weights if step == "rms" and weights is not None else current
        elif step in _FACTORS:
            current = current * _compute_factor(step, at)
        elif step == SHARE:
            current = _share_first_head(current)
        else:
            current = _rotate(step, current, at, back=False)
    return Stream(steps, at, weights, tuple(before), current)


def _share_first_head(x: BoundedNumber) -> BoundedNumber:
    """Copy the first head's last third of the depth to all heads of `x [B, S, K, H]`."""
    value, error = x.value.copy(), x.error.copy()
    of = slice_last_third(value.shape[-1])
    value[..., of], error[..., of] = value[:, :, :1, of], error[:, :, :1, of]
    return BoundedNumber(value, error)


def _pull_back_shared_head(cotangent: BoundedNumber) -> BoundedNumber:
    """Compute the vector-Jacobian product of `_share_first_head`: the first head gets the sum over all heads."""
    value, error = cotangent.value.copy(), cotangent.error.copy()
    of = slice_last_third(value.shape[-1])
    summed = cotangent[..., of].sum(axis=2)
    value[..., of], error[..., of] = 0, 0
    value[:, :, 0, of], error[:, :, 0, of] = summed.value, summed.error
    return BoundedNumber(value, error)


def _compute_norm(x: BoundedNumber) -> BoundedNumber:
    """Compute the root mean square over the depth, with the epsilon of the norm."""
    mean = (x * x).sum(axis=-1, keepdims=True) / BoundedNumber.exact(x.value.shape[-1])
    return (mean + BoundedNumber.rounded(EPSILON)).sqrt()


def _compute_factor(step: str, at: Array) -> BoundedNumber:
    """Return the factor of a scaling step: one number, or one for each position."""
    if step == "prescale":
        return BoundedNumber.exact(PRE_SCALE)
    value = compute_temperature(at[0])[:, None, None]
    # The error covers the roundings of the logarithm, of its product with the factor, and of the sum.
    return BoundedNumber(
        value, 2 * U * TEMPERATURE_SCALE * np.log1p((at[0].max() + 1) // TEMPERATURE_FLOOR) + U * value
    )


def _rotate(step: str, x: BoundedNumber, at: Array, *, back: bool) -> BoundedNumber:
    """Apply a rotary step, or its transpose if `back`."""
    turn = build_rotation(step, x.value.shape[-1])
    # A power in f32 may come from `exp(y log(base))`, whose argument rounds at its own size.
    frequency = BoundedNumber(turn.frequency, U * turn.frequency * (2 + np.abs(np.log(turn.frequency))))
    angle = BoundedNumber.exact(at[turn.streams].T[:, None, :]) * frequency  # [L, 1, P]
    cos, sin = angle.cos(), angle.sin()
    a, b = x[..., turn.first], x[..., turn.second]
    if back:
        return replace_last_axis(((turn.first, a * cos + b * sin), (turn.second, b * cos - a * sin)), x)
    return replace_last_axis(((turn.first, a * cos - b * sin), (turn.second, b * cos + a * sin)), x)
