"""Attention of one device's queries to some keys, under one of several masks that is selected at run time."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from cases.masks import Mask
from impls.varying_axes import find_varying_axes, mark_varying

Kernel = Callable[..., Any]
"""An attention function with the contract's arguments and a differentiable `logsumexp` (docs/contract.md, section 1).

It is called with `save_residuals=True`.
"""


class Operands(NamedTuple):
    """Arrays of one call, in the shapes of the contract. All except q, k and v may be None."""

    q: Any  # [B, T, N, H]
    k: Any  # [B, S, K, H]
    v: Any  # [B, S, K, V]
    bias: Any  # [b, n, t, s]
    sinks: Any  # [N]
    segment_ids: Any  # ([B, T], [B, S])


class Outputs(NamedTuple):
    """Results of one call: attention of this device's queries to some of the keys, f32."""

    out: Float32[Array, "B T N V"]
    logsumexp: Float32[Array, "B N T"]
    max_logits: Float32[Array, "B N T"]


Cotangents = Callable[[Outputs], tuple[jax.Array, jax.Array]]
"""Computes the cotangents of `out` and `logsumexp` from the results."""


@dataclasses.dataclass(frozen=True)
class LocalAttention:
    """A kernel with its static operands, and the masks that may be selected. A mask of None hides every pair.

    Each pass is one `switch` with a kernel for each mask. The backward pass recomputes the results and differentiates
    the kernel inside the selected branch. Differentiating the `switch` itself would save the residuals of every branch.

    With `wide`, the kernel gets q, k and v in f32, so that its results and gradients are f32 too. This is needed where
    results are summed over several calls: rounding each result to bf16 loses more with more calls (ring-flash-attention
    issue 42).
    """

    kernel: Kernel
    masks: tuple[Mask | None, ...]
    soft_cap: float | None
    scale: float | None
    wide: bool = False

    def forward(self, index: Any, operands: Operands) -> Outputs:
        """Compute the results under the mask `masks[index]`."""
        return self._switch(index, [functools.partial(self._call, mask) for mask in self.masks], operands)

    def backward(self, index: Any, operands: Operands, cotangents: Cotangents) -> Operands:
        """Compute the gradients of the operands, except segment ids, under the mask `masks[index]`; f32 with `wide`."""

        def branch(mask: Mask | None) -> Callable[[Operands], Operands]:
            def pull_back(x: Operands) -> Operands:
                moving = self._widened(x._replace(segment_ids=None))
                outputs, pull = jax.vjp(lambda m: self._call(mask, m._replace(segment_ids=x.segment_ids)), moving)
                do, dlse = cotangents(outputs)
                no_change = mark_varying(jnp.zeros_like(outputs.max_logits), find_varying_axes(outputs))
                found: Operands = pull(Outputs(do, dlse, no_change))[0]
                return found

            return pull_back

        return self._switch(index, [branch(mask) for mask in self.masks], operands)

    @staticmethod
    def _switch(index: Any, branches: list[Callable[[Operands], Any]], operands: Operands) -> Any:
        return branches[0](operands) if len(branches) == 1 else jax.lax.switch(index, branches, operands)

    def _widened(self, x: Operands) -> Operands:
        return x._replace(**{name: getattr(x, name).astype(jnp.float32) for name in "qkv"}) if self.wide else x

    def _call(self, mask: Mask | None, x: Operands) -> Outputs:
        x = self._widened(x)
        if mask is None:
            rows = (x.q.shape[0], x.q.shape[2], x.q.shape[1])
            nothing = jnp.full(rows, -jnp.inf, jnp.float32)
            logsumexp = nothing if x.sinks is None else jnp.broadcast_to(x.sinks[None, :, None], rows)
            empty = Outputs(jnp.zeros((*x.q.shape[:3], x.v.shape[3]), jnp.float32), logsumexp, nothing)
            return mark_varying(empty, find_varying_axes(x))
        out, residuals = self.kernel(
            x.q,
            x.k,
            x.v,
            mask=mask,
            segment_ids=x.segment_ids,
            soft_cap=self.soft_cap,
            bias=x.bias,
            sinks=x.sinks,
            scale=self.scale,
            save_residuals=True,
        )
        return Outputs(out.astype(jnp.float32), residuals["logsumexp"], residuals["max_logits"])
