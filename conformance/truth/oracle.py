"""Attention in float64: the truth that implementations are compared with.

Plain NumPy, straight from the mathematics (docs/contract.md, section 2), one key/value head of one batch row (a `Slab`)
at a time so that memory stays at a few `[G, T, S]` arrays. It shares no code with any implementation and never looks at
keys and values that nobody may attend to.

Both reference backward passes are here. They differ only in where `D` comes from: `"vanilla"` takes
`D_i = sum_j p_ij dp_ij`, as differentiating the forward pass does; `"flash"` takes `D_i = <out_i, do_i>` and
`p = exp(z - logsumexp)` from saved `out` and `logsumexp` (Dao et al., arXiv:2205.14135, section 3.1 and appendix B).
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
    """One key/value head `kv_head` of batch row `batch`, and the group of query heads `heads` that reads it."""

    batch: int
    kv_head: int
    heads: slice
    q: Array  # [G, T, H]
    k: Array  # [S, H]
    v: Array  # [S, V]
    allowed: Array  # [G, T, S]
    bias: Array | None  # [G, T, S]
    alibi: Array | None  # what ALiBi adds, [G, T, S]
    score: Array | None  # what a score by formula adds, [G, T, S]
    sinks: Array | None  # [G]
    soft_cap: float | Array | None  # [G, T, S] by formula
    scale: float
    empty_rows: EmptyRows

    @functools.cached_property
    def x(self) -> Array:
        """Logits before the soft cap, `[G, T, S]`."""
        x = self.scale * (self.q @ self.k.T)
        for added in (self.bias, self.alibi, self.score):
            x = x if added is None else x + added
        return x

    @functools.cached_property
    def tanh(self) -> Array | None:
        """`tanh(x / soft_cap)`, none without a cap."""
        return None if self.soft_cap is None else np.tanh(self.x / self.soft_cap)

    @functools.cached_property
    def z(self) -> Array:
        """Capped logits, `[G, T, S]`, not masked."""
        return self.x if self.tanh is None or self.soft_cap is None else self.soft_cap * self.tanh

    @functools.cached_property
    def cap_derivative(self) -> Array | float:
        """`dz/dx = 1 - tanh^2`, 1 without a cap."""
        return 1.0 if self.tanh is None else 1 - self.tanh**2

    @functools.cached_property
    def max_logits(self) -> Array:
        """`[G, T]`, -inf for empty rows."""
        return np.max(self.z, axis=-1, where=self.allowed, initial=-np.inf)

    @functools.cached_property
    def pivot(self) -> Array:
        """The finite maximum that logits are shifted by, `[G, T]`; the sink takes part."""
        pivot = self.max_logits if self.sinks is None else np.maximum(self.max_logits, self.sinks[:, None])
        return np.where(np.isfinite(pivot), pivot, 0.0)

    @functools.cached_property
    def weights(self) -> Array:
        """`exp(z - pivot)`, 0 where not allowed, `[G, T, S]`."""
        shifted = np.where(self.allowed, self.z - self.pivot[..., None], -np.inf)
        return np.exp(shifted)

    @functools.cached_property
    def logsumexp(self) -> Array:
        """`[G, T]`, sink included; -inf for empty rows with no sink."""
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
        """Probability of the sink, `[G, T]`; zeros without one."""
        if self.sinks is None:
            return np.zeros(self.logsumexp.shape)
        return np.exp(self.sinks[:, None] - self.logsumexp)

    @functools.cached_property
    def averaging(self) -> Array:
        """`p`, with `1 / S` in empty rows if those are declared to give the mean of v (a sink would absorb them)."""
        if self.empty_rows == "zero" or self.sinks is not None:
            return self.p
        empty = ~self.allowed.any(axis=-1, keepdims=True)
        return np.where(empty, 1 / self.k.shape[0], self.p)

    @functools.cached_property
    def out(self) -> Array:
        """`[G, T, V]`."""
        return self.averaging @ self.v

    def only(self, rows: Array) -> Slab:
        """The slab with these queries alone."""
        names = ("q", "allowed", "bias", "alibi", "score", "soft_cap")
        found = {name: getattr(self, name) for name in names}
        cut: dict[str, Any] = {name: x[:, rows] for name, x in found.items() if isinstance(x, np.ndarray)}
        return dataclasses.replace(self, **cut)

    def dp(self, do: Array) -> Array:
        """`<do_i, v_j>`, `[G, T, S]`."""
        return do @ self.v.T


@dataclasses.dataclass(frozen=True)
class Forward:
    """`out [B, T, N, V]`; `logsumexp`, `max_logits` `[B, N, T]`."""

    out: Array
    logsumexp: Array
    max_logits: Array


# Its exponential is zero, as that of minus infinity is, and what is multiplied by zero stays a number.
_NO_SINK = -1e30


def iter_slabs(problem: Problem, empty_rows: EmptyRows = "zero") -> Iterator[Slab]:
    """The problem cut into its key/value heads, in float64; operands behind the mask become zeros."""
    batch, _, num_q_heads, _ = problem.q.shape
    num_kv_heads = problem.k.shape[2]
    group = num_q_heads // num_kv_heads
    full = (batch, num_q_heads, problem.q.shape[1], problem.k.shape[1])
    allowed = np.broadcast_to(problem.allowed, full)
    bias = None if problem.bias is None else np.broadcast_to(problem.bias.astype(np.float64), full)
    caps = problem.soft_caps
    if bias is not None and caps is None:
        # A cap would make it finite. Without one it hides the key, and nothing of it is left to be rounded.
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
    """`out`, `logsumexp` and `max_logits` in float64 (contract, section 2)."""
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
    """Gradients `dq dk dv` and, where the problem has the operand, `dsinks dbias`, in float64.

    Where values are the first coordinates of the keys (`Problem.tied`), `dk` is the gradient of both, and there is no
    `dv`.

    Args:
      problem: the operands.
      do: cotangent of `out`, `[B, T, N, V]`.
      dlse: cotangent of `logsumexp`, `[B, N, T]`, or none.
      form: where `D` and `p` come from (module docstring).
      saved: for `form="flash"`, the saved `out` and `logsumexp`, possibly an implementation's own and rounded ones;
        the exact ones by default.
      empty_rows: what rows that may attend to nothing return, as in `forward`.
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
            with np.errstate(over="ignore"):  # what a wrong kernel saved may be anything
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
    """Gradients of values that are the first coordinates of keys, `[B, S, K, V]`, as they reach these `depth` ones."""
    return np.pad(dv, ((0, 0), (0, 0), (0, 0), (0, depth - dv.shape[-1])))


@dataclasses.dataclass(frozen=True)
class Gradients:
    """Accumulators in the operands' shapes; slabs add their parts."""

    arrays: Mapping[str, Array]

    @classmethod
    def zeros(cls, problem: Problem) -> Gradients:
        """Zeros for every operand that the problem has."""
        operands = {gradient: getattr(problem, name) for name, gradient in GRADIENT_OF.items()}
        return cls({gradient: np.zeros(x.shape) for gradient, x in operands.items() if x is not None})

    def add(
        self, slab: Slab, *, dq: Array, dk: Array, dv: Array, dsinks: Array, dx: Array, rows: Rows = slice(None)
    ) -> None:
        """Add one slab's parts: dq `[G, T, H]`, dk `[S, H]`, dv `[S, V]`, dsinks `[G]`, dx `[G, T, S]`.

        `rows` says which queries of the operands the slab holds.
        """
        self.arrays["dq"][slab.batch, rows, slab.heads] += dq.transpose(1, 0, 2)
        self.arrays["dk"][slab.batch, :, slab.kv_head] += dk
        self.arrays["dv"][slab.batch, :, slab.kv_head] += dv
        if "dsinks" in self.arrays:
            self.arrays["dsinks"][slab.heads] += dsinks
        if "dbias" in self.arrays:
            _add_broadcast(self.arrays["dbias"], slab, dx, rows)


def _add_broadcast(total: Array, slab: Slab, dx: Array, rows: Rows) -> None:
    """Add `dx [G, T, S]` into `total`, of the bias's shape, summing over its broadcast axes."""
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
