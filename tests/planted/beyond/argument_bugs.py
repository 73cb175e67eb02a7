"""Bugs in how arguments are read: forms that are legal and that tests rarely use."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cases.case import Case
from cases.masks import Mask, Window
from conformance.mutation.kernels import plain
from conformance.mutation.kernels.mask_steps import each
from conformance.mutation.kernels.plain import Array, BackwardSteps, Call, Saved, sum_to_shape
from conformance.mutation.kernels.triggers import both, has, trains
from tests.bank import PlantedBug
from tests.planted.planting.wrapped import Arrays, Kernel, Statics, correct, planted

_bug = functools.partial(planted, family="arguments")
_plain = functools.partial(plain.planted, "arguments")
_FORWARD = ("out", "logsumexp")
_BLOCK = 64


# Windows.


def _window(change: Callable[[Any, Any, Arrays], Any]) -> Kernel:
    """The kernel that takes a window `(left, right)` for another one, or for none."""

    def kernel(arrays: Arrays, statics: Statics) -> Any:
        if statics["window"] is None:
            return correct(arrays, statics)
        left, right = statics["window"]
        return correct(arrays, {**statics, "window": change(left, right, arrays)})

    return kernel


def _minus_one_taken_as_a_number(left: Any, right: Any, arrays: Arrays) -> Any:
    """A window without sides is passed on as (-1, -1), and that is taken literally."""
    return (-1, -1) if left is None and right is None else (left, right)


def _no_window_if_wide(left: Any, right: Any, arrays: Arrays) -> Any:
    """A window that reaches back over all keys is taken for none, whatever its right side."""
    return None if left is not None and left >= arrays["k"].shape[1] else (left, right)


def _unbounded_left_is_key_length(left: Any, right: Any, arrays: Arrays) -> Any:
    return (arrays["k"].shape[1] if left is None else left, right)


def _one_of_causal_and_window(kept: str) -> Kernel:
    """`if causal: ... elif window: ...`, or the other way round."""

    def kernel(arrays: Arrays, statics: Statics) -> Any:
        if not (statics["causal"] and statics["window"] is not None):
            return correct(arrays, statics)
        dropped = {"window": None} if kept == "causal" else {"causal": False}
        return correct(arrays, {**statics, **dropped})

    return kernel


def _window_at_the_end(arrays: Arrays, statics: Statics) -> Any:
    """Beside `causal`, which starts with the keys, the window ends with them."""
    t, s = arrays["q"].shape[1], arrays["k"].shape[1]
    if not (statics["causal"] and statics["window"] is not None) or t == s:
        return correct(arrays, statics)
    left, right = statics["window"]
    i, j = jnp.arange(t)[:, None] + s - t, jnp.arange(s)[None]
    near = (j >= i - (t + s if left is None else left)) & (j <= i + (t + s if right is None else right))
    mask = near[None, None] & arrays.get("mask", True)
    return correct({**arrays, "mask": mask}, {**statics, "window": None})


def _window_list_ignored(arrays: Arrays, statics: Statics) -> Any:
    return correct(arrays, {**statics, "window": statics["window"] if isinstance(statics["window"], tuple) else None})


def _causal_by_identity(arrays: Arrays, statics: Statics) -> Any:
    return correct(arrays, {**statics, "causal": statics["causal"] is True})


class _Int32Window(Window):
    """A window whose borders are computed in int32, and wrap."""

    def dense(self, q_length: int, kv_length: int) -> np.ndarray:
        i, j = np.arange(q_length, dtype=np.int32)[:, None], np.arange(kv_length, dtype=np.int32)[None]
        position = i + np.int32(self.offset)
        ok = np.ones((q_length, kv_length), bool)
        with np.errstate(over="ignore"):
            if self.left is not None:
                ok &= j >= position - np.array(self.left).astype(np.int32)
            if self.right is not None:
                ok &= j <= position + np.array(self.right).astype(np.int32)
        return ok[None, None]


def _wrapping(mask: Window, call: Call) -> Mask:
    return _Int32Window(mask.left, mask.right, mask.offset)


# Masks and biases with axes of length 1, of other ranks and dtypes.


def _bias(change: Callable[[Any, Arrays], Any]) -> Kernel:
    def kernel(arrays: Arrays, statics: Statics) -> Any:
        if "bias" not in arrays:
            return correct(arrays, statics)
        return correct({**arrays, "bias": change(arrays["bias"], arrays)}, statics)

    return kernel


def _first_only(x: Any, axis: int, length: int, fill: Any) -> Any:
    """An axis of length 1 is padded like any other: only the first place has the value."""
    pads = [(0, 0)] * x.ndim
    pads[axis] = (0, length - 1)
    return jnp.pad(x, pads, constant_values=fill)


def _shared_row_of_heads(bias: Any, arrays: Arrays) -> Any:
    if bias.ndim != 4 or bias.shape[2] != 1 or bias.shape[1] == 1:
        return bias  # a bias by key alone has a route of its own
    return _first_only(bias, 2, arrays["q"].shape[1], 0)


def _shared_key(bias: Any, arrays: Arrays) -> Any:
    return _first_only(bias, 3, arrays["k"].shape[1], 0) if bias.shape[-1] == 1 else bias


def _rank_three_by_batch(bias: Any, arrays: Arrays) -> Any:
    """`[N, T, S]` is read as `[B, T, S]`, where that fits."""
    return bias[:, None] if bias.ndim == 3 and bias.shape[0] in (1, arrays["q"].shape[0]) else bias


def _head_flag_from_batch(bias: Any, arrays: Arrays) -> Any:
    """Whether a bias differs from head to head is told by whether it differs from row to row of the batch."""
    return bias[:, :1] if bias.ndim == 4 and bias.shape[0] == 1 < arrays["q"].shape[0] else bias


def _logits_in_dtype_of_bias(x: Array, bias: Array, call: Call) -> Array:
    """The sum has the bias's dtype where that is narrower than q's."""
    if bias.dtype.itemsize >= call.q.dtype.itemsize:
        return x + bias
    bits = jnp.finfo(bias.dtype)
    return jax.lax.reduce_precision(x + bias, bits.nexp, bits.nmant)


def _last_of_shared_rows(dx: Array, dz: Array, saved: Saved) -> Array:
    """Where all rows share a bias that heads do not, each block of rows overwrites the gradient of the one before."""
    bias = saved.call.bias
    assert bias is not None
    if bias.shape[2] == 1 and bias.shape[1] > 1:
        start = (dx.shape[2] - 1) // _BLOCK * _BLOCK
        dx = dx[:, :, start:]
    return sum_to_shape(dx, bias.shape)


def _mask_axis(axis: int) -> Kernel:
    def kernel(arrays: Arrays, statics: Statics) -> Any:
        mask = arrays.get("mask")
        if mask is None or mask.shape[axis] != 1:
            return correct(arrays, statics)
        length = arrays["q" if axis == 2 else "k"].shape[1]
        # What a row is padded with hides nothing, as a bias of zeros; what a column is padded with hides the key.
        return correct({**arrays, "mask": _first_only(mask, axis, length, axis == 2)}, statics)

    return kernel


# Scales.


def _scale(change: Callable[[Any], Any]) -> Kernel:
    return lambda arrays, statics: correct(arrays, {**statics, "scale": change(statics["scale"])})


def _dtype_of_scaled_queries(arrays: Arrays, statics: Statics) -> Any:
    """The result has the dtype of `q * scale`; a NumPy or JAX scalar promotes it, a Python float does not."""
    result, scale = correct(arrays, statics), statics["scale"]
    if scale is None:
        return result
    dtype = (arrays["q"] * scale).dtype
    return (result[0].astype(dtype), result[1]) if isinstance(result, tuple) else result.astype(dtype)


def _both_sides(case: Case) -> bool:
    return "causal" in case.mask and "window" in case.mask


def _sided(side: str) -> Callable[[Case], bool]:
    return lambda case: f"-{side}inf" in case.mask


def _has_window(case: Case) -> bool:
    return "window" in case.mask


def _uses_mask_array(case: Case) -> bool:
    return case.mask not in ("full", "causal")


_window_bug = functools.partial(_bug, shows=_FORWARD, trigger=_has_window)
_bias_bug = functools.partial(_bug, shows=_FORWARD, trigger=has("bias"))
_scale_bug = functools.partial(_bug, shows=_FORWARD, trigger=has("scale"))

BUGS: tuple[PlantedBug, ...] = (
    _window_bug(
        "window-unbounded-left-is-zero",
        _window(lambda left, right, _: (left or 0, right)),
        kind="window.sentinel-mixup",
        reference="inferred from TransformerEngine issue 3528, where an unbounded side is a number",
        trigger=_sided("l"),
    ),
    _window_bug(
        "window-unbounded-right-is-zero",
        _window(lambda left, right, _: (left, right or 0)),
        kind="window.sentinel-mixup",
        reference="inferred from TransformerEngine issue 3528, where an unbounded side is a number",
        trigger=_sided("r"),
    ),
    _window_bug(
        "window-without-sides-taken-literally",
        _window(_minus_one_taken_as_a_number),
        kind="window.sentinel-mixup",
        reference="TransformerEngine issue 3528, PR 3532",
        trigger=both(_sided("l"), _sided("r")),
    ),
    _window_bug(
        "window-unbounded-left-is-key-length",
        _window(_unbounded_left_is_key_length),
        kind="window.sentinel-mixup",
        reference="inferred from DiTFastAttn issue 7, where a negative side becomes the length of the keys",
        trigger=both(_sided("l"), lambda case: case.q_length > case.kv_length),
    ),
    _window_bug(
        "window-wider-than-keys-is-none",
        _window(_no_window_if_wide),
        kind="window.wide",
        reference="inferred from flash-attention issue 1133, where a wide window takes another route",
    ),
    _plain(
        "window-borders-wrap-in-int32",
        kind="int32.index",
        reference="inferred from fla issue 1080, where an index wraps; seen in kernels with Window(4, 2**31 - 1)",
        shows="out logsumexp",
        trigger=_has_window,
        steps=each(Window, _wrapping),
    ),
    _window_bug(
        "causal-ignored-beside-window",
        _one_of_causal_and_window("window"),
        kind="mask.causal-and-window",
        reference="inferred from transformers issue 39408, where the window is taken for both sides",
        trigger=_both_sides,
    ),
    _window_bug(
        "window-beside-causal-ends-with-the-keys",
        _window_at_the_end,
        kind="causal.alignment",
        reference="inferred from vllm issue 47300: queries of causal and window counted from different places",
        trigger=both(_both_sides, has("unequal_lengths")),
    ),
    _window_bug(
        "window-in-a-list-ignored",
        _window_list_ignored,
        kind="argument.form",
        reference="inferred from kernels that take an integer or a tuple",
    ),
    _bug(
        "causal-tested-by-identity",
        _causal_by_identity,
        kind="argument.form",
        reference="inferred from flags that come as NumPy booleans out of a configuration",
        shows=_FORWARD,
        trigger=has("causal"),
    ),
    _bias_bug(
        "bias-shared-by-rows-reaches-the-first",
        _bias(_shared_row_of_heads),
        kind="bias.broadcast",
        reference="inferred from jax issue 28974, a mask that is shared by rows",
    ),
    _bias_bug(
        "bias-shared-by-keys-reaches-the-first",
        _bias(_shared_key),
        kind="bias.broadcast",
        reference="inferred from jax issue 28974, a mask that is shared along an axis",
    ),
    _bias_bug(
        "bias-of-rank-three-read-by-batch",
        _bias(_rank_three_by_batch),
        kind="bias.rank",
        reference="inferred from mlx-lm PR 1903, where axes are aligned by a size that happens to fit",
    ),
    _bias_bug(
        "bias-shared-by-batch-read-as-shared-by-heads",
        _bias(_head_flag_from_batch),
        kind="bias.broadcast",
        reference="inferred from jax PR 36702, where a bias with heads=1 is not told apart",
        trigger=lambda case: case.bias == "biashead" and case.batch > 1,
    ),
    _plain(
        "logits-in-the-dtype-of-a-narrow-bias",
        kind="bias.dtype",
        reference="inferred from jax issue 32242, where bias and q differ in dtype",
        shows="out logsumexp",
        trigger=both(has("bias"), lambda case: case.dtype == "f32"),
        steps=plain.PlainSteps(biased=_logits_in_dtype_of_bias),
    ),
    _plain(
        "dbias-shared-by-rows-of-the-last-block",
        kind="bias.broadcast",
        reference="inferred from HKUSTDial PR 199: dbias not summed over what shares the bias",
        shows="dbias",
        trigger=trains("bias"),
        back=BackwardSteps(dbias=_last_of_shared_rows),
    ),
    _bug(
        "mask-shared-by-rows-reaches-the-first",
        _mask_axis(2),
        kind="mask.broadcast",
        reference="inferred from jax issue 28974",
        shows=_FORWARD,
        trigger=_uses_mask_array,
    ),
    _bug(
        "mask-shared-by-keys-reaches-the-first",
        _mask_axis(3),
        kind="mask.broadcast",
        reference="inferred from jax issue 28974",
        shows=_FORWARD,
        trigger=_uses_mask_array,
    ),
    _scale_bug(
        "scale-of-zero-is-the-usual",
        _scale(lambda scale: scale or None),
        kind="scale.falsy",
        reference="inferred from SKaiNET issue 860 and mosaicml/examples PR 209, which test the scale for truth",
    ),
    _scale_bug(
        "scale-of-one-is-the-usual",
        _scale(lambda scale: None if scale == 1 else scale),
        kind="scale.falsy",
        reference="inferred from granite-code-models issue 6, where no scale stands for 1 in one route of three",
    ),
    _scale_bug(
        "scale-below-zero-is-the-usual",
        _scale(lambda scale: None if scale is not None and scale < 0 else scale),
        kind="scale.falsy",
        reference="inferred from sentinels of -1 for no scale",
    ),
    _scale_bug(
        "scale-that-is-no-float-ignored",
        _scale(lambda scale: scale if isinstance(scale, float) else None),
        kind="argument.form",
        reference="inferred from Megatron-LM PR 3698, where a configured scale is passed over",
    ),
    _scale_bug(
        "scale-of-numpy-promotes-out",
        _dtype_of_scaled_queries,
        kind="dtype.promotion",
        reference="inferred from JAX's promotion, which takes NumPy scalars for arrays",
        trigger=both(has("scale"), lambda case: case.dtype != "f32"),
    ),
)
