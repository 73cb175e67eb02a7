"""Compute attention and its gradients in float64: the oracle that implementations are compared with.

It is plain NumPy, written from the mathematics (docs/contract.md, section 2). It shares no code with any
implementation, and never reads keys and values that no query may attend to. It works on one key/value head of one batch
row at a time (a `Slab`), so memory stays at a few `[G, T, S]` arrays.

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
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np

from cases.operand_registry import GRADIENT_OF
from cases.operand_values import Problem

Array = np.ndarray
Backward = Literal["vanilla", "flash"]
EmptyRows = Literal["zero", "mean"]
Rows = slice | Array


@dataclasses.dataclass(frozen=True)
class Slab:
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
      bias: added to the scaled logits, `[G, T, S]`, or None.
      alibi: what ALiBi adds, `[G, T, S]`, or None.
      score: what a `score_mod` adds, `[G, T, S]`, or None.
      sinks: logits of the sinks, `[G]`, or None.
      soft_cap: a number, `[G, T, S]` if a `score_mod` computes it, or None.
      scale: factor of the products of queries and keys.
      empty_rows: what a query that may attend to nothing returns.
    """

    batch: int
    kv_head: int
    heads: slice
    q: Array
    k: Array
    v: Array
    allowed: Array
    bias: Array | None
    alibi: Array | None
    score: Array | None
    sinks: Array | None
    soft_cap: float | Array | None
    scale: float
    empty_rows: EmptyRows

    @functools.cached_property
    def x(self) -> Array:
        """Logits before the soft cap, not masked, `[G, T, S]`."""
        x = self.scale * (self.q @ self.k.T)
        for added in (self.bias, self.alibi, self.score):
            x = x if added is None else x + added
        return x

    @functools.cached_property
    def tanh(self) -> Array | None:
        """`tanh(x / soft_cap)`, `[G, T, S]`, or None without a cap."""
        return None if self.soft_cap is None else np.tanh(self.x / self.soft_cap)

    @functools.cached_property
    def z(self) -> Array:
        """Logits after the soft cap, not masked, `[G, T, S]`."""
        return self.x if self.tanh is None or self.soft_cap is None else self.soft_cap * self.tanh

    @functools.cached_property
    def cap_derivative(self) -> Array | float:
        """Derivative of the capped logits, `dz/dx = 1 - tanh^2`; 1 without a cap."""
        return 1.0 if self.tanh is None else 1 - self.tanh**2

    @functools.cached_property
    def max_logits(self) -> Array:
        """Largest allowed logit of each row, `[G, T]`; -inf in empty rows."""
        return np.max(self.z, axis=-1, where=self.allowed, initial=-np.inf)

    @functools.cached_property
    def pivot(self) -> Array:
        """Maximum that logits are shifted by, sinks included, `[G, T]`; 0 where it is not finite."""
        pivot = self.max_logits if self.sinks is None else np.maximum(self.max_logits, self.sinks[:, None])
        return np.where(np.isfinite(pivot), pivot, 0.0)

    @functools.cached_property
    def weights(self) -> Array:
        """`exp(z - pivot)`, `[G, T, S]`; 0 where attending is not allowed."""
        shifted = np.where(self.allowed, self.z - self.pivot[..., None], -np.inf)
        return np.exp(shifted)

    @functools.cached_property
    def logsumexp(self) -> Array:
        """Logsumexp of each row, sinks included, `[G, T]`; -inf in empty rows without a sink."""
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
        if self.sinks is None:
            return np.zeros(self.logsumexp.shape)
        return np.exp(self.sinks[:, None] - self.logsumexp)

    @functools.cached_property
    def averaging(self) -> Array:
        """Weights of the values, `[G, T, S]`: `p`, or `1 / S` in empty rows that return the mean of `v`.

        With sinks an empty row is zero: its sink takes all the weight.
        """
        if self.empty_rows == "zero" or self.sinks is not None:
            return self.p
        empty = ~self.allowed.any(axis=-1, keepdims=True)
        return np.where(empty, 1 / self.k.shape[0], self.p)

    @functools.cached_property
    def out(self) -> Array:
        """Output of attention, `[G, T, V]`."""
        return self.averaging @ self.v

    def only(self, rows: Array) -> Slab:
        """Return the slab reduced to some queries, given by their indices."""
        names = ("q", "allowed", "bias", "alibi", "score", "soft_cap")
        found = {name: getattr(self, name) for name in names}
        cut: dict[str, Any] = {name: x[:, rows] for name, x in found.items() if isinstance(x, np.ndarray)}
        return dataclasses.replace(self, **cut)

    def dp(self, do: Array) -> Array:
        """Compute `dp_ij = <do_i, v_j>`, `[G, T, S]`, from a cotangent `do [G, T, V]`."""
        return do @ self.v.T


@dataclasses.dataclass(frozen=True)
class Forward:
    """Results of the forward pass: `out [B, T, N, V]`, `logsumexp [B, N, T]` and `max_logits [B, N, T]`."""

    out: Array
    logsumexp: Array
    max_logits: Array


# Stands for a sink of minus infinity. The exponential is zero too, but products with zero stay finite.
_NO_SINK = -1e30


def iter_slabs(problem: Problem, empty_rows: EmptyRows = "zero") -> Iterator[Slab]:
    """Yield the problem as slabs in float64, one for each batch row and key/value head.

    Keys and values that no query may attend to become zeros, so NaN in them cannot spread.
    """
    batch, _, num_q_heads, _ = problem.q.shape
    num_kv_heads = problem.k.shape[2]
    group = num_q_heads // num_kv_heads
    full = (batch, num_q_heads, problem.q.shape[1], problem.k.shape[1])
    allowed = np.broadcast_to(problem.allowed, full)
    bias = None if problem.bias is None else np.broadcast_to(problem.bias.astype(np.float64), full)
    caps = problem.soft_caps
    if bias is not None and caps is None:
        # Without a cap, a bias of -inf hides the key exactly, so it belongs to the mask and has no rounding error. With
        # a cap the capped logit is finite.
        hidden = np.isneginf(bias)
        allowed, bias = allowed & ~hidden, np.where(hidden, 0.0, bias)
    dead = problem.dead_keys[..., None]
    mean_needs_v = empty_rows == "mean" and problem.sinks is None
    k = np.where(dead, 0, problem.keys)
    v = problem.values if mean_needs_v else np.where(dead, 0, problem.values)
    q = problem.q.astype(np.float64).transpose(0, 2, 1, 3)
    for b in range(batch):
        for h in range(num_kv_heads):
            heads = slice(h * group, (h + 1) * group)
            yield Slab(
                batch=b,
                kv_head=h,
                heads=heads,
                q=q[b, heads],
                k=k[b, :, h],
                v=v[b, :, h],
                allowed=allowed[b, heads],
                bias=None if bias is None else bias[b, heads],
                alibi=None if problem.alibi is None else problem.alibi[heads],
                score=None if problem.score is None else problem.score[b, heads],
                sinks=None if problem.sinks is None else np.maximum(problem.sinks[heads].astype(np.float64), _NO_SINK),
                soft_cap=caps[b, heads] if isinstance(caps, np.ndarray) else caps,
                scale=problem.effective_scale,
                empty_rows=empty_rows,
            )


def compute_forward(problem: Problem, empty_rows: EmptyRows = "zero") -> Forward:
    """Compute `out`, `logsumexp` and `max_logits` in float64 (docs/contract.md, section 2)."""
    batch, q_length, num_q_heads, _ = problem.q.shape
    out = np.empty((batch, q_length, num_q_heads, problem.v.shape[-1]))
    logsumexp = np.empty((batch, num_q_heads, q_length))
    max_logits = np.empty_like(logsumexp)
    for slab in iter_slabs(problem, empty_rows):
        out[slab.batch, :, slab.heads] = slab.out.transpose(1, 0, 2)
        logsumexp[slab.batch, slab.heads] = slab.logsumexp
        max_logits[slab.batch, slab.heads] = slab.max_logits
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
      form: where `D` and `p` come from (module docstring).
      saved: for `form="flash"`, the saved `out` and `logsumexp`, which may be an implementation's rounded results. By
        default they are the exact ones.
      empty_rows: what a query that may attend to nothing returns.
    """
    gradients = Gradients.zeros(problem)
    for slab in iter_slabs(problem, empty_rows):
        do_slab = do[slab.batch, :, slab.heads].astype(np.float64).transpose(1, 0, 2)
        dlse_slab = np.zeros(slab.pivot.shape) if dlse is None else dlse[slab.batch, slab.heads].astype(np.float64)
        dp = slab.dp(do_slab)
        p, p_sink, averaging = slab.p, slab.p_sink, slab.averaging
        if form == "vanilla":
            d = (averaging * dp).sum(axis=-1)
        else:
            out, lse = slab.out, slab.logsumexp
            if saved is not None:
                out = saved.out[slab.batch, :, slab.heads].astype(np.float64).transpose(1, 0, 2)
                lse = saved.logsumexp[slab.batch, slab.heads].astype(np.float64)
            d = (out * do_slab).sum(axis=-1)
            shift = np.where(np.isfinite(lse), lse, 0.0)[..., None]
            with np.errstate(over="ignore"):  # a wrong kernel may have saved any value
                p = np.exp(np.where(slab.allowed, slab.z - shift, -np.inf))
                averaging = np.where(slab.allowed.any(axis=-1, keepdims=True), p, averaging)
                if slab.sinks is not None:
                    p_sink = np.exp(slab.sinks[:, None] - lse)
        dx = slab.cap_derivative * p * (dp - d[..., None] + dlse_slab[..., None])
        gradients.add(
            slab,
            dq=slab.scale * dx @ slab.k,
            dk=slab.scale * np.einsum("gts,gth->sh", dx, slab.q, optimize=True),
            dv=np.einsum("gts,gtv->sv", averaging, do_slab, optimize=True),
            dsinks=(p_sink * (dlse_slab - d)).sum(axis=-1),
            dx=dx,
        )
    found = dict(gradients.arrays)
    if problem.tied:
        found["dk"] = found["dk"] + pad_value_gradient(found.pop("dv"), problem.k.shape[-1])
    return found


def pad_value_gradient(dv: Array, depth: int) -> Array:
    """Pad the gradient of tied values `[B, S, K, V]` with zeros to the depth of the keys, `[B, S, K, depth]`."""
    return np.pad(dv, ((0, 0), (0, 0), (0, 0), (0, depth - dv.shape[-1])))


@dataclasses.dataclass(frozen=True)
class Gradients:
    """Sums of gradients in the shapes of the operands, to which each slab adds its part."""

    arrays: Mapping[str, Array]

    @classmethod
    def zeros(cls, problem: Problem) -> Gradients:
        """Return zeros for every differentiable operand that the problem has."""
        operands = {gradient: getattr(problem, name) for name, gradient in GRADIENT_OF.items()}
        return cls({gradient: np.zeros(x.shape) for gradient, x in operands.items() if x is not None})

    def add(
        self, slab: Slab, *, dq: Array, dk: Array, dv: Array, dsinks: Array, dx: Array, rows: Rows = slice(None)
    ) -> None:
        """Add the parts of one slab.

        Args:
          slab: where the parts belong.
          dq: `[G, T, H]`.
          dk: `[S, H]`.
          dv: `[S, V]`.
          dsinks: `[G]`.
          dx: gradient of the logits, `[G, T, S]`; the bias gets its sum over the axes that it is broadcast along.
          rows: which queries of the problem the slab holds.
        """
        self.arrays["dq"][slab.batch, rows, slab.heads] += dq.transpose(1, 0, 2)
        self.arrays["dk"][slab.batch, :, slab.kv_head] += dk
        self.arrays["dv"][slab.batch, :, slab.kv_head] += dv
        if "dsinks" in self.arrays:
            self.arrays["dsinks"][slab.heads] += dsinks
        if "dbias" in self.arrays:
            _add_broadcast(self.arrays["dbias"], slab, dx, rows)


def _add_broadcast(total: Array, slab: Slab, dx: Array, rows: Rows) -> None:
    """Add `dx [G, T, S]` to `total`, which has the shape of the bias, summed over the bias's broadcast axes."""
    batch = slab.batch if total.shape[0] > 1 else 0
    if total.shape[3] == 1:
        dx = dx.sum(axis=2, keepdims=True)
    if total.shape[2] == 1:
        dx, rows = dx.sum(axis=1, keepdims=True), slice(None)
    if total.shape[1] == 1:
        total[batch, 0, rows] += dx.sum(axis=0)
    else:
        total[batch][slab.heads, rows] += dx


def _replace_infinite(lse: Array) -> Array:
    return np.where(np.isfinite(lse), lse, 0.0)
