"""Records of wrong kernels have a description and a picture of the error; other records have neither."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from cases.case_id import parse_case_id
from conformance import checks
from conformance.execution.plain_functions import build_implementation
from conformance.judging.job import Job
from conformance.judging.runner import Runner
from conformance.judging.settings import Settings
from reports.records import FAIL, PASS, Record
from tests.kernels import naive

CASE = "train/f32/B1.T64.S64.N4.K2.H16.V16/causal/normal/s0"
ASKED = ("forward", "residuals", "gradients", "linearity")


def judged(kernel: Any) -> list[Record]:
    """The records of a kernel on one case."""
    job = Job(
        build_implementation(kernel, "kernel"),
        parse_case_id(CASE),
        tuple(checks.CHECKS_BY_NAME[name] for name in ASKED),
    )
    return Runner(Settings(), confirmed=0).judge(job)


def late_rows_doubled(q: Any, k: Any, v: Any, *, causal: bool = False, save_residuals: bool = False) -> Any:
    """Wrong in the second block of 32 queries, and in `logsumexp`, which is in base 2."""
    out, residuals = naive.attention(q, k, v, causal=causal, save_residuals=True)
    out = jnp.where(jnp.arange(q.shape[1])[:, None, None] >= 32, 2 * out, out)
    return (out, {"logsumexp": residuals["logsumexp"] / jnp.log(2.0)}) if save_residuals else out


def test_a_wrong_kernel_is_told_where_it_is_wrong() -> None:
    found = {(record.check, record.observable): record for record in judged(late_rows_doubled)}
    out, lse, dq = (found["residuals", "out"], found["residuals", "logsumexp"], found["gradients", "dq"])
    assert out.pattern.startswith("only rows from 32 on, a multiple of 32")
    assert out.pattern.endswith("; there 2 times the right value (the group's size)")
    assert dq.pattern == out.pattern
    assert lse.pattern == "1.443 times the right value (log2(e))"
    for record in (out, lse, dq):
        assert record.verdict == FAIL
        assert record.error_map is not None
        assert record.error_map.mask_shape == (64, 64)
    assert out.error_map is not None
    assert out.error_map.blocks[0] == 32


def test_what_is_right_has_neither_pattern_nor_picture() -> None:
    records = judged(naive.attention)
    assert {record.verdict for record in records if record.ratio is not None} == {PASS}
    assert {(record.pattern, record.error_map) for record in records} == {("", None)}


def not_linear(q: Any, k: Any, v: Any, *, causal: bool = False) -> Any:
    """Right for values up to 8, and not beyond."""
    return naive.attention(q, k, jnp.clip(v, -8, 8), causal=causal)


def test_of_other_questions_than_the_results_themselves_there_is_no_picture() -> None:
    red = [record for record in judged(not_linear) if record.verdict == FAIL]
    assert {record.check for record in red} == {"linearity"}
    assert {record.error_map for record in red} == {None}
