"""What the device's matrix units reach here and now: a large product, which takes its turn among the kernels."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from cases.operand_values import DTYPES

_SIDE_ON_CPU = 1024
_SIDE = 8192  # 1.1e12 operations: a millisecond or more, so that neither dispatch nor the memory bounds it


@dataclasses.dataclass(frozen=True)
class CeilingProduct:
    """The product of two square matrices in a dtype, at JAX's default precision.

    For f32 on an accelerator that is the rounded product (tf32, bf16) that its matrix units do: exact products of f32
    stay far below it.
    """

    dtype: str

    @functools.cached_property
    def _factors(self) -> tuple[jax.Array, jax.Array]:
        shape = (self.side, self.side)
        return jnp.full(shape, 0.5, DTYPES[self.dtype]), jnp.full(shape, 0.25, DTYPES[self.dtype])

    @property
    def side(self) -> int:
        """Rows and columns."""
        return _SIDE_ON_CPU if jax.default_backend() == "cpu" else _SIDE

    @property
    def flops(self) -> float:
        """Floating-point operations of one product."""
        return 2.0 * self.side**3

    def run(self, calls: int) -> None:
        """Multiply `calls` times in a row; returns when the device has done the last."""
        for _ in range(calls):
            c = _multiply(*self._factors)
        jax.block_until_ready(c)  # type: ignore[no-untyped-call] # untyped upstream


_multiply = jax.jit(jnp.matmul)
