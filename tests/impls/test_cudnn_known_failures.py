"""Test that the known failures of cuDNN attention are those of its two published findings, on a GPU alone."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from conformance.execution import implementation_registry
from conformance.judging import settings
from reports import records
from reports.records import Record

MASKED = "train/bf16/B1.T128.S128.N2.K2.H64.V64/causal/biashead/normal/s0"
PLAIN = "train/bf16/B1.T128.S128.N2.K2.H64.V64/causal/normal/s0"
HUGE = "train/f16/B1.T128.S128.N2.K2.H64.V64/dense-d40/scale0.3/huge/s0"


@pytest.fixture(scope="module")
def ours() -> settings.Settings:
    return settings.load_settings(Path(__file__).parent)


def fail(case: str, check: str, observable: str) -> Record:
    return Record(
        implementation="jax_nn_cudnn",
        platform="gpu",
        case=case,
        check=check,
        observable=observable,
        verdict=records.FAIL,
        reason="wrong",
    )


@pytest.mark.parametrize(
    ("record", "finding"),
    [
        (fail(MASKED, "gradients", "dbias"), "jax-cudnn-bias-gradient-mask"),
        (fail(MASKED, "differentiation", "dbias.ones"), "jax-cudnn-bias-gradient-mask"),
        (fail(MASKED, "calls", "dbias.biased"), "jax-cudnn-bias-gradient-mask"),
        (fail(PLAIN, "poison", "dk.huge"), "jax-cudnn-mask-constant"),
        (fail(HUGE, "independence", "out.last"), "jax-cudnn-mask-constant"),
        (fail(MASKED, "gradients", "dq"), ""),
        (fail(MASKED, "poison", "out.visible"), ""),
        (fail(PLAIN, "forward", "out"), ""),
        (fail(PLAIN, "independence", "out.first"), ""),
        (fail(HUGE, "independence", "dq.repeated"), ""),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value.check}-{value.observable}",
)
def test_a_failure_is_known_by_its_finding(record: Record, finding: str, ours: settings.Settings) -> None:
    marked = ours.mark_expected_failures(record, "0.11.2")
    assert marked.verdict == (records.EXPECTED_FAIL if finding else records.FAIL)
    assert finding in marked.reason
    elsewhere = ours.mark_expected_failures(msgspec.structs.replace(record, platform="cpu"), "0.11.2")
    assert elsewhere.verdict == records.FAIL


def test_the_order_of_sums_is_declared_for_the_backward_pass_of_cudnn_alone() -> None:
    assert set(implementation_registry.find_implementation("jax_nn_cudnn").unordered_sums) == {"dq", "dk", "dv"}
    assert not implementation_registry.find_implementation("jax_nn_xla").unordered_sums
