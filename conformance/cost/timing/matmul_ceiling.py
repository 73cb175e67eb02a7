"""Time a large matrix product between the kernels: the rate that the device's matrix units reach right then."""

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

    For f32 on an accelerator, that is the rounded product (tf32, bf16) of its matrix units. Exact products of f32 are
    far slower.
    """

    dtype: str

    @functools.cached_property
    def _factors(self) -> tuple[jax.Array, jax.Array]:
        shape = (self.side, self.side)
        return jnp.full(shape, 0.5, DTYPES[self.dtype]), jnp.full(shape, 0.25, DTYPES[self.dtype])

    @property
    def side(self) -> int:
        """Number of rows, and of columns."""
        return _SIDE_ON_CPU if jax.default_backend() == "cpu" else _SIDE

    @property
    def flops(self) -> float:
        """Floating-point operations of one product."""
        return 2.0 * self.side**3

    def run(self, calls: int) -> None:
        """Multiply `calls` times, and return when the device has done the last product."""
        for _ in range(calls):
            c = _multiply(*self._factors)
        jax.block_until_ready(c)  # type: ignore[no-untyped-call] # untyped upstream


_multiply = jax.jit(jnp.matmul)
