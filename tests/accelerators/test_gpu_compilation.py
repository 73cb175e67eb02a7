"""Compile GPU kernels by the real compiler without a GPU: what it catches, and which figures it gives."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from cases.accelerator_cases import select_compiled_cases
from cases.case import Case
from cases.case_id import parse_case_id
from cases.masks import Full
from conformance.accelerators import targets
from conformance.accelerators.compilation import CallRefused, CompileError
from conformance.accelerators.gpus import GPUS, Gpu
from conformance.accelerators.targets import GPU, list_targets
from conformance.checks import CHECKS_BY_NAME
from conformance.execution import implementation_registry
from conformance.executor_tasks import native_compilation
from conformance.judging import run_plan
from conformance.judging.runner import Runner, find_platform
from conformance.judging.settings import Settings
from conformance.session.run_result import compute_exit_code
from impls import flash_gpu
from impls.contract.implementation import Implementation
from impls.flash_gpu import pallas_backends
from impls.flash_gpu.block_sizes import BlockSizes, Tiles
from impls.jax_compat import runs_on
from reports.records import COMPLETE, FAIL, PASS, UNJUDGED, UNSUPPORTED, Record

CASE = parse_case_id("train/bf16/B1.T1000.S1000.N4.K2.H64.V64/causal/seg/softcap30/sinks/normal/s0")
SMALL = parse_case_id("prefill/f16/B1.T128.S128.N1.K1.H64.V64/full/normal/s0")
TARGETS = list_targets("gpu")
THERE = dataclasses.replace(GPU, modules=(), programs=None)
needs_compiler = pytest.mark.skipif(GPU.missing is not None, reason=str(GPU.missing))


def judge(implementation: Implementation, case: Case = CASE) -> dict[str, Record]:
    """The records of the check, by observable."""
    found = Runner(Settings()).run(run_plan.plan_case(implementation, case, [CHECKS_BY_NAME["compiles"]]).jobs)
    return {record.observable: record for record in found}


def natively(**options: Any) -> Implementation:
    native = functools.partial(flash_gpu.attention, interpret=False, **options)
    found = implementation_registry.find_implementation("flash_gpu")
    return dataclasses.replace(found, accelerator=dataclasses.replace(found.accelerator, native=native))


@needs_compiler
def test_our_kernel_compiles_for_every_gpu_with_its_figures() -> None:
    found = judge(implementation_registry.find_implementation("flash_gpu"))
    programs = ("forward", "gradients_lse")
    assert {name: record.verdict for name, record in found.items()} == {
        f"{gpu.name}.{program}": PASS for gpu in GPUS for program in programs
    }
    for gpu in GPUS:
        figures = found[f"{gpu.name}.gradients_lse"].figures
        assert figures["compile_seconds"] > 0
        assert 0 < figures["shared_bytes"] <= gpu.shared_memory_per_block
        # The saved out, values of a row and the schedule; not the 16 MB of T * S values in f32.
        assert figures["temporary_bytes"] < 4 * 1000 * 4 * 64 * 4


@needs_compiler
def test_our_decode_kernel_compiles_for_every_gpu_and_leaves_the_cache_where_it_is() -> None:
    case = parse_case_id(
        "decode/bf16/B4.T1.S9000.N8.K2.H128.V128/window-l4095-r0-o8999_and_lengths-0-1-8191-9000/normal/s0"
    )
    found = judge(implementation_registry.find_implementation("ragged_gpu"), case)
    programs = ("forward", "residuals")
    assert {name: record.verdict for name, record in found.items()} == {
        f"{gpu.name}.{program}": PASS for gpu in GPUS for program in programs
    }
    for record in found.values():
        # One part for each of 32 splits, and their sum; not a copy of the 18 MB of keys.
        assert record.figures["temporary_bytes"] < 4 * 2**20


@needs_compiler
def test_our_paged_kernel_compiles_for_every_gpu_and_leaves_the_pages_where_they_are() -> None:
    (case, *_) = select_compiled_cases(implementation_registry.find_implementation("paged_gpu").supports)
    found = judge(implementation_registry.find_implementation("paged_gpu"), case)
    programs = ("forward", "residuals")
    assert {name: record.verdict for name, record in found.items()} == {
        f"{gpu.name}.{program}": PASS for gpu in GPUS for program in programs
    }
    keys = case.batch * case.kv_length * case.num_kv_heads * case.head_dim * 2
    for record in found.values():
        # A part for each share, and their sum; not a copy of the keys.
        assert record.figures["temporary_bytes"] < keys / 8


@needs_compiler
@pytest.mark.parametrize(
    "name",
    [
        "paged_gpu_mosaic",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("paged_quantized_gpu_mosaic", "ragged_gpu_mosaic")),
    ],
)
def test_two_programs_of_the_decode_kernel_fit_a_multiprocessor_of_a_hopper_gpu(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "TARGETS", tuple(target for target in TARGETS if target.name == "h100"))
    implementation = implementation_registry.find_implementation(name)
    cases = select_compiled_cases(implementation.supports)
    case = next(case for case in cases if (case.head_dim, case.v_head_dim) == (128, 128))
    figures = judge(implementation, case)["h100.residuals"].figures
    # A multiprocessor has 228 KiB and 64 Ki registers; each block of 128 threads reserves 1 KiB.
    assert 2 * (figures["decode_shares.shared_bytes"] + 1024) <= 228 * 1024
    assert 2 * 128 * figures["decode_shares.registers"] <= 64 * 1024
    assert figures["decode_shares.spilled_bytes"] == 0


@needs_compiler
@pytest.mark.parametrize("number", [0, 1])
def test_our_packed_kernels_compile_for_every_gpu_and_spill_next_to_nothing(number: int) -> None:
    case = select_compiled_cases(implementation_registry.find_implementation("flash_gpu_packed").supports)[number]
    found = judge(implementation_registry.find_implementation("flash_gpu_packed"), case)
    programs = ("forward", "gradients_lse")
    assert {name: record.verdict for name, record in found.items()} == {
        f"{gpu.name}.{program}": PASS for gpu in GPUS for program in programs
    }
    queries = case.batch * case.q_length * case.num_q_heads * case.head_dim * 2
    for record in found.values():
        # None when their tiles were chosen. Those of dense kernels would spill hundreds; two registers are a detail.
        assert record.figures["spilled_bytes"] <= 8
        # Values of a row and lists of blocks; no copy of an operand.
        assert record.figures["temporary_bytes"] < queries / 4


@needs_compiler
def test_more_shared_memory_than_a_gpu_has_fails_with_the_compilers_words() -> None:
    tiles = Tiles(block_q=128, block_kv=128, num_warps=8, num_stages=4)
    sizes = BlockSizes(forward=tiles, dq=tiles, dkv=tiles)
    case = parse_case_id("prefill/f16/B1.T1024.S1024.N1.K1.H256.V256/full/normal/s0")
    found = judge(natively(backend="triton", block_sizes=sizes), case)
    assert {record.verdict for record in found.values()} == {FAIL}
    for record in found.values():
        assert "hared memory" in record.reason


@needs_compiler
def test_the_back_end_for_hopper_is_unsupported_on_other_gpus() -> None:
    found = judge(implementation_registry.find_implementation("flash_gpu_mosaic"), SMALL)
    for gpu in GPUS:
        record = found[f"{gpu.name}.forward"]
        assert record.platform == find_platform(
            implementation_registry.find_implementation("flash_gpu_mosaic"), "compiles"
        )
        assert record.verdict == (PASS if gpu.name == "h100" else UNSUPPORTED)
        if record.verdict == UNSUPPORTED:
            assert f"GPUs other than Hopper, which '{gpu.kind}' is not" in record.reason


@needs_compiler
@pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="that compiler ends the process, without a word")
def test_a_hopper_kernel_fails_elsewhere_although_the_process_compiled_it_for_hopper(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The compiler keeps Mosaic kernels in the process by their hash, whatever the architecture."""
    monkeypatch.setattr(pallas_backends, "HOPPER", ("NVIDIA",))
    first, *others = sorted(GPUS, key=lambda gpu: gpu.name != "h100")
    monkeypatch.setattr(targets, "TARGETS", tuple(t for gpu in (first, *others) for t in TARGETS if t.name == gpu.name))
    found = judge(natively(backend="mosaic"), SMALL)
    assert found["h100.forward"].verdict == PASS
    for gpu in others:
        assert found[f"{gpu.name}.forward"].verdict == FAIL
        assert f"'nvvm.wgmma.fence.aligned' op is not supported on {gpu.architecture}" in (
            found[f"{gpu.name}.forward"].reason
        )


def test_without_the_wheels_it_is_unjudged_and_says_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = dataclasses.replace(GPU, modules=("no_such_plugin", "no.such.half"))
    monkeypatch.setattr(targets, "TARGETS", tuple(dataclasses.replace(t, toolchain=absent) for t in TARGETS))
    (record,) = judge(implementation_registry.find_implementation("flash_gpu")).values()
    assert (record.observable, record.verdict) == ("all", UNJUDGED)
    assert record.reason == (
        "the GPU compiler is not installed (no_such_plugin, no.such.half): "
        'pip install "attention-conformance[gpu-compile]" (CUDA 13)'
    )


@pytest.mark.skipif(runs_on("gpu"), reason="says what is said of a kernel that cannot run here")
def test_a_kernel_that_cannot_run_here_is_compiled_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is found so counts: it turns a run red, and is no judgement on a GPU."""
    told = iter([CompileError("no such instruction"), *[CallRefused("needs another GPU")] * 5])

    def refusing(*_: object) -> Mapping[str, float]:
        raise next(told)

    monkeypatch.setattr(targets, "TARGETS", tuple(dataclasses.replace(t, toolchain=THERE) for t in TARGETS))
    monkeypatch.setattr(native_compilation, "compile_for", refusing)
    implementation = implementation_registry.find_implementation("flash_gpu_mosaic")
    jobs = run_plan.plan_case(implementation, SMALL, [CHECKS_BY_NAME["forward"], CHECKS_BY_NAME["compiles"]]).jobs
    found = Runner(Settings()).run(jobs)
    assert [(r.check, r.platform, r.verdict) for r in found] == [
        ("compiles", "cpu-interpret", FAIL),
        *[("compiles", "cpu-interpret", UNSUPPORTED)] * 5,  # two programs, three GPUs
        ("hardware", "gpu", UNJUDGED),
    ]
    others = [implementation, implementation_registry.find_implementation("dot_product")]
    assert compute_exit_code(found, others, COMPLETE, lacks_platform=False) == 1


def test_without_the_programs_it_calls_it_says_which() -> None:
    incomplete = dataclasses.replace(GPU, modules=(), programs=lambda: None)
    assert "not installed (ptxas and libdevice)" in str(incomplete.missing)


def test_the_toolkit_is_taken_from_where_cuda_home_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/ptxas").touch()
    (tmp_path / "nvvm/libdevice").mkdir(parents=True)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert GPU.options["xla_gpu_cuda_data_dir"] == str(tmp_path)


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_the_description_has_what_kernels_are_checked_against(gpu: Gpu) -> None:
    assert f"shared_memory_per_block_optin: {gpu.shared_memory_per_block}\n" in gpu.config
    assert f'device_description_str: "{gpu.kind}"' in gpu.config
    assert gpu.config.count("{") == gpu.config.count("}")
    # Matrix instructions of Hopper and Blackwell are in the architecture-specific set.
    assert ("ACCELERATED_FEATURES" in gpu.config) == gpu.architecture.endswith("a") == (gpu.major > 8)


def test_gpu_kernels_are_asked_in_every_case_that_they_support() -> None:
    jobs = run_plan.plan_run(
        [implementation_registry.find_implementation("flash_gpu")], level="quick", checks=[CHECKS_BY_NAME["compiles"]]
    ).jobs
    features = {feature for job in jobs for feature in job.case.features}
    assert features >= {"f16", "bf16", "f32", "gqa", "mqa", "bias", "sinks", "soft_cap", "segment_ids", "dense_head"}
    assert any(job.case.q_length % 128 for job in jobs)


def test_upstream_mha_refuses_what_no_gpu_has_the_shared_memory_for() -> None:
    native = implementation_registry.find_implementation("jax_mha_gpu").accelerator.native
    assert native is not None
    x = jax.ShapeDtypeStruct((1, 256, 1, 128), jnp.float32)
    with pytest.raises(NotImplementedError, match="needs 262144 bytes of shared memory, of which a GPU has 232448"):
        jax.eval_shape(functools.partial(native, mask=Full()), x, x, x)
