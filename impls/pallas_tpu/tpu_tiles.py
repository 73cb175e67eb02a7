"""Tiles of TPU kernels: sizes, operations on lanes that move no data between them, and how much VMEM there is."""

from __future__ import annotations

import dataclasses
import functools
import operator

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32, Shaped

from impls.jax_compat import find_tpu_vmem

LANES = 128
"""Width of a vector register; block lengths are multiples of it."""

SUBLANES = 8

EMPTY_MAXIMUM = float(np.finfo(np.float32).min)
"""Initial maximum, over no logits. It is finite, so that `exp(-inf - maximum)` is 0 and not NaN, without a test."""

DEFAULT_SCOPED = 16 * 2**20
"""Bytes of VMEM that a kernel may use by default, on every generation."""

SMALLEST_VMEM = 16 * 2**20
"""Bytes of VMEM of a core of v4, the smallest of v4 and all later chips (`pltpu.get_tpu_info_for_chip`)."""


@dataclasses.dataclass(frozen=True)
class VmemLimit:
    """How much VMEM a kernel may use, and where the limit comes from."""

    bytes: int
    of: str


def find_limit(requested: int | None) -> VmemLimit:
    """Find the VMEM limit of a kernel that is being traced: the requested one, the chip's, or the smallest chip's.

    The chip is that of the mesh in scope or of the process; in an interpreter there is none.
    """
    if requested is not None:
        return VmemLimit(requested, "vmem_limit_bytes")
    found = find_tpu_vmem()
    if found is None:
        return VmemLimit(SMALLEST_VMEM, "a core of v4, the smallest; for a larger chip give vmem_limit_bytes")
    kind, capacity = found
    return VmemLimit(capacity, f"a core of {kind}")


def round_up(length: int, block: int) -> int:
    """Round `length` up to a multiple of `block`."""
    return -(-length // block) * block


def make_column(row: Shaped[Array, "1 n"]) -> Shaped[Array, "n 128"]:
    """Turn a row `[1, n]` into a column `[n, 128]`, the same in every lane."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T


def repeat_lanes(x: Shaped[Array, "n 128"], lanes: int) -> Shaped[Array, "n {lanes}"]:
    """Repeat `[n, 128]`, the same in every lane, to `[n, lanes]` by reusing registers.

    Broadcasting `x[:, :1]` would permute the lanes of every register. In the compiler's schedule of a full 512 by 512
    block of the forward kernel on v5e this takes 1,309 cycles; with broadcasting, 2,374.
    """
    return jnp.concatenate([x] * (-(-lanes // LANES)), axis=1)[:, :lanes]


def sum_by_lane(x: Float32[Array, "n m"]) -> Float32[Array, "n 128"]:
    """Sum every 128th column, giving `[n, 128]`. These are plain additions; a sum over lanes would move data.

    Columns that do not fill registers are summed into the first lane.
    """
    if x.shape[1] % LANES == 0:
        return functools.reduce(operator.add, (x[:, at : at + LANES] for at in range(0, x.shape[1], LANES)))
    first = lax.broadcasted_iota(jnp.int32, (x.shape[0], LANES), 1) == 0
    return jnp.where(first, x.sum(axis=-1, keepdims=True), 0.0)
