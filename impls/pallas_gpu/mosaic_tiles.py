"""Tiles of Mosaic GPU kernels: sizes, which GPUs run them, tensor core products, and the online softmax.

    (1)  x_ij = scale <q_i, k_j>
    (2)  z_ij = soft_cap tanh(x_ij / soft_cap)
    (4)  m_i = max_j z_ij, over the keys so far
    (5)  l_i = sum_j exp(z_ij - m_i), over the keys so far

Tiles hold logits divided by their unit, z = unit y, and exponentials are powers of two (`impls.block_arithmetic`).

JAX's CPU interpreter of these kernels has no `wgmma` on values, on transposed references or into an accumulator that
already has a value. There the same tiles are multiplied as ordinary arrays. So only compilation and a GPU show that the
instruction is right and that its operands are swizzled correctly.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float32, Shaped

from impls.block_arithmetic import LOG2_E, replace_neg_inf
from impls.jax_compat import Interpret, Scalar, get_cuda_version

ROWS = 64
"""Rows of the matrix product that one warpgroup computes."""

SWIZZLE_BYTES = 128
"""Bytes of the widest swizzle."""

LANES = SWIZZLE_BYTES // 2
"""Head depths are padded to a multiple of this: the widest swizzle in two-byte elements."""

SHARED_MEMORY = 227 * 1024
"""Bytes of shared memory per thread block on Hopper (CUDA C++ programming guide, "Compute capabilities")."""


def allocate_tile(dtype: Any, *sizes: int) -> Any:
    """Allocate tiles in shared memory, in the layout that TMA writes and `wgmma` reads: rows of 128 bytes, swizzled."""
    columns = SWIZZLE_BYTES // jnp.dtype(dtype).itemsize
    transforms = (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(SWIZZLE_BYTES))
    return plgpu.SMEM(sizes, dtype, transforms=transforms)


def round_up(size: int, multiple: int) -> int:
    """Round `size` up to a multiple."""
    return -(-size // multiple) * multiple


HOPPER = ("H100", "H200", "H20", "H800", "GH200")
"""Names of Hopper GPUs: JAX's device kind contains one of them."""

NO_HOPPER = "no Hopper GPU in this machine, and Mosaic GPU kernels run on no other"
"""Why a Mosaic GPU kernel is not run on this machine."""

# CUDA releases whose `ptxas` miscompiles causal masks. JAX's own Mosaic attention refuses them there too
# (`jax.experimental.pallas.ops.gpu.attention_mgpu`).
_MISCOMPILING_CUDA = range(12080, 12091)


def find_device_limit(kind: str) -> str | None:
    """Return why Mosaic kernels do not run on a GPU of this kind, or None if they do; `kind` is JAX's device kind."""
    if any(name in kind for name in HOPPER):
        return None
    return f"GPUs other than Hopper, which {kind or 'this device'!r} is not"


def find_compiler_limit() -> str | None:
    """Return why Mosaic kernels with masks must not be compiled by this process's CUDA, or None if they may."""
    version = get_cuda_version()
    if version not in _MISCOMPILING_CUDA:
        return None
    return f"masks under CUDA {version // 1000}.{version % 1000 // 10}, whose `ptxas` miscompiles them"


SUM_COLUMNS = 8
"""Number of partial sums per row. Partial sum `c` adds the columns `c`, `c + 8`, `c + 16` and so on.

Of every 8 columns that `wgmma` computes, a thread has the same two. So threads sum a tile without communication, and
combine their sums once, after the last tile.
"""


@runtime_checkable
class TileArithmetic(Protocol):
    """Static part of a call, as far as operations on one tile use it. Every plan has it."""

    @property
    def interpret(self) -> Interpret:
        """Return the `interpret` of the call: False, True, or the parameters of an interpreter."""
        ...

    @property
    def scale(self) -> float:
        """Factor of `<q, k>`."""
        ...

    @property
    def soft_cap(self) -> float | None:
        """Bound of the logits; None without a soft cap."""
        ...

    def unit(self, *, biased: bool) -> float:
        """Return the unit of the logits."""
        ...


class RunningSoftmax(NamedTuple):
    """The online softmax of one warpgroup's rows over the keys so far: m, l and the undivided output, f32."""

    maximum: Float32[Array, " rows"]  # m times log2(e)
    total: Float32[Array, "rows ..."]  # [rows, SUM_COLUMNS] until all keys are seen, then [rows]
    out: Float32[Array, "rows V"]


def multiply(
    plan: TileArithmetic, a: Any, b: Scalar, *, transposed: bool = False, issued: Callable[[], None] = lambda: None
) -> jax.Array:
    """Compute `a @ b`, or `a @ b.T`, in f32, with `b` in shared memory; call `issued` before awaiting the product."""
    shape = (a.shape[0], b.shape[0 if transposed else 1])
    if plan.interpret:
        found = _multiply_values(a, b, transposed)
        issued()
        return found

    def multiply(accumulator: Any) -> jax.Array:
        plgpu.wgmma(accumulator, a, b.T if transposed else b)
        issued()
        return accumulator[...]

    return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))


def accumulate(plan: TileArithmetic, total: jax.Array, a: Any, b: Scalar) -> jax.Array:
    """Compute `total + a @ b` in f32."""
    if plan.interpret:
        return total + _multiply_values(a, b, transposed=False)

    def multiply(accumulator: Any) -> None:
        plgpu.wgmma(accumulator, a, b)

    start = plgpu.WGMMAAccumulatorRef.init(total)
    return pl.run_state(multiply)(start)


def _multiply_values(a: Any, b: Scalar, transposed: bool) -> jax.Array:
    left = a if isinstance(a, jax.Array) else a[...]
    dimensions = (((1,), (1 if transposed else 0,)), ((), ()))
    return lax.dot_general(left, b[...], dimensions, preferred_element_type=jnp.float32)


def broadcast_over_keys(x: Shaped[Array, " rows"], keys: int) -> Shaped[Array, "rows {keys}"]:
    """Broadcast a value per row over `keys` columns."""
    return lax.broadcast_in_dim(x, (x.shape[0], keys), (0,))


def broadcast_over_queries(x: Shaped[Array, " columns"], keys: int) -> Shaped[Array, "{keys} columns"]:
    """Broadcast a value per column over `keys` rows."""
    return lax.broadcast_in_dim(x, (keys, x.shape[0]), (1,))


def compute_logits(plan: TileArithmetic, products: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Compute logits in their unit from products `<q, k>`, and the soft cap's derivative, None without a soft cap."""
    z = products if plan.unit(biased=False) != 1 else products * jnp.float32(plan.scale)  # scaled logits, equation (1)
    if plan.soft_cap is None:
        return z, None
    tanh = jnp.tanh(z / jnp.float32(plan.soft_cap))
    return jnp.float32(plan.soft_cap) * tanh, 1 - tanh * tanh  # soft cap, equation (2)


def get_exponent_factor(plan: TileArithmetic) -> jax.Array:
    """Return `unit log2(e)`: the exponential of a stored logit is 2 to the power of logit times this factor."""
    return jnp.float32(plan.unit(biased=False) * LOG2_E)


def update_softmax(
    plan: TileArithmetic, old: RunningSoftmax, y: jax.Array, *, masked: bool
) -> tuple[RunningSoftmax, jax.Array]:
    """Update the softmax with a tile of logits. Return it and the tile's weights, which are not yet added to `out`.

    `masked` says that the mask may hide whole rows of the tile.
    """
    maximum = jnp.maximum(old.maximum, jnp.max(y, axis=1) * get_exponent_factor(plan))  # maximum, equation (4)
    shift = replace_neg_inf(maximum) if masked else maximum
    weights = jnp.exp2(y * get_exponent_factor(plan) - broadcast_over_keys(shift, y.shape[1]))
    decay = jnp.exp2(old.maximum - shift)
    out = old.out * broadcast_over_keys(decay, old.out.shape[1])
    return RunningSoftmax(
        maximum, old.total * broadcast_over_keys(decay, SUM_COLUMNS) + _sum_columns(weights), out
    ), weights  # sum of weights, equation (5)


def _sum_columns(weights: jax.Array) -> jax.Array:
    """Sum `weights [ROWS, keys]` over keys that are equal modulo `SUM_COLUMNS`, `[ROWS, SUM_COLUMNS]`."""
    return functools.reduce(
        jnp.add, (weights[:, at : at + SUM_COLUMNS] for at in range(0, weights.shape[1], SUM_COLUMNS))
    )
