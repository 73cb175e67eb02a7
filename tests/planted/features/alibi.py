"""Bugs of ALiBi, each one passage of the source of the block-sparse kernel changed.

The distance, where the queries stand, which head has which slope, and where in the order of things it is added.
"""

from __future__ import annotations

import dataclasses

from conformance.mutation.kernels.triggers import Trigger, both, grouped, has, one_query, trains
from impls.contract.implementation import Implementation
from tests.bank import PlantedBug
from tests.planted.planting.source_change import Change, changed

_FORWARD = "out logsumexp max_logits"
_alibi = has("alibi_slopes")

# The passages of `impls.block_flash.operand_blocks` that are changed.
_DISTANCE = "jnp.abs(i + (plan.kv_length - plan.q_length) - j).astype(jnp.float32)"
_PENALTY = "penalty = blocks.alibi_slopes * distance"
_SLOPES = "slopes.astype(jnp.float32).reshape(1, plan.num_kv_heads, -1, 1, 1)"
_ASKED = "    if blocks.alibi_slopes is not None:\n"
_CAP = (
    "        tanh = jnp.tanh(logits / plan.soft_cap)\n"
    "        logits, slope = plan.soft_cap * tanh, 1 - tanh * tanh  # (2)\n"
)
_CAP_FIRST = (
    "        later = 0.0 if penalty is None else penalty\n"
    "        tanh = jnp.tanh((logits + later) / plan.soft_cap)\n"
    "        logits, slope = plan.soft_cap * tanh - later, 1 - tanh * tanh\n"
)


def _bug(
    name: str,
    before: str,
    after: str,
    *,
    kind: str,
    reference: str,
    shows: str = _FORWARD,
    trigger: Trigger = _alibi,
    module: str = "operand_blocks",
) -> PlantedBug:
    def build() -> Implementation:
        package = changed("impls.block_flash", f"planted_{name.replace('-', '_')}", Change(module, before, after))
        found: Implementation = package.build_implementation(name)
        return dataclasses.replace(found, offers=frozenset({"alibi_slopes"}))  # of nothing else is there a bug

    return PlantedBug(
        name=name,
        family="alibi",
        kind=kind,
        reference=reference,
        shows=tuple(shows.split()),
        build=build,
        trigger=trigger,
    )


def _distance(name: str, formula: str, *, kind: str, reference: str, trigger: Trigger = _alibi) -> PlantedBug:
    """The kernel with another distance of queries `i` and keys `j`."""
    return _bug(name, _DISTANCE, f"({formula}).astype(jnp.float32)", kind=kind, reference=reference, trigger=trigger)


BUGS: tuple[PlantedBug, ...] = (
    _bug(
        "alibi-sign-reversed",
        _PENALTY,
        "penalty = -blocks.alibi_slopes * distance",
        kind="alibi.sign",
        reference="attention-gym PR 86",
    ),
    _distance(
        "alibi-distance-not-absolute",
        "i + (plan.kv_length - plan.q_length) - j",
        kind="alibi.not-absolute",
        reference="inferred from flash-attention PR 540 (what is right beside a causal mask, without one)",
        trigger=both(_alibi, lambda case: "causal" not in case.mask),
    ),
    _distance(
        "alibi-aligned-at-the-start",
        "jnp.abs(i - j)",
        kind="alibi.alignment",
        reference="flash-attention issue 907 (training and decoding differ)",
        trigger=has("alibi_slopes", "unequal_lengths"),
    ),
    _distance(
        "alibi-by-key-alone",
        "plan.kv_length - 1 - j",
        kind="alibi.by-key",
        reference="llm-foundry issue 186; NeMo PR 7105",
    ),
    _distance(
        "alibi-one-too-far",
        "jnp.abs(i + (plan.kv_length - plan.q_length) - j) + 1",
        kind="alibi.off-by-one",
        reference="vllm PR 945",
    ),
    _distance(
        "alibi-places-within-the-block",
        "jnp.abs(i % plan.block_q + (plan.kv_length - plan.q_length) - j % plan.block_kv)",
        kind="alibi.block-relative",
        reference="inferred from kernels that count from the start of a block",
        trigger=both(_alibi, lambda case: max(case.q_length, case.kv_length) > 128),
    ),
    _distance(
        "alibi-distance-in-bf16",
        "lax.reduce_precision(jnp.abs(i + (plan.kv_length - plan.q_length) - j).astype(jnp.float32), 8, 7)",
        kind="alibi.precision",
        reference="HabanaAI/vllm-fork PR 503 (long sequences)",
        trigger=both(has("alibi_slopes", "f32"), lambda case: case.kv_length > 256),
    ),
    _bug(
        "alibi-slopes-of-interleaved-heads",
        _SLOPES,
        "slopes.astype(jnp.float32).reshape(1, -1, plan.num_kv_heads, 1, 1).swapaxes(1, 2)",
        kind="alibi.head",
        reference="inferred from vllm issue 9136",
        trigger=both(_alibi, grouped, lambda case: case.num_kv_heads > 1),
    ),
    _bug(
        "alibi-slope-of-the-first-head",
        _SLOPES,
        "jnp.broadcast_to(slopes[0], slopes.shape).astype(jnp.float32).reshape(1, plan.num_kv_heads, -1, 1, 1)",
        kind="alibi.head",
        reference="Megatron-DeepSpeed issue 227 (slopes of the first heads on every rank)",
    ),
    _bug(
        "alibi-slopes-by-the-number-of-heads",
        _SLOPES,
        "(2.0 ** (-8 / slopes.size * (1 + jnp.arange(slopes.size)))).reshape(1, plan.num_kv_heads, -1, 1, 1)",
        kind="alibi.not-taken",
        reference="flashinfer issue 1606 (slopes made from the heads that there are, none taken)",
    ),
    _bug(
        "alibi-scaled",
        _PENALTY,
        "penalty = plan.scale * blocks.alibi_slopes * distance",
        kind="alibi.scaled",
        reference="inferred from TransformerEngine PR 3391 (slopes in units of the scale)",
    ),
    _bug(
        "alibi-after-the-soft-cap",
        _CAP,
        _CAP_FIRST,
        kind="alibi.order",
        reference="TransformerEngine PR 3391 (one path adds it before the cap, the other after)",
        trigger=has("alibi_slopes", "soft_cap"),
    ),
    _bug(
        "alibi-ignored-in-decode",
        _ASKED,
        "    if blocks.alibi_slopes is not None and plan.q_length > 1:\n",
        kind="alibi.decode",
        reference="keras-hub PRs 2862, 2977",
        trigger=both(_alibi, one_query),
    ),
    _bug(
        "alibi-lost-in-the-backward",
        "block = compute_pair(plan, blocks, pair)",
        "block = compute_pair(plan, blocks._replace(alibi_slopes=None), pair)",
        kind="alibi.backward",
        reference="inferred from flash-attention PR 540 (the backward pass was added, and mended, after the forward)",
        shows="dq dk dv dsinks dbias",
        trigger=trains("alibi_slopes"),
        module="backward",
    ),
)
