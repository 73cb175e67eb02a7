"""Compute the expected variance of a correct kernel's errors in bf16 or f16, element by element.

The bounds of `conformance.truth.rounding_bounds` let errors pass that are smaller than one rounding of the output
dtype. Such errors still show over many elements, since their mean square has an expected value. This module computes
it, and the check `ensemble` compares it with the errors of a kernel.

Rounding a value to nearest errs by up to half of the spacing `ulp`, uniformly and independently from one value to the
next. So its variance is `ulp^2 / 12`. For a result, the spacing is that of the element's own binade. For the many terms
inside a sum, it is averaged over the mantissa `m in [1, 2)`, whose logarithm is uniform:

    var(round x) = x^2 u^2 / 3 E[1 / m^2] = c u^2 x^2,    c = 1 / (8 ln 2) = 0.180

Let `u_p` be the roundoff of the dtype in which probabilities and their gradient enter a product (0 for f32), `u_z` that
of the logits, and `s` the scale. Everything else is as in docs/contract.md, section 2:

    w_p(ij)  = c u_p^2 p^2                                                   probabilities
    w_dz(ij) = c u_p^2 (p^2 dp^2 + dz^2)                                     dp, then dz
    var(D)_i = sum_j w_p dp^2 + sum_d var(round out) do^2                    D from the stored out, or from p and dp
    var(out) = sum_j w_p v^2 + var(round out)
    var(dq)  = s^2 [sum_j w_dz k^2 + var(D) (sum_j p k)^2] + var(round dq)
    var(dk)  = s^2 sum_i (w_dz + p^2 var(D)) q^2 + (sum over the group of var(round dk of the head)) + var(round dk)
    var(dv)  = sum_i w_p do^2 + (sum over the group of var(round dv of the head)) + var(round dv)
    var(dbias) = sum over the broadcast axes of (w_dz + p^2 var(D)) + var(round dbias)

The last is for a bias that varies over keys and is in 16 bits. Other biases would need a term for the error of `D` that
all keys of a row share.

A derivative by JAX may include that of the row's maximum `m`, which is exactly zero. It is computed as minus the sum of
the row's `dz`, so all errors of the row are moved to the key with the maximum. If `dz` comes from weights that are not
normalised yet, these are the errors of `dp` and of the weights in `D`. Let `t(ij)` be the share of a key in the
maximum: 1 for one key of a row, and 0 for all others. With `w_1 = c u_p^2 p^2 dp^2`, `w_2 = c u_p^2 dz^2`,
`k_m = sum_j t k`, `k' = sum_j p k` and `var_p(D) = sum_j w_p dp^2`, the variances are then

    var(dq)  = s^2 [sum_j (w_1 (k - k_m)^2 + w_2 k^2) + var_p(D) (k' - k_m)^2] + var(round dq)
    w_dz + p^2 var(D)  becomes  w_1 (1 - 2 t) + t^2 sum_j w_1 + w_2 + (t - p)^2 var_p(D)

where the second line is for `dk` and `dbias`. Each element has the larger one of both variances.

If logits are rounded, with `w_z = c u_z^2 z^2` and `e = sum_j p^2 w_z`, these terms are added:

    out:  + sum_j w_z [p (v - out)]^2                 from dp_j = p_j (dz_j - sum_l p_l dz_l), where d means "error of"
    dv:   + sum_i p^2 (w_z (1 - 2 p) + e) do^2
    dq:   + s^2 sum_j w_z [dz (k - k') - p dq / s]^2
    dk:   + s^2 sum_i [w_z dz^2 (1 - 4 p) + dz^2 e + p^2 sum_l w_z dz^2 + 2 dz p sum_l w_z p dz] q^2

A softmax in the operands' dtype, with their roundoff `u_s`, rounds more. Rounding `z - m` and the weight acts like an
error of the logit, `w_z = c u_s^2 (z^2 + (z - m)^2 + 1)`. Rounding the sum is one relative error of all probabilities
of a row. The backward pass rounds `p dp`, `D` and `p D`. There are no terms for a derivative of the maximum then:

    w_dz + c u_s^2 p^2 (dp^2 + D^2)        var(D) + c u_s^2 (D^2 + sum_j p^2 dp^2)
    out + c u_s^2 out^2      dq + c u_s^2 (dq - s D k')^2      dk + s^2 c u_s^2 sum_i (dz - p D)^2 q^2      dv, in w_p

Sums over a group in the operands' dtype round each partial sum over its heads: `var(round sum of the first n heads)`
for `n` from 2.

Sums over blocks of keys (for dk and dv, of queries) round what each block adds, `c u^2 (block n)^2` for each `n` but
the first. They also round each partial sum, `c u^2 (sum of the first n blocks)^2` for each `n` but the last. JAX
differentiates a scan from the last block to the first. No declaration fixes the order, so each of these is the mean
over both orders.

The variance is an upper estimate: it counts all roundings that a correct kernel may make, and most kernels make fewer.
A blocked kernel keeps dp in f32, a kernel differentiated by JAX keeps dz in f32 and has no D, and not every kernel
rounds dk by head. So a correct kernel comes out between 0.5 and 1 times the square root of the variance. Errors of f32
operations are left out, since they are at most 2^-13 of a rounding to f16.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import numpy as np

from cases.operand_values import Cotangent, Problem
from conformance.truth.oracle import Array, HeadGroup, iter_head_groups
from conformance.truth.roundoff import Roundoff, get_dtype_name
from impls.contract.declarations import Arithmetic

TERM = 1 / (8 * math.log(2))
"""Variance of rounding to nearest, relative to `(u x)^2`, averaged over the mantissa: `c` in the module docstring."""

# Significand bits, and the exponent (as numpy.frexp returns it) below which numbers are subnormal.
_PRECISION = {"bf16": 8, "f16": 11}
_LEAST_EXPONENT = {"bf16": -125, "f16": -13}


@dataclasses.dataclass(frozen=True)
class ErrorVariance:
    """Exact values of a result with the expected variance of a correct kernel's errors; arrays have its shape."""

    value: Array
    variance: Array
    ulp: Array


def compute_ulp(values: Array, dtype: str) -> Array:
    """Compute the spacing of the numbers of `dtype` (`bf16` or `f16`) around each value."""
    exponent = np.maximum(np.frexp(values)[1], _LEAST_EXPONENT[dtype])
    return np.ldexp(1.0, exponent - _PRECISION[dtype])


Maximum = Literal["constant", "differentiated", "either"]
"""How a kernel differentiates the maximum of a row. `"either"` gives the larger one of both variances."""


def compute_error_variance(
    problem: Problem, arithmetic: Arithmetic, cotangent: Cotangent | None = None, maximum: Maximum = "either"
) -> dict[str, ErrorVariance]:
    """Compute `out`, and `dq`, `dk`, `dv` for a cotangent of `out`, with the variance of a correct kernel's errors.

    Args:
      problem: operands in bf16 or f16, without soft cap, sinks and `score_mod`. A bias must have their dtype.
      arithmetic: the arithmetic that the implementation declares; with a bias, logits and softmax in f32.
      cotangent: cotangent of `out`; None to compute the forward pass only.
      maximum: how the kernel differentiates the maximum of a row.

    Raises:
      ValueError: if the derivation does not cover the problem.
    """
    dtype = get_dtype_name(problem.q.dtype)
    u = Roundoff.of(arithmetic, problem)
    if dtype not in _PRECISION:
        raise ValueError(f"the variance of errors is derived for {', '.join(_PRECISION)} only, got operands in {dtype}")
    added = {operand.name for operand, _ in problem.logit_terms} - {"bias"}
    if problem.sinks is not None or problem.soft_caps is not None or added or problem.head_factors:
        raise ValueError("the variance of errors is derived for logits `scale <q, k>` only; the problem changes them")
    if problem.tied and cotangent is not None:
        raise ValueError("the variance of errors is not derived for gradients of latents, which are keys and values")
    if problem.bias is not None:
        _reject_bias(problem, u)
    if u.scaled_q:
        # All keys of a row share the error of q * scale, which this derivation does not cover. There is no such error
        # if the scale is a power of two.
        raise ValueError(f"if scaled_q is declared, the scale must be a power of two, got {problem.effective_scale}")
    names = {"out": (problem.q.shape[:3] + problem.v.shape[3:])}
    if cotangent is not None:
        names |= {"dq": problem.q.shape, "dk": problem.k.shape, "dv": problem.v.shape}
        if problem.bias is not None:
            names["dbias"] = problem.bias.shape
    values = {name: np.zeros(shape) for name, shape in names.items()}
    variances = {name: np.zeros(shape) for name, shape in names.items()}
    for group in iter_head_groups(problem):
        _add_forward(values, variances, group, u)
        if cotangent is not None:
            do = cotangent.out[group.batch, :, group.heads].astype(np.float64).transpose(1, 0, 2)
            _add_backward(values, variances, group, do, u, dtype, maximum)
    spacings = {name: compute_ulp(value, dtype) for name, value in values.items()}
    return {
        name: ErrorVariance(values[name], variances[name] + spacings[name] ** 2 / 12, spacings[name]) for name in names
    }


def _reject_bias(problem: Problem, u: Roundoff) -> None:
    """Raise `ValueError` for a bias, or for rounded logits beside a bias, that the derivation does not cover."""
    assert problem.bias is not None
    if u.logits or u.softmax:
        raise ValueError("the variance of errors is not derived for a bias that is added to rounded logits")
    if problem.bias.shape[-1] == 1 or problem.bias.dtype != problem.q.dtype:
        raise ValueError(f"a bias must vary over keys and be {problem.q.dtype}, got {problem.bias.dtype}")


def _add_forward(values: dict[str, Array], variances: dict[str, Array], group: HeadGroup, u: Roundoff) -> None:
    """Write one group's `out` and its error variance into `values` and `variances`."""
    squared = _to_float32(group.p) ** 2
    v = _to_float32(group.v)
    variance = _compute_rounding_variance(squared, u) @ v**2
    if u.logits or u.softmax:
        weighted = squared * _compute_logit_variance(group, u)
        out = group.out
        variance = variance + weighted @ v**2 - 2 * out * (weighted @ v) + out**2 * weighted.sum(-1, keepdims=True)
    if u.softmax:
        variance = variance + TERM * u.softmax**2 * group.out**2
    variance = variance + _compute_block_variance(group.p, group.v, u)
    values["out"][group.batch, :, group.heads] = group.out.transpose(1, 0, 2)
    variances["out"][group.batch, :, group.heads] = variance.transpose(1, 0, 2)


def _add_backward(
    values: dict[str, Array],
    variances: dict[str, Array],
    group: HeadGroup,
    do: Array,
    u: Roundoff,
    dtype: str,
    maximum: Maximum,
) -> None:
    """Write one group's gradients and their error variances into `values` and `variances`."""
    dp = group.dp(do)
    d = (group.p * dp).sum(axis=-1, keepdims=True)
    dz = group.p * (dp - d)
    mean_k = group.p @ group.k
    dq = group.scale * (dz @ group.k)
    dk_by_head = group.scale * (dz.transpose(0, 2, 1) @ group.q)
    dv_by_head = group.p.transpose(0, 2, 1) @ do

    p2, dp2, dz2 = (_to_float32(x) ** 2 for x in (group.p, dp, dz))
    q2, k2, do2 = (_to_float32(x) ** 2 for x in (group.q, group.k, do))
    rounded_p, rounded_dz = (_compute_rounding_variance(x, u) for x in (p2, dz2))
    shared = (rounded_p * dp2).sum(axis=-1) + (compute_ulp(group.out, dtype) ** 2 / 12 * do2).sum(axis=-1)  # var(D)
    w_dp = TERM * u.probabilities**2 * p2 * dp2
    w_dz = w_dp + rounded_dz
    in_dtype = TERM * u.softmax**2
    if u.softmax:
        d2 = _to_float32(d) ** 2
        w_dz = w_dz + in_dtype * p2 * (dp2 + d2)
        shared = shared + in_dtype * (d2[..., 0] + (p2 * dp2).sum(axis=-1))
    var_dq = w_dz @ k2 + shared[..., None] * mean_k**2
    by_pair = w_dz + p2 * _to_float32(shared)[..., None]
    w_p = rounded_p + in_dtype * p2
    if u.softmax:
        var_dq = var_dq + in_dtype * (dq / group.scale - d * mean_k) ** 2
        by_pair = by_pair + in_dtype * _to_float32(dz - group.p * d) ** 2
        ways = [(var_dq, by_pair)]
    else:
        top = _find_maximum(group)
        top_k = top @ group.k
        from_p, from_dp = (x.sum(axis=-1, keepdims=True) for x in (rounded_p * dp2, w_dp))
        moved = w_dz @ k2 - 2 * top_k * (w_dp @ group.k) + top_k**2 * from_dp + from_p * (mean_k - top_k) ** 2
        moved_by_pair = rounded_dz + w_dp * (1 - 2 * top) + top**2 * from_dp + (top - group.p) ** 2 * from_p
        known = {"constant": (var_dq, by_pair), "differentiated": (moved, moved_by_pair)}
        ways = list(known.values()) if maximum == "either" else [known[maximum]]
    var_dq, by_pairs = np.max([dq_errors for dq_errors, _ in ways], axis=0), [pairs for _, pairs in ways]
    if u.logits or u.softmax:
        w_z = _compute_logit_variance(group, u)
        p, small = _to_float32(group.p), _to_float32(dz)
        e, f, h = (x.sum(axis=-1, keepdims=True) for x in (w_z * p2, w_z * dz2, w_z * p * small))
        k, row = _to_float32(group.k), dq / group.scale
        var_dq = var_dq + (w_z * dz2) @ k2 - 2 * mean_k * ((w_z * dz2) @ k) + mean_k**2 * f
        var_dq = var_dq + row**2 * e - 2 * row * ((w_z * small * p) @ k - mean_k * h)
        from_logits = w_z * dz2 * (1 - 4 * p) + dz2 * e + p2 * f + 2 * small * p * h
        by_pairs = [each + from_logits for each in by_pairs]
        w_p = w_p + p2 * (w_z * (1 - 2 * p) + e)
    var_dk = group.scale**2 * np.max([each.transpose(0, 2, 1) @ q2 for each in by_pairs], axis=0)
    var_dv = w_p.transpose(0, 2, 1) @ do2
    if len(do) > 1:
        var_dk = var_dk + compute_ulp(dk_by_head, dtype) ** 2 / 12
        var_dv = var_dv + compute_ulp(dv_by_head, dtype) ** 2 / 12
        if u.group_sums:
            var_dk[0] += _compute_partial_sum_variance(dk_by_head, dtype)
            var_dv[0] += _compute_partial_sum_variance(dv_by_head, dtype)
    var_dq = var_dq + _compute_block_variance(dz, group.k, u)
    var_dk = var_dk + group.scale**2 * _compute_block_variance(dz.transpose(0, 2, 1), group.q, u)
    var_dv = var_dv + _compute_block_variance(group.p.transpose(0, 2, 1), do, u)

    rows, keys = (group.batch, slice(None), group.heads), (group.batch, slice(None), group.kv_head)
    values["dq"][rows] = dq.transpose(1, 0, 2)
    values["dk"][keys] = dk_by_head.sum(axis=0)
    values["dv"][keys] = dv_by_head.sum(axis=0)
    variances["dq"][rows] = group.scale**2 * var_dq.transpose(1, 0, 2)
    variances["dk"][keys] = var_dk.sum(axis=0)
    variances["dv"][keys] = var_dv.sum(axis=0)
    if "dbias" in values:
        _add_bias_gradient(values["dbias"], group, dz)
        _add_bias_gradient(variances["dbias"], group, *by_pairs)


def _find_maximum(group: HeadGroup) -> Array:
    """Return the share of each key in the maximum of its row, `[G, T, S]`: 1 over the number of equal maxima, or 0."""
    logits = np.where(group.allowed, group.z, -np.inf)
    is_top = logits == logits.max(axis=-1, keepdims=True)
    return _to_float32(is_top / is_top.sum(axis=-1, keepdims=True))


def _add_bias_gradient(total: Array, group: HeadGroup, *by_pair: Array) -> None:
    """Add one group's `by_pair [G, T, S]` to `total` of the shape of the bias, summed where the bias is broadcast.

    The larger sum is added if there is more than one `by_pair`.
    """
    rows = group.batch if total.shape[0] > 1 else 0
    heads = group.heads if total.shape[1] > 1 else slice(None)
    axes = tuple(axis for axis in (0, 1) if total.shape[1 + axis] == 1)
    sums = [each.sum(axis=axes, keepdims=True, dtype=np.float64) for each in by_pair]
    total[rows, heads] += np.max(sums, axis=0)


def _compute_rounding_variance(squares: Array, u: Roundoff) -> Array:
    """Compute the variance of rounding probabilities, or their gradient, whose squares are given.

    Subnormal numbers of f16 have one spacing. What rounds to zero is off by no more than itself.
    """
    if not u.probabilities:
        return np.zeros_like(squares)
    return np.minimum(squares, np.maximum(TERM * u.probabilities**2 * squares, np.float32((2 * u.tiny) ** 2 / 12)))


def _compute_partial_sum_variance(by_head: Array, dtype: str) -> Array:
    """Compute the variance of rounding partial sums over the heads `[G, ...]`, as the mean over both orders.

    The first head is no sum yet, and the last sum is the result, so neither counts.
    """
    forth, back = (np.cumsum(order, axis=0)[1:-1] for order in (by_head, by_head[::-1]))
    return (compute_ulp(forth, dtype) ** 2 + compute_ulp(back, dtype) ** 2).sum(axis=0) / 24


def _compute_block_variance(x: Array, y: Array, u: Roundoff) -> Array | float:
    """Compute the variance of `x @ y` if its sum is rounded after each block, as the mean over both orders.

    For `x [G, n, m]` and `y [m, .]` or `[G, m, .]`, return `[G, n, .]`, or 0 if no sum is rounded after a block.
    """
    if u.block is None:
        return 0.0
    y = np.broadcast_to(y, (len(x), *y.shape[-2:]))
    whole = x @ y
    so_far, squares, length = np.zeros(whole.shape), np.zeros(whole.shape), x.shape[-1]
    for start in range(0, length, u.block):
        stop = start + u.block
        block = x[..., start:stop] @ y[:, start:stop]
        so_far = so_far + block
        # The first block is rounded only as the first partial sum, not also as an addend. The blocks at both ends are
        # first in one of the two orders.
        ends = (start == 0) + (stop >= length)
        squares += (1 - ends / 2) * block**2
        if stop < length:
            squares += (so_far**2 + (whole - so_far) ** 2) / 2
    return TERM * u.block_sums**2 * squares


def _compute_logit_variance(group: HeadGroup, u: Roundoff) -> Array:
    """Compute the variance of the logits' errors, `w_z` in the module docstring, `[G, T, S]` in float32."""
    variance = (u.logits**2 + u.softmax**2) * group.z**2
    if u.softmax:
        variance = variance + u.softmax**2 * ((group.z - group.pivot[..., None]) ** 2 + 1)
    return np.where(group.allowed, _to_float32(TERM * variance), np.float32(0))


def _to_float32(x: Array) -> Array:
    """Convert to float32, which is exact enough for a variance and halves the time."""
    return x.astype(np.float32)
