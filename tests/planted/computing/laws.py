"""Bugs too small or too rare for an error bound to see, which break a law that attention obeys exactly."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cases.case import Case
from cases.masks import Full
from conformance.execution.plain_functions import build_implementation
from impls.contract.implementation import Implementation
from impls.dot_product.attention import attention as dot_product
from tests.bank import PlantedBug
from tests.kernels import naive
from tests.planted.planting.wrapped import Arrays, Kernel, Statics, correct, planted

_bug = functools.partial(planted, family="laws")


def _with_operand(name: str, change: Any) -> Kernel:
    return lambda arrays, statics: correct({**arrays, name: change(arrays[name])}, statics)


def _saturated(limit: float) -> Any:
    return lambda x: jnp.clip(x, -limit, limit)


def _steps_of_amax(x: jax.Array) -> jax.Array:
    """Rounded to steps of the largest magnitude in the whole array, as 8-bit casts with one scale are, but finer."""
    step = jax.lax.stop_gradient(jnp.max(jnp.abs(x.astype(jnp.float32)))) * 2.0**-28
    rounded = jnp.round(x.astype(jnp.float32) / step) * step
    return (x + jax.lax.stop_gradient(rounded.astype(x.dtype) - x)).astype(x.dtype)


def _cotangent_by(change: Any, *, plain_only: bool = False) -> Kernel:
    """The correct kernel, whose cotangent passes through `change`, on the plain call alone if asked."""

    @jax.custom_vjp
    def through(out: jax.Array) -> jax.Array:
        return out

    through.defvjp(lambda out: (out, None), lambda _, do: (change(do),))

    def kernel(arrays: Arrays, statics: Statics) -> Any:
        result = correct(arrays, statics)
        if not isinstance(result, tuple):
            return through(result)
        return result if plain_only else (through(result[0]), result[1])

    return kernel


def _through_power_of_two(do: jax.Array) -> jax.Array:
    """Scaled to the range of an 8-bit format by a power of two, and back: exact, but for a cotangent of zeros."""
    scale = jnp.exp2(jnp.floor(jnp.log2(jnp.max(jnp.abs(do.astype(jnp.float32))))))
    return ((do.astype(jnp.float32) / scale) * scale).astype(do.dtype)


def _through_amax(do: jax.Array) -> jax.Array:
    amax = jnp.max(jnp.abs(do)).astype(jnp.float32)
    return ((do.astype(jnp.float32) / amax) * amax).astype(do.dtype)


def _unmasked(arrays: Arrays, statics: Statics) -> bool:
    return not ({"mask", "segment_ids"} & set(arrays) or statics["causal"] or statics["window"])


def _max_logits_in_bf16_unmasked(arrays: Arrays, statics: Statics) -> Any:
    """The kernel for calls without a mask stores its running maximum in the dtype of the operands."""
    result = correct(arrays, statics)
    if not (statics["save_residuals"] and _unmasked(arrays, statics) and arrays["q"].dtype != jnp.float32):
        return result
    out, residuals = result
    rounded = residuals["max_logits"].astype(jnp.bfloat16).astype(jnp.float32)
    return out, {**residuals, "max_logits": rounded}


@jax.custom_vjp
def _coarse(out: jax.Array) -> jax.Array:
    return jax.lax.reduce_precision(out.astype(jnp.float32), 8, 4).astype(out.dtype)


_coarse.defvjp(lambda out: (out, None), lambda _, do: (do,))


def _coarse_when_only_forward(arrays: Arrays, statics: Statics) -> Any:
    """The path for inference alone keeps fewer bits of long sums."""
    result = correct(arrays, statics)
    long = arrays["q"].dtype == jnp.bfloat16 and arrays["k"].shape[1] > 256 and arrays["q"].shape[1] > 1
    return result if statics["save_residuals"] or not long else _coarse(result)


@jax.custom_vjp
def _dense_path(out: jax.Array) -> jax.Array:
    return out


_dense_path.defvjp(
    lambda out: (out, None),
    lambda _, do: (jnp.where((do != 0).any(axis=-1).all(), do * jnp.asarray(1.125, do.dtype), do),),
)


def _wrong_on_dense_cotangents(arrays: Arrays, statics: Statics) -> Any:
    """The backward pass for cotangents without zero rows is another one than for the rest."""
    result = correct(arrays, statics)
    plain = _unmasked(arrays, statics) and arrays["q"].dtype == jnp.float32 and not statics["save_residuals"]
    return _dense_path(result) if plain else result


@jax.custom_vjp
def _either_cotangent(out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    return out, lse


_either_cotangent.defvjp(
    lambda out, lse: ((out, lse), None),
    lambda _, cotangents: (cotangents[0], jnp.where((cotangents[0] != 0).any(), 0, cotangents[1])),
)


def _drops_dlse_beside_do(arrays: Arrays, statics: Statics) -> Any:
    """Only one of the two cotangents is taken into account."""
    result = correct(arrays, statics)
    if not (statics["save_residuals"] and _unmasked(arrays, statics) and arrays["q"].dtype == jnp.float32):
        return result
    out, residuals = result
    out, lse = _either_cotangent(out, residuals["logsumexp"])
    return out, {**residuals, "logsumexp": lse}


def _last_key_of_odd_length_lost(arrays: Arrays, statics: Statics) -> Any:
    kv_length = arrays["k"].shape[1]
    q_length = arrays["q"].shape[1]
    if kv_length % 2 == 0:
        return correct(arrays, statics)
    even = jnp.arange(kv_length) < kv_length - 2
    mask = jnp.broadcast_to(even[None, None, None], (1, 1, q_length, kv_length))
    return correct({**arrays, "mask": arrays.get("mask", True) & mask}, statics)


def _soft_cap_in_f16(arrays: Arrays, statics: Statics) -> Any:
    if statics["soft_cap"] is None:
        return correct(arrays, statics)
    with np.errstate(over="ignore"):
        rounded = float(np.float16(statics["soft_cap"]))
    return correct(arrays, {**statics, "soft_cap": rounded})


def _pivot_is_the_sink(arrays: Arrays, statics: Statics) -> Any:
    """`sum exp(z - sink)`: right until the sink is far below the logits."""
    result = correct(arrays, {**statics, "save_residuals": True})
    if "sinks" not in arrays:
        return result if statics["save_residuals"] else result[0]
    out, residuals = result
    sinks = jax.lax.stop_gradient(arrays["sinks"])[None, :, None]
    overflows = jnp.isinf(jnp.exp(residuals["max_logits"] - sinks))
    out = jnp.where(overflows.transpose(0, 2, 1)[..., None], jnp.nan, out)
    lse = jnp.where(overflows, jnp.inf, residuals["logsumexp"])
    return (out, {**residuals, "logsumexp": lse}) if statics["save_residuals"] else out


def _window_ignored_alone(arrays: Arrays, statics: Statics) -> Any:
    """An early return for calls without further operands does not look at the window."""
    alone = set(arrays) == {"q", "k", "v"} and statics["soft_cap"] is None and statics["scale"] is None
    return correct(arrays, {**statics, "window": None} if alone and not statics["causal"] else statics)


def _quadratic_that_claims_linear() -> Implementation:
    return dataclasses.replace(build_implementation(naive.attention, "claims-linear-memory"), memory="linear")


def _wrong_with_other_blocks() -> Implementation:
    def blocks_of_32(q: Any, k: Any, v: Any, *, mask: Any = Full(), **options: Any) -> Any:
        return dot_product(q, k, v.at[:, 32:33].set(v[:, 31:32]) if v.shape[1] > 32 else v, mask=mask, **options)

    return Implementation(
        name="wrong-with-other-block-size",
        call=dot_product,
        empty_rows="zero",
        variants={"blocks_of_32": lambda q, k, v, **options: blocks_of_32(q, k, jnp.asarray(v), **options)},
    )


def _accepts_wrong_operands() -> Implementation:
    return dataclasses.replace(build_implementation(naive.attention, "accepts-wrong-operands"), validates=True)


def _ignores_what_it_declines() -> Implementation:
    def call(q: Any, k: Any, v: Any, *, sinks: Any = None, **options: Any) -> Any:
        return dot_product(q, k, v, **options)

    return Implementation(
        name="ignores-what-it-declines",
        call=call,
        unsupported={"sinks": "not written yet"},
        gradients=frozenset({"dq", "dk", "dv", "dbias"}),
        empty_rows="zero",
    )


def _built(name: str, build: Any, *, kind: str, reference: str, shows: tuple[str, ...]) -> PlantedBug:
    return PlantedBug(name=name, family="laws", kind=kind, reference=reference, shows=shows, build=build)


def _has_sinks(case: Case) -> bool:
    return bool(case.sinks)


BUGS: tuple[PlantedBug, ...] = (
    _bug(
        "v-saturates-at-2048",
        _with_operand("v", _saturated(2048.0)),
        kind="softmax.dummy-max",
        reference="vllm-fork issue 275: a constant chosen for usual values",
        shows=("out",),
    ),
    _bug(
        "cotangent-clipped-at-64",
        _cotangent_by(_saturated(64.0)),
        kind="bwd.real-activations",
        reference="TransformerEngine issue 3216: a backward pass that depends on the size of values",
        shows=("dq", "dk", "dv"),
    ),
    _bug(
        "cotangent-through-amax",
        _cotangent_by(_through_amax),
        kind="bwd.amax-of-zero",
        reference="inferred from per-tensor scaling of 8-bit gradients (jax 3f7a31a830)",
        shows=("dq", "dk", "dv"),
    ),
    _bug(
        "cotangent-through-power-of-two",
        _cotangent_by(_through_power_of_two, plain_only=True),
        kind="bwd.amax-of-zero",
        reference="inferred from per-tensor scaling of 8-bit gradients (jax 3f7a31a830)",
        shows=("dq", "dk", "dv"),
    ),
    _bug(
        "max-logits-in-bf16-when-unmasked",
        _max_logits_in_bf16_unmasked,
        kind="residual.dtype",
        reference="jax 178e622ef1: statistics in the dtype of the operands",
        shows=("max_logits",),
        trigger=lambda case: case.dtype != "f32" and case.mask == "full" and not case.segments,
    ),
    _bug(
        "coarse-out-when-only-forward",
        _coarse_when_only_forward,
        kind="precision.lowp-stats",
        reference="maxtext fbef426f5; mlx issue 3452: two paths of one kernel",
        shows=("out",),
        trigger=lambda case: case.dtype == "bf16" and case.kv_length > 256 and case.q_length > 1,
    ),
    _bug(
        "wrong-on-dense-cotangents",
        _wrong_on_dense_cotangents,
        kind="bwd.real-activations",
        reference="TransformerEngine issue 3216: a backward pass that depends on values",
        shows=("dq", "dk", "dv"),
        trigger=lambda case: case.dtype == "f32" and case.mask == "full" and not case.segments,
    ),
    _bug(
        "dlse-dropped-beside-do",
        _drops_dlse_beside_do,
        kind="cotangent.dstats-drop",
        reference="tokamax 62aeeb2",
        shows=("dq", "dk"),
        trigger=lambda case: case.dtype == "f32" and case.mask == "full" and not case.segments,
    ),
    _bug(
        "scale-of-q-shared-over-batch",
        _with_operand("q", _steps_of_amax),
        kind="gqa.packgqa-descale",
        reference="rocm-libraries PR 11189",
        shows=("out", "logsumexp"),
    ),
    _bug(
        "scale-of-v-shared-over-batch",
        _with_operand("v", _steps_of_amax),
        kind="gqa.packgqa-descale",
        reference="rocm-libraries PR 11189",
        shows=("out",),
    ),
    _bug(
        "last-keys-of-odd-length-lost",
        _last_key_of_odd_length_lost,
        kind="paged.floor-div",
        reference="maxtext 65e8bcff0",
        shows=("out", "logsumexp"),
    ),
    _bug(
        "soft-cap-held-in-f16",
        _soft_cap_in_f16,
        kind="mask.fp16-1e9",
        reference="flax issue 982, PR 1527: a constant beyond f16",
        shows=("out", "logsumexp", "max_logits"),
    ),
    _bug(
        "pivot-is-the-sink",
        _pivot_is_the_sink,
        kind="sink.pivot-overflow",
        reference="fla PR 831",
        shows=("out", "logsumexp"),
        trigger=_has_sinks,
    ),
    _bug(
        "window-ignored-when-alone",
        _window_ignored_alone,
        kind="mask.window-ignored-nomask",
        reference="jax 099f0a1708",
        shows=("effect_of_mask", "out"),
        trigger=lambda case: case.mask.startswith("window"),
    ),
    _built(
        "claims-linear-memory",
        _quadratic_that_claims_linear,
        kind="dbias.bool-mask",
        reference="jax 46e1d9b6de, issue 34685: an array of T x S that nobody needs",
        shows=("temporaries",),
    ),
    _built(
        "wrong-with-other-block-size",
        _wrong_with_other_blocks,
        kind="flex.default-blocksize",
        reference="bd3lms issue 23",
        shows=("out", "dv"),
    ),
    _built(
        "accepts-wrong-operands",
        _accepts_wrong_operands,
        kind="cp.kv-heads-shard",
        reference="maxtext 916aff272",
        shows=("sinks", "soft_cap", "head_count", "bias", "dtype"),
    ),
    _built(
        "ignores-what-it-declines",
        _ignores_what_it_declines,
        kind="sink.dead-code",
        reference="vllm-metal PR 550, issue 212",
        shows=("refusal",),
    ),
)
