"""What the device's matrix units reach here and now: a large product, timed by the same clock as the kernels."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from cases.inputs import DTYPES
from conformance.bench.sampling import interleave

_SIDE_ON_CPU = 1024
_SIDE = 8192  # 1.1e12 operations: a millisecond or more, so that neither dispatch nor the memory bounds it
_ROUNDS, _SECONDS = 20, 3.0


@functools.cache
def matmul_ceiling(dtype: str) -> float:
    """FLOP/s of the fastest of several products of two square matrices in `dtype`, at JAX's default precision.

    For f32 on an accelerator that is the rounded product (tf32, bf16) that its matrix units do: exact products of f32
    stay far below it.
    """
    side = _SIDE_ON_CPU if jax.default_backend() == "cpu" else _SIDE
    a, b = (jnp.full((side, side), value, DTYPES[dtype]) for value in (0.5, 0.25))
    product = jax.jit(jnp.matmul)

    def run(calls: int) -> None:
        for _ in range(calls):
            c = product(a, b)
        jax.block_until_ready(c)  # type: ignore[no-untyped-call] # untyped upstream

    sampled = interleave({"product": run}, rounds=_ROUNDS, seconds=_SECONDS)
    for failure in sampled.failures.values():
        raise failure
    if sampled.interrupted:
        raise KeyboardInterrupt
    return 2.0 * side**3 / min(sampled.seconds["product"])
