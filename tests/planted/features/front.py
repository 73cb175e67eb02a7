"""Bugs in a model's front end: rotary, norms, factors by position, projections that k and v share."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from cases.case import Case
from conformance import declare
from conformance.execution.plain_functions import build_implementation
from conformance.reference import front_end_reference as reference
from impls.contract.implementation import Implementation
from tests.bank import PlantedBug
from tests.kernels import naive

FrontEnd = Callable[..., Any]
_right = reference.apply_front_end
_LESS = ("window", "chunked", "bidirectional", "balanced", "lengths", "dense", "dense_head", "dense_batch", "indexer")


# Little but what front ends need: the bugs are in front of it, and cases without one say nothing about them.
@declare(
    behind_mask="finite",
    unsupported=dict.fromkeys((*_LESS, "prefill", "decode", "bf16", "f16", "v_head_dim"), "is not what this is about"),
)
def attention(q: Any, k: Any, v: Any, *, causal: bool = False, mask: Any = None) -> Any:
    """Naive attention."""
    return naive.attention(q, k, v, causal=causal, mask=mask)


def implementation(name: str, front_end: FrontEnd) -> Implementation:
    """Naive attention behind `front_end`."""
    return dataclasses.replace(build_implementation(attention, name), front_end=front_end)


def _has_front_end(case: Case) -> bool:
    return bool(case.steps)


def _bug(name: str, front_end: FrontEnd, *, kind: str, reference: str, shows: tuple[str, ...]) -> PlantedBug:
    return PlantedBug(
        name=name,
        family="front end",
        kind=kind,
        reference=reference,
        shows=shows,
        build=functools.partial(implementation, name, front_end),
        trigger=_has_front_end,
    )


def _with_steps(change: Callable[[tuple[str, ...]], tuple[str, ...]]) -> FrontEnd:
    """The right front end with other steps."""
    return lambda steps, *args, **options: _right(change(steps), *args, **options)


def _swapped(one: str, other: str) -> FrontEnd:
    return _with_steps(lambda steps: tuple(other if step == one else step for step in steps))


def _left_out(name: str) -> FrontEnd:
    return _with_steps(lambda steps: tuple(step for step in steps if step != name))


def _by_itself(step: str, change: Callable[..., Any]) -> FrontEnd:
    """The right front end, one step of it replaced by `change(x, positions, weights)` on q and on k."""

    def front_end(steps: Any, q: Any, k: Any, v: Any, *, q_positions: Any, kv_positions: Any, **norms: Any) -> Any:
        if step not in steps:
            return _right(steps, q, k, v, q_positions=q_positions, kv_positions=kv_positions, **norms)
        at = steps.index(step)
        first, then = steps[:at], steps[at + 1 :]
        places = {"q_positions": q_positions, "kv_positions": kv_positions}
        value = k if v is None else v
        q, k, _ = _right(first, q, k, value, **places, **norms)
        q, k = change(q, q_positions, norms.get("q_norm")), change(k, kv_positions, norms.get("k_norm"))
        return _right(then, q, k, value, **places, **norms)

    return front_end


def _angles_in_bf16(x: Any, at: Any, weights: Any) -> Any:
    """Positions times frequencies in the dtype of the activations; 8 bits do not hold them."""
    pairs = x.shape[-1] // 2
    frequency = 10_000.0 ** (-jnp.arange(pairs, dtype=jnp.float32) / pairs)
    angle = jax.lax.reduce_precision(jnp.asarray(at)[0][:, None].astype(jnp.float32) * frequency, 8, 7)[:, None, :]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = x[..., :pairs], x[..., pairs:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _turned_on_again(x: Any, at: Any, weights: Any) -> Any:
    """A backward pass of its own that turns the way the forward pass does."""

    @jax.custom_vjp
    def turned(x: Any) -> Any:
        return reference.apply_rotary("half", x, jnp.asarray(at))

    turned.defvjp(lambda x: (turned(x), None), lambda _, dy: (reference.apply_rotary("half", dy, jnp.asarray(at)),))
    return turned(x)


def _from_zero(steps: Any, q: Any, k: Any, v: Any, *, q_positions: Any, kv_positions: Any, **norms: Any) -> Any:
    """The queries of a chunk are counted from its start."""
    shifted = q_positions - q_positions[:, :1]
    return _right(steps, q, k, v, q_positions=shifted, kv_positions=kv_positions, **norms)


def _one_further(steps: Any, q: Any, k: Any, v: Any, *, q_positions: Any, kv_positions: Any, **norms: Any) -> Any:
    """Queries stand one place further than the keys of the same tokens."""
    return _right(steps, q, k, v, q_positions=q_positions + 1, kv_positions=kv_positions, **norms)


def _normed_by_sum(x: Any, at: Any, weights: Any) -> Any:
    """Divided by the length of the vector instead of the root of its mean square."""
    return x * jax.lax.rsqrt((x * x).sum(axis=-1, keepdims=True) + 1e-6)


def _centred(x: Any, at: Any, weights: Any) -> Any:
    """Layer norm: the mean is taken off first."""
    x = x - x.mean(axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * weights


def _large_epsilon(x: Any, at: Any, weights: Any) -> Any:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-3) * weights


def _constant_root(x: Any, at: Any, weights: Any) -> Any:
    """The norm is a constant to the derivative."""
    return x * jax.lax.stop_gradient(jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)) * weights


def _over_heads(x: Any, at: Any, weights: Any) -> Any:
    """All heads are normed together."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=(-2, -1), keepdims=True) + 1e-6) * weights


def _in_bf16(x: Any, at: Any, weights: Any) -> Any:
    root = jax.lax.reduce_precision(jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6), 8, 7)
    return x * root * weights


def _weights_of_q(steps: Any, q: Any, k: Any, v: Any, **options: Any) -> Any:
    if "k_norm" in options:
        options["k_norm"] = options["q_norm"]
    return _right(steps, q, k, v, **options)


def _keys_too(step: str, factor: Callable[[Any], Any]) -> FrontEnd:
    """What is for queries alone is done to keys too."""

    def front_end(steps: Any, q: Any, k: Any, v: Any, *, kv_positions: Any, **options: Any) -> Any:
        new_q, new_k, new_v = _right(steps, q, k, v, kv_positions=kv_positions, **options)
        return new_q, (new_k * factor(kv_positions)).astype(k.dtype) if step in steps else new_k, new_v

    return front_end


def _warmer_one_earlier(steps: Any, q: Any, k: Any, v: Any, *, q_positions: Any, **options: Any) -> Any:
    """The floor is of the position, not of the number of tokens up to it."""
    new_q, new_k, new_v = _right(steps, q, k, v, q_positions=q_positions, **options)
    if "temperature" in steps:
        place = jnp.asarray(q_positions)[0]
        had, has = (1 + jnp.log(1.0 + n // 16) / 2 for n in (place + 1, place))
        new_q = new_q * (has / had)[:, None, None]
    return new_q, new_k, new_v


def _value_after_steps(steps: Any, q: Any, k: Any, v: Any, **options: Any) -> Any:
    """The shared projection is taken after the steps, not raw."""
    new_q, new_k, new_v = _right(steps, q, k, v, **options)
    return new_q, new_k, new_k if v is None else new_v


def _key_gradient_twice(steps: Any, q: Any, k: Any, v: Any, **options: Any) -> Any:
    new_q, new_k, new_v = _right(steps, q, k, v, **options)
    return new_q, (2 * new_k - jax.lax.stop_gradient(new_k)) if v is None else new_k, new_v


_ALL = ("out", "dq_raw", "dk_raw")
BUGS: tuple[PlantedBug, ...] = (
    _bug(
        "rotary-interleaved-as-halves",
        _swapped("interleaved", "half"),
        kind="rope.layout",
        reference="inferred: checkpoints of one layout loaded into code of the other",
        shows=_ALL,
    ),
    _bug(
        "rotary-of-half-the-dimensions-only",
        _swapped("half", "partial"),
        kind="rope.partial",
        reference="inferred: the fraction that turns is not read",
        shows=_ALL,
    ),
    _bug(
        "rotary-left-out",
        _left_out("half"),
        kind="rope.dropped",
        reference="inferred: a layer taken for one without positions",
        shows=_ALL,
    ),
    _bug(
        "rotary-angles-in-bf16",
        _by_itself("half", _angles_in_bf16),
        kind="rope.precision",
        reference="inferred: position ids in the dtype of the activations",
        shows=_ALL,
    ),
    _bug(
        "rotary-backward-turns-forward",
        _by_itself("half", _turned_on_again),
        kind="rope.bwd-sign",
        reference="inferred: the transpose of a rotation turns back",
        shows=("dq_raw", "dk_raw", "dq_norm_raw"),
    ),
    _bug(
        "rotary-of-a-chunk-counts-from-zero",
        _from_zero,
        kind="decode.window-q-offset",
        reference="inferred from maxtext 8f82f2d02",
        shows=_ALL,
    ),
    _bug(
        "rotary-of-queries-one-further",
        _one_further,
        kind="rope.offset",
        reference="inferred from maxtext 8f82f2d02",
        shows=_ALL,
    ),
    _bug(
        "rotary-after-the-norm-of-other-models",
        _with_steps(lambda steps: tuple(reversed(steps)) if "rms" in steps else steps),
        kind="norm.order",
        reference="inferred: weights of the norm do not commute with rotary",
        shows=_ALL,
    ),
    _bug(
        "norm-by-length",
        _by_itself("l2", _normed_by_sum),
        kind="norm.sum-vs-mean",
        reference="inferred: two things are called L2 norm",
        shows=_ALL,
    ),
    _bug(
        "norm-takes-off-the-mean",
        _by_itself("rms", _centred),
        kind="norm.kind",
        reference="inferred: layer norm for RMS norm",
        shows=_ALL,
    ),
    _bug(
        "norm-with-large-epsilon",
        _by_itself("rms", _large_epsilon),
        kind="norm.epsilon",
        reference="inferred: a default instead of the model's value",
        shows=_ALL,
    ),
    _bug(
        "norm-constant-in-backward",
        _by_itself("rms", _constant_root),
        kind="norm.bwd",
        reference="inferred: no derivative through the root",
        shows=("dq_raw", "dk_raw"),
    ),
    _bug(
        "norm-over-all-heads",
        _by_itself("rms", _over_heads),
        kind="norm.axes",
        reference="inferred: models norm each head, or all together",
        shows=_ALL,
    ),
    _bug(
        "norm-root-in-bf16",
        _by_itself("rms", _in_bf16),
        kind="norm.precision",
        reference="inferred: statistics in the dtype of the activations",
        shows=_ALL,
    ),
    _bug(
        "norm-of-keys-with-weights-of-queries",
        _weights_of_q,
        kind="norm.weights",
        reference="inferred: one of two weights is read twice",
        shows=("out", "dk_raw", "dk_norm_raw"),
    ),
    _bug(
        "pre-scale-left-out",
        _left_out("prescale"),
        kind="v-scale.dropped",
        reference="Megatron-Bridge PR 4155: a scale that is read and never used",
        shows=_ALL,
    ),
    _bug(
        "pre-scale-of-keys-too",
        _keys_too("prescale", lambda at: 1.5),
        kind="scale.dropped",
        reference="inferred from jax 916e53a8a2: a scale applied twice",
        shows=_ALL,
    ),
    _bug(
        "temperature-steps-one-token-late",
        _warmer_one_earlier,
        kind="temperature.off-by-one",
        reference="inferred: positions counted from zero or one",
        shows=("out", "dq_raw"),
    ),
    _bug(
        "shared-values-after-rotary",
        _value_after_steps,
        kind="shared-kv.order",
        reference="inferred: values of a shared projection are raw",
        shows=_ALL,
    ),
    _bug(
        "shared-keys-gradient-twice",
        _key_gradient_twice,
        kind="shared-kv.grad",
        reference="inferred: the gradient of one of two uses counted twice",
        shows=("dk_raw",),
    ),
)
