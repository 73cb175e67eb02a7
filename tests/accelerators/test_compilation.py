"""Compile TPU kernels by the real compiler without a TPU: what it catches, and what is reported without it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest

from cases.accelerator_cases import select_compiled_cases
from cases.case import Case
from cases.case_id import parse_case_id
from conformance.accelerators import compilation
from conformance.accelerators.targets import TPU, CompileTarget, Toolchain, list_targets
from conformance.check_api.subject import Subject
from conformance.checks import CHECKS_BY_NAME, compiles
from conformance.execution import implementation_registry
from conformance.execution.executor import Executor
from conformance.executor_tasks import native_compilation
from conformance.judging import run_plan
from conformance.judging.runner import Runner
from conformance.judging.settings import Settings
from impls.contract.implementation import Accelerator, Implementation
from reports.records import FAIL, PASS, UNJUDGED, UNSUPPORTED, Record
from tests.kernels import pallas_flash

TPUS = list_targets("tpu")
COMPILES = CHECKS_BY_NAME["compiles"]
CASE = parse_case_id("train/f32/B1.T256.S256.N2.K1.H128.V128/causal/normal/s0")
needs_compiler = pytest.mark.skipif(TPU.missing is not None, reason=str(TPU.missing))


def natively(native: Callable[..., Any] | None) -> Implementation:
    """Build the small kernel with another call for the compiler."""
    kernel = pallas_flash.build_pallas_implementation("kernel")
    return dataclasses.replace(kernel, accelerator=dataclasses.replace(kernel.accelerator, native=native))


def judge(implementation: Implementation, case: Case = CASE) -> list[Record]:
    """Return the records of the check `compiles`."""
    return Runner(Settings()).run(run_plan.plan_case(implementation, case, [COMPILES]).jobs)


@needs_compiler
def test_a_kernel_compiles_for_every_generation_with_its_figures() -> None:
    found = judge(pallas_flash.build_pallas_implementation("kernel"))
    assert {r.observable: r.verdict for r in found} == {f"{target.name}.forward": PASS for target in TPUS}
    for record in found:
        figures = record.figures
        assert figures["compile_seconds"] > 0
        assert figures["argument_bytes"] >= 4 * 256 * 128 * 4  # q of two heads, k and v of one, in f32
        assert figures["output_bytes"] >= 2 * 256 * 128 * 4
        assert figures["vmem_bytes"] >= 3 * 128 * 128 * 4  # the scratch; small operands may stay in VMEM as they are


@needs_compiler
def test_more_scratch_is_more_vmem() -> None:
    small, large = (judge(pallas_flash.build_pallas_implementation("kernel", block=block))[0] for block in (128, 256))
    assert large.figures["vmem_bytes"] > small.figures["vmem_bytes"]


@needs_compiler
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"block": 4}, "divisible by 8 and 128"),
        ({"vmem_limit": 2**17}, "exceeded scoped vmem limit"),
    ],
    ids=["misaligned", "vmem"],
)
def test_what_does_not_compile_fails_with_the_compilers_words(options: dict[str, int], reason: str) -> None:
    found = judge(pallas_flash.build_pallas_implementation("kernel", **options))
    assert {record.verdict for record in found} == {FAIL}
    assert len(found) == len(TPUS)
    for record in found:
        assert reason in record.reason
        assert "\n" not in record.reason
        assert len(record.reason) < 500


@needs_compiler
def test_what_the_implementation_declines_while_traced_is_unsupported() -> None:
    def declines(*operands: Any, **options: Any) -> None:
        raise NotImplementedError("wants a chip with sparse cores")

    found = judge(natively(declines))
    assert {record.verdict for record in found} == {UNSUPPORTED}
    assert all("wants a chip with sparse cores" in record.reason for record in found)


@needs_compiler
def test_what_the_implementation_raises_while_traced_fails() -> None:
    def raises(*operands: Any, **options: Any) -> None:
        raise TypeError("no such block")

    (reason,) = {r.reason for r in judge(natively(raises))}
    assert reason == "TypeError: no such block"


@needs_compiler
def test_a_target_that_the_compiler_does_not_know_is_no_failure_of_the_kernel() -> None:
    unknown = dataclasses.replace(TPUS[0], name="v99", topology={"topology_name": "v99:2x2"})
    with pytest.raises(compilation.NoCompiler, match="v99"):
        compilation.compile_for(unknown, None, ())


@needs_compiler
def test_the_process_environment_is_left_as_it_was() -> None:
    before = dict(os.environ)
    judge(pallas_flash.build_pallas_implementation("kernel"))
    assert dict(os.environ) == before


@needs_compiler
def test_upstream_splash_compiles_forward_residuals_and_gradients() -> None:
    case = parse_case_id("train/bf16/B1.T256.S256.N2.K1.H128.V128/causal/softcap30/sinks/normal/s0")
    found = {
        r.observable: r.verdict for r in judge(implementation_registry.find_implementation("jax_splash_tpu"), case)
    }
    programs = ("forward", "residuals", "gradients")
    assert found == {f"{target.name}.{program}": PASS for target in TPUS for program in programs}


def test_without_the_compiler_it_is_unjudged_and_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = dataclasses.replace(TPU, modules=("no_such_compiler", "no.such.part"), install="pip install it")
    monkeypatch.setattr(
        "conformance.accelerators.targets.TARGETS", tuple(dataclasses.replace(t, toolchain=absent) for t in TPUS)
    )
    (record,) = judge(pallas_flash.build_pallas_implementation("kernel"))
    assert (record.observable, record.verdict) == ("all", UNJUDGED)
    assert record.reason == "the TPU compiler is not installed (no_such_compiler, no.such.part): pip install it"


def test_without_a_native_call_one_record_says_so() -> None:
    (job,) = (job for job in run_plan.plan_run([natively(None)], level="quick", checks=[COMPILES]).jobs)
    (record,) = Runner(Settings()).judge(job)
    assert record.verdict == UNJUDGED
    assert "no `native` call" in record.reason


def test_portable_code_is_not_asked() -> None:
    assert list_targets(None) == ()
    assert (
        run_plan.plan_run(
            [implementation_registry.find_implementation("dot_product")], level="quick", checks=[COMPILES]
        ).jobs
        == ()
    )


def test_the_case_is_in_the_job_id_under_the_name_of_the_check() -> None:
    jobs = run_plan.plan_run(
        [implementation_registry.find_implementation("jax_splash_tpu")], level="quick", checks=[COMPILES]
    ).jobs
    assert len(jobs) >= 12
    for job in jobs:
        assert job.id.startswith("jax_splash_tpu-compiles-train/") or "-compiles-prefill/" in job.id


def test_values_do_not_matter_so_other_seeds_compile_nothing_again() -> None:
    kernel = implementation_registry.find_implementation("jax_flash_tpu")
    one, two = (
        run_plan.plan_run([kernel], level="quick", seeds=seeds, checks=[COMPILES]).jobs for seeds in ((0,), (0, 1))
    )
    assert len(one) == len(two)


def test_case_ids_parse_back_and_every_factor_is_there() -> None:
    cases = select_compiled_cases()
    assert [parse_case_id(case.id) for case in cases] == list(cases)
    features = {feature for case in cases for feature in case.features}
    masks = {"full", "causal", "window", "chunked", "bidirectional", "balanced", "dense_head", "lengths"}
    assert features >= masks | {"mha", "gqa", "mqa", "soft_cap", "sinks", "segment_ids", "bias", "bf16", "f32"}
    assert features >= {"train", "prefill", "decode", "v_head_dim", "offset", "paged", "packed"}
    assert {case.head_dim for case in cases} >= {64, 128, 192, 256}
    assert max(case.kv_length for case in cases) == 4096


def test_of_a_stored_call_the_call_itself_is_compiled_by_shapes() -> None:
    implementation = implementation_registry.find_implementation("paged_tpu")
    case = select_compiled_cases(implementation.supports)[0]
    problem = native_compilation.build_problem(case)
    assert problem.k.shape == (64, 4096, 8, 128)
    assert problem.k.strides == (0, 0, 0, 0)
    (_, (arrays,)) = native_compilation._build_programs(Executor(implementation).native, problem, gradients=False)[
        "forward"
    ]
    storage = problem.storage
    assert storage is not None
    assert arrays["q"].shape == (len(storage.q_rows), 64, 128)
    assert arrays["k"].shape == arrays["v"].shape == (*storage.held.shape, 8, 128)
    assert arrays["page_indices"].shape == storage.tables["page_indices"].shape
    assert not {"storage", "places", "held"} & set(arrays)


def test_of_pages_with_scales_these_are_compiled_too() -> None:
    case = parse_case_id("decode/bf16/B4.T1.S64.N8.K2.H128.V128/causal-o63/kvint8-token/paged16/normal/s0")
    problem = native_compilation.build_problem(case)
    native = Executor(implementation_registry.find_implementation("jax_paged_tpu")).native
    (_, (arrays,)) = native_compilation._build_programs(native, problem, gradients=False)["forward"]
    assert problem.storage is not None
    held = problem.storage.held.shape
    assert (arrays["k"].shape, arrays["k"].dtype, arrays["v"].dtype) == ((*held, 2, 128), jnp.int8, jnp.int8)
    scales = arrays["k_scales"], arrays["v_scales"]
    assert [(x.shape, x.dtype) for x in scales] == [((*held, 2), jnp.float32)] * 2
    assert "kv_scales" not in arrays


def test_a_message_is_told_in_one_line_without_the_instruction_it_quotes() -> None:
    instruction = '%k.1 = f32[8]{0} custom-call(%x), frontend_attributes={kernel_metadata={}}, metadata={op_name="f"}'
    error = RuntimeError(
        "RESOURCE_EXHAUSTED: E1001: CompileTimeScopedVmemOom:\n"
        f"Ran out of memory in memory space vmem for {instruction}. "
        "Scoped allocation with size 2.00M and limit 1.00M.\nSee the manual."
    )
    assert compilation.format_first_line(error) == (
        "RuntimeError: RESOURCE_EXHAUSTED: E1001: CompileTimeScopedVmemOom: Ran out of memory in memory space vmem for "
        "%k.1. Scoped allocation with size 2.00M and limit 1.00M."
    )
    assert compilation.format_first_line(ValueError("")) == "ValueError: no message"
    assert len(compilation.format_first_line(ValueError("x" * 10_000))) < 500


@needs_compiler
@pytest.mark.parametrize("mask", ["causal", "window-l255-r0"])
def test_splash_attention_has_no_more_temporaries_than_that_of_jax(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one generation and at one length; the README has the table of what was measured at others."""
    for module in (compiles, native_compilation):
        monkeypatch.setattr(module, "list_targets", lambda platform: tuple(t for t in TPUS if t.name == "v6e"))
    case = parse_case_id(f"train/bf16/B1.T2048.S2048.N2.K1.H128.V128/{mask}/normal/s0")
    figures = {}
    for name in ("splash_tpu", "jax_splash_tpu"):
        found = {record.observable: record for record in judge(implementation_registry.find_implementation(name), case)}
        figures[name] = found["v6e.gradients"].figures
    for figure in ("live_bytes", "temporary_bytes"):
        assert figures["splash_tpu"][figure] <= figures["jax_splash_tpu"][figure], figure


def test_where_compiling_is_slow_one_program_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call without residuals, asked for no gradients, has one program, which is plainest and fullest at once."""
    slow = Toolchain(platform="gpu", topologies="", modules=(), install="", slow=True)
    target = CompileTarget(name="chip", toolchain=slow, topology={})
    for module in (compiles, native_compilation):
        monkeypatch.setattr(module, "list_targets", lambda platform: (target,))
    monkeypatch.setattr(native_compilation, "compile_for", lambda *program: {})
    plain = implementation_registry.find_implementation("dot_product")
    gpu = Accelerator(platform="gpu", native=plain.call)
    none: dict[str, Any] = dict.fromkeys(("residuals", "differentiable_residuals", "further_results"), frozenset())
    bare = dataclasses.replace(plain, **none, accelerator=gpu)
    case = parse_case_id("prefill/f32/B1.T8.S8.N2.K2.H16.V16/causal/normal/s0")
    found = list(compiles.check_compiles(Subject(Executor(bare), case, Settings().tolerances)))
    assert [(judgement.observable, judgement.verdict) for judgement in found] == [("chip.forward", PASS)]
