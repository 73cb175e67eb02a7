"""Pallas TPU splash attention: its schedule, the kernel object, and its refusals; checks cover the results."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, PartitionSpec, use_abstract_mesh

from cases.case import Case
from cases.masks import EMPTY, PARTIAL, Causal, Chunked, Dense, Full, LoadBalancedCausal, Mask, Window
from cases.operand_values import Cotangent, Problem, draw_cotangent, draw_problem
from conformance.accelerators.tpus import TPUS
from conformance.execution import implementation_registry
from impls.pallas_tpu.tpu_tiles import find_limit
from impls.splash_tpu import (
    Blocks,
    BlockSizes,
    Layouts,
    attention,
    dkv_kernel,
    dq_kernel,
    forward,
    make_splash,
    make_splash_dynamic,
    splash_tiles,
)
from impls.splash_tpu.splash_schedule import COMPUTE, FIRST, LAST, MASKED, PART, Steps, build_static_steps
from tests.comparison_asserts import assert_attention

KINDS = [tpu.kind for tpu in TPUS]
SMALL = BlockSizes.uniform(128, 128)
FUSED = BlockSizes.uniform(128, 128, fused_backward=True)
IN_PARTS = BlockSizes.uniform(256, 256, 128, 128)
MASKS = [Causal(), Causal(-200), Window(100, 0), Window(3, 200), Chunked(130), LoadBalancedCausal(2, 512), Full()]


def problem_of(
    mask: Mask, heads: int = 2, kv_heads: int = 1, length: int = 512, batch: int = 1
) -> tuple[Problem, Cotangent]:
    """Draw operands, and a cotangent of `out` alone."""
    case = Case(
        batch=batch,
        q_length=length,
        kv_length=length,
        num_q_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=64,
        v_head_dim=64,
    )
    cotangent = dataclasses.replace(draw_cotangent(case), logsumexp=None)
    return dataclasses.replace(draw_problem(case), mask=mask), cotangent


def heads_first(*arrays: np.ndarray) -> tuple[jax.Array, ...]:
    """Transpose `[B, T, N, H]` to the kernel object's `[B, N, T, H]`."""
    return tuple(jnp.asarray(x).swapaxes(1, 2) for x in arrays)


def operands(heads: int = 2, kv_heads: int = 1, length: int = 512, batch: int = 1) -> tuple[jax.Array, ...]:
    problem, _ = problem_of(Full(), heads, kv_heads, length, batch)
    return heads_first(problem.q, problem.k, problem.v)


def assert_right(problem: Problem, cotangent: Cotangent, out: jax.Array, gradients: Iterable[jax.Array]) -> None:
    """Compare results that have heads before lengths with the oracle."""
    found = {"out": out, **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}
    assert_attention({name: np.asarray(x).swapaxes(1, 2) for name, x in found.items()}, problem, cotangent)


def visited(steps: Steps) -> list[tuple[int, int]]:
    at = np.flatnonzero(np.asarray(steps.flags).ravel() & COMPUTE)
    return list(zip(np.asarray(steps.q).ravel()[at], np.asarray(steps.kv).ravel()[at], strict=True))


@pytest.mark.parametrize("order", ["q", "kv"])
@pytest.mark.parametrize("mask", MASKS)
def test_exactly_the_blocks_with_an_allowed_pair_are_visited(mask: Mask, order: Any) -> None:
    steps, _ = build_static_steps(mask, (512, 384), Blocks(128, 128), order, 1, 1)
    kinds = mask.blocks(512, 384, 128, 128)[0, 0]
    found = visited(steps)
    assert sorted(found) == [tuple(pair) for pair in np.argwhere(kinds != EMPTY)]
    flags = np.asarray(steps.flags).ravel()
    assert (flags & MASKED > 0).sum() == (kinds == PARTIAL).sum()
    # Every block of results is begun and ended once, also one that no pair contributes to.
    results = np.asarray(steps.q if order == "q" else steps.kv).ravel()
    for bit in (FIRST, LAST):
        assert results[flags & bit > 0].tolist() == list(range(kinds.shape[0 if order == "q" else 1]))


def test_a_step_that_computes_nothing_fetches_nothing() -> None:
    steps, kinds = build_static_steps(Causal(-200), (512, 512), Blocks(128, 128), "q", 1, 1)
    assert kinds.empty
    q, kv, flags = (np.asarray(x).ravel() for x in (steps.q, steps.kv, steps.flags))
    idle = np.flatnonzero(flags & COMPUTE == 0)
    assert set(q[idle]) == {0, 1} - set(q[flags & COMPUTE > 0])
    assert len(np.unique(kv[: idle.max() + 2])) == 1


@pytest.mark.long
def test_work_follows_the_window() -> None:
    kernel = make_splash(Window(1023, 0), 32768, 32768, num_q_heads=1)
    active = int((Window(1023, 0).blocks(32768, 32768, 512, 512) != EMPTY).sum())
    assert set(kernel.work()) == {"forward", "dq", "dkv"}
    for phase, work in kernel.work().items():
        assert active <= work["computed"] <= work["steps"] <= 1.5 * active, phase


@pytest.mark.parametrize("mask", [Window(100, 0), Chunked(200), Causal(-150)])
def test_steps_counted_are_steps_run(mask: Mask, monkeypatch: pytest.MonkeyPatch) -> None:
    run: Counter[tuple[str, str]] = Counter()
    plain_logits = splash_tiles.compute_logits
    phases = {forward.__name__: "forward", dq_kernel.__name__: "dq", dkv_kernel.__name__: "dkv"}

    def count(phase: str, what: str) -> None:
        jax.debug.callback(lambda: run.update([(phase, what)]))

    def counting_logits(call: Any, *given: Any) -> Any:
        count(call.phase, "computed")
        return plain_logits(call, *given)

    def counting_kernel(name: Any, plain: Any) -> Any:
        def kernel(*given: Any) -> None:
            count(phases[name], "steps")
            plain(*given)

        return kernel

    for module in (forward, dq_kernel, dkv_kernel):
        monkeypatch.setattr(module, "compute_logits", counting_logits)
        monkeypatch.setattr(module, "_kernel", counting_kernel(module.__name__, module._kernel))
    # A name of its own for the residuals, so that no function compiled without the counting is found.
    kernel = make_splash(mask, 640, 640, num_q_heads=2, block_sizes=SMALL, checkpoint_name=f"counted {mask}")
    q, k, v = operands(2, 2, 640)
    out, pull = jax.vjp(kernel, q, k, v)
    jax.block_until_ready(pull(out))
    jax.effects_barrier()
    expected = {(phase, what): 2 * n for phase, work in kernel.work().items() for what, n in work.items()}
    assert run == expected


@pytest.mark.parametrize("order", ["q", "kv"])
@pytest.mark.parametrize("mask", MASKS)
def test_the_parts_of_masked_blocks_with_an_allowed_pair_are_computed(mask: Mask, order: Any) -> None:
    steps, kinds = build_static_steps(mask, (512, 384), Blocks(256, 256, 128, 128), order, 1, 1)
    parts = np.full((4, 4), EMPTY)
    parts[:, :3] = mask.blocks(512, 384, 128, 128)[0, 0]
    computed = np.zeros((4, 4), bool)
    for q, kv, flags in zip(*(np.asarray(x).ravel() for x in (steps.q, steps.kv, steps.flags)), strict=True):
        left = [flags & (PART << number) > 0 or not flags & MASKED for number in range(4)]
        if flags & COMPUTE:
            computed[2 * q : 2 * q + 2, 2 * kv : 2 * kv + 2] = np.reshape(left, (2, 2))
    assert (computed == (parts != EMPTY)).all()
    assert kinds.parts or not (np.asarray(steps.flags) & MASKED).any()


@pytest.mark.long
@pytest.mark.parametrize("mask", [Causal(), Window(100, 0), Dense(np.tri(512, dtype=bool)), Causal(-200)])
def test_blocks_of_which_parts_are_left_out_are_right(mask: Mask) -> None:
    problem, cotangent = problem_of(mask)
    out, pull = jax.vjp(
        make_splash(mask, 512, 512, num_q_heads=2, num_kv_heads=1, block_sizes=IN_PARTS),
        *heads_first(problem.q, problem.k, problem.v),
    )
    assert_right(problem, cotangent, out, pull(jnp.asarray(cotangent.out).swapaxes(1, 2)))


def test_different_partial_blocks_are_stored_once() -> None:
    block = np.random.default_rng(0).random((128, 128)) < 0.5
    steps, kinds = build_static_steps(Dense(np.tile(block, (3, 3))), (384, 384), Blocks(128, 128), "q", 1, 1)
    assert kinds.stored
    assert len(steps.stored) == 1


@pytest.mark.parametrize("sizes", [SMALL, FUSED], ids=["separate", "fused"])
@pytest.mark.parametrize("mask", [Causal(), LoadBalancedCausal(2, 512)])
def test_shards_of_queries_compute_their_rows(mask: Mask, sizes: BlockSizes) -> None:
    kernel = make_splash(mask, 512, 512, num_q_heads=2, num_kv_heads=1, q_shards=2, block_sizes=sizes)
    problem, cotangent = problem_of(mask)
    mesh = jax.make_mesh((2,), ("seq",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    rows, every = PartitionSpec(None, None, "seq"), PartitionSpec()

    def run(do: Any, q: Any, k: Any, v: Any) -> Any:
        sharded = jax.shard_map(
            lambda kernel, q, k, v: kernel(q, k, v),
            mesh=mesh,
            in_specs=(kernel.sharding_spec(queries="seq"), rows, every, every),
            out_specs=rows,
            check_vma=False,
        )
        out, pull = jax.vjp(lambda *x: sharded(kernel, *x), q, k, v)
        return out, pull(do)

    do, q, k, v = heads_first(cotangent.out, problem.q, problem.k, problem.v)
    assert_right(problem, cotangent, *jax.jit(run)(do, q, k, v))
    with pytest.raises(ValueError, match="2 shards of queries: call it in shard_map"):
        kernel(q, k, v)


@pytest.mark.long
@pytest.mark.parametrize("sizes", [SMALL, FUSED], ids=["separate", "fused"])
@pytest.mark.parametrize(("kv_heads", "by_head"), [(2, True), (2, False), (1, True)])
def test_shards_of_heads_and_queries_together(kv_heads: int, by_head: bool, sizes: BlockSizes) -> None:
    """Two shards of heads, each with its own masks, and two of queries; one key/value head goes to every shard."""
    allowed = np.random.default_rng(0).random((1, 4 if by_head else 1, 256, 256)) < 0.2
    allowed[..., 128:, :128] = False
    allowed[..., 0] = True
    kernel = make_splash(
        Dense(allowed),
        256,
        256,
        num_q_heads=4,
        num_kv_heads=kv_heads,
        head_shards=2,
        q_shards=2,
        block_sizes=sizes,
    )
    problem, cotangent = problem_of(Dense(allowed), 4, kv_heads, 256)
    do, q, k, v = heads_first(cotangent.out, problem.q, problem.k, problem.v)
    mesh = jax.make_mesh((2, 2), ("heads", "seq"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    rows = PartitionSpec(None, "heads", "seq")
    keys = PartitionSpec(None, "heads" if kv_heads > 1 else None)

    def run(q: Any, k: Any, v: Any) -> Any:
        return jax.shard_map(
            lambda kernel, q, k, v: kernel(q, k, v),
            mesh=mesh,
            in_specs=(kernel.sharding_spec(heads="heads", queries="seq"), rows, keys, keys),
            out_specs=rows,
            check_vma=False,
        )(kernel, q, k, v)

    out, pull = jax.vjp(jax.jit(run), q, k, v)
    assert_right(problem, cotangent, out, pull(do))


def test_shards_are_not_taken_for_the_whole() -> None:
    masks = Dense(np.random.default_rng(0).random((1, 4, 128, 128)) < 0.5)
    kernel = make_splash(masks, 128, 128, num_q_heads=4, head_shards=2, block_sizes=SMALL)
    with pytest.raises(ValueError, match="masks for 4 heads in shards of 2: call it in shard_map"):
        kernel(*operands(4, 4, 128))
    with pytest.raises(ValueError, match="q must have 1 heads, as the kernel was built for, got 2"):
        make_splash(Full(), 128, 128, num_q_heads=2, head_shards=2)(*operands(2, 2, 128))
    with pytest.raises(ValueError, match=r"num_kv_heads = 2 must be multiples of head_shards = 4"):
        make_splash(Full(), 128, 128, num_q_heads=4, num_kv_heads=2, head_shards=4)
    with pytest.raises(ValueError, match="q_shards is for static masks"):
        make_splash_dynamic(jnp.ones((1, 1, 128, 128), bool), num_q_heads=1, q_shards=2)


@pytest.mark.parametrize("sizes", [SMALL, FUSED], ids=["separate", "fused"])
@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (2, 1)])
def test_a_mask_known_at_run_time_may_be_traced(shape: tuple[int, int], sizes: BlockSizes) -> None:
    allowed = np.random.default_rng(0).random((*shape, 300, 300)) < 0.02
    allowed[..., 128:] = False  # a column of blocks that turns out to be empty
    allowed[..., 0] = True
    problem, cotangent = problem_of(Dense(allowed), 4, 2, 300, batch=2)
    do, q, k, v = heads_first(cotangent.out, problem.q, problem.k, problem.v)

    def run(allowed: Any, q: Any, k: Any, v: Any) -> Any:
        kernel = make_splash_dynamic(allowed, num_q_heads=4, num_kv_heads=2, block_sizes=sizes)
        return kernel(q, k, v)

    out, pull = jax.vjp(lambda *x: jax.jit(run)(jnp.asarray(allowed), *x), q, k, v)
    assert_right(problem, cotangent, out, pull(do))


def test_the_kernel_object_is_a_pytree_that_jit_takes() -> None:
    kernel = make_splash(Causal(), 256, 256, num_q_heads=2, block_sizes=SMALL)
    q, k, v = operands(2, 2, 256)
    out = jax.jit(lambda kernel, *x: kernel(*x))(kernel, q, k, v)
    np.testing.assert_array_equal(out, jax.jit(kernel)(q, k, v))


def test_the_mask_value_stands_for_queries_that_attend_to_nothing() -> None:
    kernel = make_splash(Causal(-2), 128, 128, num_q_heads=1, block_sizes=SMALL, mask_value=-1e30)
    _, residuals = kernel(*operands(1, 1, 128), save_residuals=True)
    for name in ("logsumexp", "max_logits"):
        assert (residuals[name][..., :2] == -1e30).all()
        assert (residuals[name][..., 2:] > -1e3).all()


def test_blocks_that_do_not_fit_are_refused_with_ones_that_would() -> None:
    q, k, v = operands(1, 1, 4096)
    huge = make_splash(Full(), 4096, 4096, num_q_heads=1, block_sizes=BlockSizes.uniform(4096, 4096))
    with pytest.raises(
        ValueError, match=r"forward kernel, q 4096.* over the limit of 16.0 MiB \(a core of v4, the smal"
    ):
        huge(q, k, v)
    tight = make_splash(Full(), 4096, 4096, num_q_heads=1, vmem_limit_bytes=2**20)
    with pytest.raises(ValueError, match=r"limit of 1.0 MiB \(vmem_limit_bytes\); .* fit \(q x kv\): 128 x 128"):
        tight(q, k, v)


@pytest.mark.parametrize(
    ("kind", "mib"), [("TPU v4", 16), ("TPU v5 lite", 128), ("TPU v5", 64), ("TPU v6 lite", 128), ("TPU7x", 64)]
)
def test_the_limit_is_that_of_the_chip_that_is_traced_for(kind: str, mib: int) -> None:
    device = AbstractDevice(device_kind=kind, platform="tpu", num_cores=1)
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        assert find_limit(None).bytes == mib * 2**20
    assert find_limit(None).bytes == 16 * 2**20


def kernels_of(call: Any, dtype: Any, mask: Mask, depth: int = 64, length: int = 256, **options: Any) -> set[str]:
    """List the kernels of a call's backward pass."""
    x = jnp.zeros((1, length, 2, depth), dtype)
    traced = jax.make_jaxpr(jax.grad(lambda q: call(q, x, x, mask=mask, **options).astype(jnp.float32).sum()))(x)
    return set(re.findall(r"splash_mha_(d\w+)", str(traced)))


ONE, TWO = {"dq_dkv"}, {"dq", "dkv"}


@pytest.mark.parametrize(
    ("kind", "mask", "depth", "kernels"),
    [
        *((kind, mask, 128, ONE) for kind in KINDS for mask in (Causal(), Full(), Window(1023, 0))),
        ("TPU v6 lite", Window(1023, 0), 256, TWO),  # less than 5% shorter: dq takes long to come and go
        ("TPU v5 lite", Causal(), 512, TWO),  # deeper than anything that was tuned
    ],
)
def test_which_backward_a_call_takes_that_names_no_blocks(kind: str, mask: Mask, depth: int, kernels: set[str]) -> None:
    device = AbstractDevice(device_kind=kind, platform="tpu", num_cores=1)
    with jax.enable_x64(False), use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        assert kernels_of(attention, jnp.bfloat16, mask, depth, length=4096) == kernels
        assert kernels_of(attention, jnp.float32, mask, depth, length=512) == TWO


@pytest.mark.parametrize("options", [{}, {"soft_cap": 5.0}, {"segment_ids": (np.zeros((1, 256), np.int32),) * 2}])
def test_the_gate_judges_the_backward_that_a_chip_would_run(options: dict[str, Any]) -> None:
    """One kernel in bf16, and two in f32: of both it sees every feature."""
    judged = implementation_registry.find_implementation("splash_tpu").call
    for mask in (Causal(), Window(40, 0), Dense(np.tri(256, dtype=bool)[None, None])):
        assert kernels_of(judged, jnp.bfloat16, mask, **options) == ONE
        assert kernels_of(judged, jnp.float32, mask, **options) == TWO
    named = functools.partial(attention, block_sizes=SMALL)
    assert kernels_of(named, jnp.bfloat16, Causal(), **options) == TWO  # sizes that say so are obeyed


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"q": 100}, "block size q must be a positive multiple of 128, got 100"),
        ({"kv": 0}, "block size kv must be a positive multiple of 128, got 0"),
        ({"kv": 512, "kv_compute": 384}, "kv_compute must divide kv = 512, got 384"),
    ],
)
def test_block_sizes_that_cannot_be_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Blocks(**sizes)


def test_layouts_and_head_counts_are_checked() -> None:
    with pytest.raises(ValueError, match="layout of k must be head_dim_minor or sequence_minor, got 'rows'"):
        Layouts(k="rows")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_q_heads = 3 must be a multiple of num_kv_heads = 2"):
        make_splash(Full(), 128, 128, num_q_heads=3, num_kv_heads=2)
    with pytest.raises(ValueError, match="q_length = 130 must be a multiple of q_shards = 4"):
        make_splash(Full(), 130, 128, num_q_heads=1, q_shards=4)
    with pytest.raises(ValueError, match="k must have 2 heads, as the kernel was built for, got 1"):
        make_splash(Full(), 512, 512, num_q_heads=2)(*operands(2, 1))


@pytest.mark.parametrize(("given", "message"), [({"bias": jnp.zeros((1, 1, 1, 8))}, "bias"), ({}, "f16")])
def test_what_it_lacks_is_refused_by_name(given: Any, message: str) -> None:
    x = jnp.zeros((1, 8, 1, 64), jnp.float32 if given else jnp.float16)
    with pytest.raises(NotImplementedError, match=f"splash_tpu does not support {message}"):
        attention(x, x, x, mask=Full(), **given)
