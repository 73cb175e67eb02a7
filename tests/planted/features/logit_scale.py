"""Bugs of the logit scale, each one passage of the source of dot-product attention changed.

What is multiplied by it and when, which head has which factor, and its gradient.
"""

from __future__ import annotations

import dataclasses

from conformance.mutation.kernels.triggers import Trigger, both, grouped, has, one_query, trains
from impls.contract.implementation import Implementation
from tests.bank import PlantedBug
from tests.planted.planting.source_change import Change, changed

_FORWARD = "out logsumexp max_logits"
_has_logit_scale = has("logit_scale")

# The passages of `impls.dot_product.attention` that are changed.
_ASKED = "    if logit_scale is not None:\n        factor ="
_FACTOR = "factor = jnp.asarray(logit_scale, jnp.float32).reshape(num_kv_heads, -1, 1, 1)"
_APPLIED = "        logits = logits * factor\n"
_BIASED = "        logits = logits + _split_heads(jnp.asarray(bias, jnp.float32), num_kv_heads)\n"


def _plant(
    name: str,
    before: str,
    after: str,
    *,
    kind: str,
    reference: str,
    shows: str = _FORWARD,
    trigger: Trigger = _has_logit_scale,
) -> PlantedBug:
    def build() -> Implementation:
        package = changed("impls.dot_product", f"planted_{name.replace('-', '_')}", Change("attention", before, after))
        found: Implementation = package.build_implementation(name)
        return dataclasses.replace(found, offers=frozenset({"logit_scale"}))  # no other operand has a bug here

    return PlantedBug(
        name=name,
        family="logit_scale",
        kind=kind,
        reference=reference,
        shows=tuple(shows.split()),
        build=build,
        trigger=trigger,
    )


BUGS: tuple[PlantedBug, ...] = (
    _plant(
        "logit-scale-gradient-of-the-first-row",
        _APPLIED,
        "        rows = jnp.arange(logits.shape[0]).reshape(-1, 1, 1, 1, 1)\n"
        "        logits = logits * jnp.where(rows == 0, factor, lax.stop_gradient(factor))\n",
        kind="logit_scale.gradient",
        reference="inferred from kernels that write a parameter's gradient for each batch row, and sum none of them",
        shows="dlogit_scale",
        trigger=both(trains("logit_scale"), lambda case: case.batch > 1),
    ),
    _plant(
        "logit-scale-lost-in-dq-and-dk",
        _APPLIED,
        "        logits = lax.stop_gradient(logits) * factor + (logits - lax.stop_gradient(logits))\n",
        kind="logit_scale.gradient",
        reference="inferred: the backward pass multiplies dx by the fixed scale alone",
        shows="dq dk",
        trigger=trains("logit_scale"),
    ),
    _plant(
        "logit-scale-of-the-bias-too",
        _BIASED,
        "        split = _split_heads(jnp.asarray(bias, jnp.float32), num_kv_heads)\n"
        "        logits = logits + (split if logit_scale is None else split * factor)\n",
        kind="logit_scale.order",
        reference="inferred from Swin v2 (arXiv:2111.09883, equation 2): the bias is added to scaled logits",
        trigger=has("logit_scale", "bias"),
    ),
    _plant(
        "logit-scale-exponentiated",
        _FACTOR,
        _FACTOR.replace("jnp.asarray(logit_scale, jnp.float32)", "jnp.exp(jnp.asarray(logit_scale, jnp.float32))"),
        kind="logit_scale.value",
        reference="inferred from Swin v2, whose parameter is the logarithm",
    ),
    _plant(
        "logit-scale-in-bf16",
        _APPLIED,
        "        logits = logits * lax.reduce_precision(factor, 8, 7)\n",
        kind="logit_scale.precision",
        reference="inferred from models that cast all parameters to bf16",
        shows="out logsumexp max_logits dq dk",
    ),
    _plant(
        "logit-scale-of-the-kv-head",
        _FACTOR,
        "factor = jnp.asarray(logit_scale, jnp.float32)[:num_kv_heads].reshape(num_kv_heads, 1, 1, 1)",
        kind="logit_scale.head",
        reference="inferred from vllm issue 9136 (the index of a slope in groups)",
        trigger=both(_has_logit_scale, grouped),
    ),
    _plant(
        "logit-scale-of-the-first-head",
        _FACTOR,
        "factor = jnp.broadcast_to(jnp.asarray(logit_scale, jnp.float32)[0], (num_kv_heads, 1, 1, 1))",
        kind="logit_scale.head",
        reference="inferred from Megatron-DeepSpeed issue 227 (the first head's slopes for all)",
    ),
    _plant(
        "logit-scale-ignored-in-decode",
        _ASKED,
        "    factor = jnp.ones((num_kv_heads, 1, 1, 1), jnp.float32)\n"
        "    if logit_scale is not None and logits.shape[-2] > 1:\n        factor =",
        kind="logit_scale.decode",
        reference="inferred from keras-hub PRs 2862, 2977 (an operand of training that decoding lacks)",
        trigger=both(_has_logit_scale, one_query),
    ),
)
