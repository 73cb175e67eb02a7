"""Compiling for GPUs on a machine without one: what is told to the compiler, and that our kernels compile."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from conformance import gpu_targets
from conformance.gpu_targets import TARGETS, CompilerMissing, GpuTarget

ROOT = Path(__file__).parent.parent
# One process for each architecture: kernels are cached in a process regardless of it.
PROGRAM = """
import sys

from conformance import gpu_targets

import jax
import jax.numpy as jnp

from cases.masks import Causal
from impls import flash_gpu

target = next(target for target in gpu_targets.TARGETS if target.name == sys.argv[1])
dtype = jnp.dtype(sys.argv[2])


def loss(q, k, v):
    out = flash_gpu.attention(q, k, v, mask=Causal(), interpret=False)
    return out.astype(jnp.float32).sum()


shapes = ((1, 1000, 4, 64), (1, 1000, 2, 64), (1, 1000, 2, 64))
x = gpu_targets.arguments(target, tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes))
compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*x).compile()
print("temporaries", compiled.memory_analysis().temp_size_in_bytes)
"""

DECODE_PROGRAM = """
import sys

from conformance import gpu_targets

import jax
import jax.numpy as jnp

from cases.masks import Window
from impls import ragged

target = next(target for target in gpu_targets.TARGETS if target.name == sys.argv[1])
dtype = jnp.dtype(sys.argv[2])


def decode(q, k, v, lengths):
    options = {"mask": Window(4095, 0), "lengths": lengths, "positions": lengths - 1, "soft_cap": 30.0}
    return ragged.attention(q, k, v, **options, backend="gpu", interpret=False)


shapes = ((4, 1, 8, 128), (4, 9000, 2, 128), (4, 9000, 2, 128))
x = (*(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes), jax.ShapeDtypeStruct((4,), jnp.int32))
compiled = jax.jit(decode).lower(*gpu_targets.arguments(target, x)).compile()
print("temporaries", compiled.memory_analysis().temp_size_in_bytes)
"""


def temporaries(program: str, target: GpuTarget, dtype: str) -> int:
    """Temporary bytes of a program that is compiled for the target."""
    if (reason := gpu_targets.missing()) is not None:
        pytest.skip(reason)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    found = subprocess.run(
        [sys.executable, "-c", program, target.name, dtype],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        timeout=300,
    )
    assert found.returncode == 0, found.stderr[-2000:]
    return int(found.stdout.split()[1])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_gradients_of_our_kernel_compile_to_machine_code(target: GpuTarget, dtype: str) -> None:
    # dq, dk and dv aside: the saved out, two values a row, and the schedule; not the 16 MB of T * S values in f32.
    assert temporaries(PROGRAM, target, dtype) < 2 * 1000 * 4 * 64 * 4


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_our_decode_kernel_compiles_to_machine_code_and_leaves_the_cache_where_it_is(
    target: GpuTarget, dtype: str
) -> None:
    # One part for each split, 16 padded rows and the two statistics; not a copy of the 18 MB of keys.
    assert temporaries(DECODE_PROGRAM, target, dtype) < 4 * 2**20


def test_without_the_wheels_it_says_which_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_targets, "_found", lambda module: False)
    with pytest.raises(CompilerMissing, match=r"jax_cuda13_plugin not installed: .* needs the extra gpu-compile"):
        gpu_targets.sharding(TARGETS[0])


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_the_description_has_what_kernels_are_checked_against(target: GpuTarget) -> None:
    assert f"shared_memory_per_block_optin: {target.shared_memory_per_block}\n" in target.config
    assert target.config.count("{") == target.config.count("}")
    # Matrix instructions of Hopper and Blackwell are in the architecture-specific set.
    assert ("ACCELERATED_FEATURES" in target.config) == target.architecture.endswith("a") == (target.major > 8)
