"""Test that failures are judged again: under JAX's own compiler flags, and under declarations that explain them."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases.case_id import parse_case_id
from conformance import declare, environment
from conformance.check_api.judgement import Judgement
from conformance.check_api.subject import Subject
from conformance.checks import CHECKS_BY_NAME, Check
from conformance.execution.executor import Executor
from conformance.execution.plain_functions import build_implementation
from conformance.executor_tasks import single_calls
from conformance.judging import discrimination, flag_share, rejudgement, run_plan
from conformance.judging.declarations import list_declarations
from conformance.judging.runner import Runner
from conformance.judging.settings import Settings
from conformance.sandbox.kernel_process import Limits, end_all_processes
from conformance.sandbox.sandboxed_executor import create_executor, load_sandboxed
from conformance.truth import tolerances
from impls.contract.implementation import Implementation
from reports import records
from reports.records import DECLARATIONS_TRIED, ERROR, FAIL, FLAGS_DIFFER, PASS, RATIO_FAST_COMPILE, Record
from tests.kernels import naive

CASE = "train/{}/B1.T16.S16.N2.K1.H16.V16/{}/normal/s{}"
FULL = CASE.format("f32", "full", 0)

_traced_as_by_jax: contextvars.ContextVar[bool] = contextvars.ContextVar("traced_as_by_jax", default=False)


@pytest.fixture
def jax_flags_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let kernels find out, while they are traced, whether the compiler's options are JAX's own."""
    jit = Executor.jit

    def told(self: Executor, function: Callable[..., Any], **how: Any) -> Any:
        @functools.wraps(function)
        def traced(*arguments: Any) -> Any:
            with _as_by_jax(bool(self.options)):
                return function(*arguments)

        return jit(self, traced, **how)

    monkeypatch.setattr(Executor, "jit", told)
    monkeypatch.setattr(environment, "build_default_options", lambda: {"xla_backend_optimization_level": 3})


@contextlib.contextmanager
def _as_by_jax(value: bool) -> Iterator[None]:
    token = _traced_as_by_jax.set(value)
    try:
        yield
    finally:
        _traced_as_by_jax.reset(token)


def judge(function: Callable[..., Any], *cases: str, checks: tuple[str, ...] = ("forward",)) -> list[Record]:
    kernel = build_implementation(function, "kernel")
    chosen = [CHECKS_BY_NAME[name] for name in checks]
    jobs = [job for case in cases for job in run_plan.plan_case(kernel, parse_case_id(case), chosen).jobs]
    return Runner(Settings()).run(jobs)


@declare(behind_mask="finite")
def fail_by_flags(q: Any, k: Any, v: Any) -> Any:
    out = naive.attention(q, k, v)
    return out if _traced_as_by_jax.get() else 2 * out


@declare(behind_mask="finite")
def raise_by_flags(q: Any, k: Any, v: Any) -> Any:
    if not _traced_as_by_jax.get():
        raise RuntimeError("the compiler gives up")
    return naive.attention(q, k, v)


@declare(behind_mask="finite")
def wrong(q: Any, k: Any, v: Any) -> Any:
    return 1.5 * naive.attention(q, k, v)


@pytest.mark.usefixtures("jax_flags_matter")
def test_what_the_flags_alone_make_fail_passes_and_says_so() -> None:
    (record,) = judge(fail_by_flags, FULL)
    assert record.verdict == PASS
    assert record.ratio is not None
    assert record.limit is not None
    assert record.ratio <= record.limit
    assert record.figures[RATIO_FAST_COMPILE] > record.limit
    assert record.figures[FLAGS_DIFFER] == 1
    assert record.reason.startswith("differs by the compiler's flags: ratio ")


def build_right_from_second_time(how: str) -> Callable[..., Any]:
    """Build a kernel that is wrong once: the first time it is traced, or run, or raises."""
    times = itertools.count()

    @declare(behind_mask="finite")
    def attention(q: Any, k: Any, v: Any) -> Any:
        out = naive.attention(q, k, v)
        if how == "run":
            shape = jax.ShapeDtypeStruct((), jnp.float32)
            return out * jax.pure_callback(lambda _: np.float32(next(times) > 0), shape, jax.lax.stop_gradient(q))
        if how == "raised" and next(times) == 0:
            raise RuntimeError("once")
        return out * (how == "raised" or next(times) > 0)

    return attention


@pytest.mark.parametrize(("how", "verdict"), [("traced", FAIL), ("run", FAIL), ("raised", ERROR)])
@pytest.mark.usefixtures("jax_flags_matter")
def test_what_is_wrong_once_is_not_the_flags_doing(how: str, verdict: str) -> None:
    wrong = [record for record in judge(build_right_from_second_time(how), FULL) if record.verdict != PASS]
    assert [record.verdict for record in wrong] == [verdict]
    assert "depends on earlier calls" in wrong[0].reason


@pytest.mark.parametrize("stays", [True, False])
@pytest.mark.usefixtures("jax_flags_matter")
def test_calls_in_a_row_have_one_name_and_verdicts_of_their_own(stays: bool) -> None:
    looks = itertools.count()

    def run(subject: Subject) -> Iterator[Judgement]:
        """Judge two calls, of which the first is wrong: each time, or the first time only."""
        red = stays or next(looks) == 0
        yield Judgement(observable="out", verdict=FAIL if red else PASS, reason="wrong" if red else "", ratio=9.0)
        yield Judgement(observable="out", verdict=PASS, ratio=0.5)

    check = Check("twice", CHECKS_BY_NAME["calls"].scope)
    vars(check)["run"] = run
    executor = Executor(build_implementation(wrong, "kernel"))
    subject = Subject(executor, parse_case_id(FULL), tolerances.load_default_tolerances())
    found = rejudgement.Rejudger(executor).judge(check, subject, list(check.run(subject)))
    assert found[0].verdict == FAIL
    assert FLAGS_DIFFER not in found[0].figures
    assert ("depends on earlier calls" in found[0].reason) != stays


@pytest.mark.parametrize("edited_after", ["the first judgement", "the second judgement"])
def test_a_kernel_that_was_edited_does_not_depend_on_earlier_calls(
    edited_after: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XLA_FLAGS", " ".join(environment._build_cpu_flags()))
    Path("kernel.py").write_text("def attention(q, k, v):\n    return 0 * q\n")
    kernel = load_sandboxed("kernel.py:attention", None, Limits(timeout=60.0, memory=4 * 2**30))
    executor = create_executor(kernel)
    subject = Subject(executor, parse_case_id(FULL), tolerances.load_default_tolerances())
    runs = itertools.count()

    def edit() -> None:
        Path("kernel.py").write_text("def attention(q, k, v):\n    return q\n")

    def run(subject: Subject) -> Iterator[Judgement]:
        """Be wrong in the first process only, as an edit in time would have it."""
        is_first = next(runs) == 0
        subject.executor.run(single_calls.list_returned_residuals, subject.problem)
        yield Judgement(observable="out", verdict=FAIL if is_first else PASS, reason="wrong" if is_first else "")
        if is_first == (edited_after == "the first judgement"):
            edit()

    check = Check("edited", CHECKS_BY_NAME["calls"].scope)
    vars(check)["run"] = run
    (found,) = rejudgement.Rejudger(executor).judge(check, subject, list(check.run(subject)))
    end_all_processes()
    assert found.verdict == FAIL
    assert "not judged again" in found.reason
    assert "kernel.py has changed" in found.reason
    assert "earlier calls" not in found.reason


@pytest.mark.usefixtures("jax_flags_matter")
def test_an_error_that_the_flags_alone_make_is_none() -> None:
    (record,) = judge(raise_by_flags, FULL)
    assert record.verdict == PASS
    assert "the compiler gives up" in record.reason
    assert FLAGS_DIFFER in record.figures


@pytest.mark.usefixtures("jax_flags_matter")
def test_beyond_what_flags_account_for_failures_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejudgement, "_MIN_DECIDED", 2)
    found = judge(fail_by_flags, *(CASE.format("f32", "full", seed) for seed in range(4)))
    assert [record.verdict for record in found] == [PASS, PASS, FAIL, FAIL]
    assert not any(FLAGS_DIFFER in record.figures for record in found[2:])
    assert all("not judged again" in record.reason for record in found[2:])
    assert flag_share.find_excess(found)


class RecordingExecutor(Executor):
    """An executor that records which fresh executors were created from it."""

    def __init__(self, implementation: Implementation, name: str, order: list[str]) -> None:
        super().__init__(implementation)
        self.name, self.order = name, order

    def with_default_flags(self) -> Executor:
        return RecordingExecutor(self.implementation, "default", self.order)

    def create_fresh(self, *, new_hashes: bool = False) -> Executor:
        self.order.append(self.name)
        return RecordingExecutor(self.implementation, f"fresh {self.name}", self.order)


def judge_by_name(subject: Subject) -> Iterator[Judgement]:
    """Be wrong under the first flags, and right under JAX's own."""
    assert isinstance(subject.executor, RecordingExecutor)
    red = "default" not in subject.executor.name
    yield Judgement(observable="out", verdict=FAIL if red else PASS, reason="wrong" if red else "", ratio=9.0)


def test_fresh_processes_are_asked_in_an_order_that_nobody_can_foresee() -> None:
    check = Check("by_name", CHECKS_BY_NAME["calls"].scope)
    vars(check)["run"] = judge_by_name
    orders = set()
    for _ in range(100):
        order: list[str] = []
        subject = Subject(
            RecordingExecutor(build_implementation(wrong, "kernel"), "first", order),
            parse_case_id(FULL),
            tolerances.load_default_tolerances(),
        )
        found = rejudgement.Rejudger(subject.executor).judge(check, subject, list(check.run(subject)))
        assert [one.verdict for one in found] == [PASS]
        assert FLAGS_DIFFER in found[0].figures
        orders.add(tuple(order))
    assert {tuple(sorted(order)) for order in orders} == {
        ("default",) * rejudgement.FRESH_PROCESSES + ("first",) * rejudgement.FRESH_PROCESSES
    }
    # After a hundred draws, one of six orders is missing once in ten million times.
    assert len(orders) == 6


@pytest.mark.usefixtures("jax_flags_matter")
def test_a_false_alarm_is_judged_again_however_often_it_comes() -> None:
    found = judge(
        fail_by_flags, *(CASE.format("f32", "full", seed) for seed in range(2 * rejudgement.ENOUGH_CONFIRMED + 1))
    )
    assert [record.verdict for record in found] == [PASS] * (2 * rejudgement.ENOUGH_CONFIRMED + 1)


@pytest.mark.usefixtures("jax_flags_matter")
def test_what_is_wrong_is_judged_again_twice_and_no_more() -> None:
    found = judge(wrong, *(CASE.format("f32", "full", seed) for seed in range(rejudgement.ENOUGH_CONFIRMED + 2)))
    assert {record.verdict for record in found} == {FAIL}
    assert [RATIO_FAST_COMPILE in record.figures for record in found] == [True] * rejudgement.ENOUGH_CONFIRMED + [
        False,
        False,
    ]
    assert not any(FLAGS_DIFFER in record.figures for record in found)


@pytest.mark.usefixtures("jax_flags_matter")
def test_what_explore_finds_is_judged_again_each_time() -> None:
    kernel = build_implementation(wrong, "kernel")
    runner = Runner(Settings(), confirmed=float("inf"))
    jobs = [
        job
        for seed in range(rejudgement.ENOUGH_CONFIRMED + 1)
        for job in run_plan.plan_case(
            kernel, parse_case_id(CASE.format("f32", "full", seed)), [CHECKS_BY_NAME["forward"]]
        ).jobs
    ]
    assert all(RATIO_FAST_COMPILE in record.figures for record in runner.run(jobs))


@pytest.mark.parametrize("flags", ["", "--xla_dump_to=here"])
def test_where_nothing_makes_compiling_cheap_nothing_is_undone(flags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", flags)
    assert environment.build_default_options() == {}


def test_another_process_has_none_of_the_flags_that_make_compiling_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", " ".join((*environment._build_cpu_flags(), "--xla_dump_to=here")))
    kept = (*environment._AVOID_MISCOMPILES, *environment._VIRTUAL_DEVICES, "--xla_dump_to=here")
    assert environment.build_default_flags() == " ".join(kept)


def test_the_flags_of_this_process_are_undone_by_options_that_jax_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", " ".join(environment._build_cpu_flags()))
    options = environment.build_default_options()
    assert options["xla_backend_optimization_level"] == 3
    undone = {flag.removeprefix("--").partition("=")[0] for flag in environment._FAST_COMPILE}
    assert undone <= options.keys()
    executor = Executor(Implementation(name="kernel", call=naive.attention), options)
    assert float(executor.jit(jnp.sin)(0.0)) == 0.0
    unknown = Executor(executor.implementation, {**options, "no_such_option": 1})
    # An unknown option raises, so the other options did reach the compiler.
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_option"):
        unknown.jit(jnp.sin)(0.0)


@declare(behind_mask="finite")
def logits_in_input(q: Any, k: Any, v: Any) -> Any:
    z = jnp.einsum("btnh,bsnh->bnts", q, jnp.repeat(k, 2, axis=2), precision="highest").astype(q.dtype)
    p = jax.nn.softmax(z.astype(jnp.float32) * q.shape[-1] ** -0.5, axis=-1).astype(q.dtype)
    out = jnp.einsum("bnts,bsnv->btnv", p, jnp.repeat(v, 2, axis=2), precision="highest")
    return out.astype(q.dtype)


def leaks(q: Any, k: Any, v: Any, *, mask: Any = None) -> Any:
    return naive.attention(q, k, v, mask=mask)


def test_a_declaration_that_would_explain_a_failure_is_named() -> None:
    found = judge(logits_in_input, "train/bf16/B1.T16.S200.N2.K1.H64.V64/full/large/s0")
    assert {(record.verdict, record.remedy) for record in found} == {(FAIL, 'logits="input"')}


@declare(behind_mask="finite")
def all_in_input(q: Any, k: Any, v: Any) -> Any:
    k, v = (jnp.repeat(x, 8, axis=2) for x in (k, v))
    z = jnp.einsum("btnh,bsnh->bnts", q * q.shape[-1] ** -0.5, k, precision="highest")
    return jnp.einsum("bnts,bsnv->btnv", jax.nn.softmax(z, axis=-1), v, precision="highest")


_STORED_KERNELS = """
import jax.numpy as jnp
from conformance import declare
from tests.kernels import latent_attention, serving_attention

def in_base_two(found):
    out, residuals = found
    return out, {**residuals, "logsumexp": residuals["logsumexp"] * jnp.log2(jnp.e)}

@declare(behind_mask="finite")
def packed(q, k, v, *, cu_q_lens, cu_kv_lens, num_seqs, causal=False, window=None, save_residuals=False):
    places = {"cu_q_lens": cu_q_lens, "cu_kv_lens": cu_kv_lens, "num_seqs": num_seqs}
    found = serving_attention.packed(q, k, v, **places, causal=causal, window=window, save_residuals=save_residuals)
    return in_base_two(found) if save_residuals else found

@declare(behind_mask="finite")
def latent(q, latent, *, value_dim, scale, mask=None, save_residuals=False):
    options = {"value_dim": value_dim, "scale": scale, "mask": mask}
    found = latent_attention.dense(q, latent, **options, save_residuals=save_residuals)
    return in_base_two(found) if save_residuals else found
"""


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("packed", "train/f32/B3.T20.S20.N2.K1.H16.V16/own-linf-20-3-9/packed-q7-3-8/normal/s0"),
        ("latent", "train/f32/B1.T9.S7.N2.K1.H6.V6/full/scale0.5/latent/normal/s2"),
    ],
)
def test_a_declaration_is_named_for_a_kernel_of_stored_operands_in_its_own_process(
    name: str, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("stored_kernels.py").write_text(_STORED_KERNELS)
    kernel = load_sandboxed(f"stored_kernels.py:{name}", None, Limits(timeout=60.0, memory=4 * 2**30))
    jobs = run_plan.plan_case(kernel, parse_case_id(case), [CHECKS_BY_NAME["residuals"]]).jobs
    found = Runner(Settings()).run(jobs)
    end_all_processes()
    assert {record.remedy for record in found if record.verdict == FAIL} == {"logsumexp_base=2"}


# It takes 40 s. By day one declaration explains a failure, and `tests.reports` names several that explain it together.
@pytest.mark.nightly
def test_declarations_that_explain_a_failure_together_are_named() -> None:
    found = judge(all_in_input, "train/bf16/B1.T128.S512.N8.K1.H64.V64/full/normal/s0", checks=("ensemble",))
    together = 'softmax="input", scaled_q=True, group_sums="input"'
    assert {record.remedy for record in found if record.verdict == FAIL} == {together}


def test_what_lies_behind_the_mask_is_explained_on_every_case() -> None:
    cases = [CASE.format("f32", "lengths-9", seed) for seed in range(rejudgement.ENOUGH_CONFIRMED + 1)]
    red = [record for record in judge(leaks, *cases, checks=("poison",)) if record.verdict in records.RED]
    assert {record.case for record in red} == set(cases)
    assert {record.remedy for record in red} == {'behind_mask="finite"'}


def test_no_declaration_explains_what_is_wrong() -> None:
    first, other = judge(wrong, CASE.format("bf16", "full", 0), CASE.format("bf16", "full", 1))
    assert (first.verdict, first.remedy, first.figures[DECLARATIONS_TRIED]) == (FAIL, "", 1)
    assert DECLARATIONS_TRIED not in other.figures  # only for the first failure of a check and dtype


def test_where_zeros_would_pass_too_a_declaration_explains_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def zeros(q: Any, k: Any, v: Any) -> Any:
        return 0 * q

    huge = "train/f16/B1.T16.S16.N2.K1.H16.V16/full/huge/s0"  # with rounded logits, any result is within bounds
    (record,) = judge(zeros, huge)
    assert (record.verdict, record.remedy) == (FAIL, "")
    monkeypatch.setattr(discrimination, "discriminates", lambda subject: True)
    (record,) = judge(zeros, huge)
    assert record.remedy == 'logits="input"'  # so nothing was wrong under it


def test_an_error_is_explained_by_no_declaration() -> None:
    def raises(q: Any, k: Any, v: Any) -> Any:
        raise TypeError("no")

    (record,) = judge(raises, FULL)
    assert (record.verdict, record.remedy) == (ERROR, "")


def test_what_is_declared_is_told() -> None:
    def of(**less: Any) -> list[str]:
        return list_declarations(build_implementation(declare(**less)(only_three), "kernel"))

    def only_three(q: Any, k: Any, v: Any) -> Any:
        return naive.attention(q, k, v)

    assert of() == of(softmax="f32", causal="start", unordered_sums=()) == []
    assert of(softmax="input", block_sums=64, behind_mask="finite") == [
        'softmax="input"',
        "block_sums=64",
        'behind_mask="finite"',
    ]
    assert of(causal="end", empty_rows="zero", memory="linear") == [
        'empty_rows="zero"',
        'memory="linear"',
        'causal="end"',
    ]
    assert of(unordered_sums={"dq", "dk"}, open_sides=-1) == ['unordered_sums=("dq", "dk")', "open_sides=-1"]
    lacking = Implementation(
        name="it", call=only_three, gradients=frozenset({"dv", "dbias"}), unsupported={"sinks": "none"}
    )
    assert list_declarations(lacking) == ["no dq dk"]
    assert list_declarations(dataclasses.replace(lacking, unsupported={})) == ["no dq dk dsinks"]
    still = dataclasses.replace(lacking, differentiable_residuals=frozenset())
    assert list_declarations(still) == ["no dq dk", "no gradient of logsumexp"]
    assert list_declarations(dataclasses.replace(still, residuals=frozenset())) == ["no dq dk"]
    assert list_declarations(dataclasses.replace(lacking, unsupported={"train": "it reads a cache"})) == []
