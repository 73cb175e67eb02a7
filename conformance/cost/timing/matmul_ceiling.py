"""Define a large matrix product that is timed between the kernels, as a ceiling for their rate.

`interleaved_timing` runs it in every round. So it shows which rate the device's matrix units reach at that moment.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from cases.operand_values import DTYPES

_SIDE_ON_CPU = 1024
_SIDE = 8192  # 1.1e12 operations take a millisecond or more, so neither dispatch nor memory limits the rate


@dataclasses.dataclass(frozen=True)
class CeilingProduct:
    """The product of two square matrices in a dtype, at JAX's default precision.

    On an accelerator, JAX's default precision rounds f32 operands to tf32 or bf16 before multiplying. Exact products of
    f32 are far slower.
    """

    dtype: str

    @functools.cached_property
    def _factors(self) -> tuple[jax.Array, jax.Array]:
        shape = (self.side, self.side)
        return jnp.full(shape, 0.5, DTYPES[self.dtype]), jnp.full(shape, 0.25, DTYPES[self.dtype])

    @property
    def side(self) -> int:
        """Number of rows of each matrix, which equals its number of columns."""
        return _SIDE_ON_CPU if jax.default_backend() == "cpu" else _SIDE

    @property
    def flops(self) -> float:
        """Number of floating-point operations of one product."""
        return 2.0 * self.side**3

    def run(self, calls: int) -> None:
        """Multiply `calls` times, and return when the device has finished the last product."""
        for _ in range(calls):
            c = _multiply(*self._factors)
        jax.block_until_ready(c)


_multiply = jax.jit(jnp.matmul)
