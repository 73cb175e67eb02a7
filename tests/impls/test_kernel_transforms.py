"""Our kernels with explicit shardings, in checked shard_maps, with symbolic batch sizes, and under derivatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from cases.case import Case
from cases.masks import Causal, Mask
from cases.moba_mask import Moba
from cases.operand_values import Problem, draw_problem
from conformance.execution.implementation_registry import find_implementation
from impls import ragged, splash_tpu
from tests.comparison_asserts import assert_right, compute_expected

KERNELS = ("dot_product", "block_flash", "moba", "moba_dense", "splash_tpu", "flash_gpu", "ragged")


def problem_of(name: str, **sizes: Any) -> Problem:
    """Draw a small causal problem that the kernel supports."""
    mask = "moba-8-2" if name.startswith("moba") else "causal"
    sizes = {"batch": 4, "q_length": 32, "kv_length": 32, "num_q_heads": 4, "num_kv_heads": 4, "head_dim": 16} | sizes
    phase = "prefill" if name == "ragged" else "train"
    return draw_problem(Case(phase=phase, mask=mask, v_head_dim=16, **sizes))


def call_of(name: str) -> Callable[..., Any]:
    mask: Mask = Moba(8, 2) if name.startswith("moba") else Causal()
    kernel = find_implementation(name).call
    return lambda q, k, v: kernel(q, k, v, mask=mask)


def _spec(*axes: str | None) -> Any:
    return PartitionSpec(*axes)


@pytest.mark.parametrize("spec", [("x",), (None, None, "x"), (None, "x")], ids=["batch", "heads", "queries"])
@pytest.mark.parametrize("name", KERNELS)
def test_explicit_shardings_are_taken_and_given_back(name: str, spec: tuple[str | None, ...]) -> None:
    problem = problem_of(name)
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        keys = spec if spec != (None, "x") else ()
        sharded = [
            jax.device_put(x, NamedSharding(mesh, _spec(*axes)))
            for x, axes in ((problem.q, spec), (problem.k, keys), (problem.v, keys))
        ]
        out = jax.jit(call_of(name))(*sharded)
    assert tuple(out.sharding.spec)[: len(spec)] == spec
    assert_right({"out": out}, compute_expected(problem))


@pytest.mark.long
@pytest.mark.parametrize("name", KERNELS)
def test_a_batch_size_may_be_left_open_in_an_export(name: str) -> None:
    (batch,) = export.symbolic_shape("b")
    problem = problem_of(name, batch=3)
    shapes = [jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype) for x in (problem.q, problem.k, problem.v)]
    exported = export.export(jax.jit(call_of(name)))(*shapes)
    assert_right({"out": exported.call(problem.q, problem.k, problem.v)}, compute_expected(problem))


@pytest.mark.parametrize("name", ["ragged_tpu", "ragged_gpu"])
def test_an_open_batch_size_is_refused_where_steps_are_listed_for_each_sequence(name: str) -> None:
    (batch,) = export.symbolic_shape("b")
    shape = jax.ShapeDtypeStruct((batch, 8, 2, 16), jnp.float32)
    with pytest.raises(NotImplementedError, match="does not support a batch size that is left open"):
        export.export(jax.jit(call_of(name)))(shape, shape, shape)


@pytest.mark.parametrize("spec", [("x",), (None, None, "x")], ids=["batch", "heads"])
def test_tpu_kernels_lower_in_a_shard_map_that_checks_over_which_axes_values_differ(spec: tuple[Any, ...]) -> None:
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    q = jnp.ones((4, 256, 4, 128), jnp.bfloat16)

    def trained(q: Any, k: Any, v: Any) -> Any:
        def loss(*qkv: Any) -> Any:
            return splash_tpu.attention(*qkv, mask=Causal(), interpret=False).astype(jnp.float32).sum()

        return jax.grad(loss, argnums=(0, 1, 2))(q, k, v)

    def decoded(q: Any, k: Any, v: Any) -> Any:
        return ragged.attention(q[:, :4], k, v, mask=Causal(252), backend="tpu", interpret=False)

    for function, out in ((trained, (_spec(*spec),) * 3), (decoded, _spec(*spec))):
        sharded = jax.shard_map(function, mesh=mesh, in_specs=_spec(*spec), out_specs=out)
        jax.jit(sharded).trace(q, q, q).lower(lowering_platforms=("tpu",))


def squared(name: str) -> Callable[[Any], Any]:
    """Build a scalar function of the queries alone."""
    problem = problem_of(name, batch=1, num_q_heads=1, num_kv_heads=1)
    call = call_of(name)
    return lambda q: (call(q, jnp.asarray(problem.k), jnp.asarray(problem.v)) ** 2).sum()


def second(name: str) -> Any:
    q = jnp.asarray(problem_of(name, batch=1, num_q_heads=1, num_kv_heads=1).q)
    return jax.grad(lambda q: (jax.grad(squared(name))(q) ** 2).sum())(q)


@pytest.mark.parametrize("name", ["splash_tpu", "flash_gpu", "moba"])
def test_a_second_derivative_that_a_kernel_lacks_is_refused_in_a_sentence(name: str) -> None:
    with pytest.raises(NotImplementedError, match=f"{name} has .*a second derivative of it was asked for .*: take"):
        second(name)


@pytest.mark.long
@pytest.mark.parametrize("name", ["block_flash", "dot_product", "moba_dense"])
def test_a_second_derivative_is_computed_by_the_others(name: str) -> None:
    assert np.isfinite(second(name)).all()


def test_moba_has_second_derivatives_in_forward_mode() -> None:
    q = jnp.asarray(problem_of("moba", batch=1, num_q_heads=1, num_kv_heads=1).q)
    moved = jax.jvp(jax.grad(squared("moba")), (q,), (q,))[1]
    assert np.isfinite(moved).all()
