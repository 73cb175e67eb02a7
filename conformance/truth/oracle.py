"""Compute attention and its gradients in float64: the oracle that implementations are compared with.

It is plain NumPy, written from the mathematics (docs/contract.md, section 2). It shares no code with any
implementation, and never reads keys and values that no query may attend to. It works on one key/value head of one batch
row at a time (a `HeadGroup`), so memory stays at a few `[G, T, S]` arrays.

Both reference backward passes are here. They differ only in where `D` comes from:

- `"vanilla"` takes `D_i = sum_j p_ij dp_ij`, as differentiating the forward pass does.
- `"flash"` takes `D_i = <out_i, do_i>` and `p = exp(z - logsumexp)` from saved `out` and `logsumexp` (Dao et al.,
  arXiv:2205.14135, section 3.1 and appendix B).

Axes: `B` batch rows, `N` query heads, `K` key/value heads, `G` query heads that share a key/value head, `T` queries,
`S` keys, `H` depth of queries and keys, `V` depth of values.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np

from cases.operand import LogitOperand, TermRounding
from cases.operand_registry import GRADIENT_OF
from cases.operand_values import Problem
from cases.score_functions import TableScore

Array = np.ndarray
Backward = Literal["vanilla", "flash"]
EmptyRows = Literal["zero", "mean"]
Rows = slice | Array


@dataclasses.dataclass(frozen=True)
class LogitTerm:
    """A term that an optional operand (bias, ALiBi, score function) adds to the scaled logits of a head group.

    Attributes:
      operand: the operand that the term comes from.
      value: the term, `[G, T, S]`.
      factor: the factor of the operand in the term: 1, or the scale.
    """

    operand: LogitOperand
    value: Array
    factor: float = 1.0

    @property
    def rounding(self) -> TermRounding:
        """The roundings that a kernel may make while it computes the term, before it adds it to the logit."""
        rounding = self.operand.term_rounding
        return rounding if self.factor == 1 else dataclasses.replace(rounding, products=rounding.products + 1)


@dataclasses.dataclass(frozen=True)
class TablePlaces:
    """Where the logits of a head group depend on the table that a score function captures.

    Attributes:
      entries: the row of the table for each pair, `[T, S]`.
      weights: the whole number that the entry is multiplied by, `[T, S]`.
      length: the number of rows of the table, `L`.
      caps: whether the entries are soft caps, and not added to the logits.
    """

    entries: Array
    weights: Array
    length: int
    caps: bool

    @classmethod
    def of(cls, problem: Problem) -> TablePlaces | None:
        """Find the places of a problem's table; None if it has none."""
        score = problem.score_mod
        if not isinstance(score, TableScore):
            return None
        places = score.dense_places(problem.q.shape[1], problem.k.shape[1])
        return cls(*places, length=score.num_entries, caps=score.caps)

    def only(self, rows: Array) -> TablePlaces:
        """Return the places of some queries, given by their indices."""
        return dataclasses.replace(self, entries=self.entries[rows], weights=self.weights[rows])

    def sum_by_row(self, x: Array) -> Array:
        """Sum `x [G, T, S]` over the keys that have the same entry, for each query: `[G, T, L]`."""
        rows = self.entries.shape[0]
        index = (np.arange(rows)[:, None] * self.length + self.entries).ravel()
        sums = [np.bincount(index, each.ravel(), rows * self.length).reshape(rows, self.length) for each in x]
        return np.stack(sums)


@dataclasses.dataclass(frozen=True)
class HeadGroup:
    """One key/value head of one batch row, with the group of query heads that reads it; arrays are float64.

    Quantities that follow from the operands are computed once, when they are first read.

    Attributes:
      batch: index of the batch row.
      kv_head: index of the key/value head.
      heads: indices of the query heads in the group.
      q: queries `[G, T, H]`.
      k: keys `[S, H]`.
      v: values `[S, V]`.
      allowed: which pairs may attend, `[G, T, S]`.
      terms: the terms that operands add to the scaled logits before the soft cap, in the order of addition.
      later_terms: the terms that operands add after the soft cap, in the order of addition.
      sinks: logits of the sinks, `[G]`, or None.
      soft_cap: the soft cap: a number, or `[G, T, S]` if a `score_mod` computes it; None without a cap.
      fixed_scale: factor of the products of queries and keys that is the same for all heads.
      head_factors: further factors, one for each query head, `[G, 1, 1]`, by the name of the operand.
      empty_rows: what `out` is for a query that may attend to no key: zero, or the mean of the values.
      dropout: the factors of the probabilities, `[G, T, S]`: 0 where dropped, else `1 / (1 - rate)`; the number 1
        without dropout.
      k_sizes: the magnitudes of the parts of which keys are sums, `[S, H]`; None if they are no sums.
      v_sizes: the same for values, `[S, V]`.
      table: where the table that a score function captures enters the logits; None without such a function.
    """

    batch: int
    kv_head: int
    heads: slice
    q: Array
    k: Array
    v: Array
    allowed: Array
    terms: tuple[LogitTerm, ...]
    later_terms: tuple[LogitTerm, ...]
    sinks: Array | None
    soft_cap: float | Array | None
    fixed_scale: float
    head_factors: Mapping[str, Array]
    empty_rows: EmptyRows
    dropout: Array | float = 1.0
    table: TablePlaces | None = None
    k_sizes: Array | None = None
    v_sizes: Array | None = None

    @functools.cached_property
    def scale(self) -> Any:
        """The factor of `<q, k>`: a number, or `[G, 1, 1]` where heads differ."""
        return math.prod(self.head_factors.values(), start=self.fixed_scale)

    @functools.cached_property
    def abs_k(self) -> Array:
        """The magnitudes of keys that the roundings of logits are relative to, `[S, H]`."""
        found: Array = np.abs(self.k) if self.k_sizes is None else self.k_sizes
        return found

    @property
    def abs_scale(self) -> Any:
        """The absolute value of `scale`, which the error bounds use."""
        return np.abs(self.scale)

    @functools.cached_property
    def x(self) -> Array:
        """Logits before the soft cap, not masked, `[G, T, S]`."""
        x = self.scale * (self.q @ self.k.T)
        for term in self.terms:
            x = x + term.value
        return x

    @functools.cached_property
    def tanh(self) -> Array | None:
        """`tanh(x / soft_cap)`, `[G, T, S]`, or None without a cap."""
        return None if self.soft_cap is None else np.tanh(self.x / self.soft_cap)

    @functools.cached_property
    def capped(self) -> Array:
        """Logits after the soft cap and before the later terms, not masked, `[G, T, S]`."""
        return self.x if self.tanh is None or self.soft_cap is None else self.soft_cap * self.tanh

    @functools.cached_property
    def z(self) -> Array:
        """Logits after the soft cap and the later terms, not masked, `[G, T, S]`."""
        z = self.capped
        for term in self.later_terms:
            z = z + term.value
        return z

    @functools.cached_property
    def cap_derivative(self) -> Array | float:
        """Derivative of the capped logits, `dz/dx = 1 - tanh^2`; 1 without a cap."""
        return 1.0 if self.tanh is None else 1 - self.tanh**2

    @functools.cached_property
    def max_logits(self) -> Array:
        """Largest logit of each row among its allowed keys, `[G, T]`; -inf in rows without allowed keys."""
        return np.max(self.z, axis=-1, where=self.allowed, initial=-np.inf)

    @functools.cached_property
    def pivot(self) -> Array:
        """The number subtracted from a row's logits before `exp`, `[G, T]`: their maximum, including the sink.

        It is 0 where the maximum is not finite, and in rows that have neither an allowed key nor a sink.
        """
        pivot = self.max_logits if self.sinks is None else np.maximum(self.max_logits, self.sinks[:, None])
        return np.where(np.isfinite(pivot) & (pivot > _NO_SINK), pivot, 0.0)

    @functools.cached_property
    def weights(self) -> Array:
        """`exp(z - pivot)`, `[G, T, S]`; 0 where attending is not allowed."""
        shifted = np.where(self.allowed, self.z - self.pivot[..., None], -np.inf)
        return np.exp(shifted)

    @functools.cached_property
    def logsumexp(self) -> Array:
        """Logsumexp of each row, sinks included, `[G, T]`; -inf in empty rows without a sink or with one of -inf."""
        total = self.weights.sum(axis=-1)
        if self.sinks is not None:
            total = total + np.exp(self.sinks[:, None] - self.pivot)
        with np.errstate(divide="ignore"):
            return self.pivot + np.log(total)

    @functools.cached_property
    def p(self) -> Array:
        """Probabilities of the keys, `[G, T, S]`; zero in empty rows."""
        return self.weights * np.exp(self.pivot - _replace_infinite(self.logsumexp))[..., None]

    @functools.cached_property
    def p_sink(self) -> Array:
        """Probability of the sink, `[G, T]`; zero without sinks."""
        return self.weigh_sinks(self.logsumexp)

    def weigh_sinks(self, logsumexp: Array) -> Array:
        """Compute the probability of the sink from `logsumexp [G, T]`; zero without a sink or with one of -inf."""
        if self.sinks is None:
            return np.zeros(logsumexp.shape)
        sinks = self.sinks[:, None]
        return np.where(sinks > _NO_SINK, np.exp(sinks - np.where(sinks > _NO_SINK, logsumexp, 0.0)), 0.0)

    @functools.cached_property
    def averaging(self) -> Array:
        """Weights of the values in `out`, `[G, T, S]`: `undropped` times the factors of dropout."""
        return self.drop(self.undropped)

    @functools.cached_property
    def undropped(self) -> Array:
        """Weights before dropout, `[G, T, S]`: `p`, or `1 / S` in empty rows that return the mean of `v`.

        With a sink above -inf, the weights of an empty row are zero, since its sink takes all the weight.
        """
        if self.empty_rows == "zero":
            return self.p
        empty = ~self.allowed.any(axis=-1, keepdims=True)
        if self.sinks is not None:
            empty &= (self.sinks <= _NO_SINK)[:, None, None]
        return np.where(empty, 1 / self.k.shape[0], self.p)

    @functools.cached_property
    def out(self) -> Array:
        """Output of attention, `[G, T, V]`."""
        return self.averaging @ self.v

    def only(self, rows: Array) -> HeadGroup:
        """Return the group reduced to some queries, given by their indices."""
        found = {name: getattr(self, name) for name in ("q", "allowed", "soft_cap", "dropout")}
        cut: dict[str, Any] = {name: x[:, rows] for name, x in found.items() if isinstance(x, np.ndarray)}
        for name in ("terms", "later_terms"):
            kept = (dataclasses.replace(term, value=term.value[:, rows]) for term in getattr(self, name))
            cut[name] = tuple(kept)
        if self.table is not None:
            cut["table"] = self.table.only(rows)
        return dataclasses.replace(self, **cut)

    def drop_factor(self, operand: str) -> HeadGroup:
        """Return the group without terms and without the factor of `operand`.

        The logits `x` of the returned group are the derivative of this group's `x` with respect to that factor.
        """
        factors = {name: factor for name, factor in self.head_factors.items() if name != operand}
        return dataclasses.replace(self, head_factors=factors, terms=(), later_terms=())

    def dp(self, do: Array) -> Array:
        """Compute the cotangent of `p`, `<do_i, v_j>` times the factor of dropout, `[G, T, S]`, from `do [G, T, V]`."""
        return self.drop(do @ self.v.T)

    def drop(self, x: Array) -> Array:
        """Multiply an array `[G, T, S]` by the factors of dropout, or return it unchanged without dropout."""
        return x if isinstance(self.dropout, float) else x * self.dropout


@dataclasses.dataclass(frozen=True)
class Forward:
    """Results of the forward pass: `out [B, T, N, V]`, `logsumexp [B, N, T]` and `max_logits [B, N, T]`."""

    out: Array
    logsumexp: Array
    max_logits: Array


# Replaces a sink logit of minus infinity. Its exponential is zero too, but its product with zero is 0 instead of NaN.
# It is far below every finite f32 number, so that it never exceeds another sink.
_NO_SINK = -1e300


def iter_head_groups(problem: Problem, empty_rows: EmptyRows = "zero") -> Iterator[HeadGroup]:
    """Yield the problem as head groups in float64, one for each batch row and key/value head.

    Keys and values that no query may attend to become zeros, so NaN in them cannot spread.
    """
    batch, _, num_q_heads, _ = problem.q.shape
    num_kv_heads = problem.k.shape[2]
    group_size = num_q_heads // num_kv_heads
    full = (batch, num_q_heads, problem.q.shape[1], problem.k.shape[1])
    allowed = np.broadcast_to(problem.allowed, full)
    caps = problem.soft_caps
    later = problem.terms_after_cap if caps is not None else ()
    terms = []
    for operand, value in problem.logit_terms:
        is_capped = caps is not None and operand.name not in problem.terms_after_cap
        if not is_capped and (hidden := np.isneginf(value)).any():
            # Without a cap, a term of -inf hides the key exactly, so it belongs to the mask and has no rounding error.
            # With a cap the capped logit is finite.
            allowed, value = allowed & ~hidden, np.where(hidden, 0.0, value)
        factor = problem.effective_scale if operand.name in problem.scaled_terms else 1.0
        value = value if factor == 1 else value * factor
        terms.append((operand, np.broadcast_to(value, full), factor))
    dead = problem.dead_keys[..., None]
    mean_needs_v = empty_rows == "mean" and (problem.sinks is None or np.isneginf(problem.sinks).any())
    k = np.where(dead, 0, problem.keys)
    v = problem.values if mean_needs_v else np.where(dead, 0, problem.values)
    sizes = problem.sizes_with_zeros
    k_sizes, v_sizes = (None, None) if sizes is None else (np.where(dead, 0, x) for x in sizes)
    q = problem.q.astype(np.float64).transpose(0, 2, 1, 3)
    table = TablePlaces.of(problem)
    kept = None if problem.kept_pairs is None else np.broadcast_to(problem.kept_pairs, full)
    if problem.dropout_rate is not None and kept is None:
        raise ValueError("a problem with a dropout rate needs `kept_pairs`: which weights the implementation keeps")
    for b in range(batch):
        for h in range(num_kv_heads):
            heads = slice(h * group_size, (h + 1) * group_size)
            yield HeadGroup(
                batch=b,
                kv_head=h,
                heads=heads,
                q=q[b, heads],
                k=k[b, :, h],
                v=v[b, :, h],
                allowed=allowed[b, heads],
                terms=tuple(LogitTerm(o, value[b, heads], f) for o, value, f in terms if o.name not in later),
                later_terms=tuple(LogitTerm(o, value[b, heads], f) for o, value, f in terms if o.name in later),
                sinks=None if problem.sinks is None else np.maximum(problem.sinks[heads].astype(np.float64), _NO_SINK),
                soft_cap=caps[b, heads] if isinstance(caps, np.ndarray) else caps,
                fixed_scale=problem.effective_scale,
                head_factors={name: x[heads, None, None] for name, x in problem.head_factors.items()},
                empty_rows=empty_rows,
                dropout=1.0 if kept is None else kept[b, heads] / (1 - (problem.dropout_rate or 0.0)),
                table=table,
                k_sizes=None if k_sizes is None else k_sizes[b, :, h],
                v_sizes=None if v_sizes is None else v_sizes[b, :, h],
            )


def compute_forward(problem: Problem, empty_rows: EmptyRows = "zero") -> Forward:
    """Compute `out`, `logsumexp` and `max_logits` in float64 (docs/contract.md, section 2)."""
    batch, q_length, num_q_heads, _ = problem.q.shape
    out = np.empty((batch, q_length, num_q_heads, problem.v.shape[-1]))
    logsumexp = np.empty((batch, num_q_heads, q_length))
    max_logits = np.empty_like(logsumexp)
    for group in iter_head_groups(problem, empty_rows):
        out[group.batch, :, group.heads] = group.out.transpose(1, 0, 2)
        logsumexp[group.batch, group.heads] = group.logsumexp
        max_logits[group.batch, group.heads] = group.max_logits
    return Forward(out, logsumexp, max_logits)


def compute_backward(
    problem: Problem,
    do: Array,
    dlse: Array | None = None,
    *,
    form: Backward = "vanilla",
    saved: Forward | None = None,
    empty_rows: EmptyRows = "zero",
) -> dict[str, Array]:
    """Compute the gradients `dq`, `dk`, `dv` and, if the problem has the operands, `dsinks` and `dbias`, in float64.

    If values are the first coordinates of the keys (`Problem.tied`), `dk` is the gradient of both and there is no `dv`.

    Args:
      problem: the operands.
      do: cotangent of `out`, `[B, T, N, V]`.
      dlse: cotangent of `logsumexp`, `[B, N, T]`, or None for zeros.
      form: `"vanilla"` or `"flash"`, which says where `D` and `p` come from (see the module docstring).
      saved: for `form="flash"`, the saved `out` and `logsumexp`, which may be an implementation's rounded results. By
        default they are the exact ones.
      empty_rows: what `out` is for a query that may attend to no key: zero, or the mean of the values.
    """
    gradients = Gradients.zeros(problem)
    for group in iter_head_groups(problem, empty_rows):
        do_group = do[group.batch, :, group.heads].astype(np.float64).transpose(1, 0, 2)
        dlse_group = np.zeros(group.pivot.shape) if dlse is None else dlse[group.batch, group.heads].astype(np.float64)
        dp = group.dp(do_group)
        p, p_sink, averaging = group.p, group.p_sink, group.averaging
        if form == "vanilla":
            d = (group.undropped * dp).sum(axis=-1)
        else:
            out, lse = group.out, group.logsumexp
            if saved is not None:
                out = saved.out[group.batch, :, group.heads].astype(np.float64).transpose(1, 0, 2)
                lse = saved.logsumexp[group.batch, group.heads].astype(np.float64)
            d = (out * do_group).sum(axis=-1)
            shift = np.where(np.isfinite(lse), lse, 0.0)[..., None]
            with np.errstate(over="ignore"):  # a wrong kernel may have saved any logsumexp
                p = np.exp(np.where(group.allowed, group.z - shift, -np.inf))
                averaging = np.where(group.allowed.any(axis=-1, keepdims=True), group.drop(p), averaging)
                p_sink = group.weigh_sinks(lse)
        dz = p * (dp - d[..., None] + dlse_group[..., None])
        dx = group.cap_derivative * dz
        gradients.add(
            group,
            dq=group.scale * dx @ group.k,
            dk=_pull_back_keys(group, dx),
            dv=np.einsum("gts,gtv->sv", averaging, do_group, optimize=True),
            by_head={
                "dsinks": (p_sink * (dlse_group - d)).sum(axis=-1),
                **pull_back_factors(group, dx),
                **pull_back_table(group, dx, dz),
            },
            dx=dx,
            dz=dz,
        )
    found = dict(gradients.arrays)
    if problem.tied:
        found["dk"] = found["dk"] + pad_value_gradient(found.pop("dv"), problem.k.shape[-1])
    return found


def pull_back_factors(group: HeadGroup, dx: Array) -> dict[str, Array]:
    """Compute the gradients of the factors that differ by query head, `[G]` each, from the gradient of the logits.

    Args:
      group: the group.
      dx: gradient of the logits, `[G, T, S]`.

    Returns:
      gradients by the gradient's name.
    """
    factors = group.head_factors
    return {GRADIENT_OF[operand]: (dx * group.drop_factor(operand).x).sum(axis=(1, 2)) for operand in factors}


def pull_back_table(group: HeadGroup, dx: Array, dz: Array) -> dict[str, Array]:
    """Compute the gradient of the table that a score function captures, `[L, G]`, by its name.

    Args:
      group: the group.
      dx: gradient of the logits before the soft cap, `[G, T, S]`.
      dz: gradient of the logits after it.
    """
    if group.table is None:
        return {}
    each = dz * compute_cap_slope(group) if group.table.caps else dx * group.table.weights
    return {"dscore_table": group.table.sum_by_row(each).sum(axis=1).T}


def compute_cap_slope(group: HeadGroup) -> Array:
    """Compute the derivative of `c tanh(x / c)` by the soft cap `c`, `tanh(x / c) - (x / c) (1 - tanh(x / c)^2)`."""
    assert group.tanh is not None
    assert group.soft_cap is not None
    slope: Array = group.tanh - group.x / group.soft_cap * group.cap_derivative
    return slope


def _pull_back_keys(group: HeadGroup, dx: Array) -> Array:
    """Compute the gradient of the keys, `[S, H]`, from the gradient `dx [G, T, S]` of the logits."""
    if not group.head_factors:  # one scale for all heads: it is multiplied after the sum, not once for each pair
        dk: Array = group.scale * np.einsum("gts,gth->sh", dx, group.q, optimize=True)
        return dk
    return np.asarray(np.einsum("gts,gth->sh", group.scale * dx, group.q, optimize=True))


def pad_value_gradient(dv: Array, depth: int) -> Array:
    """Pad the gradient of tied values `[B, S, K, V]` with zeros to the depth of the keys, `[B, S, K, depth]`."""
    return np.pad(dv, ((0, 0), (0, 0), (0, 0), (0, depth - dv.shape[-1])))


@dataclasses.dataclass(frozen=True)
class Gradients:
    """Gradients by name, in the shapes of the operands; each group adds its part to them."""

    arrays: Mapping[str, Array]

    @classmethod
    def zeros(cls, problem: Problem) -> Gradients:
        """Return zeros for every differentiable operand that the problem has."""
        operands = {gradient: getattr(problem, name) for name, gradient in GRADIENT_OF.items()}
        return cls({gradient: np.zeros(x.shape) for gradient, x in operands.items() if x is not None})

    def add(
        self,
        group: HeadGroup,
        *,
        dq: Array,
        dk: Array,
        dv: Array,
        by_head: Mapping[str, Array],
        dx: Array,
        dz: Array,
        rows: Rows = slice(None),
    ) -> None:
        """Add one group's gradients to the totals.

        Args:
          group: the group, which says to which batch row and heads the gradients belong.
          dq: gradient of the group's queries, `[G, T, H]`.
          dk: gradient of the group's keys, `[S, H]`.
          dv: gradient of the group's values, `[S, V]`.
          by_head: gradients of operands whose last axis is that of the query heads, `[G]` or `[L, G]`, by the
            gradient's name.
          dx: gradient of the logits before the soft cap, `[G, T, S]`. The gradient of a term that is added there is
            `dx`, summed over the axes along which the term is broadcast.
          dz: gradient of the logits after the soft cap, `[G, T, S]`, for terms that are added there.
          rows: which queries of the problem the group holds.
        """
        self.arrays["dq"][group.batch, rows, group.heads] += dq.transpose(1, 0, 2)
        self.arrays["dk"][group.batch, :, group.kv_head] += dk
        self.arrays["dv"][group.batch, :, group.kv_head] += dv
        for name, gradient in by_head.items():
            if name in self.arrays:
                self.arrays[name][..., group.heads] += gradient
        for terms, gradient in ((group.terms, dx), (group.later_terms, dz)):
            for term in terms:
                if term.operand.gradient in self.arrays and term.operand.gradient not in by_head:
                    scaled = gradient if term.factor == 1 else gradient * term.factor
                    _add_broadcast(self.arrays[term.operand.gradient], group, scaled, rows)


def _add_broadcast(total: Array, group: HeadGroup, dx: Array, rows: Rows) -> None:
    """Add `dx [G, T, S]`, summed over the axes that a term is broadcast along, to the term's gradient `total`."""
    batch = group.batch if total.shape[0] > 1 else 0
    if total.shape[3] == 1:
        dx = dx.sum(axis=2, keepdims=True)
    if total.shape[2] == 1:
        dx, rows = dx.sum(axis=1, keepdims=True), slice(None)
    if total.shape[1] == 1:
        total[batch, 0, rows] += dx.sum(axis=0)
    else:
        total[batch][group.heads, rows] += dx


def _replace_infinite(lse: Array) -> Array:
    """Replace entries that are not finite by 0."""
    return np.where(np.isfinite(lse), lse, 0.0)


def compute_weights(problem: Problem, empty_rows: EmptyRows = "zero") -> Array:
    """Compute the weights of the values before dropout, `[B, N, T, S]`."""
    problem = dataclasses.replace(problem, dropout_rate=None, kept_pairs=None)
    batch, q_length, num_q_heads, _ = problem.q.shape
    weights = np.empty((batch, num_q_heads, q_length, problem.k.shape[1]))
    for group in iter_head_groups(problem, empty_rows):
        weights[group.batch, group.heads] = group.undropped
    return weights
