"""Test that the gate sees bugs planted in the GPU kernels at `quick`, in the interpreter."""

from __future__ import annotations

import dataclasses
import importlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from cases.case import Case
from cases.masks import And, Causal, Mask, Or
from impls import flash_gpu
from impls.flash_gpu.tile_schedule import FlashGpuPlan
from impls.flash_gpu.triton import backward, forward
from impls.flash_gpu.triton.forward import RunningSoftmax
from impls.flash_gpu.triton.triton_program import visit_blocks
from impls.pallas_gpu import triton_tiles
from reports.records import ERROR
from tests.bank import PlantedBug
from tests.bank.examination import iter_red_records

# The package's attribute of this name is the function.
CALL = importlib.import_module("impls.flash_gpu.attention")

Patch = Callable[[pytest.MonkeyPatch], None]


def drop_offset(mask: Mask) -> Mask:
    if isinstance(mask, And | Or):
        return type(mask)(drop_offset(mask.left), drop_offset(mask.right))
    return Causal() if isinstance(mask, Causal) else mask


def replace_backward_mask(change: Callable[[Mask], Mask]) -> Patch:
    """Give the backward pass another mask than the forward pass."""
    correct = CALL.run_backward

    def wrong(plan: FlashGpuPlan, *rest: Any) -> Any:
        return correct(dataclasses.replace(plan, mask=change(plan.mask)), *rest)

    return lambda patch: patch.setattr(CALL, "run_backward", wrong)


def read_tail(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(triton_tiles, "find_existing", lambda *_: None)


def skip_rescale(patch: pytest.MonkeyPatch) -> None:
    correct = forward.update_softmax

    def wrong(plan: FlashGpuPlan, old: RunningSoftmax, *operands: Any, some: bool) -> RunningSoftmax:
        new = correct(plan, old, *operands, some=some)
        fresh = correct(plan, old._replace(out=jnp.zeros_like(old.out)), *operands, some=some)
        return new._replace(out=old.out + fresh.out)

    patch.setattr(forward, "update_softmax", wrong)


def keep_last_head(patch: pytest.MonkeyPatch) -> None:
    def last(lower: Any, upper: Any, body: Callable[[Any, Any], Any], carry: Any) -> Any:
        return body(upper - 1, carry)

    patch.setattr(backward, "lax", types.SimpleNamespace(fori_loop=last))


def keep_stale_dq(patch: pytest.MonkeyPatch) -> None:
    correct = visit_blocks

    def wrong(launch: Any, inputs: Any, head: Any, step: Any, carry: Any) -> Any:
        stale = jnp.full_like(carry, 0.01) if getattr(carry, "ndim", 0) == 2 else carry  # dk and dv are a pair
        return correct(launch, inputs, head, step, stale)

    patch.setattr(backward, "visit_blocks", wrong)


@dataclasses.dataclass(frozen=True)
class Bug:
    """How to plant a bug, the observables in which it should show, and the cases in which it can."""

    plant: Patch
    shows: tuple[str, ...]
    trigger: Callable[[Case], bool]


def has_groups(case: Case) -> bool:
    return case.num_kv_heads < case.num_q_heads


def is_short(case: Case) -> bool:
    return case.phase == "train" and case.q_length <= 200 and case.kv_length <= 200


BUGS = {
    "tail-read": Bug(read_tail, ("out", "dq", "dk", "dv"), lambda case: case.q_length % 64 > 0),
    "missing-rescale": Bug(skip_rescale, ("out",), lambda case: case.kv_length > 64),
    "backward-always-causal": Bug(
        replace_backward_mask(lambda mask: mask & Causal()), ("dq", "dk", "dv"), lambda case: case.mask == "full"
    ),
    "backward-without-offset": Bug(
        replace_backward_mask(drop_offset), ("dq", "dk", "dv"), lambda case: case.mask.startswith("causal-o")
    ),
    "dk-of-the-last-head": Bug(keep_last_head, ("dk", "dv"), has_groups),
    "stale-dq": Bug(keep_stale_dq, ("dq",), lambda case: True),
}


@pytest.fixture(autouse=True)
def _clear_traces() -> Iterator[None]:
    """Clear JAX's caches, so that traces with a bug and without it are not mixed up."""
    jax.clear_caches()
    yield
    jax.clear_caches()


# This bug takes the longest to show.
_LONG = "missing-rescale"


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.long if name == _LONG else ()) for name in BUGS])
def test_a_bug_planted_in_a_kernel_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bug = BUGS[name]
    bug.plant(monkeypatch)
    planted = PlantedBug(
        name=name,
        family="flash_gpu",
        kind=name,
        reference="inferred from issues of published GPU kernels",
        shows=bug.shows,
        build=lambda: flash_gpu.build_implementation("planted", on_gpu=False),
        trigger=lambda case: is_short(case) and bug.trigger(case),
    )
    red = next(iter_red_records(planted, "quick"), None)
    assert red is not None, f"{name} survives the quick grid"
    assert red.verdict != ERROR, red.reason
    assert red.observable.startswith(bug.shows)
