"""Bugs of the soft cap."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax.numpy as jnp

from conformance.mutation.kernels.plain import (
    Array,
    BackwardSteps,
    Call,
    PlainSteps,
    Saved,
    capped,
    keep,
    planted,
    stop,
)
from conformance.mutation.kernels.triggers import both, has, masked, trains
from conformance.mutation.planted_bug import PlantedBug

_bug = functools.partial(planted, "soft cap")
_capped = has("soft_cap")
_trained = trains("soft_cap")
_FORWARD = "out logsumexp max_logits"


def _without_derivative(x: Array, call: Call) -> Array:
    return x + stop(capped(x, call) - x)


def _cap(formula: Callable[[Array, float], Array]) -> PlainSteps:
    """The kernel with another formula of the cap."""
    return PlainSteps(cap=lambda x, call: x if call.soft_cap is None else formula(x, call.soft_cap))


def _derivative(formula: Callable[[Saved, float], Array]) -> BackwardSteps:
    """The backward pass with another `dz / dx`."""

    def dx(dz: Array, saved: Saved) -> Array:
        cap = saved.call.soft_cap
        return dz if cap is None else dz * formula(saved, cap)

    return BackwardSteps(dx=dx)


def _tanh(saved: Saved, cap: float) -> Array:
    return jnp.tanh(saved.forward.x / cap)


def _from_probabilities(saved: Saved, cap: float) -> Array:
    p = saved.probabilities.astype(saved.call.q.dtype).astype(jnp.float32)
    z = jnp.log(p) + saved.forward.logsumexp[..., None]
    return jnp.where(saved.call.allowed, 1 - (z / cap) ** 2, 1)


def _uncapped(saved: Saved) -> Array:
    return saved.probabilities_of(jnp.where(saved.call.allowed, saved.forward.x, -jnp.inf))


BUGS: tuple[PlantedBug, ...] = (
    _bug(
        "cap-ignored",
        says="The soft cap is not applied to the logits.",
        kind="cap.dropped-by-backend",
        reference="sgl-kernel-xpu PR 491; vllm-metal issue 665; mistral.rs PR 1930",
        shows=_FORWARD,
        trigger=_capped,
        steps=PlainSteps(cap=keep),
    ),
    _bug(
        "cap-ignored-where-nobody-differentiates",
        says="The soft cap is ignored unless the call is differentiated.",
        kind="cap.not-passed",
        reference="MaxText commit a56309f6f",
        shows=_FORWARD,
        trigger=_capped,
        back=BackwardSteps(),
        alone=PlainSteps(cap=keep),
    ),
    _bug(
        "cap-not-multiplied-back",
        says="The soft cap is tanh(x / cap), without the factor cap in front.",
        kind="cap.formula-mult",
        reference="inferred from flash-attention PR 2402",
        shows=_FORWARD,
        trigger=_capped,
        steps=_cap(lambda x, cap: jnp.tanh(x / cap)),
    ),
    _bug(
        "cap-after-mask",
        says="The soft cap is applied after the mask, so masked keys get a logit of -cap.",
        kind="cap.order-mask",
        reference="MaxText commit a56309f6f",
        shows=_FORWARD,
        trigger=both(_capped, masked),
        steps=PlainSteps(
            cap=keep,
            hide=lambda x, call: capped(jnp.where(call.allowed, x, -jnp.inf if call.soft_cap is None else -1e30), call),
        ),
    ),
    _bug(
        "cap-before-bias",
        says="The soft cap is applied before the bias is added.",
        kind="bias.order-of-ops",
        reference="inferred from HKUSTDial PR 199",
        shows=_FORWARD,
        trigger=has("soft_cap", "bias"),
        steps=PlainSteps(
            biased=lambda x, bias, call: capped(x, call) + bias,
            cap=lambda x, call: capped(x, call) if call.bias is None else x,
        ),
    ),
    _bug(
        "cap-before-scale",
        says="The soft cap is applied before the scale.",
        kind="cap.on-unscaled",
        reference="inferred from cap and scale applied in the wrong order",
        shows=_FORWARD,
        trigger=_capped,
        steps=PlainSteps(scaled=lambda products, scale, call: scale * capped(products, call), cap=keep),
    ),
    _bug(
        "cap-on-base-two-logits",
        says="The soft cap is applied to logits that were converted to base 2 already.",
        kind="cap.log2-fold",
        reference="sgl-kernel-xpu PR 491",
        shows=_FORWARD,
        trigger=_capped,
        steps=_cap(lambda x, cap: math.log(2) * cap * jnp.tanh(x / math.log(2) / cap)),
    ),
    _bug(
        "cap-derivative-missing",
        says="Gradients pass through the soft cap as if it were not there.",
        kind="cap.bwd-missing",
        reference="flash-attention PR 1033; tokamax PR 1121",
        shows="dq dk dbias",
        trigger=_trained,
        steps=PlainSteps(cap=_without_derivative),
    ),
    _bug(
        "cap-derivative-at-capped-logit",
        says="The derivative of the soft cap is taken at tanh(x / cap), not at x / cap.",
        kind="cap.bwd-sign",
        reference="inferred from tokamax PR 1121",
        shows="dq dk dbias",
        trigger=_trained,
        back=_derivative(lambda saved, cap: 1 - jnp.tanh(_tanh(saved, cap)) ** 2),
    ),
    _bug(
        "cap-derivative-from-masked-logits",
        says="The backward pass takes 1 - (z / cap)^2 at masked z of -inf, which gives NaN.",
        kind="cap.dtanh-after-mask",
        reference="tokamax PR 1121",
        shows="dq dk dbias",
        trigger=both(_trained, masked),
        back=_derivative(lambda saved, cap: 1 - (saved.forward.z / cap) ** 2),
    ),
    _bug(
        "cap-derivative-from-stored-probabilities",
        says="The derivative of the soft cap uses logits recovered from probabilities in the input dtype.",
        kind="cap.dtanh-log-recover",
        reference="flash-attention PR 1033, review",
        shows="dq dk dbias",
        trigger=both(_trained, lambda case: case.dtype == "f16"),
        back=_derivative(_from_probabilities),
    ),
    _bug(
        "probabilities-recomputed-without-cap",
        says="The backward pass recomputes the probabilities from logits without the soft cap.",
        kind="cap.no-bwd-recompute",
        reference="inferred from flash-attention PR 1033",
        shows="dq dk dv dbias",
        trigger=_trained,
        back=BackwardSteps(p=_uncapped),
    ),
)
