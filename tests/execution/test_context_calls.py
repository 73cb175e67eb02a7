"""Functions that run on the tokens of one device: what they get, and what is judged about `check_vma`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cases.case_id import parse_case_id
from cases.masks import LoadBalancedCausal
from conformance import declare
from conformance.check_api.subject import Subject
from conformance.checks import CHECKS_BY_NAME
from conformance.checks.sharding import _check_devices
from conformance.execution.context_calls import order_tokens
from conformance.execution.executor import Executor
from conformance.execution.plain_functions import NotAnAttentionFunction, build_implementation
from conformance.judging.job import Job
from conformance.judging.runner import Runner
from conformance.judging.settings import Settings
from impls.context_parallel import Layout
from impls.contract.declarations import TokenOrder
from impls.contract.implementation import Implementation
from reports.records import FAIL, PASS, RED, UNSUPPORTED
from tests.planted.features.shared_sequences import sum_gradient_by_hand
from tests.planted.planting import context_steps
from tests.planted.planting.context_steps import contiguous, exchanged, gathered, striped

SMALL = "train/f32/B1.T16.S16.N4.K2.H16.V16/causal/seg/softcap5/sinks/normal/s0"
ORDERS: tuple[TokenOrder, ...] = ("contiguous", "balanced", "striped")


def judge(kernel: Implementation, case: str, *checks: str) -> dict[str, str]:
    found = Runner(Settings()).judge(Job(kernel, parse_case_id(case), tuple(CHECKS_BY_NAME[name] for name in checks)))
    return {f"{record.check}.{record.observable}": record.verdict for record in found}


def judge_on(kernel: Implementation, devices: int, check_vma: bool) -> dict[str, str]:
    subject = Subject(Executor(kernel), parse_case_id(SMALL), Settings().tolerances)
    return {found.observable: found.verdict for found in _check_devices(subject, devices, check_vma)}


@pytest.mark.parametrize("order", ORDERS)
def test_orders_of_tokens_are_those_of_our_own_kernels(order: TokenOrder) -> None:
    layout = Layout(24, 3, order)
    places = [layout.places(rank).position(np.arange(layout.local)) for rank in range(3)]
    np.testing.assert_array_equal(order_tokens(order, 24, 3), np.concatenate(places))


def test_balanced_order_is_that_of_the_mask_of_this_name() -> None:
    position = LoadBalancedCausal(3, 24).compute_position(np.arange(24))
    np.testing.assert_array_equal(order_tokens("balanced", 24, 3), position)


@pytest.mark.parametrize(
    ("order", "position"), [("contiguous", contiguous), pytest.param("striped", striped, marks=pytest.mark.long)]
)
def test_a_right_function_passes_in_its_order_and_fails_in_another(order: str, position: Any) -> None:
    def build(declared: str) -> Implementation:
        steps = {"query_positions": position, "key_positions": position}
        return context_steps.implementation("kernel", gathered, order=declared, **steps)

    other = {"contiguous": "striped", "striped": "contiguous"}[order]
    assert set(judge(build(order), SMALL, "forward").values()) == {PASS}
    assert judge(build(other), SMALL, "forward")["forward.out"] == FAIL


def test_a_psum_in_a_backward_pass_is_right_with_check_vma_only() -> None:
    def build(check_vma: Any) -> Implementation:
        return context_steps.implementation("kernel", gathered, sinks=sum_gradient_by_hand, check_vma=check_vma)

    assert not set(judge(build(True), SMALL, "gradients").values()) & RED
    found = judge(build(False), SMALL, "gradients")
    assert [name for name, verdict in found.items() if verdict in RED] == ["gradients.dsinks"]


def test_fewer_key_heads_than_devices_are_judged_on_two_devices() -> None:
    kernel = context_steps.implementation("kernel", exchanged)
    found = judge_on(kernel, 2, check_vma=False)
    assert {"out", "logsumexp", "dk", "dv", "dsinks"} <= found.keys()
    assert set(found.values()) == {PASS}
    wrong = context_steps.implementation("kernel", exchanged, replicate=lambda x, n: 2 * context_steps.replicate(x, n))
    assert judge_on(wrong, 2, check_vma=False)["dk"] == FAIL


def test_more_devices_than_there_are_are_unsupported() -> None:
    kernel = context_steps.implementation("kernel", exchanged)
    assert judge_on(kernel, 64, check_vma=False) == {"all": UNSUPPORTED}


def test_lengths_that_the_devices_do_not_divide_are_unsupported() -> None:
    kernel = context_steps.implementation("kernel", gathered)
    assert "18" in (kernel.supports(parse_case_id(SMALL.replace("16.S16", "18.S18"))) or "")


def test_declarations_that_contradict_each_other_are_refused() -> None:
    def paged(q: Any, k_pages: Any, v_pages: Any, *, page_indices: Any, kv_lens: Any, cu_q_lens: Any) -> Any: ...

    with pytest.raises(ValueError, match="token_order needs context_axes"):
        declare(token_order="striped")
    with pytest.raises(ValueError, match="check_vma needs context_axes"):
        declare(check_vma=True)
    with pytest.raises(ValueError, match="one or two"):
        declare(context_axes=("a", "b", "c"))
    with pytest.raises(NotAnAttentionFunction, match="context_axes"):
        build_implementation(declare(context_axes=("context",))(paged), "paged")
