"""Compute exact tangents, and derivatives of gradients along a direction, with an error bound for each element.

A direction has a tangent for each operand that moves. With a dot for the derivative along it, and the notation of
docs/numerics.md:

    dot x    = f scale (<dot q, k> + <q, dot k>) + dot f scale <q, k> + dot bias + w dot c
    dot z    = g dot x                                   (and dot bias, if the bias is added after the soft cap)
    dot L    = sum_j p dot z + p_sink dot sink           the tangent of `logsumexp`
    dot p    = p (dot z - dot L)
    dot out  = sum_j (dot p v + a dot v)

Here `w c` is the entry `c` of a captured table times its whole number; an entry that is a soft cap does not move. The
derivatives of the gradients follow by the same rules from `dz = p (dp - D)`. Everything is computed in float64 with
the running error of `running_error`, for one head group of the oracle at a time. `dot x` is a logit too: that of the
vectors `[f dot q, f q, dot f q]` and `[k, dot k, k]`. So its error is that of a logit (`bound_logit_errors`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cases.operand_registry import GRADIENT_OF
from cases.operand_values import Problem
from conformance.truth.oracle import Array, EmptyRows, Gradients, HeadGroup, LogitTerm, iter_head_groups
from conformance.truth.rounding_bounds import (
    Bounded,
    ForwardErrors,
    bound_cap_derivative_errors,
    bound_coarse_logits,
    bound_coarse_products,
    bound_logit_errors,
)
from conformance.truth.roundoff import Roundoff, U
from conformance.truth.running_error import BoundedNumber
from impls.contract.declarations import Arithmetic, Formulas

_ADDED_BY_NAME = ("dq", "dk", "dv", "dx", "dz")  # parameters of `Gradients.add`; all other gradients are by head
Direction = Mapping[str, Array]
"""The tangents of the operands that move, by the operand's name; the others stay."""


def compute_tangents(
    problem: Problem,
    directions: Sequence[Direction],
    arithmetic: Arithmetic,
    formulas: Formulas = Formulas(),
    empty_rows: EmptyRows = "zero",
) -> list[dict[str, Bounded]]:
    """Compute the tangents of `out` and of `logsumexp` along each direction, with their bounds.

    Args:
      problem: the operands, with the declared order of the soft cap and the terms that are added to logits.
      directions: the directions.
      arithmetic: the declared arithmetic, whose softmax is in f32.
      formulas: the declared formulas.
      empty_rows: what the implementation declares to return for a query that may attend to nothing.
    """
    u = Roundoff.of(arithmetic, problem)
    batch, q_length, num_q_heads, _ = problem.q.shape
    shapes = {"out": (batch, q_length, num_q_heads, problem.v.shape[-1]), "logsumexp": (batch, num_q_heads, q_length)}
    found = [{name: Bounded(np.empty(shape), np.empty(shape)) for name, shape in shapes.items()} for _ in directions]
    for group in iter_head_groups(problem, empty_rows):
        errors = ForwardErrors.of(group, u, None)
        without_sink = dataclasses.replace(group, sinks=None)
        for direction, tangents in zip(directions, found, strict=True):
            motion = _move_group(group, problem, direction)
            moved = _MovedGroup.of(group, errors, motion, u)
            out, lse = moved.out, moved.logsumexp
            if group.sinks is not None and not formulas.logsumexp_sink:
                motion = dataclasses.replace(motion, sinks=None)
                lse = _MovedGroup.of(without_sink, ForwardErrors.of(without_sink, u, None), motion, u).logsumexp
            if formulas.logsumexp_base == 2:
                lse = BoundedNumber(lse.value / math.log(2), lse.error / math.log(2)).stored(U, 0.0)
            lse = lse.stored(u.residuals, 0.0)
            tangents["out"].value[group.batch, :, group.heads] = out.value.transpose(1, 0, 2)
            tangents["out"].bound[group.batch, :, group.heads] = out.error.transpose(1, 0, 2)
            tangents["logsumexp"].value[group.batch, group.heads] = lse.value
            tangents["logsumexp"].bound[group.batch, group.heads] = lse.error
    return found


def compute_gradient_tangents(
    problem: Problem, direction: Direction, do: Array, arithmetic: Arithmetic, empty_rows: EmptyRows
) -> dict[str, Bounded]:
    """Compute the derivatives along a direction of the gradients of `<out, do>`, by the gradient's name.

    They are a product of the Hessian matrix of `<out, do>` with the direction. As this matrix is symmetric, they are
    also the gradients of `<dot out, do>`. The bounds hold for f32 operands.
    """
    u = Roundoff.of(arithmetic, problem)
    values, bounds = Gradients.zeros(problem), Gradients.zeros(problem)
    for group in iter_head_groups(problem, empty_rows):
        moved = _MovedGroup.of(group, ForwardErrors.of(group, u, None), _move_group(group, problem, direction), u)
        cotangent = do[group.batch, :, group.heads].astype(np.float64).transpose(1, 0, 2)
        found = moved.differentiate_gradients(cotangent)
        for total, part in ((values, "value"), (bounds, "error")):
            parts = {name: getattr(x, part) for name, x in found.items()}
            by_head = {name: parts.pop(name) for name in tuple(parts) if name not in _ADDED_BY_NAME}
            total.add(group, **parts, by_head=by_head)
    return {
        name: Bounded(x, bounds.arrays[name] + U * np.abs(x) + u.tiny * (bounds.arrays[name] > 0))
        for name, x in values.arrays.items()
    }


@dataclasses.dataclass(frozen=True)
class _Motion:
    """The tangents of one group's operands, zeros for those that stay.

    Attributes:
      q: `[G, T, H]`.
      k: `[S, H]`.
      v: `[S, V]`.
      bias: `[G, T, S]`.
      table: tangent of the term from a captured table, `[G, T, S]`; None without a table, or if it holds soft caps.
      sinks: `[G]`, or None if the group has no sinks.
      factor: tangent of the logit scale, `[G, 1, 1]`.
      biases_last: whether the bias is added after the soft cap.
    """

    q: Array
    k: Array
    v: Array
    bias: Array
    table: Array | None
    sinks: Array | None
    factor: Array
    biases_last: bool


def _move_group(group: HeadGroup, problem: Problem, direction: Direction) -> _Motion:
    """Select the tangents of one group's operands."""

    def get(operand: str) -> Array:
        value = getattr(problem, operand)
        return np.asarray(direction.get(operand, np.zeros(value.shape)), np.float64)

    tokens = (group.batch, slice(None), group.kv_head)
    dead = problem.dead_keys[tokens][:, None]
    k = get("k")[tokens]
    v = k[:, : group.v.shape[-1]] if problem.tied else get("v")[tokens]
    bias = np.zeros(group.allowed.shape)
    if problem.bias is not None:
        full = (problem.q.shape[0], problem.q.shape[2], problem.q.shape[1], problem.k.shape[1])
        bias = np.where(group.allowed, np.broadcast_to(get("bias"), full)[group.batch, group.heads], 0.0)
    table = None
    if group.table is not None and not group.table.caps:
        moved = get("score_table")[:, group.heads].T[:, group.table.entries]
        table = np.where(group.allowed, group.table.weights * moved, 0.0)
    factor = np.zeros((len(group.q), 1, 1))
    return _Motion(
        q=get("q")[group.batch, :, group.heads].transpose(1, 0, 2),
        k=np.where(dead, 0.0, k),
        v=np.where(dead & (group.empty_rows != "mean"), 0.0, v),
        bias=bias,
        table=table,
        sinks=None if group.sinks is None else get("sinks")[group.heads],
        factor=factor if problem.logit_scale is None else get("logit_scale")[group.heads, None, None],
        biases_last=any(term.operand.name == "bias" for term in group.later_terms),
    )


@dataclasses.dataclass(frozen=True)
class _MovedGroup:
    """The tangents of one group's results, in the notation of the module docstring.

    Attributes:
      group: the group.
      motion: the tangents of its operands.
      errors: the errors of its forward pass.
      u: the unit roundoffs.
      x: `dot x`, `[G, T, S]`.
      z: `dot z`, `[G, T, S]`; 0 where attending is not allowed.
      logsumexp: `dot L`, `[G, T]`.
      p: `dot p`, `[G, T, S]`, rounded as probabilities are.
      out: `dot out`, `[G, T, V]`.
    """

    group: HeadGroup
    motion: _Motion
    errors: ForwardErrors
    u: Roundoff
    x: BoundedNumber
    z: BoundedNumber
    logsumexp: BoundedNumber
    p: BoundedNumber
    out: BoundedNumber

    @classmethod
    def of(cls, group: HeadGroup, errors: ForwardErrors, motion: _Motion, u: Roundoff) -> _MovedGroup:
        """Compute the tangents of one group's results, and bound their errors."""
        x = _move_logits(group, motion, u)
        g = _bound_slope(group, errors, u)
        z = x if group.tanh is None else x * g
        if group.tanh is not None:  # the slope may be far below its rounding, so the product of both errors counts
            z = BoundedNumber(z.value, z.error + x.error * g.error + 2 * u.cap * np.abs(z.value))
        if motion.biases_last:
            z = z + BoundedNumber.exact(motion.bias)
        z = BoundedNumber(*(np.where(group.allowed, part, 0.0) for part in (z.value, z.error)))
        z = z.stored(u.logits, 0.0)

        sizes = np.abs(z.value)
        sinks = BoundedNumber.exact(np.zeros((1, 1)) if motion.sinks is None else motion.sinks[:, None])
        # A function may differentiate the pivot: whichever key it is, its tangent is at most the largest of the row.
        pivot = np.maximum(sizes.max(axis=-1), np.abs(sinks.value) * (group.p_sink > 0))
        p, p_sink = BoundedNumber(group.p, errors.p), BoundedNumber(group.p_sink, errors.p_sink)
        sums = u.gamma(group.k.shape[0]) + u.bound_block_sums(group.k.shape[0])
        lse = (p * z).sum(axis=-1) + p_sink * sinks
        lse = BoundedNumber(lse.value, lse.error + (2 * u.backward + sums) * pivot)

        r = z - BoundedNumber(lse.value[..., None], lse.error[..., None] + u.backward * pivot[..., None])
        moved = p * r
        # A kernel may divide by the sum of weights last: it rounds `p dot z` and `p dot L`, not their difference.
        rounding = u.probabilities + u.products + sums
        undivided = rounding * group.p * (sizes + np.abs(lse.value)[..., None])
        underflow = u.tiny * (1 + np.abs(r.value)) * (moved.error > 0)
        moved = BoundedNumber(moved.value, moved.error + undivided + underflow)

        steady = errors.p + (rounding + u.cache) * group.averaging + u.tiny * group.allowed
        out = moved.value @ group.v + group.averaging @ motion.v
        error = moved.error @ np.abs(group.v) + steady @ np.abs(motion.v)
        if u.coarse:
            for weights, values in ((moved.value, group.v), (group.averaging, motion.v)):
                error = error + bound_coarse_products(u, np.abs(weights @ values), weights**2 @ values**2)
        return cls(group, motion, errors, u, x, z, lse, moved, BoundedNumber(out, error).stored(u.out, u.tiny))

    def differentiate_gradients(self, do: Array) -> dict[str, BoundedNumber]:
        """Differentiate the gradients for the cotangent `do [G, T, V]` along the motion.

        Returns:
          `dq [G, T, H]`, `dk [S, H]`, `dv [S, V]`, `dx` and `dz [G, T, S]`, and gradients of operands whose last axis
          is that of the query heads, `[G]` or `[L, G]`, by the gradient's name.
        """
        group, motion, u = self.group, self.motion, self.u
        exact = BoundedNumber.exact
        q, k, v, cotangent = (exact(x) for x in (group.q, group.k, group.v, do))
        moved_q, moved_k, moved_v = (exact(x) for x in (motion.q, motion.k, motion.v))
        p, p_sink = BoundedNumber(group.p, self.errors.p), BoundedNumber(group.p_sink, self.errors.p_sink)

        dp, moved_dp = self._multiply(cotangent, _transpose(v)), self._multiply(cotangent, _transpose(moved_v))
        # `D` may be `<do, out>`, from the stored `out`.
        stored = [(u.out + u.gamma(do.shape[-1])) * np.abs(x) + u.tiny for x in (group.out, self.out.value)]
        d, moved_d = (
            BoundedNumber(total.value, total.error + (size * np.abs(do)).sum(axis=-1))
            for total, size in zip(
                ((p * dp).sum(axis=-1), (self.p * dp + p * moved_dp).sum(axis=-1)), stored, strict=True
            )
        )
        r, moved_r = dp - d[..., None], moved_dp - moved_d[..., None]
        dz, moved_dz = p * r, self.p * r + p * moved_r
        dx, moved_dx = dz, moved_dz
        if group.tanh is not None and group.soft_cap is not None:
            g = _bound_slope(group, self.errors, u)
            tanh = BoundedNumber(group.tanh, group.cap_derivative * self.errors.x / group.soft_cap + 4 * u.cap)
            moved_g = exact(-2 / group.soft_cap) * tanh * g * self.x
            dx, moved_dx = dz * g, moved_dz * g + dz * moved_g
            dx = BoundedNumber(dx.value, dx.error + dz.error * g.error)
            moved_dx = BoundedNumber(moved_dx.value, moved_dx.error + moved_dz.error * g.error)
        scale, moved_scale = exact(group.scale), exact(group.fixed_scale * motion.factor)

        dq = scale * (self._multiply(moved_dx, k) + self._multiply(dx, moved_k))
        dk = self._multiply(_transpose(moved_dx), q) + self._multiply(_transpose(dx), moved_q)
        dk = scale * dk
        if motion.factor.any():
            dq = dq + moved_scale * self._multiply(dx, k)
            dk = dk + moved_scale * self._multiply(_transpose(dx), q)
        dv = self._multiply(_transpose(self.p), cotangent)
        found = {"dq": dq, "dk": dk.sum(axis=0), "dv": dv.sum(axis=0), "dx": moved_dx, "dz": moved_dz}
        if motion.sinks is not None:
            moved_p_sink = p_sink * (exact(motion.sinks[:, None]) - self.logsumexp)
            zero = exact(0.0)
            found["dsinks"] = (zero - moved_p_sink * d - p_sink * moved_d).sum(axis=-1)
        for name in group.head_factors:
            fixed = exact(group.fixed_scale)
            y = fixed * self._multiply(q, _transpose(k))
            moved_y = fixed * (self._multiply(moved_q, _transpose(k)) + self._multiply(q, _transpose(moved_k)))
            found[GRADIENT_OF[name]] = (moved_dx * y + dx * moved_y).sum(axis=(1, 2))
        if motion.table is not None and group.table is not None:
            weights = group.table.weights
            each, off = moved_dx.value * weights, moved_dx.error * np.abs(weights)
            value, error, size = (group.table.sum_by_row(x).sum(axis=1).T for x in (each, off, np.abs(each)))
            rounding = u.backward + u.gamma(weights.size)
            found["dscore_table"] = BoundedNumber(value, error + rounding * size)
        return found

    def _multiply(self, a: BoundedNumber, b: BoundedNumber) -> BoundedNumber:
        """Return the matrix product of `a` and `b`, with the roundings of its products and sums."""
        rounding = self.u.products + self.u.gamma(a.value.shape[-1])
        sizes = np.abs(a.value) @ np.abs(b.value)
        error = a.error @ np.abs(b.value) + np.abs(a.value) @ b.error + rounding * sizes
        if self.u.coarse:
            error = error + bound_coarse_products(self.u, np.abs(a.value @ b.value), a.value**2 @ b.value**2)
        return BoundedNumber(a.value @ b.value, error)


def _move_logits(group: HeadGroup, motion: _Motion, u: Roundoff) -> BoundedNumber:
    """Compute `dot x`, `[G, T, S]`, as the logits of longer vectors, with their errors."""
    factor: Any = math.prod(group.head_factors.values(), start=1.0)
    moved = {"bias": motion.bias, "score_table": motion.table}
    terms = ((term.operand, moved.get(term.operand.name)) for term in group.terms)
    longer = dataclasses.replace(
        group,
        q=np.concatenate([factor * motion.q, factor * group.q, motion.factor * group.q], axis=-1),
        k=np.concatenate([group.k, motion.k, group.k], axis=-1),
        terms=tuple(LogitTerm(operand, value) for operand, value in terms if value is not None),
        later_terms=(),
        soft_cap=None,
        head_factors={name: np.ones_like(x) for name, x in group.head_factors.items()},
    )
    error = bound_logit_errors(longer, u)
    return BoundedNumber(longer.x, error + bound_coarse_logits(longer, u) if u.coarse else error)


def _bound_slope(group: HeadGroup, errors: ForwardErrors, u: Roundoff) -> BoundedNumber:
    """Return the derivative of the capped logits with its error."""
    error = bound_cap_derivative_errors(group, errors, u)
    return BoundedNumber(np.asarray(group.cap_derivative), np.asarray(error))


def _transpose(x: BoundedNumber) -> BoundedNumber:
    """Swap the last two axes."""
    return BoundedNumber(x.value.swapaxes(-1, -2), x.error.swapaxes(-1, -2))
