"""Quantised caches with scales of sequences and blocks: what is drawn, and the facts about dtypes that it rests on."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from cases import quantization
from cases.case import CaseIdError
from cases.case_id import parse_case_id
from cases.operand_values import build_hollow_problem, draw_problem
from cases.quantization import quantize_cache
from cases.storage_forms.storage_layout import NOBODY
from conformance.execution.executor import Executor
from conformance.execution.stored_calls import StoredCall
from impls.paged.implementation import IMPLEMENTATIONS

SIZES = "prefill/f32/B4.T21.S64.N4.K2.H64.V32/own-linf-53-16-17-8"
OURS = next(one for one in IMPLEMENTATIONS if one.name == "paged_quantized")


def _draw(seed: int, depth: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(2, 21, 3, depth))


def _store(case: str) -> dict[str, np.ndarray]:
    """Return the stored operands of a case by name."""
    problem = draw_problem(parse_case_id(case))
    executor = Executor(OURS)
    _, arrays = executor.arguments(problem)
    call = executor.implementation.call
    assert isinstance(call, StoredCall)
    return {name: np.asarray(x) for name, x in call.store(**arrays).items()}


@pytest.mark.parametrize("cache", quantization.READ_CACHES)
def test_stored_numbers_mean_what_they_were_up_to_half_a_step(cache: str) -> None:
    k, v = _draw(0, 64), _draw(1, 32)
    found = quantize_cache(k, v, cache, 5)
    for side, (stored, x) in enumerate(((found.k, k), (found.v, v))):
        factor = 1.0 if found.kv_global_scales is None else found.kv_global_scales[side]
        zeros = None if found.kv_zeros is None else found.kv_zeros[side]
        meant = quantization.dequantize(stored, found.kv_scales[side], factor, zeros)
        error = np.abs(meant - x)
        limit = quantization.compute_half_steps(stored, found.kv_scales[side], factor)
        # Some blocks were replaced by zeros.
        kept = (zeros is not None) | (stored.astype(np.float64) != 0) | (np.abs(x) <= limit)
        # The scale of an fp4 block is rounded, so its peak may be clipped.
        assert (error <= limit * (1 + 2.0**-7))[kept].all()


def test_scales_of_blocks_differ_from_their_neighbours_and_are_finite() -> None:
    for cache in quantization.BLOCK_CACHES:
        found = quantize_cache(_draw(0, 128), _draw(1, 128), cache)
        size, dtype = quantization.get_block_size(cache), quantization.get_scale_dtype(cache)
        for stored, scales in zip((found.k, found.v), found.kv_scales, strict=True):
            assert scales.dtype == dtype
            assert scales.shape == (*stored.shape[:3], stored.shape[3] // size)
            wide = scales.astype(np.float64)
            assert np.isfinite(wide).all()
            assert (np.diff(wide, axis=-1) != 0).mean() > 0.9
            is_zero = (stored.astype(np.float64).reshape(*scales.shape, size) == 0).all(axis=-1)
            assert 0 < is_zero.mean() < 0.2


def test_what_dtypes_of_scales_and_numbers_hold() -> None:
    exponent, fp4, fp8 = ml_dtypes.float8_e8m0fnu, ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e4m3fn
    assert np.isnan(np.float32(0).astype(exponent).astype(np.float32))  # it has no zero
    assert np.isnan(np.float32(-4).astype(exponent).astype(np.float32))  # and no sign
    bits = np.array([0, 127, 254, 255], np.uint8).view(exponent).astype(np.float64)
    assert np.array_equal(bits, [2.0**-127, 1, 2.0**127, np.nan], equal_nan=True)
    assert np.array_equal(np.array([448, 1000.0]).astype(fp8).astype(float), [448, np.nan], equal_nan=True)
    assert set(np.abs(np.arange(16, dtype=np.uint8).view(fp4).astype(float))) == {
        0,
        0.5,
        1,
        1.5,
        2,
        3,
        4,
        6,
    }


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e8m0fnu, ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e4m3fn])
def test_jax_on_a_cpu_holds_the_dtypes(dtype: type) -> None:
    every: np.ndarray = np.arange(16 if "4_e2m1" in dtype.__name__ else 256, dtype=np.uint8).view(dtype)
    held = jax.jit(lambda x, at: x[at])(every, np.arange(len(every)))
    assert held.dtype == dtype
    assert np.asarray(held).tobytes() == every.tobytes()
    wide = np.asarray(jax.jit(lambda x: x.astype(jnp.float32))(every))
    assert np.array_equal(wide, every.astype(np.float32), equal_nan=True)


def test_rows_of_blocks_and_sequences_lie_where_kernels_look() -> None:
    found = _store(f"{SIZES}/kvmxfp8-block/paged16-q21-1-1-8/normal/s0")
    problem = draw_problem(parse_case_id(f"{SIZES}/kvmxfp8-block/paged16-q21-1-1-8/normal/s0"))
    assert problem.storage is not None
    there = problem.storage.held != NOBODY
    meant = found["k"].astype(float) * np.repeat(found["k_block_scales"].astype(float), 32, axis=-1)
    assert np.array_equal(meant[there], problem.keys.reshape(-1, 2, 64)[problem.storage.held[there]])
    assert np.isnan(found["k_block_scales"][~there].astype(float)).all()
    assert found["v_block_scales"].shape == (*there.shape, 2, 1)
    fp4 = _store(f"{SIZES}/kvnvfp4-block/paged16-q21-1-1-8/normal/s0")
    assert fp4["k"].dtype == ml_dtypes.float4_e2m1fn
    assert (fp4["k"][~there].astype(float) == 6).all()  # the worst number that fp4 has
    case = parse_case_id(f"{SIZES}/kvuint8-channel/paged5-q21-1-1-8/normal/s0")
    problem, found = draw_problem(case), _store(case.id)
    assert problem.storage is not None
    there = problem.storage.held != NOBODY
    assert found["k_channel_scales"].shape == (len(there), 2, 64)
    meant = found["k"] * found["k_channel_scales"][:, None].astype(float) + found["k_channel_zeros"][:, None]
    assert np.array_equal(meant[there], problem.keys.reshape(-1, 2, 64)[problem.storage.held[there]])
    assert np.isnan(found["k_channel_zeros"][~there.any(axis=1)]).all()
    assert found["v_token_zeros"].shape == (*there.shape, 2)
    case = parse_case_id(f"{SIZES}/kvfp8-sequence/qfp8/shared5-q21-1-1-8/normal/s0")
    problem, found = draw_problem(case), _store(case.id)
    assert problem.kv_scales is not None
    assert problem.q_descale is not None
    rows = found["k_descale"]
    assert np.array_equal(rows[:4], problem.kv_scales[0])
    assert np.array_equal(found["q_descale"][:4], problem.q_descale)
    assert np.isnan(rows[4:]).all()
    factor = np.repeat(problem.q_descale, 2, axis=1)[0]
    assert np.array_equal(found["q"][:21].astype(float) * factor[:, None], problem.q[0].astype(float))


@pytest.mark.parametrize("cache", [*quantization.READ_CACHES, "kvfp8-sequence/qfp8"])
def test_a_problem_without_values_has_the_shapes_of_a_drawn_one(cache: str) -> None:
    case = parse_case_id(f"{SIZES}/{cache}/paged16-q21-1-1-8/normal/s0")
    drawn, hollow = draw_problem(case), build_hollow_problem(case)
    names = ("q", "k", "v", "kv_scales", "kv_zeros", "kv_global_scales", "q_scale", "q_descale")
    for name in names:
        pair = jax.tree.map(lambda x: (np.shape(x), np.asarray(x).dtype), (getattr(drawn, name), getattr(hollow, name)))
        assert pair[0] == pair[1], name


@pytest.mark.parametrize(
    ("cache", "storage", "message"),
    [
        ("kvmxfp8-block", "paged16-q21-1-1-8", "whole blocks"),
        ("kvfp8-sequence", "packed-q21-1-1-8", "a cache in pages"),
        ("kvfp8-sequence", "", "a cache in pages"),
    ],
)
def test_caches_that_no_case_can_have_are_named(cache: str, storage: str, message: str) -> None:
    parts = [SIZES.replace("V32", "V48"), cache, *([storage] if storage else []), "normal", "s0"]
    with pytest.raises(CaseIdError, match=message):
        parse_case_id("/".join(parts))
