"""XLA compiles right programs on CPU under the flags of the judging process."""

from __future__ import annotations

import functools
import gc
import importlib.util
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conformance import environment
from conformance.truth.comparison import compare
from conformance.truth.rounding_bounds import Bounded
from conformance.truth.roundoff import U, compute_gamma
from tests.comparison_asserts import LIMIT


@jax.jit
def product_sum(x: jax.Array, y: jax.Array) -> jax.Array:
    """Sum products over the last axis and two axes of size 1, as the D of a backward pass under two vmaps does."""
    long = (1, 1, *x.shape)
    return jnp.sum(x.astype(jnp.float32).reshape(long) * y.astype(jnp.float32).reshape(long), axis=(0, 1, 4))


@pytest.mark.parametrize("shape", [(1, 128, 64), (8, 100, 128)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_sum_of_products_is_compiled_soundly(shape: tuple[int, ...], dtype: str) -> None:
    rng = np.random.default_rng(0)
    x, y = (jnp.asarray(rng.normal(size=shape), dtype) for _ in range(2))
    products = np.asarray(x, np.float64) * np.asarray(y, np.float64)
    bound = (U + compute_gamma(shape[-1])) * np.abs(products).sum(-1)  # each product is rounded, then their sum
    assert compare(product_sum(x, y), Bounded(products.sum(-1), bound)).ratio <= LIMIT


def test_a_reduction_after_a_product_is_compiled_soundly() -> None:
    """Check the program of jax-ml/jax#39103."""
    count = jnp.arange(32_769, dtype=jnp.float32)
    x = jnp.stack((count, jnp.zeros_like(count), jnp.zeros_like(count)), axis=1)
    squares = jax.jit(jax.vmap(lambda row: jnp.sum((jnp.eye(3) @ row) ** 2)))(x)
    exact = np.asarray(count, np.float64) ** 2
    assert compare(squares, Bounded(exact, U * exact)).ratio <= 1  # one rounding: the rest is added zeros


@pytest.mark.parametrize("q_length", [1, 2])
def test_products_that_accumulate_in_f32_are_differentiated_at_any_length(q_length: int) -> None:
    q, k = jnp.ones((1, q_length, 2, 64), "bfloat16"), jnp.ones((1, 72, 2, 64), "bfloat16")
    logits, pull = jax.vjp(lambda q, k: jnp.einsum("btnh,bsnh->bnts", q, k, precision="BF16_BF16_F32"), q, k)
    dq, dk = jax.jit(pull)(jnp.ones_like(logits))
    assert (float(dq[0, 0, 0, 0]), float(dk[0, 0, 0, 0])) == (72.0, q_length)


def biased_logsumexp(q: jax.Array, k: jax.Array, bias: jax.Array) -> jax.Array:
    """Compute the logsumexp of a plain function, whose scale and bias are a product and a sum."""
    logits = jnp.einsum("btnh,bsnh->bnts", q, k, precision="highest") * 0.3 + bias
    top = jnp.max(logits, axis=-1, keepdims=True)
    return top[..., 0] + jnp.log(jnp.exp(logits - top).sum(-1))


@pytest.mark.skipif(platform.machine() not in environment._X86, reason="instruction sets are limited on x86 only")
def test_a_value_that_is_computed_twice_is_equal_to_itself() -> None:
    """The gradient of a maximum looks for the elements that are equal to it."""
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.normal(size=(1, length, 2, 72)), jnp.float32) for length in (48, 200))
    bias = jnp.asarray(rng.normal(size=(1, 2, 1, 1)), jnp.float32)
    gradients = jax.jit(jax.grad(lambda *operands: biased_logsumexp(*operands).sum(), (0, 1, 2)))(q, k, bias)
    assert all(bool(jnp.isfinite(gradient).all()) for gradient in gradients)
    # The weights of a row are 1 together: their sums, the quotients and the sum over all rows are rounded.
    rows = np.full(bias.shape, 48.0)
    assert compare(gradients[2], Bounded(rows, rows * compute_gamma(48 * 200 + 2 * 200 + 1))).ratio <= LIMIT


@pytest.mark.parametrize(
    ("driver", "platforms", "fast"),
    [(False, None, True), (True, "cpu", True), (True, None, False), (True, "cuda", False)],
)
def test_what_is_judged_on_a_gpu_is_compiled_as_for_users(
    driver: bool, platforms: str | None, fast: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    variables = {} if platforms is None else {"JAX_PLATFORMS": platforms}
    monkeypatch.delitem(sys.modules, "jax")
    monkeypatch.setattr(os, "environ", variables)
    monkeypatch.setattr(environment, "NVIDIA_DRIVER", str(tmp_path if driver else tmp_path / "absent"))
    environment.prepare_environment()
    assert ("--xla_backend_optimization_level=0" in variables["XLA_FLAGS"].split()) == fast
    # Nor are there trials of what computes a product fastest, which end otherwise each time; what fails is judged with.
    assert ("--xla_gpu_autotune_level=0" in variables["XLA_FLAGS"].split()) == (not fast)
    assert (environment.build_default_options() == {"xla_gpu_autotune_level": 4}) == (not fast)
    assert "--xla_force_host_platform_device_count=4" in variables["XLA_FLAGS"].split()
    assert ("JAX_SKIP_CUDA_CONSTRAINTS_CHECK" in variables) == (not driver)  # or the compiler would not come up


def test_cycles_are_looked_for_rarely_and_not_among_what_is_there() -> None:
    before = gc.get_threshold()
    gc.set_threshold(700)
    try:
        environment.collect_garbage_rarely()
        assert gc.get_threshold()[0] > 7000
        assert gc.get_freeze_count() > 0
    finally:
        gc.set_threshold(*before)


def test_libtpu_is_told_where_to_write_schedules_by_each_process_for_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = tmp_path / "accel0"
    monkeypatch.setattr(environment, "_TPU_DEVICES", (str(device),))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--theirs=1")
    seen = []
    for number in (7, 8):
        monkeypatch.setattr(os, "getpid", functools.partial(int, number))
        environment.set_flags()
        seen.append(os.environ["LIBTPU_INIT_ARGS"])
        assert (found := environment.find_schedule_folder()) is not None
        assert found.name == f"conformance-schedules-{number}"
    assert seen[1] == seen[0].replace("schedules-7", "schedules-8")
    assert seen[0].startswith("--theirs=1 --xla_jf_dump_to=")
    device.touch()
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--theirs=1")
    environment.set_flags()
    assert os.environ["LIBTPU_INIT_ARGS"] == "--theirs=1"
    assert environment.find_schedule_folder() is None


def ended() -> int:
    """Return the number of a process that has ended, and that no other process has yet."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_schedules_of_processes_that_were_killed_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_TPU_DEVICES", ())
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "")
    gone, just_gone = ended(), ended()
    theirs = tmp_path / "theirs"
    names = {
        "gone": f"conformance-schedules-{gone}",
        "just gone": f"conformance-schedules-{just_gone}",
        "living": f"conformance-schedules-{os.getpid()}",
        "of root, where another user asks": "conformance-schedules-1",
        "no number": f"conformance-schedules-{gone}-kept",
        "zero": "conformance-schedules-0",
        "no process can have it": f"conformance-schedules-{10**30}",
    }
    for name in (*names.values(), theirs.name):
        (tmp_path / name).mkdir()
        (tmp_path / name / "schedule.txt").touch()
    link = tmp_path / f"conformance-schedules-{ended()}"
    link.symlink_to(theirs)
    before = {path.name for path in tmp_path.iterdir()}
    for name in before - {names["just gone"]}:
        os.utime(tmp_path / name, (0, 0), follow_symlinks=False)
    environment.set_flags()
    assert before - {path.name for path in tmp_path.iterdir()} == {names["gone"]}
    assert (theirs / "schedule.txt").exists()


def test_schedules_of_another_user_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / f"conformance-schedules-{ended()}"
    folder.mkdir()
    os.utime(folder, (0, 0))
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    environment._remove_abandoned_folders(tmp_path)
    assert folder.exists()
    monkeypatch.undo()
    environment._remove_abandoned_folders(tmp_path)
    assert not folder.exists()
