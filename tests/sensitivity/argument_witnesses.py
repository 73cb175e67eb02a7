"""The question on which each planted bug of arguments turns red (`tests.sensitivity.test_argument_bugs`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from cases.counter_rng import draw_normal
from cases.masks import Dense, Window
from cases.operand_values import Cotangent, Problem
from tests.planted.planting import questions as ask
from tests.planted.planting.witness import Check, Witness, asked, replaced, today

_SMALL = "B1.T96.S96.N2.K2.H16.V16"
_TWO = "B2.T96.S96.N4.K2.H16.V16"
_LONG = "B1.T320.S320.N2.K2.H32.V32"
_GROUPS = "B1.T320.S320.N8.K2.H32.V32"


def _build_case(
    options: str, *, phase: str = "train", dtype: str = "f32", shape: str = _SMALL, values: str = "normal"
) -> str:
    return f"{phase}/{dtype}/{shape}/{options}/{values}/s1"


def _draw_bias(*shape: str, dtype: Any = np.float32) -> Callable[[Problem], np.ndarray]:
    """Return a function that draws a bias with only some of the axes `B`, `N`, `T`, `S`."""

    def make(problem: Problem) -> np.ndarray:
        batch, q_length, heads, _ = problem.q.shape
        sizes = {"B": batch, "N": heads, "T": q_length, "S": problem.k.shape[1]}
        drawn = draw_normal(1, "bias", tuple(sizes[axis] if axis in shape else 1 for axis in "BNTS"))
        return drawn.astype(dtype)

    return make


def _change_bias(value: float, *place: Any, added: bool = False) -> Callable[[Problem], np.ndarray]:
    """Return a function that sets or adds `value` at a place of the problem's bias."""

    def make(problem: Problem) -> np.ndarray:
        assert problem.bias is not None
        bias = problem.bias.copy()
        bias[place] = bias[place] + value if added else value
        return bias

    return make


def _change_ids(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Problem], Problem]:
    """Return a function that changes segment ids."""

    def make(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
        assert problem.segment_ids is not None
        q_ids, kv_ids = (change(ids.astype(np.int64)).astype(np.int32) for ids in problem.segment_ids)
        return q_ids, kv_ids

    return replaced(segment_ids=make)


def _change_sinks(value: float) -> Callable[[Problem], Problem]:
    return replaced(sinks=lambda problem: np.full_like(problem.sinks, value))


def _set_zeros(operand: str, place: int | slice) -> Callable[[Problem], Problem]:
    def make(problem: Problem) -> np.ndarray:
        x: np.ndarray = getattr(problem, operand).copy()
        x[:, place] = 0
        return x

    return replaced(**{operand: make})


def _multiply(factor: float) -> Callable[[Cotangent], Cotangent]:
    def change(cotangent: Cotangent) -> Cotangent:
        lse = cotangent.logsumexp
        out = (cotangent.out.astype(np.float64) * factor).astype(cotangent.out.dtype)
        return dataclasses.replace(cotangent, out=out, logsumexp=None if lse is None else lse * np.float32(factor))

    return change


def _separate_halves(shift: float) -> Callable[[Problem], np.ndarray]:
    """Raise one half of the depth, and lower the other."""
    return lambda problem: problem.v + np.repeat([shift, -shift], problem.v.shape[-1] // 2).astype(problem.v.dtype)


def _repeat_halves(factor: float) -> Callable[[Cotangent], Cotangent]:
    """Return cotangents of one sign and larger size, equal in both halves of the depth."""

    def change(cotangent: Cotangent) -> Cotangent:
        half = np.abs(cotangent.out[..., : cotangent.out.shape[-1] // 2]) * cotangent.out.dtype.type(factor)
        return dataclasses.replace(cotangent, out=np.concatenate([half, half], axis=-1))

    return change


def _share_mask(axis: int) -> Witness:
    """Return a function that makes a mask of one row, or one column, for all."""

    def narrow(problem: Problem) -> np.ndarray:
        length = problem.q.shape[1] if axis == 3 else problem.k.shape[1]
        there = np.arange(length) % 5 != 2
        return there[None, None, None] if axis == 2 else there[None, None, :, None]

    def whole(problem: Problem) -> Problem:
        lengths = problem.q.shape[1], problem.k.shape[1]
        return dataclasses.replace(problem, mask=Dense(np.broadcast_to(narrow(problem), (1, 1, *lengths))))

    return asked(_build_case("full"), ask.called(mask=narrow), change=whole)


_BIASED = _build_case("full/bias")
_BIASED_FORWARD = _build_case("full/bias", phase="prefill")
_SEGMENTS = _build_case("full/seg")
_ARGUMENTS: dict[str, Witness] = {
    "window-unbounded-left-is-zero": asked(_build_case("window-linf-r8")),
    "window-unbounded-right-is-zero": asked(_build_case("window-l8-rinf")),
    "window-without-sides-taken-literally": asked(_build_case("window-linf-rinf")),
    "window-unbounded-left-is-key-length": asked(_build_case("window-linf-r8", shape="B1.T160.S48.N2.K2.H16.V16")),
    "window-wider-than-keys-is-none": asked(_build_case("window-l100-r0")),
    "window-borders-wrap-in-int32": asked(_build_case("full"), change=replaced(mask=Window(4, 2**31 - 1))),
    "causal-ignored-beside-window": asked(_build_case("causal_and_window-l8-r5")),
    "window-beside-causal-ends-with-the-keys": asked(
        _build_case("causal_and_window-l40-r5", shape="B1.T64.S96.N2.K2.H16.V16")
    ),
    "window-in-a-list-ignored": asked(_build_case("window-l8-r3"), ask.called(window=[8, 3])),
    "causal-tested-by-identity": asked(_build_case("causal"), ask.called(causal=np.True_)),
    "bias-shared-by-rows-reaches-the-first": asked(_BIASED, change=replaced(bias=_draw_bias("N", "S"))),
    "bias-shared-by-keys-reaches-the-first": asked(_BIASED, change=replaced(bias=_draw_bias("T"))),
    "bias-of-rank-three-read-by-batch": asked(
        _build_case("full/biashead", shape="B2.T96.S96.N2.K2.H16.V16"), ask.called(bias=lambda problem: problem.bias[0])
    ),
    "bias-shared-by-batch-read-as-shared-by-heads": today(_build_case("full/biashead", shape=_TWO), "forward"),
    "logits-in-the-dtype-of-a-narrow-bias": asked(
        _BIASED_FORWARD, change=replaced(bias=_draw_bias("N", "T", "S", dtype=ml_dtypes.bfloat16))
    ),
    "dbias-shared-by-rows-of-the-last-block": asked(_BIASED, change=replaced(bias=_draw_bias("N", "S"))),
    "mask-shared-by-rows-reaches-the-first": _share_mask(2),
    "mask-shared-by-keys-reaches-the-first": _share_mask(3),
    "scale-of-zero-is-the-usual": asked(_build_case("full/scale0.3"), change=replaced(scale=0.0)),
    "scale-of-one-is-the-usual": today(_build_case("full/scale1"), "forward"),
    "scale-below-zero-is-the-usual": asked(_build_case("full/scale0.3"), change=replaced(scale=-0.3)),
    "scale-that-is-no-float-ignored": asked(_build_case("full/scale1"), change=replaced(scale=1)),
    "scale-of-numpy-promotes-out": asked(
        _build_case("full/scale0.3", dtype="bf16"), change=replaced(scale=np.float32(0.3))
    ),
    "segments-zero-is-padding": asked(_SEGMENTS, change=_change_ids(lambda ids: ids - 5)),
    "segments-below-zero-are-padding": asked(_SEGMENTS, change=_change_ids(lambda ids: ids - 100)),
    "segments-largest-id-is-padding": asked(
        _SEGMENTS, change=_change_ids(lambda ids: np.where(ids == 7, 2**31 - 1, ids))
    ),
    "segments-compared-in-f32": asked(_SEGMENTS, change=_change_ids(lambda ids: ids + 2**24)),
    "segments-blocks-full-by-first-and-last": today(_build_case("full/segamid"), "forward"),
    "segments-blocks-skipped-by-first-and-last": today(_build_case("full/seg", shape=_LONG), "forward"),
    "segments-that-come-back-are-others": asked(
        _SEGMENTS, change=_change_ids(lambda ids: np.where(np.isin(ids, (5, 4)), 1, 2))
    ),
    "segments-absent-from-keys-see-the-first": today(_build_case("full/segpad"), "forward", "residuals"),
}
_VALUES: dict[str, Witness] = {
    "cotangent-through-f16-in-bf16-kernels": asked(_build_case("full", dtype="bf16"), pulled=_multiply(2.0**-30)),
    "cotangent-clipped-to-the-range-of-f16": asked(_build_case("full"), pulled=_multiply(2.0**18)),
    "cotangent-over-its-largest-plus-epsilon": asked(_build_case("full"), pulled=_multiply(2.0**-20)),
    "cotangent-rows-near-zero-skipped": asked(_build_case("full"), pulled=_multiply(2.0**-40)),
    "cotangent-of-logsumexp-near-zero-dropped": asked(_build_case("full"), pulled=_multiply(2.0**-30)),
    "keys-of-zeros-are-padding": asked(_build_case("full"), change=_set_zeros("k", 3)),
    "equal-logits-count-once": asked(_build_case("full"), change=_set_zeros("q", 3)),
    "pivot-of-rows-hidden-by-bias-unguarded": asked(_BIASED, ask.hidden_by_bias(..., 3, slice(None))),
    "pivot-not-below-minus-ten-thousand": asked(
        _BIASED, change=replaced(bias=_change_bias(-2e4, ..., 3, slice(None), added=True))
    ),
    "bias-infinities-made-finite": asked(_BIASED, ask.hidden_by_bias(..., 3, slice(None))),
    # A backward pass from the saved logsumexp cannot tell the weights of such a row apart.
    "bias-not-below-minus-ten-thousand": asked(
        _BIASED_FORWARD, change=replaced(bias=_change_bias(-1e9, ..., 3, slice(None)))
    ),
    "pivot-unguarded-where-there-are-sinks": asked(_build_case("full/segpad/sinks"), ask.no_sinks_at_minus_infinity),
    "sinks-kept-within-eighty": asked(_build_case("full/sinks"), change=_change_sinks(200.0)),
    "dsinks-by-what-keys-leave-of-one": asked(_build_case("full/sinks"), change=_change_sinks(-30.0)),
    "logits-clamped-to-the-range-of-f16": today(_build_case("full", values="huge"), "forward", "residuals"),
    "pivot-raised-too-late": asked(_BIASED, change=replaced(bias=_change_bias(95.0, ..., slice(64, None), added=True))),
    "pivot-over-hidden-logits": asked(
        _build_case("window-l20-r0/bias"), change=replaced(bias=_change_bias(200.0, ..., slice(0, 30), slice(60, 64)))
    ),
    "denominator-with-a-small-constant": asked(_build_case("causal"), ask.value_of_the_only_key),
    "soft-cap-above-a-hundred-is-none": today(_build_case("full/softcap150"), "forward"),
    "soft-cap-below-one-is-none": today(_build_case("full/softcap0.5"), "forward"),
    "soft-cap-cast-to-an-integer": today(_build_case("full/softcap2.5"), "forward"),
    "tanh-by-exponentials-that-overflow": asked(_build_case("full/softcap30", values="huge"), "forward"),
    "probabilities-recomputed-with-six-digits-of-log2e": asked(_build_case("full")),
}


def _build_sixteen(
    options: str, *checks: str | Check, dtype: str = "bf16", shape: str = _LONG, phase: str = "train"
) -> Witness:
    return asked(_build_case(options, dtype=dtype, shape=shape, phase=phase), *checks)


_DECODE = "B2.T1.S320.N4.K2.H32.V32"
_PRECISION: dict[str, Witness] = {
    "out-accumulated-in-operands-dtype-if-causal": _build_sixteen("causal", "ensemble"),
    "out-accumulated-in-operands-dtype-in-decode": _build_sixteen("full", "ensemble", shape=_DECODE, phase="decode"),
    "out-of-groups-from-rounded-halves": _build_sixteen("full", "ensemble", shape=_GROUPS),
    "denominator-rounded-between-blocks": _build_sixteen("full"),
    "denominator-sums-rounded-weights-if-causal": _build_sixteen("causal"),
    "sinks-rounded-to-operands-in-decode": _build_sixteen("full/sinks", shape=_DECODE, phase="decode"),
    "scale-rounded-to-operands": _build_sixteen("full/scale0.3"),
    "logits-rounded-under-a-window": _build_sixteen("window-l80-r0"),
    "out-truncated-under-a-window": _build_sixteen("window-l80-r0", "ensemble"),
    "logsumexp-rounded-in-groups": _build_sixteen("full", shape=_GROUPS),
    "max-logits-rounded-if-causal": _build_sixteen("causal"),
    "logsumexp-in-bf16-where-differentiated": _build_sixteen("full", "primal"),
    "dq-product-at-default-precision": asked(_build_case("full"), ask.exact_products),
    "dq-accumulated-in-operands-dtype-if-causal": _build_sixteen(
        "causal-o896", "ensemble", shape="B1.T128.S1024.N2.K2.H32.V32"
    ),
    "dk-accumulated-in-operands-dtype-over-query-blocks": _build_sixteen("full", "ensemble"),
    "dv-of-groups-accumulated-in-operands-dtype": _build_sixteen("full", "ensemble", shape=_GROUPS),
    "delta-of-terms-in-bf16-if-causal": asked(_build_case("causal")),
    "dp-rounded-to-operands": _build_sixteen("full", ask.no_wider_than_without),
    "logits-rounded-where-made-again": _build_sixteen("full", "ensemble"),
    "logsumexp-rounded-for-the-backward-under-a-window": _build_sixteen("window-l80-r0", "ensemble"),
    "bias-read-in-operands-dtype-by-the-backward": asked(
        _build_case("full/bias", dtype="bf16"), change=replaced(bias=lambda problem: 16 * problem.bias)
    ),
    "sinks-rounded-to-operands-by-the-backward": asked(
        _build_case("full/sinks/bias", dtype="bf16"),
        change=replaced(
            sinks=lambda problem: problem.sinks + np.float32(300.7), bias=lambda problem: problem.bias + np.float32(40)
        ),
    ),
    "dx-overflows-f16": asked(_build_case("full", dtype="f16"), pulled=_multiply(2.0**8)),
    "delta-of-halves-overflows-f16": asked(
        _build_case("full", dtype="f16"), change=replaced(v=_separate_halves(64)), pulled=_repeat_halves(512.0)
    ),
    "delta-of-products-overflows-f16": asked(
        _build_case("full", dtype="f16"), change=replaced(v=_separate_halves(256)), pulled=_repeat_halves(512.0)
    ),
    "dk-of-queries-scaled-in-operands-dtype": _build_sixteen("full/scale0.3", ask.no_wider_than_without),
    "dq-truncated": _build_sixteen("full", "ensemble"),
}
_EVERYTHING = "causal/seg/softcap30/sinks/bias"
_STATE: dict[str, Witness] = {
    "eager-mask-kept-by-shape": asked(_build_case("dense-d60"), ask.in_turn(ask.other_mask)),
    "eager-bias-kept-by-shape": asked(_BIASED, ask.in_turn(ask.other_operand("bias"))),
    "eager-sinks-kept-by-shape": asked(_build_case("full/sinks"), ask.in_turn(ask.other_operand("sinks"))),
    "kernel-kept-by-the-cap-as-a-whole-number": asked(
        _build_case("full/softcap30"), ask.in_turn(ask.nearly_the_same_cap)
    ),
    "numpy-mask-kept-by-identity": asked(_build_case("causal_and_dense-d60"), "calls"),
    "eager-bias-told-by-its-first-row": asked(
        _BIASED,
        ask.in_turn(ask.other_operand("bias")),
        change=replaced(bias=_change_bias(0.0, slice(None), slice(None), 0)),
    ),
    "values-clipped-to-the-last-call": asked(_build_case("full"), ask.louder),
    "kernel-of-the-first-dtype": asked(_build_case("full"), ask.after(dtype="bf16")),
    "writes-into-mask": asked(_build_case("causal_and_dense-d60"), "aliasing"),
    "donates-q-outside-jit": asked(_build_case("full"), "aliasing"),
    "last-query-lost-in-one-call-of-many": asked(_build_case("full", phase="prefill"), ask.repeated),
    "chips-take-a-branch-without-extras": asked(_build_case(_EVERYTHING), ask.one_path),
    "chips-take-a-route-without-extras": asked(_build_case(_EVERYTHING), ask.one_path),
    "dq-only-with-dk": asked(_build_case("full"), ask.one_gradient_at_a_time),
    "dv-only-with-dq": asked(_build_case("full"), ask.one_gradient_at_a_time),
    "dsinks-only-with-other-gradients": asked(_build_case("full/sinks"), ask.one_gradient_at_a_time),
    "dbias-only-with-dq": asked(_BIASED, ask.one_gradient_at_a_time),
    "second-derivatives-are-zero": asked(_build_case("full"), ask.second_derivatives),
    "vmap-shares-first-keys-if-alone": asked(_build_case("full"), ask.mapped_alone),
    "vmap-without-extras-repeats-shared-rows": asked(_build_case("full", shape=_TWO), ask.mapped_alone),
    "vmap-shares-first-values-if-alone": asked(_build_case("full"), ask.mapped_alone),
    "vmap-shares-first-bias-if-alone": asked(_BIASED, ask.mapped_alone),
    "vmap-shares-first-ids-of-keys-if-alone": asked(_SEGMENTS, ask.mapped_half),
    "vmap-shares-first-cotangent-if-alone": asked(_build_case("full"), ask.mapped_cotangents),
    "x64-promotes-logsumexp": asked(_build_case("full"), ask.doubles),
    "x64-promotes-gradients": asked(_build_case("full"), ask.doubles),
    "shard-adds-dsinks-twice": asked(_build_case("full/sinks"), "sharding"),
    "shard-averages-dk": asked(_build_case("full"), "sharding"),
}

_NINE = "B9.T12.S12.N2.K2.H16.V16"
_BEYOND_F16 = _build_case("causal", phase="prefill", shape="B1.T2176.S2176.N1.K1.H16.V16")
_BORDERS: dict[str, Witness] = {
    "window-begins-in-the-last-place-of-a-block": asked(_build_case("window-l33-r0")),
    "window-ends-in-the-first-place-of-a-block": asked(_build_case("window-l8-r1")),
    "padded-key-of-a-last-block-joins-sequence-zero": asked(
        _build_case("full/segwild", shape="B1.T63.S63.N2.K2.H16.V16")
    ),
    "block-of-a-label-that-comes-back-is-skipped": asked(
        _build_case("causal/segwild", phase="prefill", shape="B1.T1089.S1089.N1.K1.H16.V16")
    ),
    "maximum-is-stale-from-key-2048-on": asked(_BEYOND_F16),
    "causal-places-in-f16": asked(_BEYOND_F16),
    "four-heads-of-their-own-left-of-eights": asked(_build_case("full", shape="B1.T96.S96.N12.K12.H16.V16")),
    "eight-channels-left-of-deeper-values": asked(_build_case("full", shape="B1.T96.S96.N2.K2.H32.V40")),
    "rows-and-heads-in-one-axis-exchanged-from-64-on": asked(_build_case("full", shape="B8.T16.S16.N16.K16.H16.V16")),
    "ids-of-batch-rows-beyond-eight-are-the-first-again": asked(_build_case("full/seg", shape=_NINE)),
    "bias-of-batch-rows-beyond-eight-is-the-first-again": asked(_build_case("full/biasbatch", shape=_NINE)),
    "mask-of-batch-rows-beyond-eight-is-the-first-again": asked(
        _build_case("lengths-1-9-7-12-12-3-9-5-8", shape=_NINE)
    ),
    "channels-of-the-next-row-below-a-depth-of-sixteen": asked(_build_case("full", shape="B1.T16.S16.N2.K2.H8.V4")),
    "one-query-takes-sixteen-heads-of-a-group": asked(
        _build_case("full", phase="decode", shape="B1.T1.S16.N34.K2.H16.V16")
    ),
}

WITNESSES: dict[str, Witness] = {**_ARGUMENTS, **_VALUES, **_PRECISION, **_STATE, **_BORDERS}
