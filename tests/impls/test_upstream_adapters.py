"""The adapters under `impls/libraries` against the float64 oracle: layouts, conventions, gradients, refusals."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from packaging.version import Version

from cases import masks
from cases.case import FEATURES
from cases.case_id import parse_case_id
from cases.operand_values import Cotangent, Problem, draw_cotangent, draw_problem
from conformance.checks import CHECKS_BY_NAME
from conformance.execution import implementation_registry
from conformance.judging.run_plan import plan_run
from conformance.judging.runner import Runner
from conformance.judging.settings import Settings
from impls.catalogue import MODULES
from impls.contract.implementation import Implementation
from impls.libraries import tokamax_splash
from impls.libraries.jax_mha_gpu import attention as mha_gpu
from impls.libraries.jax_nn import build_mask_arguments
from impls.libraries.mask_flags import find_causal_flag
from tests.comparison_asserts import assert_attention, assert_right, compute_expected

CASES = {
    "jax_nn_xla": (
        "train/f32/B2.T24.S40.N4.K2.H16.V16/window-l7-r3_and_causal/biaskey/scale0.5/normal/s0",
        "train/f32/B2.T24.S24.N4.K1.H16.V16/densehead-d40/bias/normal/s0",
        "train/bf16/B2.T16.S16.N2.K2.H16.V16/chunked-8/normal/s0",
        "prefill/f32/B2.T8.S24.N2.K2.H16.V16/lengths-20-9/normal/s0",
    ),
    "jax_splash_tpu": (
        "train/f32/B1.T128.S256.N4.K2.H16.V32/window-l100-r0-o128/seg/softcap30/sinks/normal/s0",
        "prefill/bf16/B2.T128.S256.N4.K2.H16.V16/densehead-d40/scale0.5/normal/s0",
        "prefill/f32/B2.T128.S128.N2.K1.H16.V16/chunked-50_or_spans-10-30/sinks/normal/s0",
    ),
    "jax_splash_tpu_fused": ("train/f32/B1.T256.S256.N2.K2.H16.V16/causal/normal/s0",),
    "tokamax_splash_tpu": (
        "train/f32/B1.T128.S256.N4.K2.H16.V32/window-l100-r0-o128/seg/softcap30/sinks/normal/s0",
        "train/f32/B2.T128.S128.N2.K1.H16.V16/causal/normal/s0",
        "prefill/f32/B2.T128.S128.N2.K2.H16.V16/indexer-d40/normal/s0",
    ),
    "jax_flash_tpu": (
        "train/f32/B2.T128.S256.N2.K2.H16.V16/causal/seg/biashead/scale0.5/normal/s0",
        "prefill/f16/B1.T130.S128.N1.K1.H16.V16/full/normal/s0",
    ),
    "jax_mha_gpu": (
        "train/f32/B2.T64.S64.N2.K2.H16.V16/causal/seg/scale0.5/normal/s0",
        "prefill/bf16/B1.T32.S128.N1.K1.H16.V16/full/normal/s0",
    ),
    "jax_decode_gpu": (
        "decode/f32/B2.T1.S72.N4.K2.H16.V16/own-l6-33-70/scale0.3/normal/s0",
        "decode/bf16/B2.T1.S72.N4.K2.H16.V16/lengths-0-65/normal/s0",
        "decode/f32/B1.T1.S40.N2.K1.H16.V16/window-l7-r2-o29_and_causal-o29/normal/s0",
    ),
    # These run on a Hopper GPU only.
    "jax_mosaic_gpu": (
        "train/f16/B2.T256.S256.N4.K2.H64.V64/full/scale0.5/normal/s0",
        "prefill/f16/B1.T256.S256.N2.K2.H128.V128/causal/normal/s0",
    ),
    "tokamax_mosaic_gpu": ("train/bf16/B2.T256.S256.N4.K2.H64.V64/causal/softcap30/normal/s0",),
    "jax_mha_gpu_xla_bwd": ("train/f32/B1.T64.S64.N1.K1.H16.V16/causal/normal/s0",),
}


@functools.cache
def adapters() -> dict[str, Implementation]:
    """Load all adapters by name."""
    names = (name for name, module in MODULES.items() if module.startswith("impls.libraries."))
    return {name: implementation_registry.find_implementation(name) for name in names}


def operands(problem: Problem) -> dict[str, Any]:
    """List the differentiable operands of a problem."""
    names = ("q", "k", "v", "sinks", "bias")
    return {name: jnp.asarray(x) for name in names if (x := getattr(problem, name)) is not None}


def statics(problem: Problem) -> dict[str, Any]:
    """List the other arguments."""
    return {
        "mask": problem.mask,
        "segment_ids": problem.segment_ids,
        "soft_cap": problem.soft_cap,
        "scale": problem.scale,
    }


@pytest.mark.parametrize(("name", "case_id"), [(name, case) for name, ids in CASES.items() for case in ids])
def test_agrees_with_the_oracle(name: str, case_id: str) -> None:
    """Output, residuals and gradients, jitted as the harness does."""
    implementation, case = adapters()[name], parse_case_id(case_id)
    if implementation.accelerator.absent is not None:
        pytest.skip(implementation.accelerator.absent)
    assert implementation.supports(case) is None
    problem = draw_problem(case)
    fixed = statics(problem)
    live_rows = ~problem.empty_rows
    live = live_rows.transpose(0, 2, 1)[..., None]
    do = np.where(live, draw_cotangent(case).out, 0).astype(problem.q.dtype)
    expected = compute_expected(problem, Cotangent("random", do), arithmetic=implementation.arithmetic)
    right = functools.partial(assert_right, dtype=case.dtype)

    out, residuals = jax.jit(lambda x: implementation.call(**x, **fixed, save_residuals=True))(operands(problem))
    assert out.dtype == problem.q.dtype
    assert set(residuals) == implementation.residuals
    right({"out": out}, expected, judged=live)
    if "logsumexp" in residuals:
        assert residuals["logsumexp"].dtype == jnp.float32
        # jax.nn returns it in the operands' dtype, an expected failure of the gate (pyproject.toml).
        stored = "input" if name == "jax_nn_xla" else implementation.arithmetic.residuals
        arithmetic = dataclasses.replace(implementation.arithmetic, residuals=stored)
        truth = compute_expected(problem, arithmetic=arithmetic)
        right({"logsumexp": residuals["logsumexp"]}, truth, judged=live_rows)

    if case.phase == "train":

        @jax.jit
        def primal_and_gradients(x: dict[str, Any]) -> Any:
            primal, pullback = jax.vjp(lambda x: implementation.call(**x, **fixed), x)
            return primal, pullback(do)[0]

        primal, gradients = primal_and_gradients(operands(problem))
        right({"out": primal}, expected, judged=live)
        found = {f"d{operand}": gradient for operand, gradient in gradients.items()}
        assert set(found) <= set(implementation.gradients)
        right(found, expected)


def test_what_decode_attention_of_jax_returns_in_bf16_is_f32() -> None:
    """Its adapter rounds it, and need not once this is red."""
    gqa = importlib.import_module("jax.experimental.pallas.ops.gpu.decode_attention").gqa
    q, kv = jnp.ones((1, 2, 16), jnp.bfloat16), jnp.ones((1, 32, 2, 16), jnp.bfloat16)
    assert jax.eval_shape(functools.partial(gqa, k_splits=2, interpret=True), q, kv, kv).dtype == jnp.float32
    call = functools.partial(adapters()["jax_decode_gpu"].call, mask=masks.Full())
    assert jax.eval_shape(call, q[:, None], kv, kv).dtype == jnp.bfloat16


@pytest.mark.parametrize("name", CASES)
def test_refuses_what_it_declares_unsupported(name: str) -> None:
    """Every refusal names the feature and gives the declared reason."""
    implementation = adapters()[name]
    of_f32, of_bf16 = (jnp.zeros((2, 128, 2, 16), dtype) for dtype in (jnp.float32, jnp.bfloat16))
    q = kv = of_f32.astype(jnp.float16) if "f32" in implementation.unsupported else of_f32
    asking: dict[str, dict[str, Any]] = {
        "soft_cap": {"soft_cap": 30.0},
        "sinks": {"sinks": jnp.zeros(2)},
        "bias": {"bias": jnp.zeros((1, 2, 128, 128))},
        "segment_ids": {"segment_ids": (jnp.zeros((2, 128), int),) * 2},
        "v_head_dim": {"v": kv[..., :8]},
        "mqa": {"k": kv[:, :, :1], "v": kv[:, :, :1]},
        "gqa": {"q": jnp.zeros((2, 128, 4, 16), q.dtype)},
        "f32": dict.fromkeys(("q", "k", "v"), of_f32),
        "bf16": dict.fromkeys(("q", "k", "v"), of_bf16),
        "window": {"mask": masks.Window(3, 0)},
        "chunked": {"mask": masks.Causal() & masks.Chunked(8)},
        "bidirectional": {"mask": masks.Bidirectional(((0, 3),))},
        "balanced": {"mask": masks.LoadBalancedCausal(2, 128)},
        "lengths": {"mask": masks.Lengths((3, 4))},
        "dense": {"mask": masks.Dense(np.ones((128, 128), bool))},
        "dense_head": {"mask": masks.Dense(np.ones((1, 2, 128, 128), bool))},
        "dense_batch": {"mask": masks.Dense(np.ones((2, 1, 128, 128), bool))},
        "indexer": {"mask": masks.Indexer(np.ones((2, 1, 128, 128), bool))},
        "offset": {"mask": masks.Causal(3)},
        "train": {},
        "prefill": {"q": q[:, :3]},
    }
    assert set(implementation.unsupported) <= set(asking)
    for feature, reason in implementation.unsupported.items():
        arguments = {"q": q, "k": kv, "v": kv, "mask": masks.Full(), **asking[feature]}
        with pytest.raises(NotImplementedError) as caught:
            implementation.call(**arguments)
        assert str(caught.value) == f"{name} does not support {feature} ({FEATURES[feature]}): it {reason}"


@pytest.mark.parametrize(
    ("name", "case_id", "reason"),
    [
        (
            "jax_splash_tpu",
            "train/f32/B1.T192.S128.N1.K1.H16.V16/full/normal/s0",
            "needs lengths that are multiples of 128, its smallest block; T is 192",
        ),
        (
            "jax_splash_tpu",
            "prefill/f32/B2.T128.S128.N1.K1.H16.V16/causal_and_lengths-3-9/normal/s0",
            "takes one mask for the whole batch, not one for each batch row (dense_batch, lengths)",
        ),
        (
            "tokamax_splash_tpu",
            "train/f32/B1.T128.S192.N1.K1.H16.V16/full/normal/s0",
            "needs lengths that are multiples of 128, its smallest block; S is 192",
        ),
        (
            "tokamax_splash_tpu",
            "prefill/f32/B2.T128.S128.N1.K1.H16.V16/lengths-3-9/normal/s0",
            "takes one mask for the whole batch, not one for each batch row (dense_batch, lengths)",
        ),
        (
            "jax_flash_tpu",
            "prefill/f32/B1.T128.S130.N1.K1.H16.V16/full/normal/s0",
            "needs a multiple of 128 keys, its block; S is 130",
        ),
        (
            "jax_flash_tpu",
            "decode/f32/B1.T1.S128.N1.K1.H16.V16/full/normal/s0",
            "needs at least 128 queries, its block; T is 1",
        ),
        (
            "jax_flash_tpu",
            "train/f32/B1.T128.S128.N1.K1.H16.V16/full_or_causal/normal/s0",
            "takes no mask but its causal flag",
        ),
        (
            "jax_mha_gpu",
            "train/f32/B1.T200.S200.N1.K1.H16.V16/full/normal/s0",
            "needs lengths up to 128 or multiples of 128, its block; T is 200",
        ),
        (
            "jax_nn_cudnn",
            "train/bf16/B1.T16.S16.N1.K1.H20.V20/full/normal/s0",
            "needs a head_dim that is a multiple of 8 up to 256, got 20",
        ),
        (
            "jax_nn_cudnn",
            "train/bf16/B1.T16.S16.N1.K1.H16.V16/full/biaskey/normal/s0",
            "needs a bias that spans both lengths",
        ),
    ],
)
def test_limits_are_declared_and_refused(name: str, case_id: str, reason: str) -> None:
    """A limit beyond the features is a reason of the case and an error of the call."""
    implementation, problem = adapters()[name], draw_problem(parse_case_id(case_id))
    assert implementation.supports(parse_case_id(case_id)) == reason
    with pytest.raises(NotImplementedError, match=re.escape(reason)):
        implementation.call(**operands(problem), **statics(problem))


@pytest.mark.parametrize(("name", "q_length"), [("jax_mha_gpu", 64), ("jax_flash_tpu", 130)])
def test_gradient_limits_refuse_gradients_only(name: str, q_length: int) -> None:
    """Limits of the backward pass alone do not rule out the forward pass."""
    q, kv = np.ones((1, q_length, 1, 16), np.float32), np.ones((1, 128, 1, 16), np.float32)
    call = functools.partial(adapters()[name].call, mask=masks.Full())
    problem = Problem(q, kv, kv, masks.Full())
    assert_attention({"out": jax.jit(call)(q, kv, kv)}, problem, arithmetic=adapters()[name].arithmetic)
    with pytest.raises(NotImplementedError, match="for gradients"):
        jax.grad(lambda q: call(q, kv, kv).sum())(q)


@pytest.mark.skipif(importlib.util.find_spec("tokamax") is not None, reason="tokamax is installed")
def test_without_tokamax_no_check_of_it_is_tried() -> None:
    tokamax = adapters()["tokamax_splash_tpu"]
    asked = [CHECKS_BY_NAME[name] for name in ("forward", "interpreter", "compiles")]
    jobs = plan_run([tokamax], level="quick", query="train/bf16/*", checks=asked).jobs
    found = [record for job in jobs for record in Runner(Settings()).judge(job)]
    assert found
    assert {(record.verdict, record.reason) for record in found} == {("unjudged", tokamax.accelerator.absent)}


def test_tokamax_is_absent_with_a_remedy_where_it_is_not_installed() -> None:
    """What it does not support is known all the same."""
    tokamax = adapters()["tokamax_splash_tpu"]
    absent = tokamax.accelerator.absent
    assert (absent is None) == (importlib.util.find_spec("tokamax") is not None)
    assert absent is None or 'pip install "attention-conformance[upstream]"' in absent
    shape = "f32/B2.T128.S256.N2.K1.H16.V16"
    refused = tokamax.supports(parse_case_id(f"train/{shape}/indexer-d40/normal/s0"))
    assert ("sums gradients in place" in (refused or "")) == (Version(jax.__version__) < Version("0.11.2"))
    assert tokamax.supports(parse_case_id(f"prefill/{shape}/indexer-d40/normal/s0")) is None
    assert tokamax.supports(parse_case_id(f"train/{shape}/causal/normal/s0")) is None


def test_tokamax_refuses_gradients_that_the_fast_interpreter_gets_wrong() -> None:
    """Of a group, or of more key blocks than it has arrays for dq, under a mask known at run time."""
    tokamax = adapters()["tokamax_splash_tpu"]
    if tokamax.accelerator.absent is not None:
        pytest.skip(tokamax.accelerator.absent)
    q, kv = np.ones((1, 128, 2, 16), np.float32), np.ones((1, 128, 1, 16), np.float32)
    mask = masks.Indexer(np.ones((1, 1, 128, 128), bool))
    call = functools.partial(tokamax.call, mask=mask)
    assert_attention({"out": jax.jit(call)(q, kv, kv)}, Problem(q, kv, kv, mask), arithmetic=tokamax.arithmetic)
    if Version(jax.__version__) < Version("0.11.2"):
        with pytest.raises(NotImplementedError, match="sums gradients in place"):
            jax.grad(lambda q: call(q, kv, kv).sum())(q)


def test_the_fast_interpreter_reads_aliased_writes_in_the_versions_that_are_named() -> None:
    """The third step of the grid reads the block that the first one wrote."""

    def add_one(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = x_ref[...] + 1

    out = pl.pallas_call(
        add_one,
        grid=(3,),
        in_specs=[pl.BlockSpec((8, 128), lambda i: (i % 2, 0))],
        out_specs=pl.BlockSpec((8, 128), lambda i: (i % 2, 0)),
        out_shape=jax.ShapeDtypeStruct((16, 128), jnp.float32),
        input_output_aliases={0: 0},
        interpret=True,
    )(jnp.zeros((16, 128), jnp.float32))
    assert (out[0, 0] == 2) == tokamax_splash.READS_ALIASED_WRITES


def test_gradient_limits_are_declared() -> None:
    """Limits of the backward pass count in training cases only."""
    shape = "f32/B1.T64.S128.N1.K1.H16.V16/full/normal/s0"
    assert "as many query blocks as key blocks" in (
        adapters()["jax_mha_gpu"].supports(parse_case_id(f"train/{shape}")) or ""
    )
    assert adapters()["jax_mha_gpu"].supports(parse_case_id(f"prefill/{shape}")) is None
    assert adapters()["jax_mha_gpu_xla_bwd"].supports(parse_case_id(f"train/{shape}")) is None


def test_mha_gpu_takes_equal_segment_ids_only() -> None:
    """It has one array for both: different ids are refused, or give NaN where only run time can tell."""
    x = jnp.ones((1, 16, 1, 16))
    ids, others = np.zeros((1, 16), np.int32), np.ones((1, 16), np.int32)
    with pytest.raises(NotImplementedError, match="takes one array of segment ids"):
        mha_gpu(x, x, x, mask=masks.Full(), segment_ids=(ids, others))
    traced = jax.jit(lambda q_ids, kv_ids: mha_gpu(x, x, x, mask=masks.Full(), segment_ids=(q_ids, kv_ids)))
    assert np.isfinite(traced(ids, ids)).all()
    assert np.isnan(traced(ids, others)).all()


def test_jax_nn_gets_native_arguments() -> None:
    """Flags where they mean the same, booleans for the rest."""
    mask = masks.Causal() & masks.Window(3, None) & masks.Full()
    assert build_mask_arguments(mask, 2, 8, 12) == {"is_causal": True, "local_window_size": (3, 12)}
    moved = build_mask_arguments(masks.Causal(4) & masks.Lengths((5, 9)), 2, 8, 12)
    assert moved["key_value_seq_lengths"].tolist() == [5, 9]
    np.testing.assert_array_equal(moved["mask"], masks.Causal(4).dense(8, 12))
    assert sorted(moved) == ["key_value_seq_lengths", "mask"]


def test_jax_nn_cudnn_gets_native_arguments() -> None:
    """Its window is to the left of the diagonal, beside a causal mask; any other goes into booleans."""
    native = functools.partial(build_mask_arguments, backend="cudnn")
    assert native(masks.Causal() & masks.Window(3, 0), 1, 8, 8) == {"is_causal": True, "local_window_size": (3, 0)}
    alone = native(masks.Window(3, 2), 1, 8, 8)
    assert sorted(alone) == ["mask"]
    np.testing.assert_array_equal(alone["mask"], masks.Window(3, 2).dense(8, 8))


def test_jax_nn_cudnn_is_declared_where_it_cannot_run() -> None:
    """Without an NVIDIA GPU it is absent with a reason, and what it does not support is known all the same."""
    cudnn = adapters()["jax_nn_cudnn"]
    assert (cudnn.accelerator.absent is None) == (jax.default_backend() == "gpu")
    odd, even = ("B1.T17.S17.N2.K1.H16.V16", "B1.T18.S18.N2.K1.H16.V16")
    assert (
        cudnn.supports(parse_case_id(f"train/f32/{even}/causal/normal/s0")) == "f32: takes bf16 and f16 operands only"
    )
    assert cudnn.supports(parse_case_id(f"train/bf16/{even}/dense-d40/bias/normal/s0")) is None
    assert "even lengths for gradients" in (cudnn.supports(parse_case_id(f"train/bf16/{odd}/causal/normal/s0")) or "")
    assert cudnn.supports(parse_case_id(f"prefill/bf16/{odd}/causal/normal/s0")) is None


def test_masks_as_flags_and_features() -> None:
    """What a mask asks for."""
    assert find_causal_flag(masks.Full() & masks.Causal()) is True
    assert find_causal_flag(masks.Full()) is False
    assert find_causal_flag(masks.Causal(1)) is None
    assert find_causal_flag(masks.Full() | masks.Causal()) is None
    assert (masks.Causal(2) & masks.Window(1, 1)).features == ("causal", "offset", "window")
    assert masks.Dense(np.ones((2, 3, 4, 4), bool)).features == ("dense_batch", "dense_head")


@pytest.mark.parametrize("transform", ["grad_of_jit", "remat", "vmap"])
def test_flash_tpu_backward_is_interpreted_under_transforms(transform: str) -> None:
    """Its backward pass is traced after the call returns, outside the interpreter's context."""
    x = np.ones((1, 128, 1, 16), np.float32)
    flash = adapters()["jax_flash_tpu"]

    def loss(q: jax.Array) -> Any:
        return flash.call(q, x, x, mask=masks.Causal()).sum()

    gradient = {
        "grad_of_jit": jax.grad(jax.jit(loss)),
        "remat": jax.grad(jax.checkpoint(loss)),
        "vmap": lambda q: jax.vmap(jax.grad(loss))(q[None])[0],
    }[transform](jnp.asarray(x))
    ones = Cotangent("ones", np.ones_like(x))  # equal values: no logit matters
    assert_attention({"dq": gradient}, Problem(x, x, x, masks.Causal()), ones, arithmetic=flash.arithmetic)


def test_splash_kernels_built_while_tracing_are_reusable() -> None:
    """The cache of kernels must hold arrays, not the tracers of the first call."""
    x = jnp.ones((1, 128, 1, 16))
    call = functools.partial(adapters()["jax_splash_tpu"].call, mask=masks.Window(77, 0))
    first = jax.jit(lambda q: call(q, x, x))(x)
    np.testing.assert_array_equal(first, jax.jit(lambda q: call(2 * q, x, x))(x))
