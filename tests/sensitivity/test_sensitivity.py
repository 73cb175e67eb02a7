"""Test that the gate sees small, realistic errors at `quick`, and passes the same kernel without them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases.masks import Mask, Window
from conformance.judging import run_plan, runner, settings
from conformance.mutation.kernels.plain import (
    Array,
    BackwardSteps,
    Call,
    PlainSteps,
    Step,
    capped,
    default_scale,
    denominator,
    implementation,
    planted,
    repeat_heads,
    same_segment,
    stop,
)
from reports.records import FAIL, RED
from tests.bank import PlantedBug
from tests.bank.examination import iter_red_records

# One case of the grid in so many must pass on the correct kernels; at night more of them.
_CORRECT_STRIDES = [90, pytest.param(10, marks=pytest.mark.nightly)]


def _perturb_gradient(operand: int, relative: float) -> Step:
    """Keep the operand's value, and multiply its gradient by `1 + relative`."""

    def operands(*given: Any) -> tuple[Array, ...]:
        *xs, _ = given
        x = xs[operand]
        xs[operand] = x + (relative * (x.astype(jnp.float32) - stop(x).astype(jnp.float32))).astype(x.dtype)
        return tuple(xs)

    return operands


def _keep_first_head(k: Array, call: Call) -> Array:
    """Repeat values, but pass back only the gradient of the first head of each group."""
    first = jnp.arange(call.q.shape[2])[:, None] % call.group == 0
    return jnp.where(first, repeat_heads(k, call), stop(repeat_heads(k, call)))


def _allow_one_key_more(mask: Mask, call: Call) -> np.ndarray:
    if isinstance(mask, Window) and mask.left is not None:
        mask = Window(mask.left + 1, mask.right, mask.offset)
    return mask.dense(call.q_length, call.kv_length)


def _use_q_ids_for_both(q_ids: Array, kv_ids: Array, call: Call) -> Array:
    return same_segment(q_ids, jax.vmap(lambda row: jnp.resize(row, kv_ids.shape[1:]))(q_ids), call)


# Small errors that the quick grid must see, with the observables in which each shows.
SENSITIVITY: dict[str, tuple[str, PlainSteps]] = {
    "scale-wrong-by-a-thousandth": (
        "out logsumexp",
        PlainSteps(scale=lambda scale, call: 1.001 * default_scale(scale, call)),
    ),
    "logits-rounded-to-bf16": (
        "out logsumexp",
        PlainSteps(cap=lambda x, call: capped(jax.lax.reduce_precision(x, 8, 7), call)),
    ),
    "window-off-by-one": ("out logsumexp", PlainSteps(mask=_allow_one_key_more)),
    "soft-cap-derivative-missing": (
        "dq dk",
        PlainSteps(cap=lambda x, call: x + stop(capped(x, call) - x)),
    ),
    "sinks-left-out-of-the-denominator": (
        "out logsumexp",
        PlainSteps(total=lambda weights, sinks, pivot, call: denominator(weights, None, pivot, call)),
    ),
    "dk-not-summed-over-the-group": ("dk", PlainSteps(expand_k=_keep_first_head)),
    "segment-ids-of-q-used-for-kv": ("out logsumexp", PlainSteps(segments=_use_q_ids_for_both)),
    "dq-off-by-a-ten-thousandth": ("dq", PlainSteps(operands=_perturb_gradient(0, 1e-4))),
    "dk-off-by-a-ten-thousandth": ("dk", PlainSteps(operands=_perturb_gradient(1, 1e-4))),
    "dv-off-by-a-ten-thousandth": ("dv", PlainSteps(operands=_perturb_gradient(2, 1e-4))),
}


def _plant_bug(name: str) -> PlantedBug:
    shows, steps = SENSITIVITY[name]
    return planted("sensitivity", name, kind=name, reference="inferred", shows=shows, steps=steps)


@pytest.mark.bank
@pytest.mark.parametrize("name", SENSITIVITY)
def test_a_planted_bug_fails_at_quick(name: str) -> None:
    red = next(iter_red_records(_plant_bug(name), "quick"), None)
    assert red is not None, f"{name!r} survives the quick grid"
    assert red.verdict == FAIL
    pairs = ((red.ratio, red.limit), (red.rms, red.rms_limit))
    assert any(figure is not None and limit is not None and figure > limit for figure, limit in pairs)


@pytest.mark.long
@pytest.mark.parametrize("stride", _CORRECT_STRIDES)
@pytest.mark.parametrize("back", [None, BackwardSteps()], ids=["differentiated", "vjp"])
def test_the_kernel_without_a_bug_passes(back: BackwardSteps | None, stride: int) -> None:
    kernel = implementation("correct", back=back)
    supported = [job for job in run_plan.plan_run([kernel], level="quick").jobs if kernel.supports(job.case) is None]
    found = runner.Runner(settings.Settings()).run(supported[::stride])
    assert [record for record in found if record.verdict in RED] == []
    assert any(record.ratio is not None for record in found)
